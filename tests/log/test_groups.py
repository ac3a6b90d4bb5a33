"""Groups: members share the partitions of a stream, hand them over, and take over from each other."""

import asyncio
import contextlib
import gc
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamSource, SubjectTransform
from nats.js.errors import BucketNotFoundError, NotFoundError

from jetstream_ext import BatchMessage, DirectGet, StoredMsg, errors
from jetstream_ext.log import (
    DeadLetter,
    First,
    Group,
    Member,
    Seq,
    Time,
    exactly_once_group,
    list_groups,
    partition_of,
)
from jetstream_ext.protocol.partitions import assign
from jetstream_ext.testing import NatsServer, ReferenceServer

sys.path.insert(0, str(Path(__file__).parent))

from group_members import (
    MakeGroup,
    NewGroup,
    breakable_server,
    ignore,
    positions,
    replace_publish,
    running,
    take,
    until,
)

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


class Worker:
    """A member that handles messages until it is stopped; `seen` has their sequences."""

    def __init__(self, group: Group, *, handler: Any = ignore) -> None:
        self.seen: list[int] = []
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.handler = handler
        self.member = group.join(
            on_assigned=lambda it: self.events.append(("assigned", it)),
            on_revoked=lambda it: self.events.append(("revoked", it)),
            on_partitions_lost=lambda it: self.events.append(("lost", it)),
        )
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> None:
        async with self.member as member:
            async for message in member:
                self.seen.append(message.seq)
                await self.handler(message)

    async def stop(self) -> None:
        self.member.stop()
        await self.task


async def change_record(group: Group, key: str, **fields: Any) -> None:
    """Change what a group has stored, as another program."""
    kv, key = await group.context.key_value(group.bucket), f"{group.stream}.{group.name}.{key}"
    known = json.loads((await kv.get(key)).value or b"")
    await kv.put(key, json.dumps(known | fields).encode())


def seqs(messages: list[StoredMsg]) -> list[int]:
    return sorted(message.seq for message in messages)


class TestOneMember:
    async def test_returns_every_message_of_a_partition_in_order(self, new_group: NewGroup, more: More) -> None:
        """A later member goes on behind what was handled."""
        group = await new_group(300, key=[1])
        async with group.join() as member:
            found = await take(member, 300)
            assert member.partitions == (0, 1, 2, 3)
            await member.commit()
        assert seqs(found) == list(range(1, 301))
        for number in range(4):
            mine = [message.seq for message in found if partition_of(message.subject, 4, [1]) == number]
            assert mine == sorted(mine)
        await more(group.stream, 301, 310)
        async with group.join() as member:
            assert seqs(await take(member, 10)) == list(range(301, 311))

    async def test_a_message_in_hand_is_not_handled_if_the_block_raises(self, new_group: NewGroup) -> None:
        """Or if its handler was cancelled."""
        group = await new_group(10, partitions=1)

        async def fail() -> None:
            async with group.join() as member:
                assert seqs(await take(member, 4)) == [1, 2, 3, 4]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()

        async def handle(member: Member) -> None:
            async for _ in member:
                await asyncio.Event().wait()

        async with group.join() as member:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(handle(member), 1)
        async with group.join() as member:
            assert (await anext(member)).seq == 4

    async def test_commits_after_a_number_of_messages_and_a_time(self, new_group: NewGroup, more: More) -> None:
        group = await new_group(10, partitions=1)
        async with group.join(every=5, seconds=3600) as member:
            await take(member, 6)
            assert await positions(group) == [6]
        await more(group.stream, 11, 20)
        async with group.join(every=1000, seconds=0.05) as member:
            await take(member, 3)
            async with asyncio.timeout(30):
                while (await positions(group))[0] < 8:
                    await asyncio.sleep(0.02)
        assert await positions(group) == [8], "the last one was not put down"

    async def test_positions_of_partitions_without_messages_are_committed(self, new_group: NewGroup) -> None:
        group = await new_group(3, partitions=200)
        async with group.join(seconds=0.1) as member:
            with_messages = {partition_of(message.subject, 200, None) for message in await take(member, 3)}
            async with asyncio.timeout(60):
                while any(it.lag for it in (await group.status()).partitions if it.partition not in with_messages):
                    await asyncio.sleep(0.05)

    async def test_two_tasks_cannot_iterate(self, new_group: NewGroup) -> None:
        async with (await new_group()).join() as member:
            waiting = asyncio.ensure_future(anext(member))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task"):
                await anext(member)
            waiting.cancel()

    async def test_commit_stores_the_position_behind_the_message_in_hand(self, new_group: NewGroup) -> None:
        """And the status shows it."""
        group = await new_group(30, partitions=1)
        async with group.join(label="one", auto_commit=False) as member:
            await take(member, 11)
            await member.commit()
            await take(member, 3)
            status = await group.status()
        assert (status.name, status.stream, status.last_seq) == ("g", group.stream, 30)
        assert [(it.label, it.partitions, it.leaving) for it in status.members] == [("one", (0,), False)]
        assert [(it.owner, it.position, it.lag) for it in status.partitions] == [(member.id, 12, 19)]
        assert await positions(group) == [12]


