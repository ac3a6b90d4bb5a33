"""A state machine that changes a bucket at random and compares every read with its history: equal, or a documented error.

The writes and the looks at the server use nats-py alone. The client of the code under test is behind a proxy, so that
operations can happen before its n-th request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest import mock

import nats
import nats.errors
import nats.js.errors
from clients import quiet
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RePublish, StorageType, StreamConfig
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import (
    FencedError,
    HistoryUnavailableError,
    KeyConflictError,
    PositionLostError,
    RequestTimeoutError,
    StreamRecreatedError,
)
from jetstream_ext.kv import present, reads
from jetstream_ext.log import First, LogReader, OffsetStore, Seq, Stored, Time, reading
from jetstream_ext.testing import NatsCluster, NatsServer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "safety_net"))

from frame_proxy import Frame, FrameProxy
from history_model import (
    KEYS,
    NEVER_GONE,
    PATTERNS,
    SOON,
    TIMEOUT,
    Event,
    History,
    Tally,
    View,
    disagreement,
    matches,
    matching,
)


@dataclass
class ReaderState:
    """A reader of the log, and what the model knows about it."""

    reader: LogReader
    history: History
    subject: str | None
    view: View  # when it last checked the stream
    next: int  # every matching message below it was returned or is accounted for
    from_first: bool  # it starts at the oldest message, and has returned none


Op = tuple[Any, ...]

keys = st.sampled_from(KEYS)
patterns = st.sampled_from(PATTERNS)
ttls = st.sampled_from((None, None, 1, 1, 600, "never"))
histories = st.sampled_from((1, 1, 2, 3, 5, 64))
LOG: Final = -1  # the history of a stream that is no bucket and keeps all messages of a subject
back = st.integers(0, 20)
# Where in the history a read of the past goes.
places = st.lists(st.floats(0, 1), min_size=1, max_size=4)
CHANGES: Final = (
    {"max_age": 0},
    {"max_age": 1},
    {"max_age": 3600},
    {"max_msgs_per_subject": 1},
    {"max_msgs_per_subject": 3},
    {"max_msgs_per_subject": 64},
    {"max_msgs": 6, "discard": "old"},
    {"max_msgs": -1},
    {"max_bytes": 700, "discard": "old"},
    {"max_bytes": -1},
)
writes = st.one_of(
    st.tuples(st.just("put"), keys),
    st.tuples(st.just("put"), keys),
    st.tuples(st.just("put"), keys),
    st.tuples(st.just("create"), keys, ttls),
    st.tuples(st.just("update"), keys, st.booleans()),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("erase"), keys, st.sampled_from((None, None, 1))),
    st.tuples(st.just("publish"), keys, ttls, st.booleans()),
)
# The keys of transactions, and operations that often change one of them.
few = st.sampled_from(KEYS[:4])
disturbances = st.tuples(st.sampled_from(("put", "delete")), few)
removals = st.one_of(
    st.tuples(st.just("purge_key"), keys),
    st.tuples(st.just("purge_up_to"), back),
    st.tuples(st.just("keep"), st.integers(1, 6)),
    st.tuples(st.just("delete_message"), back),
    st.tuples(st.just("purge_all")),
)
changes = st.tuples(st.just("change"), st.sampled_from(CHANGES))
expiries = st.just(("expire",))
recreations = st.tuples(st.just("recreate"), histories)
# The operations that a calm bucket does not see.
UNCALM: Final = ("purge_key", "purge_up_to", "keep", "delete_message", "purge_all", "change")
MIRRORS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"same": True},
    {"max_msgs": 3},
    {"max_bytes": 300},
    {"max_age": 1_000_000_000, "duplicate_window": 1_000_000_000},
    {"max_msgs_per_subject": 1},
    {"filter_subject": "a.>"},
    {"opt_start_seq": True},
)
# What happens in the middle of a read: before its n-th request.
interference = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.integers(1, 6), st.lists(st.one_of(writes, writes, removals), min_size=1, max_size=4)),
    st.tuples(st.integers(1, 6), st.lists(st.one_of(changes, recreations, expiries), min_size=1, max_size=1)),
)
Interference = tuple[int, list[Op]] | None
# While a cluster elects a leader. What became of the request shows in the stream.
ELECTION: Final = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
)
REQUESTS: Final = re.compile(r"\.(DIRECT\.GET|STREAM\.INFO|STREAM\.MSG\.GET)\.KV_")

NUMBERS: Final = itertools.count(1)  # of the buckets

# How reads work through a bucket: as they do for small ones, in many small requests, or by the names of the keys.
READINGS: Final[dict[str, dict[str, int]]] = {
    "whole": {},
    "pieces": {"_CHUNK": 2},
    "names": {"_CHUNK": 2, "_DEEP": 0, "_ROWS_PER_LOOKUP": 1},
}


def step(*, bucket: bool = False, **arguments: Any) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Make a rule of a coroutine function. With `bucket`, it reads a log instead if the stream is no bucket."""

    def decorate(function: Callable[..., Awaitable[None]]) -> Any:
        @functools.wraps(function)
        def run(self: HistoryMachine, **drawn: Any) -> None:
            logs = bucket and self.is_log
            self.run(self.read_any_log(drawn.get("during")) if logs else function(self, **drawn))

        return rule(**arguments)(run)

    return decorate


