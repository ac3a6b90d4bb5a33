"""Direct gets: one table of replies as servers send them, in one piece and in others; requests; single gets."""

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import orjson
import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol import direct
from jetstream_ext.protocol.direct import EndOfBatch, ReplyDecoder, Request
from jetstream_ext.protocol.frames import Frame, parts
from jetstream_ext.protocol.headers import ROW_STORED, ROW_SUBJECT, ROW_TIME

TIME = b"2026-11-20T21:23:31.245203696Z"
SERVER = (
    b"Nats-Stream: %b\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\nNats-Time-Stamp: %b\r\n"
    b"Nats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n"
)


def message(
    seq: int,
    last: int,
    pending: int = 0,
    data: bytes = b"m",
    *,
    subject: bytes = b"d.A",
    stored: bytes = b"",
    status: bytes = b"",
    stream: bytes = b"D",
    glued: bool = False,
) -> Frame:
    """A message of a batch reply as the server lays it out: the stored headers first, its own lines last.

    With `glued`, the last stored header has lost its end, and the server's first line continues it.
    """
    assert not stored or stored.endswith(b"\r\n") != glued
    block = b"NATS/1.0" + status + b"\r\n" + stored + SERVER % (stream, subject, seq, TIME, pending, last)
    return b"_INBOX.x", block + data, len(block)


def raw(block: bytes, data: bytes = b"") -> Frame:
    return b"_INBOX.x", block + data, len(block)


def block_of(frame: Frame) -> bytes:
    return parts(frame)[1]


