"""The state of exactly-once workers: what a handler may do with it, and that each start has the state of its position."""

import asyncio
import contextlib
import copy
import itertools
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any
from urllib.parse import unquote

import nats
import pytest
from frame_proxy import Frame, FrameProxy
from group_members import MakeGroup, running, until
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamSource, SubjectTransform
from workers import MakeStateful, StatefulPair

from jetstream_ext import BatchMessage, StoredMsg, arrow, errors, log
from jetstream_ext.log import DeadLetter, Seq, State, exactly_once_group
from jetstream_ext.testing import NatsServer

More = Callable[[str, int, int], Awaitable[None]]

ROLLUP: tuple[dict[str, Any], ...] = ({}, {"allow_rollup_hdrs": True})


def unreachable(*_: Any) -> None:
    pytest.fail("an input was handled")


def cancel() -> None:
    raise asyncio.CancelledError


# -- the mapping ---------------------------------------------------------------------------------------------------------


def use(state: State) -> None:
    """Call every method of a mapping, with an empty state at the beginning, and {"c": b"3", "d": b"4"} at the end."""
    assert isinstance(state, MutableMapping)
    assert (len(state), dict(state), bool(state), state == {}) == (0, {}, False, True)
    assert ("a" in state, "" in state, state.get("a"), state.get("a", b"-"), state.pop("a", b"-")) == (
        False, False, None, b"-", b"-",
    )  # fmt: skip
    for missing in (lambda: state["a"], lambda: state.pop("a"), state.popitem, lambda: state.__delitem__("a")):
        with pytest.raises(KeyError):
            missing()
    state["a"] = b"1"
    assert (state.setdefault("a", b"9"), state.setdefault("b", b"2")) == (b"1", b"2")
    state.update({"c": b"3"}, d=b"4")
    expected = {"a": b"1", "b": b"2", "c": b"3", "d": b"4"}
    assert (dict(state), len(state), state == expected, state != {**expected, "a": b""}) == (expected, 4, True, True)
    assert (list(state), list(state.keys()), list(state.values()), list(state.items())) == (
        list(expected), list(expected), list(expected.values()), list(expected.items()),
    )  # fmt: skip
    assert repr(state).endswith(": 4 keys>")
    assert state.popitem() == ("d", b"4")
    assert state.pop("a", b"-") == b"1"
    del state["b"]
    assert state == {"c": b"3"}
    state.clear()
    assert not state
    state.put("c", b"0")
    state["c"] = b"3"
    for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        copied["a"] = b"1"
        assert (type(copied), dict(state)) == (dict, {"c": b"3"})
    state["d"] = b"4"


async def test_a_handler_may_use_the_state_as_a_mapping(make_stateful: MakeStateful) -> None:
    """In each kind of handler."""
    pair = await make_stateful(2)
    out = (f"{pair.target}.out", b"1")

    def plain(given: Any, state: State) -> None:
        if state.pop("handled", None) is None:
            assert not state
            use(state)
            state["handled"] = b""

    async def later(given: Any, state: State) -> None:
        await asyncio.sleep(0)
        plain(given, state)

    def generator(given: Any, state: State) -> Iterator[Any]:
        yield out
        plain(given, state)

    async def async_generator(given: Any, state: State) -> AsyncIterator[Any]:
        yield out
        await later(given, state)

    for grouped in (False, True):
        for handler in (plain, later, generator, async_generator):
            for letter in (None, pair.letter()):
                name = f"{handler.__name__}{grouped}{letter is None}"
                await pair.work(handler, name=name, grouped=grouped, dead_letter=letter, max_messages=1)
                assert await pair.stored_state(name) == {"c": b"3", "d": b"4"}, name
                await pair.work(unreachable, name=name, grouped=grouped)
    assert len(await pair.outputs()) == 16


WRONG: list[tuple[Any, Any, str]] = [
    (5, b"", "a key of the state must be str, not int"),
    (b"a", b"", "a key of the state must be str, not bytes"),
    ("a", "1", "the value of key 'a' must be bytes, not str"),
    ("a", None, "the value of key 'a' must be bytes, not NoneType"),
    ("a", bytearray(b"1"), "the value of key 'a' must be bytes, not bytearray"),
]


