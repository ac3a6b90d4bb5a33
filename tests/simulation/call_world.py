"""Whole calls against the reference server, in virtual time: what a call reports is compared with what was stored.

A seed determines the stream, the calls, their timeouts and every fault: replies that are dropped, repeated, delayed or
reordered, messages that are lost, refused or answered with 503, connections that are cut or stall, changes of leader,
and servers that are killed and then know only the message ids of what they still store. After `CALM` seconds there are
no more faults, and the links are fast, so that every call that goes on must then succeed.

What is sent to `ingest`'s stream arrives at most one duplicate window after its link is lost, and the id of a batch is
used again only when everything that was sent over lost links has arrived: docs/guarantees.md names these limits.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import Any

import nats
import nats.aio.client
import nats.errors
import nats.js.client
import nats.nuid
from virtual_network import Network, VirtualLoop, WrongError

import jetstream_ext as jsx
from jetstream_ext import errors, log
from jetstream_ext.testing import reference
from jetstream_ext.testing.reference.streams.store import StoredMessage

VERSIONS = ("2.14.6", "2.15.1")
BEFORE_FAST_INGEST = "2.12.8"
TIMEOUTS = (0.3, 0.5, 1.0, 2.0, 5.0)
WINDOWS = (1, 1, 2, 10, 120)  # seconds
CALM = 40.0
PATIENCE = 300.0  # seconds after which a call that goes on until it succeeds counts as hanging
NATS_PY = ("Client.", "Subscription.", "TcpTransport.", "open_connection")  # its tasks
INGEST_WAITS = 4  # timeouts of an answer for which `ingest` may wait beyond its own timeout
LONGEST = 100_000.0  # seconds of virtual time that a schedule may take
ENDS = 0.3  # seconds that a call may take beyond its timeouts


class World:
    """One schedule of one kind of call."""

    def __init__(self, kind: str, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.kind, self.seed = kind, seed
        self._trace = trace
        self.random = random.Random(f"{kind}:{seed}")
        self.loop = VirtualLoop()
        version = self.random.choice(VERSIONS)
        if kind != "ingest" and seed % 7 in (0, 4):  # a share of the seeds, but none that once found a defect
            version = BEFORE_FAST_INGEST
        self.network = Network(self.loop, version, seed, self.say)
        self.timeout = self.random.choice(TIMEOUTS)
        self._connections: list[Any] = []

    def say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.loop.time():9.4f}  {text}")

    def run(self) -> None:
        """Run the schedule, and raise a `WrongError` if a rule was broken."""
        self.loop.set_exception_handler(self._uncaught)
        self._wrong: list[str] = []
        with _virtual(self.loop, self.seed):
            try:
                self.loop.run_until_complete(asyncio.wait_for(self._run(), LONGEST))
            except TimeoutError:
                raise WrongError("hang: the schedule does not end") from None
            finally:
                self._end_tasks()
                self.loop.close()
        if self._wrong:
            raise WrongError(self._wrong[0])

    def _uncaught(self, _: Any, context: dict[str, Any]) -> None:
        task = context.get("future", context.get("task"))
        if isinstance(task, asyncio.Task) and task.get_coro().__qualname__.startswith(NATS_PY):  # type: ignore[union-attr]
            return
        self._wrong.append(f"uncaught: {context.get('message')}: {context.get('exception')!r}")

    def _end_tasks(self) -> None:
        self.network.hang_up_all()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(WrongError):
            self.loop.run_until_complete(self._close_connections())

    async def _close_connections(self) -> None:
        await asyncio.sleep(0.1)
        for nc in self._connections:
            await _close(nc)

    async def _run(self) -> None:
        self.bad = self.random.random() < 0.9  # the other schedules have no faults
        self.nc = await self.connect()
        await self.nc.jetstream(timeout=30).account_info()  # opens nats-py's own subscription for answers
        held = set(self.nc._subs)
        others = asyncio.all_tasks()
        check = await JOBS[self.kind](self)
        if left := set(self.nc._subs) - held:
            raise WrongError(f"subscriptions are left: {[self.nc._subs[sid]._subject for sid in left]}")
        await asyncio.sleep(10)  # what was sent arrives
        self.check_leaks(others)
        check()
        await _close(self.nc)

    def check_leaks(self, others: set[Any]) -> None:
        tasks = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - others}  # type: ignore[union-attr]
        if tasks := {name for name in tasks if not name.startswith(("World.", *NATS_PY))}:
            raise WrongError(f"tasks are left: {tasks}")
        timers = {repr(each._callback) for each in self.loop._scheduled if not each.cancelled()}  # type: ignore[attr-defined]
        if timers := {timer for timer in timers if "jetstream_ext" in timer and "testing" not in timer}:
            raise WrongError(f"timers are left: {timers}")

    async def connect(self) -> Any:
        async def quiet(error: Exception) -> None:
            self.say(f"    nats-py: {error!r}")

        nc = await nats.connect(
            "nats://server:4222",
            error_cb=quiet,
            reconnect_time_wait=self.random.choice((0.05, 0.5, 2.0)),
            max_reconnect_attempts=-1,
            connect_timeout=2,
        )
        self._connections.append(nc)
        return nc

    # -- faults -----------------------------------------------------------------------------------------------------

    def trouble(self, *streams: str) -> None:
        """Plan the faults from now on."""
        if not self.bad:
            return
        pick = self.random.choice
        self.network.latencies = pick(([0.0005], [0.0005, 0.01], [0.001, 0.1, 0.3]))
        for _ in range(pick((0, 1, 1, 2, 4))):
            self.network.faults.add(self._rule(pick(streams)))
        for _ in range(pick((0, 0, 1, 1, 2, 4))):
            action: Callable[[], None] = pick(
                (
                    self.network.cut_one,
                    self.network.cut_one,
                    lambda: self.network.stall(pick((0.2, 1.0, 4.0, 12.0))),
                    lambda: self.network.restart(pick((0.01, 0.3, 1.5, 5.0, 15.0))),
                    lambda: self.network.change_leader(pick(streams), pick((0, 0, 1, 5))),
                )
            )
            self.loop.call_later(self.random.random() * pick((0.01, 0.1, 1.0, 10.0)), action)
        self.loop.call_at(max(CALM, self.loop.time() + 1), self._calm)

    def _commit_rule(self) -> reference.Rule:
        """Return a fault of a commit: its answer is lost or late, or it is itself."""
        pick = self.random.choice
        options: dict[str, Any] = {"nth": pick((1, 1, 2)), "times": pick((1, 2)), "chance": pick((1.0, 0.5))}
        commit: dict[str, Any] = {"subject": "s.>", "when": lambda message: b"Nats-Batch-Commit" in message.header}
        rule: Callable[..., reference.Rule] = pick(
            (
                lambda: reference.Drop(kind="pub_ack", **options),
                lambda: reference.Delay(kind="pub_ack", **options, seconds=pick((0.4, 3.0))),
                lambda: reference.Lose(**commit, **options),
                lambda: reference.Cut(**commit, **options, before=pick((True, False))),
                lambda: reference.Stall(**commit, **options, seconds=pick((0.4, 3.0))),
                lambda: reference.ChangeLeader(**commit, **options, unavailable=pick((0, 2))),
            )
        )
        made = rule()
        self.say(f"    {made}")
        return made

    def _calm(self) -> None:
        self.say("    calm")
        self.network.calm()

    def _rule(self, stream: str) -> reference.Rule:
        pick = self.random.choice
        options: dict[str, Any] = {
            "nth": self.random.randint(1, pick((1, 5, 30))),
            "times": pick((1, 1, 2, 5, None)),
            "chance": pick((1.0, 0.5, 0.1)),
        }
        kinds = {"kind": pick(("", "", "pub_ack", "api", "empty", "flow_ack", "message", "error"))}
        subject = {"subject": pick((f"{stream}.>", f"{stream}.>", f"{stream}.>", "$JS.API.>"))}
        published = {"subject": f"{stream}.>"}
        rule: Callable[..., reference.Rule] = pick(
            (
                lambda: reference.Drop(**kinds, **options),
                lambda: reference.Drop(**kinds, **options),
                lambda: reference.Duplicate(**kinds, **options),
                lambda: reference.Delay(**kinds, **options, seconds=pick((0.05, 0.6, 3.0))),
                lambda: reference.Reorder(**kinds, **options, by=pick((1, 3)), patience=pick((0.1, 2.0))),
                lambda: reference.Lose(**subject, **options),
                lambda: reference.Unavailable(**subject, **options),
                lambda: reference.Overload(**published, **options),
                lambda: reference.ChangeLeader(**published, **options, unavailable=pick((0, 3)), unsaved=pick((0, 2))),
                lambda: reference.Cut(**subject, **options, before=pick((True, False))),
                lambda: reference.Stall(**subject, **options, seconds=pick((0.3, 2.0, 6.0))),
                lambda: reference.StaleReplica("$JS.API.DIRECT.GET.>", **options, behind=pick((1, 3, 10))),
            )
        )
        made = rule()
        self.say(f"    {made}")
        return made

    # -- calls ------------------------------------------------------------------------------------------------------

    async def end(self, call: Awaitable[Any], seconds: float, what: str) -> Any:
        """Return what a call returns, or the error that it raises; it must end within `seconds`."""
        began = self.loop.time()
        self.say(f"{what} …")
        task = asyncio.ensure_future(call)
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise WrongError(f"hang: {what} has not ended after {seconds:g} s")
        if task.cancelled():
            raise WrongError(f"{what} ended as cancelled, though its caller did not cancel it")
        outcome = task.exception() or task.result()
        self.say(f"{what}: {outcome!r} after {self.loop.time() - began:.4f} s")
        if isinstance(outcome, BaseException) and not isinstance(outcome, nats.errors.Error):
            raise WrongError(f"{what} raised {outcome!r}") from outcome
        return outcome

    def stored(self, stream: str, subject: str = "") -> list[StoredMessage]:
        """Return what a stream has stored, whether its limits have removed it since or not."""
        return [each for _, each in sorted(self.network.journal[stream].items()) if each.subject.startswith(subject)]

    # -- ingest -----------------------------------------------------------------------------------------------------

    async def ingest(self) -> Callable[[], None]:
        pick = self.random.choice
        limit = pick((-1, -1, -1, 1, 2))
        self.network.late_limit = pick(WINDOWS)
        self.network.create(
            b'{"name":"s","subjects":["s.>"],"storage":"file","allow_batched":true,"allow_direct":true,'
            b'"duplicate_window":%d,"max_msgs_per_subject":%d}' % (self.network.late_limit * 10**9, limit)
        )
        total = pick((1, 3, 10, 30))
        slow = pick((0.0, 0.0, 0.0, 0.01, 0.5))
        refused = self.random.randrange(total) if self.random.random() < 0.1 else total
        options: dict[str, Any] = {
            "flow": pick((1, 2, 3, 10, 100)),
            "max_outstanding_acks": pick((1, 2, 3)),
            "patience": pick((0.3, 1.0, 5.0, 30.0)),
            "timeout": self.timeout,
        }
        if pick((True, False)):
            options["msg_id"] = lambda entry: entry[1].decode()

        async def slowly() -> AsyncIterator[Any]:
            for message in messages:
                await asyncio.sleep(slow)
                yield message

        messages: list[Any] = [(f"s.{n % 3}", b"%d" % n) for n in range(total)]
        if refused < total:
            messages[refused] = ("s..", b"refused")
        self.say(
            f"ingest {total} messages, pause {slow}, max_msgs_per_subject {limit}, {sorted(options)} "
            f"{[value for value in options.values() if not callable(value)]}"
        )
        self.trouble("s")
        source = slowly() if slow else messages
        progress = self.loop.time()

        def progressed(_: jsx.IngestProgress) -> None:
            nonlocal progress
            progress = self.loop.time()

        options |= {"on_progress": progressed, "progress_every": 0}
        done = await self.end(
            jsx.ingest(self.nc.jetstream(timeout=self.timeout), source, **options), PATIENCE, "ingest"
        )
        waited = self.loop.time() - progress - options["patience"] - slow * total
        if waited > INGEST_WAITS * self.timeout + ENDS:
            raise WrongError(f"hang: ingest has ended {waited:g} s later than its patience allows")

        def check() -> None:
            found = [int(each.payload) for each in self.stored("s")]
            copies = Counter(found)
            report = done.report if isinstance(done, errors.IngestError) else done
            stored = doubt = 0
            if isinstance(report, jsx.IngestReport):
                stored, doubt = report.stored, report.in_doubt
                if report.duplicates > len(copies):
                    raise WrongError(f"false duplicates: the stream has had {len(copies)} messages, not {report}")
            if isinstance(done, errors.IngestError):
                if done.index != stored:
                    raise WrongError(f"the error is about message {done.index}, and {stored} are stored")
                if done.index > refused:
                    raise WrongError(f"the refused message {refused} is called stored: {done!r}")
                unsaid = [n for n in copies if n >= stored + done.in_doubt]
                if unsaid:
                    raise WrongError(f"false not_stored: {unsaid} are stored, and the error says neither: {done!r}")
            elif isinstance(done, BaseException):
                if found:
                    raise WrongError(f"{found} are stored, and {done!r} does not say so")
            elif stored != total or refused < total:
                raise WrongError(f"{stored} of {total} are reported as stored, without an error")
            if missing := [n for n in range(stored) if not copies[n]]:
                raise WrongError(f"false success: {missing} are not stored")
            if len(twice := [n for n in range(stored) if copies[n] > 1]) > doubt:
                raise WrongError(f"false once: {twice} are stored more than once, and {doubt} are in doubt")
            first = list(dict.fromkeys(found))
            if first != sorted(first):
                raise WrongError(f"the order is not kept: {found}")

        return check

    # -- atomic batches -----------------------------------------------------------------------------------------------

    async def atomic(self) -> Callable[[], None]:
        pick = self.random.choice
        self.network.create(
            b'{"name":"s","subjects":["s.>"],"storage":"file","allow_atomic":true,"allow_direct":true,'
            b'"duplicate_window":%d,"max_msgs_per_subject":%d}' % (pick(WINDOWS) * 10**9, pick((-1, -1, -1, 1, 3)))
        )
        js = self.nc.jetstream(timeout=self.timeout)
        self.trouble("s")
        if self.bad and self.random.random() < 0.5:
            self.network.faults.add(self._commit_rule())
        noise = asyncio.create_task(self._noise(pick((0.0, 0.05, 1.0))))
        plans: list[list[jsx.BatchMessage]] = []
        outcomes: list[tuple[list[bytes], str, Any]] = []
        ids: dict[bytes, str | None] = {}
        for number in range(pick((1, 2, 4))):
            if plans and self.random.random() < 0.4:  # again
                messages = pick(plans)
            else:
                with_ids = self.random.random() < 0.5
                messages = [
                    jsx.BatchMessage(f"s.{n % 2}", b"%d:%d" % (number, n), msg_id=f"{number}:{n}" if with_ids else None)
                    for n in range(pick((1, 2, 5, 20)))
                ]
            plans.append(messages)
            while not self.nc.is_connected and self.random.random() < 0.99:
                await asyncio.sleep(0.05)
            content = [bytes(each.payload) for each in messages]
            ids |= {bytes(each.payload): each.msg_id for each in messages}
            publish = pick((self._publish, self._add_all, self._add_all, self._publish_many))
            what, outcome = await publish(js, messages)
            outcomes.append((content, what, outcome))
            if self.random.random() < 0.3:
                await asyncio.sleep(pick((0.5, 2.0)))
        await _cancel(noise)
        return lambda: self._check_batches(outcomes, ids)

    async def _noise(self, pause: float) -> None:
        """Another writer of the stream."""
        if not pause:
            return
        other = await self.connect()
        js = other.jetstream(timeout=self.timeout)
        try:
            for n in count():
                with contextlib.suppress(nats.errors.Error):
                    await js.publish("s.noise", b"%d" % n)
                await asyncio.sleep(pause)
        finally:
            await _close(other)

    async def _publish(self, js: Any, messages: list[jsx.BatchMessage]) -> tuple[str, Any]:
        call = jsx.publish_atomic(js, messages)
        outcome = await self.end(call, self.timeout + ENDS, f"publish_atomic {len(messages)}")
        return self._read(outcome), outcome

    async def _publish_many(self, js: Any, messages: list[jsx.BatchMessage]) -> tuple[str, Any]:
        async def publish() -> Any:
            acks = await jsx.publish_atomic_many(js, [messages])
            return acks[0]

        outcome = await self.end(publish(), self.timeout + ENDS, f"publish_atomic_many {len(messages)}")
        return self._read(outcome), outcome

    async def _add_all(self, js: Any, messages: list[jsx.BatchMessage]) -> tuple[str, Any]:
        """Add messages to an `AtomicBatch` with pauses, commit it, and resolve an unknown outcome."""
        pick = self.random.choice
        batch = jsx.AtomicBatch(js)
        name = f"batch {batch.batch_id}"
        for message in messages:
            outcome = await self.end(batch.add_many([message]), self.timeout + ENDS, f"{name}: add")
            if isinstance(outcome, BaseException):
                if batch.state in ("open", "failed"):
                    await batch.discard()
                    return "not_stored", outcome
                break
            if self.random.random() < 0.1:
                await asyncio.sleep(pick((0.1, 1.0, 12.0)))
        else:
            outcome = await self.end(batch.commit_eob(), self.timeout + ENDS, f"{name}: commit")
        if not isinstance(outcome, errors.BatchOutcomeUnknownError):
            await batch.discard()
            return self._read(outcome), outcome
        patience = pick((None, 1.0, 5.0, 60.0))
        seconds = 4 * self.timeout if patience is None else patience
        found = await self.end(batch.resolve(timeout=patience), seconds + ENDS, f"{name}: resolve")
        if isinstance(found, str):
            return found, batch.ack if found == "stored" else None
        return ("not_stored" if getattr(found, "outcome", "unknown") == "not_stored" else "unknown"), found

    @staticmethod
    def _read(outcome: Any) -> str:
        """Return what an outcome says of the batch. An error that says nothing of it is raised before it is sent."""
        if isinstance(outcome, BaseException):
            return getattr(outcome, "outcome", "not_stored")
        return "stored"

    def _check_batches(self, outcomes: Sequence[tuple[list[bytes], str, Any]], ids: dict[bytes, str | None]) -> None:
        journal = self.network.journal["s"]
        runs = Counter[tuple[bytes, ...]]()
        for group in _runs(self.stored("s")):
            run = [each.payload for each in group]
            runs[tuple(run)] += 1
            if run not in [content for content, _, _ in outcomes]:
                raise WrongError(f"false not_stored: {run} are stored together, and no call published such a batch")
        for content, what, ack in outcomes:
            if what == "stored":
                seqs = range(ack.seq - len(content) + 1, ack.seq + 1) if ack is not None else ()
                found = [journal[seq].payload if seq in journal else None for seq in seqs]
                if found != content:
                    same = all(ids[each] for each in content) and [ids.get(each) for each in found if each] == [
                        ids[each] for each in content
                    ]
                    why = f"; other content with its message ids is: {found}" if same else ""
                    raise WrongError(f"false success: {content} is not stored at {ack!r}{why}")
                if ack.batch_size != len(content):
                    raise WrongError(f"a false ack of {len(content)} messages: {ack!r}")
        for content, _, _ in outcomes:
            key = tuple(content)
            same = [(said, ack) for other, said, ack in outcomes if other == content]
            possible = sum(said != "not_stored" for said, _ in same)
            if runs[key] > possible:
                raise WrongError(f"false not_stored: {content} is stored {runs[key]} times, reported {same}")
            # The same commit answered twice is one run; two runs need two acks of their own.
            acks = {ack.seq for said, ack in same if said == "stored"}
            unknown = sum(said not in ("stored", "not_stored") for said, _ in same)
            if not len(acks) <= runs[key] <= len(acks) + unknown:
                raise WrongError(f"false once: {content} is stored {runs[key]} times, reported {same}")

    # -- workers ------------------------------------------------------------------------------------------------------

    async def worker(self) -> Callable[[], None]:
        pick = self.random.choice
        compacted = pick((False, False, False, True))
        self.network.create(
            b'{"name":"i","subjects":["i.>"],"storage":"file","allow_direct":true,"max_msgs_per_subject":%d}'
            % (2 if compacted else -1)
        )
        self.network.create(
            b'{"name":"o","subjects":["o.>"],"storage":"file","allow_atomic":true,"allow_direct":true,'
            b'"allow_rollup_hdrs":%s,"duplicate_window":%d}' % (pick((b"true", b"false")), pick(WINDOWS) * 10**9)
        )
        total = pick((1, 5, 20, 40))
        before = self.random.randint(0, total)
        for n in range(before):
            self.network.store(f"i.{n % 3}", b"%d" % n)
        self.trouble("o", "i")
        writer = asyncio.create_task(self._write(before, total))
        standby = pick((False, True))
        self.say(f"{total} inputs, compacted {compacted}, standby {standby}")
        grouped = pick((False, False, True))
        self._with_state = self.seed % 8 not in (3, 6)  # not those that once found a defect
        self._processed: list[log.Processed] = []
        workers = [asyncio.create_task(self._work(writer, standby, grouped)) for _ in range(pick((1, 1, 2)))]
        try:
            done, running = await asyncio.wait(workers, timeout=PATIENCE, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if running:
                raise WrongError(f"hang: {len(running)} workers have not come to the end after {PATIENCE:g} s")
        finally:
            await _cancel(*workers, writer)

        def check() -> None:
            expected = [n for n in range(total) for _ in range(n % 3)]
            found = [int(each.payload) for each in self.stored("o", "o.out")]
            kept = {int(each.payload) for each in self.network.stream("i").stream.store}
            copies, wanted = Counter(found), Counter(expected)
            if missing := [n for n in wanted if copies[n] < wanted[n] and (n in kept or not compacted)]:
                raise WrongError(f"false success: inputs {missing} have too few outputs: {found}")
            if twice := [n for n in copies if copies[n] > wanted[n]]:
                raise WrongError(f"false once: inputs {twice} have too many outputs: {found}")
            if found != sorted(found):
                raise WrongError(f"the order is not kept: {found}")
            self._check_positions(compacted)

        return check

    def _check_positions(self, compacted: bool) -> None:
        """Compare every stored position with outputs and state before it, and every report with its worker's positions."""
        inputs = [(message.seq, int(message.payload)) for message in self.stored("i")]
        outputs: list[int] = []
        new = 0
        stored: list[tuple[int, int, int]] = []  # outputs, commits, position, of each worker up to each record
        of_worker: dict[str, int] = {}
        state: dict[str, bytes] = {}
        for message in self.stored("o"):
            if message.subject.startswith("o.state.w."):
                state[message.subject] = message.payload
                if b"KV-Operation: DEL" in message.header:
                    del state[message.subject]
                continue
            if message.subject == "o.out":
                outputs.append(int(message.payload))
                new += 1
                continue
            record = json.loads(message.payload)
            expected = [n for seq, n in inputs if seq < record["seq"] for _ in range(n % 3)]
            if outputs != expected and not (compacted and set(outputs) <= set(expected)):
                raise WrongError(f"a false position: {record['seq']} is stored after the outputs {outputs}")
            if self._with_state:
                self._check_state(record, state, outputs, [n for seq, n in inputs if seq < record["seq"]], compacted)
            of_worker[record["writer"]] = of_worker.get(record["writer"], 0) + new
            stored.append((of_worker[record["writer"]], record.get("number", 0) + 1, record["seq"]))
            new = 0
        for done in self._processed:
            if (done.outputs, done.commits, done.position) not in stored:
                raise WrongError(f"a false report: {done} is of no worker: {stored}")

    @staticmethod
    def _check_state(
        record: dict[str, Any], state: dict[str, bytes], outputs: list[int], inputs: list[int], compacted: bool
    ) -> None:
        """Compare a stored position with the state before it, which has each input that was handled."""
        keys = dict(state)
        odd = keys.pop("o.state.w.odd", None)
        noted = [[int(n) for n in value.split()] for value in keys.values()]
        handled = sorted(n for each in noted for n in each)
        if (
            outputs != [n for n in handled for _ in range(n % 3)]
            or any(each != sorted(each) for each in noted)
            or odd != (b"%d" % handled[-1] if handled and handled[-1] % 2 else None)
            or record["state"]["keys"] != len(state)
            or (handled != inputs and not (compacted and set(handled) < set(inputs)))
        ):
            raise WrongError(f"a false state: {record} is stored after the state {state} and the outputs {outputs}")

    async def _write(self, first: int, last: int) -> None:
        for n in range(first, last):
            await asyncio.sleep(self.random.random() * 0.2)
            self.network.store(f"i.{n % 3}", b"%d" % n)

    async def _work(self, writer: asyncio.Task[None], standby: bool, grouped: bool) -> None:
        """Start one worker again and again, as a supervisor does, until it comes to the end of the whole input."""
        pick = self.random.choice
        nc = await self.connect() if pick((True, False)) else self.nc
        options: dict[str, Any] = {"standby": True} if standby else {}

        def handle(given: Any) -> list[jsx.BatchMessage]:
            messages = given if grouped else [given]
            return [jsx.BatchMessage("o.out", msg.data) for msg in messages for _ in range(int(msg.data) % 3)]

        def note(given: Any, state: log.State) -> list[jsx.BatchMessage]:
            """Keep what was handled of each subject, and a key as long as the newest input is odd."""
            for msg in given if grouped else [given]:
                state[msg.subject] = state.get(msg.subject, b"") + b" " + msg.data
                state["odd"] = msg.data
                if int(msg.data) % 2 == 0:
                    del state["odd"]
            return handle(given)

        if self._with_state:
            options["state"] = "o.state"
        try:
            for start in count(1):
                complete = writer.done()
                js = nc.jetstream(timeout=self.timeout)
                reader = log.LogReader(js, "i", patience=self.timeout)
                work = log.exactly_once(
                    reader,
                    "o",
                    note if self._with_state else handle,
                    name="w",
                    prefix="o.at",
                    max_messages=pick((1, 3, 100)),
                    grouped=grouped,
                    patience=self.timeout,
                    **options,
                )
                task = asyncio.ensure_future(work)
                if self.bad and self.loop.time() < CALM and self.random.random() < 0.3:
                    self.loop.call_later(self.random.random() * pick((0.01, 0.1, 3.0)), task.cancel)
                try:
                    done = await task
                except asyncio.CancelledError:
                    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                        raise
                    self.say(f"worker, start {start}: cancelled")
                except nats.errors.Error as error:
                    self.say(f"worker, start {start}: {error!r}")
                    if isinstance(error, errors.PositionLostError | errors.HistoryUnavailableError):
                        raise WrongError(f"a loss is reported, but nothing is lost: {error}") from error
                else:
                    self.say(f"worker, start {start}: {done}")
                    self._processed.append(done)
                    if complete:
                        return
                await asyncio.sleep(self.random.random() * pick((0.02, 1.0)))
        finally:
            if nc is not self.nc:
                await _close(nc)


