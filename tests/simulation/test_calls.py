"""A few seconds of the simulation of whole calls; `nox -s full -- call_simulation` runs 104,000 schedules."""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from call_schedules import replay, run
from call_world import JOBS, World

import jetstream_ext as jsx
from jetstream_ext.client import fenced_write
from jetstream_ext.client.atomic_session import AtomicSession, _Patience
from jetstream_ext.client.connection import Connection, Context
from jetstream_ext.client.ingest import _Ingest, _Source
from jetstream_ext.errors import BatchOutcomeUnknownError
from jetstream_ext.log import worker
from jetstream_ext.testing import reference
from jetstream_ext.types import BatchAck, BatchMessage

# nats-py leaves the transports of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function StreamWriter")
SCHEDULES = {"ingest": 100, "atomic": 50, "reused": 35, "worker": 30}


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
        "ingest:9051",  # a restarted server is another process
        "atomic:356",
        "atomic:226040",  # a message is refused, and its place taken by that of an earlier batch with the id
        "atomic:1518417",  # message 1 is refused unseen, and the commit is that of an earlier batch with the id
        "atomic:235",  # to explain a refusal took longer than the call's timeout
        "atomic:694361207",
        "reused:605",
        "reused:20221",  # a lookup that failed made a timeout a cancellation
        "reused:750",  # a batch of which a part was stored by the commit of a later one
        "reused:814",
        "atomic:1203",  # other content with the message ids of an earlier batch
        "worker:3",  # a round trip that is longer than the timeout
        "worker:110",
    )
    found = []
    for name in names:
        try:
            replay(name)
        except Exception as error:
            found.append(f"{name}: {error}")
    assert not found, "\n".join(found)


async def _send_again_and_again(world: World) -> Callable[[], None]:
    """Let a client that gets no answer to lookups send a message in a batch, and three times alone."""
    world.network.create(
        b'{"name":"s","subjects":["s.>"],"storage":"file","allow_batched":true,"duplicate_window":3000000000}'
    )
    rules = (
        reference.Ignore("$JS.API.>"),
        reference.Drop(kind="flow_ack", times=None),
        reference.Drop(kind="pub_ack", times=2),
    )
    for rule in rules:
        world.network.faults.add(rule)
    call = jsx.ingest(world.nc.jetstream(timeout=1), [("s.a", b"0")])
    report = await world.end(call, 60, "ingest")

    def check() -> None:
        assert len(world.stored("s")) == 2, "the server had forgotten the first copy, and not the second one"
        assert (report.stored, report.duplicates, report.in_doubt) == (1, 1, 1)

    return check


def test_a_duplicate_of_a_message_that_was_sent_again_before_leaves_it_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(JOBS, "ingest", _send_again_and_again)
    replay("ingest:0")


committed, confirm, failed, resend = AtomicSession.committed, _Ingest._confirm, _Ingest._failure, _Ingest._resend
publish_alone, encode_position = _Ingest._publish_alone, worker.encode_position


async def _believes_in_success(self: AtomicSession) -> BatchAck:
    try:
        return await committed(self)
    except BatchOutcomeUnknownError:
        return BatchAck("s", 10**6, batch_id=self.machine.batch_id, batch_size=self.machine.size)


async def _finds_nothing(self: AtomicSession, timeout: float | None) -> None:
    return None


async def _trusts_what_was_sent(self: _Ingest) -> None:
    self._confirm(len(self._window))


async def _backwards(self: _Ingest) -> None:
    entries = list(self._window)
    self._window.clear()
    self._window.extend(reversed(entries))
    await resend(self)


def _without_unanswered(self: _Ingest, *arguments: Any) -> Any:
    self._unanswered = 0
    return failed(self, *arguments)


def _without_doubts(self: _Ingest, count: int, *, in_doubt: bool = False) -> None:
    confirm(self, count)


async def _always_a_duplicate(self: _Ingest, *arguments: Any) -> bool:
    await publish_alone(self, *arguments)
    return True


def _ahead(stream: str, created: str, seq: int, **record: Any) -> bytes:
    return encode_position(stream, created, seq + 1, **record)


def _without_a_fence(*arguments: Any, expected_last_subject_seq: int, **options: Any) -> BatchMessage:
    return BatchMessage(*arguments, **options)


BUGS: dict[str, tuple[Any, str, Any, str, str]] = {
    "a lost ack is success": (AtomicSession, "committed", _believes_in_success, "atomic", "false success"),
    "resolve finds nothing": (AtomicSession, "resolve", _finds_nothing, "atomic", "false not_stored"),
    "lookups take time of their own": (_Patience, "left", property(lambda self: self.timeout), "atomic", "hang"),
    "waits without a limit": (Context, "resolve_timeout", lambda *_: 10.0**6, "atomic", "hang"),
    "subscriptions stay": (Connection, "drop", lambda *_: None, "atomic", "subscriptions are left"),
    "what was sent is stored": (_Ingest, "_resend", _trusts_what_was_sent, "ingest", "false success"),
    "sent again backwards": (_Ingest, "_resend", _backwards, "ingest", "order"),
    "sent again without ids": (_Source, "_with_id", lambda _, entry: entry, "ingest", "false once"),
    "no doubts in the error": (_Ingest, "_failure", _without_unanswered, "ingest", "false not_stored"),
    "no doubts in the report": (_Ingest, "_confirm", _without_doubts, "ingest", "false once"),
    "no search": (_Ingest, "_ids_are_trusted", lambda _: True, "ingest", "false once"),
    "invented duplicates": (_Ingest, "_publish_alone", _always_a_duplicate, "ingest", "false duplicates"),
    "no fence": (fenced_write, "BatchMessage", _without_a_fence, "worker", "false once"),
    "positions are ahead": (worker, "encode_position", _ahead, "worker", "false position"),
}


# Seeds at which the search for rare ones begins.
FIRST = {
    "no doubts in the error": 45,
    "no doubts in the report": 465,
    "sent again without ids": 80,
    "lookups take time of their own": 35,
    "resolve finds nothing": 20,
}


def test_finds_bugs() -> None:
    """The simulation must find the defect of a client with a known one."""
    for bug, (owner, name, wrong, kind, symptom) in BUGS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, wrong)
            reports = (str(error) for _, error in run(FIRST.get(bug, 0), 2000, [kind]))
            assert any(symptom in report for report in reports), bug
