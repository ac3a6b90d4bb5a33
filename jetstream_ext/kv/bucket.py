"""A bucket: nats-py's `KeyValue`, its stream, and what the stream's leader answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nats.js import JetStreamContext
from nats.js.errors import BadBucketError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.api import Api, get_at_leader
from jetstream_ext.client.concurrency import gather_bounded
from jetstream_ext.client.connection import bucket_parts
from jetstream_ext.client.context import Context
from jetstream_ext.client.verified_read import VerifiedReader
from jetstream_ext.errors import ResponseError
from jetstream_ext.kv.entries import KeyValueEntry, entry_of, record_of
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState, parse_stream_state

_LOOKUPS_IN_FLIGHT: Final = 32


async def open_bucket(js: JetStreamContext, name: str, timeout: float | None = None) -> KeyValue:
    """Return nats-py's `KeyValue` of a bucket; raises as ``js.key_value``, and RequestTimeoutError."""
    context = Context(js)
    return await context.connection.bounded(
        js.key_value(name), context.resolve_timeout(timeout), f"the state of bucket {name!r}"
    )


class Bucket:
    """A bucket for the length of one call; each request waits up to `timeout` seconds (None: the context's own)."""

    js: JetStreamContext
    name: str
    stream: str
    prefix: str

    def __init__(self, kv: KeyValue, timeout: float | None = None) -> None:
        if not isinstance(kv, KeyValue):
            raise TypeError(f"expected a nats-py bucket (await js.key_value(...)), not {type(kv).__name__}")
        self.js, self.name, self.stream, self.prefix = bucket_parts(kv)
        self.context: Context = Context(self.js)
        self.timeout: float = self.context.resolve_timeout(timeout)

    def subject(self, key: str) -> str:
        """Return the subject of a key, or of a pattern of keys."""
        return self.prefix + key

    async def info(self, **request: object) -> dict[str, Any]:
        """Return the leader's answer to ``STREAM.INFO``; raises as `Api.ask` does, and BucketNotFoundError."""
        try:
            answer = await Api(self.context, self.timeout).ask(f"STREAM.INFO.{self.stream}", request or None)
        except NotFoundError as error:
            raise BucketNotFoundError(
                code=404,
                err_code=error.err_code,
                description=f"bucket {self.name!r} does not exist",
                stream=self.stream,
            ) from error
        if not (isinstance(answer.get("config"), dict) and isinstance(answer.get("state"), dict)):
            raise ResponseError(
                f"bucket {self.name!r}: the leader's answer to STREAM.INFO lacks the configuration or the state"
            )
        return answer

    async def state(self, *, direct: bool = True) -> StreamState:
        """Return the state of the bucket's stream as its leader reports it.

        Raises:
            Exception: As `info` does.
            DirectGetDisabledError: With `direct`: the bucket does not allow direct gets.
            UnsupportedFeatureError: With `direct`: the server is older than 2.11.
            BadBucketError: The bucket is a mirror of another bucket.
        """
        state = parse_stream_state(await self.info(), self.stream)
        if mirror := state.config.get("mirror"):
            raise BadBucketError(  # nats-py finds no key there either
                description=f"bucket {self.name!r} is a mirror of stream {mirror.get('name')!r}; open the bucket of that stream "
                "instead (its mirrors answer its direct gets)",
                stream=self.stream,
            )
        if direct:
            how = "enable it with `await jetstream_ext.kv.enable(kv, direct=True)`"
            state.check_direct_reads(self.context.connection.server_version, how=how)
        return state

    def reader(self, need: int) -> VerifiedReader:
        """Return verified reads; `need` is the leader's last sequence when the call began."""
        return VerifiedReader(self.context, self.stream, self.timeout, need=need, what=f"bucket {self.name!r}")

    async def get_at_leader(self, **request: object) -> StoredMsg | None:
        """Return the message that a ``STREAM.MSG.GET`` request finds at the leader, or None."""
        return await get_at_leader(self.context, self.stream, request, self.timeout)

    async def look_up(self, keys: Iterable[str]) -> dict[str, KeyValueEntry | None]:
        """Return the newest entries of `keys` at the leader, delete markers included."""

        async def read(key: str) -> tuple[str, KeyValueEntry | None]:
            message = await self.get_at_leader(last_by_subj=self.subject(key))
            return key, None if message is None else entry_of(self.name, key, record_of(message))

        return dict(await gather_bounded(read, keys, limit=_LOOKUPS_IN_FLIGHT))
