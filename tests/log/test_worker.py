"""Exactly-once processing: what a worker stores, what it refuses, and how workers fence each other."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, SubjectTransform

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.log import Group, LogReader, New, Processed, exactly_once, exactly_once_group
from jetstream_ext.testing import NatsServer

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


async def outputs(js: JetStreamContext, name: str) -> list[bytes]:
    """Return the outputs that a worker has stored, without its positions."""
    return [msg.data async for msg in LogReader(js, name, subject=f"{name}.out")]


async def stored_position(js: JetStreamContext, name: str, worker: str = "w") -> Any:
    return json.loads((await jsx.DirectGet(js, name).get_last(f"{name}.at.{worker}")).data)


def work(reader: LogReader, stream: str, handler: Any, **options: Any) -> Awaitable[Processed]:
    return exactly_once(reader, stream, handler, **({"name": "w", "prefix": f"{stream}.at"} | options))


def doubled(name: str) -> Callable[[StoredMsg], BatchMessage]:
    return lambda msg: BatchMessage(f"{name}.out", b"%d" % (2 * int(msg.data)))


async def test_a_worker_runs_to_the_end_and_continues_there(
    js: JetStreamContext, make_stream: Make, more: More, leak_check: Any
) -> None:
    source, target = await make_stream(250), await make_stream()
    done = await work(LogReader(js, source), target, doubled(target))
    assert done == Processed(inputs=250, outputs=250, commits=5, position=251)
    assert await outputs(js, target) == [b"%d" % (2 * n) for n in range(1, 251)]
    found = await stored_position(js, target)
    assert (found["v"], found["stream"], found["seq"]) == (1, source, 251)
    await more(source, 251, 260)
    done = await work(LogReader(js, source), target, doubled(target))
    assert (done.inputs, done.position) == (10, 261)
    assert await outputs(js, target) == [b"%d" % (2 * n) for n in range(1, 261)]
    await leak_check.assert_clean()


async def one_by_one(name: str) -> AsyncIterator[BatchMessage]:
    for letter in (b"a", b"b"):
        await asyncio.sleep(0)
        yield BatchMessage(f"{name}.out", letter)


async def later(made: Any) -> Any:
    await asyncio.sleep(0)
    return made


HANDLERS: dict[str, Callable[[str], Any]] = {
    "one": lambda name: BatchMessage(f"{name}.out", b"a"),
    "none": lambda name: None,
    "an empty list": lambda name: [],
    "a tuple of a subject and a payload": lambda name: (f"{name}.out", b"a"),
    "with headers": lambda name: (f"{name}.out", b"a", {"h": "1"}),
    "tuples": lambda name: [(f"{name}.out", b"a"), (f"{name}.out", b"b", {"h": "1"})],
    "a tuple of tuples": lambda name: ((f"{name}.out", b"a"), (f"{name}.out", b"b")),
    "a tuple": lambda name: (BatchMessage(f"{name}.out", b"a"), BatchMessage(f"{name}.out", b"b")),
    "a generator": lambda name: (BatchMessage(f"{name}.out", letter) for letter in (b"a", b"b")),
    "an async generator": one_by_one,
    "an awaitable": lambda name: later([BatchMessage(f"{name}.out", b"a")]),
    "an awaitable of an async generator": lambda name: later(one_by_one(name)),
}


async def test_a_handler_may_return_each_kind_of_output(js: JetStreamContext, make_stream: Make) -> None:
    counts = {"one": 1, "an awaitable": 1, "a tuple of a subject and a payload": 1, "with headers": 1}
    counts |= {"none": 0, "an empty list": 0}
    failures: list[str] = []
    for kind, make in HANDLERS.items():
        source, target = await make_stream(3), await make_stream()
        await work(LogReader(js, source), target, lambda _: make(target))  # noqa: B023
        found = await outputs(js, target), (await stored_position(js, target))["seq"]
        if found != ([b"a", b"b"][: counts.get(kind, 2)] * 3, 4):
            failures.append(f"{kind}: {found}")
    assert not failures, "\n".join(failures)


async def test_a_grouped_handler_gets_the_inputs_of_a_commit(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(25), await make_stream()

    async def total(group: list[StoredMsg]) -> BatchMessage:
        return BatchMessage(f"{target}.out", b"%d" % sum(int(msg.data) for msg in group))

    done = await work(LogReader(js, source), target, total, grouped=True, max_messages=10)
    assert await outputs(js, target) == [b"55", b"155", b"115"]
    assert (done.inputs, done.outputs, done.commits) == (25, 3, 5)


async def test_outputs_are_stored_before_the_next_input_is_handled_with_one_input_in_a_commit(
    js: JetStreamContext, make_stream: Make
) -> None:
    source, target = await make_stream(5), await make_stream()
    expected = 0

    async def handler(msg: StoredMsg) -> BatchMessage:
        nonlocal expected
        found = [it.seq async for it in LogReader(js, target, subject=f"{target}.out")]
        assert len(found) == msg.seq - 1
        expected = found[-1] if found else 0
        return BatchMessage(f"{target}.out", msg.data, expected_last_subject_seq=expected)

    done = await work(LogReader(js, source), target, handler, max_messages=1)
    assert (done.inputs, done.outputs) == (5, 5)


async def test_the_position_moves_over_messages_that_the_filter_excludes(
    js: JetStreamContext, make_stream: Make
) -> None:
    source, target = await make_stream(20), await make_stream()
    done = await work(LogReader(js, source, subject=f"{source}.1"), target, doubled(target))
    assert (done.inputs, done.position) == (7, 21)
    done = await work(LogReader(js, source, subject=f"{source}.9"), target, doubled(target), name="v")
    assert (done.inputs, done.commits) == (0, 2)
    assert (await stored_position(js, target, "v"))["seq"] == 21


async def test_a_start_that_depends_on_the_moment_is_pinned(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    source, target = await make_stream(10), await make_stream()
    await work(LogReader(js, source, start=New()), target, doubled(target))
    await more(source, 11, 12)
    done = await work(LogReader(js, source, start=New()), target, doubled(target))
    assert (done.inputs, done.position) == (2, 13)


async def test_a_failed_handler_ends_the_worker_behind_the_inputs_before(
    js: JetStreamContext, make_stream: Make
) -> None:
    source, target = await make_stream(30), await make_stream()

    def handler(msg: StoredMsg) -> BatchMessage:
        if msg.seq == 25:
            raise ZeroDivisionError
        return doubled(target)(msg)

    with pytest.raises(ZeroDivisionError):
        await work(LogReader(js, source), target, handler, max_messages=10)
    assert len(await outputs(js, target)) == 24
    await work(LogReader(js, source), target, doubled(target))
    assert await outputs(js, target) == [b"%d" % (2 * n) for n in range(1, 31)]


async def test_outputs_over_the_batch_limit_are_split(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(10), await make_stream()

    def handler(msg: StoredMsg) -> list[BatchMessage]:
        return [BatchMessage(f"{target}.out", b"%d" % msg.seq)] * 400

    done = await work(LogReader(js, source), target, handler)
    assert await outputs(js, target) == [b"%d" % n for n in range(1, 11) for _ in range(400)]
    assert done.outputs == 4000

    def too_many(group: list[StoredMsg]) -> list[BatchMessage]:
        return [BatchMessage(f"{target}.out", b"x")] * 1000

    with pytest.raises(errors.AtomicPublishTooLargeError):
        await work(LogReader(js, source), target, too_many, grouped=True, name="v")
    assert (await stored_position(js, target, "v"))["seq"] == 1


async def test_the_tail_is_followed_until_it_is_cancelled(
    js: JetStreamContext, make_stream: Make, more: More, leak_check: Any
) -> None:
    source, target = await make_stream(3), await make_stream()
    task = asyncio.ensure_future(work(LogReader(js, source, tail=True), target, doubled(target)))
    await more(source, 4, 6)
    async with asyncio.timeout(30):
        while len(await outputs(js, target)) < 6:
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await leak_check.assert_clean()
    assert len(await outputs(js, target)) == 6


async def test_a_newer_worker_fences_the_older_one(
    js: JetStreamContext, make_stream: Make, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older worker holds a handled batch when the newer one starts."""
    source, target = await make_stream(40), await make_stream()
    held, go_on = asyncio.Event(), asyncio.Event()

    async def slow(msg: StoredMsg) -> BatchMessage:
        if msg.seq == 15:
            held.set()
            await go_on.wait()
        return doubled(target)(msg)

    zombie = asyncio.ensure_future(work(LogReader(js, source, tail=True), target, slow, max_messages=10))
    await asyncio.wait_for(held.wait(), 30)
    await work(LogReader(js, source), target, doubled(target), max_messages=7)
    go_on.set()
    with pytest.raises(errors.FencedError, match="another worker of this name has taken over") as caught:
        await zombie
    assert (caught.value.name, caught.value.seq) == ("w", 41)
    assert await outputs(js, target) == [b"%d" % (2 * n) for n in range(1, 41)]


