"""The state of a worker: what its handler sees, how it is read at a start, and the messages that store its changes.

The output stream holds the newest value of each key, on a subject of the key. Each commit stores the changed keys with the
outputs and the position, in one fenced batch. So no other worker can change a key between a claim of the position, which is behind
everything that earlier workers of the name have stored, and the first commit: what is read then is the state of that position.

A call of the handler changes the keys at once, and what they were before is kept until the changes are stored. So a call that
fails is undone, and so are calls that were made while the commit of an earlier one was on its way, and are dropped with it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import ItemsView, Iterable, Iterator, KeysView, MutableMapping, ValuesView
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote
from zlib import crc32

from nats.js import JetStreamContext

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import HistoryUnavailableError, RequestTimeoutError, StreamConfigMismatchError
from jetstream_ext.kv.bucket import KeyedStream
from jetstream_ext.kv.entries import DELETE_HEADERS, ROLLUP_HEADERS
from jetstream_ext.kv.present import read_unchanged
from jetstream_ext.log.job import Job
from jetstream_ext.protocol.advice import enable_stream
from jetstream_ext.protocol.headers import parse_time
from jetstream_ext.protocol.options import kind_of, ttl_value
from jetstream_ext.protocol.records import Total
from jetstream_ext.protocol.subjects import key_tokens
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import NEVER, TTL, BatchMessage, Entry

_log = get_logger("log")

_BITS: Final = (1 << 48) - 1  # of a checksum
# Seconds for which the message of a deleted key is stored, if nothing older would show behind it.
_DELETED: Final = 86_400
# Seconds for which the leader's clock is known after a look that took at most so long, or longer.
_CLOCK, _QUICK, _CLOCK_OTHERWISE = 60.0, 0.1, 1.0
_SKEW: Final = 5  # seconds by which the clocks of the stream's replicas may differ
_SPARE: Final = 1_000  # deadlines that are out of date
_REPORT_EVERY: Final = 2.0  # seconds, while a state is read


@dataclass(slots=True, eq=False)
class _Timed:
    """The TTL of a value in seconds, and when it expires, in seconds since 1970: about, until the change is stored."""

    ttl: int
    expires: float


_Held = tuple[bytes | None, _Timed | None]  # a key at one moment: its value, or None, and its TTL, if it has one

Changes = dict[str, _Held]


class Step(NamedTuple):
    """What a call of the handler has changed: each of these keys before and after, and the total of the state then."""

    before: Changes
    after: Changes
    total: Total


NOTHING: Final = Step({}, {}, Total())


class State(MutableMapping[str, bytes]):
    """The state of a worker, as its handler sees it: a dictionary whose changes are stored with the worker's position.

    `exactly_once` makes it, and gives it to each call of the handler. Reads are those of a dictionary in memory. A change is
    seen at once, and stored with the outputs of that call; if the call raises an exception, it is undone. A key is any text
    but the empty one, a value is bytes; as an output that is too large, a key whose subject is too long, or a value that is too
    large, is refused when it is to be stored. A copy is a plain dictionary.

    Raises:
        TypeError: On a change: a key is not a str, or a value is not bytes. This ends the worker, with dead letters too.
        ValueError: On a change: a key is empty, or UTF-8 cannot encode it.
        RuntimeError: On a change: the handler is not running.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._held: dict[str, bytes] = {}
        self._timed: dict[str, _Timed] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; some are out of date
        self._before: Changes | None = None  # the keys that the running call of the handler has changed
        self._misuse: Exception | None = None

    def __getitem__(self, key: str) -> bytes:
        return self._held[key]

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    if not TYPE_CHECKING:  # that of a Mapping is slow, and has the types

        def get(self, key, default=None):
            """Return the value of a key, or the default if the state does not have it."""
            return self._held.get(key, default)

    def keys(self) -> KeysView[str]:
        """Return the keys."""
        return self._held.keys()

    def values(self) -> ValuesView[bytes]:
        """Return the values."""
        return self._held.values()

    def items(self) -> ItemsView[str, bytes]:
        """Return the pairs of key and value."""
        return self._held.items()

    def popitem(self) -> tuple[str, bytes]:
        """Remove the newest key; return it and its value."""
        if not self._held:
            raise KeyError("the state has no keys")
        key, value = self._held.popitem()  # unlike `reversed`, this is fast behind many removed keys
        self._held[key] = value
        return key, self.pop(key)

    def __reduce__(self) -> tuple[type[dict[str, bytes]], tuple[dict[str, bytes]]]:
        return dict, (dict(self._held),)  # a copy is a dictionary

    def __setitem__(self, key: str, value: bytes) -> None:
        self._change(key, value)

    def __delitem__(self, key: str) -> None:
        self._held[key]  # or KeyError
        self._note(key)
        self._put(key, None, None)

    def put(self, key: str, value: bytes, ttl: TTL | None = None) -> None:
        """Set a key that expires by itself; as a plain assignment does, this replaces the key's value and its TTL.

        Args:
            key: The key.
            value: The value.
            ttl: Whole seconds from 1 to 100 years, or a timedelta of whole seconds. The key is gone when the server's clock
                shows the time at which the message of this change was stored, plus this, but not before the TTL of the stream's
                delete markers, if it writes some (``subject_delete_marker_ttl``). None or `NEVER`: it does not expire.

        Raises:
            StreamConfigMismatchError: The output stream lacks ``allow_msg_ttl``. This ends the worker, with dead letters too.
            ValueError, TypeError: `ttl` is out of range, or of another type; or as for `State`.

        Requires: ``allow_msg_ttl`` on the output stream (ADR-43).
        """
        self._change(key, value, None if ttl is None or ttl is NEVER else self._lifetime(int(ttl_value(ttl))))

    def __repr__(self) -> str:
        return f"<State of {self._job.where}: {counted(len(self), 'key')}>"

    def _change(self, key: object, value: object, timed: _Timed | None = None) -> None:
        if not isinstance(key, str) or not isinstance(value, bytes):
            given = f"a key of the state must be str, not {kind_of(key)}"
            if isinstance(key, str):
                given = f"the value of key {key!r} must be bytes, not {kind_of(value)}"
            self._misuse = TypeError(f"{self._job.where}: {given}; correct the handler, and start the worker again")
            raise self._misuse
        if key not in self._held:
            key_tokens(key)
        self._note(key)
        self._put(key, value, timed)

    def _note(self, key: str) -> None:
        if self._before is None:
            raise RuntimeError(f"{self._job.where}: only the handler can change the state, while it runs")
        if key not in self._before:
            self._before[key] = self._held.get(key), self._timed.get(key)

    def _put(self, key: str, value: bytes | None, timed: _Timed | None) -> None:
        if value is None:
            self._held.pop(key, None)
        else:
            self._held[key] = value
        if timed is not None:
            self._timed[key] = timed
            heapq.heappush(self._deadlines, (timed.expires, key))
            if len(self._deadlines) > 2 * len(self._timed) + _SPARE:  # a TTL that is renewed leaves one each time
                self._deadlines = [(each.expires, key) for key, each in self._timed.items()]
                heapq.heapify(self._deadlines)
        elif self._timed:
            self._timed.pop(key, None)

    def _lifetime(self, ttl: int) -> _Timed:
        job = self._job
        if not job.state.config.get("allow_msg_ttl"):
            self._misuse = StreamConfigMismatchError(
                f"{job.where}: keys of the state cannot have a TTL there; {enable_stream(job.output_stream, 'ttl')}",
                diff={"allow_msg_ttl": (True, False)},
            )
            raise self._misuse
        seconds = job.state.lifetime(ttl)
        return _Timed(seconds, job.now() + seconds)


