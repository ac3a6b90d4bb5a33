"""Partitioned groups: several workers share a stream, each key's messages are handled in order by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from nats.js import JetStreamContext

from jetstream_ext.client.api import gather_bounded, get_at_leader
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.client.retry import Retry, is_transient_read
from jetstream_ext.errors import GroupActiveError
from jetstream_ext.kv.reads import snapshot
from jetstream_ext.log.callbacks import Callback, JoinOptions
from jetstream_ext.log.group_plan import GroupPlan
from jetstream_ext.log.group_store import GroupStore, GroupView, Settings, encode
from jetstream_ext.log.liveness import decode_key
from jetstream_ext.log.member import Member
from jetstream_ext.log.membership import GroupMembership
from jetstream_ext.log.offsets import First, Last, New, Seq, Time
from jetstream_ext.protocol.options import check_seconds
from jetstream_ext.protocol.records import Record
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.text import counted

_FIRST: Final = First()
_LOOKUPS_IN_FLIGHT: Final = 64


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member that is alive.

    Attributes:
        id: Its id.
        label: Its name for people.
        last_seen: When it last renewed its key, by the clock of the bucket's leader (aware, UTC).
        leaving: Whether it is handing its partitions over.
        partitions: The partitions that it owns.
    """

    id: str
    label: str
    last_seen: datetime
    leaving: bool
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A partition.

    Attributes:
        partition: Its number, from 0.
        owner: The id of the member that works on it; None if there is none now.
        position: The next sequence to handle, as it was committed last.
        lag: How many sequences of the stream are at or above the position, also those of other partitions.
    """

    partition: int
    owner: str | None
    position: int
    lag: int


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """What a group's bucket says of it.

    Attributes:
        name: The group.
        stream: The stream.
        members: The members that are alive, by their labels.
        partitions: Every partition, in order.
        last_seq: The stream's last sequence.
    """

    name: str
    stream: str
    members: tuple[MemberStatus, ...]
    partitions: tuple[PartitionStatus, ...]
    last_seq: int


class Group:
    """A group of workers that share a stream; the messages of each key are handled in order by one of them.

    ::

        group = log.Group(js, "ORDERS", "billing", partitions=16, key=[1])   # orders.<customer>.<what>
        async with group.join() as member:
            async for msg in member:            # the messages of the partitions that this member owns
                await handle(msg)

    The key of a message decides its partition. The group assigns every partition to one of the members that are alive, and
    again when a member joins, leaves or dies. It makes no consumer and no copy of the stream: its members are keys of a
    bucket that expire, and the positions are its own. With `member.run` or `exactly_once_group` the partitions of one member
    are handled at the same time; an ``async for`` returns their messages one by one.

    A message is handled at least once. Its partition's position is stored behind the one before (compare and set), so if two
    members think that they own a partition, only one of them can commit. For outputs that are stored exactly once, use
    `exactly_once_group`.

    All members must agree on `partitions`, `key`, `subject` and `token`: the first one stores them, and a member with others
    gets an error. `reset` changes them.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name. A mirror is read by its own name.
        name: The group's name: one token, without dots.
        partitions: How many partitions the group has, from 1 to 4,096. As many members can work at the same time; choose a
            multiple of those that you expect. More members are standbys.
        key: The positions of the subject's tokens, from 0, that are the key; None is the whole subject. The partition is the
            FNV-1a-32 hash of these tokens modulo `partitions`, as in the server's subject mapping ``partition(n, …)``. (Its
            numbers count the wildcards of the mapping's source, from 1.)
        subject: Read only what matches this filter (wildcards allowed); None is everything.
        token: The position, from 0, of a token of the subjects that is the number of the partition in decimal digits, for
            example because the stream has a subject transform with ``partition(n, …)``. Then the server filters what each member reads, and `key`
            has no use. `subject` must have a ``*`` there. Messages with another token there are in no partition and are not read.
        start: Where a new group starts: `First()`, `Seq(n)`, `Time(t)`, `Last()` or `New()`. The first member looks it up; a
            time in the future counts as `New()`.
        bucket: The bucket that holds the group. `join` creates it if it does not exist, with as many replicas as the stream.
        heartbeat: Seconds between two renewals of a member's key, from 0.1 to 86,400. The key has a TTL of three times as
            long (whole seconds, at least 2): after that, other members take over from one that died.
        buffer: The most messages that a member reads ahead for each partition, within 4 MiB. A partition with a full buffer
            does not delay the others: messages that it could not take are read again. So with a small buffer, of tens of
            messages, the member reads most of the stream many times.
        on_lost: As for `LogReader`.
        timeout: Seconds to wait for an answer; None is the context's own.
        patience: Seconds that transient errors may last.
        poll, doorbell: As for `LogReader`.

    Attributes:
        context: The JetStream context.
        stream: The stream's name.
        name: The group's name.
        partitions: How many partitions the group has.
        key: The positions of the key's tokens, or None.
        subject: The filter, or None.
        token: The position of the partition's token, or None.
        bucket: The bucket's name.
        heartbeat: Seconds between two renewals.
        ttl: Seconds after which the server removes the key of a member that died.

    Raises:
        BadSubjectError: A name or the filter is not valid.
        ValueError, TypeError: A number is out of range, or `subject` has no ``*`` at `token`.

    Requires: nats-server 2.11 (per-message TTL, ADR-43); ``allow_direct`` on the stream; on the bucket ``allow_direct`` and
        ``allow_msg_ttl``; permission for ``STREAM.INFO``, ``STREAM.MSG.GET`` and ``DIRECT.GET`` of both, and for the group's keys.
    """

    def __init__(
        self,
        js: JetStreamContext,
        stream: str,
        name: str,
        *,
        partitions: int,
        key: Sequence[int] | None = None,
        subject: str | None = None,
        token: int | None = None,
        start: First | Seq | Time | Last | New = _FIRST,
        bucket: str = "groups",
        heartbeat: float = 3.0,
        buffer: int = 1000,
        on_lost: Literal["error", "skip"] = "error",
        timeout: float | None = None,
        patience: float = 30.0,
        poll: float = 0.25,
        doorbell: bool = True,
    ) -> None:
        self._plan = plan = GroupPlan(
            context=js,
            stream=stream,
            name=name,
            partitions=partitions,
            key=key,
            subject=subject,
            token=token,
            start=start,
            bucket=bucket,
            heartbeat=heartbeat,
            buffer=buffer,
            on_lost=on_lost,
            timeout=timeout,
            patience=patience,
            poll=poll,
            doorbell=doorbell,
        )
        self.context: JetStreamContext = js
        self.stream: str = stream
        self.name: str = name
        self.partitions: int = partitions
        self.key: tuple[int, ...] | None = None if plan.key is None else tuple(plan.key)
        self.subject: str | None = subject
        self.token: int | None = token
        self.bucket: str = bucket
        self.heartbeat: float = plan.heartbeat
        self.ttl: int = plan.ttl

    def __repr__(self) -> str:
        return f"<Group {self.name!r} of stream {self.stream!r}: {counted(self.partitions, 'partition')}>"

    @classmethod
    async def open(
        cls,
        js: JetStreamContext,
        stream: str,
        name: str,
        *,
        bucket: str = "groups",
        timeout: float | None = None,
        patience: float = 30.0,
    ) -> Group:
        """Return a group that exists, with the settings that its bucket has.

        Args:
            js: nats-py's JetStream context.
            stream: The stream's name.
            name: The group's name.
            bucket: The bucket that holds the group.
            timeout: As for `Group`.
            patience: As for `Group`.

        Raises:
            nats.js.errors.BucketNotFoundError: The bucket does not exist.
            KeyError: It has no such group.
            Exception: As for `status`.

        Cancellation: Safe; nothing is left behind.
        """
        check_name(stream, "stream name")
        check_name(name, "group name")
        store = GroupStore(js, bucket, stream, name, timeout=timeout, patience=check_seconds(patience, "patience"))
        await store.open()
        known = store.decode(Settings, await store.settings_writer().read())
        if known is None:
            raise KeyError(f"bucket {bucket!r} has no group {name!r} of stream {stream!r}")
        return cls(
            js,
            stream,
            name,
            partitions=known.partitions,
            key=known.key,
            subject=known.subject,
            token=known.token,
            bucket=bucket,
            timeout=timeout,
            patience=patience,
        )

    def join(
        self,
        *,
        label: str | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_partitions_lost: Callback | None = None,
        auto_commit: bool = True,
        every: int = 1000,
        seconds: float = 5.0,
        revoke_timeout: float = 60.0,
    ) -> Member:
        """Return a new member: an async context manager that joins the group, and leaves it at the end.

        ``async for msg in member`` returns the messages of all its partitions, those of each partition in order, and waits
        for more. A message counts as handled when the loop asks for the next one; before you leave a loop behind a handled
        message, call `Member.commit`. Positions are committed after `every` handled messages of a partition, every `seconds`, and before a partition
        is handed over. Messages that were handled and not committed are handled again after a crash, or if the partition was lost.

        Leaving hands the partitions over as soon as `on_revoked` has returned; without an answer of a server it gives up after the
        group's `patience`. A member that leaves because of an exception or a cancellation takes up to 1 s for each of these steps,
        and the others take over what it could not hand over; the message that its loop has in its hands does not count as handled.

        Args:
            label: The member's name for people; None is made of the host's name and the process id.
            on_assigned: Called with the numbers of partitions (a sorted tuple) that this member owns from now on, before it
                gets their messages. May be an async function, as the others.
            on_revoked: Called with partitions that are to be handed over, when no message of them is being handled any more.
                Until it has returned, they belong to this member: what it commits counts. The next owner starts after that.
            on_partitions_lost: Called with partitions that other members may own already, because this one could not renew its key in
                time, or was fenced; nothing of them can be committed. None calls `on_revoked`. Cancelled after `revoke_timeout`.
            auto_commit: Whether positions are committed automatically; False leaves it to `Member.commit`.
            every: Commit a partition's position after so many handled messages of it, from 1.
            seconds: Commit the positions that have moved after so many seconds; those of partitions without messages 64 at a time.
            revoke_timeout: Seconds that a hand-over to another member may take: for the messages in hand, and for `on_revoked`.
                Then the partitions count as lost: `run` cancels their handlers, `on_partitions_lost` is called, and their next
                owners continue after the last commit. `math.inf` waits indefinitely.

        Raises:
            ValueError, TypeError: A number is out of range.
            StreamConfigMismatchError: On entering: the group has other settings (see `Group`), or the bucket lacks an option.
                Later: another program has changed them.
            StreamRecreatedError, PositionLostError: As for `LogReader`: the stream was deleted and created again, or
                messages were removed before the group handled them. Stop the members and call `Group.reset`; or make the
                group with ``on_lost="skip"``, which continues after removed messages.
            nats.js.errors.NotFoundError: On entering: the stream does not exist.
            UnsupportedFeatureError: The server is older than 2.11.
            RuntimeError: The member was entered before, is closed, or another task iterates over it. Or it was left in a callback.
            Exception: What a callback raised (except the `FencedError` of its own `commit`), or an error of the connection; also
                on leaving, if the caller does not know it yet. On entering, in a commit, and when the member takes
                or gives back a partition, also transient errors that lasted longer than the group's `patience`; a permission
                that is missing may show as such. Enter a new member to continue.

        While the servers do not answer, an iteration waits indefinitely; the member logs warnings to the logger
        ``jetstream_ext``, and tries again.

        Cancellation: Entering and leaving may be cancelled. Nothing is left behind, except the member's key if no server
            answers; it ends by itself.
        """
        options = JoinOptions(
            label=label,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_partitions_lost=on_partitions_lost,
            auto_commit=auto_commit,
            every=every,
            seconds=seconds,
            revoke_timeout=revoke_timeout,
        )
        return Member(GroupMembership(self._plan, options))

    async def status(self) -> GroupStatus:
        """Return the members and partitions of the group, at one moment of its bucket.

        A group that has not started has no members, and its partitions are at the stream's first sequence.

        Raises:
            nats.js.errors.BucketNotFoundError: The bucket does not exist.
            nats.js.errors.NotFoundError: The stream, or the output stream of an exactly-once group, does not exist.
            ValueError: Another program has written a value that no member writes.
            StreamConfigMismatchError: The group has other settings than this object.
            Exception: Transient errors lasted longer than the group's `patience`.

        Cancellation: Safe; nothing is left behind.
        """
        await self._plan.store.open()
        state = await self._plan.stream_state()
        view = await self._view()
        if view is None:
            start, positions, owners = state.first_seq, dict[int, int](), dict[int, str]()
        else:
            self._plan.check_settings(view.settings, view.settings.output)
            start, positions = view.settings.start, view.positions
            if view.settings.output is not None:
                positions = await self._output_positions(view.settings)
            owners = {number: owner.id for number, owner in view.owners.items() if owner.id in view.members}
        partitions = tuple(
            PartitionStatus(number, owners.get(number), position, max(0, state.last_seq + 1 - position))
            for number in range(self.partitions)
            for position in [positions.get(number, start)]
        )
        found = (
            MemberStatus(
                it, record.label, seen, record.leaving, tuple(sorted(n for n, own in owners.items() if own == it))
            )
            for it, (record, seen) in ({} if view is None else view.members).items()
        )
        ordered = tuple(sorted(found, key=lambda member: (member.label, member.id)))
        return GroupStatus(self.name, self.stream, ordered, partitions, state.last_seq)

    async def reset(self, start: First | Seq | Time | Last | New | None = None) -> int:
        """Give the group the settings of this object, and let all its partitions start at one place; return the sequence.

        Use it to change the number of partitions or the key, to start again after the stream was deleted and created again,
        or to handle messages again. All members must have left.

        Args:
            start: Where to start; None is the lowest position of the group. Then nothing is lost, and the partitions that
                were further handle some messages again. An exactly-once group would store outputs again, so it has no such
                default.

        Raises:
            GroupActiveError: Members are alive; nothing was changed.
            ValueError: `start` is None, and the group is an exactly-once group, or its positions belong to a stream that was
                deleted since.
            KeyError: There is no such group.
            FencedError: The settings were changed meanwhile, by another reset; nothing was changed.
            Exception: As for `status`, and for `LogReader` if the start cannot be found.

        Cancellation: All partitions start at the new place, or none.
        """
        await self._plan.store.open()
        writer = self._plan.store.settings_writer()
        await writer.read()
        view = await self._view()
        if view is None:
            raise KeyError(f"bucket {self.bucket!r} has no group {self.name!r} of stream {self.stream!r}")
        if view.members:
            labels = sorted(record.label for record, _ in view.members.values())
            seconds = max(record.seconds for record, _ in view.members.values())
            raise GroupActiveError(
                f"group {self.name!r} of stream {self.stream!r} has members that are alive: {', '.join(labels)}; nothing was changed; "
                f"stop them (the key of one that died ends within {seconds} s)",
                members=tuple(labels),
            )
        before = view.settings
        if start is None:
            if before.output is not None:
                raise ValueError(
                    f"group {self.name!r} stores outputs exactly once, and its partitions are at different positions; pass start"
                )
            (await self._plan.stream_state()).check_created(before.created)
            start = Seq(min(view.positions.get(number, before.start) for number in range(before.partitions)))
        settings = await self._plan.settings(start, before.output)
        await writer.store([], encode(settings))
        return settings.start

    async def _view(self) -> GroupView | None:
        """Return what the bucket has of the group at one moment; None for a group that has not started."""
        store, retry = self._plan.store, Retry(self._plan.store.patience, transient=is_transient_read)
        found = await retry.call(lambda: snapshot(store.kv, [f"{store.prefix}>"], timeout=store.timeout))
        if (config := found.get(store.config_key)) is None:
            return None
        view = GroupView(store, store.decode_value(Settings, store.config_key, config.value))
        for key, entry in found.items():
            view.note(key, entry)
        return view

    async def _output_positions(self, settings: Settings) -> dict[int, int]:
        assert settings.output is not None
        stream, prefix = settings.output

        async def find(number: int) -> tuple[int, int] | None:
            subject = f"{prefix}.{self.name}.{number}"
            find = Retry(self._plan.store.patience)
            found = await find.call(
                lambda: get_at_leader(
                    self._plan.store.context, stream, {"last_by_subj": subject}, self._plan.store.timeout
                )
            )
            try:
                record = None if found is None else Record.decode(found.data)
            except ValueError:
                return None
            return None if record is None or record.epoch != settings.epoch else (number, record.seq)

        found = await gather_bounded(find, range(self.partitions), limit=_LOOKUPS_IN_FLIGHT)
        return dict(it for it in found if it is not None)


def plan_of(group: Group) -> GroupPlan:
    """Return the plan of a group; raise TypeError for anything else."""
    if not isinstance(group, Group):
        raise TypeError(f"group must be a Group, not {type(group).__name__}")
    return group._plan  # noqa: SLF001 - its own module


async def list_groups(
    js: JetStreamContext, bucket: str = "groups", *, timeout: float | None = None
) -> list[tuple[str, str]]:
    """Return the groups that a bucket has: pairs of stream and group name, sorted.

    Args:
        js: nats-py's JetStream context.
        bucket: The bucket.
        timeout: Seconds to wait for each answer; None is the context's own.

    Raises:
        nats.js.errors.BucketNotFoundError: The bucket does not exist.
        Exception: As for `jetstream_ext.kv.snapshot`.

    Cancellation: Safe; nothing is left behind.
    """
    check_name(bucket, "bucket name")
    found = await snapshot(open_bucket(js, bucket), ["*.*.config"], timeout=timeout)
    return sorted((decode_key(stream), decode_key(group)) for stream, group, _ in (key.split(".") for key in found))
