"""What a group keeps in its bucket: its settings, its members, and who owns which partition.

::

    <stream>.<group>.config              what all members must agree on
    <stream>.<group>.members.<id>        a member that is alive; the server removes it unless the member renews it
    <stream>.<group>.partitions.<n>      the owner of a partition, and the position in it

The position of an exactly-once group is in its output stream instead; see `log.group_worker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import orjson
from nats.js import JetStreamContext
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.creation import create_bucket
from jetstream_ext.kv.entries import DELETE_HEADERS, operation
from jetstream_ext.log.lease import encode_key
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_TTL
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import MAX_TTL, OPTIONS
from jetstream_ext.text import plural

_VERSION: Final = 1
MOST_PARTITIONS: Final = 4096

_Record = TypeVar("_Record", "Settings", "MemberRecord", "PartitionRecord")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the members of a group must agree on, and where it starts; the first member stores it."""

    stream: str
    created: str
    partitions: int
    key: tuple[int, ...] | None
    subject: str | None
    token: int | None
    start: int
    first: bool  # it starts at the oldest message: what is removed before it is read is no loss
    epoch: str  # a random one for each reset: records of another one do not count
    output: tuple[str, str] | None  # of an exactly-once group: its output stream, and the prefix of its positions

    def encode(self) -> bytes:
        return _encode({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def decode(cls, body: Mapping[str, Any]) -> Settings:
        key, output, token = body["key"], body["output"], body["token"]
        return cls(
            json_text(body["stream"], "stream"),
            json_text(body["created"], "created"),
            json_number(body["partitions"], "partitions", low=1, high=MOST_PARTITIONS),
            None if key is None else tuple(json_number(each, "key") for each in key),
            None if body["subject"] is None else json_text(body["subject"], "subject"),
            None if token is None else json_number(token, "token"),
            json_number(body["start"], "start", low=1),
            body["first"] is True,
            json_text(body["epoch"], "epoch"),
            None if output is None else (json_text(output[0], "output"), json_text(output[1], "output")),
        )

    def of_this_epoch(self, record: PartitionRecord | None) -> PartitionRecord | None:
        """Return a record, or None if it is from before a reset."""
        return None if record is None or record.epoch != self.epoch else record


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member that is alive: its name for people, and whether it is about to leave."""

    label: str
    leaving: bool
    seconds: int  # until the server removes the key

    def encode(self) -> bytes:
        return _encode({"label": self.label, "leaving": self.leaving, "seconds": self.seconds})

    @classmethod
    def decode(cls, body: Mapping[str, Any]) -> MemberRecord:
        seconds = json_number(body["seconds"], "seconds", low=1, high=MAX_TTL)
        return cls(json_text(body["label"], "label"), body["leaving"] is True, seconds)


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """The owner of a partition (empty: it was released), and the next sequence to handle."""

    owner: str
    seq: int
    epoch: str
    writer: str = ""  # the member that stored it, and the number of its record: `FencedWriter` compares payloads
    number: int = 0

    def encode(self) -> bytes:
        return _encode(
            {"owner": self.owner, "seq": self.seq, "epoch": self.epoch, "writer": self.writer, "number": self.number}
        )

    @classmethod
    def decode(cls, body: Mapping[str, Any]) -> PartitionRecord:
        epoch = json_text(body["epoch"], "epoch")
        return cls(json_text(body["owner"], "owner"), json_number(body["seq"], "seq", low=1), epoch)


def _encode(body: dict[str, Any]) -> bytes:
    return orjson.dumps({"v": _VERSION, **body})


class GroupStore:
    """The part of a bucket that one group has."""

    def __init__(
        self, js: JetStreamContext, bucket: str, stream: str, group: str, *, timeout: float | None, patience: float
    ) -> None:
        self.group: str = group
        self.stream: str = stream
        self.patience: float = patience
        self.kv: KeyValue = open_bucket(js, bucket)
        self.bucket: Bucket = Bucket(self.kv, timeout)
        self.context: Context = self.bucket.context
        self.timeout: float = self.bucket.timeout
        self.prefix: str = f"{encode_key(stream, group)}."
        self.config_key: str = f"{self.prefix}config"

    def member_key(self, member: str) -> str:
        return f"{self.prefix}members.{member}"

    def partition_key(self, partition: int) -> str:
        return f"{self.prefix}partitions.{partition}"

    def member_of(self, key: str) -> str | None:
        """Return the member whose key this is, or None."""
        return key.removeprefix(self.prefix + "members.") if key.startswith(self.prefix + "members.") else None

    def partition_of(self, key: str) -> int | None:
        """Return the partition whose record this key has, or None."""
        start = self.prefix + "partitions."
        text = key.removeprefix(start)
        if not key.startswith(start) or not text.isdecimal() or not text.isascii() or len(text) > 5:
            return None
        return int(text)

    async def open(self, *, replicas: int | None = None) -> None:
        """Check that the bucket can hold a group; create it with so many replicas if it does not exist.

        Raises:
            nats.js.errors.BucketNotFoundError: It does not exist, and `replicas` is None.
            StreamConfigMismatchError: It lacks ``allow_msg_ttl`` or ``allow_direct``, or has a TTL.
        """
        retry = Retry(self.patience)
        try:
            state = await retry.call(lambda: self.bucket.state(direct=False))
        except BucketNotFoundError:
            if replicas is None:
                raise
            await retry.call(lambda: create_bucket(self.bucket, replicas=replicas, direct=True))
            state = await retry.call(lambda: self.bucket.state(direct=False))
        if state.max_age:
            raise StreamConfigMismatchError(
                f"group {self.group!r}: bucket {self.bucket.name!r} has a TTL, after which the server would delete the positions of "
                "the group; use a bucket without one",
                diff={"max_age": (0, state.config["max_age"])},
            )
        lacks = {
            option: OPTIONS[option].field for option in ("direct", "ttl") if not state.config.get(OPTIONS[option].field)
        }
        if lacks:
            what = plural(len(lacks), "it", "them")
            raise StreamConfigMismatchError(
                f"group {self.group!r}: bucket {self.bucket.name!r} lacks {' and '.join(lacks.values())}, which a group needs for "
                f"its members' keys; {advice.enable_bucket(self.bucket.name, *lacks, what=what)}",
                diff=dict.fromkeys(lacks.values(), (True, False)),
            )

    def writer(self, key: str, what: str) -> FencedWriter:
        """Return a writer of the records on a key."""
        return FencedWriter(
            self.context,
            self.bucket.stream,
            self.bucket.subject(key),
            name=f"group {self.group!r}, {what}",
            timeout=self.timeout,
            patience=self.patience,
        )

    def partition_writer(self, partition: int) -> FencedWriter:
        return self.writer(self.partition_key(partition), f"partition {partition}")

    async def settings(self) -> Settings | None:
        """Return what the group's members have agreed on; None for a group that has not started."""
        return self.decode(Settings, await self.writer(self.config_key, "its settings").read())

    async def agree(self, settings: Settings) -> Settings:
        """Store the settings, or return those that another member has stored."""
        writer = self.writer(self.config_key, "its settings")
        while True:
            found = self.decode(Settings, await writer.read())
            if found is not None:
                return found
            try:
                await writer.store([], settings.encode())
            except RecordMovedError:
                continue
            return settings

    async def put_member(self, member: str, record: MemberRecord, timeout: float) -> int:
        """Store the key of a member that is alive; return its revision."""
        subject = self.bucket.subject(self.member_key(member))
        headers = {MSG_TTL: str(record.seconds)}
        ack = await self.context.publish(subject, record.encode(), headers, timeout, f"the ack of {subject}")
        return ack.seq

    async def delete_member(self, member: str, seconds: int, timeout: float) -> None:
        subject = self.bucket.subject(self.member_key(member))
        headers = DELETE_HEADERS | {MSG_TTL: str(seconds)}  # the marker goes, too: a member's id is never used again
        await self.context.publish(subject, b"", headers, timeout, f"the ack of {subject}")

    def decode(self, kind: type[_Record], found: StoredMsg | None) -> _Record | None:
        """Return the record in a message, or None if there is none.

        Raises:
            ValueError: The message is no such record.
        """
        if found is None or operation(found.headers)[0] != "PUT":
            return None
        return self.decode_value(kind, found.subject.removeprefix(self.bucket.prefix), found.data)

    def decode_value(self, kind: type[_Record], key: str, value: bytes) -> _Record:
        try:
            body = orjson.loads(value)
            if json_number(body["v"], "v") == _VERSION:
                return kind.decode(body)
        except (KeyError, TypeError, ValueError, IndexError):
            pass
        raise ValueError(
            f"group {self.group!r}: key {key!r} of bucket {self.bucket.name!r} has a value that no member of a group of this "
            f"version writes ({value[:80]!r}), so another program has written it; use another group name, or restore the value"
        )
