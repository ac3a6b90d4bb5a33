"""The timers of the fast batch, on a virtual clock."""

from functools import partial

from cells import walk
from fast_batches import ack, batch, gap, message, no_responders, opened, reply

from jetstream_ext import errors
from jetstream_ext.protocol.fast import State
from jetstream_ext.types import BatchFlowGap, EndReason, GapMode, InDoubt

PING = b"PUB f.1 _INBOX.x.b1.10.fail.%d.4.$FI 0\r\n\r\n"
OK_PING = PING.replace(b"fail", b"ok")
TIMES = {"timeout": 5.0, "keepalive": 20.0}
timed = partial(opened, **TIMES)


def test_the_first_reply_has_a_deadline_and_no_pings() -> None:
    machine = batch(**TIMES)
    machine.add(message(), 100.0)
    machine.waiting(100.0)
    assert machine.next_timer() == 105.0
    assert machine.handle_timer(104.9) == ([], b"")
    machine.handle_timer(105.0)
    assert machine.end_reason is EndReason.TIMEOUT
    assert "older than 2.14" in str(machine.error)
    assert "no_ack" in str(machine.error)


class TestIdle:
    def test_is_kept_alive(self) -> None:
        machine = timed()
        now = 0.0
        for _ in range(10):
            assert machine.next_timer() == now + 20.0
            now += 20.0
            assert machine.handle_timer(now) == ([], PING % 5)
            machine.receive([ack(0, seq=5, op=4)], now + 0.1)

    def test_writing_puts_it_off(self) -> None:
        machine = timed()
        machine.add(message(), 15.0)
        assert machine.next_timer() == 35.0
        machine.add_plain("f.1", b"", 16.0)
        assert machine.next_timer() == 36.0
        machine.add_many(iter([("f.1", b"")]), 17.0)
        assert machine.next_timer() == 37.0
        assert machine.handle_timer(36.9) == ([], b"")

    def test_unanswered_pings_are_repeated_until_the_deadline(self) -> None:
        machine = timed()
        assert machine.handle_timer(20.0) == ([], PING % 5)
        for second in (21.0, 22.0, 23.0, 24.0):
            assert machine.next_timer() == second
            assert machine.handle_timer(second) == ([], PING % 5)
        assert machine.next_timer() == 25.0
        machine.handle_timer(25.0)
        assert machine.end_reason is EndReason.TIMEOUT
        assert isinstance(machine.error, errors.BatchOutcomeUnknownError)


