"""Positions in a stream: the starts that a reader accepts, and positions as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import orjson

from jetstream_ext.kv.keys import check_key
from jetstream_ext.protocol.options import check_sequence, rfc3339

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class First:
    """The oldest message that is stored when the reader looks the start up."""


@dataclass(frozen=True, slots=True)
class Seq:
    """A stream sequence.

    If its message was deleted from the middle of the stream, the reader starts at the next message. The position is lost
    (see `PositionLostError`) if the sequence is below the stream's first one, or more than one above its last one.

    Args:
        seq: The sequence, from 1.

    Raises:
        ValueError: `seq` is not a stream sequence.
    """

    seq: int

    def __post_init__(self) -> None:
        check_sequence(self.seq, "seq")


@dataclass(frozen=True, slots=True)
class Time:
    """The first message stored at or after a time, by the server's clock, or else the next message to be stored.

    Args:
        when: A timezone-aware datetime.

    Raises:
        ValueError: `when` is naive.
        TypeError: `when` is not a datetime.
    """

    when: datetime

    def __post_init__(self) -> None:
        rfc3339(self.when, "when")


@dataclass(frozen=True, slots=True)
class Last:
    """The newest message that matches when the reader starts, as nats-py's DeliverPolicy.LAST."""


@dataclass(frozen=True, slots=True)
class New:
    """The first message that is stored after the reader has started, as nats-py's DeliverPolicy.NEW."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The position that the reader's `OffsetStore` holds under a name.

    Args:
        name: The reader's name, a key of the bucket: tokens of ``[-/_=a-zA-Z0-9]`` joined by dots.
        default: Where to start if no position is stored yet.

    Raises:
        nats.js.errors.InvalidKeyError: The name is not a key.
        TypeError: `default` is not a start, or is another `Stored`.
    """

    name: str
    default: First | Seq | Time | Last | New = First()

    def __post_init__(self) -> None:
        check_key(self.name)
        if not isinstance(self.default, First | Seq | Time | Last | New):
            raise TypeError(f"default must be First(), Seq(n), Time(t), Last() or New(), not {self.default!r}")


Start = First | Seq | Time | Last | New | Stored


def check_start(start: object) -> Start:
    if not isinstance(start, Start):
        raise TypeError(f"start must be First(), Seq(n), Time(t), Last(), New() or Stored(name), not {start!r}")
    return start


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """A stored position.

    Attributes:
        name: The reader.
        stream: The stream that it reads.
        created: When that stream was created, as the server writes it. A stream of the same name that was created at
            another time has other sequences.
        seq: The next sequence to read, from 1.
        revision: The key's revision in the bucket, which the next commit must follow.
        writer: A random id of the `OffsetStore` object that stored the position.
    """

    name: str
    stream: str
    created: str
    seq: int
    revision: int = 0
    writer: str = ""

    def encode(self) -> bytes:
        """Return the value of the reader's key."""
        return encode_position(self.stream, self.created, self.seq, writer=self.writer)

    @classmethod
    def decode(cls, name: str, data: bytes, revision: int) -> StoredOffset:
        """Return the position in a value.

        Raises:
            ValueError: The value is not a position.
        """
        try:
            body = orjson.loads(data)
            if body["v"] == _VERSION and body["seq"] >= 1:
                writer = (
                    body["worker"] if "worker" in body else body["writer"]
                )  # "worker" is in `exactly_once`'s records
                return cls(name, str(body["stream"]), str(body["created"]), int(body["seq"]), revision, str(writer))
        except (KeyError, TypeError, ValueError):
            pass
        raise ValueError(f"the stored value of {name!r} is not a position: {data[:80]!r}; use another name")


def encode_position(stream: str, created: str, seq: int, **writer: str | int) -> bytes:
    """Return a position as it is stored; `writer` identifies the store, as `FencedWriter` requires."""
    return orjson.dumps({"v": _VERSION, "stream": stream, "created": created, "seq": seq, **writer})
