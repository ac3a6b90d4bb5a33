"""The acknowledged history of a bucket, and what it was at each revision.

`History` learns which messages a server stored from the copies that it republishes, and which of them it removed from
the deleted sequences in ``STREAM.INFO``. It uses no code of the package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

import jetstream_ext.kv as kvx

KEYS: Final = ("a", "b", "a.x", "a.y", "b.x", "s.1", "s.2")
PATTERNS: Final[tuple[tuple[str, ...] | None, ...]] = (
    None,
    ("a.>",),
    ("*",),
    ("s.*",),
    ("a", "b"),
    ("a.*", "b", "nothing"),
    ("nothing.>",),
)
# Seconds. The servers are on this machine; a busy one still answers within this time.
TIMEOUT: Final = 5.0
# Seconds within which an expiry may come between a look at the bucket and the next request.
SOON: Final = timedelta(seconds=1)
# Servers remove messages that expire within such a time in any order.
DISORDER: Final = timedelta(seconds=0.2)
NEVER_GONE: Final = sys.maxsize


def matches(pattern: str, key: str) -> bool:
    """Whether a key matches a pattern; `*` is one token, `>` the rest."""
    wanted, tokens = pattern.split("."), key.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > i
        if i >= len(tokens) or token not in ("*", tokens[i]):
            return False
    return len(tokens) == len(wanted)


def matching(patterns: Sequence[str] | None) -> list[str]:
    return [key for key in KEYS if patterns is None or any(matches(pattern, key) for pattern in patterns)]


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def go_seconds(text: str) -> float:
    """Return the seconds of a TTL as the server writes it."""
    units = {"h": 3600, "m": 60, "s": 1}
    return float(text) if text.isdigit() else sum(int(n) * units[unit] for n, unit in re.findall(r"(\d+)([hms])", text))


@dataclass(eq=False)
class Event:
    """A message that the server acknowledged or wrote itself.

    A revision is also the time from its storing to the storing of the next one. The message was stored during all of
    each such time up to `sure`, and may have been stored during a part of each one up to `possible`.
    """

    seq: int
    key: str
    operation: str
    value: bytes
    time: datetime
    headers: dict[str, str]
    max_age: float = math.inf  # the smallest one that the bucket has had since
    sure: int = NEVER_GONE
    possible: int = NEVER_GONE
    cause: str = ""  # why it is no longer stored
    from_middle: bool = False  # an older message was still stored when it was removed

    @property
    def ttl(self) -> float | None:
        """Its own TTL in seconds: infinite if it never expires, None if it has none."""
        text = self.headers.get("Nats-TTL")
        if text is None:
            return None
        return math.inf if text == "never" else go_seconds(text)

    @property
    def deadline(self) -> datetime | None:
        """When it expires."""
        ttl = self.ttl
        seconds = self.max_age if ttl is None else math.inf if ttl == math.inf else min(ttl, self.max_age)
        return None if seconds == math.inf else self.time + timedelta(seconds=seconds)

    def is_due(self, time: datetime) -> bool:
        return self.deadline is not None and self.deadline <= time

    @property
    def is_rollup(self) -> bool:
        return "Nats-Rollup" in self.headers

    @property
    def shows_expiry(self) -> bool:
        """Whether it shows that messages of the bucket expire on their own."""
        return self.ttl is not None and self.ttl != math.inf

    @property
    def replaced_revision(self) -> int | None:
        """The revision of its key that it says it replaced."""
        expected = None if self.is_rollup else self.headers.get("Nats-Expected-Last-Subject-Sequence")
        other = self.headers.get("Nats-Expected-Last-Subject-Sequence-Subject")
        return int(expected) if expected is not None and other is None else None

    def __repr__(self) -> str:
        ttl = f" ttl={self.headers['Nats-TTL']}" if "Nats-TTL" in self.headers else ""
        gone = f" {self.cause} at {self.sure + 1}…{self.possible + 1}" if self.cause else ""
        return f"<{self.seq}: {self.operation} {self.key}={self.value!r}{ttl}{gone}>"


def operation_of(headers: dict[str, str]) -> str:
    if "Nats-Marker-Reason" in headers:
        return "PURGE"
    return headers.get("KV-Operation", "PUT")


@dataclass(frozen=True)
class View:
    """What a reader of the log can learn from the leader about the stream."""

    last: int
    first: int
    messages: int
    subjects: int
    config_changes: int
    time: datetime


class History:
    """Every message of a bucket from its creation on."""

    def __init__(self, js: JetStreamContext, bucket: str, republished: str) -> None:
        self.js, self.bucket, self.stream = js, bucket, f"KV_{bucket}"
        self.events: list[Event] = []
        self.stored: dict[int, Event] = {}
        self.last = 0
        self.config: dict[str, Any] = {}
        self.created = ""
        self.view: View | None = None
        self.expires = False
        """Whether the bucket or a message has ever had a TTL."""
        self.silent_removals = False
        """Whether messages disappeared that no newer message of their keys replaced."""
        self.config_changes = 0
        self._republished = republished
        self._heard: dict[int, Msg] = {}
        self._arrived = asyncio.Event()
        self._histories: list[tuple[int, int]] = []
        self._subscription: Any = None

    async def open(self) -> None:
        async def hear(msg: Msg) -> None:
            assert msg.headers is not None
            self._heard[int(msg.headers["Nats-Sequence"])] = msg
            self._arrived.set()

        self._subscription = await self.js._nc.subscribe(f"{self._republished}.>", cb=hear)

    async def close(self) -> None:
        await self._subscription.unsubscribe()

    # -- learning --------------------------------------------------------------------------------------------------

    async def sync(self, cause: str = "") -> None:
        """Learn what was stored and removed since the last call; `cause` is why messages are gone that nothing replaced."""
        info = await self._info()
        self.created = self.created or info["created"]
        assert info["created"] == self.created
        state, before = info["state"], self.last
        self._note_config(info["config"])
        for seq in range(before + 1, state["last_seq"] + 1):
            event = await self._learn(seq)
            self.expires = self.expires or event.ttl is not None
            self.events.append(event)
            self.stored[seq] = event
        self.last = state["last_seq"]
        deleted = set(state.get("deleted") or ())
        for seq in [seq for seq in self.stored if seq < state["first_seq"] or seq in deleted]:
            self.stored[seq].from_middle = state["first_seq"] < seq
            self._remove(self.stored.pop(seq), before, parse_time(info["ts"]), cause)
        self.view = View(
            self.last,
            state["first_seq"],
            state["messages"],
            state.get("num_subjects", 0),
            self.config_changes,
            parse_time(info["ts"]),
        )

    async def _info(self) -> dict[str, Any]:
        """Return what the stream's leader answers to STREAM.INFO; during an election, wait for the next leader."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(nats.errors.TimeoutError, nats.errors.NoRespondersError):
                    answer = await self.js._nc.request(
                        f"$JS.API.STREAM.INFO.{self.stream}", b'{"deleted_details":true}', timeout=TIMEOUT
                    )
                    info: dict[str, Any] = json.loads(answer.data)
                    if "error" not in info:
                        return info
                    if info["error"]["code"] != 503:
                        raise RuntimeError(f"{self.stream}: {info['error']}")
                await asyncio.sleep(0.05)

    def _note_config(self, config: dict[str, Any]) -> None:
        self.config_changes += config != self.config
        self.config = config
        if not self._histories or self._histories[-1][1] != config["max_msgs_per_subject"]:
            self._histories.append((self.last, config["max_msgs_per_subject"]))
        self.expires = self.expires or config["max_age"] > 0
        for event in self.stored.values():
            event.max_age = min(event.max_age, self.max_age)

    @property
    def max_age(self) -> float:
        return self.config["max_age"] / 1e9 or math.inf

    @property
    def history(self) -> int:
        return int(self.config["max_msgs_per_subject"])

    async def _learn(self, seq: int) -> Event:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while seq not in self._heard:
                    self._arrived.clear()
                    await self._arrived.wait()
        if seq in self._heard:
            msg = self._heard.pop(seq)
            headers = dict(msg.headers or {})
            subject, value = headers["Nats-Subject"], msg.data
            time = parse_time(headers["Nats-Time-Stamp"])
        else:  # stored while this client was reconnecting
            found = await self.js.get_msg(self.stream, seq)
            headers, subject, value = dict(found.headers or {}), str(found.subject), found.data or b""
            answer = await self.js._nc.request(f"$JS.API.STREAM.MSG.GET.{self.stream}", b'{"seq":%d}' % seq, timeout=30)
            time = parse_time(json.loads(answer.data)["message"]["time"])
        key = subject.removeprefix(f"$KV.{self.bucket}.")
        return Event(seq, key, operation_of(headers), value, time, headers, max_age=self.max_age)

    def _remove(self, event: Event, before: int, now: datetime, cause: str) -> None:
        successor = self._successor(event, before)
        end = self.last if successor is None else successor.seq - 1
        deadline = event.deadline
        if successor is not None and not cause and (deadline is None or successor.time < deadline):
            event.sure, event.possible, event.cause = end, end, "replaced"
            return
        self.silent_removals = True
        if cause:
            event.sure, event.possible, event.cause = before - 1, end, cause
        elif deadline is None or deadline > now:  # a limit of the stream removed it when a message was stored
            event.sure, event.possible, event.cause = before, max(before, self.last - 1), "limits"
        else:
            later = (newer.seq - 2 for newer in self.events[before:] if newer.time > deadline)
            event.sure = max(next(later, self.last - 1), before - 1)
            event.possible = max(end, before)
            event.cause = "expired" if event.ttl is not None and event.ttl <= event.max_age else "max_age"

    def _successor(self, event: Event, before: int) -> Event | None:
        """Return the message that made the server remove `event`, by the history limit or as a rollup."""
        count = 1
        for newer in self.events[event.seq :]:
            if newer.key == event.key:
                count += newer.seq in self.stored or newer.possible >= before
                history = next(history for since, history in reversed(self._histories) if since < newer.seq)
                if newer.is_rollup or count > history > 0:
                    return newer if newer.seq > before else None
        return None

    # -- the truth -------------------------------------------------------------------------------------------------

    def of_key(self, key: str) -> list[Event]:
        return [event for event in self.events if event.key == key]

    def event(self, revision: int) -> Event:
        return self.events[revision - 1]

    def revision_at(self, time: datetime) -> int:
        """Return the newest revision stored up to a time, that microsecond included."""
        return max((event.seq for event in self.events if event.time <= time), default=0)

    def known_at(self, time: datetime) -> int:
        """Return what the stored messages show of `revision_at`: the last revision before the first later one."""
        return min((event.seq for event in self.stored.values() if event.time > time), default=self.last + 1) - 1

    def truths(self, key: str, revision: int) -> list[Event | None]:
        """Return what a key may have been at a revision: the message that was its newest, or None.

        There is more than one answer only if a message disappeared without a revision between that one and the next.
        """
        time = self.event(revision).time if revision else None
        found: list[Event | None] = []
        for event in reversed(self.of_key(key)):
            if event.seq > revision:
                continue
            if event.possible >= revision:
                found.append(event)
            if event.cause == "deleted" and any(it.key == key and it.seq < event.seq for it in self.stored.values()):
                continue  # docs/key-value.md: "an administrator deleted a single message, and an older one is stored"
            if event.sure >= revision and time is not None and not self._is_due(event, time):
                return found
        return [*found, None]

    def _is_due(self, event: Event, time: datetime) -> bool:
        deadline = self.expiry(event) if event.seq in self.stored else event.deadline
        return deadline is not None and deadline <= time

    def expiry(self, event: Event) -> datetime | None:
        """Return when the server will remove a message, by the limits of now."""
        return replace(event, max_age=self.max_age).deadline

    def goes_silently(self, event: Event) -> bool:
        """Whether a message has expired that leaves no marker; servers remove it a moment later."""
        assert self.view is not None
        marked = event.operation == "PUT" and self.config.get("subject_delete_marker_ttl", 0) > 0
        return not marked and self._is_due(event, self.view.time)

    def expires_soon(self) -> bool:
        """Whether a message expires about now."""
        assert self.view is not None
        return any(event.is_due(self.view.time + SOON) for event in self.stored.values())

    def newest(self, key: str) -> Event | None:
        """Return the newest stored message of a key."""
        return next((event for event in reversed(self.of_key(key)) if event.seq in self.stored), None)

    def find_disorder(self, snap: kvx.KeyValueSnapshot, keys: Iterable[str]) -> list[str]:
        """Return which key that a snapshot lacks was removed after one that it has."""
        keys = list(keys)
        newest = [truths[0] for key in keys if len(truths := self.truths(key, snap.revision)) > 1]
        expired = [event for event in newest if event is not None and event.cause in ("expired", "max_age")]
        here = [event for event in expired if event.key in snap and snap[event.key].revision == event.seq]
        problems = [
            f"has {one}, but not {other}, which expired later"
            for one in here
            for other in expired
            if other.key not in snap and one.deadline and other.deadline and one.deadline + DISORDER < other.deadline
        ]
        # Such limits remove the lowest sequences first.
        last = [[event for event in self.of_key(key) if event.seq <= snap.revision][-1:] for key in keys]
        limited = [event for events in last for event in events if event.cause == "limits" and event.operation == "PUT"]
        problems += [
            f"has {one}, but not {other}, which a limit removed later"
            for one in limited
            for other in limited
            if one.seq < other.seq and one.key in snap and other.key not in snap
        ]
        return problems

    def is_undetectable(self, key: str, revision: int, *, named: bool) -> bool:
        """Whether a read of a revision may lack a key, because nothing that is stored shows that it existed.

        docs/key-value.md, "What leaves no trace": a purge of the stream "removed a key, or its value at R, and the histories
        of other keys account for all the missing messages". Here it was purged or deleted, or its own TTL passed and no stored
        message shows that messages expire. The key must be gone, or written again since; a key that is gone and was named is
        unavailable.
        """
        mine = self.of_key(key)
        newest = max(event.seq for event in mine if event.seq <= revision)
        causes = {event.cause for event in mine if event.seq >= newest}
        here = [event for event in mine if event.seq in self.stored]
        if not causes & {"purged", "trimmed", "deleted", "expired"} or (named and not here):
            return False
        if any(event.seq <= revision and event.operation == "PUT" for event in here) or self._may_expire():
            return False
        missing = max(set(range(1, self.last + 1)) - self.stored.keys(), default=0)
        return missing <= self._explained()

    def is_decidable(self, keys: Iterable[str], revision: int, *, named: bool) -> bool:
        """Whether the newest message up to a revision of each of `keys` is stored, or none can have existed.

        The keys are `named`, or all those that match a pattern.
        """
        if revision == self.last or all(seq in self.stored for seq in range(1, revision + 1)):
            return True
        for key in keys:
            mine = self.of_key(key)
            here = [event for event in mine if event.seq in self.stored]
            old = [event for event in mine if event.seq <= revision]
            if old:
                if old[-1] not in here:
                    return False
            elif here:
                before = here[0].seq if here[0].is_rollup else here[0].replaced_revision
                if len(here) >= self.history if before is None else before > 0:
                    return False
            elif named:
                return False
        return True

    def is_exposed(self, key: str, revision: int, found: int) -> bool:
        """Whether a read of a revision may return the older message `found` of a key.

        docs/key-value.md, "Reads of the past": another client "wrote a value with a TTL over an older message of its key,
        in a bucket with a history above 1, and the value expired".
        """
        newer = [event for event in self.of_key(key) if found < event.seq <= revision]
        return self.history != 1 and bool(newer) and all(event.cause == "expired" for event in newer)

    def _may_expire(self) -> bool:
        """Whether the bucket or messages of it show that messages expire."""
        assert self.view is not None
        if self.max_age < (self.view.time - parse_time(self.created)).total_seconds():
            return True
        return self.config.get("subject_delete_marker_ttl", 0) > 0 or any(
            event.shows_expiry for event in self.stored.values()
        )

    def _explained(self) -> int:
        """Return the sequence up to which the histories of stored keys may explain what is missing."""
        explained = 0
        for key in {event.key for event in self.stored.values()}:
            mine = [event for event in self.stored.values() if event.key == key]
            if len(mine) >= self.history:
                before = mine[0].replaced_revision
                explained = max(explained, mine[0].seq if before is None else before)
        rollups = (event.seq for event in self.stored.values() if event.is_rollup)
        return max(explained, max(rollups, default=0))


