"""Subjects: validity, matching, and the table of who is interested in what."""

from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Sublist", "collide", "has_wildcard", "is_literal", "is_subset", "is_valid", "matches"]

T = TypeVar("T")


def is_valid(subject: str) -> bool:
    """Whether it can be subscribed to: no empty part, no blanks, `>` only at the end."""
    if not subject or any(char in " \t\n\r\f" for char in subject):
        return False
    tokens = subject.split(".")
    return all(tokens) and ">" not in tokens[:-1]


def has_wildcard(subject: str) -> bool:
    """Whether a whole part is `*` or `>`."""
    return ("*" in subject or ">" in subject) and any(part in ("*", ">") for part in subject.split("."))


def is_literal(subject: str) -> bool:
    """Whether it names exactly one subject."""
    return is_valid(subject) and not has_wildcard(subject)


def matches(pattern: str, subject: str) -> bool:
    """Whether a literal subject falls under a pattern."""
    if pattern == subject or pattern == ">":
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    return is_subset(subject, pattern)


def is_subset(subject: str, pattern: str) -> bool:
    """Whether everything under `subject` is also under `pattern`."""
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
    """Whether some subject falls under both patterns."""
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
    """A table from subject patterns to items; finds the items of a literal subject in the order they came."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._next = 0
        self._cache: dict[str, list[T]] = {}

    def insert(self, pattern: str, item: T) -> int:
        """Add an item and return its key for `remove`."""
        node = self._root
        for part in pattern.split("."):
            node = node.children.setdefault(part, _Node())
        self._next += 1
        node.items[self._next] = item
        self._cache.clear()
        return self._next

    def remove(self, pattern: str, key: int) -> None:
        """Take out an item; an unknown key is ignored."""
        path = [self._root]
        tokens = pattern.split(".")
        for part in tokens:
            child = path[-1].children.get(part)
            if child is None:
                return
            path.append(child)
        path[-1].items.pop(key, None)
        for parent, part, node in zip(reversed(path[:-1]), reversed(tokens), reversed(path), strict=False):
            if node.items or node.children:
                break
            del parent.children[part]
        self._cache.clear()

    def match(self, subject: str) -> list[T]:
        """Return the items whose pattern covers a subject."""
        found = self._cache.get(subject)
        if found is None:
            pairs = (
                []
                if not all(subject.split("."))
                else sorted(self._walk(self._root, subject.split("."), 0), key=lambda pair: pair[0])
            )
            found = [item for _, item in pairs]
            if len(self._cache) > 4096:
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
        part = tokens[depth]
        if part not in ("*", ">") and (child := node.children.get(part)) is not None:
            yield from self._walk(child, tokens, depth + 1)
