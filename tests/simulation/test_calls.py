"""A few seconds of the simulation of whole calls; `nox -s full -- call_simulation` runs 102,000 schedules."""

import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from call_schedules import replay, run
from call_world import JOBS

from jetstream_ext.client import fenced_write
from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.connection import Connection, Context
from jetstream_ext.client.ingest import _Run
from jetstream_ext.errors import BatchOutcomeUnknownError
from jetstream_ext.log.state import WorkerState
from jetstream_ext.protocol.ingest import Ingest
from jetstream_ext.protocol.outcome import Verdict
from jetstream_ext.protocol.records import Record, Total
from jetstream_ext.types import BatchAck, BatchMessage

# nats-py leaves the transports of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function StreamWriter")
SCHEDULES = {"ingest": 100, "atomic": 50, "worker": 30}


def failures(kind: str, first: int, count: int) -> list[str]:
    return [f"{name}: {error}" for name, error in run(first, count, [kind]) if error is not None]


@pytest.mark.parametrize("kind", JOBS)
def test_schedules(kind: str) -> None:
    first = Random().randrange(10**9)  # different seeds in every run; a failure names its seed
    found = failures(kind, first, SCHEDULES[kind])
    assert not found, "replay with: python tests/simulation --replay <name>\n" + "\n".join(found)


def test_a_schedule_can_be_replayed() -> None:
    for kind in JOBS:
        one: list[str] = []
        other: list[str] = []
        replay(f"{kind}:1", one.append)
        replay(f"{kind}:1", other.append)
        assert one == other, kind
        assert len(one) > 10


def test_schedules_that_found_a_defect() -> None:
    """A defect of the library or of the simulation."""
    names = (
        "ingest:6",
        "ingest:150",
        "ingest:1155",  # what was sent over a lost link arrives late
        "ingest:3686",  # a duplicate of a message that was sent again before, and not answered
        "ingest:7006633",  # what was sent over a lost link arrives after the search, and after the end of the run
        "ingest:7012257",  # the search after a batch that was opened and broke took a patience of its own
        "ingest:9051",  # a restarted server is another process
        "atomic:356",
        "atomic:235",  # to explain a refusal took longer than the call's timeout
        "atomic:694361207",
        "atomic:1203",  # other content with the message ids of an earlier batch
        "worker:3",  # a round trip that is longer than the timeout
        "worker:52",  # another worker takes over, and changes the state, while one reads it
        "worker:110",
    )
    found = []
    for name in names:
        try:
            replay(name)
        except Exception as error:
            found.append(f"{name}: {error}")
    assert not found, "\n".join(found)


committed, encode = AtomicSession.committed, Record.encode
begin, confirm, found, failure = Ingest.begin, Ingest._confirm, Ingest.found, _Run._failure


async def _reads_nothing(self: WorkerState, fence: int, expected: Total) -> None: ...


async def _believes_in_success(self: AtomicSession) -> BatchAck:
    try:
        return await committed(self)
    except BatchOutcomeUnknownError:
        return BatchAck("s", 10**6, batch_id=self.machine.batch_id, batch_size=self.machine.size)


async def _finds_nothing(self: AtomicSession, timeout: float | None) -> None:
    return None


def _trusts_what_was_sent(self: Ingest, verdict: Verdict) -> None:
    found(self, Verdict(self.unanswered, verdict.seq))


def _finds_no_message(self: Ingest, verdict: Verdict) -> None:
    found(self, Verdict(0))


def _backwards(self: Ingest) -> list[Any]:
    self.window.reverse()
    return begin(self)


def _without_unanswered(self: _Run, *arguments: Any, **options: Any) -> Any:
    self._machine.unanswered = self._machine._doubtful = 0
    return failure(self, *arguments, **options)


def _without_doubts(self: Ingest, count: int, **options: Any) -> None:
    self._doubtful = 0
    confirm(self, count, **options)


def _ahead(self: Record) -> bytes:
    return encode(replace(self, seq=self.seq + 1))


def _without_a_fence(*arguments: Any, expected_last_subject_seq: int, **options: Any) -> BatchMessage:
    return BatchMessage(*arguments, **options)


BUGS: dict[str, tuple[Any, str, Any, str, str]] = {
    "a lost ack is success": (AtomicSession, "committed", _believes_in_success, "atomic", "false success"),
    "resolve finds nothing": (AtomicSession, "resolve", _finds_nothing, "atomic", "false not_stored"),
    "waits without a limit": (Context, "resolve_timeout", lambda *_: 10.0**6, "atomic", "hang"),
    "subscriptions stay": (Connection, "drop", lambda *_: None, "atomic", "subscriptions are left"),
    "what was sent is stored": (Ingest, "found", _trusts_what_was_sent, "ingest", "false success"),
    "sent again backwards": (Ingest, "begin", _backwards, "ingest", "order"),
    "no doubts in the error": (_Run, "_failure", _without_unanswered, "ingest", "false not_stored"),
    "no doubts in the report": (Ingest, "_confirm", _without_doubts, "ingest", "false once"),
    "no search": (Ingest, "found", _finds_no_message, "ingest", "false once"),
    "no fence": (fenced_write, "BatchMessage", _without_a_fence, "worker", "false once"),
    "positions are ahead": (Record, "encode", _ahead, "worker", "false position"),
    "a start without its state": (WorkerState, "load", _reads_nothing, "worker", "false state"),
    "an old state": (WorkerState, "messages", lambda *_: [], "worker", "false state"),
}


# Seeds at which the search for rare ones begins.
FIRST = {
    "no doubts in the error": 45,
    "no doubts in the report": 465,
    "resolve finds nothing": 20,
}


def test_finds_bugs() -> None:
    """The simulation must find the defect of a client with a known one."""
    for bug, (owner, name, wrong, kind, symptom) in BUGS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, wrong)
            reports = (str(error) for _, error in run(FIRST.get(bug, 0), 2000, [kind]))
            assert any(symptom in report for report in reports), bug
