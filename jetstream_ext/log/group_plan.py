"""What the members of a group have in common: its arguments, what it reads, and what is stored of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.api import stream_name, stream_state
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.log.group_store import MOST_PARTITIONS, GroupStore, Settings
from jetstream_ext.log.job import check_keeps, check_unread
from jetstream_ext.log.offsets import First, Last, New, Seq, Time
from jetstream_ext.log.reader import LogReader
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.feature_table import MSG_TTL
from jetstream_ext.protocol.options import check_int, check_seconds, shown
from jetstream_ext.protocol.partitions import Partitioner
from jetstream_ext.protocol.subjects import check_filter, check_name, overlap
from jetstream_ext.text import counted

Start = First | Seq | Time | Last | New

MARGIN: Final = 0.1
"""The part of the TTL in which a member has stopped, and its key is still stored."""

_FIRST: Final = First()
_SHORTEST: Final = 0.1
_LONGEST: Final = 86_400
_PARTITION: Final = re.compile(r"\{\{\s*partition\(\s*(\d{1,9})\b", re.IGNORECASE)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupPlan:
    """The checked arguments of a `Group`, and what its members do with them."""

    context: JetStreamContext
    stream: str
    name: str
    partitions: int
    key: Sequence[int] | None
    subject: str | None
    token: int | None
    start: Start
    bucket: str
    heartbeat: float
    buffer: int
    on_lost: Literal["error", "skip"]
    timeout: float | None
    patience: float
    poll: float
    doorbell: bool
    ttl: int = field(init=False)  # seconds until the server removes the key of a member that is not renewed
    store: GroupStore = field(init=False)
    partitioner: Partitioner = field(init=False)

    def __post_init__(self) -> None:
        check_name(self.stream, "stream name")
        check_name(self.name, "group name")
        check_name(self.bucket, "bucket name")
        if not isinstance(self.start, Start):
            raise TypeError(f"start must be First(), Seq(n), Time(t), Last() or New(), not {self.start!r}")
        token, subject = self.token, self.subject
        if subject is not None:
            check_filter(subject)
        if token is not None:
            check_int(token, "token", low=0)
            if self.key is not None:
                raise ValueError("pass key or token: a token that is the number of the partition needs no key")
            if subject is None or subject.split(".")[token : token + 1] != ["*"]:
                raise ValueError(f"subject must have a * at position {token}, where the partition is, not {subject!r}")
        check_int(self.partitions, "partitions", high=MOST_PARTITIONS)
        self.key = None if self.key is None else _positions(self.key)
        self.heartbeat = check_seconds(self.heartbeat, "heartbeat")
        if not _SHORTEST <= self.heartbeat <= _LONGEST:
            raise ValueError(f"heartbeat must be from {_SHORTEST} to {_LONGEST:,} seconds, not {self.heartbeat!r}")
        self.ttl = max(2, math.ceil(3 * self.heartbeat))
        check_int(self.buffer, "buffer")
        check_seconds(self.patience, "patience")
        self.store = GroupStore(
            self.context, self.bucket, self.stream, self.name, timeout=self.timeout, patience=self.patience
        )
        self.partitioner = Partitioner(self.partitions, self.key)
        self.reader()  # checks the other arguments

    def reader(self, partition: int | None = None, start: Start = _FIRST) -> LogReader:
        """Return a reader of all partitions, or with `token` of one."""
        subject = self.subject
        if partition is not None and subject is not None and self.token is not None:
            tokens = subject.split(".")
            tokens[self.token] = str(partition)
            subject = ".".join(tokens)
        return LogReader(
            self.context,
            self.stream,
            start=start,
            subject=subject,
            on_lost=self.on_lost,
            timeout=self.store.timeout,
            patience=self.patience,
            poll=self.poll,
            doorbell=self.doorbell,
        )

    def partitions_of(self, messages: Sequence[StoredMsg]) -> Sequence[int]:
        """Return the partition of each message; -1 for one that its token does not name.

        Raises:
            BadSubjectError: A message's subject is too short for the key.
        """
        if self.token is None:
            return self.partitioner.of(messages)
        numbers = {str(number): number for number in range(self.partitions)}
        return [numbers.get(message.subject.split(".")[self.token], -1) for message in messages]

    def reads(self, subject: str) -> bool:
        """Return whether the group reads messages on `subject`, which may be a filter, of its stream."""
        return self.subject is None or overlap(self.subject, subject)

    async def stream_state(self) -> StreamState:
        look = Retry(self.store.patience)
        return await look.call(lambda: stream_state(self.store.context, self.stream, self.store.timeout))

    async def prepare(self, output: tuple[str, str] | None) -> Settings:
        """Return the settings of the group, which this object agrees with; create the group if it does not exist."""
        state = await self.stream_state()
        version = state.server_version or self.store.context.connection.server_version
        MSG_TTL.check(state.api_level, version, "a group needs it for the keys of its members")
        self._check_partitions(state)
        bucket = self.store.bucket
        if self.stream == bucket.stream and self.reads(own := bucket.subject(f"{self.store.prefix}>")):
            raise ValueError(
                f"group {self.name!r}: its stream {self.stream!r} is that of its bucket {bucket.name!r}, so it would read each of its own "
                f"records (on {own!r}), and each would lead to another one; use another bucket, or a filter (subject=) that does not "
                "match them"
            )
        await self.store.open(replicas=int(state.config.get("num_replicas") or 1))
        settings = await self.store.agree(lambda: self.settings(self.start, output))
        self.check_settings(settings, output)
        state.check_created(settings.created)
        return settings

    async def settings(self, start: Start, output: tuple[str, str] | None) -> Settings:
        """Return the settings of a group that starts at this place."""
        reader = self.reader(start=start)
        position = await reader.open()
        assert reader.created is not None
        return Settings(
            stream=self.stream,
            created=reader.created,
            partitions=self.partitions,
            key=None if self.key is None else tuple(self.key),
            subject=self.subject,
            token=self.token,
            start=position,
            first=isinstance(start, First),
            epoch=NUID().next().decode(),
            output=output,
        )

    def check_settings(self, settings: Settings, output: tuple[str, str] | None) -> None:
        """Raise StreamConfigMismatchError unless this object has these settings."""
        wanted = {name: getattr(self, name) for name in ("partitions", "key", "subject", "token")} | {"output": output}
        found = {name: getattr(settings, name) for name in wanted}
        diff = {name: (value, found[name]) for name, value in wanted.items() if value != found[name]}
        if diff:
            differences = ", ".join(f"{name} {there!r} instead of {here!r}" for name, (here, there) in diff.items())
            remedy = "use its settings, stop all members and call reset() to change them, or use another group name"
            if "output" in diff:
                remedy = "an exactly-once group keeps its positions in its output stream; use another group name"
            raise StreamConfigMismatchError(
                f"group {self.name!r} of stream {self.stream!r} has {differences}; {remedy}", diff=diff
            )

    def _check_partitions(self, state: StreamState) -> None:
        """Raise an error if messages of the stream have no partition."""
        if self.token is None:
            # A transform stores messages under other subjects, and a mirror or source has those of its origin.
            stored = [] if state.config.get("subject_transform") else state.subjects
            for each in stored if self.subject is None else [self.subject]:
                self.partitioner.check_filter(each)
            return
        destination = str((state.config.get("subject_transform") or {}).get("dest") or "")
        found = _PARTITION.search(destination)
        if found is not None and int(found[1]) != self.partitions:
            raise StreamConfigMismatchError(
                f"group {self.name!r} has {counted(self.partitions, 'partition')}, and stream {self.stream!r} stores its messages in {found[1]} "
                f"({destination}); create the group with partitions={found[1]}",
                diff={"partitions": (self.partitions, int(found[1]))},
            )

    async def check_dead_letter(self, subject: str) -> None:
        """Check that a stream keeps dead letters on `subject`, and that the group does not read them.

        Raises:
            StreamConfigMismatchError: No stream stores the subject, or it does not keep dead letters.
            ValueError: The group would read them.
        """
        context, timeout, retry = self.store.context, self.store.timeout, Retry(self.store.patience)
        name = await retry.call(lambda: stream_name(context, subject, timeout))
        if name is None:
            raise StreamConfigMismatchError(
                f"group {self.name!r}: no stream stores subject {subject!r} of its dead letters; nothing was handled; add the "
                "subject to a stream",
                diff={"subjects": (subject, None)},
            )
        state = await retry.call(lambda: stream_state(context, name, timeout))
        state.check_acks()
        check_keeps(state, subject, f"dead letters on {subject!r}", "stored", "letters")
        what, patience, where = f"group {self.name!r}", self.store.patience, "the stream of its dead letters"
        check = partial(check_unread, self.reader(), what, "dead letter", name, subject, where=where)
        await check(timeout=timeout, patience=patience)


def _positions(key: object) -> tuple[int, ...]:
    if isinstance(key, str | bytes | int) or not isinstance(key, Iterable):
        hint = f"; give [{key}]" if isinstance(key, int) else ""
        raise TypeError(f"key must be a list of positions of subject tokens, from 0, or None, not {shown(key)}{hint}")
    positions = tuple(check_int(position, "a position in key", low=0) for position in key)
    if not positions:
        raise ValueError("key must name at least one token; None is the whole subject")
    return positions