class TestRun:
    async def test_handles_partitions_at_the_same_time(self, new_group: NewGroup) -> None:
        """A partition whose handler waits does not hold up the others, whatever is behind it in the stream."""
        group = await new_group(600, key=[1], buffer=10)
        slow = partition_of(f"{group.stream}.0", 4, [1])
        others = [n for n in range(1, 601) if partition_of(f"{group.stream}.{n % 3}", 4, [1]) != slow]
        release, seen = asyncio.Event(), list[int]()

        async def handle(message: StoredMsg) -> None:
            if partition_of(message.subject, 4, [1]) == slow:
                await release.wait()
            seen.append(message.seq)

        async with group.join() as member, running(member.run(handle)):
            await until(lambda: len(seen) == len(others) > 0)
            assert sorted(seen) == others
            release.set()
            await until(lambda: len(seen) == 600)
        assert sorted(seen) == list(range(1, 601))

    async def test_raises_what_the_handler_raises_and_keeps_the_message(self, new_group: NewGroup) -> None:
        group = await new_group(10, partitions=1)

        def handle(message: StoredMsg) -> None:
            if message.seq == 5:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            async with group.join() as member:
                await member.run(handle)
        async with group.join() as member:
            assert (await anext(member)).seq == 5

    async def test_ends_the_member(self, new_group: NewGroup) -> None:
        async with (await new_group(3)).join() as member:
            async with running(member.run(ignore)):
                await until(lambda: member.partitions)
            for again in (member.run(ignore), anext(member)):
                with pytest.raises(RuntimeError, match="has ended"):
                    await again

    async def test_commit_in_a_handler_leaves_out_what_other_handlers_have(self, new_group: NewGroup) -> None:
        group = await new_group(key=[1])
        for data, number in ((b"slow", 0), (b"fast", 1)):
            key = next(k for k in range(99) if partition_of(f"{group.stream}.{k}", 4, [1]) == number)
            await group.context.publish(f"{group.stream}.{key}", data)
        started, committed = asyncio.Event(), asyncio.Event()

        async def handle(message: StoredMsg) -> None:
            if message.data == b"slow":
                started.set()
                await asyncio.Event().wait()
            await started.wait()
            await member.commit()
            committed.set()

        async with asyncio.timeout(60), group.join(auto_commit=False) as member, running(member.run(handle)):
            await committed.wait()
        async with group.join() as member:
            assert {message.data for message in await take(member, 2)} == {b"slow", b"fast"}

    async def test_a_handler_that_raises_cancelled_error_ends_the_member(self, new_group: NewGroup) -> None:
        async def handle(_: StoredMsg) -> None:
            raise asyncio.CancelledError

        async with asyncio.timeout(30), (await new_group(3)).join() as member:
            with pytest.raises(RuntimeError, match="raised CancelledError"):
                await member.run(handle)

    async def test_handlers_that_never_await_do_not_keep_the_member_from_renewing_its_key(
        self, new_group: NewGroup
    ) -> None:
        group, lost, handled = await new_group(120, partitions=6), list[int](), list[int]()

        def handle(message: StoredMsg) -> None:
            handled.append(message.seq)
            time.sleep(0.03)

        async with group.join(on_partitions_lost=lost.extend) as member, running(member.run(handle)):
            await until(lambda: len(handled) == 120)
        assert lost == []