def eob(pending: int, last: int, up_to: int | None = None) -> Frame:
    tail = b"" if up_to is None else b"Nats-UpTo-Sequence: %d\r\n" % up_to
    return raw(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n%b\r\n" % (pending, last, tail))


NOT_FOUND = raw(b"NATS/1.0 404 Message Not Found\r\n\r\n")


@dataclass
class Case:
    frames: list[Frame]
    rows: list[tuple[int, bytes]] = field(default_factory=list)
    """Sequences and payloads."""
    end: EndOfBatch | None = None
    broken: tuple[int | None, int | None] | None = None
    """What `MessagesLostError` says: expected, got."""
    error: type[Exception] | None = None
    headers: list[dict[str, str]] | None = None


M4, M5, M6 = message(4, 0), message(5, 4), message(6, 5)
SPOOFED = (
    b"Nats-Sequence: 77\r\nNats-Stream: EVIL\r\nNats-Subject: evil\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 76\r\n"
    b"Nats-Time-Stamp: 1999-01-01T00:00:00Z\r\nK: v\r\n"
)
SINGLE = b"Nats-Stream: D\r\nNats-Subject: d.A\r\nNats-Sequence: 1\r\nNats-Time-Stamp: " + TIME + b"\r\n\r\n"
ANOTHER_ORDER = (
    b"NATS/1.0\r\nK: v\r\nNats-Last-Sequence: 0\r\nNats-Num-Pending: 1\r\nNats-Sequence: 4\r\nNats-Subject: d.A\r\n"
    b"Nats-Time-Stamp: " + TIME + b"\r\nNats-Stream: D\r\n\r\n"
)


def stored(*blocks: Frame, headers: dict[str, str], data: bytes = b"m") -> Case:
    """Message 4 with something strange, and then message 5."""
    return Case([*blocks, M5, eob(0, 5)], [(4, data), (5, b"m")], EndOfBatch(0, 5), headers=[headers, {}])


def refused(text: bytes, error: type[Exception], *before: Frame) -> Case:
    return Case([*before, raw(b"NATS/1.0 " + text + b"\r\n\r\n")], error=error)


CASES = {
    "nothing yet": Case([]),
    "batch of 2": Case(
        [message(4, 0, 8, b"m4"), message(5, 4, 7, b"m5", stored=b"X-U: v5\r\n"), eob(7, 5)],
        [(4, b"m4"), (5, b"m5")], EndOfBatch(7, 5), headers=[{}, {"X-U": "v5"}],
    ),
    "empty payloads, and sequences that were deleted": Case(
        [message(2, 0, data=b""), message(9, 2), message(1000, 9), eob(0, 1000)],
        [(2, b""), (9, b"m"), (1000, b"m")], EndOfBatch(0, 1000),
    ),
    "multi_last on 2.11: the end of a cut page counts one too few": Case(
        [message(10, 0, 2, subject=b"d.A"), message(11, 10, 1, subject=b"d.B"), eob(0, 11, 12)],
        [(10, b"m"), (11, b"m")], EndOfBatch(0, 11, 12),
    ),
    "multi_last, a page past the end": Case([eob(0, 0, 12)], [], EndOfBatch(0, 0, 12)),
    "nothing found": Case([NOT_FOUND], [], EndOfBatch(0, 0, found=False)),
    # -- what publishers can store
    "a stored EOB status": stored(message(4, 0, status=b" 204 EOB", data=b""), headers={}, data=b""),
    "a stored 404 status": stored(message(4, 0, status=b" 404 Message Not Found"), headers={}),
    "stored headers named like a status": stored(
        message(4, 0, stored=b"Status: 204\r\nDescription: EOB\r\n"), headers={"Status": "204", "Description": "EOB"}
    ),
    "spoofed headers": stored(message(4, 0, stored=SPOOFED), headers={"K": "v"}),
    "a stored copy of a whole reply, after another message": Case(
        [M4, message(5, 4, stored=(SERVER % (b"D", b"d.A", 99, TIME, 0, 98))[:-2]), M6, eob(0, 6)],
        [(4, b"m"), (5, b"m"), (6, b"m")], EndOfBatch(0, 6), headers=[{}, {}, {}],
    ),
    "a payload that looks like an end": stored(message(4, 0, data=block_of(eob(0, 4))), headers={}, data=block_of(eob(0, 4))),
    "two stored headers with one name": stored(message(4, 0, stored=b"K: 1\r\nK: 2\r\n"), headers={"K": "2"}),
    "a stored block without its end": stored(message(4, 0, stored=b"K: 1\r\nA: b", glued=True), headers={"K": "1"}),
    "a stored block that is no header block": stored(
        raw(b"\x00garbag" + SERVER % (b"D", b"d.A", 4, TIME, 0, 0), b"m"), headers={}
    ),
    "a stored block with line feeds only": stored(
        raw(b"NATS/1.0\nA: b" + SERVER % (b"D", b"d.A", 4, TIME, 0, 0), b"m"), headers={}
    ),
    "a stored line that imitates the server's first one": Case(
        [message(4, 0, stored=b"X: Nats-Stream: FAKE ", glued=True), message(5, 4, stored=b"X: Nats-Stream: FAKE\r\n"), eob(0, 5)],
        [(4, b"m"), (5, b"m")], EndOfBatch(0, 5), headers=[{}, {"X": "Nats-Stream: FAKE"}],
    ),
    "all of the server's lines are stored, too": stored(message(4, 0, stored=SERVER[:-2] % (b"X", b"x", 77, TIME, 9, 9)), headers={}),
    # -- other layouts than today's
    "server headers in another order": stored(raw(ANOTHER_ORDER, b"m"), headers={"K": "v"}),
    "a server header that is new to us": Case(
        [*(raw(block_of(m)[:-2] + b"Nats-UpTo-Sequence: 9\r\n\r\n", b"m") for m in (M4, M5)), eob(0, 5, 9)],
        [(4, b"m"), (5, b"m")], EndOfBatch(0, 5, 9), headers=[{}, {}],
    ),
    # -- holes
    "every message was lost, the end came": Case([eob(3, 5)], [], broken=(0, 5)),
    "every message of a last page was lost": Case([eob(0, 11, 12)], [], broken=(0, 11)),
    "the beginning came twice": Case([M4, M4, eob(0, 4)], [(4, b"m")], broken=(4, 0)),
    "a message of multi_last went away": Case([M4, M5, NOT_FOUND], [(4, b"m"), (5, b"m")], broken=(5, None)),
    # -- refusals
    "no responders": refused(b"503\r\nNats-Subject: $JS.API.DIRECT.GET.D", errors.DirectGetDisabledError),
    "no responders, before 2.12": refused(b"503", errors.DirectGetDisabledError),
    "bad request": refused(b"408 Bad Request", errors.BadRequestError),
    "2.10: all fields of the request were unknown": refused(b"408 Empty Request", errors.UnsupportedFeatureError),
    "too many results": refused(b"413 Too Many Results", errors.TooManySubjectsError),
    "api level": refused(b"412 Required Api Level", errors.RequiredApiLevelError),
    "server failure": refused(b"500 disk on fire", errors.ServerError),
    "server failure after messages": refused(b"500 x", errors.ServerError, M4),
    "an unknown status": refused(b"299 Hello", errors.ResponseError),
    "2.10: a single message instead of a batch": Case([raw(b"NATS/1.0\r\n" + SINGLE, b"m1")], error=errors.UnsupportedFeatureError),
    "2.10: the same with spoofed headers": Case(
        [raw(b"NATS/1.0\r\nNats-Num-Pending: 0\r\n" + SINGLE, b"m1")], error=errors.UnsupportedFeatureError
    ),
    # -- no direct get at all
    **{
        name: Case(frames, error=errors.ResponseError)
        for name, frames in {
            "no headers": [raw(b"", b"hello")],
            "headers that say nothing": [raw(b"NATS/1.0\r\nK: v\r\n\r\n", b"hello")],
            "not a header block": [raw(b"garbage")],
            "an end without numbers": [raw(b"NATS/1.0 204 EOB\r\n\r\n")],
            "an end with words for numbers": [raw(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: x\r\nNats-Last-Sequence: y\r\n\r\n")],
            "a sequence that is no number": [raw(block_of(M4).replace(b"Nats-Sequence: 4", b"Nats-Sequence: x"))],
            "a sequence over 64 bits": [message(1 << 64, 0)],
            "a previous sequence over 64 bits": [message(4, 1 << 64)],
            "an end with a number that is no count": [M4, eob(-1, 4)],
            "an end with a number over 64 bits": [M4, eob(0, 4, 1 << 64)],
            "a number that Python would not read": [raw(block_of(M4).replace(b"-Sequence: 0", b"-Sequence: " + b"9" * 5000))],
            "sequences that go backwards": [M4, message(3, 4), eob(0, 3)],
            "one sequence twice": [M4, message(4, 4), eob(0, 4)],
            "two responders": [M4, message(5, 4, stream=b"E"), eob(0, 5)],
            "two responders, with headers": [M4, message(5, 4, stream=b"E", stored=b"K: v\r\n")],
        }.items()
    },
}  # fmt: skip


def decoded(frames: Sequence[Frame], cuts: Sequence[int]) -> tuple[Any, ...]:
    """Decode in pieces that end at `cuts`; return all that can be seen of the outcome."""
    decoder = ReplyDecoder("D")
    rows: list[tuple[Any, ...]] = []
    error: errors.JetStreamExtError | None = None
    for start, stop in itertools.pairwise([0, *cuts, len(frames)]):
        if decoder.end is not None or decoder.broken is not None:
            break
        try:
            block = decoder.feed(frames[start:stop])
        except errors.JetStreamExtError as raised:
            error = raised
            break
        assert len(block) == len(block.seqs) == len(block.rows) == len(block.datas) == len(block.bodies)
        rows += [
            (m.stream, m.seq, m.subject, m.data, m.headers, m.time_ns, m.num_pending, m.last_seq)
            for m in block.messages()
        ]
    lost = decoder.broken and (decoder.broken.expected, decoder.broken.got, str(decoder.broken))
    if error is not None:  # rows before it are the reader's to keep or not
        return (type(error),)
    return rows, decoder.end, lost, decoder.last_seq, decoder.count, decoder.size


@walk("name", CASES)
def test_replies_in_one_piece_in_any_pieces_and_with_empty_pieces_between(name: str) -> None:
    case = CASES[name]
    whole = decoded(case.frames, [])
    inner = range(1, len(case.frames))
    for cuts in ([], *([cut] for cut in inner), list(inner), sorted([*range(len(case.frames) + 1)] * 2)):
        assert decoded(case.frames, cuts) == whole
    decoder = ReplyDecoder("D")
    if case.error is not None:
        with pytest.raises(case.error) as caught:
            decoder.feed(case.frames)
        assert type(caught.value) is case.error
        return
    block = decoder.feed(case.frames)
    assert list(zip(block.seqs, block.datas, strict=True)) == case.rows
    assert decoder.end == case.end
    lost = decoder.broken
    assert (lost and (lost.expected, lost.got)) == case.broken
    assert decoder.count == len(case.rows)
    assert decoder.last_seq == (case.rows[-1][0] if case.rows else 0)
    if case.headers is not None:
        assert [message.headers for message in block.messages()] == case.headers


@walk("version", ["", "2.10.26"])
@walk("case", [case for name, case in CASES.items() if name.startswith("2.10: ")])
def test_the_error_names_a_server_without_batches(case: Case, version: str) -> None:
    decoder = ReplyDecoder("D", server_version=version)
    with pytest.raises(errors.UnsupportedFeatureError) as caught:
        decoder.feed(case.frames)
    assert (caught.value.server_version or "", caught.value.required_api_level) == (version, 1)
    assert "needs nats-server 2.11" in str(caught.value)
    assert version in str(caught.value)
    assert "'D'" in str(caught.value)


def test_rows_have_all_headers_of_the_server() -> None:
    block = ReplyDecoder("ASKED").feed([message(4, 0, 8, b"m4", subject=b"d.\xc3\xa4", stream=b"MIRROR")])
    (stored,) = block.messages()
    said = stored.stream, stored.subject, stored.seq, stored.num_pending, stored.last_seq
    assert said == ("MIRROR", "d.ä", 4, 8, 0)
    assert stored.time == datetime(2026, 11, 20, 21, 23, 31, 245203, UTC)
    assert (block.stream, [row[ROW_SUBJECT] for row in block.rows]) == ("MIRROR", [b"d.\xc3\xa4"])
    assert [row[ROW_TIME] for row in block.rows] == [b"Nats-Time-Stamp: " + TIME]
    assert [row[ROW_STORED] for row in block.rows] == [b""]
    assert block.pending(0) == 8


@walk("cut", range(1, len(SERVER % (b"D", b"d.A", 2, TIME, 0, 1))))
def test_header_block_that_is_cut_is_never_a_message_with_other_fields(cut: int) -> None:
    """Whatever is missing of the server's lines, nothing that the publisher stored takes their place."""
    stored = SERVER[:-2] % (b"X", b"x", 77, TIME, 9, 1)
    whole = b"NATS/1.0\r\n" + stored + SERVER % (b"D", b"d.A", 2, TIME, 0, 1)
    decoder = ReplyDecoder("D")
    decoder.feed([message(1, 0)])
    try:
        block = decoder.feed([raw(whole[:-cut])])
        assert [message.subject for message in block.messages()] in ([], ["d.A"])
        assert [message.time_ns for message in block.messages()] in ([], [1_763_673_811_245_203_696])
    except errors.JetStreamExtError:
        pass


@walk("name", [b"Nats-Subject", b"Nats-Sequence", b"Nats-Time-Stamp", b"Nats-Num-Pending"])
def test_a_missing_header_in_a_later_message_is_a_response_error(name: bytes) -> None:
    """Only the header names of the first message are checked while a reply is decoded."""
    changed = raw(block_of(message(2, 1)).replace(name + b": ", b"X" * len(name) + b": "))
    block = ReplyDecoder("D").feed([message(1, 0), changed])
    first, second = block.messages()
    assert first.subject == "d.A"
    for use in (lambda: second.subject, lambda: second.time_ns, lambda: second.headers, lambda: block.pending(1)):
        with pytest.raises(errors.ResponseError):
            use()


def test_a_reply_that_begins_before_the_requested_sequence_is_refused() -> None:
    """A responder that always answers with the stream's first messages would be asked for the rest indefinitely."""
    assert ReplyDecoder("D", start=4).feed([message(4, 0)]).seqs == [4]
    with pytest.raises(errors.ResponseError, match="increase after 4"):
        ReplyDecoder("D", start=5).feed([message(4, 0)])


def test_blocks_can_be_filtered_and_joined() -> None:
    decoder = ReplyDecoder("D")
    block = decoder.feed(
        [message(1, 0, data=b"1"), message(2, 1, data=b"2", stored=b"K: v\r\n"), message(3, 2, data=b"3")]
    )
    block.select([True, False, True])
    other = decoder.feed([message(4, 3, data=b"4")])
    block.extend(other)
    assert [(m.seq, m.data, m.headers) for m in block.messages()] == [(1, b"1", {}), (3, b"3", {}), (4, b"4", {})]
    assert block.size == sum(map(len, block.bodies))


@walk("stored", [b"", b"K: v\r\n", b"Nats-Msg-Id: 1\r\nTraceparent: 00-x\r\n"])
def test_size_is_what_max_bytes_counts(stored: bytes) -> None:
    decoder = ReplyDecoder("D")
    decoder.feed([message(4, 0, data=b"12345", stored=stored), message(5, 4, data=b"", stored=stored)])
    header = len(b"NATS/1.0\r\n" + stored + b"\r\n") if stored else 0
    counted = 2 * (len(b"d.A") + header) + 5
    assert counted - 8 <= decoder.size <= counted + 8


@given(
    st.lists(st.integers(1, 10), min_size=2, max_size=20),
    st.data(),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_any_lost_frame_is_noticed(gaps: list[int], data: st.DataObject, cuts: list[int]) -> None:
    seqs = list(itertools.accumulate(gaps))
    frames = [message(seq, last) for last, seq in itertools.pairwise([0, *seqs])] + [eob(0, seqs[-1])]
    lost = data.draw(st.lists(st.integers(0, len(seqs) - 1), min_size=1, unique=True))
    kept = [frame for i, frame in enumerate(frames) if i not in lost]
    rows, end, broken, *_ = decoded(kept, sorted(min(cut, len(kept)) for cut in cuts))
    assert end is None
    assert broken is not None
    assert [row[1] for row in rows] == seqs[: min(lost)]


# -- requests


@walk(
    "request_, body",
    [
        (Request(seq=5), {"seq": 5}),
        (Request(last_by_subj="orders.*"), {"last_by_subj": "orders.*"}),
        (Request(seq=100, next_by_subj="orders.*"), {"seq": 100, "next_by_subj": "orders.*"}),
        (Request(seq=1, batch=500, max_bytes=1000), {"seq": 1, "batch": 500, "max_bytes": 1000}),
        (
            Request(multi_last=("a.>", "b"), up_to_seq=12, seq=3, batch=2),
            {"multi_last": ["a.>", "b"], "up_to_seq": 12, "seq": 3, "batch": 2},
        ),
        (
            Request(start_time=datetime(2026, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=1))), batch=1),
            {"start_time": "2026-01-02T02:04:05.000006+00:00", "batch": 1},
        ),
        (
            Request(multi_last=("a",), up_to_time=datetime(2026, 1, 2, tzinfo=UTC)),
            {"multi_last": ["a"], "up_to_time": "2026-01-02T00:00:00+00:00"},
        ),
    ],
)
def test_requests(request_: Request, body: dict[str, Any]) -> None:
    subject, payload = request_.address("API")
    # The last message on a subject is asked for in the subject-appended form.
    last = body.get("last_by_subj")
    assert (subject, payload and orjson.loads(payload)) == (("API", body) if last is None else (f"API.{last}", b""))


# -- single gets


def test_single() -> None:
    block = (
        b"NATS/1.0\r\nX-U: v5\r\nNats-Sequence: 77\r\nNats-Stream: D\r\nNats-Subject: d.B\r\nNats-Sequence: 5\r\n"
        b"Nats-Time-Stamp: 2026-11-20T21:23:31.295694403Z\r\n\r\n"
    )
    stored = direct.decode_single("ASKED", raw(block, b"m5"))
    assert (stored.stream, stored.subject, stored.seq, stored.data) == ("D", "d.B", 5, b"m5")
    assert (stored.headers, stored.num_pending, stored.last_seq) == ({"X-U": "v5"}, None, None)
    assert stored.time_ns % 1_000_000_000 == 295_694_403


@walk(
    "block, error",
    [
        (b"NATS/1.0 404 Message Not Found\r\n\r\n", errors.MessageNotFoundError),
        (b"NATS/1.0 408 Empty Request\r\n\r\n", errors.UnsupportedFeatureError),
        (b"NATS/1.0 204 EOB\r\n\r\n", errors.ResponseError),
        (b"", errors.ResponseError),
        (b"NATS/1.0\r\n\r\n", errors.ResponseError),
        (b"NATS/1.0\r\nNats-Sequence: 5\r\n\r\n", errors.ResponseError),
        (b"NATS/1.0\r\nNats-Sequence: x\r\nNats-Stream: D\r\nNats-Subject: s\r\nNats-Time-Stamp: " + TIME + b"\r\n\r\n", errors.ResponseError),
        (b"NATS/1.0\r\nNats-Sequence: 5\r\nNats-Stream: D\r\nNats-Subject: s\r\nNats-Time-Stamp: now\r\n\r\n", errors.ResponseError),
    ],
)  # fmt: skip
def test_single_refusals(block: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        direct.decode_single("D", raw(block))
    assert type(caught.value) is error


@walk("code, attributes", [
    (404, {"code": 404, "stream": "D"}), (408, {"code": 408, "description": "Some Text", "stream": "D"}),
    (412, {"code": 412, "err_code": 10185, "outcome": "not_stored"}),
    (500, {"code": 500, "description": "Some Text"}), (503, {"stream": "D"}),
    (299, {"frame": b"NATS/1.0 299 Some Text\r\n\r\n"}),
])  # fmt: skip
def test_refusals_name_the_stream_and_what_the_server_said(code: int, attributes: dict[str, Any]) -> None:
    error = direct.status_error("D", b"NATS/1.0 %d Some Text\r\n\r\n" % code)
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert "'D'" in str(error)


def test_headers_have_every_value_in_order_and_their_stored_bytes() -> None:
    lines = b"NATS/1.0\r\nX: \xff\r\nY\xe9: \xef\xbf\xbd\r\nX: caf\xe9\r\nZ: \r\n"
    added = b"Nats-Stream: S\r\nNats-Subject: s\r\nNats-Sequence: 1\r\nNats-Time-Stamp: %b\r\n" % TIME
    block = lines + added + b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n"
    both = (direct.decode_single("S", raw(block, b"v")), direct.batch_message("S", 1, block + b"v", len(block)))
    for message in (*both, *(pickle.loads(pickle.dumps(each)) for each in both)):
        assert message.raw_headers == [(b"X", b"\xff"), (b"Y\xe9", b"\xef\xbf\xbd"), (b"X", b"caf\xe9"), (b"Z", b"")]
        assert message.header_pairs == [("X", "\ufffd"), ("Y\ufffd", "\ufffd"), ("X", "caf\ufffd"), ("Z", "")]
        assert list(message.headers.items()) == [("X", "caf\ufffd"), ("Y\ufffd", "\ufffd"), ("Z", "")]
        assert direct.size_of(message) == len(lines) + len(b"\r\n") + len(b"sv")
    assert direct.StoredMsg(stream="S", subject="s", seq=1).header_pairs == []
    assert direct.StoredMsg(stream="S", subject="s", seq=1, headers={"X": "1"}).header_pairs == [("X", "1")]