async def test_a_wrong_type_ends_the_worker(make_stateful: MakeStateful) -> None:
    """With dead letters as well: it is an error of the program."""
    pair = await make_stateful(5)
    for letter in (None, pair.letter(1)):
        for key, value, text in WRONG:
            for put in (State.__setitem__, State.put):

                def handler(_: StoredMsg, state: State) -> None:
                    state["before"] = b""
                    put(state, key, value)  # noqa: B023

                with pytest.raises(TypeError) as caught:
                    await pair.work(handler, dead_letter=letter)
                assert str(caught.value) == (
                    f"worker 'w' on stream {pair.target!r}: {text}; correct the handler, and start the worker again"
                )
    assert all(record["seq"] == 1 and "failed" not in record for record in await pair.records())
    await pair.work()
    await pair.assert_exact(5)


async def test_only_changes_are_stored(make_stateful: MakeStateful) -> None:
    pair = await make_stateful(3)

    def change(msg: StoredMsg, state: State) -> None:
        state["same"] = b"1"
        state["gone"] = b"1"
        del state["gone"]

    await pair.work(change)
    assert [msg.subject for msg in await pair.stored("state.>")] == [f"{pair.target}.state.w.same"]


async def test_a_wrong_type_ends_the_worker_whatever_the_handler_makes_of_the_error(
    make_stateful: MakeStateful,
) -> None:
    def hides(_: StoredMsg, state: Any) -> None:
        with contextlib.suppress(TypeError):
            state["a"] = 5

    def wraps(_: StoredMsg, state: Any) -> None:
        try:
            state["a"] = 5
        except TypeError as error:
            raise ValueError from error

    async def groups(_: StoredMsg, state: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(state.__setitem__, "a", 5))

    pair = await make_stateful(2)
    for handler in (hides, wraps, groups):
        with pytest.raises(TypeError, match="the value of key 'a' must be bytes, not int"):
            await pair.work(handler, dead_letter=pair.letter(1))
    assert await pair.stored("dead") == []


async def test_a_key_that_no_subject_can_carry_fails_its_input(make_stateful: MakeStateful) -> None:
    for key, text in (
        ("", "a key of the state must not be empty"),
        ("a\ud800b", r"a key of the state cannot be encoded as UTF-8: 'a\\ud800b'"),
        ("x" * 5_000, r"state\.w\.xxxxxxxx.* has 50\d\d bytes, and at most 40\d\d can be sent"),
        ("é" * 2_000, r"state\.w\.%C3%A9%C3%A9"),
    ):
        pair = await make_stateful(30)

        def handler(msg: StoredMsg, state: State) -> BatchMessage | None:
            if msg.seq != 15:
                return pair.out(msg)  # noqa: B023
            state["before"] = b""
            state[key] = b""  # noqa: B023
            return None

        with pytest.raises(ValueError, match=text):
            await pair.work(handler, max_messages=10)
        assert await pair.outputs() == [*range(1, 15)]
        done = await pair.work(handler, dead_letter=pair.letter(2), max_messages=10)
        assert (done.inputs, done.dead_letters, await pair.stored_state()) == (16, 1, {})
        assert await pair.outputs() == [n for n in range(1, 31) if n != 15]


async def test_only_the_running_handler_may_change_the_state(make_stateful: MakeStateful) -> None:
    pair, kept = await make_stateful(1), list[State]()

    def handler(_: StoredMsg, state: State) -> None:
        state["a"] = b"1"
        kept.append(state)

    await pair.work(handler)
    (state,) = kept
    for change in (
        lambda: state.update(b=b""),
        lambda: state.put("a", b"2"),
        lambda: state.__delitem__("a"),
        lambda: state.setdefault("c", b""),
        lambda: state.pop("a"),
        state.popitem,
        state.clear,
    ):
        with pytest.raises(RuntimeError, match=r"worker 'w' .*only the handler can change the state, while it runs"):
            change()
    assert state == {"a": b"1"}


KEYS = [
    *("a", "a.b.c", "a b", "a.", ".a", ".", "..", "a..b", "...", "*", ">", "a.*", "a.>", "%", "%20", "%2E", "é", "日本", "😀"),
    *("\0", "\r\n", "a\tb", "\x7f", "\x80", "$SYS", "$JS.API", "_INBOX.x", "a/b?c=d&e", '"\\', "~", "A" * 2_000),
]  # fmt: skip