@dataclass
class Tally:
    """What a campaign has done."""

    operations: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    exact: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    decidable: int = 0
    decided: int = 0

    def __str__(self) -> str:
        lines = [f"{self.operations} operations, {sum(self.checks.values())} checks"]
        lines += [f"  {name}: {count}, {self.exact[name]} of them exact" for name, count in sorted(self.checks.items())]
        lines += [f"  {name}: {count}" for name, count in sorted(self.errors.items())]
        lines += [f"  {self.decided} of {self.decidable} reads with an undamaged history were exact"]
        return "\n".join(lines)


def disagreement(
    key: str,
    entry: kvx.KeyValueEntry | None,
    truths: Iterable[Event | None],
    history: History,
    *,
    deletes: bool = False,
) -> list[str]:
    """Return what is wrong with the entry of a key (None: it is not there), if it equals none of `truths`."""
    truths = list(truths)
    for truth in truths:
        if entry is None:
            if truth is None or (truth.operation != "PUT" and not (deletes and truth.seq in history.stored)):
                return []
        elif truth is not None and (truth.operation == "PUT" or deletes):
            found = (entry.key, entry.revision, entry.created, entry.operation, entry.value)
            if found == (key, truth.seq, truth.time, truth.operation, truth.value):
                return []
    return [f"{key}: {entry} instead of {truths}"]
