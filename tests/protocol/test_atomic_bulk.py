"""The atomic batch in bulk, after a lost connection, and after its outcome was found out."""

from typing import Any

import pytest
from atomic_batches import Command, add, batch, commands, commit, message, refusal
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol.atomic import State
from jetstream_ext.types import BatchAck, BatchMessage

LEVELS = pytest.mark.parametrize("level", [2, 5])


def reply_of(command: Command | None) -> str:
    assert command is not None
    return command[1]


messages = st.builds(
    BatchMessage,
    st.sampled_from(["a.1", "a.2", "a.3"]),
    st.binary(max_size=40),
    headers=st.sampled_from([None, None, {"K": "v"}, {}, {"Nats-Expected-Last-Subject-Sequence": "4"}]),
    msg_id=st.sampled_from([None, None, "m"]),
    stream=st.sampled_from([None, None, "S"]),
    expected_last_seq=st.sampled_from([None, None, None, 7]),
    expected_last_subject_seq=st.sampled_from([None, None, None, 7]),
)
bad = st.sampled_from(
    [
        message("a b"),
        message(payload=bytes(2000)),
        message(headers={"K": "\n"}),
        message(msg_id=""),
        message(payload="x"),
    ]  # type: ignore[arg-type]
)


@LEVELS
@given(st.lists(messages | bad, max_size=25), st.integers(1, 200), st.data())
def test_add_many_and_add_send_the_same_bytes(
    level: int, given: list[BatchMessage], limit: int, data: st.DataObject
) -> None:
    options = {
        "ack_first": data.draw(st.booleans()),
        "ack_every": data.draw(st.sampled_from([None, 1, 3])),
        "in_one_go": data.draw(st.booleans()),
        "max_payload": 1000,
        "own_id": data.draw(st.booleans()),
    }
    one, many = batch(level, **options), batch(level, **options)
    single, refused = b"", []
    for each in given:
        try:
            single += one.add(one.prepare(each)).data
        except (ValueError, TypeError) as error:
            refused.append(type(error))
            continue
    source, bulk, stopped = iter(given), b"", []
    while True:
        block = many.add_many(source, limit)
        asked = [int(reply.rpartition(".")[2]) for _, reply, _, _ in commands(block) if reply]
        unasked = asked == [1] and not options["own_id"]  # the machine wants this reply for itself
        assert block.last_asked == max(asked, default=0) or (unasked and block.last_asked == 0)
        assert block.awaited == 0
        bulk += block.data
        if isinstance(block.stopped, StopIteration):
            break
        if block.stopped is not None:
            stopped.append(type(block.stopped))
        else:
            assert len(block.data) >= limit
    assert (bulk, stopped) == (single, refused)
    assert (one.size, one.sent, one.last_subject) == (many.size, many.sent, many.last_subject)
    if one.size:
        assert commit(one) == commit(many)


def test_the_headers_of_a_block_count_as_well() -> None:
    block = batch(own_id=True).add_many(iter([("a.1", b"", {"K": "x" * 10_000})] * 10), 1 << 15)
    assert (block.messages, block.stopped) == (4, None)


def test_messages_before_a_failure_of_the_source_are_sent() -> None:
    machine = batch()

    def source() -> Any:
        yield message()
        yield message("a.2")
        raise KeyboardInterrupt

    block = machine.add_many(source(), 1 << 20)
    assert isinstance(block.stopped, KeyboardInterrupt)
    assert (block.messages, machine.size, machine.sent) == (2, 2, 2)


@LEVELS
@pytest.mark.parametrize(("ack_every", "waits"), [(None, [1000, 2000, 3000]), (300, [1200, 2400]), (7000, [])])
def test_add_many_waits_for_a_server_that_is_far_behind(level: int, ack_every: int | None, waits: list[int]) -> None:
    machine = batch(level, ack_every=ack_every)
    source, asked = iter([message()] * 3500), []
    while True:
        block = machine.add_many(source, 1 << 30)
        if not block.awaited:
            break
        asked.append(block.awaited)
        assert machine.sent == block.awaited == block.last_asked
        machine.receive(block.awaited, b"", b"")
    assert asked == waits
    assert machine.size == 3500


def test_add_many_does_not_wait_for_a_server_that_keeps_up() -> None:
    machine = batch()

    def source() -> Any:
        for _ in range(3500):
            yield message()
            if machine.sent and machine.sent % 1000 == 1:
                machine.receive(machine.sent, b"", b"")

    block = machine.add_many(source(), 1 << 30)
    assert (block.messages, block.awaited, block.last_asked) == (3500, 0, 3000)


def test_a_closed_batch_takes_nothing_from_the_source() -> None:
    machine = batch()
    machine.discard()
    source = iter([message()])
    with pytest.raises(errors.BatchClosedError):
        machine.add_many(source, 100)
    assert next(source)


