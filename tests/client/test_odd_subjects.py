"""Any publisher can store subjects that are not UTF-8: reads of a stream lose none of them and take none for another."""

from collections.abc import Callable

import pytest
from client_cells import each
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.log import Last, LogReader, New
from jetstream_ext.testing import NatsServer

SUBJECTS = (
    b"\xff",
    b"\xfe",
    "\ufffd".encode(),
    b"a.\xff",
    b"a.b",
    b"a.\xfe.c",
    "é".encode(),
    b"a.\xff\xfe.c",
    b"*x",
    b"z",
)

PATTERNS = {">": SUBJECTS, "a.*.c": (b"a.\xfe.c", b"a.\xff\xfe.c"), "\ufffd": ("\ufffd".encode(),), "none": ()}


@pytest.fixture
async def stream(
    js: JetStreamContext,
    server: NatsServer,
    stream_name: Callable[[], str],
    publish_raw: Callable[..., None],
) -> str:
    """A stream with two messages on each of the subjects, whose first tokens are the stream's name."""
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True)
    publish_raw(server, ((b"%b.%b" % (name.encode(), each), each) for each in SUBJECTS * 2))
    return name


@pytest.mark.internals("nats-py's headers have U+FFFD for bytes that are not UTF-8")
@each("min_seq", [None, 1])
@each("max_bytes", [1, 1 << 20])
async def test_multi_last_returns_every_subject_at_any_sequence(
    js: JetStreamContext, stream: str, max_bytes: int, min_seq: int | None
) -> None:
    direct = jsx.DirectGet(js, stream)

    async def read(pattern: str, up_to: int | None) -> list[tuple[int, bytes]]:
        batch = direct.multi_last([f"{stream}.{pattern}"], up_to_seq=up_to, max_bytes=max_bytes, min_seq=min_seq)
        return [(message.seq, message.data) for message in await batch.to_list()]

    for up_to in (*range(1, 2 * len(SUBJECTS) + 1, 3), None):
        newest = {each: seq for seq, each in enumerate((SUBJECTS * 2)[:up_to], 1)}
        for pattern, matches in PATTERNS.items():
            assert await read(pattern, up_to) == sorted((newest[each], each) for each in matches if each in newest)


@pytest.mark.parametrize(("start", "expected"), [(Last(), [b"z", b"new"]), (New(), [b"new"])], ids=["last", "new"])
async def test_reader_without_confirmation_starts_at_the_end(
    js: JetStreamContext, stream: str, start: Last | New, expected: list[bytes]
) -> None:
    reader = LogReader(js, stream, start=start, confirm=False)
    assert await reader.open() == 2 * len(SUBJECTS) + 2 - len(expected)
    await js.publish(f"{stream}.z", b"new")
    assert [message.data async for message in reader] == expected


# Subjects that cannot be asked for: by no filter of a client, by no filter at all (the last), or by one that matches others.
HARD = (b"\xff", b">", b">.x", b"*", b"a\x00b", b"\x01", b"\x7f")


@each("token", HARD)
async def test_the_subjects_of_the_newest_and_the_oldest_message_do_not_matter(
    js: JetStreamContext,
    server: NatsServer,
    stream_name: Callable[[], str],
    publish_raw: Callable[..., None],
    token: bytes,
) -> None:
    """The stream has more subjects than one answer can hold."""
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True)
    tokens = (token, *(b"k%d" % n for n in range(1100)), token)
    publish_raw(server, ((b"%b.%b" % (name.encode(), each), b"") for each in tokens))
    direct = jsx.DirectGet(js, name, timeout=20)
    for options in (
        {"min_seq": 1}, {"min_seq": 1, "max_bytes": 1}, {"up_to_seq": 1102}, {"up_to_seq": 1102, "max_bytes": 1},
    ):  # fmt: skip
        for wanted, expected in (("none",), []), (("k0", "k1"), [2, 3]):
            batch = direct.multi_last([f"{name}.{each}" for each in wanted], **options)  # type: ignore[arg-type]
            assert [message.seq for message in await batch.to_list()] == expected, options
    for start, position in (Last(), 1102), (New(), 1103):
        assert await LogReader(js, name, start=start, confirm=False).open() == position, start


async def test_multi_last_of_everything_lacks_only_what_servers_do_not_find(
    js: JetStreamContext, server: NatsServer, stream_name: Callable[[], str], publish_raw: Callable[..., None]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True)
    publish_raw(server, ((b"%b.%b" % (name.encode(), token), b"") for token in (b"a", b"b", b"\x7f", b"c\x7f.d")))
    direct = jsx.DirectGet(js, name, timeout=20)
    for pattern in (">", f"{name}.>"):
        for options in ({"min_seq": 1}, {"up_to_seq": 4}, {"up_to_seq": 4, "max_bytes": 1}):
            found = await direct.multi_last([pattern], **options).to_list()  # type: ignore[arg-type]
            assert [message.seq for message in found] == [1, 2]
