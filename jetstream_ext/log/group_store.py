"""What is stored of a group in its bucket: its settings, its members, and for each partition a record of its owner and position.

The position of an exactly-once group is in its output stream instead; see `log.group_outputs`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final, TypeVar

import orjson
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, operation
from jetstream_ext.log.liveness import encode_key, open_ttl_bucket
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.membership import Owner
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


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member that is alive: its name for people, and whether it is about to leave."""

    label: str
    leaving: bool
    seconds: int  # until the server removes the key

    @classmethod
    def decode(cls, data: bytes) -> MemberRecord:
        body = _decode(data)
        seconds = json_number(body["seconds"], "seconds", low=1, high=MAX_TTL)
        return cls(json_text(body["label"], "label"), body["leaving"] is True, seconds)


def encode(record: Settings | MemberRecord) -> bytes:
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
        self.members: str = f"{self.prefix}members."
        self._partitions = f"{self.prefix}partitions."

    def member_of(self, key: str) -> str | None:
        """Return the member whose key this is, or None."""
        return key.removeprefix(self.members) if key.startswith(self.members) else None

    def partition_of(self, key: str) -> int | None:
        """Return the partition whose record this key has, or None."""
        found = re.fullmatch(re.escape(self._partitions) + "([0-9]{1,5})", key)
        return None if found is None else int(found[1])

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

    def settings_writer(self) -> FencedWriter:
        return self._writer(self.config_key, "its settings")

    def partition_writer(self, partition: int) -> FencedWriter:
        return self._writer(f"{self._partitions}{partition}", f"partition {partition}")

    def _writer(self, key: str, what: str) -> FencedWriter:
        return FencedWriter(
            self.context,
            self.bucket.stream,
            self.bucket.subject(key),
            name=f"group {self.group!r}, {what}",
            timeout=self.timeout,
            patience=self.patience,
        )

    async def agree(self, make: Callable[[], Awaitable[Settings]]) -> Settings:
        """Return the settings that a member has stored, or else store those that `make` returns."""
        writer = self.settings_writer()
        while (found := self.decode(Settings, await writer.read())) is None:
            settings = await make()
            with contextlib.suppress(RecordMovedError):
                await writer.store([], encode(settings))
                return settings
        return found

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


@dataclass(slots=True)
class GroupView:
    """What the bucket has of a group, made of its keys.

    Attributes:
        members: The members that are alive by their ids, and when each was seen last.
        owners: The owner of each partition that has a record of this epoch.
        positions: The positions in these records.
        revision: The bucket's revision that all this is of, at least.
    """

    store: GroupStore
    settings: Settings
    members: dict[str, tuple[MemberRecord, datetime]] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    revision: int = 0

    @property
    def leaving(self) -> set[str]:
        """Those members that hand their partitions over."""
        return {member for member, (record, _) in self.members.items() if record.leaving}

    def note(self, key: str, entry: KeyValueEntry | None) -> bool:
        """Note what a key has now (None: nothing); return whether a member or an owner is another one than before.

        Raises:
            StreamConfigMismatchError: The group was reset, or its settings were changed or deleted.
            ValueError: Another program has written the key.
        """
        store = self.store
        if (member := store.member_of(key)) is not None:
            before = self.members.pop(member, None)
            if entry is not None:
                self.members[member] = store.decode_value(MemberRecord, key, entry.value), entry.created
            after = self.members.get(member)
            return before is None or after is None or before[0] != after[0]
        if (number := store.partition_of(key)) is not None:
            known = self.owners.pop(number, None)
            record = None if entry is None else store.decode_value(Record, key, entry.value)
            if record is not None and entry is not None and record.epoch == self.settings.epoch:
                self.owners[number], self.positions[number] = Owner(record.owner or "", entry.revision), record.seq
            return known is None or number not in self.owners or known.id != self.owners[number].id
        if key == store.config_key:
            self._check(None if entry is None else store.decode_value(Settings, key, entry.value))
        return False

    def _check(self, settings: Settings | None) -> None:
        if settings == self.settings:
            return
        there = {} if settings is None else asdict(settings)
        diff = {
            name: (here, there.get(name)) for name, here in asdict(self.settings).items() if here != there.get(name)
        }
        raise StreamConfigMismatchError(
            f"group {self.store.group!r} was reset, or its settings were changed; this member ends; join it again",
            diff=diff,
        )
