"""The decoders and machines that read what servers and publishers wrote, each fed with mutations of valid frames.

A family has cases; the number of a case is the seed of everything in it. A case returns how many mutated frames it has
fed. It raises what a caller could not expect: any error but the documented ones, or a broken promise of a machine.
"""

from __future__ import annotations

import base64
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

import pyarrow as pa
from mutator import TIMES, VALUES, Block, Document, Mutator
from nats.js.api import StreamConfig

from jetstream_ext.client import consumers, streams
from jetstream_ext.client.api import malformed_as_error
from jetstream_ext.client.base_connection import FallbackConnection
from jetstream_ext.columns import NANOSECONDS, Columns
from jetstream_ext.errors import BadHeaderError, JetStreamExtError, ResponseError
from jetstream_ext.kv import entries as kv_entries
from jetstream_ext.kv.entries import never_expires, ttl_of
from jetstream_ext.kv.history import RECORD, Past, ResolvedRevision, drops_oldest, known_since
from jetstream_ext.log.liveness import holder_of
from jetstream_ext.log.offsets import StoredOffset
from jetstream_ext.protocol import api, frames, outcome
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import Server, StreamState
from jetstream_ext.protocol.atomic import AtomicBatchMachine
from jetstream_ext.protocol.atomic import State as AtomicState
from jetstream_ext.protocol.atomic_wire import read_reply
from jetstream_ext.protocol.direct import Block as RowBlock
from jetstream_ext.protocol.direct import ReplyDecoder, Request, StoredMsg, decode_single, stored_block
from jetstream_ext.protocol.fast import KEPT_REPORTS, FastBatch
from jetstream_ext.protocol.fast import State as FastState
from jetstream_ext.protocol.fast_window import LARGEST_FLOW
from jetstream_ext.protocol.feature_table import DIRECT_BATCH, FENCED_BATCHES
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.loss import Gaps, were_replaced
from jetstream_ext.protocol.numbers import LARGEST
from jetstream_ext.protocol.outcome import marked_seq
from jetstream_ext.protocol.range_read import (
    AskLeader,
    AwaitConnection,
    Deliver,
    Done,
    RangeRead,
    SendRequest,
    Wait,
)
from jetstream_ext.protocol.reads import MultiLast, OneReply, Scan
from jetstream_ext.protocol.records import Record
from jetstream_ext.protocol.table import Content
from jetstream_ext.types import BatchMessage, GapMode

Case = Callable[[Mutator], int]
NOW: Final = datetime(2026, 1, 2, tzinfo=UTC)
NOW_NS: Final = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000_000
INBOX: Final = b"_INBOX.x.y"
BATCH: Final = "abc"


def require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


# -- the valid frames ---------------------------------------------------------------------------------------------

STORED: Final = (
    b"",
    b"A: 1\r\nB: \xc3\xa9\r\n",
    b"Nats-Batch-Id: abc\r\nNats-Batch-Sequence: 2\r\nNats-Batch-Commit: 1\r\n",
    b"KV-Operation: DEL\r\nNats-TTL: 1h30m\r\nNats-Expected-Last-Subject-Sequence: 4\r\n",
    b"Nats-Marker-Reason: MaxAge\r\nNats-TTL: 60s\r\n",
    b"Nats-Rollup: sub\r\nNats-TTL: never\r\nNats-Sequence: 77\r\n",
)


def reply(seq: int, last: int, stored: bytes = b"") -> Block:
    """A message of a batched direct-get reply."""
    added = (
        b"Nats-Stream: S\r\nNats-Subject: $KV.B.k%d\r\nNats-Sequence: %d\r\nNats-Time-Stamp: 2026-01-01T00:00:%02d.5Z\r\n"
        b"Nats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n" % (seq % 7, seq, seq % 60, 20 - seq, last)
    )
    return b"NATS/1.0\r\n%b%b\r\n" % (stored, added), b"value"


