"""Which requests answer a read, and which rows of their replies count.

Plans with one interface: `OneBatch` (one request), `MultiLast` (the last message of many subjects at one point in
time), `OneAnswer` (one reply, whole), and `scan.Scan` (a whole range). The shell sends what a plan asks for and hands it
what comes back.

::

    next_request() ──► Request ──► (wire) ──► accept(request, block)  ─► the rows to deliver
                                              finish(request, end)    ─► done, or more requests
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from jetstream_ext.protocol.direct import Block, EndOfBatch, Request


class Plan(Protocol):
    """What the shell drives."""

    done: bool
    end: EndOfBatch | None

    @property
    def oldest(self) -> Ask | None:
        """The request whose reply comes next."""

    def next_request(self) -> Ask | None:
        """Return the next request to send, or None: nothing to ask (now)."""

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows of the oldest reply; return those to deliver."""

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the end of the oldest reply; return the requests in flight that are void now."""

    def retry(self) -> list[Ask] | None:
        """Go back to the last good row; return what is void. None: that cannot be done without changing the answer."""


@dataclass(eq=False, slots=True)
class Ask:
    """A request in flight and what its reply has shown so far."""

    request: Request
    start: int
    """The first sequence it can answer (0: by time, unknown)."""
    count: int
    """How many messages it asked for."""
    rows: int = 0
    size: int = 0
    first: int = 0
    last: int = 0


class OneBatch:
    """The plan of one batch request: at most `request.batch` messages, in one reply."""

    def __init__(self, request: Request) -> None:
        assert request.batch is not None
        self.done: bool = False
        self.end: EndOfBatch | None = None
        self._request = request
        self._left: int = request.batch
        self._last = 0
        self._pending = 0
        self._asks: list[Ask] = []

    @property
    def oldest(self) -> Ask | None:
        """The request in flight."""
        return self._asks[0] if self._asks else None

    def next_request(self) -> Ask | None:
        """Return the request, once (and the rest of it after `retry`)."""
        if self.done or self._asks:
            return None
        request = self._request
        if self._last:
            request = replace(request, seq=self._last + 1, start_time=None, batch=self._left)
        self._asks.append(Ask(request, request.seq or 0, self._left))
        return self._asks[0]

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows; all of them count."""
        if block.seqs:
            self._left -= len(block.seqs)
            self._last = block.seqs[-1]
            self._pending = pending
        return block

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the end."""
        self._asks.clear()
        # A retry that found nothing more still ends where the rows before it ended.
        self.end = end if end.found else replace(end, last_seq=self._last, found=bool(self._last))
        self.done = True
        return []

    def retry(self) -> list[Ask] | None:
        """Ask for the rest, if there can be one."""
        void = list(self._asks)
        self._asks.clear()
        if self._left <= 0:
            # Everything came but the EOB, and the last message said the same.
            self.end = EndOfBatch(self._pending, self._last)
            self.done = True
        return void


class MultiLast:
    """The plan of a `multi_last` read: pages at one pinned point in time, with both cursors (ADR-31, revision 6).

    The page's EOB is not what says whether more follows: on 2.11 it counts one too few when it was cut. The value on
    the page's last message is right everywhere.

    A 404 is not what says that there is nothing, either. Servers with file storage answer so, too, if they have not
    reached `up_to_seq` yet. So on the first page it is asked what they did reach, and that becomes the point in time; on
    a later page somebody did have the point, and is asked once again.

    Args:
        request: The first page; its `batch` is the caller's cap on all pages together.
    """

    def __init__(self, request: Request) -> None:
        self.done: bool = False
        self.end: EndOfBatch | None = None
        self._request = request
        self._pinned = request.up_to_seq
        self._rows = 0
        self._last = 0
        self._pending = 0
        self._doubted = False
        self._probing = False
        self._asks: list[Ask] = []

    @property
    def oldest(self) -> Ask | None:
        """The request in flight."""
        return self._asks[0] if self._asks else None

    def next_request(self) -> Ask | None:
        """Return the next page's request."""
        if self.done or self._asks:
            return None
        request = self._request
        if self._probing:
            request = replace(request, up_to_seq=None, batch=1)
        elif self._last:
            cap = None if request.batch is None else request.batch - self._rows
            request = replace(request, seq=self._last + 1, up_to_seq=self._pinned, up_to_time=None, batch=cap)
        elif self._pinned is not None:
            request = replace(request, up_to_seq=self._pinned)
        self._asks.append(Ask(request, 0, 0))
        return self._asks[0]

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows; all of them count, but for those of a question how far the stream goes."""
        if self._probing:
            block.keep(0, 0)
        elif block.seqs:
            self._rows += len(block.seqs)
            self._last = block.seqs[-1]
            self._pending = pending
            ask.rows += len(block.seqs)
        return block

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the page's end."""
        self._asks.clear()
        if self._probing:
            self._probing = False
            if end.up_to_seq is not None and end.up_to_seq < (self._pinned or 0):
                self._pinned = end.up_to_seq
                return []
            end = replace(end, num_pending=0, found=False)
        elif not end.found and not self._doubted and self._pinned is not None:
            self._doubted = True
            self._probing = not self._rows
            if self._probing or self._pending:
                return []
        if self._pinned is None:
            self._pinned = end.up_to_seq
        if not ask.rows:
            self._pending = 0
        self.end = EndOfBatch(self._pending, self._last, self._pinned, found=bool(self._rows))
        self.done = self._capped or self._pending == 0
        return []

    @property
    def _capped(self) -> bool:
        return self._request.batch is not None and self._rows >= self._request.batch

    def retry(self) -> list[Ask] | None:
        """Ask for the rest at the pinned point; impossible once rows came and the point is not known yet."""
        if self._rows and self._pinned is None:
            return None
        void = list(self._asks)
        self._asks.clear()
        if self._capped:
            self.end = EndOfBatch(self._pending, self._last, self._pinned)
            self.done = True
        return void


class OneAnswer:
    """The plan of one request whose reply counts as a whole, because it tells one moment of one server.

    A reply that breaks off is never continued by another one; after rows came, the reader has to start anew.
    """

    def __init__(self, request: Request) -> None:
        self.done: bool = False
        self.end: EndOfBatch | None = None
        self._request = request
        self._pending = 0
        self._asks: list[Ask] = []

    @property
    def oldest(self) -> Ask | None:
        """The request in flight."""
        return self._asks[0] if self._asks else None

    def next_request(self) -> Ask | None:
        """Return the request, once."""
        if self.done or self._asks:
            return None
        self._asks.append(Ask(self._request, self._request.seq or 0, self._request.batch or 0))
        return self._asks[0]

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows; all of them count."""
        ask.rows += len(block.seqs)
        self._pending = pending
        return block

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the end."""
        self._asks.clear()
        # As in `MultiLast`: on 2.11 the EOB of a cut multi_last counts one too few, its last message does not.
        cut_multi = self._request.multi_last is not None and ask.rows
        self.end = replace(end, num_pending=self._pending) if cut_multi else end
        self.done = True
        return []

    def retry(self) -> list[Ask] | None:
        """Ask again, unless rows came."""
        if any(ask.rows for ask in self._asks):
            return None
        void = list(self._asks)
        self._asks.clear()
        return void
