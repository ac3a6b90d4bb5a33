"""Keys of a worker's state that expire: by the server's clock, for the handler, the next start, tables and the stream."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from nats.js import JetStreamContext
from workers import MakeStateful, StatefulPair

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors, log
from jetstream_ext.log import Seq, State

More = Callable[[str, int, int], Awaitable[None]]

ROLLUP = {"allow_msg_ttl": True, "allow_rollup_hdrs": True}
CONFIGS: list[dict[str, Any]] = [
    ROLLUP,
    {"allow_msg_ttl": True, "max_msgs_per_subject": 1},
    {**ROLLUP, "max_age": 3_600},
    {**ROLLUP, "subject_delete_marker_ttl": 1},
    {**ROLLUP, "subject_delete_marker_ttl": 2, "max_msgs_per_subject": 1},
    {"allow_msg_ttl": True},
    {"allow_msg_ttl": True, "max_age": 3_600, "max_msgs_per_subject": 2},
]


async def expired(pair: StatefulPair, *keys: str, worker: str = "w") -> None:
    """Wait until the server does not have these keys."""
    async with asyncio.timeout(60):
        while not set(keys).isdisjoint(await pair.stored_state(worker)):
            await asyncio.sleep(0.05)


class Follower:
    """A worker that follows its input, and what its state was before each input."""

    def __init__(self, pair: StatefulPair, change: Callable[[int, State], None], **options: Any) -> None:
        self.before: dict[int, dict[str, bytes]] = {}
        self.change = change
        self.task = asyncio.ensure_future(pair.work(self.handle, pair.reader(tail=True, poll=0.01), **options))

    def handle(self, msg: StoredMsg, state: State) -> None:
        self.before[msg.seq] = dict(state)
        self.change(msg.seq, state)

    async def handles(self, seq: int) -> dict[str, bytes]:
        async with asyncio.timeout(60):
            while seq not in self.before:
                assert not self.task.done() or self.task.result()
                await asyncio.sleep(0.01)
        return self.before[seq]

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def test_an_expired_key_is_gone_for_all(js: JetStreamContext, make_stateful: MakeStateful, more: More) -> None:
    """For the handler of the next input, a worker that is started, a table, and the stream; what does not expire stays."""

    def change(seq: int, state: State) -> None:
        if seq == 1:
            state.update({"stays": b"1", "plain": b"1", "renewed": b"1", "put back": b"1"})
            state.put("short", b"1", ttl=1)
            state.put("also short", b"1", ttl=timedelta(seconds=1))
            state.put("deleted", b"1", ttl=1_000)
            state.put("plain", b"1", ttl=1)
            state.put("renewed", b"1", ttl=1)
            state.put("never", b"1", ttl=jsx.NEVER)
            state.put("none", b"1", None)
            state.put("long", b"1", ttl=1_000)
            state.put("stays", b"1", ttl=1)
        elif seq == 2:
            state["plain"] = state["stays"] = b"2"
            state.put("renewed", b"2", ttl=1_000)
            del state["deleted"]
        elif seq == 4:
            state["short"] = b"4"

    kept = {"stays": b"2", "plain": b"2", "renewed": b"2", "put back": b"1", "never": b"1", "none": b"1", "long": b"1"}
    for config in CONFIGS:
        pair = await make_stateful(2, **config)
        worker = Follower(pair, change, max_messages=1)
        await worker.handles(2)
        async with log.Table(js, pair.target, f"{pair.target}.state.>") as table:
            await expired(pair, "short", "also short")
            await more(pair.source, 3, 3)
            assert await worker.handles(3) == kept, config
            async with asyncio.timeout(60):
                while {it.removeprefix(f"{pair.target}.state.w.") for it in table} != {
                    key.replace(" ", "%20") for key in kept
                }:
                    await asyncio.sleep(0.01)
        await worker.stop()
        assert await pair.stored_state() == kept, config
        worker = Follower(pair, change)
        await more(pair.source, 4, 5)
        assert await worker.handles(4) == kept, config
        assert await worker.handles(5) == {**kept, "short": b"4"}, config
        async with asyncio.timeout(60):
            while (await pair.records())[-1]["seq"] != 6:
                await asyncio.sleep(0.05)
        await worker.stop()
        await pair.work(lambda *_: pytest.fail("handled"))


async def test_a_key_expires_for_a_worker_that_was_started_meanwhile(make_stateful: MakeStateful, more: More) -> None:
    """It is read with its TTL, whose limits are those of the server."""
    cases: list[tuple[dict[str, Any], int]] = [
        (ROLLUP, 2),
        ({"allow_msg_ttl": True, "max_msgs_per_subject": 1}, 2),
        ({**ROLLUP, "max_age": 2}, 1_000),
        ({**ROLLUP, "subject_delete_marker_ttl": 2}, 1),
    ]
    for config, ttl in cases:
        pair = await make_stateful(1, **config)
        await pair.work(lambda _, state: state.update(kept=b"") or state.put("a", b"1", ttl))  # noqa: B023
        worker = Follower(pair, lambda seq, state: state.put("b", b"1", ttl) if seq == 2 else None)  # noqa: B023
        await more(pair.source, 2, 2)
        await worker.handles(2)
        await expired(pair, "a")
        await more(pair.source, 3, 3)
        assert await worker.handles(3) in ({"kept": b""}, {"kept": b"", "b": b"1"}), config
        await expired(pair, "b")
        await more(pair.source, 4, 4)
        assert await worker.handles(4) == {"kept": b""}, config
        await worker.stop()


async def test_the_ttl_of_delete_markers_is_a_lower_limit(make_stateful: MakeStateful, more: More) -> None:
    """The server raises a shorter TTL to that, so the worker and its next start have the key as long as the stream."""
    pair = await make_stateful(1, **ROLLUP, subject_delete_marker_ttl=1_000)
    await pair.work(lambda _, state: state.put("a", b"1", ttl=1))
    (stored,), seq = await pair.stored("state.w.a"), 1
    worker = Follower(pair, lambda seq, state: state.put("b", b"1", ttl=1) if seq == 2 else None)
    async with asyncio.timeout(60):
        while (await anext(pair.reader(start=Seq(seq)))).time < stored.time + timedelta(seconds=3):
            seq += 1
            await more(pair.source, seq, seq)
            await worker.handles(seq)
            await asyncio.sleep(0.1)
    assert worker.before[seq] == {"a": b"1", "b": b"1"} == await pair.stored_state()
    await worker.stop()


async def test_a_put_that_is_undone_leaves_the_ttl_as_it_was(js: JetStreamContext, make_stateful: MakeStateful) -> None:
    """Whether the handler raises, or an output is refused when later inputs have put the key again."""
    for refused in (False, True):
        pair = await make_stateful(20, **ROLLUP)

        def handler(msg: StoredMsg, state: State) -> BatchMessage:
            if msg.seq == 1:
                state.put("timed", b"1", ttl=1_000)
                state["plain"] = b"1"
            assert state["plain"] in (b"1", b"5", b"9")
            if msg.seq == 5:
                state.put("timed", b"5", ttl=1)
                state.put("plain", b"5", ttl=1)
                if not refused:  # noqa: B023
                    raise ZeroDivisionError
            if msg.seq == 9:
                state.put("timed", b"9", ttl=2_000)
                state["plain"] = b"9"
            expected = 77 if msg.seq == 5 else None
            return pair.out(msg, expected_last_subject_seq=expected)  # noqa: B023

        with pytest.raises((ZeroDivisionError, errors.WrongLastSequenceError)):
            await pair.work(handler, max_messages=4)
        found = {msg.subject.rpartition(".")[2]: msg.headers.get("Nats-TTL") for msg in await pair.stored("state.w.>")}
        assert found == {"timed": "1000", "plain": None}
        await pair.work(handler, max_messages=8, dead_letter=pair.letter(2))
        found = {msg.subject.rpartition(".")[2]: msg.headers.get("Nats-TTL") for msg in await pair.stored("state.w.>")}
        assert found == {"timed": "2000", "plain": None}
        assert await pair.stored_state() == {"timed": b"9", "plain": b"9"}
        await pair.work()


async def test_a_wrong_ttl_fails_its_input(make_stateful: MakeStateful) -> None:
    wrong: list[tuple[Any, type[Exception]]] = [
        *((ttl, ValueError) for ttl in (0, -1, timedelta(seconds=0.5), timedelta(seconds=1.5), 1.5, 10**10)),
        *((ttl, TypeError) for ttl in ("5", b"1", [5])),
    ]
    for ttl, error in wrong:
        pair = await make_stateful(1, **ROLLUP)

        def handler(_: StoredMsg, state: State) -> None:
            state["before"] = b""
            state.put("a", b"", ttl)  # noqa: B023

        with pytest.raises(error):
            pytest.fail(f"{ttl}: {await pair.work(handler)}")
        assert (await pair.work(handler, dead_letter=pair.letter(1))).dead_letters == 1
        assert await pair.stored_state() == {}


async def test_an_older_value_does_not_show_again(
    js: JetStreamContext, make_stateful: MakeStateful, more: More
) -> None:
    """Where the stream keeps older values, and one of them lives longer than what has replaced it."""
    long, short = 1_000, 1
    lives: list[list[int | None]] = [  # of each value; None: it does not expire; 0: the key is deleted
        [None, short], [long, short], [None, 0, short], [long, 0, short], [None, short, short], [short, long, short],
        [None, short, None, short], [0, short], [short], [0, None, 0, short],
    ]  # fmt: skip

    def change(msg: StoredMsg, state: State) -> None:
        for number, each in enumerate(lives):
            life = each[msg.seq - 1] if msg.seq <= len(each) else -1
            if life == 0:
                state.pop(str(number), None)
            elif life != -1:
                state.put(str(number), b"", ttl=life)

    for most, limit in ((1, -1), (2, -1), (4, -1), (1, 2), (2, 3)):
        pair = await make_stateful(4, allow_msg_ttl=True, max_msgs_per_subject=limit)
        await pair.work(change, max_messages=most)
        await expired(pair, *map(str, range(len(lives))))
        async with log.Table(js, pair.target, f"{pair.target}.state.>") as table:
            assert not table, (most, limit)
        await more(pair.source, 5, 5)
        done = await pair.work(lambda _, state: pytest.fail(f"{dict(state)}") if state else None)
        assert done.inputs == 1, (most, limit)


async def test_a_stream_whose_keys_cannot_expire_ends_the_worker(make_stateful: MakeStateful) -> None:
    """With dead letters as well. Without a TTL, `put` is an assignment on every stream."""
    for config in ({}, {"allow_rollup_hdrs": True}):
        pair = await make_stateful(1, **config)
        for letter in (None, pair.letter(1)):
            with pytest.raises(
                errors.StreamConfigMismatchError, match=r"worker 'w' on stream .*: keys .*allow_msg_ttl=True"
            ) as caught:
                await pair.work(lambda _, state: state.put("a", b"", 5), dead_letter=letter)
            assert len(caught.value.diff) == 1
        await pair.work(lambda _, state: state.put("a", b"") or state.put("b", b"", jsx.NEVER), dead_letter=letter)
        assert await pair.stored_state() == {"a": b"", "b": b""}


async def test_a_tumbling_count(js: JetStreamContext, make_stateful: MakeStateful, more: More) -> None:
    """Each window is a key that expires behind its end; the windows are those of the stored times of the inputs."""
    pair = await make_stateful(0, **ROLLUP)

    def count(msg: StoredMsg, state: State) -> BatchMessage:
        window = f"{int(msg.time.timestamp())}.{msg.subject.rpartition('.')[2]}"
        state.put(window, b"%d" % (int(state.get(window, b"0")) + 1), ttl=2)
        return BatchMessage(f"{pair.target}.out", b"%s %s" % (window.encode(), state[window]))

    for first in range(1, 400, 100):
        await more(pair.source, first, first + 99)
        done = await pair.work(count)
        assert done.inputs == 100
    seen, expected = dict[str, int](), list[bytes]()
    async for msg in pair.reader():
        window = f"{int(msg.time.timestamp())}.{msg.subject.rpartition('.')[2]}"
        seen[window] = seen.get(window, 0) + 1
        expected.append(b"%s %d" % (window.encode(), seen[window]))
    assert [msg.data for msg in await pair.stored("out")] == expected
    await expired(pair, *seen)
    await more(pair.source, 401, 401)
    follower = Follower(pair, lambda seq, state: None)
    assert await follower.handles(401) == {}
    await follower.stop()


async def test_a_lost_state_of_keys_with_a_ttl(js: JetStreamContext, make_stateful: MakeStateful, more: More) -> None:
    """What must still be there is missed; keys that have expired are not, and neither are those that were deleted."""

    def change(msg: StoredMsg, state: State) -> None:
        assert set(state) == {str(n) for n in range(1, msg.seq)}
        state.put(str(msg.seq), b"", ttl=60)

    pair = await make_stateful(3, **ROLLUP)
    state = f"{pair.target}.state.w"
    await pair.work(change)
    await more(pair.source, 4, 4)

    async def refused(text: str, **options: Any) -> None:
        with pytest.raises(errors.HistoryUnavailableError, match=text):
            await pair.work(lambda *_: pytest.fail("handled"), **options)

    await refused("0 of 3 with one", state=f"{pair.target}.renamed")
    await js.publish(f"{state}.foreign", b"", headers={"Nats-TTL": "60"})
    await refused("4 of 3 with one")
    await js.purge_stream(pair.target, subject=f"{state}.foreign")
    await pair.work(change)
    await more(pair.source, 5, 5)
    await js.purge_stream(pair.target, subject=f"{state}.2")
    await refused("3 of 4 with one")
    await js.purge_stream(pair.target, subject=f"{state}.>")
    await refused("0 of 4 with one")
    for subject in ("state.w.>", "at.w"):
        await js.purge_stream(pair.target, subject=f"{pair.target}.{subject}")
    await pair.work(change)
    await js.purge_stream(pair.target, subject=f"{pair.target}.at.w")
    await refused("5 of 0 with one")

    pair = await make_stateful(3, **ROLLUP)
    for change_all in (
        lambda msg, state: state.put(str(msg.seq), b"", ttl=1),
        lambda _, state: state.clear() or state.put("a", b"", ttl=1_000),
        lambda _, state: state.clear(),
        lambda _, state: pytest.fail("a key is left") if state else None,
    ):
        await pair.work(change_all)
        await expired(pair, "1", "2", "3")
        last = (await js.stream_info(pair.source)).state.last_seq
        await more(pair.source, last + 1, last + 2)
    await pair.work(lambda *_: None)
