"""Some keys of a bucket, read in an executor, all as of one revision.

A request for the last messages of up to 1024 names is answered by one server at one moment. A key that is missing in the
answer was changed since, and what it was is gone; or it came later; or there is none. Only the first is a matter of
`consistency`: *latest* takes what it is now, *strict* fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from nats.js import JetStreamContext
from pyspark.sql.types import StructType

from jetstream_ext.client.api import LAG_PAUSE, Api, get_at_leader
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.errors import HistoryUnavailableError, RequestTimeoutError
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.spark.connections import connections
from jetstream_ext.spark.kv_options import KvOptions
from jetstream_ext.spark.kv_planning import NAMES_AT_ONCE, KvPart
from jetstream_ext.ttl import marker_reason

_AT_ONCE: Final = 64
_TYPES: Final = {
    "bucket": pa.string(),
    "key": pa.string(),
    "value": pa.binary(),
    "revision": pa.int64(),
    "created": pa.timestamp("us", tz="UTC"),
    "operation": pa.string(),
}


def read_keys(options: KvOptions, schema: StructType, part: KvPart) -> Iterator[pa.RecordBatch]:
    """Read a partition as record batches.

    Raises:
        HistoryUnavailableError: Keys changed since, and the read is to be strict.
        JetStreamExtError: The read failed; Spark tries the task again.
    """
    arrow = pa.schema([pa.field(field.name, _TYPES[field.name], nullable=field.nullable) for field in schema.fields])
    with connections().lend(options.connection, "jetstream-ext spark executor") as lease:
        reader = _Reader(lease.connection.context(options), options, part)
        for messages in lease.iterate(reader.pages()):
            yield _batch(options, arrow, part, messages)


def operation(message: StoredMsg) -> str:
    """Return what a message does to its key: PUT, DEL or PURGE."""
    headers = message.headers
    if "KV-Operation" in headers:
        return headers["KV-Operation"]
    reason = marker_reason(headers)
    return "PUT" if reason is None else "DEL" if reason == "Remove" else "PURGE"


def _batch(options: KvOptions, schema: pa.Schema, part: KvPart, messages: list[StoredMsg]) -> pa.RecordBatch:
    rows = [(message, operation(message)) for message in messages]
    if not options.include_deleted:
        rows = [(message, what) for message, what in rows if what == "PUT"]
    cut = len(part.prefix)
    make: dict[str, Callable[[], list[Any]]] = {
        "bucket": lambda: [options.bucket] * len(rows),
        "key": lambda: [message.subject[cut:] for message, _ in rows],
        "value": lambda: [message.data for message, _ in rows],
        "revision": lambda: [message.seq for message, _ in rows],
        "created": lambda: [message.time for message, _ in rows],
        "operation": lambda: [what for _, what in rows],
    }
    arrays = [pa.array(make[field.name](), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Reader:
    """Reads the keys of one part."""

    def __init__(self, context: JetStreamContext, options: KvOptions, part: KvPart) -> None:
        self._js = Context(context)
        self._direct = DirectGet(context, part.stream)
        self._options = options
        self._part = part
        self._timeout = options.connection.timeout

    async def pages(self) -> AsyncGenerator[list[StoredMsg], None]:
        """Yield the messages, some at a time."""
        keys = self._part.keys
        size = NAMES_AT_ONCE - 1  # one is for the canary
        for first in range(0, len(keys), size):
            names = [self._part.prefix + key for key in keys[first : first + size]]
            found = await self._as_of(names)
            missing = [name for name in names if name not in found]
            if missing:
                found |= await self._changed(missing)
            if found:
                yield list(found.values())

    async def _as_of(self, names: list[str]) -> dict[str, StoredMsg]:
        """Return the last messages up to the revision, from a server that has it."""
        part = self._part
        canary = [part.canary] if part.canary and part.canary not in names else []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while True:
            messages = await self._direct.multi_last([*names, *canary], up_to_seq=part.revision).to_list()
            found = {message.subject: message for message in messages}
            known = found.get(part.canary)
            one_reply = sum(len(message.data) for message in messages) < DEFAULT_MAX_BYTES // 2
            proved = one_reply and known is not None and known.seq == part.revision
            alone = not part.replicated and all(message.stream == part.stream for message in messages)
            if canary:
                found.pop(part.canary, None)
            if proved or alone or await self._confirmed(names, found):
                return found
            if loop.time() >= deadline:
                raise RequestTimeoutError(
                    f"bucket {self._options.bucket!r}: no replica that answers has revision {part.revision} within "
                    f"{self._timeout:g} s"
                )
            await asyncio.sleep(LAG_PAUSE)

    async def _confirmed(self, names: list[str], found: dict[str, StoredMsg]) -> bool:
        """Return whether the leader has nothing newer of any of `names`, up to the revision."""

        async def newer(name: str) -> bool:
            after = found[name].seq if name in found else 0
            request = {"seq": after + 1, "next_by_subj": name}
            message = await get_at_leader(self._js, self._part.stream, request, self._timeout)
            return message is not None and message.seq <= self._part.revision

        for first in range(0, len(names), _AT_ONCE):
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(newer(name)) for name in names[first : first + _AT_ONCE]]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            if any(task.result() for task in tasks):
                return False
        return True

    async def _changed(self, names: Sequence[str]) -> dict[str, StoredMsg]:
        """Return what keys without a message up to the revision are now, if they were there and changed since."""
        part = self._part
        messages = [
            message for message in await self._direct.multi_last(list(names)).to_list() if message.seq > part.revision
        ]
        if part.history != 1:
            messages = [message for message in messages if not await self._came_later(message.subject)]
        if messages and self._options.strict:
            cut = len(part.prefix)
            keys = [message.subject[cut:] for message in messages]
            raise HistoryUnavailableError(
                f"bucket {self._options.bucket!r}: {len(keys)} keys of {len(part.keys)} changed after revision "
                f"{part.revision}, and what they were is gone (such as {keys[0]!r}); keep more history, or read with "
                "consistency=latest",
                keys=tuple(keys),
            )
        return {message.subject: message for message in messages}

    async def _came_later(self, subject: str) -> bool:
        """Return whether all messages that there ever were on a subject are newer than the revision."""
        info = await Api(self._js, self._timeout).ask(f"STREAM.INFO.{self._part.stream}", {"subjects_filter": subject})
        count = int((info["state"].get("subjects") or {}).get(subject, 0))
        if 0 < self._part.history <= count:
            return False  # as many as are kept: some may be gone
        first = await get_at_leader(self._js, self._part.stream, {"seq": 1, "next_by_subj": subject}, self._timeout)
        # A purge, and a marker of the server, took away what was before.
        return first is None or (first.seq > self._part.revision and operation(first) != "PURGE")