class WorkerState(State):
    """The state as the worker reads and stores it.

    Attributes:
        total: Of what is stored and changed.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.total: Total = Total()

    @property
    def misuse(self) -> Exception | None:
        """The error of a change that is the program's, and not one of an input."""
        return self._misuse

    # -- calls of the handler -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a call of the handler: remove what has expired."""
        self._before = {}
        while self._deadlines and self._deadlines[0][0] <= self._job.now():
            expires, key = heapq.heappop(self._deadlines)
            timed = self._timed.get(key)
            if timed is not None and timed.expires == expires:
                self._put(key, None, None)

    def end(self, *, failed: bool) -> Step:
        """End a call of the handler; return what it has changed: nothing if it has failed."""
        before, self._before = self._before or {}, None
        if failed:
            self._restore(before)
            before = {}
        after, check = Changes(), self.total.check
        for key, was in before.items():
            now = self._held.get(key), self._timed.get(key)
            if now == was:
                continue
            after[key] = now
            for (value, timed), sign in ((was, -1), (now, 1)):
                if value is not None and timed is None:
                    check += sign * crc32(value, crc32(f"{key}\0".encode()))
        self.total = self._total(check)
        return Step(before, after, self.total)

    def _total(self, check: int) -> Total:
        plain, timed = len(self._held) - len(self._timed), self._timed
        if not timed:
            return Total(plain, check & _BITS)
        newest = timed[next(reversed(timed))]
        first, last = int(self._deadlines[0][0]) - _SKEW, int(newest.expires) - _SKEW
        return Total(plain, check & _BITS, len(timed), max(0, min(first, last)), max(0, last))

    def undo(self, steps: Iterable[Step], total: Total) -> None:
        """Take back what the newest calls of the handler have changed, the last one first; `total` is that of before."""
        self.total = total
        for step in steps:
            self._restore(step.before)

    def _restore(self, before: Changes) -> None:
        for key, was in before.items():
            self._put(key, *was)

    # -- the output stream --------------------------------------------------------------------------------------------

    def messages(self, before: Changes, changes: Changes) -> list[Entry]:
        """Return what stores changes: a message for each key; `before` is what is stored of these keys.

        When a value expires, its stream shows the one before, if it still keeps that. So a value that does not live as long
        as the one before is stored behind a deletion.
        """
        job, made = self._job, list[Entry]()
        headers, forever = ROLLUP_HEADERS if job.rolls_up else {}, job.forever
        for key, (value, timed) in changes.items():
            subject, (stored, until) = job.state_prefix + key_tokens(key), before[key]
            outlived = timed is not None and stored is not None and (until is None or until.ttl > timed.ttl)
            if value is None or (outlived and not job.keeps_one):
                ttl = _DELETED if job.keeps_one and job.state.config.get("allow_msg_ttl") else forever
                made.append(BatchMessage(subject, b"", headers={**DELETE_HEADERS, **headers}, msg_ttl=ttl))
            if value is None:
                continue
            if headers or timed is not None or forever is not None:
                ttl = forever if timed is None else timed.ttl
                made.append(BatchMessage(subject, value, headers=headers, msg_ttl=ttl))
            else:
                made.append((subject, value))  # which costs a tenth
        return made

    async def stored(self, changes: Changes, seq: int) -> None:
        """Take over that changes are stored in the batch that ends with the message `seq`: by its time, keys expire."""
        job, expiring = self._job, [(key, timed) for key, (_, timed) in changes.items() if timed is not None]
        if expiring:
            find = partial(get_at_leader, job.context, job.output_stream, {"seq": seq}, job.timeout)
            found = await Retry(job.patience).call(find)
            at = job.now() if found is None else found.time.timestamp()
            for key, timed in expiring:
                timed.expires = at + timed.ttl
                if self._timed.get(key) is timed:
                    self._put(key, self._held[key], timed)

    async def keep_time(self) -> None:
        """Ask for the time by the leader's clock, unless that was done lately or no key expires."""
        job, known_for = self._job, _CLOCK if self._job.unsure < _QUICK else _CLOCK_OTHERWISE
        if self._timed and asyncio.get_running_loop().time() - job.looked > known_for:
            await job.look()

    async def load(self, fence: int, expected: Total) -> None:
        """Read the state behind a claim of the position, the message `fence`.

        Raises:
            HistoryUnavailableError: What is stored is not the `expected` state: some of it was removed, or is of others.
        """
        job, retry = self._job, Retry(self._job.patience)
        while True:
            try:
                await self._read(fence, expected)
                break
            except Exception as error:
                await retry.pause_if_transient(error)
        found, where = self.total, f"{job.state_prefix}>"
        if not expected.allows(found, job.now() + job.unsure):
            raise HistoryUnavailableError(
                f"{job.where}: the state on {where!r} is not the one that was stored with the position: it has {found.keys:,} of "
                f"{counted(expected.keys, 'key')} without a TTL, {found.timed:,} of {expected.timed:,} with one, or others. Messages there were "
                "removed, or are those of another program, of a group before its reset, or from before the position was removed. Nothing "
                f"was handled; restore them, or begin again: purge {where!r} and the position on {job.record!r}"
            )
        log_state(_log, job.what, "state read", keys=len(self))

    async def _read(self, fence: int, expected: Total) -> None:
        job, clock = self._job, asyncio.get_running_loop().time
        js, reported = job.context.js, clock()
        assert isinstance(js, JetStreamContext)  # only those publish

        def report(count: int) -> None:
            nonlocal reported
            if clock() - reported > _REPORT_EVERY:
                reported = clock()
                _log.info(
                    "%s: reading its state: %s of about %s", job.what, f"{count:,}", counted(expected.keys, "key")
                )

        source = KeyedStream(js, job.output_stream, prefix=job.state_prefix, timeout=job.timeout)
        state = await source.readable_state()
        if state.last_seq < fence:
            raise RequestTimeoutError(
                f"{job.where}: its leader does not have the position that was just stored, {fence}"
            )
        content = await read_unchanged(source, state, report)
        records, names = content.values, "".join(content.values)
        keys = list(records if "%" not in names and names.isascii() else map(_key_of, records))
        held = dict(zip(keys, [each[1] for each in records.values()], strict=True))
        timed: dict[str, _Timed] = {}
        for tokens, ttl in content.own_ttls().items():
            seconds = job.state.lifetime(int(ttl.total_seconds()))
            timed[_key_of(tokens)] = _Timed(seconds, parse_time(records[tokens][2]).timestamp() + seconds)
        self.begin_with(held, timed)

    def begin_with(self, held: dict[str, bytes], timed: dict[str, _Timed]) -> None:
        """Begin with what is stored: all values, and the TTLs of some of them."""
        self._held, self._timed, self._deadlines = held, {}, []
        for key, each in timed.items():
            self._put(key, held[key], each)
        self.begin()  # removes what has expired
        self._before = None
        plain = {key: value for key, value in held.items() if key not in self._timed} if self._timed else held
        self.total = self._total(sum(map(crc32, plain.values(), map(crc32, [f"{key}\0".encode() for key in plain]))))


def _key_of(tokens: str) -> str:
    """Return the key on a subject; one that no worker has stored, which the total shows, is any other text."""
    return unquote(tokens).encode("utf-8", "replace").decode()
