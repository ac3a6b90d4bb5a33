"""Count the modules of the package that some everyday calls enter, and the calls that they make inside it.

python tests/journeys.py

It runs each journey on a real server, twice to warm up and then three times under a profile, and prints the table of docs/design.md.
The figures are those of the shortest run. A function that is resumed is not counted again. Needs the extras `server` and `spark`, but no Java.
"""

import asyncio
import itertools
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import nats
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import kv as kvx
from jetstream_ext import log
from jetstream_ext.testing import NatsServer

_PACKAGE = str(Path(jsx.__file__).parent)
_STARTS = 8  # bytes of code before the first instruction of a function's body, in which a call begins


class Count:
    """The calls of functions of the package while it is on, in all threads that started under its profile."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.calls = 0
        self._on = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.modules, self.calls, self._on = set(), 0, True
        try:
            yield
        finally:
            self._on = False

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._on and event == "call" and code.co_filename.startswith(_PACKAGE) and frame.f_lasti < _STARTS:
            self.modules.add(code.co_filename)
            self.calls += 1


Journey = Callable[[JetStreamContext], Awaitable[Callable[[], Awaitable[object]]]]


async def _add(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    acked = asyncio.Event()
    publisher = await jsx.FastPublisher(js, flow=1, on_flow=lambda _: acked.set()).__aenter__()

    async def add() -> None:
        acked.clear()
        await publisher.add("J.add", b"1")
        await acked.wait()

    return add


async def _scan(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    return lambda: jsx.DirectGet(js, "J").scan(subject="J.rows").to_list()


async def _confirm(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    return lambda: jsx.DirectGet(js, "J").scan(subject="J.rows", confirm=True).to_list()


async def _atomic(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    async def commit() -> None:
        async with jsx.AtomicBatch(js) as batch:
            await batch.add("J.batch", b"1")
            await batch.add("J.batch", b"2")

    return commit


async def _ingest(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    return lambda: jsx.ingest(js, [("J.ingest", b"1"), ("J.ingest", b"2")])


async def _get_many(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    kv = await js.key_value("J")
    return lambda: kvx.get_many(kv, ["a", "b"])


async def _transaction(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    kv = await js.key_value("J")

    async def commit() -> None:
        async with kvx.transaction(kv) as tx:
            await tx.get("a")
            tx.put("b", b"1")
            tx.put("c", b"1")

    return commit


async def _log_read(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    async def read() -> None:
        reader = log.LogReader(js, "J", subject="J.rows")
        assert len(await reader.read(3, timeout=5)) == 3

    return read


async def _spark(js: JetStreamContext) -> Callable[[], Awaitable[object]]:
    from pyspark.sql.datasource import CaseInsensitiveDict

    from pyspark_jetstream import DefaultSource

    url = js._nc.connected_url.geturl()

    def rows() -> int:
        source = DefaultSource(CaseInsensitiveDict({"servers": url, "stream": "J", "subjects": "J.rows"}))
        reader = source.reader(source.schema())
        return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))

    async def read() -> None:
        assert await asyncio.to_thread(rows) == 3

    return read


JOURNEYS: dict[str, Journey] = {
    "`FastPublisher.add` to its ack": _add,
    "`scan` of 3 rows": _scan,
    "`scan(confirm=True)` of 3 rows": _confirm,
    "atomic batch of 2 messages": _atomic,
    "`ingest` of 2 messages": _ingest,
    "`kv.get_many` of 2 keys": _get_many,
    "`kv.transaction` with 1 read and 2 puts": _transaction,
    "`LogReader.read` of 3 messages": _log_read,
    "Spark's batch read of 3 rows": _spark,
}


async def measure() -> dict[str, tuple[int, int]]:
    """Return for each journey how many modules it enters, and how many calls it makes."""
    count, figures = Count(), {}
    with NatsServer() as server:
        nc = await nats.connect(server.url)
        js = nc.jetstream()
        options = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
        await jsx.ensure_stream(js, name="J", subjects=["J.>"], **options)  # type: ignore[arg-type]
        kv = await kvx.ensure_bucket(js, "J", direct=True, atomic=True)
        for key, number in itertools.product("ab", range(2)):
            await kv.put(key, b"%d" % number)
        for number in range(3):
            await js.publish("J.rows", b"%d" % number)
        for name, journey in JOURNEYS.items():
            run = await journey(js)
            for _ in range(2):
                await run()
            runs = []
            for _ in range(3):
                with count.on():
                    await run()
                runs.append((len(count.modules), count.calls))
            figures[name] = min(runs)
        await nc.close()
    return figures


def main() -> None:
    print("| journey | modules | calls |\n|---|---:|---:|")
    for name, (modules, calls) in asyncio.run(measure()).items():
        print(f"| {name} | {modules} | {calls} |")


if __name__ == "__main__":
    main()
