"""The atomic batch: every cell of its table, and what it sends."""

import logging
import pickle
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from atomic_batches import Command, add, batch, commit, message, read, refusal, visible
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol.api import Server, StreamState
from jetstream_ext.protocol.atomic import TABLE, AtomicBatchMachine, Input, State
from jetstream_ext.types import NEVER, BatchAck, BatchMessage

NEW, OPEN, COMMITTING, COMMITTED = State.NEW, State.OPEN, State.COMMITTING, State.COMMITTED
DISCARDED, FAILED, UNKNOWN = State.DISCARDED, State.FAILED, State.UNKNOWN
LEVELS = walk("level", [3, 4])  # without the end-of-batch marker, and with it
STAGED = (b"", b"")
NO_RESPONDERS = (b"NATS/1.0 503\r\nNats-Subject: a.1\r\n\r\n", b"")
STREAM = StreamState("S", "today", {"subjects": ["a.*"]})


def ack(count: int, batch_id: str = "b1") -> tuple[bytes, bytes]:
    return b"", orjson.dumps({"stream": "A", "seq": 10 + count, "batch": batch_id, "count": count})


def plain(command: Command | None) -> Command:
    """Return a command with the reply subject of a batch instead of a message's."""
    assert command is not None
    subject, reply, headers, payload = command
    if reply:
        assert reply == f"_INBOX.r.{headers['Nats-Batch-Sequence']}"
    return subject, reply and "_INBOX.r", headers, payload


def at(state: State, level: int = 4, **options: Any) -> AtomicBatchMachine:
    """Return a batch of two messages that entered `state` by public calls."""
    if state is NEW:
        return AtomicBatchMachine("b1", **options)
    machine = batch(level, **options)
    add(machine, message())
    add(machine, message("a.2"))
    machine.receive(1, *STAGED)
    if state in (COMMITTING, COMMITTED, UNKNOWN):
        commit(machine)
    if state is COMMITTED:
        machine.receive(machine.sent, *ack(2))
    elif state is UNKNOWN:
        machine.lost("no answer within 5 s")
    elif state is DISCARDED:
        machine.discard()
    elif state is FAILED:
        machine.receive(1, *refusal(10174))
    assert machine.state is state
    return machine


# -- the table


def test_every_input_in_every_state(caplog: pytest.LogCaptureFixture) -> None:
    """Each cell leads where the table says, by one record; an ignored input changes nothing."""
    caplog.set_level(logging.DEBUG, logger="jetstream_ext.atomic")
    assert TABLE.keys() == set(Input)
    for event, row in TABLE.items():
        for state, cell in zip(State, row, strict=True):
            machine = at(state)
            caplog.clear()
            before = visible(machine)
            machine._apply(event, "no", ack=BatchAck("A", 12, "b1", 2))
            records = [record.getMessage().partition("; ")[0] for record in caplog.records]
            where = f"{event.name} in {state.name}"
            assert machine.state is (cell or state), where
            if cell is state and event is not Input.STAGED:
                assert records == [f"batch b1: {event.name.lower().replace('_', ' ')} ({event.value})"], where
            elif cell in (None, state):
                assert records == [], where
            else:
                assert records == [f"batch b1: {state.name} -> {cell.name} ({event.value})"], where
            assert cell is not None or visible(machine) == before, where


CALLS: dict[str, tuple[Callable[[AtomicBatchMachine], object], dict[State, State]]] = {
    "discard": (lambda it: it.discard(), {NEW: DISCARDED, OPEN: DISCARDED, COMMITTING: UNKNOWN}),
    "lost": (lambda it: it.lost("no answer within 5 s"), {OPEN: FAILED, COMMITTING: UNKNOWN}),
    "commit_cancelled": (lambda it: it.commit_cancelled(), {COMMITTING: UNKNOWN}),
    "disconnected": (lambda it: it.disconnected(reply_awaited=False), {}),
    "resolved, not found": (lambda it: it.resolved(None), {UNKNOWN: FAILED}),
    "resolved": (lambda it: it.resolved(BatchAck("A", 12, "b1", 2)), {UNKNOWN: COMMITTED}),
}


