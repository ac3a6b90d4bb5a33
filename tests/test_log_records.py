"""Every change of state is a DEBUG record of the logger of its area, and nothing secret is in one."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext import kv as kvx
from jetstream_ext.log import DeadLetter, Group, LogReader, exactly_once, redrive
from jetstream_ext.testing import Drop, Faults, ReferenceServer

SECRET = "hunter2"
# Of what each call must leave a record: area, kind of source, and a state or an event.
EXPECTED = {
    ("fast", "batch"): {"NEW", "OPEN", "COMMITTING", "ENDED", "SUSPENDED"},
    ("ingest", "run"): {"SENDING", "DONE"},
    ("atomic", "batch"): {"OPEN", "COMMITTING", "COMMITTED", "DISCARDED", "UNKNOWN"},
    ("direct", "stream"): {"READING", "ENDED", "request sent", "reply ended"},
    ("client", "connection"): {"disconnected", "reconnected"},
    ("kv", "transaction"): {"OPEN", "COMMITTED", "DISCARDED", "commit begun", "conflict"},
    ("kv", "table"): {"FOLLOWING", "ENDED", "checkpoint saved", "CHECKING"},
    ("log", "reader"): {"start found", "messages ready", "seek", "position committed"},
    ("log", "worker"): {"started", "inputs read", "input failed", "committed", "ended"},
    ("log", "group"): {"joined", "partitions assigned", "position committed", "left", "failed"},
    ("log", "redrive"): {"letter handed back"},
}


class Records(logging.Handler):
    """Collects, for each area and kind of source, the states and events of the records."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.DEBUG:
            self.texts.append(record.getMessage())
        fields = {name: value for name, value in vars(record).items() if name.startswith("jetstream_")}
        if not fields:
            return
        assert record.levelno == logging.DEBUG
        assert all(type(value) in (str, int, float, bool) for value in fields.values()), fields
        area, kind = record.name.removeprefix("jetstream_ext."), fields["jetstream_source"].split(" ")[0]
        self.found[area, kind].update(fields["jetstream_event"].split(" -> "))


@pytest.fixture
def records() -> Iterator[Records]:
    logger, handler = logging.getLogger("jetstream_ext"), Records()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def make(js: JetStreamContext, name: str, **config: Any) -> str:
    await js.add_stream(
        name=name, subjects=[f"{name}.>"], allow_atomic=True, allow_batched=True, allow_direct=True, **config
    )
    return name


async def ignore(_: Exception) -> None: ...


async def lose_a_connection_and_an_answer() -> None:
    async with (
        ReferenceServer(faults=Faults(Drop(kind="pub_ack"))) as server,
        await nats.connect(server.url, reconnect_time_wait=0.01, error_cb=ignore, connect_timeout=10) as nc,
    ):
        js = nc.jetstream(timeout=30)
        name = await make(js, "S")
        lost = jsx.AtomicBatch(js, timeout=0.3)
        with pytest.raises(errors.BatchOutcomeUnknownError):
            await lost.commit(f"{name}.a", SECRET.encode())
        async with jsx.FastPublisher(js, gap=jsx.GapMode.OK) as publisher:
            await publisher.add(f"{name}.a", b"1")
            server.disconnect_all()
            await publisher.flush()
            await publisher.add(f"{name}.a", b"2")


async def write(js: JetStreamContext, name: str) -> None:
    await jsx.ingest(js, [(f"{name}.a", SECRET.encode(), {"Token": SECRET})] * 4)
    await jsx.publish_atomic(js, [(f"{name}.a", SECRET.encode(), {"Token": SECRET}), (f"{name}.b", b"2")])
    refused = jsx.AtomicBatch(js)
    await refused.add(f"{name}.a", b"1")
    with pytest.raises(errors.MessageTooLargeError):
        await refused.add(f"{name}.a", bytes(2000))
    await refused.discard()
    await jsx.DirectGet(js, name).scan().to_list()


async def use_a_bucket(js: JetStreamContext, bucket: str, folder: Path) -> None:
    kv = await kvx.ensure_bucket(js, bucket)
    await kvx.transaction(kv).discard()
    runs = 0

    async def bump(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("a")
        if runs == 1:
            await kv.put("a", b"2")
        tx.put("a", SECRET.encode())

    await kvx.retry_transaction(kv, bump)
    for _ in range(2):
        async with kvx.Table(kv, checkpoint=folder / "table") as table:
            await table.wait_for(await kv.put("b", SECRET.encode()))


async def work(js: JetStreamContext, name: str, out: str) -> None:
    reader = LogReader(js, name)
    await reader.read(1)
    await reader.offsets.create()
    await reader.offsets.commit(reader, name="r")
    reader.seek(1)

    def fail(_: jsx.StoredMsg) -> None:
        raise ValueError(SECRET)

    letters = DeadLetter(f"{out}.dead", 2, 0.0)
    await exactly_once(LogReader(js, name), out, fail, name="w", prefix=f"{out}.at", dead_letter=letters)
    await redrive(js, out, f"{out}.dead")
    group = Group(js, name, "g", partitions=2)
    async with group.join() as member:
        await anext(member)
        await member.commit()
    with pytest.raises(ValueError, match=SECRET):
        async with group.join() as member:
            await member.run(fail)


async def test_what_calls_do_is_in_the_records_of_their_areas(
    js: JetStreamContext, stream_name: Callable[[], str], tmp_path: Path, records: Records
) -> None:
    source = await make(js, stream_name(), max_msg_size=1000)
    target = await make(js, stream_name())
    await lose_a_connection_and_an_answer()
    await write(js, source)
    await use_a_bucket(js, stream_name(), tmp_path)
    async with asyncio.timeout(120):
        await work(js, source, target)
    missing = {key: lacks for key, each in EXPECTED.items() if (lacks := each - records.found[key])}
    assert not missing
    assert records.texts
    assert not any(SECRET in text for text in records.texts), "a payload, a header or a handler's error"


async def test_messages_cost_no_check_of_a_level_while_the_loggers_are_off(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0

    def count(logger: logging.Logger, level: int) -> bool:
        nonlocal checks
        checks += logger.name.startswith("jetstream_ext")
        return False

    name = await make(js, stream_name())
    monkeypatch.setattr(logging.Logger, "isEnabledFor", count)
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many((f"{name}.a", b"") for _ in range(3000))
        for _ in range(300):
            await publisher.add(f"{name}.a", b"")
    async with jsx.DirectGet(js, name).scan() as messages:
        assert len(await messages.to_list()) == 3300
    assert 4 < checks < 50