class TestStop:
    async def test_the_iteration_ends_behind_the_message_in_hand(self, new_group: NewGroup) -> None:
        group, seen = await new_group(20, partitions=2), list[int]()
        async with asyncio.timeout(30), group.join() as member:
            async for message in member:
                seen.append(message.seq)
                if len(seen) == 5:
                    member.stop()
                    member.stop()
                    await asyncio.sleep(0.2)
            assert member.partitions == ()
        assert len(seen) == 5
        async with group.join() as member:
            assert sorted(seen + seqs(await take(member, 15))) == list(range(1, 21))

    async def test_run_ends_when_its_handlers_have(self, new_group: NewGroup) -> None:
        group = await new_group(40)
        begun, handled, revoked = list[int](), list[int](), list[int]()
        count = len({partition_of(f"{group.stream}.{key}", 4, None) for key in range(3)})
        go_on = asyncio.Event()

        async def handle(message: StoredMsg) -> None:
            begun.append(message.seq)
            await go_on.wait()
            handled.append(message.seq)

        async with asyncio.timeout(30), group.join(on_revoked=revoked.extend) as member:
            task = asyncio.ensure_future(member.run(handle))
            await until(lambda: len(begun) == count)
            member.stop()
            await asyncio.sleep(0.1)
            assert not task.done()
            go_on.set()
            await task
            assert sorted(revoked) == [0, 1, 2, 3]
        assert sorted(handled) == sorted(begun)
        async with group.join() as member:
            assert sorted(handled + seqs(await take(member, 40 - len(handled)))) == list(range(1, 41))

    async def test_a_member_that_waits_ends(self, new_group: NewGroup, leak_check: Any) -> None:
        """One that is stopped before it joins leaves at once."""
        async with asyncio.timeout(30), (await new_group()).join() as member:
            waiting = asyncio.ensure_future(anext(member))
            await until(lambda: member.partitions)
            member.stop()
            with pytest.raises(StopAsyncIteration):
                await waiting
        group = await new_group(3)
        for runs in (False, True):
            member = group.join()
            member.stop()
            async with asyncio.timeout(30), member:
                if runs:
                    await member.run(lambda _: pytest.fail("it handles a message"))
                else:
                    assert [message async for message in member] == []
        await leak_check.assert_clean()

    async def test_run_ends_although_no_server_answers(self) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def handle(_: StoredMsg) -> None:
            begun.set()
            await go_on.wait()

        async with breakable_server() as (server, js), asyncio.timeout(60):
            group = Group(js, "S", "g", partitions=1, bucket="B", heartbeat=0.5, patience=3.0)
            async with group.join(revoke_timeout=1.0) as member:
                task = asyncio.ensure_future(member.run(handle))
                await begun.wait()
                server.stop()
                member.stop()
                go_on.set()
                await asyncio.wait({task})
                task.exception()


class TestHandOversThatTakeTooLong:
    async def other_gets_one(self, group: Group) -> Member:
        """Let another member join; return it when it has one of the two partitions."""
        other = group.join()
        await other.__aenter__()
        await until(lambda: len(other.partitions) == 1)
        return other

    async def test_a_handler_that_hangs_is_cancelled(
        self, new_group: NewGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = await new_group(40, partitions=2)
        begun, cancelled, lost, revoked = list[int](), list[int](), list[int](), list[int]()

        async def hang(message: StoredMsg) -> None:
            begun.append(message.seq)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.seq)
                raise

        joined = group.join(revoke_timeout=0.5, on_revoked=revoked.extend, on_partitions_lost=lost.extend)
        async with asyncio.timeout(60), joined as member, running(member.run(hang)) as task:
            await until(lambda: len(begun) == 2)
            other = await self.other_gets_one(group)
            assert tuple(lost) == other.partitions
            assert len(cancelled) == 1
            assert (await anext(other)).seq == cancelled[0]
            assert not revoked
            assert "has lost partitions" in caplog.text
            assert not task.done()
        await other.__aexit__(None, None, None)

    async def test_a_message_that_the_loop_keeps(self, new_group: NewGroup) -> None:
        group = await new_group(40, partitions=1)
        async with asyncio.timeout(60), group.join(revoke_timeout=0.5) as member:
            await take(member, 3)
            member.stop()
            while (await group.status()).partitions[0].owner is not None:
                await asyncio.sleep(0.02)
            assert await positions(group) == [1]
            with pytest.raises(StopAsyncIteration):
                await anext(member)

    async def test_a_callback_that_hangs(self, new_group: NewGroup) -> None:
        for callback in ("on_assigned", "on_revoked"):
            group, called, lost = await new_group(40, partitions=2), list[int](), list[int]()

            async def hang(partitions: tuple[int, ...], called: list[int] = called) -> None:
                called.extend(partitions)
                await asyncio.Event().wait()

            options: dict[str, Any] = {callback: hang, "on_partitions_lost": lost.extend}
            async with asyncio.timeout(60), group.join(revoke_timeout=0.5, **options) as member:
                await until(lambda: len(member.partitions) == 2)
                other = await self.other_gets_one(group)
                if callback == "on_revoked":
                    await until(lambda: tuple(lost) == other.partitions)  # noqa: B023
                assert len(called) == (2 if callback == "on_assigned" else 1)
                await take(other, 1)
            await other.__aexit__(None, None, None)