JOBS: dict[str, Callable[[World], Awaitable[Callable[[], None]]]] = {
    "ingest": World.ingest,
    "atomic": World.atomic,
    "worker": World.worker,
}


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they end: on Python 3.11, a call of nats-py loses a cancellation that arrives with its answer."""
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=1)


async def _close(nc: Any) -> None:
    with contextlib.suppress(OSError):  # nats-py raises it if the connection is lost meanwhile
        await nc.close()


def _runs(messages: list[StoredMessage]) -> Iterator[list[StoredMessage]]:
    """Yield the messages of each atomic batch: the server writes their place in it into a header."""
    run: list[StoredMessage] = []
    for message in messages:
        if b"Nats-Batch-Sequence: 1\r\n" in message.header or b"Nats-Batch-Sequence:1\r\n" in message.header:
            if run:
                yield run
            run = []
        if message.subject != "s.noise":
            run.append(message)
    if run:
        yield run


class _Clock:
    """Stands in for the module `time` in nats-py."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = loop.time


@contextlib.contextmanager
def _virtual(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Take time and randomness from the schedule."""
    rng = random.Random(seed)

    replaced: list[tuple[Any, str, Any]] = [
        (nats.aio.client, "time", _Clock(loop)),
        (nats.aio.client, "token_hex", lambda size: rng.randbytes(size).hex()),
        (nats.js.client, "token_hex", lambda size: rng.randbytes(size).hex()),
        (nats.nuid, "randbelow", rng.randrange),
        (nats.nuid, "token_bytes", rng.randbytes),
    ]
    kept = [getattr(where, name) for where, name, _ in replaced]
    state = random.getstate()
    random.seed(seed)
    for where, name, value in replaced:
        setattr(where, name, value)
    try:
        yield
    finally:
        random.setstate(state)
        for (where, name, _), value in zip(replaced, kept, strict=True):
            setattr(where, name, value)
