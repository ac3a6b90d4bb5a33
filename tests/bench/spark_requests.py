"""How many requests the driver sends to plan reads of streams: a table, for the page on performance.

    python tests/bench/spark_requests.py [--streams 1 10 100]

The counts are the server's, and depend on no machine. No Spark runs: the source is called as Spark calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import nats
from pyspark.sql.datasource import CaseInsensitiveDict

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer
from pyspark_jetstream import DefaultSource

MESSAGES, SUBJECTS, NEW = 2_000, 200, 100
# The streams, and the option `subjects`.
CASES = {
    "dense": ("DENSE", ""),
    "sparse": ("SPARSE", ""),
    "dense, one filter": ("DENSE", "*.1"),
    "dense, three filters": ("DENSE", "*.1,*.2,*.3"),
}
ACTIONS = ("batch plan", "first micro-batch", "idle trigger", "trigger with new messages", "replay")


class Counter:
    """Counts the requests to JetStream that a server gets, in a separate thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seen = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._nc = self._run(self._listen())

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _listen(self) -> Any:
        async def count(_: Any) -> None:
            self.seen += 1

        nc = await nats.connect(self._url)
        await nc.subscribe("$JS.API.>", cb=count)
        await nc.flush()
        return nc

    def close(self) -> None:
        self._run(self._nc.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def during(self, action: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of an action, and the number of requests meanwhile."""
        self._run(self._nc.flush())
        before = self.seen
        result = action()
        self._run(asyncio.sleep(0.1))
        self._run(self._nc.flush())
        return result, self.seen - before

    def fill(self, kind: str, streams: int) -> None:
        self._run(self._fill(kind, streams))

    async def _fill(self, kind: str, streams: int) -> None:
        chance = random.Random(1)
        js = self._nc.jetstream(timeout=30)
        config = {"max_msgs_per_subject": 1} if kind == "SPARSE" else {}
        for number in range(streams):
            name = f"{kind}{number}"
            await js.add_stream(
                name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True, num_replicas=1, **config
            )
            subjects = ["first", *(str(chance.randrange(SUBJECTS)) for _ in range(MESSAGES - 1))]
            await self.publish(js, [f"{name}.{subject}" for subject in subjects])

    async def publish(self, js: Any, subjects: list[str]) -> None:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((subject, b"x" * 100) for subject in subjects)

    def more(self, kind: str, streams: int) -> None:
        async def publish() -> None:
            js = self._nc.jetstream(timeout=30)
            for number in range(streams):
                await self.publish(js, [f"{kind}{number}.{message % 10}" for message in range(NEW)])

        self._run(publish())


def stored(offset: Any) -> Any:
    """Return an offset as it comes out of Spark's log."""
    return json.loads(json.dumps(offset))


def measure(counter: Counter, url: str, kind: str, subjects: str, streams: int) -> list[int]:
    """Return the requests of each of `ACTIONS`."""
    options = {"servers": url, "stream": ",".join(f"{kind}{number}" for number in range(streams))}
    source = DefaultSource(CaseInsensitiveDict(options | ({"subjects": subjects} if subjects else {})))

    def query() -> Any:
        return source.streamReader(source.schema())

    reader = source.reader(source.schema())
    reader.partitions()  # it is connected
    _, batch = counter.during(reader.partitions)
    following = query()
    start = stored(following.initialOffset())

    def micro_batch(begin: Any) -> Any:
        while (end := stored(following.latestOffset(begin, following.getDefaultReadLimit()))) == begin:
            time.sleep(0.01)  # as Spark does
        following.partitions(begin, end)
        return end

    end, first = counter.during(lambda: micro_batch(start))
    for _ in range(200 if streams <= 8 else 1):  # until the doorbells are trusted
        following.latestOffset(end, following.getDefaultReadLimit())
        time.sleep(0.01)
    _, idle = counter.during(lambda: following.latestOffset(end, following.getDefaultReadLimit()))
    counter.more(kind, streams)
    later, new = counter.during(lambda: micro_batch(end))
    another = query()
    _, replay = counter.during(lambda: another.partitions(end, later))
    return [batch, first, idle, new, replay]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 10, 100])
    options = parser.parse_args()
    print(f"| streams | messages | {' | '.join(ACTIONS)} |")
    print(f"| ---: | --- |{' ---: |' * len(ACTIONS)}")
    for streams in options.streams:
        for case, (kind, subjects) in CASES.items():
            with NatsServer() as server:
                counter = Counter(server.url)
                counter.fill(kind, streams)
                counts = measure(counter, server.url, kind, subjects, streams)
                counter.close()
            print(f"| {streams} | {case} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
