"""A bucket as this package sees it: nats-py's `KeyValue`, its stream, and what the stream's leader says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from nats.js import JetStreamContext
from nats.js.errors import BadBucketError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.api import Api, get_at_leader
from jetstream_ext.client.concurrency import gather_bounded
from jetstream_ext.client.connection import bucket_parts
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.errors import DirectGetDisabledError, ResponseError
from jetstream_ext.kv.messages import entry_of
from jetstream_ext.kv.records import record
from jetstream_ext.kv.values import KeyValueEntry
from jetstream_ext.protocol.feature_table import DIRECT_BATCH
from jetstream_ext.protocol.stream_state import answering_server
from jetstream_ext.types import StoredMsg

_LOOKS_IN_FLIGHT: Final = 32


@dataclass(frozen=True, slots=True)
class Facts:
    """What the leader of a bucket's stream says of it."""

    config: Mapping[str, Any]
    """The stream's configuration, in the server's words."""
    now: datetime
    """The leader's clock."""
    created: datetime
    first: int
    """The lowest sequence that the stream can have had."""
    last: int
    """The newest sequence (0: none yet)."""
    last_time: datetime
    """When that was stored; when the bucket was created, if there is none."""
    messages: int
    keys: int

    @property
    def history(self) -> int:
        """How many messages the bucket keeps of a key (0: all)."""
        return max(0, int(self.config.get("max_msgs_per_subject", 0)))

    @property
    def max_age(self) -> timedelta | None:
        """The bucket's own time to live."""
        return _duration(self.config.get("max_age"))

    @property
    def marker_ttl(self) -> timedelta | None:
        """How long the markers stay that the server leaves for expired keys."""
        return _duration(self.config.get("subject_delete_marker_ttl"))

    @property
    def gapless(self) -> bool:
        """Whether not one message was ever removed."""
        return self.messages == self.last - self.first + 1


class Bucket:
    """What reads and writes of one call share.

    Args:
        kv: nats-py's bucket.
        timeout: Seconds to wait for an answer; None is the context's own.

    Raises:
        TypeError: `kv` is no `KeyValue`.
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
        self.timeout: float = self.js.timeout if timeout is None else float(timeout)

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

    async def facts(self, *, direct: bool = True) -> Facts:
        """Return what the leader says now.

        Args:
            direct: Insist that the bucket can be read by direct gets.

        Raises:
            DirectGetDisabledError: It cannot.
            UnsupportedFeatureError: The server is older than 2.11.
            BadBucketError: It is a mirror of another bucket.
            BucketNotFoundError, RequestTimeoutError, ServiceUnavailableError, ResponseError: As for `info`.
        """
        info = await self.info()
        config, state = info["config"], info["state"]
        if mirror := config.get("mirror"):
            # Neither would nats-py find a key there.
            raise BadBucketError(
                description=f"bucket {self.name!r} is a mirror: its keys are those of stream {mirror.get('name')!r}, "
                "under that bucket's name; use that bucket, for which its mirrors answer direct gets anyway",
                stream=self.stream,
            )
        if direct and not config.get("allow_direct"):
            raise DirectGetDisabledError(
                f"bucket {self.name!r} does not allow direct gets, which this read is made of; "
                "turn them on once, with `await jetstream_ext.kv.enable(kv, direct=True)`",
                stream=self.stream,
            )
        version, level = answering_server(config)
        if direct and not DIRECT_BATCH.at(level):
            raise DIRECT_BATCH.unsupported(server_version=version or self.js.connection.server_version, api_level=level)
        try:
            created, last_time = _time(info["created"]), _time(state["last_ts"])
            return Facts(
                config=config,
                now=_time(info["ts"]),
                created=created,
                first=max(1, int(config.get("first_seq") or 1)),
                last=int(state["last_seq"]),
                last_time=last_time if last_time.year > 1 else created,
                messages=int(state["messages"]),
                keys=int(state.get("num_subjects", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ResponseError(f"the server's information on bucket {self.name!r} makes no sense") from error

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


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _duration(nanoseconds: int | None) -> timedelta | None:
    return timedelta(microseconds=nanoseconds / 1000) if nanoseconds else None