class TestSeveralMembers:
    async def test_share_the_partitions_and_hand_them_over(self, new_group: NewGroup, more: More) -> None:
        group = await new_group(100, key=[1])
        one = Worker(group)
        await until(lambda: len(one.seen) == 100)
        other = Worker(group)
        await until(lambda: one.member.partitions and len(one.member.partitions + other.member.partitions) == 4)
        shares = assign([one.member.id, other.member.id], 4)
        await until(lambda: list(other.member.partitions) == shares[other.member.id])
        assert list(one.member.partitions) == shares[one.member.id]
        await more(group.stream, 101, 200)
        await until(lambda: len(one.seen + other.seen) == 200)
        await one.stop()
        await until(lambda: len(other.member.partitions) == 4)
        await more(group.stream, 201, 300)
        await until(lambda: len(one.seen + other.seen) == 300)
        await other.stop()
        assert sorted(one.seen + other.seen) == list(range(1, 301))
        assert one.events[:2] == [("assigned", (0, 1, 2, 3)), ("revoked", tuple(shares[other.member.id]))]

    async def test_the_partitions_of_a_member_that_died_are_taken_over(
        self, new_group: NewGroup, make_group: MakeGroup, more: More, own_nc: Client
    ) -> None:
        group = await new_group(50, js=own_nc.jetstream())
        dead, other = Worker(group), Worker(make_group(group.stream))
        await until(lambda: len(dead.member.partitions + other.member.partitions) == 4 and dead.member.partitions)
        await own_nc.close()  # without its connection, it commits, releases and deletes nothing
        await until(lambda: len(other.member.partitions) == 4)
        await more(group.stream, 51, 60)
        await until(lambda: set(range(51, 61)) <= set(other.seen))
        await other.stop()
        assert set(dead.seen + other.seen) == set(range(1, 61))
        with pytest.raises(nats.errors.ConnectionClosedError):
            await dead.task

    async def test_more_members_than_partitions_stand_by(self, new_group: NewGroup, more: More) -> None:
        group = await new_group(10, partitions=1)
        workers = [Worker(group) for _ in range(3)]
        await until(lambda: sum(len(it.seen) for it in workers) == 10)
        await until(lambda: any(it.member.partitions for it in workers))
        await next(it for it in workers if it.member.partitions).stop()
        await more(group.stream, 11, 20)
        await until(lambda: sum(len(it.seen) for it in workers) == 20)
        for worker in workers:
            await worker.stop()
        assert sorted(seq for it in workers for seq in it.seen) == list(range(1, 21))

    async def test_what_is_committed_in_on_revoked_counts_before_the_next_owner_starts(
        self, new_group: NewGroup
    ) -> None:
        group, batch, flushed = await new_group(40, partitions=2, key=[1]), list[int](), list[int]()

        async def flush(_: tuple[int, ...]) -> None:
            await asyncio.sleep(0.1)  # the others must wait
            flushed.extend(batch)
            batch.clear()
            await member.commit()

        async with group.join(on_revoked=flush, auto_commit=False) as member:
            batch += [message.seq for message in await take(member, 40)]
            waiting = asyncio.ensure_future(anext(member))  # the message in its hands is handled now
            other = Worker(group)
            await until(lambda: other.member.partitions)
            assert sorted(flushed) == list(range(1, 41))
            waiting.cancel()
        await until(lambda: len(other.member.partitions) == 2)
        await other.stop()
        assert other.seen == []

    async def test_a_member_whose_key_was_not_renewed_stops_and_comes_back(
        self, make_stream: Make, make_group: MakeGroup, more: More, monkeypatch: pytest.MonkeyPatch, nc: Client
    ) -> None:
        stream = await make_stream(messages=10)
        own, away = nc.jetstream(timeout=30), False
        one, other = Worker(make_group(stream, partitions=2, js=own)), Worker(make_group(stream, partitions=2))
        publish = own.publish

        async def lose(subject: str, *arguments: Any, **options: Any) -> Any:
            if away and ".members." in subject:
                raise nats.errors.TimeoutError
            return await publish(subject, *arguments, **options)

        replace_publish(monkeypatch, own, lose)
        await until(lambda: len(one.member.partitions + other.member.partitions) == 2 and one.member.partitions)
        away = True
        await until(lambda: len(other.member.partitions) == 2)
        assert one.member.partitions == ()
        assert one.events[-1][0] == "lost"
        away = False
        await until(lambda: one.member.partitions)
        await more(stream, 11, 20)
        await until(lambda: set(range(1, 21)) == set(one.seen + other.seen))
        await one.stop()
        await other.stop()

    async def test_a_member_that_is_fenced_gives_the_partition_up(self, new_group: NewGroup) -> None:
        """Another program has stored a record of the partition, or deleted it; then it starts where the group has."""
        for deletes in (False, True):
            group = await new_group(10, partitions=1, name=f"g{deletes}")
            async with group.join(auto_commit=False) as member:
                await take(member, 5)
                await member.commit()
                await take(member, 1)
                if deletes:
                    kv = await group.context.key_value(group.bucket)
                    await kv.delete(f"{group.stream}.{group.name}.partitions.0")
                else:  # "x" is no member, so that it is claimed back
                    await change_record(group, "partitions.0", owner="x", seq=3)
                with pytest.raises(errors.FencedError, match=r"the positions of partition 0 were not stored"):
                    await member.commit()
                assert (await anext(member)).seq == (1 if deletes else 3)

    async def test_a_member_that_may_not_take_partitions_ends(self) -> None:
        allowed = '"$JS.API.>", "S", "$KV.B.S.g.config", "$KV.B.S.g.members.>"'
        users = (
            f"{{ user: admin, password: x }}, {{ user: some, password: x, permissions: {{ publish: [{allowed}] }} }}"
        )
        async with (
            NatsServer(config=f"authorization {{ users: [ {users} ] }}") as server,
            await nats.connect(server.url, user="some", password="x", error_cb=ignore) as nc,
        ):
            js = nc.jetstream(timeout=3)
            await js.add_stream(name="S", subjects=["S"], allow_direct=True)
            async with (
                asyncio.timeout(60),
                Group(js, "S", "g", partitions=2, bucket="B", patience=3.0).join() as member,
            ):
                with pytest.raises(errors.RequestTimeoutError, match=r"partitions"):
                    await anext(member)

    async def test_a_key_of_another_program_does_not_end_members(
        self, new_group: NewGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = await new_group(10)
        async with group.join() as member:
            await take(member, 1)
            kv = await group.context.key_value(group.bucket)
            await kv.put(f"{group.stream}.g.members.x", b"nonsense")
            await until(lambda: "nonsense" in caplog.text)
            await take(member, 9)

    async def test_a_dropped_member_ends(self, new_group: NewGroup, leak_check: Any) -> None:
        async def drop() -> None:
            await (await new_group(1)).join().__aenter__()
            gc.collect()

        with pytest.warns(ResourceWarning, match="dropped"):
            await drop()
        await until(lambda: not [it for it in asyncio.all_tasks() if "jetstream_ext" in it.get_name()])


class TestExactlyOnce:
    async def test_outputs_are_stored_once_while_members_come_and_go(
        self, make_stream: Make, make_group: MakeGroup, more: More, js: JetStreamContext
    ) -> None:
        source, target = await make_stream(messages=100), await make_stream()
        group = make_group(source, key=[1])

        async def handle(message: StoredMsg) -> BatchMessage:
            await asyncio.sleep(0.001)
            return BatchMessage(f"{target}.out.{message.subject}", message.data)

        async def outputs() -> list[StoredMsg]:
            return [it async for it in DirectGet(js, target).scan(subject=f"{target}.out.>")]

        async def reach(count: int, *members: asyncio.Task[None]) -> None:
            async with asyncio.timeout(60):
                while len(await outputs()) < count:
                    assert not any(member.done() for member in members)
                    await asyncio.sleep(0.05)

        def member() -> Any:
            return running(exactly_once_group(make_group(source, key=[1]), target, handle, prefix=f"{target}.at"))

        async with member() as second:
            async with member() as first:
                await reach(20, first, second)
                await more(source, 101, 300)
                await reach(150, first, second)
                with pytest.raises(errors.StreamConfigMismatchError, match="exactly-once group"):
                    await group.join().__aenter__()
            async with member() as third:
                await reach(300, second, third)
        found = await outputs()
        assert sorted(int(it.data) for it in found) == list(range(1, 301))
        for subject in {it.subject for it in found}:
            mine = [int(it.data) for it in found if it.subject == subject]
            assert mine == sorted(mine)
        status = await group.status()
        assert status.members == ()
        assert [it.lag for it in status.partitions] == [0, 0, 0, 0]

    async def test_a_handler_that_raises_ends_the_member(self, new_group: NewGroup, make_stream: Make) -> None:
        group, target = await new_group(10), await make_stream()

        def handle(message: StoredMsg) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await exactly_once_group(group, target, handle, prefix=f"{target}.at")
        assert (await group.status()).members == ()

    async def test_a_stream_whose_beginning_is_gone(self, new_group: NewGroup, make_stream: Make, more: More) -> None:
        """The members continue at the positions in the output stream, not where the group has begun."""
        group, target, seen = await new_group(60), await make_stream(), list[int]()

        async def see(message: StoredMsg) -> None:
            seen.append(message.seq)

        for count in (60, 70):
            async with running(exactly_once_group(group, target, see, prefix=f"{target}.at")) as task:
                await until(lambda: len(seen) == count or task.done())  # noqa: B023
            if count == 60:
                await group.context.purge_stream(group.stream, keep=5)
                await more(group.stream, 61, 70)
        assert sorted(seen) == list(range(1, 71))

    async def test_dead_letters_and_their_pauses_hold_up_one_partition(
        self, new_group: NewGroup, make_stream: Make, js: JetStreamContext
    ) -> None:
        group, target = await new_group(60, key=[1]), await make_stream()
        partitions = {n: partition_of(f"{group.stream}.{n % 3}", 4, [1]) for n in range(1, 61)}
        poison = next(n for n in range(10, 60) if partitions[n] != 0)
        others = {n for n in range(1, 61) if partitions[n] != partitions[poison]}
        handled, attempts = set[int](), list[int]()

        def handle(message: StoredMsg) -> BatchMessage:
            if message.seq == poison:
                attempts.append(message.seq)
                raise ZeroDivisionError("no")
            handled.add(message.seq)
            return BatchMessage(f"{target}.out", message.data)

        def run(backoff: float) -> Any:
            letters = DeadLetter(f"{target}.dead", attempts=3, backoff=backoff)
            return running(exactly_once_group(group, target, handle, prefix=f"{target}.at", dead_letter=letters))

        async with run(3600):  # ends in the pause: the attempt stays counted
            await until(lambda: others <= handled and attempts)
            assert attempts == [poison]
        async with run(0):
            await until(lambda: len(handled) == 59)
        assert len(attempts) == 3
        [letter] = [it async for it in DirectGet(js, target).scan(subject=f"{target}.dead")]
        assert (letter.data, letter.headers["Dead-Letter-Sequence"]) == (b"%d" % poison, str(poison))
        found = [int(it.data) async for it in DirectGet(js, target).scan(subject=f"{target}.out")]
        assert sorted(found) == [n for n in range(1, 61) if n != poison]
        with pytest.raises(ValueError, match="a position"):
            await exactly_once_group(
                group, target, handle, prefix=f"{target}.at", dead_letter=DeadLetter(f"{target}.at.g.1")
            )


class TestSettings:
    async def test_members_must_agree(self, new_group: NewGroup, make_group: MakeGroup) -> None:
        group = await new_group(1)
        async with group.join():
            pass
        for other in ({"partitions": 5}, {"key": [1]}, {"subject": "x.>"}):
            with pytest.raises(errors.StreamConfigMismatchError, match="use another group name") as caught:
                await make_group(group.stream, **other).join().__aenter__()
            assert set(caught.value.diff) == set(other)

    async def test_reset_changes_the_number_of_partitions_and_loses_nothing(
        self, new_group: NewGroup, make_group: MakeGroup
    ) -> None:
        group = await new_group(30, partitions=2)
        async with group.join() as member:
            await take(member, 20)
        lowest = min(await positions(group))
        wider = make_group(group.stream, partitions=3)
        assert await wider.reset() == lowest
        assert await positions(wider) == [lowest] * 3
        async with wider.join() as member:
            assert seqs(await take(member, 31 - lowest)) == list(range(lowest, 31))

    async def test_members_of_before_a_reset_end(self, new_group: NewGroup) -> None:
        group = await new_group(10)
        async with group.join() as member:
            await take(member, 10)
            await change_record(group, "config", epoch="another", start=5, first=False)
            with pytest.raises(errors.StreamConfigMismatchError, match="was reset"):
                async with asyncio.timeout(30):
                    await anext(member)
        async with group.join() as member:
            assert seqs(await take(member, 6)) == [5, 6, 7, 8, 9, 10]

    async def test_an_exactly_once_group_starts_again(
        self, new_group: NewGroup, make_group: MakeGroup, make_stream: Make
    ) -> None:
        group, target, seen = await new_group(10, partitions=2), await make_stream(), list[int]()

        async def see(message: StoredMsg) -> None:
            seen.append(message.seq)

        async def work(group: Group, count: int) -> None:
            async with running(exactly_once_group(group, target, see, prefix=f"{target}.at")) as task:
                await until(lambda: len(seen) == count or task.done())

        await work(group, 10)
        wider = make_group(group.stream, partitions=3)
        with pytest.raises(ValueError, match="pass start"):
            await wider.reset()
        assert await wider.reset(Seq(8)) == 8
        assert set(await positions(wider)) == {8}
        await work(wider, 13)
        assert set(await positions(wider)) == {11}
        assert sorted(seen) == sorted([*range(1, 11), 8, 9, 10])

    async def test_reset_is_refused_while_members_are_alive(self, new_group: NewGroup) -> None:
        group = await new_group(1)
        with pytest.raises(BucketNotFoundError):
            await group.reset()
        async with group.join(label="a worker"):
            with pytest.raises(errors.GroupActiveError, match="a worker") as caught:
                await group.reset()
            assert caught.value.members == ("a worker",)

    async def test_a_recreated_stream_is_refused(self, new_group: NewGroup) -> None:
        group = await new_group(10)
        js = group.context
        async with group.join() as member:
            await take(member, 5)
        await js.delete_stream(group.stream)
        await js.add_stream(name=group.stream, subjects=[f"{group.stream}.>"], allow_direct=True)
        with pytest.raises(errors.StreamRecreatedError):
            await group.join().__aenter__()
        await group.reset(First())
        async with group.join():
            pass

    async def test_a_bucket_that_cannot_hold_a_group(
        self, new_group: NewGroup, js: JetStreamContext, stream_name: Callable[[], str]
    ) -> None:
        for lacks, advice in (
            ({"allow_direct": False}, "enable it with `await jetstream_ext.kv.enable(kv, direct=True)`"),
            ({"allow_msg_ttl": False}, "enable it with `await jetstream_ext.kv.enable(kv, ttl=True)`"),
            ({"max_age": 3600}, "use a"),
        ):
            config, bucket = {"allow_direct": True, "allow_msg_ttl": True, **lacks}, stream_name()
            await js.add_stream(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1, **config)
            with pytest.raises(errors.StreamConfigMismatchError, match=f"bucket '{bucket}'") as caught:
                await (await new_group(1, bucket=bucket)).join().__aenter__()
            assert set(caught.value.diff) == set(lacks)
            assert advice in str(caught.value)

    async def test_streams_that_a_group_cannot_read(self, new_group: NewGroup, make_group: MakeGroup) -> None:
        with pytest.raises(errors.BadSubjectError, match="has 2 tokens"):
            await (await new_group(1, key=[2])).join().__aenter__()
        with pytest.raises(NotFoundError):
            await make_group("MISSING").join().__aenter__()
        other = await new_group(1)
        async with other.join():
            pass
        with pytest.raises(ValueError, match="is that of its bucket"):
            await make_group(f"KV_{other.bucket}").join().__aenter__()

    async def test_groups_are_listed_and_opened(self, new_group: NewGroup) -> None:
        group = await new_group(1, partitions=3, key=[1], name="a+b")
        js = group.context
        async with group.join():
            pass
        assert await list_groups(js, group.bucket) == [(group.stream, "a+b")]
        opened = await Group.open(js, group.stream, "a+b", bucket=group.bucket)
        assert (opened.partitions, opened.key) == (3, (1,))
        with pytest.raises(KeyError):
            await Group.open(js, group.stream, "other", bucket=group.bucket)

    def test_arguments_are_checked(self, js: JetStreamContext, make_group: MakeGroup) -> None:
        for options, error in (
            ({"partitions": 0}, ValueError), ({"key": []}, ValueError), ({"key": [-1]}, ValueError),
            ({"token": 0}, ValueError), ({"token": 0, "subject": "a.*"}, ValueError),
            ({"token": 0, "subject": "*.a", "key": [1]}, ValueError), ({"heartbeat": 0}, ValueError),
            ({"heartbeat": 1e-9}, ValueError), ({"heartbeat": 1e12}, ValueError), ({"buffer": 0}, ValueError),
            ({"subject": "a..b"}, errors.BadSubjectError), ({"name": "a.b"}, errors.BadSubjectError),
            ({"start": 7}, TypeError), ({"on_lost": "x"}, ValueError),
        ):  # fmt: skip
            with pytest.raises(error):
                pytest.fail(f"{options}: {make_group('S', **options)}")
        Group(js, "S", "g", partitions=1, start=Time(datetime.now(UTC)))
        for name, value in (
            ("label", 7), ("label", ""), ("label", "a\n"), ("label", "\ud800"), ("every", 0), ("seconds", 0),
            ("revoke_timeout", 0), ("on_assigned", "x"), ("on_revoked", 1), ("on_partitions_lost", ()),
            ("auto_commit", "no"),
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError), match=name):
                make_group("S").join(**{name: value})

    async def test_an_old_server_is_refused(self) -> None:
        async with ReferenceServer(dialect="2.10") as server, await nats.connect(server.url) as nc:
            js = nc.jetstream()
            await js.add_stream(name="S", subjects=["s.>"], allow_direct=True)
            with pytest.raises(errors.UnsupportedFeatureError):
                await Group(js, "S", "g", partitions=1).join().__aenter__()
            with pytest.raises(NotFoundError):
                await js.stream_info("KV_groups")