async def test_keys_are_percent_encoded_where_a_subject_needs_it(
    js: JetStreamContext, make_stateful: MakeStateful
) -> None:
    for config in ROLLUP:
        pair = await make_stateful(2, **config)
        expected = {key: key.encode() for key in KEYS}

        def handler(msg: StoredMsg, state: State) -> None:
            if msg.seq == 1:
                state.update(expected)  # noqa: B023
            assert state == expected  # noqa: B023

        await pair.work(handler, max_messages=1)
        assert await pair.stored_state() == expected
        prefix = f"{pair.target}.state.w."
        async with log.Table(js, pair.target, f"{prefix}>") as table:
            assert {unquote(it.removeprefix(prefix)): msg.data for it, msg in table.items()} == expected
            assert f"{prefix}a%20b" in table
            assert f"{prefix}a.b.c" in table


# -- calls that fail -----------------------------------------------------------------------------------------------------


async def test_a_handler_that_raises_leaves_the_state_as_it_was(make_stateful: MakeStateful) -> None:
    for most, config in ((1, {}), (100, {"allow_rollup_hdrs": True, "allow_msg_ttl": True})):
        pair = await make_stateful(30, **config)

        def handler(msg: StoredMsg, state: State) -> BatchMessage:
            made = pair.count(msg, state)  # noqa: B023
            if msg.seq == 15:
                state["more"] = b""
                del state["0"]
                if config:  # noqa: B023
                    state.put("1", b"", ttl=1)
                raise ZeroDivisionError
            return made

        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await pair.work(handler, max_messages=most)
            await pair.assert_exact(14)
        await pair.work(max_messages=most)
        await pair.assert_exact(30)


async def test_what_was_handled_behind_a_refused_output_is_undone_and_handled_again(
    make_stateful: MakeStateful,
) -> None:
    """A server refuses an output when later inputs have been handled, with changes that are then dropped."""

    def divide() -> None:
        raise ZeroDivisionError

    refused: dict[str, Callable[[str], Any]] = {
        "too large": lambda out: (out, bytes(2_000)),
        "an expectation": lambda out: BatchMessage(out, expected_last_subject_seq=77),
        "another subject": lambda out: ("elsewhere", b""),
        "the position": lambda out: (out.replace(".out", ".at.w"), b""),
        "its own state": lambda out: (out.replace(".out", ".state.w.a"), b""),
        "raised": lambda out: divide(),
    }
    for what, grouped in itertools.product(refused, (False, True)):
        pair, calls = await make_stateful(40, max_msg_size=1_500), list[int]()
        options = {"max_messages": 10, "grouped": grouped}

        def handler(given: Any, state: State) -> Any:
            msgs, total = given if isinstance(given, list) else [given], int(state.get("sum", b"0"))
            calls.append(msgs[-1].seq)  # noqa: B023
            state["sum"] = b"%d" % (total + sum(msg.seq for msg in msgs))
            state["last"] = b"%d" % msgs[-1].seq
            state.pop("0", None)
            state[str(msgs[0].seq % 2)] = b""
            bad = any(msg.seq == 5 for msg in msgs)
            return refused[what](f"{pair.target}.out") if bad else (f"{pair.target}.out", state["sum"])  # noqa: B023

        with pytest.raises((errors.BatchError, ValueError, ArithmeticError)):
            await pair.work(handler, **options)
        before = {} if grouped else {"sum": b"10", "last": b"4", "1": b"", "0": b""}
        assert await pair.stored_state() == before, what
        assert await pair.outputs() == ([] if grouped else [1, 3, 6, 10]), what
        done = await pair.work(handler, **options, dead_letter=pair.letter(2))
        assert (done.dead_letters, done.position) == (1, 41), what
        stored, sums = await pair.stored_state(), await pair.outputs()
        assert (stored["sum"], stored["last"], sums[-1]) == (b"815", b"40", 815), what
        assert grouped or sums == list(itertools.accumulate(n for n in range(1, 41) if n != 5)), what
        if what in ("too large", "an expectation"):
            assert len(calls) > len(set(calls)) + 2, "inputs behind it were handled again"