@LEVELS
@walk("name", CALLS)
def test_every_call_in_every_state(name: str, level: int) -> None:
    call, leads = CALLS[name]
    for state in State:
        machine = at(state, level)
        before = visible(machine)
        call(machine)
        assert machine.state is leads.get(state, state), state
        assert state in leads or visible(machine) == before, state
        after = visible(machine)
        call(machine)
        assert visible(machine) == after, state


def test_what_a_lost_answer_says() -> None:
    for state, error, outcome, text in (
        (OPEN, errors.BatchAbandonedError, "not_stored", "no answer within 5 s"),
        (COMMITTING, errors.BatchOutcomeUnknownError, "unknown", "2 messages"),
    ):
        machine = at(state)
        machine.lost("no answer within 5 s")
        assert isinstance(machine.error, error)
        assert machine.error.outcome == outcome  # type: ignore[attr-defined]
        assert text in str(machine.error)


@walk("in_one_go, sent", [(True, True), (True, False), (False, True), (False, False)])
def test_a_lost_connection_ends_a_batch_that_is_sent_in_one_go(in_one_go: bool, sent: bool) -> None:
    machine = at(OPEN, in_one_go=in_one_go) if sent else batch(in_one_go=in_one_go)
    machine.disconnected(reply_awaited=False)
    assert machine.state is (FAILED if in_one_go and sent else OPEN)


