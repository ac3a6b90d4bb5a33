"""Direct-get replies: one table of replies as servers send them, each decoded whole, frame by frame and in pairs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol.direct import EndOfBatch, ReplyDecoder
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


CASES = {
    "nothing yet": Case([]),
    "a message, no end yet": Case([message(4, 0, 8, b"m4")], [(4, b"m4")]),
    "batch of 2": Case(
        [message(4, 0, 8, b"m4"), message(5, 4, 7, b"m5", stored=b"X-U: v5\r\n"), eob(7, 5)],
        [(4, b"m4"), (5, b"m5")],
        EndOfBatch(7, 5),
        headers=[{}, {"X-U": "v5"}],
    ),
    "headers on the first only": Case(
        [message(4, 0, stored=b"X: 1\r\n"), message(5, 4), message(6, 5), eob(0, 6)],
        [(4, b"m"), (5, b"m"), (6, b"m")],
        EndOfBatch(0, 6),
        headers=[{"X": "1"}, {}, {}],
    ),
    "empty payloads are messages": Case(
        [message(1, 0, 2, b""), message(2, 1, 1, b""), message(3, 2, 0, b""), eob(0, 3)],
        [(1, b""), (2, b""), (3, b"")],
        EndOfBatch(0, 3),
    ),
    "deleted sequences are no holes": Case(
        [message(2, 0), message(9, 2), message(1000, 9), eob(0, 1000)],
        [(2, b"m"), (9, b"m"), (1000, b"m")],
        EndOfBatch(0, 1000),
    ),
    "multi_last, a page of 2 of 3": Case(
        [message(10, 0, 2, subject=b"d.A"), message(11, 10, 1, subject=b"d.B"), eob(1, 11, 12)],
        [(10, b"m"), (11, b"m")],
        EndOfBatch(1, 11, 12),
    ),
    "multi_last on 2.11: the end of a cut page counts one too few": Case(
        [message(10, 0, 2), message(11, 10, 1), eob(0, 11, 12)], [(10, b"m"), (11, b"m")], EndOfBatch(0, 11, 12)
    ),
    "multi_last, a page past the end": Case([eob(0, 0, 12)], [], EndOfBatch(0, 0, 12)),
    "batch on 2.11: pending counts the message itself": Case(
        [message(11, 0, 2), message(12, 11, 1), eob(0, 12)], [(11, b"m"), (12, b"m")], EndOfBatch(0, 12)
    ),
    "nothing found": Case([NOT_FOUND], [], EndOfBatch(0, 0, found=False)),
    "multi_last, nothing found": Case([raw(b"NATS/1.0 404 No Results\r\n\r\n")], [], EndOfBatch(0, 0, found=False)),
    # -- what publishers can store
    "a stored EOB status is a message": Case(
        [message(4, 0, status=b" 204 EOB", data=b""), message(5, 4), eob(0, 5)],
        [(4, b""), (5, b"m")],
        EndOfBatch(0, 5),
        headers=[{}, {}],
    ),
    "a stored 404 status is a message": Case(
        [message(4, 0, status=b" 404 Message Not Found"), eob(0, 4)], [(4, b"m")], EndOfBatch(0, 4)
    ),
    "stored headers named like a status are headers": Case(
        [message(4, 0, stored=b"Status: 204\r\nDescription: EOB\r\n", data=b""), eob(0, 4)],
        [(4, b"")],
        EndOfBatch(0, 4),
        headers=[{"Status": "204", "Description": "EOB"}],
    ),
    "spoofed headers do not count": Case(
        [
            message(
                4,
                0,
                stored=b"Nats-Sequence: 77\r\nNats-Stream: EVIL\r\nNats-Subject: evil\r\nNats-Num-Pending: 0\r\n"
                b"Nats-Last-Sequence: 76\r\nNats-Time-Stamp: 1999-01-01T00:00:00Z\r\nK: v\r\n",
            ),
            message(5, 4),
            eob(3, 5),
        ],
        [(4, b"m"), (5, b"m")],
        EndOfBatch(3, 5),
        headers=[{"K": "v"}, {}],
    ),
    "a stored copy of a whole reply does not count": Case(
        [message(4, 0), message(5, 4, stored=(SERVER % (b"D", b"d.A", 99, TIME, 0, 98))[:-2]), message(6, 5), eob(0, 6)],
        [(4, b"m"), (5, b"m"), (6, b"m")],
        EndOfBatch(0, 6),
        headers=[{}, {}, {}],
    ),
    "a payload that looks like an end is data": Case(
        [message(4, 0, data=block_of(eob(0, 4))), eob(0, 4)], [(4, block_of(eob(0, 4)))], EndOfBatch(0, 4)
    ),
    "the last of two stored headers with one name": Case(
        [message(4, 0, stored=b"K: 1\r\nK: 2\r\n"), eob(0, 4)],
        [(4, b"m")],
        EndOfBatch(0, 4),
        headers=[{"K": "2"}],
    ),
    "a stored block without its end": Case(
        [message(4, 0, stored=b"K: 1\r\nA: b", glued=True), message(5, 4), eob(0, 5)],
        [(4, b"m"), (5, b"m")],
        EndOfBatch(0, 5),
        headers=[{"K": "1"}, {}],
    ),
    "a stored block without its end after another message": Case(
        [message(4, 0), message(5, 4, stored=b"Nats-Sequence: 77\r\nNats-Stream: X", glued=True), message(6, 5), eob(0, 6)],
        [(4, b"m"), (5, b"m"), (6, b"m")],
        EndOfBatch(0, 6),
        headers=[{}, {}, {}],
    ),
    "a stored block that is no header block": Case(
        [raw(b"\x00garbag" + SERVER % (b"D", b"d.A", 4, TIME, 0, 0), b"m"), message(5, 4), eob(0, 5)],
        [(4, b"m"), (5, b"m")],
        EndOfBatch(0, 5),
        headers=[{}, {}],
    ),
    "a stored block with line feeds only": Case(
        [raw(b"NATS/1.0\nA: b" + SERVER % (b"D", b"d.A", 4, TIME, 0, 0), b"m"), eob(0, 4)],
        [(4, b"m")],
        EndOfBatch(0, 4),
        headers=[{}],
    ),
    "a stored line that imitates the server's first one": Case(
        [message(4, 0, stored=b"X: Nats-Stream: FAKE ", glued=True), message(5, 4, stored=b"X: Nats-Stream: FAKE\r\n"), eob(0, 5)],
        [(4, b"m"), (5, b"m")],
        EndOfBatch(0, 5),
        headers=[{}, {"X": "Nats-Stream: FAKE"}],
    ),
    "all of the server's lines are stored, too": Case(
        [message(4, 0, stored=SERVER[:-2] % (b"X", b"x", 77, TIME, 9, 9)), message(5, 4), eob(0, 5)],
        [(4, b"m"), (5, b"m")],
        EndOfBatch(0, 5),
        headers=[{}, {}],
    ),
    # -- other layouts than today's
    "server headers in another order": Case(
        [
            raw(
                b"NATS/1.0\r\nK: v\r\nNats-Last-Sequence: 0\r\nNats-Num-Pending: 1\r\nNats-Sequence: 4\r\n"
                b"Nats-Subject: d.A\r\nNats-Time-Stamp: " + TIME + b"\r\nNats-Stream: D\r\n\r\n",
                b"m4",
            ),
            message(5, 4),
            eob(0, 5),
        ],
        [(4, b"m4"), (5, b"m")],
        EndOfBatch(0, 5),
        headers=[{"K": "v"}, {}],
    ),
    "a server header that is new to us": Case(
        [
            raw(block_of(message(4, 0))[:-2] + b"Nats-UpTo-Sequence: 9\r\n\r\n", b"m4"),
            raw(block_of(message(5, 4))[:-2] + b"Nats-UpTo-Sequence: 9\r\n\r\n", b"m5"),
            eob(0, 5, 9),
        ],
        [(4, b"m4"), (5, b"m5")],
        EndOfBatch(0, 5, 9),
        headers=[{}, {}],
    ),
    # -- holes
    "the first message was lost": Case([message(5, 4), eob(0, 5)], [], broken=(0, 4)),
    "a message was lost": Case([message(4, 0), message(6, 5), eob(0, 6)], [(4, b"m")], broken=(4, 5)),
    "the last message was lost": Case([message(4, 0), eob(0, 5)], [(4, b"m")], broken=(4, 5)),
    "every message was lost, the end came": Case([eob(3, 5)], [], broken=(0, 5)),
    "every message of a last page was lost": Case([eob(0, 11, 12)], [], broken=(0, 11)),
    "the beginning came twice": Case([message(4, 0), message(4, 0), eob(0, 4)], [(4, b"m")], broken=(4, 0)),
    "a message of multi_last went away": Case([message(4, 0), message(5, 4), NOT_FOUND], [(4, b"m"), (5, b"m")], broken=(5, None)),
    # -- refusals
    "no responders": Case([raw(b"NATS/1.0 503\r\nNats-Subject: $JS.API.DIRECT.GET.D\r\n\r\n")], error=errors.DirectGetDisabledError),
    "no responders, before 2.12": Case([raw(b"NATS/1.0 503\r\n\r\n")], error=errors.DirectGetDisabledError),
    "bad request": Case([raw(b"NATS/1.0 408 Bad Request\r\n\r\n")], error=errors.BadRequestError),
    "2.10: all fields of the request were unknown": Case(
        [raw(b"NATS/1.0 408 Empty Request\r\n\r\n")], error=errors.UnsupportedFeatureError
    ),
    "too many results": Case([raw(b"NATS/1.0 413 Too Many Results\r\n\r\n")], error=errors.TooManySubjectsError),
    "api level": Case([raw(b"NATS/1.0 412 Required Api Level\r\n\r\n")], error=errors.RequiredApiLevelError),
    "server failure": Case([raw(b"NATS/1.0 500 disk on fire\r\n\r\n")], error=errors.ServerError),
    "server failure after messages": Case([message(4, 0), raw(b"NATS/1.0 500 x\r\n\r\n")], error=errors.ServerError),
    "an unknown status": Case([raw(b"NATS/1.0 299 Hello\r\n\r\n")], error=errors.ResponseError),
    "2.10: a single message instead of a batch": Case(
        [
            raw(
                b"NATS/1.0\r\nNats-Stream: D\r\nNats-Subject: d.A\r\nNats-Sequence: 1\r\nNats-Time-Stamp: " + TIME + b"\r\n\r\n",
                b"m1",
            )
        ],
        error=errors.UnsupportedFeatureError,
    ),
    "2.10: the same with spoofed headers": Case(
        [
            raw(
                b"NATS/1.0\r\nNats-Num-Pending: 0\r\nNats-Stream: D\r\nNats-Subject: d.A\r\nNats-Sequence: 1\r\n"
                b"Nats-Time-Stamp: " + TIME + b"\r\n\r\n",
                b"m1",
            )
        ],
        error=errors.UnsupportedFeatureError,
    ),
    # -- no direct get at all
    "no headers": Case([raw(b"", b"hello")], error=errors.ResponseError),
    "headers that say nothing": Case([raw(b"NATS/1.0\r\nK: v\r\n\r\n", b"hello")], error=errors.ResponseError),
    "not a header block": Case([raw(b"garbage")], error=errors.ResponseError),
    "an end without numbers": Case([raw(b"NATS/1.0 204 EOB\r\n\r\n")], error=errors.ResponseError),
    "an end with words for numbers": Case(
        [raw(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: x\r\nNats-Last-Sequence: y\r\n\r\n")], error=errors.ResponseError
    ),
    "a sequence that is no number": Case([raw(block_of(message(4, 0)).replace(b"Nats-Sequence: 4", b"Nats-Sequence: x"))], error=errors.ResponseError),
    "a sequence over 64 bits": Case([message(1 << 64, 0)], error=errors.ResponseError),
    "a previous sequence over 64 bits": Case([message(4, 1 << 64)], error=errors.ResponseError),
    "an end with a number that is no count": Case([message(4, 0), eob(-1, 4)], error=errors.ResponseError),
    "an end with a number over 64 bits": Case([message(4, 0), eob(0, 4, 1 << 64)], error=errors.ResponseError),
    "a number that Python would not read": Case(
        [raw(block_of(message(4, 0)).replace(b"Nats-Last-Sequence: 0", b"Nats-Last-Sequence: " + b"9" * 5000))],
        error=errors.ResponseError,
    ),
    "sequences that go backwards": Case([message(4, 0), message(3, 4), eob(0, 3)], error=errors.ResponseError),
    "one sequence twice": Case([message(4, 0), message(4, 4), eob(0, 4)], error=errors.ResponseError),
    "two responders": Case([message(4, 0), message(5, 4, stream=b"E"), eob(0, 5)], error=errors.ResponseError),
    "two responders, with headers": Case(
        [message(4, 0), message(5, 4, stream=b"E", stored=b"K: v\r\n")], error=errors.ResponseError
    ),
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


@walk("case", CASES.values())
class TestReplies:
    def test_decoding_in_one_piece(self, case: Case) -> None:
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

    def test_decoding_in_any_pieces(self, case: Case) -> None:
        whole = decoded(case.frames, [])
        inner = range(1, len(case.frames))
        for cuts in itertools.chain([[]], ([cut] for cut in inner), [list(inner)]):
            assert decoded(case.frames, list(cuts)) == whole

    def test_decoding_with_empty_pieces_between(self, case: Case) -> None:
        cuts = sorted([*range(len(case.frames) + 1)] * 2)
        assert decoded(case.frames, cuts) == decoded(case.frames, [])


@walk("frame", [message(520, 510), eob(0, 510)])
def test_a_loss_at_the_beginning_names_the_requested_sequence(frame: Frame) -> None:
    decoder = ReplyDecoder("D", start=500)
    decoder.feed([frame])
    assert decoder.broken is not None
    assert (decoder.broken.expected, decoder.broken.got) == (499, 510)


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
    assert (stored.stream, stored.subject, stored.seq, stored.num_pending, stored.last_seq) == (
        "MIRROR",
        "d.ä",
        4,
        8,
        0,
    )
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


def test_columns_and_rows_agree_and_can_be_cut() -> None:
    frames = [message(seq, seq - 1 if seq > 1 else 0, 10 - seq, b"%d" % seq) for seq in range(1, 11)]
    frames[4] = message(5, 4, 5, b"5", stored=b"K: v\r\n")
    block = ReplyDecoder("D").feed(frames)
    block.keep(3, 6)
    assert block.seqs == [4, 5, 6]
    assert block.datas == [b"4", b"5", b"6"]
    assert [bool(row[ROW_STORED]) for row in block.rows] == [False, True, False]
    assert [m.seq for m in block.messages()] == [4, 5, 6]
    assert [block.pending(i) for i in range(3)] == [6, 5, 4]
    block.keep(3, 3)
    assert len(block) == 0
    assert list(block.messages()) == []


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


def test_a_lost_message_names_the_place_and_the_stream() -> None:
    decoder = ReplyDecoder("D")
    decoder.feed([message(4, 0), message(6, 5)])
    assert decoder.broken is not None
    assert "'D'" in str(decoder.broken)
    assert "after sequence 4" in str(decoder.broken)


@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=6),
    st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_any_reply_in_any_pieces(gaps: list[int], cuts: list[int], with_headers: list[bool]) -> None:
    seqs = list(itertools.accumulate(gaps))
    frames = [
        message(seq, last, len(seqs) - i - 1, b"%d" % seq, stored=b"K: v\r\n" if with_headers[i] else b"")
        for i, (last, seq) in enumerate(itertools.pairwise([0, *seqs]))
    ]
    frames.append(eob(0, seqs[-1]))
    pieces = decoded(frames, sorted(min(cut, len(frames)) for cut in cuts))
    assert pieces == decoded(frames, [])
    assert [row[1] for row in pieces[0]] == seqs
    assert pieces[1] == EndOfBatch(0, seqs[-1])
    assert pieces[2] is None


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


@given(
    st.lists(
        st.builds(
            raw,
            st.binary(max_size=60) | st.sampled_from([parts(f)[1] for c in CASES.values() for f in c.frames]),
            st.binary(max_size=5),
        ),
        max_size=5,
    )
)
def test_any_frames_decode_or_raise_our_errors(frames: list[Frame]) -> None:
    decoder = ReplyDecoder("D")
    try:
        block = decoder.feed(frames)
    except errors.JetStreamExtError:
        return
    assert all(seq > 0 for seq in block.seqs)
