"""Members of groups that leave, lose partitions and call back: what ends, what is stored, and what the caller learns."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import nats
import pytest

from jetstream_ext import StoredMsg, errors
from jetstream_ext.log import Group, Member
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parents[1] / "safety_net"))
sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import Frame, FrameProxy
from group_members import NewGroup, breakable_server, ignore, positions, running, take, until


async def lose_all(member: Member) -> None:
    """Block the event loop for longer than the member's key lasts (2 s), until the member has found that out."""
    time.sleep(2.1)
    while member.partitions:
        await asyncio.sleep(0)


def tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("jetstream_ext")]


def fail(_: object) -> None:
    raise ZeroDivisionError


class TestLeaving:
    async def test_a_cancellation_anywhere_leaves_nothing(self, new_group: NewGroup) -> None:
        group = await new_group(5, partitions=2)
        before, steps, ended = set(tasks()), 0, False
        while not ended:
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
        assert (await group.status()).members == ()

    async def test_what_was_handled_is_not_repeated_if_servers_are_away_during_the_hand_over(self) -> None:
        """The release is tried again, at the position that was handled; nor does the outage end the member."""
        async with NatsServer() as server, await nats.connect(server.url) as nc:
            js, away, outages = nc.jetstream(timeout=10), False, 0
            await js.add_stream(name="S", subjects=["s.>"], allow_direct=True)
            for number in range(20):
                await js.publish(f"s.{number}", b"")

            async def pass_on(frame: Frame) -> Frame | None:
                return None if away else frame

            def come_back() -> None:
                nonlocal away
                away = False

            def go_away(_: tuple[int, ...]) -> None:
                nonlocal away, outages
                if not outages:
                    asyncio.get_running_loop().call_later(2.0, come_back)
                    away, outages = True, 1

            first, second = list[StoredMsg](), list[StoredMsg]()
            async with (
                FrameProxy(server.port, pass_on, pass_on) as proxy,
                await nats.connect(proxy.url, error_cb=ignore) as far,
            ):
                group = Group(far.jetstream(timeout=0.3), "S", "g", partitions=2, heartbeat=2.0, patience=0.5)
                async with group.join(on_revoked=go_away, seconds=60) as leaving, running(leaving.run(first.append)):
                    await until(lambda: len(first) == 20)
                    async with (
                        Group(js, "S", "g", partitions=2, heartbeat=2.0).join() as joined,
                        running(joined.run(second.append)),
                    ):
                        await until(lambda: len(joined.partitions) == 1)
                        await js.publish("s.last", b"")
                        await until(lambda: len(first) + len(second) >= 21)
            assert sorted(message.seq for message in (*first, *second)) == list(range(1, 22))

    async def test_an_error_of_on_revoked_is_raised_at_once(self, new_group: NewGroup) -> None:
        group = await new_group(5, partitions=2)
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(30), group.join(on_revoked=fail) as member:
                await take(member, 2)
        status = await group.status()
        assert status.members == ()
        assert [(each.owner, each.position) for each in status.partitions] == [(None, 1), (None, 1)]

    async def test_an_error_of_a_callback_lets_the_others_take_over(self, new_group: NewGroup) -> None:
        """Before the caller comes back to the member."""
        group = await new_group(5)
        for callback in ("on_assigned", "on_revoked"):
            options: dict[str, Any] = {callback: fail}
            async with group.join(**options) as member:
                if callback == "on_revoked":
                    await take(member, 1)
                async with group.join() as other:
                    await until(lambda: len(other.partitions) >= 3)
                with pytest.raises(ZeroDivisionError):
                    await anext(member)

    async def test_an_error_while_it_leaves_is_said_although_another_one_is_raised(
        self, new_group: NewGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fill_the_disk(_: tuple[int, ...]) -> None:
            raise OSError("disk full")

        with pytest.raises(ZeroDivisionError):
            async with (await new_group(5, partitions=2)).join(on_revoked=fill_the_disk) as member:
                await member.run(fail)
        assert "has failed while it left: OSError('disk full')" in caplog.text

    async def test_what_cannot_be_handed_over_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        for closes in (False, True):
            async with breakable_server() as (server, js), asyncio.timeout(60):
                group = Group(js, "S", "g", partitions=1, bucket="B", heartbeat=0.5, patience=3.0, poll=0.05)
                with contextlib.suppress(Exception):  # a closed connection may be noticed before the member leaves
                    async with group.join() as member:
                        await take(member, 1)
                        await (js._nc.close() if closes else asyncio.to_thread(server.pause))
                assert "could not hand over all its partitions: no server answers, or the connection" in caplog.text
                caplog.clear()
                if not closes:
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

    async def test_a_member_cannot_be_left_in_its_callback(self, new_group: NewGroup) -> None:
        async def leave(_: tuple[int, ...]) -> None:
            await member.__aexit__(None, None, None)

        member = (await new_group(5, partitions=1)).join(on_assigned=leave)
        async with member:
            with pytest.raises(RuntimeError, match=r"cannot be left in one of its callbacks; call stop\(\)"):
                await anext(member)


class TestCommits:
    async def test_one_that_is_refused_after_a_loss_does_not_end_the_member(self, new_group: NewGroup) -> None:
        for callback in ("on_revoked", "on_partitions_lost"):
            group, refused = await new_group(5, partitions=1), list[BaseException]()

            async def commit(_: tuple[int, ...], refused: list[BaseException] = refused) -> None:
                try:
                    await member.commit()  # noqa: B023
                except errors.FencedError as error:
                    refused.append(error)
                    raise

            options: dict[str, Any] = {callback: commit}
            member = group.join(auto_commit=False, **options)
            async with member:
                await take(member, 2)
                await lose_all(member)
                await until(lambda: refused)  # noqa: B023
                assert [it.seq for it in await take(member, 2)] == [1, 2], callback
            assert "this member has lost them" in str(refused[0]), callback

    async def test_one_in_a_callback_stores_the_positions_of_its_partitions(self, new_group: NewGroup) -> None:
        """What the loop has handled of the others may not be stored by the application yet."""
        group = await new_group(40, partitions=2, key=[1])

        async def commit(_: tuple[int, ...]) -> None:
            await member.commit()

        member = group.join(auto_commit=False, on_revoked=commit)
        async with member:
            await take(member, 40)
            waiting = asyncio.ensure_future(anext(member))  # the last message is handled
            async with group.join() as other:
                await until(lambda: other.partitions)
                [kept] = member.partitions
                assert (await positions(group))[kept] == 1
            waiting.cancel()

    async def test_one_raises_if_the_partition_of_the_message_in_hand_is_lost(self, new_group: NewGroup) -> None:
        group = await new_group(5, partitions=1)
        async with group.join(auto_commit=False) as member:
            await take(member, 2)
            await lose_all(member)
            with pytest.raises(errors.FencedError, match=r"the positions of partition 0 were not stored"):
                await member.commit()
            assert await positions(group) == [1]
            assert [it.seq for it in await take(member, 5)] == [1, 2, 3, 4, 5]
            await member.commit()
            assert await positions(group) == [6]


class TestLosses:
    async def test_on_assigned_does_not_keep_other_partitions(self, new_group: NewGroup) -> None:
        """Those are given up in time: no message of them is handled when another member has them."""
        group = await new_group(5)
        loaded, loading, loads, lost = asyncio.Event(), asyncio.Event(), list[int](), list[int]()

        async def load(partitions: tuple[int, ...]) -> None:
            if loading.is_set():
                loads.extend(partitions)
                await loaded.wait()

        async with (
            group.join(on_assigned=load, on_partitions_lost=lost.extend, revoke_timeout=0.5) as member,
            running(member.run(print)),
        ):
            await until(lambda: len(member.partitions) == 4)
            async with group.join():
                await until(lambda: len(member.partitions) == 2)
                kept = set(member.partitions)
                loading.set()
            await until(lambda: loads)  # for the partitions that came back
            async with group.join() as first, group.join() as second:
                await until(lambda: len(first.partitions) + len(second.partitions) >= 2)
                taken = {*first.partitions, *second.partitions}
                assert taken.isdisjoint(member.partitions)
                loaded.set()
                await until(lambda: taken & kept <= set(lost))

    async def test_a_partition_begins_again_when_its_cancelled_handler_has_ended(self, new_group: NewGroup) -> None:
        """Also if it was lost again before."""
        events, roll_back = list[str](), asyncio.Event()

        async def handle(message: StoredMsg) -> None:
            events.append(f"{message.seq} begins")
            if len(events) == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    await roll_back.wait()
                    events.append("rolled back")

        async with (await new_group(3, partitions=1)).join() as member, running(member.run(handle)):
            await until(lambda: events)
            for _ in range(2):
                await lose_all(member)
                await until(lambda: member.partitions)
                await asyncio.sleep(0.3)
            assert events == ["1 begins"]
            roll_back.set()
            await until(lambda: len(events) == 5)
        assert events == ["1 begins", "rolled back", "1 begins", "2 begins", "3 begins"]

    async def test_a_cancelled_handler_that_goes_on_is_waited_for_up_to_a_limit(
        self, new_group: NewGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        handled, end = list[int](), asyncio.Event()

        async def handle(message: StoredMsg) -> None:
            handled.append(message.seq)
            while len(handled) == 1 and not end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await end.wait()

        async with (await new_group(1, partitions=1)).join(revoke_timeout=0.3) as member:
            task = asyncio.ensure_future(member.run(handle))
            await until(lambda: handled)
            await lose_all(member)
            await until(lambda: len(handled) == 2)
            member.stop()
            await task
            assert any("partition 0" in task for task in tasks())
            asyncio.get_running_loop().call_later(0.1, end.set)
        assert "a handler of partition 0 still runs" in caplog.text
        assert not any("partition 0" in task for task in tasks())

    async def test_a_handler_that_fails_because_it_was_cancelled_does_not_end_the_member(
        self, new_group: NewGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        handled: list[int] = []

        async def handle(message: StoredMsg) -> None:
            handled.append(message.seq)
            if len(handled) == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise OSError("the rollback failed") from None

        async with (await new_group(3, partitions=1)).join() as member, running(member.run(handle)):
            await until(lambda: handled)
            await lose_all(member)
            await until(lambda: handled == [1, 1, 2, 3])
        assert "the handler of partition 0, which was lost, has failed: OSError('the rollback failed')" in caplog.text


async def test_run_is_refused_while_a_loop_has_a_message_in_hand(new_group: NewGroup) -> None:
    async with (await new_group(3, partitions=1)).join() as member:
        await anext(member)
        with pytest.raises(RuntimeError, match="in the hands of a loop over this member"):
            await member.run(print)
        assert (await anext(member)).seq == 2
