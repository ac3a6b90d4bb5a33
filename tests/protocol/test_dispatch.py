"""Dispatchers against a simulated stream and reader: each partition takes its messages, in order, once."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter

import pytest
from cells import walk
from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.direct import StoredMsg, size_of
from jetstream_ext.protocol.dispatch import TURN_MESSAGES, TURN_READS, Dispatcher, Read
from jetstream_ext.protocol.partitions import Partitioner


def partitions_of(messages: Iterable[StoredMsg]) -> list[int]:
    return [int(message.raw_subject) for message in messages]


def message(seq: int, partition: int, size: int = 0) -> StoredMsg:
    return StoredMsg(stream="S", subject=str(int(partition)), seq=seq, data=b"x" * size)


class Stream:
    """A stream, and a reader of it that counts the messages that it has read."""

    def __init__(self) -> None:
        self.messages: list[StoredMsg] = []
        self.last_seq = 0
        self.count = 0

    def store(self, partition: int, size: int = 0, removed: int = 0) -> None:
        """Store a message after so many sequences that were removed from the stream."""
        self.last_seq += removed + 1
        self.messages.append(message(self.last_seq, partition, size))

    def read(self, read: Read) -> tuple[list[StoredMsg], Read, int]:
        """Return messages, what was read, and the sequence at which the read ended."""
        at = bisect_left(self.messages, read.start, key=attrgetter("seq"))
        found = self.messages[at:] if read.partition is None else self._of(at, read.partition)
        found = found[: read.max_messages]
        self.count += len(found)
        end = found[-1].seq + 1 if len(found) == read.max_messages else max(read.start, self.last_seq + 1)
        return found, read, end

    def _of(self, at: int, partition: int) -> list[StoredMsg]:
        return [it for it in self.messages[at:] if int(it.raw_subject) == partition]

    def of(self, partition: int, start: int, end: int) -> list[int]:
        return [it.seq for it in self.messages if int(it.raw_subject) == partition and start <= it.seq < end]


def seqs(messages: Iterable[StoredMsg]) -> list[int]:
    return [it.seq for it in messages]


def feed_next(dispatcher: Dispatcher, stream: Stream) -> set[int]:
    read = dispatcher.next_read()
    assert read is not None
    return dispatcher.feed(*stream.read(read))


def taken_from(dispatcher: Dispatcher) -> list[tuple[int, int]]:
    """Take all messages; return the partition and sequence of each."""
    taken = []
    while found := dispatcher.take_any():
        taken += [(found[0], it.seq) for it in found[1]]
    return taken


def stream_of(count: int, partitions: int) -> Stream:
    """Return a stream whose messages are of each partition in turn."""
    stream = Stream()
    for at in range(count):
        stream.store(at % partitions)
    return stream


class TestFeed:
    def test_bytes_are_bounded_up_to_one_message(self) -> None:
        stream, dispatcher = Stream(), Dispatcher(partitions_of, buffer_bytes=1000)
        for size in (599, 399, 5000, 1, 1):  # a subject of one byte counts, too
            stream.store(0, size)
        dispatcher.add(0, 1)
        given = []
        while read := dispatcher.next_read():
            if not dispatcher.feed(*stream.read(read)):
                break
            given.append(seqs(dispatcher.take(0, 9)))
        assert given == [[1, 2], [3], [4, 5]]

    def test_a_message_without_a_partition_changes_nothing(self) -> None:
        dispatcher = Dispatcher(Partitioner(1, (1,)).of)
        dispatcher.add(0, 1)
        bad = [StoredMsg(stream="S", subject=subject, seq=seq) for seq, subject in enumerate(("a.b", "a"), 1)]
        with pytest.raises(BadSubjectError, match="sequence 2"):
            dispatcher.feed(bad, Read(1, 9, may_wait=True), 3)
        read = dispatcher.next_read()
        assert read is not None
        assert (dispatcher.take_any(), dispatcher.position(0), read.start) == (None, 1, 1)


class TestTake:
    def test_each_partition_has_its_turn(self) -> None:
        dispatcher = Dispatcher(partitions_of)
        for partition in range(3):
            dispatcher.add(partition, 1)
        messages = [message(seq, partition) for seq, partition in enumerate((0, 0, 0, 0, 1, 2, 2), 1)]
        dispatcher.feed(messages, Read(1, 9, may_wait=True), 8)
        assert taken_from(dispatcher) == [(0, 1), (1, 5), (2, 6), (0, 2), (2, 7), (0, 3), (0, 4)]


class TestReads:
    def test_only_a_read_for_the_last_partition_may_wait(self) -> None:
        dispatcher = Dispatcher(partitions_of)
        dispatcher.add(0, 1)
        dispatcher.add(1, 1_000_000)
        assert dispatcher.next_read() == Read(1, 512, may_wait=True)
        dispatcher.feed([], Read(1_000_000, 512, may_wait=False), 1_000_000)
        assert dispatcher.next_read() == Read(1, 512, may_wait=True)
        dispatcher.feed([message(1, 9)], Read(1, 512, may_wait=True), 2)
        while (read := dispatcher.next_read()) is not None and read.start < 1_000_000:
            assert read.may_wait
            dispatcher.feed([message(read.start, 9)], read, read.start + 1)
        assert read == Read(1_000_000, 512, may_wait=False)

    def test_a_partition_that_is_alone_and_the_others_have_turns(self) -> None:
        dispatcher = Dispatcher(partitions_of, partitions=3)
        dispatcher.add(0, 100)
        apart = Read(100, 512, may_wait=False, partition=0)
        assert dispatcher.next_read() == apart
        dispatcher.feed([], apart, 100, at_end=True)
        assert dispatcher.next_read() == Read(100, 512, may_wait=True), "it has joined the others"
        dispatcher.add(1, 1)
        common, alone = Read(100, 512, may_wait=False), Read(1, 512, may_wait=False, partition=1)
        assert dispatcher.next_read() == common
        dispatcher.feed([], common, 100, at_end=True)
        assert dispatcher.next_read() == alone
        dispatcher.feed([message(1, 1)], alone, 2)
        assert dispatcher.next_read() == common
        dispatcher.feed([message(seq, seq % 3) for seq in range(100, 612)], common, 612)
        assert dispatcher.next_read() == alone._replace(start=2)
        dispatcher.feed([], alone._replace(start=2), 612, at_end=True)
        apart = apart._replace(start=612)
        assert dispatcher.next_read() == apart, "a part of what the others have is another member's"
        dispatcher.feed([], apart, 612, at_end=True)
        assert dispatcher.next_read() == Read(612, 512, may_wait=True)

    def test_one_far_behind_and_those_at_the_end_have_turns(self) -> None:
        stream, dispatcher = stream_of(200_000, 4), Dispatcher(partitions_of, buffer=500)
        dispatcher.add(0, 1)
        for partition in (1, 2, 3):
            dispatcher.add(partition, 200_001)
        waits = Counter[int]()
        most = 0
        for _ in range(2000):
            read = dispatcher.next_read()
            assert read is not None
            if read.start > 100_000:
                waits.clear()
            waits["messages"] += read.max_messages
            waits["reads"] += 1
            most = max(most, waits["messages"])
            assert waits["reads"] <= TURN_READS + 1
            dispatcher.feed(*stream.read(read))
            while dispatcher.take_any():
                pass
            if dispatcher.position(0) > 100_000:
                break
            for _ in range(100):  # those at the end always have something to read
                stream.store(1 + stream.last_seq % 3)
        assert dispatcher.position(0) > 50_000, "the one behind made progress"
        assert most <= TURN_MESSAGES + 1024

    def test_a_partition_just_before_another_does_not_keep_the_reader(self) -> None:
        """Its queue is full after each read, and empty before the next one."""
        stream, dispatcher = Stream(), Dispatcher(partitions_of, buffer=1)
        for at in range(6000):
            stream.store(at >= 4000)
        dispatcher.add(0, 1)
        dispatcher.add(1, 4000)
        for _ in range(8):
            feed_next(dispatcher, stream)
            while dispatcher.take_any():
                pass
        assert dispatcher.position(1) > 4001


def run_pipeline(
    partitions: int, rate: Callable[[int], float], *, buffer: int, count: int
) -> tuple[int, int, list[int]]:
    """Read a stream with handlers of different speeds; return the messages read, those taken, and what each took.

    Of each partition, `rate` messages can be taken between two reads, on average.
    """
    stream, dispatcher, rng = stream_of(count, partitions), Dispatcher(partitions_of, buffer=buffer), random.Random(3)
    taken, due = [0] * partitions, [0.0] * partitions
    for partition in range(partitions):
        dispatcher.add(partition, 1)
    while any(dispatcher.position(partition) <= count for partition in range(partitions)):
        if (read := dispatcher.next_read()) is not None:
            dispatcher.feed(*stream.read(read))
        for partition in range(partitions):
            due[partition] += rate(partition) * rng.random() * 2
            found = len(dispatcher.take(partition, int(due[partition])))
            taken[partition] += found
            due[partition] = due[partition] - found if found == int(due[partition]) else 0.0
        if sum(taken[1:]) == count - count // partitions and taken[0] < count // partitions:
            break  # the slow one is alone now
    return stream.count, sum(taken), taken


class TestCost:
    @walk("speed", [0.1, 10.0, 60.0])
    @walk("buffer", [100, 1000])
    def test_one_slow_partition_costs_at_most_a_second_read(self, speed: float, buffer: int) -> None:
        count = 40_000
        read, _, taken = run_pipeline(8, lambda number: 10_000 if number else speed, buffer=buffer, count=count)
        assert sum(taken[1:]) == count * 7 // 8, "the others are not stopped"
        assert read <= 2.2 * count


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("store", "store", "read", "read", "read", "take", "take", "take_any", "add", "remove", "late")
        ),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    min_size=30,
    max_size=150,
)


@settings(max_examples=150)
@given(STEPS, st.integers(1, 12), st.integers(1, 400), st.integers(1, 30), st.sampled_from([None, 4, 5]))
def test_each_partition_takes_its_messages_in_order_once(
    steps: list[tuple[str, int, int]], buffer: int, buffer_bytes: int, chunk: int, partitions: int | None
) -> None:
    woken = list[None]()
    stream = Stream()
    dispatcher = Dispatcher(
        partitions_of,
        buffer=buffer,
        buffer_bytes=buffer_bytes,
        partitions=partitions,
        wake=lambda: woken.append(None),
    )
    stream.store(0)
    begun: dict[int, int] = dict.fromkeys(range(4), 1)
    taken: dict[int, list[int]] = {number: [] for number in begun}
    for number in begun:
        dispatcher.add(number, 1)
    late = list[tuple[list[StoredMsg], Read, int]]()  # reads that end after other steps

    def owned() -> list[int]:
        return [number for number in range(4) if number in dispatcher]

    def check() -> None:
        for number in owned():
            position, state = dispatcher.position(number), dispatcher._owned[number]
            assert taken[number] == stream.of(number, begun[number], position)
            assert stream.of(number, position, state.next) == seqs(state.queue)
            assert state.size == sum(size_of(it) for it in state.queue)
            assert len(state.queue) <= buffer
            assert not state.queue or state.size - size_of(state.queue[-1]) < buffer_bytes
        if (read := dispatcher.next_read()) is None:
            assert all(it.is_full or len(it.queue) > buffer // 4 for it in dispatcher._owned.values())
        else:
            assert read.start in {it.next for it in dispatcher._owned.values() if not it.is_full}

    def feed(found: tuple[list[StoredMsg], Read, int]) -> None:
        before = {number: len(dispatcher._owned[number].queue) for number in owned()}
        given = dispatcher.feed(*found, at_end=found[2] > stream.last_seq)
        assert given == {number for number in owned() if len(dispatcher._owned[number].queue) != before[number]}

    def read_next() -> bool:
        """Read; return whether there was anything to read."""
        read = dispatcher.next_read()
        if read is not None:
            feed(stream.read(read._replace(max_messages=min(chunk, read.max_messages))))
        return read is not None and not read.may_wait

    for step, number, amount in steps:
        waits = dispatcher.next_read() is None
        woken.clear()
        if step == "store":
            stream.store(number, size=amount * 3, removed=amount % 3)
        elif step == "add" and number not in dispatcher:
            begun[number], taken[number] = 1 + amount, []
            dispatcher.add(number, 1 + amount)
        elif step == "remove":
            dispatcher.remove(number)
        elif step == "late":
            for found in late:
                feed(found)
            late = [stream.read(Read(1 + amount, chunk, may_wait=False, partition=it)) for it in (None, number)]
        elif step == "read":
            read_next()
        elif step == "take":
            rows = seqs(dispatcher.take(number, amount // 5))
            assert len(rows) <= amount // 5
            taken[number] = taken.get(number, []) + rows
        elif step == "take_any" and (one := dispatcher.take_any(1 + amount)) is not None:
            taken[one[0]] += seqs(one[1])
        check()
        assert not waits or woken or step in ("read", "late") or dispatcher.next_read() is None, (
            "a reader that waits is woken"
        )

    for _ in range(10_000):  # and nothing is left in the end
        if all(dispatcher.position(each) > stream.last_seq for each in owned()):
            break
        if not read_next():
            for number, seq in taken_from(dispatcher):
                taken[number].append(seq)
        check()
    else:
        pytest.fail("the reads make no progress")
