"""What a group keeps in its bucket: its settings, its members, and who owns which partition.

::

    <stream>.<group>.config              what all members must agree on
    <stream>.<group>.members.<id>        a member that is alive; the server removes it unless the member renews it
    <stream>.<group>.partitions.<n>      a `Record`: the owner of a partition, the position in it, and what has failed there

The position of an exactly-once group is in its output stream instead; see `log.group_worker`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import orjson
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import operation
from jetstream_ext.log.liveness import delete_key, encode_key, open_ttl_bucket, put_key
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import MAX_TTL
from jetstream_ext.protocol.records import Record

_VERSION: Final = 1
MOST_PARTITIONS: Final = 4096

_Kind = TypeVar("_Kind", "Settings", "MemberRecord", Record)


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
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Settings:
        body = _decode(data)
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

    def of_this_epoch(self, record: Record | None) -> Record | None:
        """Return a record, or None if it is from before a reset."""
        return None if record is None or record.epoch != self.epoch else record


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member that is alive: its name for people, and whether it is about to leave."""

    label: str
    leaving: bool
    seconds: int  # until the server removes the key

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> MemberRecord:
        body = _decode(data)
        seconds = json_number(body["seconds"], "seconds", low=1, high=MAX_TTL)
        return cls(json_text(body["label"], "label"), body["leaving"] is True, seconds)


def _encode(record: Settings | MemberRecord) -> bytes:
    return orjson.dumps({"v": _VERSION, **asdict(record)})


def _decode(data: bytes) -> Any:
    body = orjson.loads(data)
    if json_number(body["v"], "v") != _VERSION:
        raise ValueError("another version")
    return body


class GroupStore:
    """The part of a bucket that one group has."""

    def __init__(
        self, js: JetStreamContext, bucket: str, stream: str, group: str, *, timeout: float | None, patience: float
    ) -> None:
        self.group: str = group
        self.patience: float = patience
        self.kv: KeyValue = open_bucket(js, bucket)
        self.bucket: Bucket = Bucket(self.kv, timeout)
        self.context: Context = self.bucket.context
        self.timeout: float = self.bucket.timeout
        self.prefix: str = f"{encode_key(stream, group)}."
        self.config_key: str = f"{self.prefix}config"

    def member_of(self, key: str) -> str | None:
        """Return the member whose key this is, or None."""
        start = self.prefix + "members."
        return key.removeprefix(start) if key.startswith(start) else None

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
        what = f"group {self.group!r}"
        state = await open_ttl_bucket(self.bucket, what, self.patience, "direct", replicas=replicas)
        if state.max_age:
            raise StreamConfigMismatchError(
                f"{what}: bucket {self.bucket.name!r} has a TTL, after which the server would delete the positions of "
                "the group; use a bucket without one",
                diff={"max_age": (0, state.config["max_age"])},
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
        return self.writer(f"{self.prefix}partitions.{partition}", f"partition {partition}")

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

    async def put_member(self, member: str, record: MemberRecord, timeout: float) -> None:
        """Store the key of a member that is alive."""
        await put_key(self.bucket, self._member_key(member), record.encode(), record.seconds, timeout)

    async def delete_member(self, member: str, seconds: int) -> None:
        # The marker goes, too: a member's id is never used again.
        await delete_key(self.bucket, self._member_key(member), seconds, self.timeout)

    def _member_key(self, member: str) -> str:
        return f"{self.prefix}members.{member}"

    def decode(self, kind: type[_Kind], found: StoredMsg | None) -> _Kind | None:
        """Return the record in a message, or None if there is none.

        Raises:
            ValueError: The message is no such record.
        """
        if found is None or operation(found.headers)[0] != "PUT":
            return None
        return self.decode_value(kind, found.subject.removeprefix(self.bucket.prefix), found.data)

    def decode_value(self, kind: type[_Kind], key: str, value: bytes) -> _Kind:
        try:
            return kind.decode(value)
        except (KeyError, TypeError, ValueError, IndexError):
            raise ValueError(
                f"group {self.group!r}: key {key!r} of bucket {self.bucket.name!r} has a value that no member of a group of this "
                f"version writes ({value[:80]!r}), so another program has written it; use another group name, or restore the value"
            ) from None
