"""Exactly-once processing: what a worker stores, what it refuses, and how workers fence each other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, SubjectTransform
from workers import MakePair, Pair

from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.log import Group, LogReader, New, Processed, exactly_once, exactly_once_group
from jetstream_ext.testing import NatsServer

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


async def test_a_worker_runs_to_the_end_and_continues_there(make_pair: MakePair, more: More, leak_check: Any) -> None:
    pair = await make_pair(250)
    assert await pair.work() == Processed(inputs=250, outputs=250, commits=5, position=251)
    assert await pair.outputs() == list(range(1, 251))
    found = (await pair.records())[-1]
    assert (found["v"], found["stream"], found["seq"]) == (1, pair.source, 251)
    await more(pair.source, 251, 260)
    done = await pair.work()
    assert (done.inputs, done.position) == (10, 261)
    assert await pair.outputs() == list(range(1, 261))
    await leak_check.assert_clean()


async def one_by_one(name: str) -> AsyncIterator[BatchMessage]:
    for letter in (b"1", b"2"):
        await asyncio.sleep(0)
        yield BatchMessage(f"{name}.out", letter)


async def later(made: Any) -> Any:
    await asyncio.sleep(0)
    return made


HANDLERS: dict[str, tuple[int, Callable[[str], Any]]] = {
    "one": (1, lambda name: BatchMessage(f"{name}.out", b"1")),
    "none": (0, lambda name: None),
    "an empty list": (0, lambda name: []),
    "a tuple of a subject and a payload": (1, lambda name: (f"{name}.out", b"1")),
    "with headers": (1, lambda name: (f"{name}.out", b"1", {"h": "1"})),
    "tuples": (2, lambda name: [(f"{name}.out", b"1"), (f"{name}.out", b"2", {"h": "1"})]),
    "a tuple of tuples": (2, lambda name: ((f"{name}.out", b"1"), (f"{name}.out", b"2"))),
    "a tuple": (2, lambda name: (BatchMessage(f"{name}.out", b"1"), BatchMessage(f"{name}.out", b"2"))),
    "a generator": (2, lambda name: (BatchMessage(f"{name}.out", letter) for letter in (b"1", b"2"))),
    "an async generator": (2, one_by_one),
    "an awaitable": (1, lambda name: later([BatchMessage(f"{name}.out", b"1")])),
    "an awaitable of an async generator": (2, lambda name: later(one_by_one(name))),
}


async def test_a_handler_may_return_each_kind_of_output(make_pair: MakePair) -> None:
    for kind, (count, make) in HANDLERS.items():
        pair = await make_pair(3)
        done = await pair.work(lambda _: make(pair.target))  # noqa: B023
        assert (await pair.outputs(), done.position) == ([1, 2][:count] * 3, 4), kind


async def test_a_grouped_handler_gets_the_inputs_of_a_commit(make_pair: MakePair) -> None:
    pair = await make_pair(25)

    async def total(group: list[StoredMsg]) -> BatchMessage:
        return BatchMessage(f"{pair.target}.out", b"%d" % sum(int(msg.data) for msg in group))

    done = await pair.work(total, grouped=True, max_messages=10)
    assert await pair.outputs() == [55, 155, 115]
    assert (done.inputs, done.outputs, done.commits) == (25, 3, 5)


async def test_outputs_are_stored_before_the_next_input_is_handled_with_one_input_in_a_commit(
    make_pair: MakePair,
) -> None:
    pair = await make_pair(5)

    async def handler(msg: StoredMsg) -> BatchMessage:
        found = await pair.stored("out")
        assert len(found) == msg.seq - 1
        return pair.out(msg, expected_last_subject_seq=found[-1].seq if found else 0)

    done = await pair.work(handler, max_messages=1)
    assert (done.inputs, done.outputs) == (5, 5)


async def test_the_position_moves_over_messages_that_the_filter_excludes(make_pair: MakePair) -> None:
    pair = await make_pair(20)
    done = await pair.work(reader=pair.reader(subject=f"{pair.source}.1"))
    assert (done.inputs, done.position) == (7, 21)
    done = await pair.work(reader=pair.reader(subject=f"{pair.source}.9"), name="v")
    assert (done.inputs, done.commits) == (0, 3), "the claim, the position and the release"
    assert (await pair.records("v"))[-1]["seq"] == 21


async def test_a_start_that_depends_on_the_moment_is_pinned(make_pair: MakePair, more: More) -> None:
    pair = await make_pair(10)
    await pair.work(reader=pair.reader(start=New()))
    await more(pair.source, 11, 12)
    done = await pair.work(reader=pair.reader(start=New()))
    assert (done.inputs, done.position) == (2, 13)


async def test_a_failed_handler_ends_the_worker_behind_the_inputs_before(make_pair: MakePair) -> None:
    pair = await make_pair(30)

    def handler(msg: StoredMsg) -> BatchMessage:
        if msg.seq == 25:
            raise TypeError("mine")
        return pair.out(msg)

    with pytest.raises(TypeError, match=r"^mine$"):
        await pair.work(handler, max_messages=10)
    assert len(await pair.outputs()) == 24
    await pair.work()
    assert await pair.outputs() == list(range(1, 31))


async def test_outputs_over_the_batch_limit_are_split(make_pair: MakePair) -> None:
    pair = await make_pair(10)
    done = await pair.work(lambda msg: [pair.out(msg)] * 400)
    assert await pair.outputs() == [n for n in range(1, 11) for _ in range(400)]
    assert done.outputs == 4000
    with pytest.raises(errors.AtomicPublishTooLargeError):
        await pair.work(lambda group: [pair.out(group[0])] * 1000, grouped=True, name="v")
    assert (await pair.records("v"))[-1]["seq"] == 1


async def test_a_newer_worker_fences_the_older_one(make_pair: MakePair) -> None:
    """The older worker holds a handled batch when the newer one starts."""
    pair = await make_pair(40)
    held, go_on = asyncio.Event(), asyncio.Event()

    async def slow(msg: StoredMsg) -> BatchMessage:
        if msg.seq == 15:
            held.set()
            await go_on.wait()
        return pair.out(msg)

    zombie = asyncio.ensure_future(pair.work(slow, pair.reader(tail=True), max_messages=10))
    await asyncio.wait_for(held.wait(), 30)
    await pair.work(max_messages=7)
    go_on.set()
    with pytest.raises(errors.FencedError, match="another worker of this name has taken over") as caught:
        await zombie
    assert (caught.value.name, caught.value.seq) == ("w", 41)
    assert await pair.outputs() == list(range(1, 41))


async def test_workers_that_start_together_store_each_output_once(make_pair: MakePair) -> None:
    for _ in range(3):
        pair = await make_pair(60)
        workers = [pair.work(max_messages=9) for _ in range(4)]
        ended = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(end, Processed | errors.FencedError) for end in ended), ended
        assert any(isinstance(end, Processed) for end in ended)
        assert await pair.outputs() == list(range(1, 61))


async def test_workers_of_two_names_do_not_fence_each_other(make_pair: MakePair) -> None:
    pair = await make_pair(30)
    workers = [pair.work(name=name, max_messages=3) for name in "ab"]
    assert [done.inputs for done in await asyncio.gather(*workers)] == [30, 30]
    assert len(await pair.outputs()) == 60


async def test_an_output_stream_that_can_lose_the_position_is_refused(
    js: JetStreamContext, make_pair: MakePair
) -> None:
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
        pair = await make_pair(5, **config)
        with pytest.raises(errors.StreamConfigMismatchError, match=wrong) as caught:
            await pair.work()
        assert set(caught.value.diff) == {wrong}
        assert (await js.stream_info(pair.target)).state.messages == 0
        if wrong in ("max_age", "max_msgs", "max_bytes"):
            assert (await pair.work(position_may_vanish=True)).inputs == 5
    for accepted in ({"max_msgs": 1000, "discard": DiscardPolicy.NEW}, {"max_msgs_per_subject": 1}):
        assert (await (await make_pair(5, **accepted)).work()).inputs == 5
    with pytest.raises(errors.StreamConfigMismatchError, match=r"elsewhere\.w") as caught:
        await pair.work(prefix="elsewhere", position_may_vanish=True)
    assert set(caught.value.diff) == {"subjects"}
    with pytest.raises(nats.js.errors.NotFoundError):
        await Pair(js, pair.source, "NOT_THERE").work()


async def test_the_position_outlives_max_age_and_is_rolled_up(js: JetStreamContext, make_pair: MakePair) -> None:
    pair = await make_pair(30, max_age=1, allow_msg_ttl=True, allow_rollup_hdrs=True)
    await pair.work(max_messages=10)
    async with asyncio.timeout(30):
        while (await js.stream_info(pair.target)).state.messages > 1:
            await asyncio.sleep(0.1)
    assert (await pair.records())[-1]["seq"] == 31
    done = await pair.work()
    assert (done.inputs, done.position) == (0, 31)


async def test_a_worker_whose_position_was_removed_stops(js: JetStreamContext, make_pair: MakePair) -> None:
    pair = await make_pair(5)

    async def handler(msg: StoredMsg) -> None:
        await js.purge_stream(pair.target, subject=f"{pair.target}.at.w")

    with pytest.raises(errors.FencedError, match="was removed"):
        await pair.work(handler)


async def test_a_refused_output_stores_nothing(make_pair: MakePair) -> None:
    pair = await make_pair(5)
    cases: list[tuple[Any, type[Exception]]] = [
        ([("subject", b"")], errors.BadSubjectError),
        (BatchMessage("nowhere.at.all"), errors.BadSubjectError),
        (BatchMessage(f"{pair.target}.at.w"), errors.BadSubjectError),
        (BatchMessage(f"{pair.target}.out", expected_last_subject_seq=77), errors.WrongLastSequenceError),
        (BatchMessage(f"{pair.target}.out", headers={"Nats-Batch-Id": "x"}), errors.BadHeaderError),
    ]
    for made, error in cases:
        with pytest.raises(error):
            await pair.work(lambda _: made, max_messages=1)  # noqa: B023
        assert (await pair.records())[-1]["seq"] == 1, made
    assert await pair.outputs() == []


MAY_RETURN = (
    "it must return None, a message (a BatchMessage, (subject, payload) or (subject, payload, headers)), or an iterable or "
    "async iterable of messages; nothing of it is stored; correct the handler, and start the worker again"
)
NO_OUTPUTS: list[tuple[Any, str]] = [
    (b"x", "bytes"),
    ("x", "str"),
    (5, "int"),
    ({}, "dict"),
    (["a", b"x"], "a list whose item 0 is str"),
    ([("{}.out", b"x"), 5], "a list whose item 1 is int"),
    (("{}.out", b"x", {}, 4), "a tuple of 4 items"),
    ([("{}.out",)], "a list whose item 0 is a tuple of 1 item"),
]


async def test_a_handler_that_returns_no_outputs_is_told_what_it_may_return(make_pair: MakePair) -> None:
    """With dead letters as well: it is an error of the program, otherwise every input could become one."""
    pair = await make_pair(5)
    for grouped, letter in ((False, None), (True, None), (False, pair.letter(1)), (True, pair.letter(1))):
        inputs = "inputs 1 to 5" if grouped else "input 1"
        for made, shown in NO_OUTPUTS:
            with pytest.raises(TypeError) as caught:
                await pair.work(lambda _: made, grouped=grouped, dead_letter=letter)  # noqa: B023
            where = f"worker 'w' on stream {pair.target!r}: {inputs} of stream {pair.source!r}"
            assert str(caught.value) == f"{where}: the handler returned {shown}; {MAY_RETURN}"
    assert all(record["seq"] == 1 and "failed" not in record for record in await pair.records())
    assert (await pair.work(dead_letter=pair.letter(1))).dead_letters == 0
    assert await pair.outputs() == [1, 2, 3, 4, 5]


async def test_an_output_with_a_wrong_part_is_shown_with_its_input(make_pair: MakePair) -> None:
    pair = await make_pair(5)
    for made, expected in (
        (
            (f"{pair.target}.out", "x"),
            f"the payload on subject '{pair.target}.out' must be bytes, not str; encode it, ",
        ),
        (BatchMessage(7), "subject must be str, not int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError) as caught:
            await pair.work(lambda msg: made if msg.seq == 3 else None)  # noqa: B023
        where = f"worker 'w' on stream {pair.target!r}: input 3 of stream {pair.source!r}"
        assert str(caught.value).startswith(f"{where}: an output of the handler cannot be stored: {expected}")


async def test_a_subject_added_to_the_output_stream_is_noticed(js: JetStreamContext, make_pair: MakePair) -> None:
    pair = await make_pair(5)
    config = (await js.stream_info(pair.target)).config

    async def handler(msg: StoredMsg) -> BatchMessage:
        if msg.seq == 3:
            await js.update_stream(config.evolve(subjects=[f"{pair.target}.>", f"{pair.target}X"]))
        return BatchMessage(f"{pair.target}X" if msg.seq >= 3 else f"{pair.target}.out")

    assert (await pair.work(handler)).outputs == 5


async def test_a_changed_input_stream_is_refused(
    js: JetStreamContext, make_stream: Make, make_pair: MakePair, more: More
) -> None:
    pair = await make_pair(20)
    await pair.work()
    with pytest.raises(ValueError, match="take another name"):
        await pair.work(reader=pair.reader(stream=await make_stream(20)))
    await more(pair.source, 21, 30)
    await js.purge_stream(pair.source, seq=25)
    with pytest.raises(errors.PositionLostError) as caught:
        await pair.work()
    assert (caught.value.expected, caught.value.got) == (21, 25)
    done = await pair.work(reader=pair.reader(on_lost="skip"))
    assert (done.inputs, done.position) == (6, 31)
    await js.delete_stream(pair.source)
    await js.add_stream(name=pair.source, subjects=[f"{pair.source}.>"], allow_direct=True, allow_atomic=True)
    await more(pair.source, 1, 40)
    with pytest.raises(errors.StreamRecreatedError):
        await pair.work()


async def test_a_foreign_message_on_the_position_subject_is_refused(js: JetStreamContext, make_pair: MakePair) -> None:
    pair = await make_pair(2)
    await js.publish(f"{pair.target}.at.w", b"hello")
    with pytest.raises(ValueError, match="not the position of a worker"):
        await pair.work()


async def test_bad_arguments_are_refused_before_anything_is_sent(js: JetStreamContext, make_pair: MakePair) -> None:
    pair = await make_pair(1)
    for bad in ({"max_messages": 0}, {"timeout": 0}, {"patience": -1}, {"name": "a b"}, {"prefix": ""}):
        with pytest.raises(ValueError, match=r"must be|subject"):
            pytest.fail(f"{bad}: {await pair.work(**bad)}")

    async def handler(_: StoredMsg) -> None: ...

    called, group, no_function = (
        handler(None),
        Group(js, pair.source, "g", partitions=1),
        "handler must be a function, ",
    )  # type: ignore[arg-type]
    no_reader = "reader must be a LogReader, not %s; give log.LogReader(js, stream)"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reader": js}, no_reader % "JetStreamContext"),
        ({"reader": pair.source}, no_reader % repr(pair.source)),
        ({"reader": group}, no_reader % "Group"),
        ({"handler": 5}, f"{no_function}not int"),
        ({"handler": called}, f"{no_function}not coroutine; give the function itself, without calling it"),
        ({"name": None}, "name must be str, not NoneType"),
        ({"prefix": 5}, "prefix must be str, not int"),
    ]
    for options, expected in cases:
        with pytest.raises(TypeError) as caught:
            await pair.work(**options)
        assert str(caught.value) == expected
    await called
    function: Any = None
    with pytest.raises(TypeError, match=r"^group must be a Group, not LogReader$"):
        await exactly_once_group(pair.reader(), pair.target, handler, prefix="p")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^handler must be a function, not NoneType$"):
        await exactly_once_group(group, pair.target, function, prefix="p")
    with pytest.raises(TypeError, match=r"^handler must be a function, not NoneType$"):
        await group.join().run(function)
    assert (await js.stream_info(pair.target)).state.last_seq == 0


@pytest.mark.parametrize(("version", "words"), [("2.11.11", "2.12"), ("2.12.0", r"2\.12\.1")])
async def test_a_server_before_2_12_1_is_refused(version: str, words: str) -> None:
    async with NatsServer(version=version) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s"], allow_direct=True)
        extra = {"allow_atomic": True} if version == "2.12.0" else {}
        await js.add_stream(name="T", subjects=["t.>"], allow_direct=True, **extra)
        with pytest.raises(errors.UnsupportedFeatureError, match=words):
            await exactly_once(LogReader(js, "S"), "T", lambda _: None, name="w", prefix="t")