async def test_changes_over_the_batch_limit(make_stateful: MakeStateful, more: More) -> None:
    """Those of several inputs are split, those of one are refused."""
    pair = await make_stateful(100)

    def many(count: int) -> Any:
        def handler(msg: StoredMsg, state: State) -> BatchMessage:
            state.update({f"{msg.seq}.{n}": b"%d" % n for n in range(count)})
            return pair.out(msg)

        return handler

    done = await pair.work(many(15))
    assert (done.inputs, done.outputs) == (100, 100)
    assert await pair.stored_state() == {f"{seq}.{n}": b"%d" % n for seq in range(1, 101) for n in range(15)}
    with pytest.raises(errors.AtomicPublishTooLargeError, match="too large: 1000"):
        await pair.work(many(999), name="v", max_messages=1)
    assert await pair.stored_state("v") == {}
    await more(pair.source, 101, 101)
    with pytest.raises(errors.AtomicPublishTooLargeError):
        await pair.work(lambda _, state: state.clear())
    assert len(await pair.stored_state()) == 1_500


# -- starts and take-overs -----------------------------------------------------------------------------------------------


async def test_a_start_has_exactly_the_state_of_its_position(
    js: JetStreamContext, make_stateful: MakeStateful, more: More
) -> None:
    """`StatefulPair.count` checks it at each input."""
    configs: list[dict[str, Any]] = [
        {},
        {"allow_rollup_hdrs": True},
        {"max_msgs_per_subject": 1},
        {"max_msgs_per_subject": 5},
        {"max_msgs": 1_000, "discard": DiscardPolicy.NEW},
        {"max_age": 3_600, "allow_msg_ttl": True, "allow_rollup_hdrs": True},
    ]
    for config in configs:
        pair = await make_stateful(10, **config)
        for last in (10, 11, 11, 25):
            if last > 10:
                await more(pair.source, (await pair.records())[-1]["seq"], last)
            await pair.work(max_messages=4)
            assert await pair.stored_state() == pair.counts(last), config
        messages = len(await pair.stored("state.w.>"))
        assert (messages == 6) == ("allow_rollup_hdrs" in config or config.get("max_msgs_per_subject") == 1), config
        if "max_msgs_per_subject" not in config:  # which would also be one of the outputs
            await pair.assert_exact(25)


async def test_a_worker_that_was_taken_over_changes_nothing(make_stateful: MakeStateful) -> None:
    pair = await make_stateful(40)
    held, go_on = asyncio.Event(), asyncio.Event()

    async def slow(msg: StoredMsg, state: State) -> BatchMessage:
        made = pair.count(msg, state)
        if msg.seq == 15:
            state["zombie"] = b""
            held.set()
            await go_on.wait()
        return made

    zombie = asyncio.ensure_future(pair.work(slow, pair.reader(tail=True), max_messages=10))
    await asyncio.wait_for(held.wait(), 30)
    await pair.work(max_messages=7)
    go_on.set()
    with pytest.raises(errors.FencedError, match="another worker of this name has taken over"):
        await zombie
    await pair.assert_exact(40)


async def test_a_standby_takes_the_state_over(make_stateful: MakeStateful, more: More, make_store: Any) -> None:
    pair, offsets, tasks = await make_stateful(0), await make_store(), list[asyncio.Task[Any]]()
    handled: list[list[int]] = [[], []]

    def start(number: int) -> None:
        def handler(msg: StoredMsg, state: State) -> BatchMessage:
            handled[number].append(msg.seq)
            return pair.count(msg, state)

        reader = pair.reader(tail=True, poll=0.01, offsets=offsets)
        tasks.append(asyncio.ensure_future(pair.work(handler, reader, standby=True)))

    start(0)
    await more(pair.source, 1, 20)
    await until(lambda: 20 in handled[0])
    start(1)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    await more(pair.source, 21, 40)
    await until(lambda: 40 in handled[1] or tasks[1].done())
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert (handled[0][0], handled[1][-1]) == (1, 40)
    await pair.work()
    await pair.assert_exact(40)


# -- what stateful peers have got wrong ----------------------------------------------------------------------------------


