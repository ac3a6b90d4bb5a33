"""What a redrive notes before it sends: the letters, and where in their target streams to look for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import orjson

from jetstream_ext.protocol.api import StreamState, parse_time
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import json_number, json_text

_VERSION: Final = 2
# The earlier version, which has the target's creation time before `base` and no `base_time`.
_WITHOUT_WITNESS: Final = 1

# The sequence and the time of a message, which identify it also if its stream is created again.
Key = tuple[int, int]


def key_of(message: StoredMsg) -> Key:
    return message.seq, message.time_ns


@dataclass(frozen=True, slots=True)
class NotedLetter:
    """A dead letter that may be sent.

    The message at `base` is the witness of what was not found: while the target has it, the target has not lost its last
    messages since. A target that had none is known by the time of its creation.
    """

    seq: int
    time_ns: int
    target: str
    subject: str
    base: int  # the target's last sequence before the letter was sent
    base_time: datetime | None  # when that message was stored, or an empty target created
    again: str = ""  # what its message id ends with if it is sent although an earlier copy may be gone

    @property
    def key(self) -> Key:
        return self.seq, self.time_ns

    @property
    def witness(self) -> tuple[int, datetime] | None:
        return None if self.base_time is None else (self.base, self.base_time)


def last_message(state: StreamState) -> tuple[int, datetime]:
    """Return the sequence and the time of a stream's last message, as `NotedLetter` has them."""
    return state.last_seq, state.last_time


def encode_note(writer: str, number: int, letters: Iterable[NotedLetter]) -> bytes:
    """Return a note; `writer` and `number` distinguish it from every other one."""
    rows = [
        [it.seq, it.time_ns, it.target, it.subject, it.base, it.base_time and it.base_time.isoformat(), it.again]
        for it in letters
    ]
    return orjson.dumps({"v": _VERSION, "writer": writer, "number": number, "letters": rows})


def decode_note(data: bytes) -> list[NotedLetter]:
    """Return the letters of a note; raise ValueError if `data` is something else."""
    try:
        body = orjson.loads(data)
        version = json_number(body["v"], "v")
        if version not in (_VERSION, _WITHOUT_WITNESS):
            raise ValueError(f"version {version} is unknown")
        return [_decode(version, row) for row in body["letters"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"this is not the note of a redrive: {error}") from error


def _decode(version: int, row: Any) -> NotedLetter:
    seq, time_ns, target, subject, base, base_time, again = row
    if version == _WITHOUT_WITNESS:
        base, base_time = base_time, None
    return NotedLetter(
        json_number(seq, "seq", low=1),
        json_number(time_ns, "time"),
        json_text(target, "stream"),
        json_text(subject, "subject"),
        json_number(base, "base"),
        None if base_time is None else parse_time(base_time),
        json_text(again, "again"),
    )