class HistoryMachine(RuleBasedStateMachine):
    """Random operations on one bucket, and reads that are compared with its history."""

    server: ClassVar[NatsServer]
    tally: ClassVar[Tally]
    reading: ClassVar[str] = "whole"
    replicas: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.cleanup = contextlib.AsyncExitStack()
        self.name = f"H{next(NUMBERS)}"
        self.values = self.incarnation = 0
        self.mirrors: list[str] = []
        self.readers: list[ReaderState] = []
        self.committed: dict[str, int] = {}
        self._pending: tuple[int, list[Op]] | None = None
        self._asked: str = ""  # the kinds of the requests since the operations in the middle of a read
        self._failure: Exception | None = None
        self._interfering = asyncio.Lock()
        self.run(self._connect())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    async def _connect(self) -> None:
        self.cleanup.push_async_callback(asyncio.sleep, 0)  # for the sockets to close
        self.cleanup.enter_context(aborted_sockets())
        for name, value in READINGS[self.reading].items():
            self.cleanup.enter_context(mock.patch.object(present if hasattr(present, name) else reads, name, value))
        if self.reading != "whole":
            self.cleanup.enter_context(mock.patch.multiple(reading, _GROUP=8, _REQUEST_BYTES=200))
        self.nc = await connect(self.server.url)
        self.cleanup.push_async_callback(self.nc.close)
        self.js = self.nc.jetstream(timeout=TIMEOUT)
        proxy = await self.cleanup.enter_async_context(FrameProxy(self.server.port, self._pass_on))
        self.far = await connect(proxy.url)  # the client of the code under test
        self.cleanup.push_async_callback(self.far.close)

    def teardown(self) -> None:
        try:
            self.run(self._end())
        finally:
            self.runner.close()

    async def _end(self) -> None:
        async with self.cleanup:
            for stream in [*self.mirrors, f"KV_{self.name}", f"KV_{self.name}_AT"]:
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    await self.js.delete_stream(stream)

    async def _pass_on(self, frame: Frame) -> Frame:
        request = REQUESTS.search(frame.subject)
        if request is not None:
            self._asked += f" {request[1]}"
        if request is not None and self._pending is not None:
            count, ops = self._pending
            self._pending = (count - 1, ops)
            if count == 1:
                self._pending = None
                try:
                    async with self._interfering:
                        await self._apply(ops)
                    self._asked = f" {request[1]}"
                except Exception as error:
                    self._failure = error  # the proxy would only close the connection
        return frame

    # -- writing ---------------------------------------------------------------------------------------------------

    @initialize(
        history=st.sampled_from((1, 1, 2, 2, 3, 5, 64, 64, LOG)),
        storage=st.sampled_from(("file", "memory")),
        markers=st.sampled_from((None, None, 1, 60)),
        max_age=st.sampled_from((0, 0, 0, 1, 3600)),
        calm=st.booleans(),
        rollups=st.booleans(),
    )
    def create(self, history: int, storage: str, markers: int | None, max_age: int, calm: bool, rollups: bool) -> None:
        # In a calm bucket only newer messages of a key remove older ones, so that much of its past is known.
        self.calm = calm
        self.is_log = history == LOG
        self.rollups = rollups and not self.is_log
        self.options: dict[str, Any] = {
            "storage": storage,
            "markers": None if calm else markers,
            "max_age": 0 if calm else max_age,
        }
        self.run(self._create(history))

    async def _create(self, history: int) -> None:
        self.incarnation += 1
        republished = f"{self.name}.{self.incarnation}"
        new = History(self.js, self.name, republished)
        await new.open()
        options = self.options
        # As nats-py creates a bucket, except that single messages may be deleted.
        await self.js.add_stream(
            StreamConfig(
                name=f"KV_{self.name}",
                subjects=[f"$KV.{self.name}.>"],
                max_msgs_per_subject=LOG if self.is_log else history,
                max_age=options["max_age"],
                duplicate_window=min(120, options["max_age"] or 120),
                storage=StorageType(options["storage"]),
                subject_delete_marker_ttl=None if self.is_log else options["markers"],
                allow_rollup_hdrs=not self.is_log,
                allow_msg_ttl=True,
                allow_direct=True,
                allow_atomic=True,
                discard=DiscardPolicy.NEW,
                republish=RePublish(src=">", dest=f"{republished}.>"),
                num_replicas=self.replicas,
            )
        )
        if self.replicas > 1:
            await self._wait_for_interest()
        # Without a record of its limits, the past of a bucket is known only as far as nothing was removed.
        self.recorded = self.calm or (not self.is_log and self.incarnation % 3 > 0)
        if self.recorded:
            await kvx.enable(KeyValue(self.name, f"KV_{self.name}", f"$KV.{self.name}.", self.js, direct=True))
        await new.sync()
        self.history = new
        self.writer = KeyValue(self.name, new.stream, f"$KV.{self.name}.", self.js, direct=True)
        far = self.far.jetstream(timeout=TIMEOUT)
        self.kv = KeyValue(self.name, new.stream, f"$KV.{self.name}.", far, direct=True)

    async def _wait_for_interest(self) -> None:
        """Wait until the server of this client knows that the new stream takes messages."""
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.js.publish(f"$KV.{self.name}.a", stream="none")
                except nats.js.errors.NoStreamResponseError:
                    await asyncio.sleep(0.02)
                except nats.js.errors.BadRequestError:
                    return  # the stream has answered, because its name is not "none"

    @step(ops=st.lists(writes, min_size=3, max_size=15))
    async def write(self, ops: list[Op]) -> None:
        await self._apply(ops)

    @step(ops=st.lists(writes, min_size=10, max_size=30))
    async def write_more(self, ops: list[Op]) -> None:
        await self._apply(ops)

    @step(op=removals)
    async def remove(self, op: Op) -> None:
        await self._apply([op])

    @step(op=changes)
    async def change(self, op: Op) -> None:
        await self._apply([op])

    @step(op=recreations, really=st.integers(0, 3))
    async def recreate(self, op: Op, really: int) -> None:
        if not really:
            await self.apply(op)

    async def _apply(self, ops: Iterable[Op]) -> None:
        for op in ops:
            await self.apply(op)

    async def apply(self, op: Op) -> None:
        """Do what another client or an administrator would do, and learn what it did."""
        if (self.calm and op[0] in UNCALM) or (self.is_log and op[0] == "change" and "max_msgs_per_subject" in op[1]):
            return
        self.tally.operations += 1
        self.values += 1
        history, kind, value = self.history, op[0], b"%d" % self.values
        if kind == "erase" and not self.rollups:
            kind, op = "delete", ("delete", op[1])
        if kind == "recreate":
            await self.js.delete_stream(history.stream)
            await history.close()
            await self._create(op[1])
            return
        if kind in ("put", "create", "update", "delete", "erase", "publish"):
            refusals = (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.KeyNotFoundError)
            with contextlib.suppress(*refusals, *(ELECTION if self.replicas > 1 else ())):
                await self._write(op, value)
            await history.sync()
            return
        if kind == "expire":
            await self.expire_next()
            return
        await history.sync()
        cause = "purged" if kind == "purge_key" else "trimmed"
        at = max(1, history.last - op[1]) if kind in ("purge_up_to", "delete_message") else 0
        match kind:
            case "purge_all":
                await self.js.purge_stream(history.stream)
            case "purge_key":
                await self.js.purge_stream(history.stream, subject=f"$KV.{self.name}.{op[1]}")
            case "purge_up_to":
                await self.js.purge_stream(history.stream, seq=at)
            case "keep":
                await self.js.purge_stream(history.stream, keep=op[1])
            case "delete_message":
                cause = "deleted"
                if at in history.stored:
                    await self.js.delete_msg(history.stream, at)
            case "change":
                cause = "changed"
                await self._change(op[1])
        await history.sync(cause)

    async def _write(self, op: Op, value: bytes) -> None:
        kind, key = op[:2]
        newest = self.history.newest(key)
        match kind:
            case "put":
                await self.writer.put(key, value)
            case "create":
                headers = {"Nats-Expected-Last-Subject-Sequence": "0" if newest is None else str(newest.seq)}
                if newest is None or newest.operation != "PUT":
                    headers |= self._ttl_headers(op[2])
                    with contextlib.suppress(nats.js.errors.BadRequestError):  # the key has just expired
                        await self.js.publish(f"$KV.{self.name}.{key}", value, headers=headers)
            case "update":
                await self.writer.update(key, value, last=newest.seq if newest is not None and op[2] else 1)
            case "delete":
                await self.writer.delete(key)
            case "erase":
                await self.writer.purge(key, msg_ttl=None if self.calm else op[2])
            case "publish":
                headers = self._ttl_headers(op[2])
                if op[3] and self.rollups:
                    headers["Nats-Rollup"] = "sub"
                await self.js.publish(f"$KV.{self.name}.{key}", value, headers=headers)

    def _ttl_headers(self, ttl: int | str | None) -> dict[str, str]:
        return {} if ttl is None or self.calm else {"Nats-TTL": str(ttl)}

    async def _change(self, options: dict[str, Any]) -> None:
        config = {**self.history.config, **options}
        if "max_age" in options:
            config["max_age"] = options["max_age"] * 1_000_000_000
            config["duplicate_window"] = min(120_000_000_000, config["max_age"] or 120_000_000_000)
        await self._ask(f"STREAM.UPDATE.{self.history.stream}", config)

    async def _ask(self, api: str, request: dict[str, Any]) -> dict[str, Any]:
        answer = await self.nc.request(f"$JS.API.{api}", json.dumps(request).encode(), timeout=TIMEOUT)
        found: dict[str, Any] = json.loads(answer.data)
        if "error" in found:
            raise RuntimeError(f"{api} {request}: {found['error']}")
        return found

    @step(markers=st.sampled_from((True, 1, 60)))
    async def enable(self, markers: int | bool) -> None:
        if self.calm or self.is_log:
            return
        await self.history.sync()
        await kvx.enable(self.kv, ttl=markers)
        await self.history.sync("changed")

    @step(key=keys, ttl=st.sampled_from((1, 600)))
    async def touch(self, key: str, ttl: int) -> None:
        if self.calm or self.is_log:
            return
        history = self.history
        await history.sync()
        expected = history.newest(key)
        try:
            revision = await kvx.touch(self.kv, key, ttl)
        except (KeyConflictError, nats.js.errors.KeyNotFoundError) as error:
            self.tally.errors[f"touch: {type(error).__name__}"] += 1
            assert history.expires_soon() or expected is None or expected.operation != "PUT"
            await history.sync()
        else:
            await history.sync()
            assert expected is not None
            touched = history.event(revision)
            assert (touched.key, touched.value, touched.operation) == (key, expected.value, "PUT")
            assert history.expires_soon() or expected.operation == "PUT"
        self.tally.operations += 1

    @precondition(lambda self: len(self.mirrors) < 2)
    @step(options=st.sampled_from(MIRRORS))
    async def add_mirror(self, options: dict[str, Any]) -> None:
        await self.history.sync()
        own, source = dict(options), dict[str, Any](name=self.history.stream)
        if own.pop("same", False):
            names = ("max_msgs_per_subject", "max_age", "duplicate_window", "allow_msg_ttl")
            own = {name: self.history.config[name] for name in names}
        if own.pop("opt_start_seq", False):
            source["opt_start_seq"] = max(1, self.history.last - 2)
        if "filter_subject" in own:
            source["filter_subject"] = f"$KV.{self.name}.{own.pop('filter_subject')}"
        name = f"{self.name}_M{self.values}_{len(self.mirrors)}"
        own = {"max_age": 0, "max_bytes": -1, "max_msgs": -1, **own}
        await self._ask(
            f"STREAM.CREATE.{name}",
            {
                "name": name,
                "mirror": source,
                "mirror_direct": True,
                "allow_direct": True,
                "storage": self.options["storage"],
                **own,
            },
        )
        self.mirrors.append(name)
        await self._wait_for_mirrors()

    async def _wait_for_mirrors(self) -> None:
        """Give mirrors a moment to catch up; only then they answer."""
        for name in self.mirrors:
            for _ in range(10):
                info = await self._ask(f"STREAM.INFO.{name}", {})
                if info["state"]["last_seq"] >= self.history.last:
                    break
                await asyncio.sleep(0.01)

    @precondition(lambda self: self.mirrors)
    @step(purge=st.booleans())
    async def remove_mirror(self, purge: bool) -> None:
        if purge:
            await self.js.purge_stream(self.mirrors[-1], subject=f"$KV.{self.name}.a")
        else:
            await self.js.delete_stream(self.mirrors.pop())

    @step(really=st.integers(0, 2))
    async def wait(self, really: int) -> None:
        if not really:
            await self.apply(("expire",))

    async def expire_next(self) -> None:
        """Wait until the next message has expired, if that takes less than two seconds."""
        history = self.history
        await history.sync()
        assert history.view is not None
        due = {event: deadline for event in history.stored.values() if (deadline := history.expiry(event)) is not None}
        first = min(due, key=lambda event: due[event], default=None)
        if first is None or (left := (due[first] - history.view.time).total_seconds()) > 2:
            return
        await asyncio.sleep(max(0.0, left))
        with contextlib.suppress(TimeoutError):  # after a change of max_age, servers may remove it much later
            async with asyncio.timeout(5):
                while first.seq in history.stored:
                    await asyncio.sleep(0.05)
                    await history.sync()

    @precondition(lambda self: self.options["storage"] == "file")
    @step(really=st.integers(0, 7))
    async def restart(self, really: int) -> None:
        if really:
            return
        await self.history.sync()
        await asyncio.to_thread(self.server.restart)
        async with asyncio.timeout(30):
            for client in (self.nc, self.far):
                while True:
                    with contextlib.suppress(nats.errors.Error, OSError):
                        await client.flush(1)
                        await client.jetstream(timeout=1).stream_info(self.history.stream)
                        break
                    await asyncio.sleep(0.02)
        await self.history.sync()

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read(
        self,
        name: str,
        call: Callable[[], Awaitable[Any]],
        during: Interference,
        expected: tuple[type[Exception], ...] = (),
    ) -> tuple[Any, Exception | None, list[History], int]:
        """Return the answer or the expected error, the histories that it may be of, and the revision before the call."""
        before = self.history
        await before.sync()
        low = before.last
        self._pending, self._asked = during, ""
        self.tally.operations += 1
        self.tally.checks[name] += 1
        answer = error = only_if_recreated = None
        try:
            answer = await call()
        except (RequestTimeoutError, nats.js.errors.ServiceUnavailableError, *expected) as caught:
            error = caught
        except (StreamRecreatedError, BucketNotFoundError, ValueError) as caught:
            error = only_if_recreated = caught
        finally:
            self._pending = None
            async with self._interfering:
                pass  # operations that outlast the call have ended
        if self._failure is not None:
            raise self._failure
        if only_if_recreated is not None and self.history is before:
            raise only_if_recreated
        if error is not None:
            self.tally.errors[f"{name}: {type(error).__name__}"] += 1
        await self.history.sync()
        return answer, error, [before] if self.history is before else [before, self.history], low

    def _judge(self, name: str, histories: list[History], find_problems: Callable[[History], list[str]]) -> None:
        """Fail unless the answer agrees with one of the histories."""
        problems = [find_problems(history) for history in histories]
        if all(problems):
            lines = [f"{name}, history {histories[0].history}, {self.options}, mirrors {self.mirrors}"]
            lines += ["the bucket was created again during the call; of the old one:"] * (len(histories) - 1)
            lines += problems[0]
            raise AssertionError("\n".join([*lines, *map(repr, histories[0].events)]))
        self.tally.exact[name] += 1

    @step(bucket=True, patterns=patterns, deletes=st.booleans(), during=interference)
    async def snapshot(self, patterns: tuple[str, ...] | None, deletes: bool, during: Interference) -> None:
        # A mirror answers at random.
        for n in range(1 + 2 * len(self.mirrors)):
            await self._snapshot(patterns, deletes, None if n else during)

    async def _snapshot(self, patterns: tuple[str, ...] | None, deletes: bool, during: Interference) -> None:
        stored = set(self.history.stored)
        snap, error, histories, low = await self._read(
            "snapshot", lambda: kvx.snapshot(self.kv, patterns, include_deletes=deletes), during
        )
        if error is not None:
            return
        settled = re.search(r"STREAM\.INFO.* DIRECT\.GET", self._asked) is not None

        def find_problems(history: History) -> list[str]:
            revision = snap.revision
            start = low if history is histories[0] else 0
            if not start <= revision <= history.last:
                return [f"revision {revision} is not one of {start} to {history.last}"]
            problems = [f"{key} does not match" for key in snap.keys() - set(matching(patterns))]
            if snap.unavailable or not snap.complete:
                problems.append(f"unavailable {snap.unavailable}, complete {snap.complete}")
            if revision and revision in history.stored and snap.time != history.event(revision).time:
                problems.append(f"time {snap.time} of revision {revision}")
            for key in matching(patterns):
                truths = history.truths(key, revision)
                # A purge of the stream has no revision: the snapshot may show a part of it.
                removed = [
                    event
                    for event in history.of_key(key)
                    if (event.seq in stored or event.seq > low)
                    and event.cause in ("purged", "trimmed", "deleted", "changed", "limits")
                ]
                if removed or any(truth is not None and history.goes_silently(truth) for truth in truths):
                    truths.append(None)
                # What was removed at the beginning of the stream is known if the leader was asked before the last reply.
                if removed and not (settled and all(event.cause in ("trimmed", "limits") for event in removed)):
                    truths += [*removed, *history.truths(key, low)]
                problems += disagreement(key, snap.get(key), truths, history, deletes=deletes)
            return [*problems, *history.find_disorder(snap, matching(patterns))]

        self._judge("snapshot", histories, find_problems)

    @step(bucket=True, chosen=st.lists(keys, min_size=1, max_size=7, unique=True), during=interference)
    async def get_many(self, chosen: list[str], during: Interference) -> None:
        found, error, histories, low = await self._read("get_many", lambda: kvx.get_many(self.kv, chosen), during)
        if error is not None:
            return

        def find_problems(history: History) -> list[str]:
            problems = [f"{key} was not asked for" for key in found.keys() - set(chosen)]
            start = low if history is histories[0] else 0
            for key in chosen:
                truths = [truth for seq in range(start, history.last + 1) for truth in history.truths(key, seq)]
                problems += disagreement(key, found.get(key), truths, history)
            return problems

        self._judge("get_many", histories, find_problems)

    def _at(self, place: float, by_time: int | None) -> int | datetime:
        """Return a revision or a time in the past."""
        revision = max(1, round(place * self.history.last))
        if by_time is None:
            return revision
        return self.history.event(revision).time + timedelta(microseconds=by_time)

    @step(
        bucket=True,
        patterns=patterns,
        places=places,
        by_time=st.sampled_from((None, None, 0, -1, 1)),
        strict=st.booleans(),
        deletes=st.booleans(),
        during=interference,
    )
    async def snapshot_past(
        self,
        patterns: tuple[str, ...] | None,
        places: list[float],
        by_time: int | None,
        strict: bool,
        deletes: bool,
        during: Interference,
    ) -> None:
        for n, place in enumerate(places):
            await self._snapshot_past(patterns, place, by_time, strict, deletes, None if n else during)

    async def _snapshot_past(
        self,
        patterns: tuple[str, ...] | None,
        place: float,
        by_time: int | None,
        strict: bool,
        deletes: bool,
        during: Interference,
    ) -> None:
        await self.history.sync()
        if not self.history.last:
            return
        at = self._at(place, by_time)
        name = "snapshot of the past" + ("" if strict else ", not strict")
        snap, error, histories, _ = await self._read(
            name,
            lambda: kvx.snapshot(self.kv, patterns, at=at, strict=strict, include_deletes=deletes),
            during,
            (HistoryUnavailableError,),
        )
        named = patterns is not None and any("*" not in pattern and ">" not in pattern for pattern in patterns)
        if patterns is None or "nothing" not in patterns:  # a named key without messages is unavailable
            self._note_decidable(matching(patterns), at, during, error, named=named)
        if error is not None:
            return

        def find_problems(history: History) -> list[str]:
            revision = history.revision_at(at) if isinstance(at, datetime) else at
            if snap.revision > history.last or revision > history.last:
                return [f"revision {snap.revision}"]
            problems = [f"{key} does not match" for key in snap.keys() - set(matching(patterns))]
            if isinstance(at, datetime):
                if snap.time != at:
                    problems.append(f"time {snap.time}, not {at}")
                if any(history.event(seq).sure == NEVER_GONE for seq in range(revision + 1, snap.revision + 1)):
                    problems.append(f"revision {snap.revision} is newer than {at}")
            elif snap.revision != revision:
                problems.append(f"revision {snap.revision}, not {revision}")
            if strict and snap.unavailable:
                problems.append(f"unavailable {snap.unavailable}")
            for key in matching(patterns):
                entry, truths = snap.get(key), history.truths(key, revision)
                if key in snap.unavailable:
                    stored = truths[0] is not None and truths[0].operation == "PUT" and truths[0].sure == NEVER_GONE
                    if entry is not None or (stored and len(truths) == 1):
                        problems.append(f"{key} is unavailable, although it is stored: {truths}")
                    continue
                wrong = disagreement(key, entry, truths, history, deletes=deletes)
                named = patterns is not None and key in patterns
                if wrong and entry is not None and history.is_exposed(key, revision, entry.revision):
                    self.tally.errors["undetectable exposure"] += 1
                    continue
                if wrong and entry is None and (not snap.complete or named):
                    if history.is_undetectable(key, revision, named=named):
                        self.tally.errors["undetectable disappearance"] += 1
                        continue
                    if (
                        not strict
                        and not named
                        and not any(
                            event.sure == NEVER_GONE and event.operation == "PUT" and event.seq <= revision
                            for event in history.of_key(key)
                        )
                    ):
                        continue
                problems += wrong
            return [f"at {at} (revision {revision}), complete {snap.complete}:", *problems] if problems else []

        self._judge(name, histories, find_problems)

    @step(
        bucket=True,
        chosen=st.lists(keys, min_size=1, max_size=7, unique=True),
        places=places,
        by_time=st.sampled_from((None, None, 0, -1, 1)),
        during=interference,
    )
    async def get_many_past(
        self, chosen: list[str], places: list[float], by_time: int | None, during: Interference
    ) -> None:
        for n, place in enumerate(places):
            await self._get_many_past(chosen, place, by_time, None if n else during)

    async def _get_many_past(self, chosen: list[str], place: float, by_time: int | None, during: Interference) -> None:
        await self.history.sync()
        if not self.history.last:
            return
        at = self._at(place, by_time)
        name = "get_many of the past"
        found, error, histories, _ = await self._read(
            name, lambda: kvx.get_many(self.kv, chosen, at=at), during, (HistoryUnavailableError,)
        )
        self._note_decidable(chosen, at, during, error, named=True)
        if error is not None:
            assert not isinstance(error, HistoryUnavailableError) or set(error.keys) <= set(chosen)
            return

        def find_problems(history: History) -> list[str]:
            revision = history.revision_at(at) if isinstance(at, datetime) else at
            if revision > history.last:
                return [f"revision {revision}"]
            problems = [f"{key} was not asked for" for key in found.keys() - set(chosen)]
            for key in chosen:
                entry = found.get(key)
                wrong = disagreement(key, entry, history.truths(key, revision), history)
                if wrong and entry is None and history.is_undetectable(key, revision, named=True):
                    self.tally.errors["undetectable disappearance"] += 1
                    continue
                if wrong and entry is not None and history.is_exposed(key, revision, entry.revision):
                    self.tally.errors["undetectable exposure"] += 1
                    continue
                problems += wrong
            return [f"at {at} (revision {revision}):", *problems] if problems else []

        self._judge(name, histories, find_problems)

    def _note_decidable(
        self, chosen: Iterable[str], at: int | datetime, during: Interference, error: Exception | None, *, named: bool
    ) -> None:
        """Count a read of the past whose answer certainly shows: no error is expected."""
        history = self.history
        if not self.recorded or during is not None:
            return
        if history.silent_removals or history.expires or history.config_changes > 1:
            return
        if error is not None and not isinstance(error, HistoryUnavailableError):
            return  # the answer of a mirror or of a lagging replica was refused until the timeout
        revision = at if isinstance(at, int) else history.known_at(at)
        if not history.is_decidable(chosen, revision, named=named):
            return
        self.tally.decidable += 1
        self.tally.decided += error is None
        if error is not None:
            print(f"refused at {revision}, although nothing is missing: {error}", *history.events, sep="\n")

    # -- transactions ----------------------------------------------------------------------------------------------

    @step(
        bucket=True,
        steps=st.lists(
            st.one_of(
                st.tuples(st.just("get"), few),
                st.tuples(st.just("get"), few),
                st.tuples(st.just("put"), few, ttls),
                st.tuples(st.just("create"), few, ttls),
                st.tuples(st.just("update"), few, st.booleans()),
                st.tuples(st.just("delete"), few),
                st.tuples(st.just("purge"), few, st.sampled_from((None, None, 1))),
            ),
            min_size=1,
            max_size=6,
        ),
        others=st.one_of(st.just([]), st.lists(st.one_of(writes, disturbances, disturbances, recreations), max_size=2)),
    )
    async def transact(self, steps: list[Op], others: list[Op]) -> None:
        history, tally = self.history, self.tally
        await history.sync()
        tally.operations += 1
        tally.checks["transaction"] += 1
        tx = kvx.transaction(self.kv)
        written: dict[str, tuple[str, bytes]] = {}
        read: set[str] = set()
        expected: dict[str, int | None] = {}  # the revision of each key that the commit requires; None: no value
        for op in steps:
            if self.calm and op[0] in ("put", "create", "purge"):
                op = (*op[:2], None)
            kind, key = op[:2]
            newest = history.newest(key)
            revision = 0 if newest is None else newest.seq
            self.values += 1
            value = b"%d" % self.values
            try:
                match kind:
                    case "get":
                        entry = await tx.get(key)
                        if key in written:
                            assert (None if entry is None else ("PUT", entry.value)) in (written[key], None)
                            continue
                        before = history.last
                        await history.sync()
                        truths = [it for seq in range(before, history.last + 1) for it in history.truths(key, seq)]
                        assert not (wrong := disagreement(key, entry, truths, history)), (wrong, history.events)
                        expected.setdefault(key, revision)
                        if revision:  # what is still absent may be absent in another bucket
                            read.add(key)
                    case "put":
                        tx.put(key, value, ttl=kvx_ttl(op[2]))
                        written[key] = ("PUT", value)
                    case "create":
                        tx.create(key, value, ttl=kvx_ttl(op[2]))
                        if key not in written:
                            expected.setdefault(key, None)
                        written[key] = ("PUT", value)
                    case "update":
                        last = revision if op[2] else revision + 1000
                        tx.update(key, value, last=last)
                        expected.setdefault(key, last)
                        written[key] = ("PUT", value)
                    case "delete":
                        tx.delete(key)
                        written[key] = ("DEL", b"")
                    case "purge":
                        tx.purge(key, ttl=op[2])
                        written[key] = ("PURGE", b"")
            except (KeyConflictError, ValueError) as error:
                tally.errors[f"transaction: {type(error).__name__}"] += 1
                assert kind in ("create", "update")
                await tx.discard()
                return
        await self._apply(others)
        moved = []
        if self.history is history:
            await history.sync()
            for key, required in expected.items():
                newest = history.newest(key)
                if required is None:
                    if newest is not None and newest.operation == "PUT":
                        moved.append(key)
                elif required != (0 if newest is None else newest.seq):
                    moved.append(key)
        undecided = history.expires_soon()
        try:
            await tx.commit()
        except KeyConflictError as conflict:
            tally.errors["transaction: KeyConflictError"] += 1
            if self.history is history and not undecided and not (moved and set(conflict.keys) <= set(moved)):
                raise AssertionError(f"moved {moved}, expected {expected}, {history.events}") from conflict
            before = self.history.last
            await self.history.sync()
            assert undecided or self.history.last == before, "a transaction that failed has written"
            return
        except StreamRecreatedError:
            tally.errors["transaction: StreamRecreatedError"] += 1
            assert self.history is not history
            return
        if self.history is not history and read and (written or len(read) > 1):
            raise AssertionError(f"committed to a bucket that was created after its reads: {read}")
        if not written and len(expected) < 2:
            moved = []  # a single read is valid by itself
        assert not moved or undecided, f"committed although {moved} had changed: {expected} {history.events}"
        await self.history.sync()
        assert tx.revisions.keys() == written.keys()
        for key, revision in tx.revisions.items():
            event = self.history.event(revision)
            assert (event.key, event.operation, event.value) == (key, *written[key])
        tally.exact["transaction"] += 1

    @step(bucket=True, key=keys, others=st.lists(writes, max_size=3))
    async def retry(self, key: str, others: list[Op]) -> None:
        history, runs = self.history, 0
        self.tally.operations += 1
        self.tally.checks["retry_transaction"] += 1
        self.values += 1
        value = b"%d" % self.values

        async def run(tx: kvx.Transaction) -> tuple[int, int]:
            nonlocal runs
            runs += 1
            entry = await tx.get(key)
            if runs == 1:
                await self._apply(others)
            tx.put(key, value)
            return history.last, 0 if entry is None else entry.revision

        await history.sync()
        (_, read), _ = await kvx.retry_transaction(self.kv, run)
        await history.sync()
        mine = [event for event in history.of_key(key) if event.value == value]
        assert len(mine) == 1, "stored more than once, or not at all"
        before = [event for event in history.of_key(key) if event.seq < mine[0].seq]
        if read and not any(event.deadline for event in before):
            assert before[-1].seq == read
        self.tally.exact["retry_transaction"] += 1

    # -- the log ---------------------------------------------------------------------------------------------------

    @step(
        start=st.sampled_from(("first", "first", "seq", "time", "stored")),
        place=st.floats(0, 1),
        key=st.none() | patterns,
    )
    async def open_reader(self, start: str, place: float, key: tuple[str, ...] | None) -> None:
        await self._open_reader(start, place, None if key is None or "*" not in key[0] else key[0])

    async def _open_reader(self, kind: str, place: float, pattern: str | None) -> None:
        history = self.history
        await history.sync()
        seq = max(1, round(place * history.last))
        start: Any = First()
        if kind == "seq":
            start = Seq(seq)
        elif kind == "time" and history.last:
            start = Time(history.event(seq).time)
        elif kind == "stored":
            start = Stored("reader")
        js = self.far.jetstream(timeout=TIMEOUT)
        subject = None if pattern is None else f"$KV.{self.name}.{pattern}"
        offsets = OffsetStore(js, f"{self.name}_AT")
        reader = LogReader(js, history.stream, start=start, subject=subject, offsets=offsets, patience=TIMEOUT)
        if kind == "stored":
            await offsets.create()
            if self.committed and history.created not in self.committed:
                try:
                    await reader.open()
                except StreamRecreatedError:
                    self.tally.errors["LogReader: StreamRecreatedError"] += 1
                    return
                raise AssertionError("a stored position of the stream before was accepted")
        position = await reader.open()
        await history.sync()
        assert history.view is not None
        first = max(1, history.view.first)
        expected = {"first": first, "seq": seq, "stored": self.committed.get(history.created, first)}.get(kind)
        if expected is not None:
            assert position == expected or history.expires_soon(), f"{kind}: position {position}, not {expected}"
        elif history.last:
            mine = [event for event in history.stored.values() if pattern is None or matches(pattern, event.key)]
            early = [event for event in mine if event.seq >= position and event.time < start.when]
            late = [event for event in mine if event.seq < position and event.time >= start.when]
            wrong = [*early, *late]
            assert not wrong, (start, position, wrong)
        self.readers[:] = self.readers[-3:]
        self.readers.append(ReaderState(reader, history, pattern, history.view, position, position == first))

    @step(index=st.integers(0, 3), limit=st.sampled_from((1, 3, 1000)), commit=st.booleans(), during=interference)
    async def read_log(self, index: int, limit: int, commit: bool, during: Interference) -> None:
        await self.read_any_log(during, index, limit, commit=commit)

    async def read_any_log(
        self, during: Interference, index: int = 0, limit: int = 1000, *, commit: bool = False
    ) -> None:
        if not self.readers:
            await self._open_reader("first", 0, None)
        await self._read_log(self.readers[index % len(self.readers)], limit, during, commit=commit)

    async def _read_log(self, state: ReaderState, limit: int, during: Interference, *, commit: bool) -> None:
        name, history, reader = "LogReader.read", state.history, state.reader
        if history is self.history:
            await history.sync()
        start, stored = history.view, set(history.stored)
        messages, error, _, _ = await self._read(
            name, lambda: reader.read(limit, timeout=0), during, (PositionLostError, StreamRecreatedError)
        )
        recreated = self.history is not history
        if isinstance(error, StreamRecreatedError | BucketNotFoundError | nats.js.errors.NotFoundError):
            assert recreated, error
            self.readers.remove(state)
            return
        if isinstance(error, RequestTimeoutError | nats.js.errors.ServiceUnavailableError):
            return
        problems: list[str] = []
        position = reader.position
        assert position is not None
        lowest = state.next
        for message in messages or ():
            event = history.event(message.seq) if message.seq <= history.last else None
            if event is None or message.seq < lowest:
                problems.append(f"returned {message.seq}")
                continue
            found = (message.subject, message.data, message.time)
            subject = event.key if event.key.startswith("_reads.") else f"$KV.{self.name}.{event.key}"
            if found != (subject, event.value, event.time):
                problems.append(f"returned {message} for {event}")
            if state.subject is not None and not matches(state.subject, event.key):
                problems.append(f"returned {event}, which does not match")
            lowest = message.seq + 1
        assert start is not None
        assert history.view is not None
        returned = {message.seq for message in messages or ()}
        passed, after = position, position
        if isinstance(error, PositionLostError):
            assert error.expected is not None
            assert error.got is not None
            passed, after = error.expected, error.got
            if passed < position or (after <= passed <= history.last):
                problems.append(f"lost {passed} to {after} at position {position}")
            lost = [event for event in history.stored.values() if passed <= event.seq < after]
            problems += [f"reports {event} as lost" for event in lost]
            reader.seek(after)
        for event in history.events:
            wanted = state.subject is None or matches(state.subject, event.key)
            if wanted and state.next <= event.seq < passed and event.seq not in returned:
                # The reader may have looked before or after what happened during the call.
                looks = [history.view] if event.seq in stored or event.seq > start.last else [start, history.view]
                problems += self._skipped(state, event, min(returned, default=passed), looks)
        if problems:
            what = (
                f"{name} from {state.next} to {after}, {state.subject}, from the first {state.from_first}, history "
                f"{history.history}, returned {sorted(returned)}, {error!r}"
            )
            raise AssertionError(
                "\n".join([what, f"{state.view}", f"{history.view}", *problems, *map(repr, history.events)])
            )
        assert history.view is not None
        state.next, state.view = after, history.view
        state.from_first = state.from_first and not returned
        if error is None:
            self.tally.exact[name] += 1
        if recreated:
            self.readers.remove(state)
            return
        if commit and error is None:
            await reader.offsets.create()
            with contextlib.suppress(StreamRecreatedError, FencedError):
                await reader.offsets.fetch("reader")  # takes the name over from the other readers
                await reader.offsets.commit(reader, name="reader")
                self.committed = {history.created: after}

    def _skipped(self, state: ReaderState, event: Event, first_returned: int, looks: list[View]) -> list[str]:
        """Return why a reader must not pass over a message silently (docs/log.md, "Compacted streams").

        It looked at the stream at one of `looks`, of which the last one is now.
        """
        history, before, now = state.history, state.view, looks[-1]
        if event.seq in history.stored:
            return [f"passed over {event}, which is stored"]
        if event.cause == "replaced" or (state.from_first and event.seq < first_returned):
            return []
        if now.first <= event.seq or event.from_middle:
            return []
        config = history.config
        # A delete marker replaces what has expired, until it expires itself.
        stay = min(config.get("subject_delete_marker_ttl", 0) / 1e9, history.max_age)
        rollups = [
            later
            for later in history.events
            if (later.seq > before.last or later.time > before.time - timedelta(seconds=5))
            and (later.is_rollup or later.seq not in history.stored)
        ]
        if self.is_log:
            return [f"passed over {event} at the beginning of a stream that keeps all messages of a subject"]

        def reports(look: View) -> bool:
            reported = not look.messages or look.subjects < before.subjects
            if event.cause == "max_age":
                old = (look.time - SOON - event.time).total_seconds() >= history.max_age + stay
                reported = reported or not stay or old
            reported = reported or (look.messages < before.messages and not rollups)
            return reported or (event.cause == "limits" and 0 < config["max_msgs"] <= look.messages)

        if before.config_changes == now.config_changes and event.possible >= before.last and all(map(reports, looks)):
            return [f"passed over {event} at the beginning of the stream"]
        self.tally.errors["LogReader: undecidable hole"] += 1
        return []


