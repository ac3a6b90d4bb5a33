"""Members of groups that leave, lose partitions and call back: what ends, what is stored, and what the caller learns."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats.errors
import pytest

from jetstream_ext import StoredMsg, errors
from jetstream_ext.log import Group, Member

sys.path.insert(0, str(Path(__file__).parent))

from group_members import MakeGroup, breakable_server, take, until

Make = Callable[..., Awaitable[str]]


async def lose_all(member: Member) -> None:
    """Block the event loop for longer than the member's key lasts (2 s), until the member has found that out."""
    time.sleep(2.1)
    while member.partitions:
        await asyncio.sleep(0)


def tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("jetstream_ext")]


def fail(_: tuple[int, ...]) -> None:
    raise ZeroDivisionError


async def positions(group: Group) -> list[int | None]:
    return [each.position for each in (await group.status()).partitions]


class TestLeaving:
    async def test_a_cancellation_anywhere_leaves_nothing(self, make_stream: Make, make_group: MakeGroup) -> None:
        stream = await make_stream(messages=5)
        group = make_group(stream, partitions=2)
        before = set(tasks())
        steps = 0
        while True:
            steps += 1 + steps // 8
            member = group.join()
            await member.__aenter__()
            await take(member, 1)
            leaving = asyncio.ensure_future(member.__aexit__(None, None, None))
            for _ in range(steps):
                await asyncio.sleep(0)
            ended = leaving.done()
            leaving.cancel()
            await asyncio.wait({leaving})
            assert set(tasks()) <= before, f"after {steps} steps"
            if ended:
                break
        assert (await group.status()).members == ()

    async def test_an_error_of_on_revoked_is_raised_at_once(self, make_stream: Make, make_group: MakeGroup) -> None:
        group = make_group(await make_stream(messages=5), partitions=2)

        begun = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            async with group.join(on_revoked=fail) as member:
                await take(member, 2)
        assert time.monotonic() - begun < 30
        status = await group.status()
        assert status.members == ()
        assert [(each.owner, each.position) for each in status.partitions] == [(None, 1), (None, 1)]

    async def test_an_error_of_on_revoked_lets_the_others_take_over(
        self, make_stream: Make, make_group: MakeGroup
    ) -> None:
        """Also while the loop of the member is busy."""
        group = make_group(await make_stream(messages=5), partitions=4)

        async with group.join(on_revoked=fail) as member:
            await take(member, 1)
            async with group.join() as other:
                await until(lambda: len(other.partitions) == 3)
            with pytest.raises(ZeroDivisionError):
                await anext(member)

    async def test_an_error_while_it_leaves_is_said_although_another_one_is_raised(
        self, make_stream: Make, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = make_group(await make_stream(messages=5), partitions=2)

        def fill_the_disk(_: tuple[int, ...]) -> None:
            raise OSError("disk full")

        def handle(_: StoredMsg) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            async with group.join(on_revoked=fill_the_disk) as member:
                await member.run(handle)
        assert "has failed while it left: OSError('disk full')" in caplog.text

    async def test_what_cannot_be_handed_over_is_said(
        self, make_stream: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with breakable_server() as (server, js), asyncio.timeout(60):
            group = Group(js, "S", "g", partitions=1, bucket="B", heartbeat=0.5, patience=3.0, poll=0.05)
            async with group.join() as member:
                await take(member, 1)
                await asyncio.to_thread(server.pause)
            assert "could not hand over" in caplog.text
            await asyncio.to_thread(server.resume)

    async def test_a_member_hands_over_as_soon_as_its_client_is_connected_again(self) -> None:
        async with breakable_server() as (server, js), asyncio.timeout(60):
            group = Group(js, "S", "g", partitions=1, bucket="B", poll=0.05)
            revoked: list[int] = []
            async with group.join(on_revoked=revoked.extend) as member:
                await take(member, 1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(member), 0.1)
                await asyncio.to_thread(server.kill)
                await until(lambda: not js._nc.is_connected)
                restarting = asyncio.ensure_future(asyncio.to_thread(server.restart))
            await restarting
            assert revoked == [0]
            status = await group.status()
            assert status.members == ()
            assert [(each.owner, each.position) for each in status.partitions] == [(None, 2)]

    async def test_a_closed_connection_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        async with breakable_server() as (_, js), asyncio.timeout(60):
            group = Group(js, "S", "g", partitions=1, bucket="B", poll=0.05)
            with contextlib.suppress(
                nats.errors.ConnectionClosedError
            ):  # if the member has noticed it before it leaves
                async with group.join() as member:
                    await take(member, 1)
                    await js._nc.close()
            assert (
                "could not hand over all its partitions: no server answers, or the connection is closed" in caplog.text
            )

    async def test_a_member_cannot_be_left_in_its_callback(self, make_stream: Make, make_group: MakeGroup) -> None:
        group = make_group(await make_stream(messages=5), partitions=1)

        async def leave(_: tuple[int, ...]) -> None:
            await member.__aexit__(None, None, None)

        member = group.join(on_assigned=leave)
        async with member:
            with pytest.raises(RuntimeError, match=r"cannot be left in one of its callbacks; call stop\(\)"):
                await anext(member)


class TestCommitsInCallbacks:
    async def test_a_commit_that_is_refused_after_a_loss_does_not_end_the_member(
        self, make_stream: Make, make_group: MakeGroup
    ) -> None:
        for callback in ("on_revoked", "on_partitions_lost"):
            group = make_group(await make_stream(messages=5), partitions=1)
            refused: list[BaseException] = []

            async def commit(_: tuple[int, ...]) -> None:
                try:
                    await member.commit()  # noqa: B023
                except errors.FencedError as error:
                    refused.append(error)  # noqa: B023
                    raise

            member = group.join(auto_commit=False, **{callback: commit})
            async with member:
                await take(member, 2)
                await lose_all(member)
                await until(lambda: refused)  # noqa: B023
                assert [it.seq for it in await take(member, 2)] == [1, 2], callback
            assert "this member has lost them" in str(refused[0]), callback

    async def test_commit_raises_if_the_partition_of_the_message_in_hand_is_lost(
        self, make_stream: Make, make_group: MakeGroup
    ) -> None:
        group = make_group(await make_stream(messages=5), partitions=1)
        async with group.join(auto_commit=False) as member:
            await take(member, 2)
            await lose_all(member)
            with pytest.raises(errors.FencedError, match=r"the positions of partition 0 were not stored"):
                await member.commit()
            assert await positions(group) == [1]
            assert [it.seq for it in await take(member, 5)] == [1, 2, 3, 4, 5]
            await member.commit()
            assert await positions(group) == [6]


class TestCallbacksThatHang:
    async def test_on_assigned_does_not_keep_other_partitions(self, make_stream: Make, make_group: MakeGroup) -> None:
        """Those are given up in time: no message of them is handled when another member has them."""
        stream = await make_stream(messages=5)
        group = make_group(stream, partitions=4)
        loaded, loading = asyncio.Event(), asyncio.Event()
        lost: list[int] = []
        loads = 0

        async def load(_: tuple[int, ...]) -> None:
            nonlocal loads
            loads += loading.is_set()
            if loading.is_set():
                await loaded.wait()

        async with group.join(on_assigned=load, on_partitions_lost=lost.extend, revoke_timeout=0.5) as member:
            running = asyncio.ensure_future(member.run(lambda _: None))
            await until(lambda: len(member.partitions) == 4)
            async with group.join():
                await until(lambda: len(member.partitions) == 2)
                loading.set()
            await until(lambda: loads)  # for the partitions that came back
            kept = set(member.partitions)
            async with group.join() as first, group.join() as second:
                await until(lambda: len(first.partitions) + len(second.partitions) >= 2)
                taken = {*first.partitions, *second.partitions}
                assert taken.isdisjoint(member.partitions)
                loaded.set()
                await until(lambda: taken & kept <= set(lost))
            running.cancel()


class TestLosses:
    async def test_a_partition_begins_again_when_its_cancelled_handler_has_ended(
        self, make_stream: Make, make_group: MakeGroup
    ) -> None:
        group = make_group(await make_stream(messages=3), partitions=1)
        events: list[str] = []

        async def handle(message: StoredMsg) -> None:
            events.append(f"{message.seq} begins")
            if len(events) == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.8)  # rolls back
                    events.append("rolled back")

        async with group.join() as member:
            running = asyncio.ensure_future(member.run(handle))
            await until(lambda: events)
            await lose_all(member)
            await until(lambda: len(events) == 5)
            member.stop()
            await running
        assert events == ["1 begins", "rolled back", "1 begins", "2 begins", "3 begins"]

    async def test_a_cancelled_handler_that_goes_on_is_waited_for_up_to_a_limit(
        self, make_stream: Make, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = make_group(await make_stream(messages=1), partitions=1)
        handled: list[int] = []
        end = asyncio.Event()

        async def handle(message: StoredMsg) -> None:
            handled.append(message.seq)
            while len(handled) == 1 and not end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await end.wait()

        async with group.join(revoke_timeout=0.3) as member:
            running = asyncio.ensure_future(member.run(handle))
            await until(lambda: handled)
            await lose_all(member)
            await until(lambda: len(handled) == 2)
            member.stop()
            await running
            assert any("partition 0" in task for task in tasks())
            asyncio.get_running_loop().call_later(0.1, end.set)
        assert "a handler of partition 0 still runs, 0.3 s after it was cancelled" in caplog.text
        assert not any("partition 0" in task for task in tasks())

    async def test_a_handler_that_fails_because_it_was_cancelled_does_not_end_the_member(
        self, make_stream: Make, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        group = make_group(await make_stream(messages=3), partitions=1)
        handled: list[int] = []

        async def handle(message: StoredMsg) -> None:
            handled.append(message.seq)
            if len(handled) == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise OSError("the rollback failed") from None

        async with group.join() as member:
            running = asyncio.ensure_future(member.run(handle))
            await until(lambda: handled)
            await lose_all(member)
            await until(lambda: handled == [1, 1, 2, 3])
            member.stop()
            await running
        assert "the handler of partition 0, which was lost, has failed: OSError('the rollback failed')" in caplog.text


async def test_run_is_refused_while_a_loop_has_a_message_in_hand(make_stream: Make, make_group: MakeGroup) -> None:
    group = make_group(await make_stream(messages=3), partitions=1)
    async with group.join() as member:
        await anext(member)
        with pytest.raises(RuntimeError, match="in the hands of a loop over this member"):
            await member.run(print)
        assert (await anext(member)).seq == 2