async def test_workers_that_start_together_store_each_output_once(js: JetStreamContext, make_stream: Make) -> None:
    for _ in range(3):
        source, target = await make_stream(60), await make_stream()
        workers = [work(LogReader(js, source), target, doubled(target), max_messages=9) for _ in range(4)]
        ended = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(end, Processed | errors.FencedError) for end in ended), ended
        assert any(isinstance(end, Processed) for end in ended)
        assert await outputs(js, target) == [b"%d" % (2 * n) for n in range(1, 61)]


async def test_workers_of_two_names_do_not_fence_each_other(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(30), await make_stream()
    workers = [work(LogReader(js, source), target, doubled(target), name=name, max_messages=3) for name in "ab"]
    assert [done.inputs for done in await asyncio.gather(*workers)] == [30, 30]
    assert len(await outputs(js, target)) == 60


async def test_an_output_stream_that_can_lose_the_position_is_refused(js: JetStreamContext, make_stream: Make) -> None:
    configs: list[dict[str, Any]] = [
        {"allow_atomic": False},
        {"max_age": 3600},
        {"max_msgs": 100},
        {"max_bytes": 1 << 20},
        {"subject_transform": SubjectTransform(src=">", dest="to.>")},
        {"retention": RetentionPolicy.INTEREST},
        {"retention": RetentionPolicy.WORK_QUEUE},
    ]
    for config in configs:
        (wrong,) = config
        source, target = await make_stream(5), await make_stream(**config)
        with pytest.raises(errors.StreamConfigMismatchError, match=wrong) as caught:
            await work(LogReader(js, source), target, doubled(target))
        assert set(caught.value.diff) == {wrong}
        assert (await js.stream_info(target)).state.messages == 0
        if wrong in ("max_age", "max_msgs", "max_bytes"):
            done = await work(LogReader(js, source), target, doubled(target), position_may_vanish=True)
            assert done.inputs == 5
    for accepted in ({"max_msgs": 1000, "discard": DiscardPolicy.NEW}, {"max_msgs_per_subject": 1}):
        source, target = await make_stream(5), await make_stream(**accepted)
        assert (await work(LogReader(js, source), target, doubled(target))).inputs == 5


async def test_a_position_subject_outside_the_output_stream_is_refused(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(5), await make_stream()
    with pytest.raises(errors.StreamConfigMismatchError, match=r"elsewhere\.w") as caught:
        await work(LogReader(js, source), target, doubled(target), prefix="elsewhere")
    assert set(caught.value.diff) == {"subjects"}
    with pytest.raises(nats.js.errors.NotFoundError):
        await work(LogReader(js, source), "NOT_THERE", doubled(target))


async def test_the_position_outlives_max_age_and_is_rolled_up(js: JetStreamContext, make_stream: Make) -> None:
    source = await make_stream(30)
    target = await make_stream(max_age=1, allow_msg_ttl=True, allow_rollup_hdrs=True)
    await work(LogReader(js, source), target, doubled(target), max_messages=10)
    async with asyncio.timeout(30):
        while (await js.stream_info(target)).state.messages > 1:
            await asyncio.sleep(0.1)
    assert (await stored_position(js, target))["seq"] == 31
    done = await work(LogReader(js, source), target, doubled(target))
    assert (done.inputs, done.position) == (0, 31)


async def test_a_worker_whose_position_was_removed_stops(
    js: JetStreamContext, make_stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await make_stream(5), await make_stream()

    async def handler(msg: StoredMsg) -> None:
        await js.purge_stream(target, subject=f"{target}.at.w")

    with pytest.raises(errors.FencedError, match="was removed"):
        await work(LogReader(js, source), target, handler)


async def test_a_refused_output_stores_nothing(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(5), await make_stream()
    cases: list[tuple[Any, type[Exception]]] = [
        (b"bytes", TypeError),
        (7, TypeError),
        ([("subject", b"")], errors.BadSubjectError),
        (BatchMessage("nowhere.at.all"), errors.BadSubjectError),
        (BatchMessage(f"{target}.at.w"), errors.BadSubjectError),
        (BatchMessage(f"{target}.out", expected_last_subject_seq=77), errors.WrongLastSequenceError),
        (BatchMessage(f"{target}.out", headers={"Nats-Batch-Id": "x"}), errors.BadHeaderError),
    ]
    for made, error in cases:
        with pytest.raises(error):
            await work(LogReader(js, source), target, lambda _: made, max_messages=1)  # noqa: B023
        assert (await stored_position(js, target))["seq"] == 1, made
    assert await outputs(js, target) == []


MAY_RETURN = (
    "it must return None, a message (a BatchMessage, (subject, payload) or (subject, payload, headers)), or an iterable or "
    "async iterable of messages; nothing of it is stored; correct the handler, and start the worker again"
)
NO_OUTPUTS: list[tuple[Any, str]] = [
    (b"x", "bytes"),
    (b"", "bytes"),
    ("x", "str"),
    (5, "int"),
    ({"a": b"x"}, "dict"),
    ({}, "dict"),
    (["a", b"x"], "a list whose item 0 is str"),
    ([("{}.out", b"x"), 5], "a list whose item 1 is int"),
    (("{}.out", b"x", {}, 4), "a tuple of 4 items"),
    ([("{}.out",)], "a list whose item 0 is a tuple of 1 item"),
]


async def test_a_handler_that_returns_no_outputs_is_told_what_it_may_return(
    js: JetStreamContext, make_stream: Make
) -> None:
    source, target = await make_stream(5), await make_stream()
    for grouped, inputs in ((False, "input 1"), (True, "inputs 1 to 5")):
        for made, shown in NO_OUTPUTS:
            with pytest.raises(TypeError) as caught:
                await work(LogReader(js, source), target, lambda _: made, grouped=grouped)  # noqa: B023
            where = f"worker 'w' on stream {target!r}: {inputs} of stream {source!r}"
            assert str(caught.value) == f"{where}: the handler returned {shown}; {MAY_RETURN}"
    assert (await stored_position(js, target))["seq"] == 1
    assert await outputs(js, target) == []


async def test_an_output_with_a_wrong_part_is_shown_with_its_input(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(5), await make_stream()
    for made, expected in (
        ((f"{target}.out", "x"), f"the payload on subject '{target}.out' must be bytes, not str; encode it, "),
        (BatchMessage(7), "subject must be str, not int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError) as caught:
            await work(LogReader(js, source), target, lambda msg: made if msg.seq == 3 else None)  # noqa: B023
        where = f"worker 'w' on stream {target!r}: input 3 of stream {source!r}"
        assert str(caught.value).startswith(f"{where}: an output of the handler cannot be stored: {expected}")


async def test_a_type_error_of_the_handlers_own_is_not_changed(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(5), await make_stream()

    def handler(_: StoredMsg) -> Any:
        yield BatchMessage(f"{target}.out")
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        await work(LogReader(js, source), target, handler)


async def test_a_subject_added_to_the_output_stream_is_noticed(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(5), await make_stream()
    config = (await js.stream_info(target)).config

    async def handler(msg: StoredMsg) -> BatchMessage:
        if msg.seq == 3:
            await js.update_stream(config.evolve(subjects=[f"{target}.>", f"{target}X"]))
        return BatchMessage(f"{target}X" if msg.seq >= 3 else f"{target}.out")

    assert (await work(LogReader(js, source), target, handler)).outputs == 5


async def test_a_changed_input_stream_is_refused(js: JetStreamContext, make_stream: Make, more: More) -> None:
    source, other, target = await make_stream(20), await make_stream(20), await make_stream()
    await work(LogReader(js, source), target, doubled(target))
    with pytest.raises(ValueError, match="take another name"):
        await work(LogReader(js, other), target, doubled(target))
    await more(source, 21, 30)
    await js.purge_stream(source, seq=25)
    with pytest.raises(errors.PositionLostError) as caught:
        await work(LogReader(js, source), target, doubled(target))
    assert (caught.value.expected, caught.value.got) == (21, 25)
    done = await work(LogReader(js, source, on_lost="skip"), target, doubled(target))
    assert (done.inputs, done.position) == (6, 31)
    await js.delete_stream(source)
    await js.add_stream(name=source, subjects=[f"{source}.>"], allow_direct=True, allow_atomic=True)
    await more(source, 1, 40)
    with pytest.raises(errors.StreamRecreatedError):
        await work(LogReader(js, source), target, doubled(target))


async def test_a_foreign_message_on_the_position_subject_is_refused(js: JetStreamContext, make_stream: Make) -> None:
    source, target = await make_stream(2), await make_stream()
    await js.publish(f"{target}.at.w", b"hello")
    with pytest.raises(ValueError, match="not the position of a worker"):
        await work(LogReader(js, source), target, doubled(target))


async def test_arguments_are_checked(js: JetStreamContext) -> None:
    for bad in ({"max_messages": 0}, {"timeout": 0}, {"patience": -1}, {"name": "a b"}, {"prefix": ""}):
        with pytest.raises(ValueError, match=r"must be|subject"):
            pytest.fail(f"{bad}: {await work(LogReader(js, 'S'), 'T', lambda _: None, **bad)}")  # type: ignore[arg-type]


async def test_arguments_of_another_type_are_refused_before_anything_is_sent(
    js: JetStreamContext, make_stream: Make
) -> None:
    source, target = await make_stream(1), await make_stream()
    reader: Any = LogReader(js, source)

    async def handler(_: StoredMsg) -> None: ...

    called = handler(None)  # type: ignore[arg-type]
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (js, handler, {}, "reader must be a LogReader, not JetStreamContext; give log.LogReader(js, stream)"),
        (source, handler, {}, f"reader must be a LogReader, not {source!r}; give log.LogReader(js, stream)"),
        (
            Group(js, source, "g", partitions=1),
            handler,
            {},
            "reader must be a LogReader, not Group; give log.LogReader(js, stream)",
        ),
        (reader, None, {}, "handler must be a function, not NoneType"),
        (reader, called, {}, "handler must be a function, not coroutine; give the function itself, without calling it"),
        (reader, handler, {"name": None}, "name must be str, not NoneType"),
        (reader, handler, {"prefix": 5}, "prefix must be str, not int"),
    ]
    for given, function, options, expected in cases:
        with pytest.raises(TypeError) as caught:
            await work(given, target, function, **options)
        assert str(caught.value) == expected
    await called
    with pytest.raises(TypeError, match=r"^group must be a Group, not LogReader$"):
        await exactly_once_group(reader, target, handler, prefix=f"{target}.at")
    group = Group(js, source, "g", partitions=1)
    function: Any = None
    with pytest.raises(TypeError, match=r"^handler must be a function, not NoneType$"):
        await exactly_once_group(group, target, function, prefix=f"{target}.at")
    with pytest.raises(TypeError, match=r"^handler must be a function, not NoneType$"):
        await group.join().run(function)
    assert (await js.stream_info(target)).state.last_seq == 0


@pytest.mark.parametrize(("version", "words"), [("2.11.11", "2.12"), ("2.12.0", r"2\.12\.1")])
async def test_a_server_before_2_12_1_is_refused(version: str, words: str) -> None:
    async with NatsServer(version=version) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        try:
            js = nc.jetstream()
            await js.add_stream(name="S", subjects=["s"], allow_direct=True)
            extra = {"allow_atomic": True} if version == "2.12.0" else {}
            await js.add_stream(name="T", subjects=["t.>"], allow_direct=True, **extra)
            with pytest.raises(errors.UnsupportedFeatureError, match=words):
                await exactly_once(LogReader(js, "S"), "T", lambda _: None, name="w", prefix="t")
        finally:
            await nc.close()