REPLIES: Final = [reply(seq, seq - 1, STORED[seq % len(STORED)]) for seq in range(1, 11)]
SINGLES: Final = [
    (block[: block.index(b"Nats-Num-Pending")] + b"\r\n", payload) for block, payload in REPLIES[: len(STORED)]
]
ENDS: Final[list[Block]] = [
    (b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 10\r\nNats-Last-Sequence: 10\r\n\r\n", b""),
    (b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 10\r\nNats-UpTo-Sequence: 12\r\n\r\n", b""),
    (b"NATS/1.0 404 Message Not Found\r\n\r\n", b""),
    (b"NATS/1.0 408 Bad Request\r\n\r\n", b""),
    (b"NATS/1.0 413 Too Many Results\r\n\r\n", b""),
    (b"NATS/1.0 503\r\n\r\n", b""),
]
DIRECT: Final = REPLIES + SINGLES + ENDS

ERROR: Final = {"code": 400, "err_code": 10071, "description": "wrong last sequence: 4"}
FINAL: Final = {"stream": "S", "domain": "hub", "seq": 12, "batch": BATCH, "count": 3, "val": "3"}
FAST: Final = tuple(
    map(
        Document,
        (
            {"type": "ack", "seq": 2, "msgs": 10},
            {"type": "gap", "last_seq": 2, "seq": 4},
            {"type": "err", "seq": 3, "error": ERROR},
            {"last_seq": 2, "seq": 4, "ack_msgs": 5},
            {"seq": 2, "error": ERROR},
            {"stream": "S", "seq": 5},
            {"error": ERROR},
            FINAL,
        ),
    )
)
ATOMIC: Final = tuple(map(Document, (FINAL, {"error": ERROR, "stream": "S", "seq": 0}, {"stream": "S", "seq": 5})))
SOURCE: Final = {
    "name": "O",
    "filter_subject": "a.>",
    "subject_transforms": [{"src": "a.*", "dest": "b.{{wildcard(1)}}"}],
    "external": {"api": "$JS.hub.API", "deliver": "d"},
    "consumer": {"name": "c", "deliver_subject": "e"},
}
CONFIG: Final = {
    "name": "S", "subjects": ["a.*", "$KV.B.>"], "retention": "limits", "storage": "file", "discard": "new", "max_msgs": 1000,
    "max_bytes": 100_000, "max_age": 3_600_000_000_000, "max_msgs_per_subject": 5, "max_msg_size": -1, "num_replicas": 3,
    "duplicate_window": 120_000_000_000, "first_seq": 1, "allow_direct": True, "allow_rollup_hdrs": True,
    "subject_delete_marker_ttl": 60_000_000_000, "sources": [SOURCE], "subject_transform": {"src": "a", "dest": "c"},
    "placement": {"cluster": "C", "tags": ["t"]}, "republish": {"src": "a", "dest": "r"},
    "metadata": {
        "_nats.level": "4", "_nats.ver": "2.15.1", "_nats.req.level": "0",
        RECORD: '{"since":"2026-01-01T00:00:00+00:00","limits":{}}',
    },
}  # fmt: skip
STATE: Final = {
    "messages": 10, "bytes": 2000, "first_seq": 1, "first_ts": "2026-01-01T00:00:01Z", "last_seq": 10,
    "last_ts": "2026-01-01T00:00:10.5Z", "num_subjects": 7, "consumer_count": 0, "subjects": {"$KV.B.k1": 2, "a.b": 1},
}  # fmt: skip
INFO: Final = {
    "type": "io.nats.jetstream.api.v1.stream_info_response", "total": 2, "offset": 0, "limit": 100_000, "config": CONFIG,
    "created": "2026-01-01T00:00:00.123456789Z", "state": STATE, "domain": "hub", "ts": "2026-01-02T00:00:00Z",
    "cluster": {"name": "C", "leader": "n1", "replicas": [{"name": "n2", "current": True, "active": 100_000_000}, {"name": "n3"}]},
    "sources": [SOURCE | {"lag": 3, "active": 5_000_000, "error": ERROR}],
}  # fmt: skip
MIRROR: Final = INFO | {
    "config": CONFIG | {"sources": [], "mirror": SOURCE},
    "mirror": SOURCE | {"lag": 1, "active": -1},
}
INFOS: Final = (Document(INFO), Document(MIRROR), Document({"error": ERROR}))
MESSAGE: Final = Document({
    "message": {
        "subject": "a.b", "seq": 7, "data": base64.b64encode(b"x").decode(), "time": "2026-01-01T00:00:07.5+01:00",
        "hdrs": base64.b64encode(b"NATS/1.0\r\n%b\r\n" % STORED[2]).decode(),
    }
})  # fmt: skip
CONSUMER: Final = Document({
    "stream_name": "O", "name": "c", "config": {"ack_policy": "flow_control", "deliver_subject": "e", "metadata": {"_nats.level": "4"}},
    "num_pending": 3, "num_ack_pending": 1, "paused": True, "pause_until": "2026-01-01T00:00:07Z",
})  # fmt: skip
ADVISORY: Final = Document(
    {"stream": "S", "batch": BATCH, "reason": "timeout", "timestamp": "2026-01-01T00:00:00Z", "domain": "hub"}
)
OFFSET: Final = Document({"v": 1, "stream": "S", "created": "2026-01-01T00:00:00Z", "seq": 5, "writer": "w"})
POSITION: Final = Document(
    {
        "v": 1,
        "stream": "S",
        "seq": 5,
        "writer": "w",
        "number": 3,
        "failed": {"seq": 5, "attempts": 2, "error": "e"},
        "took_over": 17,
    }
)
LEASE: Final = Document({"v": 1, "seq": 1, "writer": "w", "released": False})
SERVER: Final = Document({
    "server_id": "N", "server_name": "n1", "version": "2.15.1", "max_payload": 1 << 20, "api_lvl": 4, "domain": "hub",
})  # fmt: skip


# -- direct gets --------------------------------------------------------------------------------------------------


def mutated(m: Mutator, block: Block) -> Frame:
    header, payload = block
    header = m.header(header, m.pick(DIRECT)[0])
    return INBOX, header + payload, len(header)


def intact(block: Block) -> Frame:
    return INBOX, block[0] + block[1], len(block[0])


def look_at(message: StoredMsg) -> None:
    """Access every field of a message that is decoded on access."""
    require(0 <= message.seq <= LARGEST, "a sequence is out of range")
    for field in ("subject", "data", "headers", "header_pairs", "time_ns", "time", "num_pending", "last_seq"):
        try:
            getattr(message, field)
        except JetStreamExtError:
            pass
    try:
        hash(message)
        repr(message)
    except JetStreamExtError:
        pass


def read_replies(m: Mutator) -> int:
    """`ReplyDecoder` in random chunks, and everything that reads the rows that it returns."""
    fed = 0
    for _ in range(4):
        decoder = ReplyDecoder("S", start=1, server_version="2.15.1")
        valid = m.below(len(REPLIES))
        replies = [intact(block) for block in REPLIES[:valid]]
        for block in (*REPLIES[valid : valid + 3], m.pick(ENDS)):
            replies.insert(len(replies) - (m.below(4) == 0), mutated(m, block))
            fed += 1
        try:
            while replies and decoder.end is None and decoder.broken is None:
                take = 1 + m.below(6)
                read_rows(m, decoder.feed(replies[:take]))
                del replies[:take]
        except JetStreamExtError:
            pass
        require(decoder.last_seq <= LARGEST, "a sequence is out of range")
    return fed


def read_rows(m: Mutator, block: RowBlock) -> None:
    for message in block.messages():
        look_at(message)
    subjects = kv_entries.Subjects("B", "$KV.B.", lambda key: True)
    content = Content(max_age=timedelta(hours=1))
    try:
        rows = list(kv_entries.records_of(block))
    except JetStreamExtError:
        return
    content.feed(kv_entries.updates_of(block, subjects))
    snapshot = kv_entries.KeyValueSnapshot({**content.values}, bucket="B", revision=1, time=NOW)
    newest = dict(sorted(rows, key=lambda row: row[1][0]))
    for key, entry in snapshot.items():
        same = kv_entries.entry_of_record("B", key, newest["$KV.B." + key])
        require(entry == same, "an entry is not what its message says")
    content.expire(NOW)
    read_bucket(block)


def read_bucket(found: RowBlock | list[StoredMsg]) -> None:
    subjects = kv_entries.Subjects("B", "$KV.B.", lambda key: True)
    state = StreamState("KV_B", "2026-01-01T00:00:00Z", {"max_msgs_per_subject": 2}, last_seq=9, now=NOW)
    past = Past(subjects, ResolvedRevision(5, NOW, NOW, state), Gaps(1, 9))
    past.feed(found)
    past.judge(state, named=["k1", "k9"])


def same_columns(m: Mutator) -> int:
    """The columns of a block are what its messages say, or the error is the one of its messages."""
    decoder, frames, mutations = ReplyDecoder("S"), [intact(REPLIES[0])], 0
    for block in REPLIES[1:]:
        header, payload = block
        # Mostly where the decoder takes the message nevertheless.
        stored, name, added = header.partition(b"Nats-Stream")
        match kind := m.below(8):
            case 0:
                header = m.header(header, m.pick(DIRECT)[0])
            case 1:
                header = m.header(stored, m.pick(DIRECT)[0]) + name + added
            case 2:
                before, name, time = header.rpartition(b"Nats-Time-Stamp: ")
                header = before + name + m.pick(TIMES).encode() + time[time.index(b"\r") :]
            case 3:
                header = header.replace(b"$KV.B", m.pick(VALUES), 1)
        mutations += kind < 4
        frames.append((INBOX, header + payload, len(header)))
    try:
        block = decoder.feed(frames)
    except JetStreamExtError:
        return mutations
    messages = list(block.messages())
    try:
        for message in messages:
            assert message.time_ns is not None
        in_range = all(abs(message.time_ns) < 1 << 63 for message in messages)
    except ResponseError:
        in_range = False
    try:
        found = EXACT.batch(block)
    except (ResponseError, ValueError):
        require(not in_range, "columns refuse what messages have")
        return mutations
    require(in_range, "columns have what messages refuse")
    for row, message in zip(found.to_pylist(), messages, strict=True):
        pairs: dict[bytes, list[bytes]] = {}
        for line in stored_block(message).split(b"\r\n")[1:]:
            name, colon, value = line.partition(b":")
            if colon and not h.is_instruction(name.strip().decode("utf-8", "replace")):
                pairs.setdefault(name.strip(), []).append(value.strip())
        expected = message.stream.encode(), message.seq, message.raw_subject, message.data, list(pairs.items())
        got = row["stream"], row["seq"], row["subject"], row["data"], row["headers"]
        require(got == expected, f"other columns: {got} for {expected}")
    require(found.column("time").cast("int64").to_pylist() == [message.time_ns for message in messages], "other times")
    return mutations


EXACT: Final = Columns(
    pa.schema(
        [
            ("stream", pa.binary()),
            ("seq", pa.uint64()),
            ("subject", pa.binary()),
            ("time", NANOSECONDS),
            ("data", pa.binary()),
            ("headers", pa.map_(pa.binary(), pa.list_(pa.binary()))),
        ]
    )
)


BUCKET_HEADERS: Final = (
    "Nats-TTL", "Nats-Marker-Reason", "Nats-Rollup", "KV-Operation", "Nats-Expected-Last-Subject-Sequence",
    "Nats-Expected-Last-Subject-Sequence-Subject",
)  # fmt: skip


def read_buckets(m: Mutator) -> int:
    """Messages of a bucket with any value of the headers that reads of it understand."""
    rows: list[StoredMsg] = []
    for seq in range(1, 9):
        headers = {m.pick(BUCKET_HEADERS): m.pick(VALUES).decode("utf-8", "replace") for _ in range(2)}
        time_ns = (int(NOW.timestamp()) - 9 + seq) * 1_000_000_000
        rows.append(
            StoredMsg(
                stream="KV_B", subject=f"$KV.B.k{m.below(4)}", seq=seq, data=b"", headers=headers, time_ns=time_ns
            )
        )
        ttl_of(headers)
        never_expires(headers)
    read_bucket(rows)
    return len(rows)


def as_servers_reply(stored: bytes, seq: int, last: int | None) -> Block:
    """What a server makes of a stored header block: it replaces the last two bytes with its own lines."""
    own, payload = reply(seq, seq - 1 if last is None else last)
    own = own.removeprefix(b"NATS/1.0\r\n")
    if last is None:
        own = own[: own.index(b"Nats-Num-Pending")] + b"\r\n"
    return (stored[:-2] if len(stored) > 2 else b"NATS/1.0\r\n") + own, payload


def decode_stored_blocks(m: Mutator) -> int:
    """Any stored header block leaves the fields of its message and the other messages as they are."""
    blocks = [m.header(b"NATS/1.0\r\n" + m.pick(STORED) + b"\r\n", m.pick(DIRECT)[0]) for _ in range(6)]
    frames = [intact(as_servers_reply(block, seq, seq - 1)) for seq, block in enumerate(blocks, 1)]
    decoder, found = ReplyDecoder("S"), list[StoredMsg]()
    while frames:
        size = 1 + m.below(len(frames))
        found += decoder.feed(frames[:size]).messages()
        del frames[:size]
    for seq, (block, message) in enumerate(zip(blocks, found, strict=True), 1):
        single = decode_single("S", intact(as_servers_reply(block, seq, None)))
        expected = "S", seq, f"$KV.B.k{seq % 7}", b"value", NOW_NS + seq * 1_000_000_000 + 500_000_000
        for one in (message, single):
            got = one.stream, one.seq, one.subject, one.data, one.time_ns
            require(got == expected, f"{got} is not {expected}, with the stored block {block!r}")
            require(one.raw_headers == h.raw_pairs(h.complete_lines(block)), f"wrong headers of {block!r}")
        require((message.num_pending, message.last_seq) == (20 - seq, seq - 1), "wrong counts")
    return 2 * len(blocks)


def decode_singles(m: Mutator) -> int:
    """`decode_single` and what reads header blocks."""
    for _ in range(8):
        frame = mutated(m, m.pick(DIRECT))
        try:
            look_at(decode_single("S", frame, "2.15.1"))
        except JetStreamExtError:
            pass
        block = frame[1][: frame[2]]
        for read in (h.parse_status, h.reply_row, h.single_row, h.complete_lines, h.raw_pairs, h.parse_time_ns):
            try:
                read(block)
            except ResponseError:
                pass
        headers = h.decode_stored(block)
        read_bucket([StoredMsg(stream="KV_B", subject="$KV.B.k", seq=7, data=b"", headers=headers, time_ns=0)])
    return 8


def read_range(m: Mutator) -> int:
    """A whole read, with or without proof, with lost connections and what the leader says."""
    up_to = m.pick((None, 8, 50))
    plan: Any = (
        Scan(max_bytes=1000, up_to_seq=up_to, up_to_ns=m.pick((None, NOW_NS + 5 * 10**9))),
        OneReply(Request(batch=5, seq=1, max_bytes=1000), up_to_ns=m.pick((None, NOW_NS + 5 * 10**9))),
        MultiLast(Request(multi_last=("a",), up_to_seq=9 if m.below(2) else None), need=up_to),
    )[m.below(3)]
    if up_to is not None and not isinstance(plan, MultiLast) and m.below(2):
        plan.prove(up_to)
    machine = RangeRead("S", plan, 5.0, pause=0.05)
    now, fed, seq = 0.0, 0, 0
    for _ in range(60):
        match machine.next_action(now):
            case SendRequest(sent):
                seq = (sent.request.seq or 1) - 1
            case Deliver(block):
                read_rows(m, block)
            case AskLeader():
                found = m.below(12)
                message = StoredMsg(stream="S", subject="a.b", seq=found) if found else None
                machine.leader_answered(message, found + m.below(3), now)
            case AwaitConnection():
                machine.connected()
            case Done(error):
                require(error is None or isinstance(error, JetStreamExtError), f"it ended with {error!r}")
                break
            case Wait(until):
                if plan.in_flight and m.below(10):
                    received = [
                        intact(reply(n, n - 1 if n > seq + 1 else 0)) for n in range(seq + 1, seq + 1 + m.below(4))
                    ]
                    block = reply(seq + len(received) + 1, seq + len(received)) if m.below(2) else m.pick(ENDS)
                    received.append(mutated(m, block))
                    seq, fed = seq + len(received), fed + 1
                    machine.receive(plan.in_flight[0], received, now)
                elif m.below(2):
                    machine.disconnected()
                now = max(now, until) if m.below(2) else now
                machine.handle_timer(now)
    return fed


# -- batches ------------------------------------------------------------------------------------------------------


def fast_frame(m: Mutator, sent: int) -> Frame:
    seq = m.below(sent + 2) if m.below(4) else m.pick(VALUES)
    subject = b"%b.abc.10.ok.%b.%d.$FI" % (INBOX, seq if isinstance(seq, bytes) else b"%d" % seq, m.below(5))
    if not m.below(20):
        header = m.header(m.pick(ENDS)[0], ENDS[0][0])
        return subject, header, len(header)
    return subject, m.document(m.pick(FAST)), 0


def receive_fast(m: Mutator) -> int:
    """A fast batch in any of its states."""
    flow = 1 + m.below(10)
    batch = FastBatch(batch_id=BATCH, flow=flow, max_outstanding_acks=3, gap=m.pick((GapMode.OK, GapMode.FAIL)))
    batch.open(INBOX.decode())
    now, fed = 0.0, 0
    batch.add(BatchMessage("a.b", b"x"), now)
    if m.below(4):
        batch.receive([(b"%b.abc.10.ok.1.0.$FI" % INBOX, b'{"type":"ack","seq":0,"msgs":%d}' % flow, 0)], now)
    for _ in range(8):
        now += m.below(3) * 0.5
        what = m.below(12)
        try:
            if what == 0:
                batch.ping(now)
            elif what == 1:
                batch.commit(now)
            elif what == 2:
                batch.disconnected(now)
            elif what == 3:
                batch.reconnected(now)
            while batch.state is FastState.OPEN and batch.room > 0 and m.below(3):
                batch.add(BatchMessage("a.b", b"x"), now)
        except JetStreamExtError:
            pass
        received = [fast_frame(m, batch.sent) for _ in range(2)]
        fed += len(received)
        batch.receive(received, now)
        batch.handle_timer(now)
        window = batch.window
        require(isinstance(batch.state, FastState), "an unknown state")
        require(1 <= window.flow <= LARGEST_FLOW, f"the flow is {window.flow}")
        require(0 <= window.acked <= batch.sent, "more is acknowledged than was sent")
        require(window.limit <= batch.sent * 2 + LARGEST_FLOW * 3, "the window is open without bound")
        reports = batch.reports
        require(len(reports.gaps) <= KEPT_REPORTS and len(reports.errors) <= KEPT_REPORTS, "reports without bound")
        require((batch.end_reason is None) == (batch.state is not FastState.ENDED), "ended without a reason")
    return fed


def atomic_reply(m: Mutator) -> Block:
    if not m.below(4):
        return m.header(m.pick(ENDS)[0], ENDS[0][0]), b"" if m.below(3) else m.document(ATOMIC[0])
    return b"", m.document(m.pick(ATOMIC))


def receive_atomic(m: Mutator) -> int:
    """An atomic batch that is open or being committed."""
    batch = AtomicBatchMachine(BATCH)
    messages = [batch.prepare(BatchMessage("a.b", b"%d" % n)) for n in range(3)]
    batch.open(messages[0], Server(4, "2.15.1"), INBOX.decode())
    fed = 0
    for message in messages:
        batch.add(message)
    batch.receive(1, b"", b"")
    committed = m.below(3)
    if committed:
        batch.commit(None)
    for _ in range(4):
        header, payload = atomic_reply(m)
        fed += 1
        batch.receive(m.below(6), header, payload)
        require(isinstance(batch.state, AtomicState), "an unknown state")
        require(0 <= batch.staged <= batch.sent <= 4, "more is staged than was sent")
        require(
            batch.state is not AtomicState.COMMITTED or (committed > 0 and batch.ack is not None),
            "committed by nothing",
        )
        require(
            batch.state not in (AtomicState.FAILED, AtomicState.UNKNOWN) or batch.error is not None,
            "failed without an error",
        )
    return fed


def resolve_atomic(m: Mutator) -> int:
    """The search for a batch, or for messages of fast ingest, of which no answer came."""
    before = api.parse_stream_state(INFO, "S")
    write: outcome.Batch | outcome.Messages = outcome.Batch("a.b", 3, before, 0, BATCH, bool(m.below(2)), 0)
    if m.below(2):
        write = outcome.Messages("a.b", 3, before, 0, ("a", "b", "c"), bool(m.below(2)), "")
    search = outcome.find(write)
    fed = 0
    answer: Any = None
    try:
        for _ in range(20):
            match search.send(answer):
                case outcome.AskState():
                    answer = api.parse_stream_state(
                        json.loads(INFOS[0].data) if m.below(4) else parsed(m, INFOS[0]), "S"
                    )
                case outcome.AskMessage():
                    answer = api.parse_message("S", parsed(m, MESSAGE)) if m.below(4) else None
                case outcome.AskRange(_, first, last, see):
                    for seq in range(first, min(last, first + 10) + 1):
                        fields = h.decode_stored(m.header(b"NATS/1.0\r\n%b\r\n" % STORED[2], b""))
                        see(StoredMsg(stream="S", subject="a.b", seq=seq, headers=fields))
                        fed += 1
                    answer = None
                case outcome.AskFence(_, messages):
                    answer = 0, [atomic_reply(m) for _ in messages]
                    fed += 1
            fed += 1
    except (StopIteration, outcome.Unknown, JetStreamExtError):
        pass
    return fed


# -- JSON ---------------------------------------------------------------------------------------------------------

STATE_FIELDS: Final = [name for name, value in vars(api.StreamState).items() if isinstance(value, property)]


def parsed(m: Mutator, document: Document) -> dict[str, Any]:
    return api.parse_answer("$JS.API.X", m.document(document))


def run(call: Any) -> Any:
    """Run a coroutine that never waits."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def read_states(m: Mutator) -> int:
    """What a stream's leader answers about it."""
    valid = api.parse_stream_state(INFO, "S")
    for _ in range(8):
        try:
            answer = parsed(m, m.pick(INFOS))
            state = api.parse_stream_state(answer, "S")
        except JetStreamExtError:
            continue
        for name in STATE_FIELDS:
            getattr(state, name)
        state.copies_of("O", "a.b")
        state.stores("a.b")
        known_since(state)
        drops_oldest(state)
        were_replaced(state, valid, NOW)
        for check in (state.check_direct_reads, state.check_created):
            try:
                check("2.15.1")
            except JetStreamExtError:
                pass
    return 8


class _Api:
    """Answers each request with mutations of valid answers, without waiting."""

    def __init__(self, m: Mutator) -> None:
        self._m = m
        self.context = SimpleNamespace(prefix="$JS.API", connection=SimpleNamespace(server_version="2.15.1"))

    async def ask(self, what: str, *_: object, **__: object) -> dict[str, Any]:
        return parsed(self._m, CONSUMER)

    async def stream(self, *_: object, **__: object) -> dict[str, Any]:
        return parsed(self._m, INFOS[0])

    async def level(self) -> int:
        return 4


def read_answers(m: Mutator) -> int:
    """Other answers of the JetStream API: messages, consumers, origins, created streams, refusals; and advisories."""
    asked = cast(Any, _Api(m))
    for _ in range(3):
        try:
            look_at(api.parse_message("S", parsed(m, MESSAGE)))
        except JetStreamExtError:
            pass
        try:
            api.parse_abandoned(m.document(ADVISORY))
        except ResponseError:
            pass
        try:
            info = parsed(m, m.pick(INFOS))
            with malformed_as_error("a stream"):
                config = info["config"]
                api.check_config(config)
                for entry in config.get("sources") or []:
                    origin = run(consumers._origin(asked, entry))
                    consumers._health(entry, info.get("sources") or [], origin, info.get("domain"), mirror=False)
        except JetStreamExtError:
            pass
        try:
            streams._checked(asked, StreamConfig(name="S", subjects=["a.*", "$KV.B.>"]), parsed(m, INFOS[0]))
        except JetStreamExtError:
            pass
        try:
            marked_seq(read_reply(*atomic_reply(m)))
        except ResponseError:
            pass
    return 15


def read_stored_values(m: Mutator) -> int:
    """What readers and workers keep in messages that others can write."""
    for _ in range(4):
        for decode, document in ((partial(StoredOffset.decode, "n", revision=5), OFFSET), (Record.decode, POSITION)):
            try:
                position = decode(data=m.document(document))
            except ValueError as error:
                require("is not a position" in str(error), f"another error: {error}")
            else:
                require(1 <= position.seq <= LARGEST, "a position is out of range")
        found = StoredMsg(stream="S", subject="s", seq=1, data=m.document(LEASE))
        try:
            holder = holder_of(found)
        except ValueError as error:
            require("is not the lease of a worker" in str(error), f"another error: {error}")
        else:
            require(isinstance(holder, str | None), "the holder is no text")
    return 12


def read_server_info(m: Mutator) -> int:
    """The INFO of a server."""
    for _ in range(8):
        try:
            info = json.loads(m.document(SERVER))
        except (ValueError, RecursionError):
            continue
        if not isinstance(info, Mapping):
            continue
        connection = FallbackConnection(
            cast(Any, SimpleNamespace(max_payload=info.get("max_payload"), last_error=None)), partial(dict, info)
        )
        require(connection.max_payload >= 1, "no payload is allowed")
        require(isinstance(connection.server_version, str), "the version is no text")
        require(connection.api_level is None or type(connection.api_level) is int, "the level is no number")
        require(isinstance(connection.domain, str | None), "the domain is no text")
        DIRECT_BATCH.on(connection.server_version)
        try:
            FENCED_BATCHES.check(connection.server_version, "nothing was sent")
        except JetStreamExtError:
            pass
    return 8


# -- text ---------------------------------------------------------------------------------------------------------


def write_headers(m: Mutator) -> int:
    """Header blocks of a user, and the control lines of delivered messages."""
    for _ in range(8):
        name, value = (m.pick(VALUES).decode("utf-8", "surrogateescape") for _ in range(2))
        try:
            block = h.encode([("A", "1"), (name, value)])
        except BadHeaderError:
            pass
        else:
            require(block.count(b"\r\n") == 4 and len(block) <= h.MAX_BLOCK, "a header ended its line")
        line = m.damaged(b"HMSG %b 9 %b %b" % (INBOX, m.pick(VALUES), m.pick(VALUES)))
        found = frames.message_line(line)
        require(found is None or 0 <= found.header_size <= found.total, "a size is out of range")
    return 16


FAMILIES: Final[dict[str, Case]] = {
    "replies": read_replies,
    "singles": decode_singles,
    "publishers": decode_stored_blocks,
    "columns": same_columns,
    "range": read_range,
    "buckets": read_buckets,
    "fast": receive_fast,
    "atomic": receive_atomic,
    "resolve": resolve_atomic,
    "states": read_states,
    "answers": read_answers,
    "stored": read_stored_values,
    "info": read_server_info,
    "headers": write_headers,
}


SECONDS: Final = 1.0
"""How much processor time one case may take: some frames of at most 64 KiB."""


@dataclass(frozen=True, slots=True)
class Report:
    """What some cases showed."""

    frames: int
    failures: list[str]
    slowest: float  # the seconds of the slowest case


def run_case(name: str, seed: int) -> int:
    """Run one case of a family; return how many mutated frames it fed."""
    return FAMILIES[name](Mutator(Random(seed)))


def run_cases(name: str, first: int, count: int) -> Report:
    """Run `count` cases of a family, with the seeds from `first` on."""
    frames, failures, slowest = 0, [], 0.0
    for seed in range(first, first + count):
        began = time.process_time()
        try:
            frames += run_case(name, seed)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(
                f"{name}:{seed}: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            )
        slowest = max(slowest, time.process_time() - began)
    return Report(frames, failures, slowest)