class TestDisconnection:
    """The server keeps the batch by its id. The next reply tells whether the server has all of it."""

    def test_the_next_message_must_be_acknowledged(self) -> None:
        machine = batch(own_id=True, ack_first=False)
        for _ in range(3):
            assert reply_of(add(machine, message())) == ""
        machine.disconnected(reply_awaited=False)
        assert machine.state is State.OPEN
        assert reply_of(add(machine, message(), ack=False)) == "_INBOX.r.4"
        machine.receive(4, b"", b"")
        assert reply_of(add(machine, message())) == ""

    def test_add_many_waits_for_the_reply_to_its_next_message(self) -> None:
        machine = batch(own_id=True)
        add(machine, message())
        machine.disconnected(reply_awaited=False)
        source = iter([message()] * 5)
        block = machine.add_many(source, 1 << 20)
        assert (block.messages, block.awaited, block.last_asked, block.stopped) == (1, 2, 2, None)
        machine.receive(2, b"", b"")
        block = machine.add_many(source, 1 << 20)
        assert (block.messages, block.awaited) == (4, 0)

    def test_a_reply_to_an_earlier_message_settles_nothing(self) -> None:
        machine = batch(own_id=True)
        add(machine, message())
        machine.disconnected(reply_awaited=False)
        machine.receive(1, b"", b"")
        assert reply_of(add(machine, message())) == "_INBOX.r.2"

    @LEVELS
    @pytest.mark.parametrize("at_commit", [True, False])
    def test_a_batch_that_the_server_lost_is_abandoned(self, level: int, at_commit: bool) -> None:
        machine = batch(level, own_id=True)
        add(machine, message())
        add(machine, message())
        machine.disconnected(reply_awaited=False)
        if at_commit:
            commit(machine)
        else:
            add(machine, message())
        machine.receive(machine.sent, *refusal(10176))
        assert machine.state is State.FAILED
        with pytest.raises(errors.BatchAbandonedError, match="connection was lost") as caught:
            add(machine, message())
        assert caught.value.outcome == "not_stored"
        assert isinstance(caught.value.__cause__, errors.AtomicPublishIncompleteError)

    def test_10176_without_a_disconnection_is_the_servers_refusal(self) -> None:
        machine = batch(own_id=True)
        add(machine, message())
        machine.receive(1, *refusal(10176))
        assert isinstance(machine.error, errors.AtomicPublishIncompleteError)

    def test_the_message_after_a_refused_one_asks_for_a_reply(self) -> None:
        machine = batch(own_id=True)
        add(machine, message())
        machine.disconnected(reply_awaited=False)
        add(machine, message())
        assert isinstance(machine.receive(2, *refusal(10054)), errors.MessageTooLargeError)
        assert reply_of(add(machine, message())) == "_INBOX.r.2"

    @pytest.mark.parametrize("state", [State.COMMITTING, State.DISCARDED])
    def test_in_other_states_it_changes_nothing(self, state: State) -> None:
        machine = batch(own_id=True)
        add(machine, message())
        commit(machine) if state is State.COMMITTING else machine.discard()
        machine.disconnected(reply_awaited=False)
        assert machine.state is state


class TestResolved:
    def test_a_found_batch_is_committed(self) -> None:
        machine, ack = batch(), BatchAck("S", 7, "b1", 1)
        add(machine, message())
        commit(machine)
        machine.lost("silence")
        machine.resolved(ack)
        assert (machine.state, machine.ack) == (State.COMMITTED, ack)
        with pytest.raises(errors.BatchClosedError) as caught:
            add(machine, message())
        assert caught.value.outcome == "stored"

    def test_a_batch_that_was_not_found_has_failed(self) -> None:
        machine = batch()
        add(machine, message())
        commit(machine)
        machine.lost("silence")
        machine.resolved(None)
        with pytest.raises(errors.BatchAbandonedError) as caught:
            add(machine, message())
        assert caught.value.outcome == "not_stored"
        assert isinstance(caught.value.__cause__, errors.BatchOutcomeUnknownError)

    @pytest.mark.parametrize("end", ["open", "discard", "commit"])
    def test_a_batch_with_a_known_outcome_does_not_change(self, end: str) -> None:
        machine = batch()
        add(machine, message())
        if end == "discard":
            machine.discard()
        elif end == "commit":
            commit(machine)
        state = machine.state
        machine.resolved(None)
        machine.resolved(BatchAck("S", 7, "b1", 1))
        assert machine.state is state


@pytest.mark.parametrize("in_one_go", [False, True])
def test_each_message_of_a_bulk_has_its_own_sizes(in_one_go: bool) -> None:
    # The sequence grows by a digit where the payload shrinks by a byte: the total stays the same.
    one, many = batch(5, in_one_go=in_one_go), batch(5, in_one_go=in_one_go)
    entries = [message(payload=b"x" * (20 if seq < 10 else 19 if seq < 12 else seq)) for seq in range(1, 30)]
    single = b"".join(one.add(one.prepare(each)).data for each in entries)
    assert many.add_many(iter(entries), 1 << 20).data == single
