"""`LogReader.checkpoint` is the position as text, for the user's own database; `Checkpoint` continues there."""

import asyncio
import json
import pickle
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamSource

from jetstream_ext import errors
from jetstream_ext.log import Checkpoint, First, LogReader, New, OffsetStore, Seq, Stored

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


async def seqs(reader: LogReader) -> list[int]:
    return [message.seq async for message in reader]


async def test_a_reader_continues_behind_the_message_of_the_loop(js: JetStreamContext, make_stream: Make) -> None:
    for subject, confirm in ((None, True), (None, False), ("1", True), ("1", False)):
        name = await make_stream(20)
        subject = subject and f"{name}.{subject}"
        wanted = [n for n in range(1, 21) if subject is None or n % 3 == 1]
        reader = LogReader(js, name, subject=subject, confirm=confirm)
        kept = [(message.seq, reader.checkpoint) async for message in reader]
        for seq, text in kept:
            again = LogReader(js, name, start=Checkpoint(text), subject=subject, confirm=confirm)
            assert await seqs(again) == [n for n in wanted if n > seq], (subject, confirm)


async def test_the_text_is_json_with_the_stream_its_creation_and_the_next_sequence(
    js: JetStreamContext, make_stream: Make
) -> None:
    name = await make_stream(10)
    reader = LogReader(js, name)
    await reader.read(4)
    text = reader.checkpoint
    assert json.loads(text) == {"v": 1, "stream": name, "created": reader.created, "seq": 5}
    for _ in range(2):
        await reader.read()
        assert json.loads(reader.checkpoint)["seq"] == 11, "also at the end of the stream"
    reader.seek(3)
    assert json.loads(reader.checkpoint)["seq"] == 3
    reader.seek(Checkpoint(text))
    assert await seqs(reader) == list(range(5, 11))


async def test_an_unread_position_has_no_checkpoint(js: JetStreamContext, make_stream: Make, more: More) -> None:
    name = await make_stream(10)
    for start, seq in ((First(), 1), (Seq(5), 5), (New(), 11)):
        reader = LogReader(js, name, start=start)
        with pytest.raises(RuntimeError, match=r"await reader\.open\(\)"):
            print(reader.checkpoint)
        await reader.open()
        assert json.loads(reader.checkpoint)["seq"] == seq
    again = LogReader(js, name, start=Checkpoint(reader.checkpoint))
    assert await again.read() == [], "at the end of the stream"
    await more(name, 11, 12)
    assert await seqs(again) == [11, 12]


async def test_a_mirror_has_checkpoints_of_its_own(js: JetStreamContext, make_stream: Make, stream_name: Any) -> None:
    name, mirror = await make_stream(10), stream_name()
    await js.add_stream(name=mirror, mirror=StreamSource(name=name), allow_direct=True)
    async with asyncio.timeout(60):
        while (await js.stream_info(mirror)).state.messages < 10:
            await asyncio.sleep(0.02)
    reader = LogReader(js, mirror)
    await reader.read(4)
    assert await seqs(LogReader(js, mirror, start=Checkpoint(reader.checkpoint))) == list(range(5, 11))
    with pytest.raises(ValueError, match=f"belongs to stream '{mirror}'"):
        await LogReader(js, name, start=Checkpoint(reader.checkpoint)).read()


async def test_a_checkpoint_of_another_or_recreated_stream_is_refused(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    name, other = await make_stream(5), await make_stream(5)
    reader = LogReader(js, name)
    await reader.read(2)
    text = reader.checkpoint
    await js.purge_stream(name, seq=4)
    with pytest.raises(errors.PositionLostError) as caught:
        await LogReader(js, name, start=Checkpoint(text)).read()
    assert (caught.value.expected, caught.value.got) == (3, 4)
    for confirm in (True, False):
        with pytest.raises(ValueError, match="keep one checkpoint for each stream"):
            await LogReader(js, other, start=Checkpoint(text), confirm=confirm).read()
    await js.delete_stream(name)
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    await more(name, 1, 9)
    again = LogReader(js, name, start=Checkpoint(text))
    for _ in range(2):
        with pytest.raises(errors.StreamRecreatedError):
            await again.read()
    again.seek(First())
    assert len(await again.read()) == 9, "seek accepts the new stream"


async def test_an_unconfirmed_reader_keeps_the_creation_that_its_checkpoint_names(
    js: JetStreamContext, make_stream: Make
) -> None:
    name = await make_stream(10)
    confirmed = LogReader(js, name)
    await confirmed.read(2)
    nearby = LogReader(js, name, start=Checkpoint(confirmed.checkpoint), confirm=False)
    await nearby.read(3)
    assert json.loads(nearby.checkpoint) == json.loads(confirmed.checkpoint) | {"seq": 6}
    fresh = LogReader(js, name, confirm=False)
    await fresh.read(3)
    assert "created" not in json.loads(fresh.checkpoint)


def test_a_text_that_is_no_checkpoint_is_refused_at_once() -> None:
    for text in (
        "",
        "7",
        "[]",
        "{}",
        "null",
        '{"v":1,"seq":3}',
        '{"v":1,"stream":"S","seq":0}',
        "\ud800",
        "x" * 10_000,
    ):
        with pytest.raises(ValueError, match="give the text that reader") as caught:
            Checkpoint(text)
        assert len(str(caught.value)) < 500
    for value in (None, b'{"v":1,"stream":"S","seq":3}', 7):
        with pytest.raises(TypeError, match="must be a string"):
            Checkpoint(value)  # type: ignore[arg-type]
    checkpoint = Checkpoint('{"v":1,"stream":"S","created":"","seq":3}')
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint
    assert hash(checkpoint) == hash(Checkpoint(checkpoint.text))


async def test_what_a_store_holds_is_a_checkpoint_too(js: JetStreamContext, make_stream: Make, make_store: Any) -> None:
    name, store = await make_stream(10), await make_store()
    reader = LogReader(js, name, start=Stored("r"), offsets=store)
    await reader.read(4)
    stored = await store.commit(reader)
    assert await LogReader(js, name, start=Checkpoint(stored.encode().decode())).open() == 5
    assert await OffsetStore(js, store.bucket).fetch("r") == stored


async def test_results_are_stored_once_whenever_the_process_is_killed(
    js: JetStreamContext, make_stream: Make, tmp_path: Path
) -> None:
    """Each run ends before one of its commits, as by a crash, and the next one continues from the database."""
    name = await make_stream(30)
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE results (seq INTEGER, data TEXT)")
        db.execute("CREATE TABLE checkpoints (name TEXT PRIMARY KEY, text TEXT)")

    async def run(crash_at: int) -> None:
        db = sqlite3.connect(path)
        try:
            found = db.execute("SELECT text FROM checkpoints WHERE name = 'r'").fetchone()
            reader = LogReader(js, name, start=First() if found is None else Checkpoint(found[0]))
            async for message in reader:
                db.execute("INSERT INTO results VALUES (?, ?)", (message.seq, message.data.decode()))
                db.execute("INSERT OR REPLACE INTO checkpoints VALUES ('r', ?)", (reader.checkpoint,))
                if message.seq == crash_at:
                    return
                if message.seq % 4 == 0:
                    db.commit()
            db.commit()
        finally:
            db.close()  # without a commit: the transaction is rolled back

    for crash_at in (1, 3, 6, 14, 20, 30, 0):
        await run(crash_at)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT seq, data FROM results").fetchall() == [(n, str(n)) for n in range(1, 31)]
