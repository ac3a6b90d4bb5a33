"""Subjects: validity, matching, and the index of subscriptions by subject."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_CACHED_SUBJECTS = 4096


def is_valid(subject: str) -> bool:
    """Whether a subscription may use this subject: no empty token, no white space, `>` only as the last token."""
    if not subject or any(char in " \t\n\r\f" for char in subject):
        return False
    tokens = subject.split(".")
    return all(tokens) and ">" not in tokens[:-1]


def has_wildcard(subject: str) -> bool:
    return ("*" in subject or ">" in subject) and any(token in ("*", ">") for token in subject.split("."))


def is_literal(subject: str) -> bool:
    return is_valid(subject) and not has_wildcard(subject)


def matches(pattern: str, subject: str) -> bool:
    if pattern == subject or pattern == ">":
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    return is_subset(subject, pattern)


def is_subset(subject: str, pattern: str) -> bool:
    """Whether `pattern` matches every subject that `subject` matches."""
    left, right = subject.split("."), pattern.split(".")
    for index, part in enumerate(right):
        if part == ">":
            return len(left) > index
        if index >= len(left) or left[index] == ">":
            return False
        if part not in ("*", left[index]) or (part != "*" and left[index] == "*"):
            return False
    return len(left) == len(right)


def collide(one: str, other: str) -> bool:
    """Whether at least one subject matches both patterns."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


class _Node(Generic[T]):
    __slots__ = ("children", "items")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.items: dict[int, T] = {}


class Sublist(Generic[T]):
    """Map subject patterns to items; a literal subject finds the items of all matching patterns, oldest first."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._next = 0
        self._cache: dict[str, list[T]] = {}

    def insert(self, pattern: str, item: T) -> int:
        """Add an item and return the key to remove it with."""
        node = self._root
        for token in pattern.split("."):
            node = node.children.setdefault(token, _Node())
        self._next += 1
        node.items[self._next] = item
        self._cache.clear()
        return self._next

    def remove(self, pattern: str, key: int) -> None:
        """Remove an item; an unknown key is ignored."""
        path = [self._root]
        tokens = pattern.split(".")
        for token in tokens:
            child = path[-1].children.get(token)
            if child is None:
                return
            path.append(child)
        path[-1].items.pop(key, None)
        for parent, token, node in zip(reversed(path[:-1]), reversed(tokens), reversed(path), strict=False):
            if node.items or node.children:
                break
            del parent.children[token]
        self._cache.clear()

    def match(self, subject: str) -> list[T]:
        """Return the items whose pattern matches a literal subject."""
        found = self._cache.get(subject)
        if found is None:
            tokens = subject.split(".")
            found = (
                [item for _, item in sorted(self._walk(self._root, tokens, 0), key=lambda pair: pair[0])]
                if all(tokens)
                else []
            )
            if len(self._cache) > _CACHED_SUBJECTS:
                self._cache.clear()
            self._cache[subject] = found
        return found

    def _walk(self, node: _Node[T], tokens: list[str], depth: int) -> Iterator[tuple[int, T]]:
        if depth == len(tokens):
            yield from node.items.items()
            return
        if (rest := node.children.get(">")) is not None:
            yield from rest.items.items()
        if (star := node.children.get("*")) is not None:
            yield from self._walk(star, tokens, depth + 1)
        token = tokens[depth]
        if token not in ("*", ">") and (child := node.children.get(token)) is not None:
            yield from self._walk(child, tokens, depth + 1)
