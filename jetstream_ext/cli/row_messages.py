"""How a row of a file becomes a message: its subject, payload and headers, by the options of ``ingest``."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import orjson

from jetstream_ext.cli.formats import JsonRow, Row, RowError
from jetstream_ext.protocol.headers import is_reserved
from jetstream_ext.types import own_headers

_PLACEHOLDER: Final = re.compile(r"\{([^{}]+)\}")
_DIGEST_SIZE: Final = 9  # bytes: 12 characters


def short_digest(*parts: bytes) -> str:
    """Return a digest of some bytes, in characters that a message id and a subject may have."""
    digest = blake2b(digest_size=_DIGEST_SIZE)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return base64.urlsafe_b64encode(digest.digest()).decode()


@dataclass(frozen=True, slots=True)
class Message:
    """What a row becomes."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] | None

    @property
    def digest(self) -> str:
        """Tells messages with another subject, payload or other headers apart."""
        pairs = b"" if not self.headers else orjson.dumps(list(self.headers.items()))
        return short_digest(self.subject.encode(errors="surrogatepass"), self.payload, pairs)


@dataclass(frozen=True, slots=True)
class RowMapping:
    """The options. In `subject`, ``{column}`` is replaced by the row's value in that column."""

    subject: str
    data_from: str | None = None
    headers_from: str | None = None

    @property
    def subject_filter(self) -> str | None:
        """A filter that matches all subjects of the file; None if only ``>`` does."""
        if _PLACEHOLDER.search(self.subject) is None:
            return self.subject
        fixed, *_ = _PLACEHOLDER.split(self.subject, maxsplit=1)
        tokens, dot, _ = fixed.rpartition(".")
        return f"{tokens}.>" if dot else None

    def message(self, row: Row, place: str) -> Message:
        """Return the message of a row; raise RowError, which names the `place`, if the row cannot be sent."""
        headers = None if self.headers_from is None else self._headers(row, self.headers_from, place)
        return Message(self._subject(row, place), self._payload(row, place), headers)

    def _subject(self, row: Row, place: str) -> str:
        def value(match: re.Match[str]) -> str:
            found = row.get(match[1])
            if isinstance(found, bool) or not isinstance(found, str | int):
                what = "has no value" if found is None else "is neither a string nor an integer"
                raise RowError(f"{place}: column {match[1]!r} {what}; the subject needs it")
            return str(found)

        return _PLACEHOLDER.sub(value, self.subject)

    def _payload(self, row: Row, place: str) -> bytes:
        """Return the row as JSON, or the column `data_from`, whose binary values are base64 in its ``…_base64``."""
        name = self.data_from
        if name is None:
            return row.text if isinstance(row, JsonRow) else orjson.dumps(row, default=_plain)
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
            raise RowError(f"{place}: column {name!r} has no value; the payload needs it")
        return orjson.dumps(found, default=_plain)

    def _headers(self, row: Row, name: str, place: str) -> dict[str, str]:
        """Return the headers in a column: a map, or a JSON object as text. A value may be a list of values.

        Those that begin with ``Nats-`` are left out: they are instructions to the server, which were for another message.
        """
        found = row.get(name)
        try:
            given = orjson.loads(found) if found and isinstance(found, str) else found
            entries = given.items() if isinstance(given, dict) else given or ()
            several = [(header, values if isinstance(values, list) else [values]) for header, values in entries]
            pairs = [(header, value) for header, values in several for value in values if not is_reserved(header)]
        except (TypeError, ValueError, AttributeError) as error:
            raise RowError(f"{place}: column {name!r} is neither a map nor a JSON object") from error
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise RowError(f"{place}: column {name!r} has a header that is not a string")
        return own_headers(pairs)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)  # decimals, durations
