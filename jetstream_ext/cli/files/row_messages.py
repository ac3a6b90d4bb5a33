"""How a row of a file becomes a message: its subject, payload and headers, by the options of ``ingest``."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import orjson

from jetstream_ext.cli.files.exact_json import decode_exact, large_integer, repeated_key
from jetstream_ext.cli.files.row_files import JsonRow, Row, RowError, duration_text
from jetstream_ext.protocol.headers import MSG_ID, is_instruction
from jetstream_ext.text import did_you_mean
from jetstream_ext.types import own_headers

_PLACEHOLDER: Final = re.compile(r"\{([^{}]+)\}")
_DIGEST_SIZE: Final = 9  # bytes: 12 characters
_COLUMNS_SHOWN: Final = 20
_DELIMITERS: Final = ";\t|,"
_SUBJECT: Final = "the subject (--subject or --subject-from)"
_PAYLOAD: Final = "the payload (--data-from)"
_HEADERS: Final = "the headers (--headers-from)"


def short_digest(*parts: bytes) -> str:
    """Return a digest of some bytes, in characters that a message id and a subject may have."""
    digest = blake2b(digest_size=_DIGEST_SIZE)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return base64.urlsafe_b64encode(digest.digest()).decode()


def has_lone_brace(subject: str) -> bool:
    """Return whether a brace of a subject pattern belongs to no ``{column}``."""
    return any(brace in _PLACEHOLDER.sub("", subject) for brace in "{}")


@dataclass(frozen=True, slots=True)
class Message:
    """What a row becomes."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] | None
    left_out: tuple[str, ...] = ()  # names of headers that were for other messages

    @property
    def digest(self) -> str:
        """Tells messages with another subject, payload or other headers apart."""
        pairs = b"" if not self.headers else orjson.dumps(list(self.headers.items()))
        return short_digest(self.subject.encode(errors="surrogatepass"), self.payload, pairs)


@dataclass(frozen=True, slots=True)
class RowMapping:
    """The options. In `subject`, ``{column}`` is replaced by the row's value in that column.

    A row of JSON may have no other column than `only`, if that is not empty.
    """

    subject: str
    data_from: str | None = None
    headers_from: str | None = None
    non_finite_as_null: bool = False
    only: tuple[str, ...] = ()

    @property
    def digest(self) -> bytes:
        """Tells mappings apart that make other messages of the same rows."""
        return orjson.dumps([self.subject, self.data_from, self.headers_from, self.non_finite_as_null])

    @property
    def subject_filter(self) -> str | None:
        """A filter that matches all subjects of the file; None if only ``>`` does."""
        if _PLACEHOLDER.search(self.subject) is None:
            return self.subject
        fixed, *_ = _PLACEHOLDER.split(self.subject, maxsplit=1)
        tokens, dot, _ = fixed.rpartition(".")
        return f"{tokens}.>" if dot else None

    def check_columns(self, columns: Collection[str], place: str) -> None:
        """Raise RowError, which names the `place`, if a row with these columns lacks one that the options name."""
        for name, purpose in self._needed():
            if not (name in columns or (purpose == _PAYLOAD and f"{name}_base64" in columns)):
                raise RowError(f"{place}: there is no column {name!r} for {purpose}{_described(columns, name)}")

    def _needed(self) -> Iterator[tuple[str, str]]:
        """Yield each column that the options name, and what it is for."""
        for name in _PLACEHOLDER.findall(self.subject):
            yield name, _SUBJECT
        if self.data_from is not None:
            yield self.data_from, _PAYLOAD
        if self.headers_from is not None:
            yield self.headers_from, _HEADERS

    def message(self, row: Row, place: str) -> Message:
        """Return the message of a row; raise RowError, which names the `place`, if the row cannot be sent."""
        if self.only and (others := row.keys() - self.only):
            raise RowError(
                f"{place}: column {min(others)!r} is none of an export, as the first row is; --no-restore stores each row as JSON"
            )
        if isinstance(row, JsonRow):
            self._check_keys(row, place)
        pairs = [] if self.headers_from is None else self._header_pairs(row, self.headers_from, place)
        own = [pair for pair in pairs if not _is_left_out(pair[0])]
        left_out = tuple(name for name, _ in pairs if _is_left_out(name))
        headers = own_headers(own) if own else None
        return Message(self._subject(row, place), self._payload(row, place), headers, left_out)

    def _check_keys(self, row: JsonRow, place: str) -> None:
        """Raise RowError if the line has a key twice that the message needs: the first value would be lost."""
        keys, text = _keys(self.subject, self.data_from, self.headers_from), row.text
        written = list(keys.values())
        if self.headers_from is not None and isinstance(headers := row.get(self.headers_from), dict):
            written += map(orjson.dumps, headers)
        if not written:
            return
        escaped = b"\\u" in text or b"\\/" in text  # another way to write the same key
        if not escaped and all(text.count(key) < 2 for key in written):
            return
        try:
            found = repeated_key(text, keys, self.headers_from)
        except ValueError as error:  # nested too deeply
            raise RowError(f"{place}: {error}") from error
        if found is not None:
            raise RowError(f"{place}: the key {found!r} is there twice")

    def _subject(self, row: Row, place: str) -> str:
        def value(match: re.Match[str]) -> str:
            found = row.get(match[1])
            if found is None:
                self.check_columns(row, place)
            if isinstance(found, float) and isinstance(row, JsonRow):
                try:
                    found = large_integer(row.text, match[1]) or found
                except ValueError as error:  # nested too deeply
                    raise RowError(f"{place}: {error}") from error
            if isinstance(found, bool) or not isinstance(found, str | int):
                what = "has no value" if found is None else "is neither a string nor an integer"
                raise RowError(f"{place}: column {match[1]!r} {what}; the subject needs it")
            return str(found)

        return _PLACEHOLDER.sub(value, self.subject)

    def _payload(self, row: Row, place: str) -> bytes:
        """Return the row as JSON, or the column `data_from`, whose binary values are base64 in its ``…_base64``."""
        name = self.data_from
        if name is None:
            return row.text if isinstance(row, JsonRow) else self._json(row, row, place)
        found, coded = row.get(name), row.get(f"{name}_base64")
        if coded and not found:
            try:
                return base64.b64decode(coded, validate=True)
            except (TypeError, ValueError, binascii.Error) as error:
                raise RowError(f"{place}: column {name + '_base64'!r} is not base64") from error
        if isinstance(found, bytes):
            return found
        if isinstance(found, str):
            return found.encode()
        if found is None:
            self.check_columns(row, place)
            raise RowError(f"{place}: column {name!r} has no value; the payload needs it")
        if isinstance(row, JsonRow):
            try:
                return orjson.dumps(decode_exact(row.text)[name])
            except (TypeError, ValueError) as error:  # nested too deeply; a key is there twice
                raise RowError(f"{place}: {error}") from error
        return self._json(found, {name: found}, place)

    def _json(self, value: object, columns: Row, place: str) -> bytes:
        """Return a value as JSON; `columns` are those that it comes from."""
        try:
            text = orjson.dumps(value, default=_plain)
        except (TypeError, ValueError) as error:
            raise RowError(f"{place}: {error}") from error
        if b"null" in text and not self.non_finite_as_null:  # orjson writes those that JSON lacks as null
            for name, found in columns.items():
                if (number := _non_finite(found)) is not None:
                    raise RowError(
                        f"{place}: column {name!r} has {number}, which JSON cannot express; --non-finite null stores null"
                    )
        return text

    def _header_pairs(self, row: Row, name: str, place: str) -> list[tuple[str, str]]:
        """Return the headers in a column: a map, or a JSON object as text. A value may be a list of values."""
        found = row.get(name)
        if found is None:
            self.check_columns(row, place)
        try:
            given = orjson.loads(found) if found and isinstance(found, str) else found
            entries = given.items() if isinstance(given, dict) else given or ()
            several = [(header, values if isinstance(values, list) else [values]) for header, values in entries]
        except (TypeError, ValueError, AttributeError) as error:
            raise RowError(f"{place}: column {name!r} is neither a map nor a JSON object") from error
        if isinstance(found, str) and isinstance(given, dict):
            try:
                decode_exact(found.encode())
            except ValueError as error:  # a header that is there twice
                raise RowError(f"{place}: column {name!r}: {error}") from error
        for header, values in several:
            if not values:
                raise RowError(f"{place}: column {name!r}: header {header!r} has an empty list of values")
        pairs = [(header, value) for header, values in several for value in values]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise RowError(f"{place}: column {name!r} has a header that is not a string")
        return pairs


