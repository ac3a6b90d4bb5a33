"""Reading a bucket's stream without being misled by who answers.

Direct gets are answered by whichever replica or mirror is free. A replica may lag. A mirror may hold a part of the
bucket only, or what the bucket has long forgotten, and answers all the same. So an answer counts only if it shows that
the one who gave it *has* the sequence that the leader had when the read began, and that it is the bucket's own stream
or a mirror that takes in all of it and keeps it for as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from nats.js.errors import NotFoundError

from jetstream_ext.client.api import LAG_PAUSE, Api
from jetstream_ext.client.replies import read_blocks
from jetstream_ext.client.verified_read import read_verified
from jetstream_ext.errors import MessagesLostError, RequestTimeoutError, ServerError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import Record, Records, record
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Request
from jetstream_ext.protocol.plans import OneAnswer
from jetstream_ext.protocol.scan import Scan

_LOG_BATCH = 16_000
_NO_LIMIT = 1 << 31
_FIRST_PAUSE = 0.001
# What a mirror must have in common with its origin to hold the same messages for the same time.
_SAME = ("max_msgs_per_subject", "max_age", "allow_msg_ttl")
_PART = ("filter_subject", "subject_transforms", "opt_start_seq", "opt_start_time")


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole reply: the messages of one moment."""

    stream: str
    """Who gave it; nothing, if there are no messages."""
    records: Records
    pending: int
    """How many more there are, which did not fit."""
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
        self._next = _FIRST_PAUSE

    async def pause(self, why: str) -> None:
        """Wait a moment before the next try; a little at first, because somebody else may answer it.

        Raises:
            RequestTimeoutError: It has been too long.
        """
        if self._loop.time() >= self._end:
            raise RequestTimeoutError(f"bucket {self._bucket.name!r}: for {self._bucket.timeout:g} s {why}")
        await asyncio.sleep(self._next)
        self._next = min(LAG_PAUSE, self._next * 1.5)


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

    async def last_of(self, subjects: Sequence[str], *, up_to: Record | None = None, limited: bool = True) -> Answer:
        """Return the last message of every subject that matches one of `subjects`, all of one moment.

        Its messages may include that of one more subject.

        Args:
            subjects: The subjects and patterns.
            up_to: Look no further than this message, which must be stored still; see `newest_up_to`.
            limited: Cut the answer where it would need much memory.

        Raises:
            TooManySubjectsError: They match too many.
            RequestTimeoutError: Nobody who is up to date answered in time.
            LookupError: `up_to` is not stored any more.
        """
        patience = _Patience(self._bucket)
        while True:
            # A reply without messages does not tell who gave it, nor what it has; so ask for one that there is.
            witness = up_to.subject if up_to is not None else self._witness or await self._find_witness()
            if witness is None:
                return Answer("", Records(), pending=0, up_to_seq=self._need)
            request = Request(
                multi_last=(*subjects, witness),
                up_to_seq=None if up_to is None else up_to.seq,
                max_bytes=DEFAULT_MAX_BYTES if limited else _NO_LIMIT,
            )
            answer = await self._ask(request)
            if answer is None:
                why = "replies broke off"
            elif not len(answer.records):
                self._witness = None
                why = "nobody who answers direct gets had what the leader has"
            elif not await self._trusted(answer.stream):
                why = _strange(answer.stream)
            elif up_to is not None:
                # In ascending order: where nothing was cut off, the last one is the newest up to that point.
                if answer.pending or answer.records.seqs[-1] == up_to.seq:
                    return answer
                if await self._bucket.at_leader(seq=up_to.seq) is None:
                    raise LookupError
                why = f"nobody who answers direct gets had revision {up_to.seq}"
            elif answer.up_to_seq < self._need:
                why = f"nobody who answers direct gets had revision {self._need}"
            else:
                return answer
            await patience.pause(why)

    async def newest_up_to(self, revision: int, first: int) -> Record | None:
        """Return the newest message up to `revision` that the leader still has, or None.

        Args:
            revision: The revision.
            first: The lowest sequence that there can be.
        """
        found = await self._bucket.at_leader(seq=revision)
        if found is not None:
            return record(found)
        low, high, newest = first, revision - 1, None
        while low <= high:
            middle = (low + high + 1) // 2
            found = await self._bucket.at_leader(seq=middle, next_by_subj=">")
            if found is None or found.seq > revision:
                high = middle - 1
            else:
                newest, low = record(found), found.seq + 1
        return newest

    async def oldest_of(self, subject: str, after: int) -> tuple[Record, int] | None:
        """Return the oldest message of a subject, and how many it has; None: it has none.

        Args:
            subject: The subject.
            after: A sequence up to which it is known to have none.

        Raises:
            RequestTimeoutError: Nobody who knows that answered in time.
        """
        patience = _Patience(self._bucket)
        request = Request(seq=1, next_by_subj=subject, batch=1, max_bytes=DEFAULT_MAX_BYTES)
        while True:
            answer = await self._ask(request)
            if answer is None:
                why = "replies broke off"
            elif not len(answer.records):
                if await self._bucket.at_leader(last_by_subj=subject) is None:
                    return None
                why = "nobody who answers direct gets had what the leader has"
            elif not await self._trusted(answer.stream):
                why = _strange(answer.stream)
            elif answer.records.seqs[0] <= after:
                why = f"nobody who answers direct gets had revision {after + 1}"
            else:
                return answer.records[0], answer.pending + 1
            await patience.pause(why)

    async def log(self, first: int, last: int) -> AsyncGenerator[Records, None]:
        """Yield every message of ``first … last`` that there is, in order, proved at the leader.

        Raises:
            RequestTimeoutError: Nobody who has them answered in time.
        """
        position, patience = first - 1, _Patience(self._bucket)
        while position < last:
            plan = Scan(seq=position + 1, up_to_seq=last, max_bytes=DEFAULT_MAX_BYTES)
            bucket = self._bucket
            blocks = read_verified(bucket.js, bucket.stream, plan, bucket.timeout, confirm=True, min_seq=None)
            stranger = ""
            async with aclosing(blocks):
                async for block in blocks:
                    if not await self._trusted(block.stream):
                        stranger = block.stream
                        break
                    position = block.seqs[-1]
                    patience.reset()
                    records = Records()
                    records.add(block)
                    yield records
            if not stranger:
                return
            await patience.pause(_strange(stranger))

    async def catch_up(self, position: int, take: Callable[[Records], None]) -> Record | None:
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
            leader = (await self._bucket.state()).last_seq
            request = Request(seq=position + 1, batch=_LOG_BATCH, max_bytes=DEFAULT_MAX_BYTES)
            answer = await self._ask(request)
            why = "replies broke off"
            if answer is not None:
                if len(answer.records) and not await self._trusted(answer.stream):
                    why = _strange(answer.stream)
                else:
                    if len(answer.records):
                        take(answer.records)
                        newest = answer.records[-1]
                        position = newest.seq
                        patience.reset()
                    if answer.pending:
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
        records = Records()
        stream = ""
        try:
            async with aclosing(read_blocks(bucket.js, bucket.stream, plan, bucket.timeout)) as blocks:
                async for block in blocks:
                    stream = block.stream
                    records.add(block)
        except MessagesLostError:
            return None
        end = plan.end
        assert end is not None
        return Answer(stream, records, pending=end.num_pending, up_to_seq=end.up_to_seq or 0)

    async def _find_witness(self) -> str | None:
        """Return a subject that has a message now, or None: the bucket is empty."""
        # The first message, not the last: it is found at once in a bucket of any size, it seldom goes away, and of the
        # last one servers may say that there is none where its sequence was deleted.
        oldest = await self._bucket.at_leader(seq=1, next_by_subj=">")
        self._witness = None if oldest is None else oldest.subject
        return self._witness

    async def _trusted(self, stream: str) -> bool:
        """Return whether `stream` holds what the bucket holds."""
        known = self._known.get(stream)
        if known is None:
            known = self._known[stream] = await self._mirrors_all(stream)
        return known

    async def _mirrors_all(self, stream: str) -> bool:
        try:
            info = await Api(self._bucket.js, self._bucket.timeout).ask(f"STREAM.INFO.{stream}")
        except (NotFoundError, ServerError):
            return False  # of another account or domain: nothing is known of it
        found = info["config"]
        mirror = found.get("mirror") or {}
        if mirror.get("name") != self._bucket.stream or any(mirror.get(name) for name in _PART):
            return False
        own = (await self._bucket.state()).config
        return all(found.get(name) == own.get(name) for name in _SAME)


def _strange(stream: str) -> str:
    return f"only stream {stream!r} answered, a mirror that does not hold the same as the bucket"
