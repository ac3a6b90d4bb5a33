"""Where a reader starts, and where it is: the positions that a user names and those that are stored."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

import orjson

from jetstream_ext.kv.keys import check_key
from jetstream_ext.protocol.options import rfc3339
from jetstream_ext.protocol.stored_msg import StoredMsg

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class First:
    """The oldest message that there is when the reader gets to it."""


@dataclass(frozen=True, slots=True)
class Seq:
    """A stream sequence. It must still be there, or be the next one that the stream will give out.

    Args:
        seq: The sequence, from 1.

    Raises:
        ValueError: `seq` is none.
    """

    seq: int

    def __post_init__(self) -> None:
        if isinstance(self.seq, bool) or not isinstance(self.seq, int) or not 1 <= self.seq < 1 << 64:
            raise ValueError(f"seq must be a stream sequence from 1 up, not {self.seq!r}")


@dataclass(frozen=True, slots=True)
class Time:
    """The first message that was stored at or after a time (by the server's clock), or what comes next.

    Args:
        when: An aware datetime.

    Raises:
        ValueError: `when` is naive.
    """

    when: datetime

    def __post_init__(self) -> None:
        rfc3339(self.when, "when")


@dataclass(frozen=True, slots=True)
class Last:
    """The newest message that matches when the reader starts, as nats-py's DeliverPolicy.LAST."""


@dataclass(frozen=True, slots=True)
class New:
    """What is stored after the reader has started, as nats-py's DeliverPolicy.NEW."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The position that is stored under a name in the reader's `OffsetStore`.

    Args:
        name: The reader's name, a key of the bucket: tokens of ``[-/_=a-zA-Z0-9]`` joined by dots.
        default: Where to start if nothing is stored yet.

    Raises:
        nats.js.errors.InvalidKeyError: The name is no key.
        TypeError: `default` is no start.
    """

    name: str
    default: First | Seq | Time | Last | New = First()

    def __post_init__(self) -> None:
        check_key(self.name)
        if not isinstance(self.default, First | Seq | Time | Last | New):
            raise TypeError(f"default must be First(), Seq(n), Time(t), Last() or New(), not {self.default!r}")


Start = First | Seq | Time | Last | New | Stored
"""All of them."""


def check_start(start: object) -> Start:
    """Return `start` if it is one.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(start, Start):
        raise TypeError(f"a start is First(), Seq(n), Time(t), Last(), New() or Stored(name), not {start!r}")
    return start


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """A stored position.

    Attributes:
        name: The reader.
        stream: The stream that it reads.
        created: When that stream was created, in the server's words: sequences of another one of the same name say
            nothing.
        seq: The next sequence to read, from 1.
        revision: The key's revision in the bucket; the next commit must follow it.
        writer: A random id of the `OffsetStore` object that stored it.
    """

    name: str
    stream: str
    created: str
    seq: int
    revision: int = 0
    writer: str = ""

    def encode(self) -> bytes:
        """Return the key's value."""
        return orjson.dumps(
            {"v": _VERSION, "stream": self.stream, "created": self.created, "seq": self.seq, "writer": self.writer}
        )

    @classmethod
    def decode(cls, name: str, data: bytes, revision: int) -> StoredOffset:
        """Return the position in a value.

        Raises:
            ValueError: The value is not a position.
        """
        try:
            body = orjson.loads(data)
            if body["v"] == _VERSION and body["seq"] >= 1:
                return cls(
                    name, str(body["stream"]), str(body["created"]), int(body["seq"]), revision, str(body["writer"])
                )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
        raise ValueError(f"what is stored for {name!r} is not a position of a reader: {data[:80]!r}")


class PositionedReader(Protocol):
    """What an `OffsetStore` needs of a `LogReader`."""

    @property
    def name(self) -> str | None:
        """The name that its position is stored under."""

    @property
    def stream(self) -> str:
        """The stream that it reads."""

    @property
    def created(self) -> str | None:
        """When that stream was created, in the server's words."""

    @property
    def position(self) -> int | None:
        """The next sequence to read."""

    @property
    def tail(self) -> bool:
        """Whether iteration waits at the end of the stream."""

    async def open(self) -> int:
        """Look the start up, and return the position."""

    async def read(self, max_messages: int = ..., timeout: float | None = ...) -> list[StoredMsg]:
        """Return the next messages."""
