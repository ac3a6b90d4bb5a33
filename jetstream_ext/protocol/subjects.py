"""Subjects, filters and names: what is valid, and which subjects a filter matches."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.frames import check_line

# Subjects are parts of lines of a text protocol in UTF-8: no control characters, white space or lone surrogates.
_FORBIDDEN_CHARACTERS: Final = frozenset(chr(code) for code in (*range(33), 127, *range(0xD800, 0xE000)))

NOT_INDEXED: Final = "\x7f"
"""Servers from 2.11 to 2.15 store subjects with this character, and find them only by sequence, not by a filter."""

# What `quote` must not encode besides letters and digits: all other printable ASCII characters but blank, *, > and %.
_SAFE: Final = "".join(map(chr, set(range(33, 127)).difference(b"*>%")))
_DOT_BESIDE_NOTHING: Final = re.compile(r"\A\.|(?<=\.)\.|\.\Z")

_LONGEST_NAME: Final = 255  # in every server; it cannot be configured


def check_type(text: str, what: str) -> None:
    """Raise TypeError unless `text` is a str."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be str, not {type(text).__name__}")


def _check_text(text: str, what: str) -> None:
    if type(text) is not str:
        check_type(text, what)
    if not text or not _FORBIDDEN_CHARACTERS.isdisjoint(text):
        raise BadSubjectError(f"{what} {text!r} is empty or has white space or control characters")


def check_subject(subject: str) -> None:
    """Raise BadSubjectError unless messages can be published to `subject`, and TypeError if it is not a str."""
    _check_text(subject, "subject")
    for token in subject.split("."):
        if not token:
            raise BadSubjectError(f"subject {subject!r} has an empty token")
        if token in ("*", ">"):
            raise BadSubjectError(f"subject {subject!r} has a wildcard; messages need a literal subject")


def check_filter(subject: str) -> None:
    """Raise BadSubjectError unless `subject` is a valid filter, wildcards or not, and TypeError if it is not a str."""
    _check_text(subject, "subject filter")
    tokens = subject.split(".")
    if not all(tokens) or ">" in tokens[:-1]:
        raise BadSubjectError(f"subject filter {subject!r} has an empty token, or a '>' that is not its last token")


def check_name(name: str, what: str) -> None:
    """Raise BadSubjectError unless `name` can name a stream, consumer or bucket, and TypeError if it is not a str."""
    _check_text(name, what)
    if len(name.encode()) > _LONGEST_NAME:
        raise BadSubjectError(f"{what} {name[:64]!r}… is longer than the {_LONGEST_NAME} bytes that servers accept")
    if not set(".*>/\\").isdisjoint(name):
        raise BadSubjectError(f"{what} {name!r} has one of . * > / \\, which are not allowed in a name")


def covers(wide: str, narrow: str) -> bool:
    """Whether the filter `wide` matches every subject that the filter or literal subject `narrow` matches."""
    if wide == narrow:
        return True
    if wide[-2:] in (">", ".>") and "*" not in wide:  # nearly every subject of a stream
        return narrow.startswith(wide[:-1])
    wide_tokens, narrow_tokens = wide.split("."), narrow.split(".")
    for index, part in enumerate(wide_tokens):
        if part == ">":
            return len(narrow_tokens) > index
        if index >= len(narrow_tokens) or narrow_tokens[index] == ">" or part not in ("*", narrow_tokens[index]):
            return False
    return len(wide_tokens) == len(narrow_tokens)


def covering(filters: Sequence[str]) -> str:
    """Return one filter that matches what any of `filters` matches."""
    if len(filters) == 1:
        return filters[0]
    tokens = [each.split(".") for each in filters]
    shared = 0
    while all(shared < len(each) - 1 and each[shared] == tokens[0][shared] for each in tokens):
        shared += 1
    return ".".join((*tokens[0][:shared], ">"))


