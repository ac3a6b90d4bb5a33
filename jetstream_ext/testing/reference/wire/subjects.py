"""Subjects: validity, matching, and the index of subscriptions by subject."""

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


class Sublist(Generic[T]):
    """Map subject patterns to items; a literal subject finds the items of all matching patterns, oldest first."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[str, T]] = {}
        self._next = 0
        self._cache: dict[str, list[T]] = {}

    def insert(self, pattern: str, item: T) -> int:
        """Add an item and return the key to remove it with."""
        self._next += 1
        self._items[self._next] = (pattern, item)
        self._cache.clear()
        return self._next

    def remove(self, key: int) -> None:
        """Remove an item; an unknown key is ignored."""
        if self._items.pop(key, None) is not None:
            self._cache.clear()

    def match(self, subject: str) -> list[T]:
        """Return the items whose pattern matches a literal subject."""
        found = self._cache.get(subject)
        if found is None:
            items = self._items.values() if is_valid(subject) else ()
            found = [item for pattern, item in items if matches(pattern, subject)]
            if len(self._cache) > _CACHED_SUBJECTS:
                self._cache.clear()
            self._cache[subject] = found
        return found
