"""A fast-ingest batch as a machine (ADR-50, the fast half; server API level 4).

::

                 send first             first reply              commit            final ack
       NEW ───────────────► STARTING ───────────────► OPEN ───────────────► COMMITTING ──────► ENDED
                                │                     ▲│  fail mode: gap, error    │             ▲
                                │                     │├───────────► DRAINING ──────┼─────────────┤
                    ok mode:    │      answer to the  ││ ok mode: connection lost                │
                    connection  │    ping after the   │▼                                         │
                    lost        ├────► reconnect ── SUSPENDED ─────────────────────────────────────┤
                                └── refusal, silence, connection lost, unknown batch, discard ─────┘

* Every message carries a reply subject ``<inbox>.<id>.<flow>.<gap>.<seq>.<op>.$FI``. The server answers on the reply
  subject of the message that made it answer, so those tokens say which message an answer is about.
* The window: at most `flow` times `max_outstanding_acks` messages are unacknowledged, `flow` being what the server last
  set (it raises and lowers it). Acks are cumulative; one that is older than what we know changes nothing; a gap report
  never moves the window.
* DRAINING: the batch is dead on the server but its final ack, the only record of what was stored, is still to come.
* COMMITTING: a ping is never sent. The server forgets a batch it has committed, and would answer a ping with "unknown
  batch", with a gap that is none, or by opening a new batch.
* SUSPENDED: nothing is sent until the server has answered a ping on the new connection. That ping makes it report what
  was lost with the old one. What it had reported on the old one and nobody read stays in doubt.
* A commit stores its message by an ordinary append and ends with the end-of-batch marker: servers 2.14.0 to 2.14.2
  never answer a committing message that is a duplicate or fails a check. A marker that the server is known not to have
  taken (503, 429) is sent again.
* What cannot be an answer to this batch (malformed, of another batch, about messages never sent) is left alone: anybody
  may publish to an inbox, and a real answer that is missing is asked for again or ends in a deadline.

Here is what the caller does: it sends, tells of the connection, and lets time pass. What the server's replies do is in
`fast_receiving`, and what is known of the batch in `fast_record`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jetstream_ext.errors import BatchClosedError, EmptyBatchError
from jetstream_ext.protocol import fast_endings as endings
from jetstream_ext.protocol.fast_frames import FastFrames
from jetstream_ext.protocol.fast_receiving import FastReceiver
from jetstream_ext.protocol.fast_record import Event, State
from jetstream_ext.protocol.fast_timers import FastTimers
from jetstream_ext.types import BatchMessage, EndReason, Entry, GapMode


class FastBatch(FastReceiver):
    """One fast-ingest batch. Times are seconds of one monotonic clock; bytes go to the connection as they are.

    Args:
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``.
        inbox: The prefix of the reply subjects; the shell listens on ``<inbox>.<batch_id>.>``.
        flow: Messages per ack that are asked for, 1 to 65535 (servers give 500 at most).
        max_outstanding_acks: Acks' worth of messages in the window, 1 to 3.
        gap: What a loss does.
        max_payload: The server's limit for headers and payload together, in bytes.
        ack_timeout: Seconds without a sign of life that a wait may last.
        stall_ping: Seconds of stalling after which the server is asked where it is.
        keepalive: Seconds without traffic after which it is told that we are still here (0: never).
    """

    # Those of the record that are set here, again: some type checkers would guess their types anew.
    state: State
    sent: int

    def __init__(
        self,
        *,
        batch_id: str,
        inbox: str,
        flow: int = 100,
        max_outstanding_acks: int = 2,
        gap: GapMode = GapMode.FAIL,
        max_payload: int = 1 << 20,
        ack_timeout: float = 5.0,
        stall_ping: float = 1.0,
        keepalive: float = 5.0,
    ) -> None:
        gap = GapMode(gap)
        super().__init__(
            batch_id=batch_id,
            flow=flow,
            max_outstanding_acks=max_outstanding_acks,
            gap=gap,
            frames=FastFrames(batch_id=batch_id, inbox=inbox, flow=flow, gap=gap, max_payload=max_payload),
            timers=FastTimers(ack_timeout=ack_timeout, stall_ping=stall_ping, keepalive=keepalive),
        )
        self._probed = False  # while suspended: the connection was back once

    # -- sending ------------------------------------------------------------------------------------------------

    def add(self, message: BatchMessage, now: float) -> bytes:
        """Return the bytes that publish `message`; it has a batch sequence from here on.

        Raises:
            BatchError: The batch has ended, or is suspended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
        """
        self._check_sending()
        data = self._frames.message(message, self.sent + 1)
        self._took(1, now)
        return data

    def add_plain(self, subject: str, payload: bytes, now: float) -> bytes:
        """As `add`, for a message that has no headers and no options."""
        if self.state is not State.OPEN:
            self._check_sending()
        data = self._frames.plain(subject, payload, self.sent + 1)
        self._took(1, now)
        return data

    def add_many(
        self, entries: Iterator[Entry], limit: int, now: float
    ) -> tuple[bytes, int, int, BaseException | None]:
        """Take up to `limit` messages from `entries`; return their bytes, count, payload bytes, and what stopped it.

        A block ends after about `fast_frames.BLOCK` payload bytes, too; then nothing has stopped it.

        What `entries` raises, and the refusal of a message, comes back as the last value: the messages before it are
        in the bytes and have their sequences, the refused one has none. ``StopIteration`` is the end of `entries`.
        """
        self._check_sending()
        if self.state is State.NEW:
            limit = min(limit, 1)  # the first reply decides whether anything may follow
        out, size, stopped = self._frames.many(entries, limit, self.sent)
        if out:
            self._took(len(out), now)
        return b"".join(out), len(out), size, stopped

    def _took(self, count: int, now: float) -> None:
        self.sent += count
        self._timers.wrote(now)
        if self.state is State.NEW:
            self.state = State.STARTING
            self._timers.wait_anew(now)

    def ping(self, now: float) -> bytes:
        """Return the bytes that ask the server where it is.

        Raises:
            EmptyBatchError: Nothing was sent yet, so there is nobody to ask.
            BatchError: The batch has ended, or is suspended.
        """
        self._check_sending()
        if self.state is State.NEW:
            raise EmptyBatchError("a batch is known to the server only from its first message on", **self.facts())
        return self._ping(now)

    def _ping(self, now: float) -> bytes:
        self._timers.pinged(now)
        return self._frames.ping(self.sent)

    def commit(self, now: float) -> bytes:
        """Return the bytes that end the batch; a message to store goes before it by `add`.

        Raises:
            EmptyBatchError: Nothing was sent.
            BatchError: The batch has ended, or is suspended.
        """
        self._check_sending()
        if self.state is State.NEW:
            raise EmptyBatchError("there is nothing to commit", **self.facts())
        self.state = State.COMMITTING
        self._timers.wait_anew(now)  # the end of the batch answers for its pings
        self._timers.wrote(now)
        return self._frames.end(self.sent)

    def discard(self) -> list[Event]:
        """End the batch here; the server forgets it after its idle time. What was sent stays stored."""
        if self.state is State.ENDED:
            return []
        error = None
        if self.state is State.COMMITTING:
            error = endings.unknown(self, "given up while the commit was on its way")
        return self._end(EndReason.DISCARDED, error)

    def _check_sending(self) -> None:
        self.check_open()
        if self.state is State.SUSPENDED:
            raise BatchClosedError(
                f"batch {self.batch_id} sends nothing until its connection is back", **self.facts("unknown")
            )

    # -- the connection -----------------------------------------------------------------------------------------

    def disconnected(self, now: float, *, for_good: bool = False) -> list[Event]:
        """Take the loss of the connection.

        In ok mode the batch is then suspended until `reconnected`, or a deadline, unless the loss is `for_good`.
        """
        if self.state in (State.NEW, State.ENDED):
            return []
        self._connected = False
        if self.gap is GapMode.OK and self.state in (State.STARTING, State.OPEN) and not for_good:
            self.state = State.SUSPENDED
            self._doubtful, self._probed = self.acked + 1, False
            self._timers.wait_anew(now)
            return []
        if self.state is State.SUSPENDED and not for_good:
            return []  # lost again before the server answered: its report may be lost, too, and the deadline stands
        if self.state is State.DRAINING:  # its final ack is lost, but not why it died
            return self._end(endings.reason_for(self.cause), self.cause)
        error = endings.disconnected(self, "the connection was lost", committing=self.state is State.COMMITTING)
        return self._end(EndReason.DISCONNECTED, error)

    def reconnected(self, now: float) -> tuple[list[Event], bytes]:
        """Take the new connection: return what happened, and the ping that finds out whether the batch is alive.

        The shell has to be subscribed on the new connection, and send what it still had of the old one before the ping.
        """
        if self.state is not State.SUSPENDED or self._connected:
            return [], b""
        self._connected = True
        if not self._probed:
            self._probed = True
            self._timers.wait_anew(now)  # once: a connection that comes and goes has no deadline of its own
        self._timers.asked(now)
        return [], self._frames.ping(self.sent)

    # -- timers -------------------------------------------------------------------------------------------------

    def waiting(self, now: float) -> None:
        """Say that somebody waits from now on: for the first reply, the window, or acknowledgements."""
        self._timers.waiting(now)

    def not_waiting(self) -> None:
        """Say that nobody waits any more."""
        if self.state in (State.NEW, State.OPEN):
            self._timers.not_waiting()

    @property
    def _next_ask(self) -> float:
        if self.state is State.OPEN:
            return min(self._timers.ask_again, self._timers.keep_alive)
        asks = self._connected if self.state is State.SUSPENDED else self._asks_again
        return self._timers.ask_again if asks else math.inf

    def next_timer(self) -> float | None:
        """Return when `handle_timer` wants to be called, or None."""
        if self.state in (State.NEW, State.ENDED):
            return None
        due = min(self._timers.deadline, self._next_ask)
        return None if due == math.inf else due

    def handle_timer(self, now: float) -> tuple[list[Event], bytes]:
        """Do what is due; return what happened, and bytes to send."""
        if self.state in (State.NEW, State.ENDED):
            return [], b""
        if now >= self._timers.deadline:
            return self._silence(), b""
        if now < self._next_ask:
            return [], b""
        if self.state is State.OPEN:
            return [], self._ping(now)
        self._timers.asked(now)
        if self.state is State.COMMITTING:
            self._asks_again = False
            return [], self._frames.end(self.sent)
        return [], self._frames.ping(self.sent)

    def _silence(self) -> list[Event]:
        if self.state is State.DRAINING:
            return self._end(endings.reason_for(self.cause), self.cause)
        waited = f"within {self._timers.ack_timeout:g} s"
        if self.state is State.SUSPENDED:
            what = "nobody answered for the batch" if self._connected else "was not back for good"
            why = f"the connection was lost and {what} {waited}"
            return self._end(EndReason.DISCONNECTED, endings.disconnected(self, why))
        return self._end(EndReason.TIMEOUT, endings.timed_out(self, waited, self._refusal))