@pytest.fixture
async def worked(make_stateful: MakeStateful) -> StatefulPair:
    """A worker that has ended behind 11 of its 20 inputs."""
    pair = await make_stateful(20)

    def handler(msg: StoredMsg, state: State) -> BatchMessage:
        if msg.seq == 12:
            raise ZeroDivisionError
        return pair.count(msg, state)

    with pytest.raises(ZeroDivisionError):
        await pair.work(handler, max_messages=5)
    await pair.assert_exact(11)
    return pair


async def assert_refused(pair: StatefulPair, stored: str, **options: Any) -> None:
    """Assert that each start is refused because of its state, and handles nothing."""
    state = options.get("state", f"{pair.target}.state")
    text = (
        f"worker 'w' on stream {pair.target!r}: the state on '{state}.w.>' is not the one that was stored with the position: "
        f"it has {stored}.*. Nothing was handled; restore them, or begin again: purge '{state}.w.>' and the position on "
        f"'{pair.target}.at.w'"
    )
    for _ in range(2):
        with pytest.raises(errors.HistoryUnavailableError, match=text):
            await pair.work(unreachable, dead_letter=pair.letter(1), **options)
    assert await pair.stored("dead") == []


async def begin_again(js: JetStreamContext, pair: StatefulPair) -> None:
    """Do what the error says."""
    for subject in ("state.w.>", "at.w", "out"):
        await js.purge_stream(pair.target, subject=f"{pair.target}.{subject}")
    await pair.work()
    await pair.assert_exact(20)


async def test_state_ahead_of_the_position(js: JetStreamContext, worked: StatefulPair) -> None:
    older = next(record for record in await worked.records() if record["seq"] == 6)
    await worked.forge(**older)
    await assert_refused(worked, "4 of 4 keys without a TTL, 0 of 0 with one, or others")
    await begin_again(js, worked)


async def test_state_behind_the_position(js: JetStreamContext, worked: StatefulPair) -> None:
    """A snapshot of before some commits was restored."""
    for message in (await worked.stored("state.w.>"))[-4:]:
        await js.delete_msg(worked.target, message.seq)
    await assert_refused(worked, "4 of 4 keys without a TTL, 0 of 0 with one, or others")
    await begin_again(js, worked)


async def test_lost_changelog(js: JetStreamContext, worked: StatefulPair) -> None:
    newest = {message.subject: message.seq for message in await worked.stored("state.w.>")}
    await js.delete_msg(worked.target, newest[f"{worked.target}.state.w.0"])
    await assert_refused(worked, "4 of 4 keys without a TTL, 0 of 0 with one, or others")
    await js.purge_stream(worked.target, subject=f"{worked.target}.state.w.0")
    await assert_refused(worked, "3 of 4 keys without a TTL, ")
    await js.purge_stream(worked.target, subject=f"{worked.target}.state.>")
    await assert_refused(worked, "0 of 4 keys without a TTL")
    await begin_again(js, worked)


async def test_lost_changelog_of_a_running_worker(js: JetStreamContext, worked: StatefulPair) -> None:
    """The stream was deleted and created again, with its position: the worker ends, and the next start begins again."""
    config = (await js.stream_info(worked.target)).config

    async def handler(msg: StoredMsg, state: State) -> BatchMessage:
        if msg.seq == 15:
            await js.delete_stream(worked.target)
            await js.add_stream(config)
        return worked.count(msg, state)

    with pytest.raises((errors.FencedError, errors.StreamRecreatedError)):
        await worked.work(handler, max_messages=1)
    await worked.work()
    await worked.assert_exact(20)


async def test_a_restart_after_a_purge(js: JetStreamContext, worked: StatefulPair) -> None:
    await js.purge_stream(worked.target)
    await worked.work()
    await worked.assert_exact(20)
    await js.purge_stream(worked.target, keep=1)  # of the position
    await assert_refused(worked, "0 of 5 keys without a TTL")


