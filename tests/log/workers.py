"""Two streams, and workers that store the outputs of one of them in the other."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from nats.js import JetStreamContext

from jetstream_ext import BatchMessage, StoredMsg
from jetstream_ext.log import DeadLetter, LogReader, Processed, exactly_once


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


MakePair = Callable[..., Awaitable[Pair]]