def _is_left_out(name: str) -> bool:
    """Whether a message is stored without a header of its row: an instruction for another message, or its id."""
    return name == MSG_ID or is_instruction(name)


def _described(columns: Collection[str], missing: str) -> str:
    """Return which columns there are, and what may be wrong with the `missing` one."""
    names = list(columns)
    if not names:
        return "; the row is empty"
    shown = ", ".join(map(repr, names[:_COLUMNS_SHOWN])) + (", …" if len(names) > _COLUMNS_SHOWN else "")
    text = f"the columns are {shown}" if len(names) > 1 else f"the only column is {shown}"
    separator = next((char for char in _DELIMITERS if char in names[0]), None)
    if len(names) == 1 and separator is not None and not isinstance(columns, JsonRow):
        mark, option = ("a tab", "tab") if separator == "\t" else (repr(separator), repr(separator))
        return f"; {text}; if {mark} separates the columns, give --delimiter {option}"
    hint = did_you_mean(missing, names)
    return f"{hint} {text[0].upper()}{text[1:]}" if hint else f"; {text}"


@lru_cache(maxsize=8)
def _keys(subject: str, data_from: str | None, headers_from: str | None) -> dict[str, bytes]:
    """Return the keys of a JSON line that the options need, each with its JSON text."""
    data = () if data_from is None else (data_from, f"{data_from}_base64")
    names = (*_PLACEHOLDER.findall(subject), *data, *(() if headers_from is None else (headers_from,)))
    return {name: json.dumps(name, ensure_ascii=False).encode(errors="surrogatepass") for name in names}


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        micros = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
        return duration_text(micros * 1000 + getattr(value, "nanoseconds", 0), 9)  # those of pandas have nanoseconds
    if isinstance(value, datetime):  # one of pandas, with nanoseconds
        return value.isoformat()
    return str(value)  # decimals


def _non_finite(value: object) -> float | None:
    """Return a number that is infinite or not a number, from any depth of a value."""
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _non_finite(each)) is not None), None)
    return None