@LEVELS
def test_a_batch_that_ends_here_ends_on_the_server(level: int) -> None:
    """One message without a reply, two sequences further: the server finds a hole, and drops what it has."""
    ends: dict[str, Callable[[AtomicBatchMachine], object]] = {
        "discard": lambda it: it.discard(),
        "lost": lambda it: it.lost("no answer"),
        "too large": lambda it: it.receive(1, *refusal(10054)),  # the server keeps the others
        "garbage": lambda it: it.receive(1, b"", b"not json"),
    }
    for name, end in ends.items():
        machine = at(OPEN, level)
        end(machine)
        assert machine.ended, name
        (bye,) = read(machine.farewell())
        assert bye[0] == "a.1", name
        assert (bye[1], bye[2]) == ("", {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": str(machine.sent + 2)}), name
        assert machine.farewell() == b"", "once"
    for state in (NEW, OPEN, COMMITTING, COMMITTED, FAILED, UNKNOWN):
        assert at(state, level).farewell() == b"", state
    assert AtomicBatchMachine("b1").farewell() == b""


# -- operations in every state


def test_a_new_batch_can_only_be_opened_or_discarded() -> None:
    machine = at(NEW)
    with pytest.raises(errors.EmptyBatchError, match="has no messages"):
        machine.commit(None)
    first = machine.prepare(message())
    for level, version in ((1, "2.11.11"), (0, "older")):
        with pytest.raises(errors.UnsupportedFeatureError, match="nothing was sent") as caught:
            machine.open(first, Server(level, version), "_INBOX.r")
        assert (caught.value.server_version, caught.value.required_api_level, machine.state) == (version, 2, NEW)
    fenced = machine.prepare(message(expected_last_subject_seq=0))
    with pytest.raises(errors.UnsupportedFeatureError, match="was not added"):
        machine.open(fenced, Server(2, "2.12.0"), "_INBOX.r")
    assert machine.state is NEW
    machine.discard()
    with pytest.raises(errors.BatchClosedError):
        machine.open(first, Server(4, "2.15.1"), "_INBOX.r")
    with pytest.raises(errors.BatchClosedError):
        machine.prepare(message())


def test_a_prepared_message_is_not_sent_over_a_lower_limit() -> None:
    machine = at(OPEN)
    encoded = machine.prepare(message(payload=bytes(1000)))
    machine.limit_messages(500)
    before = visible(machine)
    for call in (machine.add, machine.commit):
        with pytest.raises(errors.MaxPayloadError):
            call(encoded)
        assert visible(machine) == before


def test_the_limit_of_the_stream_counts_what_the_message_has_on_the_wire() -> None:
    """The message that carries the commit has a longer header block."""
    limited = StreamState("S", "today", {"subjects": ["a.*"], "max_msg_size": 100})
    for level in (3, 4):
        machine = batch(level, stream=limited)
        add(machine, message(payload=b""))
        room = 100 - len(b"NATS/1.0\r\nNats-Batch-Id: b1\r\nNats-Batch-Sequence: 2\r\n\r\n")
        fits = machine.prepare(message("a.2", bytes(room)))
        with pytest.raises(errors.MessageTooLargeError, match="max_msg_size"):
            machine.prepare(message("a.2", bytes(room + 1)))
        with pytest.raises(errors.MessageTooLargeError):
            machine.commit(fits)
        assert (machine.state, machine.size) == (OPEN, 1)
        machine.commit(machine.prepare(message("a.2", bytes(room - len(b"Nats-Batch-Commit: 1\r\n")))))


def test_a_clean_exit_commits_an_open_batch_with_messages() -> None:
    for state, commits in ((NEW, False), (OPEN, True), (COMMITTED, False), (DISCARDED, False)):
        machine = at(state)
        assert machine.finish() is commits
        assert machine.state is (DISCARDED if state is NEW else state)
    for state in (COMMITTING, FAILED, UNKNOWN):
        machine = at(state)
        with pytest.raises(errors.BatchError):
            machine.finish()
        assert machine.state is state
    machine = at(FAILED)
    machine.discard()
    assert machine.finish() is False


def test_what_resolve_looks_into() -> None:
    for state in (COMMITTED, DISCARDED, FAILED):
        assert not at(state).check_unresolved()
    assert at(UNKNOWN).check_unresolved()
    for state in (NEW, OPEN, COMMITTING):
        with pytest.raises(errors.BatchError, match="is still open"):
            at(state).check_unresolved()
    separate = at(OPEN)
    separate.receive(2, *REPLIES["ordinary ack"])
    with pytest.raises(errors.UnsupportedFeatureError):
        separate.check_unresolved()
    assert separate.farewell() == b"", "the server would store it, too"


def test_a_subject_that_the_stream_lacks_is_refused() -> None:
    machine = AtomicBatchMachine("b1")
    machine.open(machine.prepare(message("a.1")), Server(4, "", STREAM), "_INBOX.r")
    add(machine, message("a.1"))
    before = visible(machine)
    with pytest.raises(errors.BadSubjectError, match=r"stream 'S', .*, does not store subject 'b\.1'"):
        machine.prepare(message("b.1"))
    block = machine.add_many(iter([("b.1", b"1")]), 1 << 20)
    assert isinstance(block.stopped, errors.BadSubjectError)
    assert (block.messages, visible(machine)) == (0, before)


@LEVELS
@walk("operation", ["add", "commit", "commit_eob"])
@walk("state, error, outcome", [
    (COMMITTING, errors.BatchClosedError, "unknown"), (COMMITTED, errors.BatchClosedError, "stored"),
    (DISCARDED, errors.BatchClosedError, "not_stored"), (FAILED, errors.AtomicPublishDisabledError, "not_stored"),
    (UNKNOWN, errors.BatchOutcomeUnknownError, "unknown"),
])  # fmt: skip
def test_a_batch_that_is_not_open_takes_nothing(
    state: State, error: type[errors.BatchError], outcome: str, operation: str, level: int
) -> None:
    machine = at(state, level)
    before = visible(machine)
    for _ in range(2):
        with pytest.raises(error) as caught:
            {"add": add, "commit": commit}.get(operation, lambda *_: commit(machine))(machine, message())
        assert type(caught.value) is error
        assert (caught.value.batch_id, caught.value.outcome, caught.value.ack) == ("b1", outcome, machine.ack)
        assert caught.value is not machine.error, "each call raises an error of its own"
    assert visible(machine) == before


# -- replies in every state

REPLIES = {
    "staged": STAGED,
    "ack": ack(2),
    "ordinary ack": (b"", b'{"stream":"A", "seq":1}'),
    "503": NO_RESPONDERS,
    "too large": refusal(10054),
    "overload": refusal(10167, 429),
    "bad sequence": refusal(10175),
    "incomplete": refusal(10176),
    "wrong last sequence": refusal(10071),
    "unknown code": refusal(10052, 500),
    "garbage": (b"", b"not json"),
    "a list": (b"", b"[]"),
    "a bad header": (b"garbage", b""),
    "ack of another batch": ack(2, "other"),
    "ack of another size": ack(7),
    "malformed ack": (b"", b'{"batch":"b1","stream":"A","seq":-1,"count":2}'),
    "malformed error": (b"", b'{"error":"no"}'),
}
REFUSED = {
    "503": errors.NoStreamError,
    "too large": errors.MessageTooLargeError,
    "overload": errors.TooManyRequestsError,
    "bad sequence": errors.AtomicPublishMissingSequenceError,
    "incomplete": errors.AtomicPublishIncompleteError,
    "wrong last sequence": errors.WrongLastSequenceError,
    "unknown code": errors.BatchServerError,
}


def test_replies_that_change_nothing() -> None:
    """After the end of the batch, and replies to a sequence that was not sent."""
    for state in State:
        for name, answer in REPLIES.items():
            machine = at(state)
            before = visible(machine)
            late = [machine.sent] if state in (COMMITTED, DISCARDED, FAILED, UNKNOWN) else []
            for seq in (*late, 0, machine.sent + 1, 1 << 70):
                machine.receive(seq, *answer)
                assert visible(machine) == before, (state, name)


def test_staged_messages() -> None:
    machine = at(OPEN)
    for seq, staged in ((2, 2), (1, 2)):
        machine.receive(seq, *STAGED)
        assert machine.staged == staged, "it never decreases"
    machine = at(COMMITTING)
    machine.receive(2, *STAGED)
    assert (machine.state, machine.staged) == (COMMITTING, 2)


@walk("reply", REPLIES)
@walk("seq", [1, 2])
def test_replies_while_open(reply: str, seq: int) -> None:
    machine = at(OPEN)
    machine.receive(seq, *REPLIES[reply])
    if reply == "staged":
        assert (machine.state, machine.staged, machine.size) == (OPEN, seq, 2)
    elif reply in ("ack", "ack of another size"):
        # No commit was sent, but the client cannot claim that nothing is stored.
        assert machine.state is UNKNOWN
        assert isinstance(machine.error, errors.BatchOutcomeUnknownError)
    else:
        assert machine.state is FAILED
        expected = errors.UnsupportedFeatureError if reply == "ordinary ack" else errors.BatchAbandonedError
        assert type(machine.error) is REFUSED.get(reply, expected)
        if reply in REFUSED:
            assert machine.error.outcome == "not_stored"  # type: ignore[union-attr]
            assert f"message {seq}" in str(machine.error) or reply == "503"
            assert pickle.loads(pickle.dumps(machine.error)).outcome == "not_stored"


@LEVELS
@walk("last", [None, message("a.3")])
@walk("reply", REPLIES)
def test_replies_to_the_commit(reply: str, last: BatchMessage | None, level: int) -> None:
    machine = at(OPEN, level)
    commit(machine, last)
    size = machine.size
    machine.receive(machine.sent, *(ack(size) if reply == "ack" else REPLIES[reply]))
    if reply == "ack":
        assert machine.state is COMMITTED
        assert machine.ack == BatchAck("A", 10 + size, "b1", size)
    elif reply in REFUSED:
        assert machine.state is FAILED
        assert type(machine.error) is REFUSED[reply]
        assert "nothing" in str(machine.error)
    elif reply == "ordinary ack":
        assert machine.state is FAILED
        assert isinstance(machine.error, errors.UnsupportedFeatureError)
        assert machine.error.required_api_level == 2
    else:
        assert (machine.state, machine.staged) == (UNKNOWN, 1)
        assert isinstance(machine.error, errors.BatchOutcomeUnknownError)
        assert isinstance(machine.error.__cause__, errors.ResponseError)


# -- what goes out


def test_with_the_marker_every_message_goes_out_at_once() -> None:
    machine = batch()
    assert plain(add(machine, message(headers={"K": "v"}, msg_id="m", msg_ttl=NEVER))) == (
        "a.1", "_INBOX.r",
        {"K": "v", "Nats-Msg-Id": "m", "Nats-TTL": "never", "Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "1"}, b"x",
    )  # fmt: skip
    assert plain(add(machine, message("a.2", b""))) == (
        "a.2",
        "",
        {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "2"},
        b"",
    )
    (marker,) = commit(machine)
    # It goes to a subject of the stream, has the next sequence, and is not stored.
    assert plain(marker) == (
        "a.1", "_INBOX.r", {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "3", "Nats-Batch-Commit": "eob"}, b"",
    )  # fmt: skip
    assert machine.size == 2


@walk("level, version", [(3, "2.12.8"), (4, "2.14.0"), (4, "2.14.2-RC.1")])
class TestHeldBack:
    """Servers before 2.14 have no marker, and 2.14.0 to 2.14.2 count it: the newest message is held back for the commit."""

    def test_the_newest_message_carries_the_commit(self, level: int, version: str) -> None:
        machine = batch(level, version=version)
        assert add(machine, message()) is None
        assert plain(add(machine, message("a.2")))[2] == {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "1"}
        assert (machine.size, machine.sent, machine.last_subject) == (2, 1, "a.2")
        (last,) = commit(machine)
        assert plain(last) == (
            "a.2", "_INBOX.r", {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}, b"x",
        )  # fmt: skip

    def test_later_changes_to_headers_and_payload_have_no_effect(self, level: int, version: str) -> None:
        machine = batch(level, version=version)
        headers, payload = {"K": "v"}, bytearray(b"one")
        add(machine, message(payload=payload, headers=headers))  # type: ignore[arg-type]
        headers["K"] = "broken\r\n"
        headers["Nats-Batch-Commit"] = "1"
        payload[:] = b"two"
        step = plain(add(machine, message("a.2")))
        assert step[2:] == ({"K": "v", "Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "1"}, b"one")


@LEVELS
@given(st.data())
def test_sequences_on_the_wire_are_1_to_n_whatever_is_refused(level: int, data: st.DataObject) -> None:
    machine = batch(level)
    accepted: list[tuple[str, bytes]] = []
    sent: list[tuple[str, bytes]] = []

    def send(step: Command | None) -> None:
        if step is not None:
            subject, _, headers, payload = step
            sent.append((subject, payload))
            assert int(headers["Nats-Batch-Sequence"]) == len(sent)

    for i in range(data.draw(st.integers(1, 8))):
        subject, payload = f"a.{i}", b"%d" % i
        if data.draw(st.booleans()):
            with pytest.raises(ValueError, match="subject"):
                add(machine, message("bad subject"))
        send(add(machine, message(subject, payload)))
        accepted.append((subject, payload))
    assert machine.size == len(accepted)
    for step in commit(machine):
        if step[2].get("Nats-Batch-Commit") != "eob":
            send(step)
    assert sent == accepted
    machine.receive(machine.sent, *ack(len(accepted)))
    assert machine.state is COMMITTED
