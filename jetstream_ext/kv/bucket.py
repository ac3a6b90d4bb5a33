"""A bucket as this package sees it: nats-py's `KeyValue`, its stream, and what the stream's leader says."""

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
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.verified_read import VerifiedReader
from jetstream_ext.errors import ResponseError
from jetstream_ext.kv.entries import KeyValueEntry, entry_of, record
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState, parse_stream_state

_LOOKS_IN_FLIGHT: Final = 32


class Bucket:
    """What reads and writes of one call share.

    Args:
        kv: nats-py's bucket.
        timeout: Seconds to wait for an answer; None is the context's own.

    Raises:
        TypeError: `kv` is not a `KeyValue`, or `timeout` is not a number.
        ValueError: `timeout` is not over 0.
    """

    context: JetStreamContext
    name: str
    stream: str
    prefix: str

    def __init__(self, kv: KeyValue, timeout: float | None = None) -> None:
        if not isinstance(kv, KeyValue):
            raise TypeError(f"expected a nats-py bucket (await js.key_value(...)), not {type(kv).__name__}")
        self.context, self.name, self.stream, self.prefix = bucket_parts(kv)
        self.js: Context = Context(self.context)
        self.direct: DirectGet = DirectGet(self.context, self.stream, timeout=timeout)
        self.timeout: float = self.js.resolve_timeout(timeout)

    def subject(self, key: str) -> str:
        """Return the subject of a key, or of a pattern of keys."""
        return self.prefix + key

    async def info(self, **question: object) -> dict[str, Any]:
        """Return the stream's information as its leader answers it.

        Raises:
            BucketNotFoundError: There is no such bucket.
            RequestTimeoutError, ServiceUnavailableError: Its leader does not answer.
            ResponseError: The answer is not what servers answer.
        """
        try:
            answer = await Api(self.js, self.timeout).ask(f"STREAM.INFO.{self.stream}", question or None)
        except NotFoundError as error:
            raise BucketNotFoundError(
                code=404, err_code=error.err_code, description=f"there is no bucket {self.name!r}", stream=self.stream
            ) from error
        if not (isinstance(answer.get("config"), dict) and isinstance(answer.get("state"), dict)):
            raise ResponseError(f"the server's information on bucket {self.name!r} has no configuration or no state")
        return answer

    async def state(self, *, direct: bool = True) -> StreamState:
        """Return what the leader of the bucket's stream says now.

        Args:
            direct: Insist that the bucket can be read by direct gets.

        Raises:
            DirectGetDisabledError: It cannot.
            UnsupportedFeatureError: The server is older than 2.11.
            BadBucketError: The bucket is a mirror of another bucket.
            BucketNotFoundError, RequestTimeoutError, ServiceUnavailableError, ResponseError: As for `info`.
        """
        state = parse_stream_state(await self.info(), self.stream)
        if mirror := state.config.get("mirror"):
            raise BadBucketError(  # nats-py finds no key there either
                description=f"bucket {self.name!r} is a mirror: its keys are those of stream {mirror.get('name')!r}, "
                "under that bucket's name; read that bucket, for which its mirrors answer direct gets",
                stream=self.stream,
            )
        if direct:
            how = "enable it with `await jetstream_ext.kv.enable(kv, direct=True)`"
            state.check_direct_reads(self.js.connection.server_version, how=how)
        return state

    def reader(self, need: int) -> VerifiedReader:
        """Return the verified reads of one call.

        Args:
            need: The sequence that every responder must have: the leader's last one when the call began.
        """
        return VerifiedReader(self.js, self.stream, self.timeout, need=need, what=f"bucket {self.name!r}")

    async def at_leader(self, **request: object) -> StoredMsg | None:
        """Return the message that the leader finds for a request of ``STREAM.MSG.GET``, or None.

        Raises:
            RequestTimeoutError: It does not answer.
        """
        return await get_at_leader(self.js, self.stream, request, self.timeout)

    async def look_up(self, keys: Iterable[str]) -> dict[str, KeyValueEntry | None]:
        """Return what keys are at the leader, markers included.

        Raises:
            RequestTimeoutError: It does not answer.
        """
        found: dict[str, KeyValueEntry | None] = {}

        async def read(key: str) -> None:
            message = await self.at_leader(last_by_subj=self.subject(key))
            found[key] = None if message is None else entry_of(self.name, key, record(message))

        await gather_bounded(read, keys, limit=_LOOKS_IN_FLIGHT)
        return found
