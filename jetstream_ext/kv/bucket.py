"""A bucket: nats-py's `KeyValue`, its stream, and what the stream's leader answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from nats.js.errors import BadBucketError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.api import Api, gather_bounded, get_at_leader, malformed_as_error, stream_state
from jetstream_ext.client.connection import Context, bucket_parts
from jetstream_ext.client.verified_read import VerifiedReader
from jetstream_ext.errors import BatchServerError, ServerError, batch_refusal
from jetstream_ext.kv.entries import KeyValueEntry, entry_of, row_of
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.subjects import is_literal

LOOKUPS_IN_FLIGHT: Final = 64


class Bucket:
    """A bucket for the length of one call; each request waits up to `timeout` seconds (None: the context's own)."""

    def __init__(self, kv: KeyValue, timeout: float | None = None) -> None:
        if not isinstance(kv, KeyValue):
            raise TypeError(f"expected a nats-py bucket (await js.key_value(...)), not {type(kv).__name__}")
        self.js, self.name, self.stream, self.prefix = bucket_parts(kv)
        self.context: Context = Context(self.js)
        self.timeout: float = self.context.resolve_timeout(timeout)

    def subject(self, key: str) -> str:
        return self.prefix + key

    async def unchecked_state(self) -> StreamState:
        """Return the state of the bucket's stream at its leader; raises as `stream_state` does, and BucketNotFoundError."""
        with self._not_found():
            return await stream_state(self.context, self.stream, self.timeout)

    async def state(self, *, direct: bool = True) -> StreamState:
        """Return the state of the bucket's stream at its leader; raises as `unchecked_state` and `check` do."""
        state = await self.unchecked_state()
        self.check(state, direct=direct)
        return state

    def check(self, state: StreamState, *, direct: bool = True) -> None:
        """Raise BadBucketError for a mirror of another bucket; with `direct`, also raise as `check_direct_reads` does."""
        if mirror := state.config.get("mirror"):
            raise BadBucketError(  # nats-py finds no key there either
                description=f"bucket {self.name!r} is a mirror of stream {mirror.get('name')!r}; open the bucket of that stream "
                "instead (its mirrors answer its direct gets)",
                stream=self.stream,
            )
        if direct:
            how = f"enable it with `await jetstream_ext.kv.enable(kv, direct=True)` or 'nats stream edit {self.stream} --allow-direct'"
            state.check_direct_reads(self.context.connection.server_version, how=how)

    async def list_keys(self, patterns: Iterable[str]) -> list[str]:
        """Return the keys among `patterns`, and the stored keys that match the others.

        The list has every matching key that is stored during the whole call. Raises as `unchecked_state` does.
        """
        keys: dict[str, None] = {}
        for pattern in patterns:
            if is_literal(pattern):
                keys[pattern] = None
            else:
                keys.update(dict.fromkeys(await self._list_matching(pattern)))
        return list(keys)

    async def _list_matching(self, pattern: str) -> list[str]:
        subjects: dict[str, Any] = {}
        last, offset, overlap = "", 0, 1
        while True:
            request = {"subjects_filter": self.subject(pattern), "offset": offset}
            with self._not_found():
                answer = await Api(self.context, self.timeout).ask(f"STREAM.INFO.{self.stream}", request, repeat=True)
            with malformed_as_error(f"the keys of bucket {self.name!r}"):
                page, total = dict(answer["state"].get("subjects") or {}), int(answer.get("total") or 0)
                if len(page) < min(2, total - offset):
                    raise ValueError("keys are missing")
            # Pages are parts of a sorted list. If two of them do not overlap, keys were removed and others moved up.
            if offset and (not page or min(page) > last):
                offset = max(0, offset - overlap)
                continue
            subjects |= page
            if offset + len(page) >= total:
                return [subject[len(self.prefix) :] for subject in subjects]
            last, overlap = max(page), len(page) // 10 + 1
            offset += len(page) - overlap

    @contextmanager
    def _not_found(self) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            raise BucketNotFoundError(
                code=404,
                err_code=error.err_code,
                description=f"bucket {self.name!r} does not exist",
                stream=self.stream,
            ) from error

    def reader(self, need: int) -> VerifiedReader:
        """Return verified reads; `need` is the leader's last sequence when the call began."""
        return VerifiedReader(self.context, self.stream, self.timeout, need=need, what=f"bucket {self.name!r}")

    async def get_at_leader(self, **request: object) -> StoredMsg | None:
        return await get_at_leader(self.context, self.stream, request, self.timeout)

    def ttls_disabled(self, refusal: ServerError, keys: Iterable[str], batch_id: str = "") -> BatchServerError:
        shown = ", ".join(map(repr, keys))
        message = (
            f"bucket {self.name!r}: TTLs are disabled (key {shown}); nothing was written; enable them with "
            "`await jetstream_ext.kv.enable(kv, ttl=True)`"
        )
        return batch_refusal(refusal, message, batch_id=batch_id, outcome="not_stored")

    async def look_up(self, keys: Iterable[str]) -> dict[str, KeyValueEntry | None]:
        """Return the newest entries of `keys` at the leader, delete markers included."""

        async def read(key: str) -> tuple[str, KeyValueEntry | None]:
            message = await self.get_at_leader(last_by_subj=self.subject(key))
            return key, None if message is None else entry_of(self.name, key, row_of(message))

        return dict(await gather_bounded(read, keys, limit=LOOKUPS_IN_FLIGHT))