class TestStalled:
    def test_pings_every_second_until_something_comes(self) -> None:
        machine = timed()
        machine.waiting(10.0)
        assert machine.next_timer() == 11.0
        assert machine.handle_timer(10.99) == ([], b"")
        assert machine.handle_timer(11.0) == ([], PING % 5)
        assert machine.next_timer() == 12.0
        events, out = machine.receive([ack(5)], 11.5)
        assert (len(events), out, machine.acked) == (1, b"", 5)
        machine.not_waiting()
        assert machine.next_timer() == 31.0

    @walk("gap", list(GapMode))
    def test_a_repeated_ack_does_not_extend_it(self, gap: GapMode) -> None:
        machine = timed(gap=gap)
        machine.receive([ack(3)], 10.0)
        machine.waiting(10.0)
        for now in (11.0, 14.9):
            machine.receive([ack(3)] * 100, now)
            machine.handle_timer(now)
        machine.handle_timer(15.0)
        assert machine.end_reason is EndReason.TIMEOUT

    @walk("gap", list(GapMode))
    @walk("reconnects", [False, True])
    def test_a_wait_ends_while_pings_are_answered_and_nothing_is_acknowledged(
        self, gap: GapMode, reconnects: bool
    ) -> None:
        # As by a leader whose followers are away: it takes messages and answers pings, and stores nothing.
        machine = timed(20, gap=gap)
        window, now, entries = 20, 0.0, (("f.1", b"x") for _ in range(10_000))
        if reconnects and gap is GapMode.OK:  # the unacknowledged messages are in doubt from then on
            machine.disconnected(now)
            machine.reconnected(now)
            machine.receive([ack(0, seq=20, op=4)], now)
            window += 20
        machine.waiting(now)
        while machine.end_reason is None and now < 60:
            due = machine.next_timer()
            assert due is not None
            now = max(now, due)
            _, out = machine.handle_timer(now)
            if out:
                machine.receive([ack(0, seq=machine.sent, op=4)], now)
            if machine.has_room:
                machine.not_waiting()
                machine.add_many(entries, now)
                machine.waiting(now)
            assert machine.sent <= window
        assert machine.end_reason is EndReason.TIMEOUT
        assert now < 15.0

    def test_pings_that_prove_the_arrival_of_more_are_signs_of_life(self) -> None:
        machine = timed(20)
        machine.waiting(0.0)
        for second in (1.0, 2.0, 3.0, 4.0):
            machine.handle_timer(second)
        machine.receive([ack(0, seq=20, op=4)], 4.5)  # behind the messages, over a slow link
        assert machine.handle_timer(9.0)[0] == []
        assert machine.end_reason is None

    def test_a_refused_ping_is_no_sign_of_life(self) -> None:
        # A stream that was deleted answers every ping with 503, indefinitely.
        machine = timed()
        machine.waiting(10.0)
        now = 10.0
        while machine.end_reason is None and now < 60:
            due = machine.next_timer()
            assert due is not None
            now = due
            _, out = machine.handle_timer(now)
            if out:
                machine.receive([no_responders(5, 4)], now + 0.1)
        assert (machine.end_reason, now) == (EndReason.TIMEOUT, 15.0)

    def test_timeout_error_has_the_last_refusal(self) -> None:
        for end, text in ((False, "and then nothing for"), (True, "no answer to the commit")):
            machine = timed(gap=GapMode.OK)
            machine.waiting(0.0)
            seq, op = (6, 3) if end else (5, 4)
            if end:
                machine.commit(0.0)
            full = {"error": {"code": 503, "err_code": 10023, "description": "insufficient resources"}}
            machine.receive([reply(full, seq, op)], 1.0)
            machine.handle_timer(5.0)
            assert isinstance(machine.error, errors.BatchOutcomeUnknownError)
            assert text in str(machine.error)
            assert "the last error of the server: insufficient resources" in str(machine.error)
            assert isinstance(machine.error.__cause__, errors.ServerError)


class TestCommitting:
    def test_no_ping_is_ever_sent_after_the_commit(self) -> None:
        machine = timed()
        machine.waiting(0.0)
        machine.commit(0.0)
        machine.waiting(0.0)
        now = 0.0
        while machine.end_reason is None:
            due = machine.next_timer()
            assert due is not None
            assert due > now
            now = due
            assert machine.handle_timer(now)[1] == b""
        assert now == 5.0
        assert machine.end_reason is EndReason.TIMEOUT
        assert isinstance(machine.error, errors.BatchOutcomeUnknownError)

    def test_a_marker_that_was_not_taken_is_sent_again_until_the_deadline(self) -> None:
        machine = timed()
        marker = machine.commit(0.0)
        assert marker.startswith(b"PUB f.1 _INBOX.x.b1.10.fail.6.3.$FI")
        assert machine.next_timer() == 5.0
        now = 0.0
        for second in (1.0, 2.0, 3.0, 4.0):
            machine.receive([no_responders(6, 3)], now + 0.1)
            assert machine.next_timer() == second
            assert machine.handle_timer(second) == ([], marker)
            now = second
        assert machine.next_timer() == 5.0
        machine.handle_timer(5.0)
        assert machine.end_reason is EndReason.TIMEOUT


