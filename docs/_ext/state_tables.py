"""The tables of states in the design pages, drawn from the machines: each cell is a machine that was driven there.

The one of a group's members is drawn from `membership.TABLE`, which the machine looks into.

In a page, the directive ``state-table`` has one of the names of `TABLES` as its argument. For each cell a new machine is brought into the state of the column by its public methods; then the event of the row happens, and the cell
says what came of it. A state that this module cannot reach breaks the build.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from jetstream_ext import errors
from jetstream_ext.protocol import api, atomic, fast, membership, range_read
from jetstream_ext.protocol.direct import Request, StoredMsg
from jetstream_ext.protocol.fast import State as FastState
from jetstream_ext.protocol.feature_table import ATOMIC_EOB
from jetstream_ext.protocol.range_read import RangeRead
from jetstream_ext.protocol.range_read import State as ReadState
from jetstream_ext.protocol.reads import MultiLast, OneReply, Scan
from jetstream_ext.types import BatchAck, BatchMessage, GapMode

if TYPE_CHECKING:
    from sphinx.application import Sphinx

NOTHING = "·"
CANNOT_BE = ""
SENT = 5
"""Messages that a fast batch has sent when the event happens."""

Machine = Any
Event = Callable[[Machine], object]
Table = tuple[list[str], list[list[str]]]
NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"
MESSAGE = BatchMessage("a.1", b"x")


@dataclass(frozen=True)
class Row:
    """An event; `only` names the states in which it can happen, `code` the error code that it brings.

    `at` is the way into a state, if it is not that of the other rows.
    """

    name: str
    event: Event
    only: frozenset[str] | None = None
    code: int | None = None
    at: Callable[[Any], Machine] | None = None


def table(states: Iterable[Any], at: Callable[[Any], Machine], rows: Iterable[Row]) -> Table:
    """Drive a new machine for each cell; rows with the same cells become one."""
    states = list(states)
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        cells = tuple(
            cell((row.at or at)(state), row) if row.only is None or state.name in row.only else CANNOT_BE
            for state in states
        )
        merged.setdefault(cells, []).append(row.name)
    return ["", *(state.name for state in states)], [["; ".join(names), *cells] for cells, names in merged.items()]


def cell(machine: Machine, row: Row) -> str:
    """Let the event happen; return the state that follows and the error that a caller gets."""
    before = machine.state
    told: BaseException | None = None
    try:
        row.event(machine)
    except errors.JetStreamExtError as error:
        told = error
    words: list[str] = []
    if machine.state is not before:
        reason = getattr(machine, "end_reason", None)
        words.append(f"**{machine.state.name}**" + (f" {reason.name}" if reason else ""))
        told = told or machine.error
    if told is not None:
        own = row.code is not None and type(told) is errors.SERVER_ERRORS[row.code]
        outcome = getattr(told, "outcome", None)
        words.append(("its error" if own else f"`{type(told).__name__}`") + (f" ({outcome})" if outcome else ""))
    return " ".join(words) or NOTHING


def reached(machine: Machine, state: Any) -> Machine:
    """Return the machine, or break the build: this module has no way to a new state."""
    if machine.state is not state:
        raise AssertionError(f"no way to {state} is known here; the machine is {machine.state}")
    return machine


def refusal(code: int) -> bytes:
    body = {"error": {"code": 400, "err_code": code, "description": "no"}, "stream": "S", "seq": 0}
    return orjson.dumps(body)


def codes(other: str) -> list[int]:
    """Return the error codes that can answer a message of a batch, but for those of the `other` kind."""
    return sorted(
        code
        for code, kind in errors.SERVER_ERRORS.items()
        if issubclass(kind, errors.BatchError) and not kind.__name__.startswith(other)
    )


# -- the atomic batch -------------------------------------------------------------------------------------------


def atomic_batch(state: atomic.State) -> atomic.AtomicBatchMachine:
    """Return a batch of two messages that got into `state`."""
    machine = atomic.AtomicBatchMachine("b1")
    if state is atomic.State.NEW:
        return machine
    opened(machine)
    machine.add(machine.prepare(MESSAGE))
    machine.add(machine.prepare(MESSAGE))
    machine.receive(1, b"", b"")
    if state in (atomic.State.COMMITTING, atomic.State.COMMITTED, atomic.State.UNKNOWN):
        machine.commit(None)
    if state is atomic.State.COMMITTED:
        batch_ack(machine)
    elif state is atomic.State.UNKNOWN:
        machine.lost("no answer")
    elif state is atomic.State.DISCARDED:
        machine.discard()
    elif state is atomic.State.FAILED:
        machine.receive(1, b"", refusal(10174))
    return reached(machine, state)


def batch_ack(machine: atomic.AtomicBatchMachine) -> None:
    body = {"stream": "S", "seq": 9, "batch": machine.batch_id, "count": machine.size}
    machine.receive(machine.sent, b"", orjson.dumps(body))


def replied(payload: bytes, header: bytes = b"", seq: int | None = None) -> Event:
    def event(machine: atomic.AtomicBatchMachine) -> object:
        return machine.receive(seq or machine.sent, header, payload)

    return event


def forgotten_after_a_reconnect(machine: atomic.AtomicBatchMachine) -> object:
    machine.disconnected(reply_awaited=False)
    if machine.state is atomic.State.OPEN:
        machine.add(machine.prepare(MESSAGE))
    return replied(refusal(10176))(machine)


def opened(machine: atomic.AtomicBatchMachine) -> None:
    first = machine.prepare(MESSAGE)
    machine.open(first, api.Server(ATOMIC_EOB.api_level, ""), "_INBOX.x")


SENT_STATES = frozenset(state.name for state in atomic.State) - {"NEW"}

ATOMIC: list[Row] = [
    Row("`open`", opened, frozenset({"NEW"})),
    Row("`add`", lambda machine: machine.add(machine.prepare(MESSAGE)) and None, SENT_STATES),
    Row("`commit`", lambda machine: machine.commit(machine.prepare(MESSAGE)) and None, SENT_STATES),
    Row("`commit_eob`", lambda machine: machine.commit(None) and None),
    Row("`discard`, an exception in the block", lambda machine: machine.discard()),
    Row("an empty reply to an older message", replied(b"", seq=1), SENT_STATES),
    Row("an empty reply to the newest", replied(b""), SENT_STATES),
    Row("the ack of the batch", batch_ack, SENT_STATES),
    Row("the ack of an ordinary publish", replied(orjson.dumps({"stream": "S", "seq": 9})), SENT_STATES),
    Row("a malformed reply", replied(b"no JSON"), SENT_STATES),
    Row("503 to the newest message", replied(b"", NO_RESPONDERS), SENT_STATES),
    Row("503 to an older one", replied(b"", NO_RESPONDERS, 1), SENT_STATES),
    *(Row(str(code), replied(refusal(code)), SENT_STATES, code) for code in codes("FastPublish")),
    Row(
        "no reply in time, or the connection is lost while a reply is awaited",
        lambda machine: machine.lost("no answer"),
        SENT_STATES,
    ),
    Row(
        "the connection is lost while no reply is awaited",
        lambda machine: machine.disconnected(reply_awaited=False),
        SENT_STATES,
    ),
    Row("10176 after the connection was lost", forgotten_after_a_reconnect, SENT_STATES),
    Row("`resolve` finds the batch", lambda machine: machine.resolved(BatchAck("S", 9, "b1", 2)), SENT_STATES),
    Row("`resolve` proves that nothing is stored", lambda machine: machine.resolved(None), SENT_STATES),
]


# -- the fast batch ---------------------------------------------------------------------------------------------


def frame(body: dict[str, Any] | bytes, seq: int | None = None, op: int = 1, header: bytes = b"") -> Event:
    """Return the event of a reply to the message `seq`, by default the newest."""
    payload = body if isinstance(body, bytes) else orjson.dumps(body)

    def event(machine: fast.FastBatch) -> None:
        reply = b"_INBOX.x.b1.10.fail.%d.%d.$FI" % (machine.sent if seq is None else seq, op)
        machine.receive([(reply, header + payload, len(header))], 1.0)

    return event


def final(missing: int) -> Event:
    def event(machine: fast.FastBatch) -> None:
        count = max(0, machine.sent - missing)
        frame({"stream": "S", "seq": 9, "batch": "b1", "count": count}, machine.sent + 1, 3)(machine)

    return event


def silence(machine: fast.FastBatch) -> None:
    machine.waiting(1.0)
    machine.handle_timer(10_000.0)


FIRST_ACK = frame({"type": "ack", "seq": 0, "msgs": 10}, 1, 0)
PONG = frame({"type": "ack", "seq": 0, "msgs": 10}, op=4)
LOSS = frame({"type": "gap", "last_seq": 3, "seq": 5}, 5)
CHECK_FAILED = frame({"type": "err", "seq": 1, "error": {"code": 400, "err_code": 10071, "description": "no"}}, 1)


def fast_batch(state: FastState, mode: GapMode) -> fast.FastBatch:
    """Return a batch that got into `state`, with five messages sent if it can have so many."""
    machine = fast.FastBatch(batch_id="b1", flow=10, gap=mode)
    machine.open("_INBOX.x")
    if state is FastState.NEW:
        return machine
    machine.add(MESSAGE, 0.0)
    if state is FastState.STARTING:
        return machine
    FIRST_ACK(machine)
    for _ in range(SENT - 1):
        machine.add(MESSAGE, 0.0)
    if state is FastState.COMMITTING:
        machine.commit(0.0)
    elif state is FastState.DRAINING:
        LOSS(machine)
    elif state is FastState.SUSPENDED:
        machine.disconnected(0.0)
        machine.reconnected(0.0)
    elif state is FastState.ENDED:
        machine.commit(0.0)
        final(0)(machine)
    return reached(machine, state)


STARTED = frozenset(state.name for state in FastState) - {"NEW"}
SEVERAL = STARTED - {"STARTING"}  # the first message has to be answered before a second is sent
COMMITTING = frozenset({"COMMITTING"})

FAST: list[Row] = [
    Row("`add`", lambda machine: machine.add(MESSAGE, 1.0) and None),
    Row("`commit_eob`", lambda machine: machine.commit(1.0) and None),
    Row("`discard`, an exception in the block", lambda machine: machine.discard() and None),
    Row("`ack` frame", FIRST_ACK, STARTED),
    Row("the answer to a ping", PONG, SEVERAL),
    Row("`gap` frame", LOSS, SEVERAL),
    Row("`err` frame", CHECK_FAILED, STARTED),
    Row("the final ack of all", final(0), STARTED),
    Row("the final ack of fewer", final(2), SEVERAL),
    Row("the ack of an ordinary publish", frame({"stream": "S", "seq": 9}), STARTED),
    Row("a frame of an unknown type", frame({"type": "weather"}), STARTED),
    Row("a malformed reply", frame(b"no JSON"), STARTED),
    Row("503 to a message", frame(b"", header=NO_RESPONDERS), STARTED),
    Row("503 to a ping", frame(b"", op=4, header=NO_RESPONDERS), SEVERAL),
    Row("503 to the end of the batch", frame(b"", SENT + 1, 3, NO_RESPONDERS), COMMITTING),
    *(Row(str(code), frame(refusal(code)), STARTED, code) for code in codes("AtomicPublish")),
    Row("10208 to a ping", frame(refusal(10208), op=4), SEVERAL, 10208),
    Row("10208 to the end of the batch", frame(refusal(10208), SENT + 1, 3), COMMITTING, 10208),
    Row("no sign of the server while a caller waits", silence, STARTED),
    Row("the connection is lost", lambda machine: machine.disconnected(1.0) and None),
    Row("the connection is closed", lambda machine: machine.disconnected(1.0, for_good=True) and None),
]


def fast_table(mode: GapMode) -> Table:
    other = FastState.SUSPENDED if mode is GapMode.FAIL else FastState.DRAINING
    states = [state for state in FastState if state is not other]
    return table(states, lambda state: fast_batch(state, mode), FAST)


# -- the range read ---------------------------------------------------------------------------------------------

LAST = 200
"""The sequence that the reads prove."""
LATE = 1000.0
"""A time after every deadline."""


def messages(*seqs: int, stream: str = "S", last: int = 0, pending: int | None = None) -> list[Any]:
    """Return the frames of a reply: its messages, of which the first names `last`, and its end if `pending` follow."""
    found = []
    for seq in seqs:
        found += status(
            f"\r\nNats-Stream: {stream}\r\nNats-Subject: a\r\nNats-Sequence: {seq}\r\n"
            "Nats-Time-Stamp: 2026-01-01T00:00:00Z\r\n"
            f"Nats-Num-Pending: {pending or 9}\r\nNats-Last-Sequence: {last}"
        )
        last = seq
    if pending is not None:
        found += status(f" 204 EOB\r\nNats-Num-Pending: {pending}\r\nNats-Last-Sequence: {last}")
    return found


def status(line: str) -> list[Any]:
    frame = f"NATS/1.0{line}\r\n\r\n".encode()
    return [(b"_INBOX.x", frame, len(frame))]


def carried_out(machine: RangeRead, now: float = 0.0) -> None:
    """Do what the machine asks for, until it waits or ends."""
    while isinstance(machine.next_action(now), range_read.SendRequest | range_read.DropReply | range_read.Deliver):
        pass


def arrived(frames: list[Any], now: float = 0.0) -> Event:
    def event(machine: RangeRead) -> None:
        machine.receive(machine._plan.in_flight[0], frames, now)  # noqa: SLF001 - the newest request
        carried_out(machine, now)

    return event


def leader_found(seq: int | None, now: float = 0.0) -> Event:
    def event(machine: RangeRead) -> None:
        found = None if seq is None else StoredMsg(stream="S", subject="a", seq=seq)
        machine.leader_answered(found, LAST, now)
        carried_out(machine, now)

    return event


def connection_lost(machine: RangeRead) -> None:
    machine.disconnected()
    carried_out(machine)


def connection_usable(machine: RangeRead) -> None:
    machine.connected()
    machine.session += 1
    carried_out(machine)


def time_passed(machine: RangeRead) -> None:
    machine.handle_timer(LATE)


def timeout_passed(machine: RangeRead) -> None:
    machine.handle_timer(2 * LATE)


def each(*events: Event) -> Event:
    def event(machine: RangeRead) -> None:
        for each in events:
            each(machine)

    return event


FAILURE = errors.RequestTimeoutError("no connection")
PAUSE_AND_RETRY = each(time_passed, connection_usable)


MULTI_LAST = Request(multi_last=("a",), up_to_seq=LAST, max_bytes=1)


def new_read(state: ReadState, *, allowed: bool = False) -> RangeRead:
    plan = Scan(up_to_seq=LAST, max_bytes=1 << 16, prefetch=1)
    plan.prove(LAST)
    machine = RangeRead("S", plan, 5.0, pause=0.05, allowed=allowed)
    carried_out(machine)
    return reached(machine, state)


def read_in(state: ReadState) -> RangeRead:
    """Return a read of the first message that got into `state`."""
    machine = new_read(ReadState.READING)
    arrived(messages(1, pending=9))(machine)
    if state in (ReadState.ASKING, ReadState.ENDED):
        arrived(messages(2, pending=0))(machine)
    if state is ReadState.PAUSED:
        arrived(status(" 503"))(machine)
    elif state is ReadState.RESUMING:
        connection_lost(machine)
    elif state is ReadState.ENDED:
        leader_found(None)(machine)
    return reached(machine, state)


def multi_last(state: ReadState) -> RangeRead:
    """Return a `multi_last` up to a sequence, which asks the leader first."""
    machine = RangeRead("S", MultiLast(MULTI_LAST), 5.0, pause=0.05)
    carried_out(machine)
    return reached(machine, state)


def large_read(state: ReadState) -> RangeRead:
    """Return a read of one large reply."""
    machine = RangeRead("S", OneReply(Request(seq=1, batch=9, max_bytes=1 << 20)), 5.0, pause=0.05)
    carried_out(machine)
    return reached(machine, state)


READING, ASKING = frozenset({"READING"}), frozenset({"ASKING"})
NO_RESPONDER = arrived(status(" 503"))
A_MIRROR = arrived(messages(5, stream="M"))

RANGE_READ: list[Row] = [
    Row("messages arrive from a replica", arrived(messages(5)), READING),
    Row("a mirror's messages arrive", A_MIRROR, READING),
    Row(
        "a mirror's messages arrive, `timeout` seconds after the last new message",
        each(A_MIRROR, PAUSE_AND_RETRY, arrived(messages(5, stream="M"), LATE)),
        READING,
    ),
    Row("the last reply ends before the end of the range", arrived(messages(5, pending=0)), READING),
    Row("the last reply ends at the end of the range", arrived(messages(LAST, pending=0)), READING),
    Row("the leader has no later message in the range", leader_found(None), ASKING),
    Row("the leader has a message that no responder delivered", leader_found(5), ASKING),
    Row(
        "the leader has a message that no responder delivered, `timeout` seconds after the last new message",
        each(leader_found(5), PAUSE_AND_RETRY, arrived(messages(pending=0)), leader_found(5, LATE)),
        ASKING,
    ),
    Row(
        "the leader says which message shows the point in time of a `multi_last`",
        leader_found(5),
        ASKING,
        at=multi_last,
    ),
    Row("503", NO_RESPONDER, READING),
    Row("503 before any message", NO_RESPONDER, READING, at=new_read),
    Row(
        "503 before any message of a stream that is known to allow direct gets",
        NO_RESPONDER,
        READING,
        at=lambda state: new_read(state, allowed=True),
    ),
    Row(
        "503 `timeout` seconds after the last new message",
        each(NO_RESPONDER, PAUSE_AND_RETRY, arrived(status(" 503"), LATE)),
        READING,
    ),
    Row("messages of a reply are lost", arrived(messages(5, last=4)), READING),
    Row("nothing arrives for half of `timeout`: the request is repeated", each(time_passed, carried_out), READING),
    Row("nothing arrives for `timeout` seconds", each(time_passed, carried_out, timeout_passed), READING),
    Row("the connection is lost", connection_lost),
    Row(
        "messages or the connection are lost, the second time at one place",
        each(connection_lost, connection_usable, connection_lost),
        READING,
    ),
    Row(
        "the connection is lost a second time at one place, while more than 64 KiB are asked for",
        each(connection_lost, connection_usable, connection_lost),
        READING,
        at=large_read,
    ),
    Row("408", arrived(status(" 408 Bad Request")), READING),
    Row("a malformed reply", arrived(status(" 299")), READING),
    Row("a request, the leader's answer or the reconnect fails", lambda machine: machine.failed(FAILURE)),
    Row("the pause is over", time_passed, frozenset({"PAUSED"})),
    Row("the connection is usable", connection_usable, frozenset({"RESUMING"})),
]


def membership_table() -> Table:
    rows = [
        [event.value, *(NOTHING if phase is None else f"**{phase.name}**" for phase in row)]
        for event, row in membership.TABLE.items()
    ]
    return ["event", *(phase.name for phase in membership.Phase)], rows


TABLES: dict[str, Callable[[], Table]] = {
    "atomic": lambda: table(atomic.State, atomic_batch, ATOMIC),
    "fast-fail": lambda: fast_table(GapMode.FAIL),
    "fast-ok": lambda: fast_table(GapMode.OK),
    "membership": membership_table,
    "range-read": lambda: table(ReadState, read_in, RANGE_READ),
}


def markdown(name: str) -> str:
    """Return one of the tables."""
    head, rows = TABLES[name]()
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *rows])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive (called by Sphinx)."""
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class StateTable(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[Any]:
            (found,) = self.parse_content_to_nodes()
            found["classes"].append("wide")  # see _static/pages.css
            for literal in list(found.findall(nodes.literal)):
                # The names of errors are long: a line may end between their words.
                first, *words = re.findall(r"[A-Z]?[^A-Z]+|[A-Z]", literal.astext())
                literal.clear()
                literal += nodes.Text(first)
                for word in words:
                    literal += [nodes.raw("", "<wbr>", format="html"), nodes.Text(word)]
            return [found]

        def parse_content_to_nodes(self, allow_section_headings: bool = False) -> list[Any]:
            self.content = StringList(markdown(self.arguments[0]).splitlines(), source=__file__)
            return super().parse_content_to_nodes(allow_section_headings)

    app.add_directive("state-table", StateTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
