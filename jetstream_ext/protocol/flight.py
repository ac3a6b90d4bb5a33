"""The requests of one read that are on their way, and what has arrived of their replies, without I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.errors import RequestTimeoutError, ResponseError
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, ReplyDecoder
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.reads import Plan, SentRequest
from jetstream_ext.text import counted

_MOST_ROWS: Final = 1 << 14
"""Of a reply to a request without `batch`: servers send up to 1024, one for each subject."""
_ROW_OVERHEAD: Final = 2048
"""More than the bytes of the header lines that a server adds to a message and does not count for `max_bytes`."""


@dataclass(slots=True)
class Reply:
    decoder: ReplyDecoder
    frames: list[Frame] = field(default_factory=list)
    lost: bool = False  # nothing comes after `frames`
    error: Exception | None = None  # why, if it is not the lost connection
    unsent: bool = False
    whole: bool = False  # its last frame has arrived
    count: int = 0  # how many frames have arrived
    largest: int = 0  # of them, in bytes
    first: int = 0  # the bytes that arrived first
    waited: float = 0.0  # how long nothing had arrived before them
    first_at: float = 0.0
    last_at: float = 0.0


class Flight:
    """The requests of a plan in flight, and the wait for the reply to the oldest one.

    The wait has `timeout` seconds, which sending and the reply share. After half of them the oldest request is *silent*,
    because its server may have died. It is repeated once, and the first reply to either counts.
    """

    def __init__(self, stream: str, plan: Plan, timeout: float, pause: float, server_version: str) -> None:
        self._stream = stream
        self._plan = plan
        self._timeout = timeout
        self._pause = pause
        self._server_version = server_version
        self._replies: dict[SentRequest, Reply] = {}
        self._heard = 0.0  # when the newest bytes arrived, or a request was sent while no reply was on its way
        self.dropped: list[SentRequest] = []
        self.late: tuple[SentRequest, ...] = ()
        """Requests in flight before the oldest, which is silent, was repeated."""
        self._deadline = 0.0
        self._waiting_since = 0.0
        # How long sending has taken since the last answer, and when the request was handed out that is being sent.
        self._sending = 0.0
        self._sending_since: float | None = None

    def __getitem__(self, sent: SentRequest) -> Reply:
        return self._replies[sent]

    def add(self, sent: SentRequest, now: float) -> float:
        """Add a request that is being sent; return until when that may take."""
        decoder = ReplyDecoder(self._stream, start=sent.request.seq or 1, server_version=self._server_version)
        if all(reply.whole for reply in self._replies.values()):
            self._heard = now
        self._replies[sent] = Reply(decoder)
        self._sending_since = now
        return self._deadline if self.late else now + self._timeout - self._sending

    def sent(self, now: float) -> None:
        """Note that nothing is being sent any more."""
        if self._sending_since is not None:
            self._sending, self._sending_since = self._sending + now - self._sending_since, None

    def receive(self, sent: SentRequest, frames: list[Frame], now: float) -> None:
        reply = self._replies.get(sent)
        if reply is None or reply.lost:
            return
        self._sending = 0.0
        if self._sending_since is not None:
            self._sending_since = now
        if self._plan.group is not None:
            self._plan.group.heard = now
        sizes = [len(body) for _, body, _ in frames]
        size = sum(sizes)
        if not sent.wire:
            reply.first, reply.waited, reply.first_at = size, max(0.0, now - self._heard), now
        self._heard = reply.last_at = now
        sent.wire += size
        reply.count += len(frames)
        reply.largest = max(reply.largest, *sizes)
        if self._exceeds(sent, reply):
            allowed = f"{sent.request.body()}"[:300]
            text = f"stream {self._stream!r}: the reply to a direct get is longer than its request {allowed} allows"
            reply.lost, reply.error = True, ResponseError(f"{text}; the messages that were returned are valid")
        if frames[-1][1].startswith(b"NATS/1.0 "):  # a status ends a reply
            reply.whole = True
        if reply.frames:
            reply.frames += frames
        else:
            reply.frames = frames

    def _exceeds(self, sent: SentRequest, reply: Reply) -> bool:
        """Return whether a reply is longer than a server makes it, so that it may never end.

        A server exceeds `max_bytes` by at most one message, of any size.
        """
        request = sent.request
        most = (request.batch or _MOST_ROWS) + 1  # and the end of the reply
        size = sent.wire - reply.largest - reply.count * _ROW_OVERHEAD
        return reply.count > most or size > (request.max_bytes or DEFAULT_MAX_BYTES)

    def lost(self, error: Exception | None) -> None:
        """Note that the rest of all replies is lost; `error` is why, if the connection is closed for good."""
        for reply in self._replies.values():
            reply.lost, reply.error = True, reply.error or error

    @property
    def asked(self) -> int:
        """The bytes that the replies in flight may have together."""
        return sum(min(sent.request.max_bytes or 0, DEFAULT_MAX_BYTES) for sent in self._replies)

    def oldest(self) -> tuple[SentRequest, Reply]:
        """Return the oldest request that counts; if it was repeated, the first one of the two that is answered."""
        if self.late:
            repeated = self._replies[self._plan.in_flight[0]]
            if (late := self._replies[self.late[0]]).frames:
                self._plan.in_flight = deque(self.late)
            if late.frames or repeated.frames or repeated.lost:
                self.late = ()
                self.drop()
        oldest = self._plan.in_flight[0]
        return oldest, self._replies[oldest]

    def clear(self) -> None:
        """Forget the silence of the requests that are lost."""
        self.late, self._sending = (), 0.0

    def drop(self) -> None:
        """Forget the replies to requests that no longer count."""
        for sent in [sent for sent in self._replies if sent not in (*self._plan.in_flight, *self.late)]:
            del self._replies[sent]
            self.dropped.append(sent)

    # -- the wait ---------------------------------------------------------------------------------------------------

    def wait(self, now: float) -> float:
        """Begin to wait for more of the oldest reply; return until when."""
        self._waiting_since = now
        self._deadline = now + max(self._pause, self._timeout - self._sending)
        patience = self._timeout / 2
        if self._plan.only_end_missing:
            patience = min(patience, self._pause)
        return min(self._deadline, now + patience)

    @property
    def silent(self) -> bool:
        """Whether nothing has arrived that was not taken."""
        first, reply = self._first(), self._replies[self._plan.in_flight[0]]
        return not (reply.frames or reply.lost or first.frames)

    def others_answered(self) -> bool:
        """Return whether another read of the group was answered during the wait: a server answers one after the other."""
        return self._plan.group is not None and self._plan.group.heard > self._waiting_since

    def may_repeat(self, until: float) -> bool:
        """Return whether the wait until then was not all of it."""
        return until < self._deadline

    def repeat(self, now: float) -> float:
        """Wait on; return until when. A loop that was blocked for that long may still have to read the reply."""
        self._deadline = max(self._deadline, now + self._pause)
        return self._deadline

    def _first(self) -> Reply:
        return self._replies[self.late[0] if self.late else self._plan.in_flight[0]]

    def silence(self) -> RequestTimeoutError:
        if not (messages := self._first().decoder.count):
            return no_answer(self._stream, self._timeout)
        return RequestTimeoutError(
            f"stream {self._stream!r}: the answer to a direct get stopped after {counted(messages, 'message')}, with nothing more for "
            f"{self._timeout:.4g} s (if the API is imported from another account, its export needs response_type stream)"
        )


def no_answer(stream: str, timeout: float, *, connected: bool = True) -> RequestTimeoutError:
    what = "no answer to a direct get" if connected else "the connection was lost and did not come back"
    return RequestTimeoutError(f"stream {stream!r}: {what} within {timeout:.4g} s")