async def test_an_empty_state_taken_for_a_new_one(js: JetStreamContext, worked: StatefulPair) -> None:
    await assert_refused(worked, "0 of 4 keys without a TTL", state=f"{worked.target}.renamed")
    with pytest.raises(ValueError, match="the worker has a state of 4 keys; pass state= as the start before has done"):
        await worked.work(unreachable, state=None)
    await worked.work()
    await worked.assert_exact(20)
    await js.purge_stream(worked.target, subject=f"{worked.target}.at.w")
    await assert_refused(worked, "5 of 0 keys without a TTL")
    await begin_again(js, worked)


async def test_another_program_that_writes_into_the_state_is_noticed(
    js: JetStreamContext, worked: StatefulPair
) -> None:
    for key, stored in (("new", "5 of 4 keys"), ("0", "4 of 4 keys without a TTL, 0 of 0 with one, or others")):
        ack = await js.publish(f"{worked.target}.state.w.{key}", b"foreign")
        await assert_refused(worked, stored)
        await js.delete_msg(worked.target, ack.seq)
    await worked.work()
    await worked.assert_exact(20)


async def test_a_zombie_writes_the_state_of_a_lost_partition(
    server: NatsServer, make_stateful: MakeStateful, work_in_group: Any
) -> None:
    """Its commit is held up on its connection, and reaches the server when another member has worked on the partition."""
    pair, held, go_on = await make_stateful(30), asyncio.Event(), asyncio.Event()
    commits = 0

    async def hold(frame: Frame) -> Frame:
        nonlocal commits
        commits += frame.subject == f"{pair.target}.at.g.0"
        if commits == 3:  # the claim, the first commit, and this one
            held.set()
            await go_on.wait()
        return frame

    async with FrameProxy(server.port, hold) as proxy, await nats.connect(proxy.url, connect_timeout=10) as nc:
        behind = nc.jetstream(timeout=30)
        async with work_in_group(pair, behind, max_messages=5):
            await asyncio.wait_for(held.wait(), 60)
            async with work_in_group(pair) as member:
                await reach(pair, 30, member)
                go_on.set()
                await behind.publish(f"{pair.target}.behind", b"")
    await pair.assert_exact(30, "g")


async def test_a_start_beside_busy_writers_reads_only_its_own_keys(
    server: NatsServer, make_stateful: MakeStateful
) -> None:
    """More than one request reads; meanwhile other programs store messages faster than a client reads them."""
    pair, done = await make_stateful(4), asyncio.Event()
    keys = {f"key {n}": b"%d" % n for n in range(2_400)}

    def fill(msg: StoredMsg, state: State) -> None:
        state.update({key: keys[key] for key in list(keys)[(msg.seq - 1) * 800 : msg.seq * 800]})
        if msg.seq == 4:
            assert state == keys

    with pytest.raises(asyncio.CancelledError):
        await pair.work(lambda msg, state: fill(msg, state) if msg.seq < 4 else cancel(), max_messages=1)

    async def write() -> None:
        async with await nats.connect(server.url) as nc:
            while not done.is_set():
                for _ in range(100):
                    await nc.publish(f"{pair.target}.other", b"")
                await nc.flush()

    async with asyncio.TaskGroup() as writers:
        for _ in range(3):
            writers.create_task(write())
        assert (await pair.work(fill, max_messages=1)).position == 5
        done.set()


# -- what is refused -----------------------------------------------------------------------------------------------------


async def test_an_output_stream_that_can_lose_the_state_is_refused(
    js: JetStreamContext, make_stateful: MakeStateful
) -> None:
    configs: list[tuple[dict[str, Any], str]] = [
        ({"max_age": 3600}, "set allow_msg_ttl, or remove max_age"),
        ({"max_msgs": 100}, "set discard='new', or remove max_msgs"),
        ({"max_bytes": 1 << 20}, "set discard='new', or remove max_bytes"),
        ({"retention": RetentionPolicy.INTEREST}, "use limits retention"),
        ({"retention": RetentionPolicy.WORK_QUEUE}, "use limits retention"),
        ({"subject_transform": SubjectTransform(src="*.state.>", dest="to.>")}, "from its subject_transform"),
        ({"allow_direct": False}, "allow_direct"),
        ({"allow_atomic": False}, "allow_atomic"),
    ]
    for config, text in configs:
        pair = await make_stateful(5, **config)
        with pytest.raises((errors.StreamConfigMismatchError, errors.DirectGetDisabledError), match=text) as caught:
            await pair.work(unreachable)
        assert f"stream {pair.target!r}" in str(caught.value)
        assert "position_may_vanish" not in str(caught.value)
        assert (await js.stream_info(pair.target)).state.last_seq == 0
    pair = await make_stateful(5)
    with pytest.raises(errors.StreamConfigMismatchError, match=r"add 'elsewhere\.w\.>' to its subjects"):
        await pair.work(unreachable, state="elsewhere")


