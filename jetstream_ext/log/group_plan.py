"""What the members of a group have in common: its arguments, its reading of the stream, and what is stored of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.api import stream_name, stream_state
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.log.group_store import GroupStore, Settings
from jetstream_ext.log.lane import Lanes
from jetstream_ext.log.offsets import First, Last, New, Seq, Time
from jetstream_ext.log.output_stream import check_letters
from jetstream_ext.log.reader import LogReader
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.feature_table import MSG_TTL
from jetstream_ext.protocol.partitions import Partitioner
from jetstream_ext.protocol.subjects import overlap
from jetstream_ext.text import counted

Start = First | Seq | Time | Last | New

BUFFER_BYTES: Final = 4 << 20
_PARTITION: Final = re.compile(r"\{\{\s*partition\(\s*(\d{1,9})\b", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class GroupPlan:
    """The checked arguments of a `Group`, and what its members do with them."""

    context: JetStreamContext
    stream: str
    name: str
    partitions: int
    key: tuple[int, ...] | None
    subject: str | None
    token: int | None
    start: Start
    heartbeat: float
    ttl: int  # seconds until the server removes the key of a member that is not renewed
    margin: float
    buffer: int
    on_lost: Literal["error", "skip"]
    poll: float
    doorbell: bool
    store: GroupStore
    partitioner: Partitioner = field(init=False)

    def __post_init__(self) -> None:
        self.partitioner = Partitioner(self.partitions, self.key)

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
        settings = await self.store.settings()
        if settings is None:
            settings = await self.store.agree(await self.settings(self.start, output))
        self.check_settings(settings, output)
        state.check_created(settings.created)
        return settings

    def reads(self, subject: str) -> bool:
        """Return whether the group reads messages on `subject`, which may be a filter, of its stream."""
        return self.subject is None or overlap(self.subject, subject)

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
        check_letters(state, subject)
        if state.retention == "interest":
            raise StreamConfigMismatchError(
                f"group {self.name!r}: stream {name!r}, which stores subject {subject!r} of its dead letters, has interest retention and "
                "keeps nothing that no consumer waits for; nothing was handled; use a stream with limits or workqueue retention",
                diff={"retention": ("limits", state.retention)},
            )
        copies = [subject] if name == self.stream else (await self.stream_state()).copies_of(name, subject)
        for copy in filter(self.reads, copies):
            raise ValueError(
                f"group {self.name!r}: its stream {self.stream!r} has the messages on {subject!r} of stream {name!r}, so the group would "
                f"read each of its dead letters (on {copy!r}); nothing was handled; use another subject for dead letters, or a filter "
                "(subject=) that does not match it"
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

    def check_settings(self, settings: Settings, output: tuple[str, str] | None) -> None:
        """Raise StreamConfigMismatchError unless this object has these settings."""
        wanted = {
            "partitions": self.partitions,
            "key": self.key,
            "subject": self.subject,
            "token": self.token,
            "output": output,
        }
        diff = {
            name: (value, getattr(settings, name)) for name, value in wanted.items() if value != getattr(settings, name)
        }
        if diff:
            differences = ", ".join(f"{name} {there!r} instead of {here!r}" for name, (here, there) in diff.items())
            remedy = "use its settings, stop all members and call reset() to change them, or use another group name"
            if "output" in diff:
                remedy = "an exactly-once group keeps its positions in its output stream; use another group name"
            raise StreamConfigMismatchError(
                f"group {self.name!r} of stream {self.stream!r} has {differences}; {remedy}", diff=diff
            )

    def lanes(self, settings: Settings) -> Lanes:
        """Return the reading of the stream for a member."""
        return Lanes(
            lambda number: self.reader(number, First()),
            self.partitioner.of if self.token is None else self._partitions_by_token,
            name=self.name,
            settings=settings,
            buffer=self.buffer,
            buffer_bytes=BUFFER_BYTES,
        )

    def _partitions_by_token(self, messages: Sequence[StoredMsg]) -> list[int]:
        """Return the partitions that the subjects name; -1 for one that the group has not."""
        numbers = {str(number): number for number in range(self.partitions)}
        return [numbers.get(message.subject.split(".")[self.token or 0], -1) for message in messages]

    def reader(self, number: int | None, start: Start) -> LogReader:
        subject = self.subject
        if number is not None and subject is not None and self.token is not None:
            tokens = subject.split(".")
            subject = ".".join([*tokens[: self.token], str(number), *tokens[self.token + 1 :]])
        return LogReader(
            self.context,
            self.stream,
            start=start,
            subject=subject,
            on_lost=self.on_lost,
            timeout=self.store.timeout,
            patience=self.store.patience,
            poll=self.poll,
            doorbell=self.doorbell,
        )

    async def stream_state(self) -> StreamState:
        look = Retry(self.store.patience)
        return await look.call(lambda: stream_state(self.store.context, self.stream, self.store.timeout))

    async def settings(self, start: Start, output: tuple[str, str] | None) -> Settings:
        reader = self.reader(None, start)
        position = await reader.open()
        assert reader.created is not None
        return Settings(
            stream=self.stream,
            created=reader.created,
            partitions=self.partitions,
            key=self.key,
            subject=self.subject,
            token=self.token,
            start=position,
            first=isinstance(start, First),
            epoch=NUID().next().decode(),
            output=output,
        )