def overlap(one: str, other: str) -> bool:
    """Whether some literal subject matches both filters."""
    ones, others = one.split("."), other.split(".")
    for left, right in zip(ones, others, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(ones) == len(others)


def is_literal(pattern: str) -> bool:
    """Whether a filter has neither ``*`` nor ``>``, not even within a token such as ``a*``, which servers take literally."""
    return "*" not in pattern and ">" not in pattern


def can_be_asked_for(subject: str) -> bool:
    """Whether a request for a stored subject, as a server sent it, is for this one alone.

    Servers store subjects with wildcards, which match others, and with bytes that are not UTF-8, which they send as U+FFFD.
    """
    try:
        check_subject(subject)
    except BadSubjectError:
        return False
    return "\ufffd" not in subject


def filter_for(subject: str) -> str:
    """Return a filter that matches a stored subject as a server sent it.

    It has ``*`` for tokens whose bytes are not known, and for ``>``, which a filter can have only at its end.
    """
    return ".".join("*" if part == ">" or "\ufffd" in part else part for part in subject.split("."))


def anything(_: str) -> bool:
    """The function that `matcher` returns for a filter that matches every subject."""
    return True


def matcher(filters: Collection[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a stored message's subject matches one of `filters`."""
    if ">" in filters:
        return anything
    literals = frozenset(filter(is_literal, filters))
    patterns = [pattern.split(".") for pattern in filters if pattern not in literals]
    if not patterns:
        return literals.__contains__
    tokens = {"*": r"[^.]+", ">": r".+"}
    regex = "|".join(r"\.".join(tokens.get(token) or re.escape(token) for token in each) for each in patterns)
    match = re.compile(regex).fullmatch
    return lambda subject: subject in literals or match(subject) is not None


class SubjectMatcher:
    """Matches subjects of stored messages against filters, with a cache: the subjects of a stream repeat."""

    _CACHE_LIMIT = 65_536

    def __init__(self, filters: Collection[str]) -> None:
        self._matches = matcher(filters)
        self._known: dict[bytes, bool] = {}

    def mask(self, subjects: Sequence[bytes]) -> list[bool]:
        """Return for each subject whether one of the filters matches it."""
        known = self._known
        if len(known) > self._CACHE_LIMIT:
            known.clear()
        for subject in set(subjects).difference(known):
            known[subject] = self._matches(subject.decode("utf-8", "surrogateescape"))
        return [known[subject] for subject in subjects]


def addressed(subject: str, prefix: str) -> str:
    """Return where a message for `subject` is sent by a context whose API has `prefix`, such as ``$JS.<domain>.API``.

    The key of a bucket goes through the API, as in nats.go: otherwise a bucket of the same name nearby would take it. Servers
    map no other subjects so.
    """
    return f"{prefix}.{subject}" if prefix not in ("", "$JS.API") and subject.startswith("$KV.") else subject


@lru_cache(4096)
def key_tokens(key: str) -> str:
    """Return a key as tokens of a subject: percent-encoded as in URLs, so that `urllib.parse.unquote` returns the key.

    Encoded are blanks, control characters, ``*``, ``>``, ``%``, what is not ASCII, and a dot that begins or ends the key or
    follows another one.

    Raises:
        ValueError: The key is empty, or has half of a surrogate pair.
    """
    if not key:
        raise ValueError("a key of the state must not be empty")
    try:
        text = quote(key, safe=_SAFE)
    except UnicodeEncodeError:
        raise ValueError(f"a key of the state cannot be encoded as UTF-8: {key[:64]!r}") from None
    return _DOT_BESIDE_NOTHING.sub("%2E", text)


class SubjectCache(dict[str, bytes]):
    """Checked subjects, and the bytes that messages for them are sent to (`addressed`).

    `encode` returns the bytes, or raises as `check_subject` and `check_line` do.
    """

    _LIMIT = 8192

    def __init__(self, reply_size: int = 0, prefix: str = "") -> None:
        super().__init__()
        self._reply_size = reply_size
        self._prefix = prefix
        self._stores: Callable[[str], bool] = anything
        self._stream = ""

    def __missing__(self, subject: str) -> bytes:
        check_subject(subject)
        sent = addressed(subject, self._prefix)
        check_line(sent, self._reply_size)
        if not self._stores(subject):
            raise BadSubjectError(
                f"stream {self._stream!r}, which stores the first message of the batch, does not store subject {subject!r}; all "
                "messages of a batch must be of one stream, so the message was not added; if the stream has just got this "
                "subject, begin another batch"
            )
        if len(self) >= self._LIMIT:
            self.clear()
        known = self[subject] = sent.encode()
        return known

    def limit_to(self, stores: Callable[[str], bool], stream: str) -> None:
        """From now on refuse subjects that a stream does not store, also those that were checked before."""
        self._stores, self._stream = stores, stream
        self.clear()

    encode: Callable[..., bytes] = dict.__getitem__  # no Python code runs for a known subject


def bucket_stream(bucket: str) -> str:
    """Return the name of a bucket's stream (ADR-8)."""
    return f"KV_{bucket}"


def bucket_prefix(bucket: str) -> str:
    """Return what the subject of a key has before it (ADR-8)."""
    return f"$KV.{bucket}."