async def test_subjects_that_cannot_hold_a_state_are_refused(make_stateful: MakeStateful) -> None:
    pair = await make_stateful(5)
    state = f"{pair.target}.state"
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"state": f"{pair.target}.at"}, ValueError, "use another state="),
        ({"state": f"{pair.target}", "prefix": f"{pair.target}.w"}, ValueError, "use another state="),
        ({"dead_letter": DeadLetter(f"{state}.w.dead")}, ValueError, "dead letters .* would be among those of state="),
        ({"position_may_vanish": True}, ValueError, "leave out position_may_vanish"),
        ({"state": ""}, ValueError, "subject"),
        ({"state": "a b"}, ValueError, "a b"),
        ({"state": "a.*"}, ValueError, "a"),
        ({"state": 5}, TypeError, "state must be str, not int"),
        ({"state": True}, TypeError, "state must be str, not bool"),
        ({"handler": lambda msg: None}, TypeError, "is called with an input and the state, and .* does not take that"),
        ({"handler": pair.counted}, TypeError, "does not take that"),
        (
            {"handler": pair.count, "state": None},
            TypeError,
            "the handler is called with an input, and ",
        ),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            pytest.fail(f"{options}: {await pair.work(**{'handler': unreachable, **options})}")
    assert await pair.stored(">") == []


async def test_a_stream_that_no_longer_takes_the_state_ends_the_worker(
    js: JetStreamContext, make_stateful: MakeStateful
) -> None:
    """The inputs are not to blame, so they are no dead letters."""
    pair = await make_stateful(3)
    config = (await js.stream_info(pair.target)).config
    others = [f"{pair.target}.{name}" for name in ("at.>", "out", "dead")]

    async def handler(msg: StoredMsg, state: State) -> BatchMessage:
        if msg.seq == 2:
            await js.update_stream(config.evolve(subjects=others))
        return pair.count(msg, state)

    with pytest.raises(errors.StreamConfigMismatchError, match="cannot hold the state of a worker: add"):
        await pair.work(handler, max_messages=1, dead_letter=pair.letter(1))
    assert await pair.stored("dead") == []
    await js.update_stream(config)
    await pair.work()
    await pair.assert_exact(3)


async def test_an_output_among_the_states_of_any_worker_is_refused(make_stateful: MakeStateful) -> None:
    pair = await make_stateful(1)
    for subject in ("w.a", "other.a", "g.1.a"):
        with pytest.raises(errors.BadSubjectError, match="is among those of state="):
            await pair.work(lambda *_, subject=subject: (f"{pair.target}.state.{subject}", b""))
    assert await pair.stored("state.>") == []


async def test_a_worker_that_would_read_its_own_state_is_refused(
    js: JetStreamContext, make_stateful: MakeStateful, stream_name: Callable[[], str]
) -> None:
    pair, mirror, copy = await make_stateful(5), stream_name(), stream_name()
    await js.add_stream(name=mirror, mirror=StreamSource(name=pair.target), allow_direct=True)
    await js.add_stream(name=copy, sources=[StreamSource(name=pair.target)], allow_direct=True)
    await pair.work()
    for stream in (mirror, copy):
        while (await js.stream_info(stream)).state.messages < (await js.stream_info(pair.target)).state.messages:
            await asyncio.sleep(0.05)
    for stream in (pair.target, mirror, copy):
        for subject in (f"{pair.target}.state.>", f"{pair.target}.*.w.0"):
            reader = pair.reader(stream=stream, subject=subject)
            with pytest.raises(ValueError, match=r"each change of the state of its own .* read with a filter"):
                await pair.work(unreachable, reader)
        done = await pair.work(
            lambda msg, state: None, pair.reader(stream=stream, subject=f"{pair.target}.out"), name=stream
        )
        assert done.inputs == 5


