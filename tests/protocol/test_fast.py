"""The fast batch: every state and reply, and the window."""

import logging
import pickle
from typing import Any

import pytest
from cells import walk
from fast_batches import FAIL, OK, ack, batch, commands, err, final, gap, message, no_responders, refusal, reply

from jetstream_ext import errors
from jetstream_ext.protocol.fast import ERR, KEPT_REPORTS, Ended, FastBatch, Input, State
from jetstream_ext.protocol.fast import TABLE as TABLE_OF_THE_MACHINE
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.types import BatchAck, BatchFlowAck, EndReason, GapMode


def in_state(state: State, mode: GapMode | None = None) -> FastBatch:
    """Return a batch that entered `state` by public calls; 5 messages are sent from OPEN on."""
    machine = batch(mode or (OK if state is State.SUSPENDED else FAIL))
    if state is State.NEW:
        return machine
    machine.add(message(), 0.0)
    if state is State.STARTING:
        return machine
    machine.receive([ack(0, op=0)], 0.0)
    for _ in range(4):
        machine.add(message(), 0.0)
    if state is State.COMMITTING:
        machine.commit(0.0)
    elif state is State.DRAINING:
        machine.receive([gap(3, 5)], 0.0)
    elif state is State.SUSPENDED:
        machine.disconnected(0.0)
        machine.reconnected(0.0)
    elif state is State.ENDED:
        machine.commit(0.0)
        machine.receive([final(5)], 0.0)
    assert machine.state is state
    return machine


ORDINARY = reply({"stream": "Y", "seq": 1}, 1, 0)
UNKNOWN = reply({"type": "weather"}, 2)
GARBAGE = reply(b"not json", 2)
STRANGER = reply({"stream": "F", "seq": 1, "batch": "other", "count": 1}, 2)

S, O, P = State.STARTING, State.OPEN, State.SUSPENDED  # noqa: E741 - columns
C, D, E = State.COMMITTING, State.DRAINING, State.ENDED