class TestSuspended:
    """In ok mode a batch may survive a lost connection."""

    def test_ends_if_the_connection_is_not_back_in_time(self) -> None:
        machine = timed(gap=GapMode.OK)
        assert machine.disconnected(10.0) == []
        assert (machine.state, machine.room, machine.can_send()) == (State.SUSPENDED, 0, False)
        assert machine.next_timer() == 15.0
        assert machine.handle_timer(14.9) == ([], b"")
        machine.handle_timer(15.0)
        assert machine.end_reason is EndReason.DISCONNECTED
        assert "did not answer on a new one within 5 s" in str(machine.error)
        assert "1 to 5" in str(machine.error)

    def test_asks_on_the_new_connection_until_it_is_answered(self) -> None:
        machine = timed(gap=GapMode.OK)
        machine.disconnected(10.0)
        assert machine.reconnected(12.0) == OK_PING % 5
        for second in (13.0, 14.0):
            assert machine.next_timer() == second
            assert machine.handle_timer(second) == ([], OK_PING % 5)
            machine.receive([no_responders(5, 4)], second)
        machine.receive([ack(2, seq=5, op=4)], 14.5)
        assert (machine.state, machine.acked, machine.is_settled(machine.sent)) == (State.OPEN, 2, True)
        # The acknowledged messages are stored. A report about the others may have been lost with the old connection.
        assert list(machine.reports.in_doubt) == [InDoubt(1, 5)]
        assert machine.next_timer() == 34.0, "no caller waits; the batch is kept alive"

    def test_what_the_ping_proves_lost_is_a_gap_and_not_in_doubt(self) -> None:
        machine = timed(gap=GapMode.OK)
        machine.receive([ack(2)], 9.0)
        machine.disconnected(10.0)
        machine.reconnected(11.0)
        lost = gap(4, 6, at=5, op=4)
        events, _ = machine.receive([lost, ack(2, seq=5, op=4)], 11.1)
        assert list(machine.reports.gaps) == [BatchFlowGap(4, 6)]
        assert list(machine.reports.in_doubt) == [InDoubt(3, 3)]
        assert InDoubt(3, 3) in events
        assert (machine.state, machine.acked) == (State.OPEN, 2)

    def test_a_connection_that_comes_and_goes_ends_in_bounded_time(self) -> None:
        machine = timed(gap=GapMode.OK)
        now = 10.0
        while machine.end_reason is None:
            machine.disconnected(now)
            ping = machine.reconnected(now + 0.5)
            assert ping
            now += 1.0
            machine.handle_timer(now)
            assert now < 25.0
        assert machine.end_reason is EndReason.DISCONNECTED
        assert now <= 10.0 + 2 * 5.0 + 1.0

    def test_nothing_is_in_doubt_if_everything_was_acknowledged(self) -> None:
        machine = timed(gap=GapMode.OK)
        machine.receive([ack(5)], 9.0)
        machine.disconnected(10.0)
        machine.reconnected(11.0)
        machine.receive([ack(5, seq=5, op=4)], 11.1)
        assert (machine.state, list(machine.reports.in_doubt)) == (State.OPEN, [])


class TestDraining:
    def test_starts_its_own_deadline_and_asks_for_the_final_ack(self) -> None:
        machine = timed()
        machine.ping(0.0)
        _, ping = machine.receive([no_responders(3)], 4.0)
        assert machine.state is State.DRAINING
        # The next message would make the server notice the hole; a ping does too, once it has a leader again.
        assert ping == PING % 5
        for second in (5.0, 6.0, 7.0, 8.0):
            assert machine.next_timer() == second
            assert machine.handle_timer(second) == ([], PING % 5)
            machine.receive([no_responders(5, 4)], second)
        assert machine.next_timer() == 9.0
        machine.handle_timer(9.0)
        assert machine.end_reason is EndReason.ERROR

    def test_only_the_first_answer_to_its_pings_extends_the_deadline(self) -> None:
        # After a forged 503 the batch pings a server that knows of no loss, and answers every ping.
        machine = timed()
        machine.receive([no_responders(3)], 0.0)
        now = 0.0
        while machine.end_reason is None and now < 60:
            due = machine.next_timer()
            assert due is not None
            now = due
            _, out = machine.handle_timer(now)
            if out:
                machine.receive([ack(0, seq=5, op=4)], now)
        assert (machine.end_reason, now) == (EndReason.ERROR, 6.0)


def test_the_end_has_no_timers() -> None:
    machine = timed()
    machine.waiting(0.0)
    machine.discard()
    assert machine.next_timer() is None
    assert machine.handle_timer(1e9) == ([], b"")
    machine.waiting(0.0)
    assert machine.next_timer() is None