# -- from outside --------------------------------------------------------------------------------------------------------


async def test_tables_and_arrow_show_the_state(js: JetStreamContext, make_stateful: MakeStateful, more: More) -> None:
    """A deletion is a row with ``KV-Operation: DEL`` for Arrow, and one for a table."""
    for config in ROLLUP:
        pair = await make_stateful(5, **config)
        await pair.work()
        prefix = f"{pair.target}.state.w."
        async with log.Table(js, pair.target, f"{prefix}>") as table:
            assert {it.removeprefix(prefix): msg.data for it, msg in table.items()} == pair.counts(5)
            changes = table.changes()
            await more(pair.source, 6, 6)
            await pair.work()
            await table.wait_for((await pair.stored("state.w.>"))[-1].seq)
            assert {it.removeprefix(prefix): msg.data for it, msg in table.items()} == pair.counts(6)
            seen = [await anext(changes) for _ in range(2)]
            (removed,) = [it for it in seen if it.subject == f"{prefix}0.odd"]
            assert removed.new is None
            assert removed.old is not None
            assert removed.old.data == b""
        rows = (await arrow.to_arrow(js, pair.target, subject=f"{prefix}>")).to_pylist()
        (deleted,) = [row for row in rows[-2:] if row["subject"] == f"{prefix}0.odd"]
        assert deleted["data"] == b""
        assert dict(deleted["headers"])["KV-Operation"] == ["DEL"]


# -- groups --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def work_in_group(make_group: MakeGroup) -> Callable[..., Any]:
    """Run a member that counts."""

    def work(pair: StatefulPair, js: Any = None, **options: Any) -> Any:
        group = make_group(pair.source, key=[1], partitions=pair.partitions, **({"js": js} if js else {}))
        options = {"prefix": f"{pair.target}.at", "state": f"{pair.target}.state", **options}
        return running(exactly_once_group(group, pair.target, pair.count, **options))

    return work


async def reach(pair: StatefulPair, count: int, *members: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        while len(await pair.stored("out")) < count:
            for member in members:
                assert not member.done() or member.result()
            await asyncio.sleep(0.05)


async def test_each_partition_of_a_group_takes_its_state_along(
    make_stateful: MakeStateful, work_in_group: Any, more: More
) -> None:
    """`StatefulPair.count` checks it at each input."""
    pair = await make_stateful(100)
    pair.partitions = 4
    async with work_in_group(pair) as first:
        await reach(pair, 50, first)
        async with work_in_group(pair) as second:
            await more(pair.source, 101, 200)
            await reach(pair, 150, first, second)
            first.cancel()
            await asyncio.wait([first])
            await more(pair.source, 201, 300)
            await reach(pair, 300, second)
    await pair.assert_exact(300, "g")


async def test_dead_letters_of_a_group_leave_its_state(make_stateful: MakeStateful, work_in_group: Any) -> None:
    pair = await make_stateful(60)
    pair.partitions, pair.bad = 4, 20
    async with work_in_group(pair, dead_letter=pair.letter(2)) as member:
        await reach(pair, 59, member)
    await pair.assert_exact(60, "g")
    assert [msg.data for msg in await pair.stored("dead")] == [b"20"]


async def test_a_reset_of_a_group_needs_a_purge_of_its_state(
    js: JetStreamContext, make_stateful: MakeStateful, make_group: MakeGroup, work_in_group: Any
) -> None:
    pair = await make_stateful(30)
    pair.partitions = 4
    async with work_in_group(pair) as member:
        await reach(pair, 30, member)
    await make_group(pair.source, key=[1], partitions=5).reset(Seq(11))
    pair.partitions, pair.first = 5, 11

    async def work_to_the_end() -> None:
        async with work_in_group(pair) as member:
            await asyncio.wait([member], timeout=60)

    for _ in range(2):
        with pytest.raises(errors.HistoryUnavailableError, match=r"of a group before its reset.* purge .*state\.g\."):
            await work_to_the_end()
    for subject in ("state.g.>", "out"):
        await js.purge_stream(pair.target, subject=f"{pair.target}.{subject}")
    async with work_in_group(pair) as member:
        await reach(pair, 20, member)
    await pair.assert_exact(30, "g")