class LaggingMachine(HistoryMachine):
    """Reads of a bucket with three replicas, one of which was paused while messages were stored and removed."""

    cluster: ClassVar[NatsCluster]
    replicas = 3
    # Rules that would need an answer of the leader during an election, or that last long in a cluster.
    transact = retry = touch = enable = recreate = restart = add_mirror = remove_mirror = wait = None

    @step(ops=st.lists(st.one_of(writes, writes, removals), min_size=3, max_size=15), which=st.booleans())
    async def lag(self, ops: list[Op], which: bool) -> None:
        """Pause a follower, apply operations, and let it go on: it answers before it has caught up."""
        await self.history.sync()
        leader = (await self.js.stream_info(self.history.stream)).cluster.leader  # type: ignore[union-attr]
        followers = [server for server in self.cluster.servers[1:] if server.name != leader]
        follower = followers[which and len(followers) > 1]
        follower.pause()
        try:
            await self._apply(ops)
        finally:
            follower.resume()


def kvx_ttl(ttl: int | str | None) -> Any:
    return jsx.NEVER if ttl == "never" else ttl


@contextlib.contextmanager
def aborted_sockets() -> Iterator[None]:
    """Abort, at the end, the sockets that nats-py has left open after it lost a connection."""
    open_connection, writers = asyncio.open_connection, list[asyncio.StreamWriter]()

    async def recorded(*arguments: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection(*arguments, **options)
        writers.append(writer)
        return reader, writer

    with mock.patch.object(asyncio, "open_connection", recorded):
        yield
    for writer in writers:
        with contextlib.suppress(AttributeError):  # asyncio cannot abort what closed after its last bytes were written
            writer.transport.abort()


async def connect(url: str) -> Client:

    return await nats.connect(
        url, connect_timeout=10, reconnect_time_wait=0.02, max_reconnect_attempts=-1, error_cb=quiet
    )
