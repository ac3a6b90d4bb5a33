"""What is stored of a position in a stream: of a reader, of a group's partition, of a worker. One form for all of them.

A `FencedWriter` stores it, and compares payloads to find out what an attempt without an answer has stored. So each record
names its writer and that writer's number for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import orjson

from jetstream_ext.protocol.numbers import json_number, json_text

_VERSION: Final = 1
_MOST: Final = 1 << 31
# Names of earlier releases.
_FORMER: Final = {"writer": "worker", "number": "commit"}


@dataclass(frozen=True, slots=True)
class Failed:
    """The message at a position, how often its handling has failed, and the error of the last time."""

    seq: int
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class Total:
    """Of the state of a worker: what a start compares with what it reads, to notice a purge or messages of others.

    Attributes:
        keys: How many keys without a TTL it has.
        check: The sum of the checksums of each of them with its value.
        timed: How many keys with a TTL.
        first: When the first one of them expires, or earlier: whole seconds since 1970 by the leader's clock.
        last: When the last one expires, or earlier.
    """

    keys: int = 0
    check: int = 0
    timed: int = 0
    first: int = 0
    last: int = 0

    def allows(self, found: Total, now: float) -> bool:
        """Whether what is found at that time can be this state, except for keys that have expired since."""
        missing = self.timed - found.timed
        expired = missing == 0 or now >= (self.last if found.timed == 0 else self.first)
        return (self.keys, self.check) == (found.keys, found.check) and missing >= 0 and expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A position, and who stored it.

    Attributes:
        seq: The next sequence to handle, from 1.
        stream: The stream that is read; empty if it is known from elsewhere.
        created: When that stream was created, as the server writes it; empty if the writer did not know it.
        writer: A random id of what stored the record.
        number: Which one of that writer's records it is.
        owner: Of a partition: the member that works on it; empty if it was released.
        epoch: Of a group: changes when the group is reset.
        failed: The message at the position, if its handling has failed.
        took_over: Of a worker: when this start took over from one that had not released the name, in seconds since 1970 by
            the clock of the output stream's leader; 0 if it did not.
        released: Of a worker: it has ended by itself.
        state: Of a worker with a state: what it holds at this position.
    """

    seq: int
    stream: str = ""
    created: str = ""
    writer: str = ""
    number: int = 0
    owner: str | None = None
    epoch: str = ""
    failed: Failed | None = None
    took_over: int = 0
    released: bool = False
    state: Total | None = None

    def encode(self) -> bytes:
        body: dict[str, Any] = {"v": _VERSION}
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                body[each.name] = value
        return orjson.dumps(body)  # with `failed` and `state` as objects of their fields

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Return the record in a value.

        Raises:
            ValueError: The value is no record.
        """
        try:
            body = orjson.loads(data)
            if json_number(body["v"], "v") != _VERSION:
                raise ValueError("another version")
            return cls(
                seq=json_number(body["seq"], "seq", low=1),
                stream=_text(body, "stream"),
                created=_text(body, "created"),
                writer=_text(body, "writer"),
                number=_number(body, "number"),
                owner=_text(body, "owner") if "owner" in body else None,
                epoch=_text(body, "epoch"),
                failed=_failed(body.get("failed")),
                took_over=_number(body, "took_over"),
                released=body.get("released") is True,
                state=_total(body.get("state")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not a position: {data[:80]!r}") from error


def _text(body: Mapping[str, Any], name: str) -> str:
    return json_text(body.get(name, body.get(_FORMER.get(name, ""), "")), name)


def _number(body: Mapping[str, Any], name: str) -> int:
    return json_number(body.get(name, body.get(_FORMER.get(name, ""), 0)), name)


def _failed(body: Any) -> Failed | None:
    if body is None:
        return None
    attempts = json_number(body["attempts"], "attempts", low=1, high=_MOST)
    return Failed(json_number(body["seq"], "seq", low=1), attempts, json_text(body["error"], "error"))


def _total(body: Any) -> Total | None:
    return (
        None
        if body is None
        else Total(**{each.name: json_number(body[each.name], each.name) for each in fields(Total)})
    )
