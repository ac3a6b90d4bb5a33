"""The window of a fast batch: how many messages may be unacknowledged (ADR-50, Flow Control)."""

from __future__ import annotations

from collections import deque
from typing import Final

from jetstream_ext.protocol.options import check_int
from jetstream_ext.types import BatchFlowAck

LARGEST_FLOW: Final = 65_535
"""The largest flow that a batch can ask for and that a server can set: servers keep it in 16 bits."""


class Window:
    """Counts acknowledgements and refusals, and says up to which batch sequence messages may be sent.

    At most `flow` times `max_outstanding_acks` messages are unacknowledged; the server may set another flow with each
    ack. Acks are cumulative, and one that is older than the newest changes nothing. Gap reports do not move the window.
    """

    def __init__(self, flow: int, max_outstanding_acks: int) -> None:
        self.flow: int = check_int(flow, "flow", high=LARGEST_FLOW)
        self._outstanding = check_int(max_outstanding_acks, "max_outstanding_acks", high=3)
        self.limit: int = self.flow * self._outstanding  # the highest batch sequence that may be sent
        self.acked: int = 0  # the highest one that the server acknowledged
        self.arrived: int = 0  # the highest one that a ping proved to have arrived, or to be reported as lost
        self.pongs: int = 0  # how many pings were answered
        self._settled = 0  # the highest one that is no longer counted although no ack covers it
        # Runs [first, last] of refused messages above the newest ack. No ack covers them before a later message is
        # stored, so the window does not count them. Every run but one has a counted message before it, so there are
        # never more runs than the window is wide.
        self._refused: deque[list[int]] = deque()
        self._refused_count = 0

    @property
    def base(self) -> int:
        """The batch sequence up to which the window counts no message."""
        return max(self._settled, self.acked)

    def acknowledge(self, ack: BatchFlowAck, sent: int, *, pong: bool = False) -> bool:
        """Take an ack; return False if it is older than what is known.

        The flow in the answer to a ping (`pong`) is the newest one in any case.
        """
        is_new = ack.seq >= self.acked
        if is_new:
            self.acked = min(ack.seq, sent)
        if is_new or pong:
            self.flow = max(1, ack.msgs)
            self._move(self.acked)
        return is_new

    def acknowledge_final(self, count: int) -> None:
        self.acked = max(self.acked, count)

    def refuse(self, seq: int, sent: int) -> None:
        """Take the refusal of a message: the window no longer counts it."""
        runs = self._refused
        newest = runs[-1][1] if runs else self.base
        if newest < seq <= sent:
            if runs and seq == newest + 1:
                runs[-1][1] = seq
            else:
                runs.append([seq, seq])
            self._refused_count += 1
            self.limit += 1

    def settle(self, seq: int) -> None:
        """Count nothing up to `seq` any more: reports about those messages may have been lost with a connection."""
        self._settled = max(self._settled, seq)
        self._move(self.base)

    def _move(self, base: int) -> None:
        runs = self._refused
        while runs and runs[0][0] <= base:
            first, last = runs[0]
            self._refused_count -= min(last, base) - first + 1
            if last > base:
                runs[0][0] = base + 1
                break
            runs.popleft()
        self.limit = self.base + self._refused_count + self.flow * self._outstanding
