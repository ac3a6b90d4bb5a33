"""A message as the stream stores it, decoded on access."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import final

from jetstream_ext.protocol import headers as _headers

_new = object.__new__


@final
class StoredMsg:
    """A message as the stream stores it.

    Headers and times are decoded on access, so that a bulk read of payloads does not pay for them.

    Attributes:
        stream: The stream that answered (a mirror answers with its own name).
        subject: Its subject.
        seq: Its stream sequence.
        data: Its payload; empty for delete markers.
        headers: The stored headers, without those that the server adds to a reply.
        time: When it was stored (aware, UTC, microseconds).
        time_ns: When it was stored, in nanoseconds since the epoch.
        num_pending: The number of matching messages after it, if the reply has it.
        last_seq: The sequence of the message before it in the same reply, if the reply has it.
    """

    __slots__ = (
        "_body",
        "_header_size",
        "_headers",
        "_last_seq",
        "_lines",
        "_num_pending",
        "_seq",
        "_stream",
        "_subject",
        "_time_ns",
    )

    def __init__(
        self,
        *,
        stream: str,
        subject: str,
        seq: int,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        time_ns: int = 0,
        num_pending: int | None = None,
        last_seq: int | None = None,
    ) -> None:
        self._lines: list[bytes] | None = None
        self._header_size = 0  # over 0: a message from the wire, decoded on access
        self._stream = stream
        self._subject = subject
        self._seq = seq
        self._body = data
        self._headers = dict(headers or {})
        self._time_ns = time_ns
        self._num_pending = num_pending
        self._last_seq = last_seq

    @classmethod
    def from_wire(cls, stream: str, seq: int, body: bytes, header_size: int) -> StoredMsg:
        """Return a message of a batched direct-get reply; `body` is its header block and its payload."""
        self = _new(cls)
        self._stream = stream
        self._seq = seq
        self._body = body
        self._header_size = header_size
        self._lines = None
        return self

    def _row(self) -> list[bytes]:
        lines = self._lines
        if lines is None:
            lines = self._lines = _headers.checked_row(self._body[: self._header_size])
        return lines

    @property
    def stream(self) -> str:
        return self._stream

    @property
    def subject(self) -> str:
        return self._row()[0].decode("utf-8", "replace") if self._header_size else self._subject

    @property
    def seq(self) -> int:
        return self._seq

    @property
    def data(self) -> bytes:
        return self._body[self._header_size :]

    @property
    def headers(self) -> dict[str, str]:
        if not self._header_size:
            return dict(self._headers)
        stored = self._row()[_headers.ROW_STORED]
        return _headers.decode_stored(stored) if stored else {}

    @property
    def time_ns(self) -> int:
        if not self._header_size:
            return self._time_ns
        return _headers.parse_time_ns(_headers.line_value(self._row()[_headers.ROW_TIME]))

    @property
    def time(self) -> datetime:
        if self._header_size:
            # Six times as fast as by nanoseconds, and truncates the same digits.
            text = _headers.line_value(self._row()[_headers.ROW_TIME]).decode("ascii", "replace")
            try:
                if text.endswith("Z"):
                    return datetime.fromisoformat(text)
            except ValueError:
                pass  # `time_ns` raises the error
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=self.time_ns // 1000)

    @property
    def num_pending(self) -> int | None:
        if not self._header_size:
            return self._num_pending
        return _headers.line_number(self._row()[_headers.ROW_PENDING])

    @property
    def last_seq(self) -> int | None:
        if not self._header_size:
            return self._last_seq
        return _headers.line_number(self._row()[_headers.ROW_LAST])

    def _fields(self) -> dict[str, object]:
        return {
            "stream": self._stream,
            "subject": self.subject,
            "seq": self._seq,
            "data": self.data,
            "headers": self.headers,
            "time_ns": self.time_ns,
            "num_pending": self.num_pending,
            "last_seq": self.last_seq,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredMsg):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((self._stream, self._seq, self.data))

    def __repr__(self) -> str:
        return f"StoredMsg({', '.join(f'{name}={value!r}' for name, value in self._fields().items())})"

    def __reduce__(self) -> tuple[object, ...]:
        return partial(StoredMsg, **self._fields()), ()  # type: ignore[arg-type]