class TestPartitionTokens:
    async def test_a_transform_with_another_number_of_partitions(
        self, js: JetStreamContext, stream_name: Callable[[], str], make_group: MakeGroup
    ) -> None:
        name = stream_name()
        transform = SubjectTransform(src=f"{name}.*", dest=f"{name}.{{{{partition(8,1)}}}}.{{{{wildcard(1)}}}}")
        await js.add_stream(name=name, subjects=[f"{name}.*"], allow_direct=True, subject_transform=transform)
        for n in range(50):
            await js.publish(f"{name}.{n}", b"")
        with pytest.raises(errors.StreamConfigMismatchError, match="in 8"):
            await make_group(name, subject=f"{name}.*.*", token=1).join().__aenter__()
        async with make_group(name, subject=f"{name}.*.*", token=1, partitions=8).join() as member:
            assert len({message.seq for message in await take(member, 50)}) == 50

    async def test_an_idle_group_asks_nothing_per_partition(self, own_server: NatsServer) -> None:
        asked = list[str]()

        async def note(message: Msg) -> None:
            asked.append(message.subject)

        async with await nats.connect(own_server.url) as nc, await nats.connect(own_server.url) as other:
            js = nc.jetstream(timeout=20)
            await js.add_stream(name="S", subjects=["S.>"], allow_direct=True)
            await js.add_stream(name="S-M", mirror=StreamSource(name="S"), allow_direct=True)
            for stream in ("S", "S-M"):
                group = Group(js, stream, "g", subject="S.*.>", token=1, partitions=16)
                async with group.join() as member:
                    worker = asyncio.create_task(take(member, 32))
                    for n in range(32):
                        await js.publish(f"S.{n % 16}.x")
                        if n % 16 == 15:
                            await asyncio.sleep(1.5)
                    assert len({message.seq for message in await worker}) == 32
                    await asyncio.sleep(3)  # the looks after the doorbell was armed come soon
                    bells = [info.name for info in await js.consumers_info(stream) if "doorbell" in str(info.name)]
                    assert len(bells) == (stream != "S")
                    subscriptions = [
                        await other.subscribe(f"$JS.API.{request}.{stream}", cb=note)
                        for request in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
                    ]
                    await other.flush()
                    asked.clear()
                    await asyncio.sleep(12)
                    assert 2 <= len(asked) <= 3, asked
                    for each in subscriptions:
                        await each.unsubscribe()

    async def test_partitions_that_fall_behind_are_read_apart(self, new_group: NewGroup) -> None:
        """Bursts that are more than one read, to two members, one of which is slow."""
        # A key that lasts: on a busy machine the bursts may block the loop for seconds, and what is lost is handled again.
        group = await new_group(subject="*.*.>", token=1, buffer=50, heartbeat=10.0)

        async def handle(_: StoredMsg) -> None:
            await asyncio.sleep(0.0005)

        one, other = Worker(group), Worker(group, handler=handle)
        await until(lambda: one.member.partitions and other.member.partitions)
        sizes = (1, 3000, 1, 20, 3000)
        for size in sizes:  # the group has no partition 4
            await asyncio.gather(*(group.context.publish(f"{group.stream}.{n % 5}.x") for n in range(size)))
        count = sum(size - size // 5 for size in sizes)
        await until(lambda: len(one.seen + other.seen) >= count)
        await one.stop()
        await other.stop()
        assert len(one.seen + other.seen) == len({*one.seen, *other.seen}) == count


class TestOtherStreams:
    async def test_a_compacted_stream(self, make_stream: Make, make_group: MakeGroup, more: More) -> None:
        """What newer messages of their subjects replaced is no loss, also behind the position of a partition."""
        group = make_group(await make_stream(messages=30, max_msgs_per_subject=2), partitions=2, key=[1])
        async with group.join() as member:
            await take(member, 6)
        await more(group.stream, 31, 90)
        async with group.join() as member:
            found = await take(member, 6)
        assert sorted(int(message.data) for message in found) == [85, 86, 87, 88, 89, 90]

    async def test_messages_that_were_lost_end_the_member(self, new_group: NewGroup, make_group: MakeGroup) -> None:
        group = await new_group(30, partitions=1)
        async with group.join() as member:
            await take(member, 10)
        await group.context.purge_stream(group.stream, seq=25)
        with pytest.raises(errors.PositionLostError) as caught:
            async with group.join() as member:
                await take(member, 1)
        lost = r"at sequence 25, and the group was at \d+: .* stop the members and call Group.reset\(log.Seq\(25\)\), .* on_lost="
        assert re.search(lost, str(caught.value))
        assert "seek" not in str(caught.value), "a member has none"
        assert (caught.value.stream, caught.value.got) == (group.stream, 25)
        async with make_group(group.stream, partitions=1, on_lost="skip").join() as member:
            assert seqs(await take(member, 6)) == list(range(25, 31))
        assert await group.reset(Seq(25)) == 25
        async with group.join() as member:
            assert (await anext(member)).seq == 25

    async def test_a_domain(self) -> None:
        seen = list[int]()

        def handle(message: StoredMsg) -> BatchMessage:
            seen.append(message.seq)
            return BatchMessage("OUT.out", message.data)

        with NatsServer(config="jetstream { domain: hub }") as server:
            async with await nats.connect(server.url) as nc:
                js = nc.jetstream(domain="hub")
                for name in ("S", "OUT"):
                    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
                for n in range(30):
                    await js.publish(f"S.{n}", b"")
                group = Group(js, "S", "g", partitions=2, heartbeat=0.5)
                async with group.join() as member:
                    await take(member, 30)
                    await member.commit()
                assert await positions(group) == [31, 31]
                once = Group(js, "S", "once", partitions=2, heartbeat=0.5)
                async with running(exactly_once_group(once, "OUT", handle, prefix="OUT.at")):
                    await until(lambda: len(seen) == 30)
                assert len([it async for it in DirectGet(js, "OUT").scan(subject="OUT.out")]) == 30


@pytest.fixture
async def own_nc(server: Any) -> AsyncIterator[Client]:
    nc = await nats.connect(server.url, allow_reconnect=False)
    yield nc
    await nc.close()
