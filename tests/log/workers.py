"""Two streams, and workers that store the outputs of one of them in the other."""

import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from nats.js import JetStreamContext

from jetstream_ext import BatchMessage, StoredMsg
from jetstream_ext.log import DeadLetter, LogReader, Processed, State, exactly_once, partition_of


class Pair:
    """The streams `source` and `target`, and the worker "w" between them."""

    def __init__(self, js: JetStreamContext, source: str, target: str) -> None:
        self.js = js
        self.source = source
        self.target = target

    def reader(self, **options: Any) -> LogReader:
        return LogReader(options.pop("js", self.js), options.pop("stream", self.source), **options)

    def work(self, handler: Any = None, reader: Any = None, **options: Any) -> Awaitable[Processed]:
        options = {"name": "w", "prefix": f"{self.target}.at", **options}
        return exactly_once(reader or self.reader(), self.target, handler or self.out, **options)

    def out(self, message: StoredMsg, **options: Any) -> BatchMessage:
        """Return the output of an input, which has the same payload."""
        return BatchMessage(f"{self.target}.out", message.data, **options)

    def letter(self, attempts: int = 3, backoff: Any = 0.0) -> DeadLetter:
        return DeadLetter(f"{self.target}.dead", attempts, backoff)

    async def stored(self, suffix: str) -> list[StoredMsg]:
        return [msg async for msg in self.reader(stream=self.target, subject=f"{self.target}.{suffix}")]

    async def outputs(self) -> list[int]:
        return [int(msg.data) for msg in await self.stored("out")]

    async def records(self, worker: str = "w") -> list[dict[str, Any]]:
        """Return what is stored of the worker's positions, the newest one last."""
        return [json.loads(msg.data) for msg in await self.stored(f"at.{worker}")]

    async def forge(self, **changes: Any) -> None:
        """Store the newest record again with other values; None removes one."""
        record = {**(await self.records())[-1], **changes}
        kept = {name: value for name, value in record.items() if value is not None}
        await self.js.publish(f"{self.target}.at.w", json.dumps(kept).encode())


class StatefulPair(Pair):
    """A pair whose worker counts its inputs by subject in its state.

    Attributes:
        partitions: Of the group that works, by subject; its state is in as many parts.
        first: The first input that counts.
        bad: An input that fails.
    """

    partitions = 1
    first = 1
    bad = 0

    def work(self, handler: Any = None, reader: Any = None, **options: Any) -> Awaitable[Processed]:
        return super().work(handler or self.count, reader, **{"state": f"{self.target}.state", **options})

    def count(self, message: StoredMsg, state: State) -> BatchMessage:
        """Check the state, count an input, and return the count with its sequence as an output."""
        key = message.subject.rpartition(".")[2]
        assert dict(state) == self.counts(message.seq - 1, self.partition(key)), message.seq
        state[key] = b"%d" % (int(state.get(key, b"0")) + 1)
        if state.pop(f"{key}.odd", None) is None:
            state[f"{key}.odd"] = b""
        if message.seq == self.bad:
            raise ZeroDivisionError
        return BatchMessage(f"{self.target}.out", b"%d %s" % (message.seq, state[key]))

    def partition(self, key: str) -> int:
        return partition_of(f"{self.source}.{key}", self.partitions, [1])

    def counted(self, last: int) -> list[tuple[int, str, int]]:
        """Return each input up to a sequence, with its key and its count."""
        inputs, found = dict[str, int](), list[tuple[int, str, int]]()
        for n in range(self.first, last + 1):
            if n != self.bad:
                inputs[str(n % 3)] = inputs.get(str(n % 3), 0) + 1
                found.append((n, str(n % 3), inputs[str(n % 3)]))
        return found

    def counts(self, last: int, partition: int = 0) -> dict[str, bytes]:
        """Return the state behind an input."""
        counts = {key: count for _, key, count in self.counted(last) if self.partition(key) == partition}
        return {key: b"%d" % n for key, n in counts.items()} | {f"{key}.odd": b"" for key, n in counts.items() if n % 2}

    async def stored_state(self, worker: str = "w") -> dict[str, bytes]:
        """Return what the messages on the subjects of a state say."""
        found, prefix = dict[str, bytes](), f"{self.target}.state.{worker}."
        for message in await self.stored(f"state.{worker}.>"):
            key = unquote(message.subject.removeprefix(prefix))
            found.pop(key, None)
            if "KV-Operation" not in message.headers and "Nats-Marker-Reason" not in message.headers:
                found[key] = message.data
        return found

    async def assert_exact(self, last: int, group: str | None = None) -> None:
        """Assert that outputs, state and position are those behind an input."""
        found = [msg.data for msg in await self.stored("out")]
        expected = [b"%d %d" % (n, count) for n, _, count in self.counted(last)]
        assert (found if self.partitions == 1 else sorted(found)) == (
            expected if self.partitions == 1 else sorted(expected)
        )
        for partition in range(self.partitions):
            worker = "w" if group is None else f"{group}.{partition}"
            assert await self.stored_state(worker) == self.counts(last, partition)
            if self.partitions == 1 and last:
                assert (await self.records(worker))[-1]["seq"] == last + 1


MakePair = Callable[..., Awaitable[Pair]]
MakeStateful = Callable[..., Awaitable[StatefulPair]]