# state, mode, reply  ->  state, and where it ends: reason, error, outcome
TABLE: list[tuple[State, GapMode | None, str, Frame, State, Any]] = [
    (S, None, "first ack", ack(0, op=0), O, None),
    (S, FAIL, "err", err(1), D, None),
    (S, OK, "err", err(1), O, None),
    (S, None, "disabled", refusal(10205, 1, 0), E, (EndReason.ERROR, errors.FastPublishDisabledError, "not_stored")),
    (S, None, "pattern", refusal(10206, 1, 0), E, (EndReason.ERROR, errors.FastPublishInvalidPatternError, "not_stored")),
    (S, None, "id", refusal(10207, 1, 0), E, (EndReason.ERROR, errors.FastPublishInvalidBatchIDError, "not_stored")),
    (S, None, "mirror", refusal(10209, 1, 0), E, (EndReason.ERROR, errors.FastPublishMirrorError, "not_stored")),
    (S, None, "inflight", refusal(10211, 1, 0), E, (EndReason.ERROR, errors.FastPublishTooManyInflightError, "not_stored")),
    (S, None, "api level", refusal(10185, 1, 0), E, (EndReason.ERROR, errors.RequiredApiLevelError, "not_stored")),
    (S, None, "too large", refusal(10054, 1, 0), E, (EndReason.ERROR, errors.MessageTooLargeError, "not_stored")),
    (S, None, "overload", refusal(10167, 1, 0, 429), E, (EndReason.ERROR, errors.TooManyRequestsError, "not_stored")),
    (S, None, "503", no_responders(1, 0), E, (EndReason.ERROR, errors.NoStreamError, "not_stored")),
    (S, None, "ordinary ack", ORDINARY, E, (EndReason.ERROR, errors.UnsupportedFeatureError, None)),
    (S, None, "final", final(1), S, None),
    (S, None, "final of messages never sent", final(5, seq=1, op=0), S, None),
    (S, None, "unknown type", UNKNOWN, S, None),
    (S, None, "garbage", GARBAGE, S, None),
    (O, None, "ack", ack(3), O, None),
    (O, None, "pong", ack(1, seq=5, op=4), O, None),
    (O, FAIL, "gap", gap(3, 5), D, None),
    (O, OK, "gap", gap(3, 5), O, None),
    (O, FAIL, "err", err(2), D, None),
    (O, OK, "err", err(2), O, None),
    (O, FAIL, "unknown batch", refusal(10208), D, None),
    (O, OK, "unknown batch", refusal(10208), O, None),
    (O, None, "unknown batch to a ping", refusal(10208, 5, 4), E, (EndReason.ERROR, errors.FastPublishUnknownBatchError, "unknown")),
    (O, None, "first refused late", refusal(10071, 1, 0), E, (EndReason.ERROR, errors.WrongLastSequenceError, "not_stored")),
    (O, FAIL, "too large", refusal(10054), D, None),
    (O, OK, "too large", refusal(10054), O, None),
    (O, FAIL, "overload", refusal(10167, code=429), D, None),
    (O, OK, "overload", refusal(10167, code=429), O, None),
    (O, FAIL, "503", no_responders(), D, None),
    (O, OK, "503", no_responders(), O, None),
    (O, FAIL, "account full", refusal(10002), D, None),
    (O, OK, "account full", refusal(10002), O, None),
    (O, FAIL, "server full", refusal(10023, code=503), E, (EndReason.ERROR, errors.BatchServerError, "unknown")),
    (O, OK, "server full", refusal(10023, code=503), O, None),
    (O, None, "sealed", refusal(10109), E, (EndReason.ERROR, errors.BatchServerError, "unknown")),
    (O, None, "503 to a ping", no_responders(5, 4), O, None),
    (O, None, "429 to a ping", refusal(10167, 5, 4, 429), O, None),
    (O, None, "final", final(3), E, (EndReason.ERROR, errors.BatchAbandonedError, "partial")),
    (O, None, "final of another batch", STRANGER, O, None),
    (O, None, "unknown type", UNKNOWN, O, None),
    (O, None, "garbage", GARBAGE, O, None),
    (O, None, "ack of the future", ack(7), O, None),
    (O, None, "refusal of a message never sent", refusal(10208, 7), O, None),
    (O, None, "err about a message never sent", err(7), O, None),
    (O, None, "final of messages never sent", final(7, seq=4, op=1), O, None),
    (O, None, "gap that goes back", gap(6, 3), O, None),
    (O, None, "a batch opened by a ping", gap(1, 6, at=5, op=4), E, (EndReason.ERROR, errors.FastPublishUnknownBatchError, "unknown")),
    (C, None, "ack", ack(5), C, None),
    (C, None, "ack of the marker", ack(6), C, None),
    (C, FAIL, "gap", gap(3, 5), D, None),
    (C, OK, "gap", gap(3, 5), C, None),
    (C, FAIL, "err", err(5), D, None),
    (C, OK, "err", err(5), C, None),
    (C, None, "too large", refusal(10054, 5), C, None),
    (C, None, "final", final(5), E, (EndReason.COMMITTED, None, None)),
    (C, None, "final of replicas", final(5, seq=5, op=1), E, (EndReason.COMMITTED, None, None)),
    (C, OK, "final of replicas that lack the end", final(5, seq=3, op=1), E, (EndReason.COMMITTED, None, None)),
    (C, FAIL, "final, too short", final(3), E, (EndReason.GAP, errors.BatchGapError, "partial")),
    (C, OK, "final, too short", final(3), E, (EndReason.COMMITTED, None, None)),
    (C, None, "unknown batch", refusal(10208, 6, 3), E, (EndReason.ERROR, errors.BatchOutcomeUnknownError, "unknown")),
    (C, None, "503 to the marker", no_responders(6, 3), C, None),
    (C, OK, "server full at the marker", refusal(10023, 6, 3, 503), C, None),
    (C, None, "overload at the marker", refusal(10167, 6, 3, 429), C, None),
    (C, None, "late pong", ack(1, seq=5, op=4), C, None),
    (C, None, "unknown type", UNKNOWN, C, None),
    (D, FAIL, "ack", ack(4), D, None),
    (D, FAIL, "another gap", gap(4, 5), D, None),
    (D, FAIL, "err", err(4), D, None),
    (D, FAIL, "503", no_responders(5), D, None),
    (D, FAIL, "final", final(2), E, (EndReason.GAP, errors.BatchGapError, "partial")),
    (D, FAIL, "unknown batch", refusal(10208, 5), D, None),
    (D, FAIL, "unknown batch to a ping", refusal(10208, 5, 4), E, (EndReason.GAP, errors.BatchGapError, "unknown")),
    (P, OK, "pong", ack(1, seq=5, op=4), O, None),
    (P, OK, "pong of before", ack(1, seq=4, op=4), P, None),
    (P, OK, "ack", ack(3), P, None),
    (P, OK, "gap", gap(3, 5), P, None),
    (P, OK, "err", err(2), P, None),
    (P, OK, "503 to the ping", no_responders(5, 4), P, None),
    (P, OK, "429 to the ping", refusal(10167, 5, 4, 429), P, None),
    (P, OK, "503", no_responders(5), P, None),
    (P, OK, "unknown batch", refusal(10208, 5, 4), E, (EndReason.DISCONNECTED, errors.BatchAbandonedError, "unknown")),
    (P, OK, "a batch opened by the ping", gap(1, 6, at=5, op=4), E, (EndReason.DISCONNECTED, errors.BatchAbandonedError, "unknown")),
    (P, OK, "final", final(3), E, (EndReason.ERROR, errors.BatchAbandonedError, "partial")),
    (P, OK, "garbage", GARBAGE, P, None),
    (E, None, "ack", ack(5), E, (EndReason.COMMITTED, None, None)),
    (E, None, "gap", gap(3, 5), E, (EndReason.COMMITTED, None, None)),
    (E, None, "unknown batch", refusal(10208), E, (EndReason.COMMITTED, None, None)),
    (E, None, "garbage", GARBAGE, E, (EndReason.COMMITTED, None, None)),
]  # fmt: skip
CELLS = [
    (f"{state.value}, {mode.value}: {what}", state, mode, *rest)
    for state, only, what, *rest in TABLE
    for mode in ([only] if only else [OK, FAIL])
]


