"""Reading a bucket's stream without being misled by who answers.

Direct gets are answered by whichever replica or mirror is free. A replica may lag. A mirror may hold a part of the
bucket only, and answers all the same. So an answer counts only if it shows that the one who gave it *has* the sequence
that the leader had when the read began, and if he is the bucket's own stream or a mirror of all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from nats.js.errors import NotFoundError

from jetstream_ext.client.api import Api
from jetstream_ext.client.leader import LAG_PAUSE
from jetstream_ext.client.replies import read_blocks
from jetstream_ext.client.whole import read_proved
from jetstream_ext.errors import MessagesLostError, RequestTimeoutError, ServerError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.records import Record, records
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Request
from jetstream_ext.protocol.plans import OneAnswer, Scan

_LOG_BATCH = 16_000
_HISTORY_BATCH = 1_000
_NO_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole reply: the messages of one moment."""

    stream: str
    """Who gave it; nothing, if there are no messages."""
    records: list[Record]
    cut: bool
    """There is more, which did not fit."""
    up_to_seq: int
    """The newest sequence that the one who answered had (`multi_last` only)."""


class _Patience:
    """A bounded wait for somebody who can answer."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._loop = asyncio.get_running_loop()
        self.reset()

    def reset(self) -> None:
        """Start anew: there was progress."""
        self._end = self._loop.time() + self._bucket.timeout

    async def pause(self, why: str) -> None:
        """Wait a moment before the next try.

        Raises:
            RequestTimeoutError: It has been too long.
        """
        if self._loop.time() >= self._end:
            raise RequestTimeoutError(f"bucket {self._bucket.name!r}: for {self._bucket.timeout:g} s {why}")
        await asyncio.sleep(LAG_PAUSE)


class Source:
    """The answers of one read.

    Args:
        bucket: The bucket.
        need: The sequence that whoever answers must have: the leader's newest when the read began.
    """

    def __init__(self, bucket: Bucket, need: int) -> None:
        self._bucket = bucket
        self._need = need
        self._known = {bucket.stream: True}
        self._witness: str | None = None

    async def last_of(self, subjects: Sequence[str], *, limited: bool = True) -> Answer:
        """Return the last message of every subject that matches one of `subjects`, all of one moment.

        Its messages may include that of one more subject.

        Args:
            subjects: The subjects and patterns.
            limited: Cut the answer where it would need much memory.

        Raises:
            TooManySubjectsError: They match too many.
            RequestTimeoutError: Nobody who is up to date answered in time.
        """
        patience = _Patience(self._bucket)
        while True:
            # A reply without messages does not tell who gave it, nor what he has; so ask for one that there is.
            witness = self._witness or await self._find_witness()
            if witness is None:
                return Answer("", [], cut=False, up_to_seq=self._need)
            limit = DEFAULT_MAX_BYTES if limited else _NO_LIMIT
            request = Request(multi_last=(*subjects, witness), max_bytes=limit)
            answer = await self._ask(request)
            if answer is None:
                why = "replies broke off"
            elif not answer.records:
                self._witness = None
                why = "nobody who answers direct gets had what the leader has"
            elif not await self._trusted(answer.stream):
                why = f"only stream {answer.stream!r} answered, which mirrors a part of the bucket"
            elif answer.up_to_seq < self._need:
                why = f"nobody who answers direct gets had revision {self._need}"
            else:
                return answer
            await patience.pause(why)

    async def history(self, subject: str, newest: int) -> list[Record]:
        """Return all messages that one subject has left, by somebody who has its message `newest`.

        Raises:
            RequestTimeoutError: Nobody who has it answered in time.
        """
        found: list[Record] = []
        patience = _Patience(self._bucket)
        while True:
            start = found[-1].seq + 1 if found else 1
            request = Request(seq=start, next_by_subj=subject, batch=_HISTORY_BATCH, max_bytes=DEFAULT_MAX_BYTES)
            answer = await self._ask(request)
            why = "replies broke off"
            if answer is not None:
                if answer.records and not await self._trusted(answer.stream):
                    why = f"only stream {answer.stream!r} answered, which mirrors a part of the bucket"
                else:
                    found += answer.records
                    if answer.cut:
                        continue
                    if found and found[-1].seq >= newest:
                        return found
                    last = await self._bucket.at_leader(last_by_subj=subject)
                    if last is None or last.seq < newest:
                        return found  # it was removed while we looked
                    why = f"nobody who answers direct gets had revision {newest}"
            await patience.pause(why)

    async def log(self, first: int, last: int) -> AsyncGenerator[list[Record], None]:
        """Yield every message of ``first … last`` that there is, in order, proved at the leader.

        Raises:
            RequestTimeoutError: Nobody who has them answered in time.
        """
        position, patience = first - 1, _Patience(self._bucket)
        while position < last:
            plan = Scan(seq=position + 1, up_to_seq=last, max_bytes=DEFAULT_MAX_BYTES)
            bucket = self._bucket
            blocks = read_proved(bucket.js, bucket.stream, plan, bucket.timeout, confirm=True, min_seq=None)
            stranger = ""
            async with aclosing(blocks):
                async for block in blocks:
                    if not await self._trusted(block.stream):
                        stranger = block.stream
                        break
                    position = block.seqs[-1]
                    patience.reset()
                    yield records(block)
            if not stranger:
                return
            await patience.pause(f"only stream {stranger!r} answered, which mirrors a part of the bucket")

    async def catch_up(self, position: int, take: Callable[[list[Record]], None]) -> Record | None:
        """Hand over the messages behind `position`, up to an end that no reply of this read has passed.

        Returns:
            The last one, or None.

        Raises:
            RequestTimeoutError: Nobody who has them answered in time.
        """
        newest: Record | None = None
        patience = _Patience(self._bucket)
        while True:
            # Nobody who answered so far can have had more than the leader has now. The next reply must reach that.
            leader = (await self._bucket.facts()).last
            request = Request(seq=position + 1, batch=_LOG_BATCH, max_bytes=DEFAULT_MAX_BYTES)
            answer = await self._ask(request)
            why = "replies broke off"
            if answer is not None:
                if answer.records and not await self._trusted(answer.stream):
                    why = f"only stream {answer.stream!r} answered, which mirrors a part of the bucket"
                else:
                    if answer.records:
                        take(answer.records)
                        newest = answer.records[-1]
                        position = newest.seq
                        patience.reset()
                    if answer.cut:
                        continue
                    if position >= leader:
                        return newest
                    missing = await self._bucket.at_leader(seq=position + 1, next_by_subj=">")
                    if missing is None or missing.seq > leader:
                        return newest
                    why = f"nobody who answers direct gets had revision {missing.seq}"
            await patience.pause(why)

    async def _ask(self, request: Request) -> Answer | None:
        """Return the reply to one request, or None: it broke off."""
        bucket, plan = self._bucket, OneAnswer(request)
        found: list[Record] = []
        stream = ""
        try:
            async with aclosing(read_blocks(bucket.js, bucket.stream, plan, bucket.timeout)) as blocks:
                async for block in blocks:
                    stream = block.stream
                    found += records(block)
        except MessagesLostError:
            return None
        end = plan.end
        assert end is not None
        return Answer(stream, found, cut=end.num_pending > 0, up_to_seq=end.up_to_seq or 0)

    async def _find_witness(self) -> str | None:
        """Return a subject that has a message now, or None: the bucket is empty."""
        newest = await self._bucket.at_leader(last_by_subj=self._bucket.subject(">"))
        self._witness = None if newest is None else newest.subject
        return self._witness

    async def _trusted(self, stream: str) -> bool:
        """Return whether `stream` has all of the bucket."""
        known = self._known.get(stream)
        if known is None:
            known = self._known[stream] = await self._mirrors_all(stream)
        return known

    async def _mirrors_all(self, stream: str) -> bool:
        try:
            info = await Api(self._bucket.js, self._bucket.timeout).ask(f"STREAM.INFO.{stream}")
        except (NotFoundError, ServerError):
            return False  # of another account or domain: nothing is known of it
        mirror = info["config"].get("mirror") or {}
        part = ("filter_subject", "subject_transforms", "opt_start_seq", "opt_start_time")
        return mirror.get("name") == self._bucket.stream and not any(mirror.get(name) for name in part)
