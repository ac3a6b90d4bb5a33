"""A bucket: nats-py's `KeyValue`, its stream, and what the stream's leader answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from nats.js.errors import BadBucketError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.api import (
    forget_stream,
    gather_bounded,
    lookup_stream,
)
from jetstream_ext.client.connection import bucket_parts
from jetstream_ext.errors import (
    Status,
)
from jetstream_ext.kv.entries import KeyValueEntry, Subjects, entry_of_record, records_of
from jetstream_ext.kv.keyed_stream import KeyedStream
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.subjects import anything

LOOKUPS_IN_FLIGHT: Final = 64
_KEY: Final = re.compile(r"\$KV\.[-_a-zA-Z0-9]+\.")


class Bucket(KeyedStream):
    """A bucket for the length of one call or of a live table."""

    def __init__(self, kv: KeyValue, timeout: float | None = None) -> None:
        if not isinstance(kv, KeyValue):
            raise TypeError(f"expected a nats-py bucket (await js.key_value(...)), not {type(kv).__name__}")
        js, name, stream, prefix = bucket_parts(kv)
        super().__init__(js, stream, prefix=prefix, what=f"bucket {name!r}", timeout=timeout)
        self.name: str = name

    def subjects(self, wanted: Callable[[str], bool] = anything) -> Subjects:
        return Subjects(self.name, self.prefix, wanted)

    async def state(self, *, direct: bool = True) -> StreamState:
        """Return the state of the bucket's stream at its leader; raises as `unchecked_state` and `check` do."""
        state = await self.unchecked_state()
        self.check(state, direct=direct)
        return state

    async def readable_state(self) -> StreamState:
        """As `state`, but for reads a mirror of a bucket is a bucket: of what its own leader has."""
        state = await self.unchecked_state()
        self.check(state, mirror=True)
        # The subjects are those of the first bucket in a chain of mirrors, and only the messages tell which one that is.
        first = await self.get_at_leader(seq=state.first_seq, next_by_subj="$KV.>") if state.origin else None
        transformed = bool(state.origin.get("subject_transforms"))
        if first is not None or transformed:
            named = None if first is None or transformed else _KEY.match(first.subject)
            if named is None:
                raise BadBucketError(
                    description=f"bucket {self.name!r} is a mirror of stream {state.origin.get('name')!r}, which is not a "
                    "bucket or whose subjects are transformed; read that stream",
                    stream=self.stream,
                )
            self.replace_prefix(named[0])
        return state

    def check(self, state: StreamState, *, direct: bool = True, mirror: bool = False) -> None:
        """Raise BadBucketError for no bucket, or for a mirror unless `mirror`.

        With `direct`, also raise as `check_direct_reads` does.
        """
        if state.origin and not mirror:
            raise BadBucketError(  # nats-py finds no key there either
                description=f"bucket {self.name!r} is a mirror of stream {state.origin.get('name')!r}; open the bucket of that "
                "stream instead (its mirrors answer its direct gets), or read the mirror with get_many and snapshot",
                stream=self.stream,
            )
        state.check_sequences()
        if not state.max_msgs_per_subject:  # nats-py also refuses it
            raise BadBucketError(
                description=f"stream {self.stream!r} is not a bucket: it does not limit the history (max_msgs_per_subject)",
                stream=self.stream,
            )
        if direct:
            how = "" if state.allows_direct else advice.enable_bucket(self.name, "direct")
            state.check_direct_reads(self.context.connection.server_version, how=how)

    @contextmanager
    def not_found(self) -> Iterator[None]:
        """Raise BucketNotFoundError where the server answers that the stream does not exist."""
        try:
            yield
        except BucketNotFoundError:
            raise
        except NotFoundError as error:
            text = f"bucket {self.name!r} does not exist"
            raise BucketNotFoundError(Status.NOT_FOUND, text, error.err_code, stream=self.stream) from error

    async def has_replaced(self, entry: KeyValueEntry) -> bool:
        """Return whether another message has the revision of `entry` now: the bucket was deleted and created again."""
        found = await self.get_at_leader(seq=entry.revision)
        return found is not None and (found.subject, found.time) != (self.subject(entry.key), entry.created)

    async def look_up(self, keys: Iterable[str]) -> dict[str, KeyValueEntry | None]:
        """Return the newest entries of `keys` at the leader, delete markers included.

        If one is not found, raises as `check_known` does as well.
        """

        async def read(key: str) -> tuple[str, KeyValueEntry | None]:
            message = await self.get_at_leader(last_by_subj=self.subject(key))
            found = records_of([] if message is None else [message])
            return key, next((entry_of_record(self.name, key, record) for _, record in found), None)

        found = dict(await gather_bounded(read, keys, limit=LOOKUPS_IN_FLIGHT))
        if None in found.values():
            await self.check_known()
        return found

    async def check_known(self, *, fresh: bool = False) -> None:
        """Raise as `check` does if the stream is known, and return if the client cannot find out.

        It explains why a key was not found, or why no stream took a message. The leader is asked if that was not done
        within the last seconds, with `fresh` in any case.
        """
        if fresh:
            forget_stream(self.context, self.stream)
        known = await lookup_stream(self.context, "", self.stream, self.timeout)
        if known is None:
            return
        state, last_seq = known
        try:
            self.check(replace(state, last_seq=last_seq), direct=False)
        except BadBucketError:
            if fresh:
                raise
            await self.check_known(fresh=True)  # the cached answer may be from an earlier stream of that name