@walk("cell, state, mode, frame, after, ending", CELLS)
def test_every_state_and_reply(
    cell: str, state: State, mode: GapMode, frame: Frame, after: State, ending: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    machine = in_state(state, mode)
    sent, acked = machine.sent, machine.acked
    with caplog.at_level(logging.DEBUG, logger="jetstream_ext.fast"):
        events, _ = machine.receive([frame], 1.0)
    assert machine.state is after
    changes = [text for text in caplog.messages if " -> " in text]
    assert [text.partition(" (")[0] for text in changes] == (
        [] if after is state else [f"batch b1: {state.name} -> {after.name}"]
    )
    assert machine.sent == sent
    assert acked <= machine.acked <= sent
    if after is not E:
        assert machine.end_reason is None
        assert not any(isinstance(event, Ended) for event in events)
        return
    reason, error, outcome = ending
    assert machine.end_reason is reason
    assert [event for event in events if isinstance(event, Ended)] == ([] if state is E else [Ended(reason)])
    assert machine.next_timer() is None
    if error is None:
        assert machine.error is None
        with pytest.raises(errors.BatchClosedError):
            machine.check_open()
        return
    with pytest.raises(error) as caught:
        machine.check_open()
    assert type(caught.value) is error
    if outcome is not None:
        assert caught.value.outcome == outcome
        assert (caught.value.batch_id, caught.value.sent, caught.value.acked) == ("b1", sent, machine.acked)
        assert caught.value.ack is machine.ack
        assert "b1" in str(caught.value) or error is errors.NoStreamError
        assert pickle.loads(pickle.dumps(caught.value)).ack == machine.ack


@walk("state", [state for state in State if state not in (State.NEW, State.ENDED)])
def test_deadline_ends_the_batch_with_its_outcome(state: State) -> None:
    machine = in_state(state)
    machine.waiting(10.0)
    machine.handle_timer(1000.0)
    assert machine.state is E
    if state is D:
        assert (machine.end_reason, type(machine.error)) == (EndReason.GAP, errors.BatchGapError)
    elif state is P:
        assert (machine.end_reason, type(machine.error)) == (EndReason.DISCONNECTED, errors.BatchAbandonedError)
        assert "messages 1 to 5 are not acknowledged and may be stored" in str(machine.error)
    else:
        assert machine.end_reason is EndReason.TIMEOUT
        assert isinstance(machine.error, errors.BatchOutcomeUnknownError)
        assert machine.error.outcome == "unknown"


@walk("state", list(State))
def test_discard_ends_the_batch_in_every_state(state: State) -> None:
    machine = in_state(state)
    events, farewell = machine.discard()
    assert machine.state is E
    assert machine.discard() == ([], b"")
    ends = {O: ["_INBOX.x.b1.10.fail.6.3.$FI"], P: ["_INBOX.x.b1.10.ok.6.3.$FI"]}
    assert [command.reply for command in commands(farewell)] == ends.get(state, [])
    if state is E:
        assert (events, machine.end_reason) == ([], EndReason.COMMITTED)
        return
    assert events[-1:] == [Ended(EndReason.DISCARDED)]
    with pytest.raises(errors.BatchClosedError) as caught:
        machine.add(message(), 1.0)
    assert caught.value.outcome == ("not_stored" if state is State.NEW else "unknown")


@walk("said, outcome", [([ack(4)], "unknown"), ([ack(5)], "stored"), ([err(3), ack(5)], "partial")])
def test_outcome_without_a_final_ack(said: list[Frame], outcome: str) -> None:
    machine = in_state(O, OK)
    machine.receive(said, 0.0)
    machine.commit(0.0)
    with pytest.raises(errors.BatchClosedError, match="being committed") as caught:
        machine.add(message(), 1.0)
    assert caught.value.outcome == outcome


@walk("state", list(State))
@walk("acked", [0, 2, 5])
def test_lost_connection_in_every_state(state: State, acked: int) -> None:
    machine = in_state(state)
    if state in (State.NEW, P, E):
        assert machine.disconnected(1.0) == []
        assert machine.state is state
        return
    acked = min(acked, machine.sent) if state is not S else 0
    if acked:
        machine.receive([ack(acked)], 1.0)
    reason = EndReason.GAP if state is D else EndReason.DISCONNECTED
    assert machine.disconnected(1.0) == [Ended(reason)]
    assert machine.disconnected(1.0) == []
    error = machine.error
    assert isinstance(error, errors.BatchError)
    assert (error.sent, error.acked) == (machine.sent, acked)
    if state is D:
        assert isinstance(error, errors.BatchGapError)
        return
    assert isinstance(error, errors.BatchOutcomeUnknownError if state is C else errors.BatchAbandonedError)
    of = f"messages {acked + 1} to {machine.sent} are" if machine.sent - acked > 1 else f"message {machine.sent} is"
    rest = f"{of} not acknowledged and may be stored"
    assert (rest if acked < machine.sent else "every message was acknowledged") in str(error)
    assert error.outcome == ("unknown" if acked < machine.sent or state is C else "stored")


@walk(
    "said, outcome",
    [([], "stored"), ([gap(3, 5)], "partial"), ([err(3)], "partial"), ([refusal(10054)], "partial")],
)
def test_outcome_of_a_committed_batch(said: list[Frame], outcome: str) -> None:
    machine = in_state(C, OK)
    machine.receive([*said, final(5)], 0.0)
    with pytest.raises(errors.BatchClosedError, match="committed") as caught:
        machine.add(message(), 1.0)
    assert caught.value.outcome == outcome


# -- the window


@walk("outstanding", [1, 2, 3])
@walk("msgs", [1, 5, 500])
def test_the_window_is_flow_times_outstanding(outstanding: int, msgs: int) -> None:
    machine = batch(max_outstanding_acks=outstanding)
    assert machine.room == 10 * outstanding
    machine.add(message(), 0.0)
    assert machine.room == 0, "nothing more before the first reply"
    machine.receive([ack(0, msgs, op=0)], 0.0)
    assert (machine.window.flow, machine.room) == (msgs, msgs * outstanding - 1)
    machine.add(message(), 0.0)
    assert machine.room == msgs * outstanding - 2
    machine.receive([ack(2, msgs)], 0.0)
    assert machine.room == msgs * outstanding


def test_acks_are_cumulative_and_never_go_back() -> None:
    machine = in_state(O)
    events, _ = machine.receive([ack(4, 20), ack(2, 1), ack(4, 30), ack(3, 1)], 0.0)
    assert (machine.acked, machine.window.flow) == (4, 30)
    assert events == [BatchFlowAck(4, 20), BatchFlowAck(4, 30)], "one that is older than what is known says nothing"


def test_reports_are_bounded_and_counted() -> None:
    machine = in_state(O, OK)
    machine.sent = 1010
    machine.receive([gap(i, i + 1) for i in range(1, KEPT_REPORTS + 11)], 0.0)
    machine.receive([gap(1010, 1011)], 0.0)  # a repeated report counts once
    machine.receive([err(2)] * (KEPT_REPORTS + 5), 0.0)
    assert (machine.reports.gap_count, len(machine.reports.gaps), machine.reports.gaps[-1].first_lost) == (
        1010,
        1000,
        1010,
    )
    assert (machine.reports.error_count, len(machine.reports.errors)) == (1005, 1000)


def test_memory_of_refused_messages_is_bounded() -> None:
    machine = batch(OK, max_outstanding_acks=2)
    machine.add(message(), 0.0)
    machine.receive([ack(0, 5, op=0)], 0.0)
    for seq in range(2, 5001):
        machine.add(message(), 0.0)
        if seq % 2000:
            machine.receive([err(seq), err(seq)], 0.0)
    assert machine.room == 10 - 3, "message 1 and the two that nothing is known of"
    assert len(machine.window._refused) == 3
    machine.receive([ack(2500, 5)], 0.0)
    assert machine.room == 10 - 1
    machine.receive([ack(4998, 5)], 0.0)
    assert machine.room == 10
    assert machine.window._refused_count == 2
    machine.receive([err(4990), err(5001), ack(5000, 5)], 0.0)
    assert (machine.room, machine.window._refused_count, len(machine.window._refused)) == (10, 0, 0)


def test_dropped_message_in_fail_mode_is_followed_by_a_ping() -> None:
    machine = in_state(O)
    _, out = machine.receive([no_responders(3)], 0.0)
    assert [c.reply for c in commands(out)] == ["_INBOX.x.b1.10.fail.5.4.$FI"]
    machine.receive([gap(3, 6), final(2)], 0.0)
    assert machine.end_reason is EndReason.ERROR
    assert machine.ack == BatchAck("F", 102, "b1", 2)
    assert machine.acked == 2


@walk("said", [[gap(3, 6), final(2)], [final(2)]])
@walk("refused", [refusal(10054, 3), no_responders(3)])
def test_in_fail_mode_a_refusal_after_the_commit_is_the_reason(refused: Frame, said: list[Frame]) -> None:
    machine = in_state(C)
    machine.receive([refused, *said], 0.0)
    assert machine.end_reason is EndReason.ERROR
    assert isinstance(machine.error, errors.BatchError)
    assert not isinstance(machine.error, errors.BatchGapError)
    assert "message 3 was refused" in str(machine.error)
    assert (machine.error.outcome, machine.error.ack, machine.error.acked) == ("partial", machine.ack, 2)


@walk("mode", [OK, FAIL])
def test_a_call_that_the_table_refuses_changes_nothing(mode: GapMode) -> None:
    calls = {Input.MESSAGE: lambda it: it.add(message(), 9.0), Input.PING: lambda it: it.ping(9.0),
             Input.COMMIT: lambda it: it.commit(9.0)}  # fmt: skip
    for state in State:
        if state is State.SUSPENDED and mode is FAIL:
            continue
        for call, work in calls.items():
            machine = in_state(state, mode) if state is not State.DRAINING else in_state(state)
            before = machine.sent, machine.next_timer()
            if TABLE_OF_THE_MACHINE[call][list(State).index(state)] is ERR:
                with pytest.raises(errors.BatchError):
                    work(machine)
                assert (machine.state, machine.sent, machine.next_timer()) == (state, *before)
            else:
                assert work(machine)


@walk("first, seq, text", [
    (1, 2, "message 1 was lost; nothing is stored"),
    (2, 3, "message 2 was lost; message 1 is stored, later ones are not"),
    (3, 5, "messages 3 to 4 were lost; messages 1 to 2 are stored, later ones are not"),
])  # fmt: skip
def test_a_gap_names_what_is_lost_and_what_is_stored(first: int, seq: int, text: str) -> None:
    machine = in_state(O)
    machine.receive([gap(first, seq), final(first - 1, seq=seq)], 0.0)
    assert str(machine.error) == f"batch b1: {text}"


def test_the_error_of_a_refused_message_waits_for_the_final_ack() -> None:
    machine = batch()
    for _ in range(4):
        machine.add(message(), 0.0)
    machine.receive([ack(0, op=0), err(3)], 0.0)
    with pytest.raises(
        errors.BatchError, match="messages 1 to 2 are not acknowledged and may be stored, later"
    ) as caught:
        machine.add(message(), 0.0)
    assert (caught.value.acked, caught.value.outcome) == (0, "unknown")
    machine.receive([final(2)], 0.0)
    with pytest.raises(errors.BatchError, match="messages 1 to 2 are stored, later ones are not") as caught:
        machine.add(message(), 0.0)
    assert (caught.value.acked, caught.value.outcome) == (2, "partial")


def test_unknown_batch_may_be_the_answer_of_another_stream() -> None:
    machine = in_state(O)
    (asked,) = commands(machine.receive([refusal(10208, 3)], 0.0)[1])
    assert asked.reply == "_INBOX.x.b1.10.fail.5.4.$FI"
    assert machine.receive([gap(3, 4), final(2)], 0.1)[1] == b""
    assert machine.error is not None
    assert "messages 1 to 2 are stored, later ones are not; it is for another stream, or the server" in str(
        machine.error
    )


def test_a_batch_that_goes_on_asks_once_whether_it_is_known() -> None:
    machine = in_state(O, OK)
    _, out = machine.receive([refusal(10208, 2), refusal(10208, 3), refusal(10208, 4)], 0.0)
    (asked,) = commands(out)
    assert asked.reply == "_INBOX.x.b1.10.ok.5.4.$FI"
    assert [each.seq for each in machine.reports.errors] == [2, 3, 4]
    machine.receive([refusal(10208, 5, 4)], 0.1)
    assert (machine.end_reason, type(machine.error)) == (EndReason.ERROR, errors.FastPublishUnknownBatchError)


def test_a_server_that_no_longer_has_the_batch_leaves_it_unknown() -> None:
    machine = in_state(O)
    machine.receive([refusal(10208, 3)], 0.0)
    (end,) = commands(machine.receive([gap(1, 6, at=5, op=4)], 0.1)[1])  # an older server opens a batch for the ping
    assert end.reply == "_INBOX.x.b1.10.fail.6.3.$FI"
    assert isinstance(machine.error, errors.FastPublishUnknownBatchError)
    assert machine.error.outcome == "unknown"
    assert "messages 1 to 5 are not acknowledged and may be stored" in str(machine.error)


def test_window_opens_after_lost_refusal_reports() -> None:
    machine = batch(OK, max_outstanding_acks=1)
    machine.add(message(), 0.0)
    machine.receive([ack(0, 2, op=0)], 0.0)
    machine.add(message(), 0.0)
    machine.disconnected(0.5)  # reports are lost only with a connection
    machine.reconnected(0.5)
    machine.receive([ack(0, 2, seq=2, op=4)], 1.0)
    assert machine.room == 0, "a replica may be slow"
    machine.receive([ack(0, 2, seq=2, op=4)], 2.0)
    assert (machine.room, machine.acked) == (2, 0)
    machine.add(message(), 2.0)
    assert machine.room == 1
