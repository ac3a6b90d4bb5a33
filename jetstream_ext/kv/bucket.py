"""A bucket, or any stream whose subjects are keys: its names, and what its leader answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

from nats.js import JetStreamContext
from nats.js.errors import BadBucketError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client.api import (
    Api,
    check_same_stream,
    forget_stream,
    gather_bounded,
    get_at_leader,
    lookup_stream,
    malformed_as_error,
    stream_state,
)
from jetstream_ext.client.connection import Context, bucket_parts
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import RequestTimeoutError, Status, StreamConfigMismatchError
from jetstream_ext.kv.entries import EVERYTHING, KeyValueEntry, Subjects, entry_of_message
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.api import StreamState, parse_stream_state
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import json_number
from jetstream_ext.protocol.options import reads_subject
from jetstream_ext.protocol.subjects import anything, covers, is_literal

LOOKUPS_IN_FLIGHT: Final = 64
_KEY: Final = re.compile(r"\$KV\.[-_a-zA-Z0-9]+\.")


class KeyedStream:
    """A stream for the length of one call or of a live table; each request waits up to `timeout` seconds.

    Args:
        js: The JetStream context.
        stream: The stream's name.
        prefix: What the subject of a key has before it.
        what: The stream as errors call it.
        timeout: None is the context's own.
    """

    def __init__(
        self, js: JetStreamContext, stream: str, *, prefix: str = "", what: str = "", timeout: float | None = None
    ) -> None:
        self.js: JetStreamContext = js
        self.stream: str = stream
        self.prefix: str = prefix
        self.what: str = what or f"stream {stream!r}"
        self.context: Context = Context(js)
        self.timeout: float = self.context.resolve_timeout(timeout)

    async def count_keys(self, pattern: str) -> tuple[StreamState, int]:
        """Return the state of the stream, and how many of its keys match a pattern."""
        request = {"subjects_filter": self.subject(pattern), "offset": 1 << 40}  # beyond the last name
        with self.not_found():
            answer = await Api(self.context, self.timeout).stream(self.stream, request)
        with malformed_as_error(self.what):
            return parse_stream_state(answer, self.stream), json_number(answer.get("total") or 0, "total")

    def only_keys(self, state: StreamState) -> bool:
        """Whether the stream stores nothing but its keys, apart from messages that only carry expectations."""
        every, apart = self.subject(EVERYTHING), reads_subject(self.stream)
        return all(covers(every, subject) for subject in state.subjects if subject != apart)

    def subject(self, key: str) -> str:
        return self.prefix + key

    def key(self, subject: str) -> str:
        return subject.removeprefix(self.prefix)

    def subjects(self, wanted: Callable[[str], bool] = anything) -> Subjects:
        return Subjects(self.stream, self.prefix, wanted)

    async def unchecked_state(self) -> StreamState:
        """Return the state of the stream at its leader; raises as `stream_state` and `not_found` do."""
        with self.not_found():
            return await stream_state(self.context, self.stream, self.timeout)

    async def readable_state(self) -> StreamState:
        """Return the state of the stream at its leader; raise an error if its newest messages cannot be read."""
        state = await self.unchecked_state()
        state.check_sequences()
        state.check_direct_reads(self.context.connection.server_version)
        if state.retention != "limits":
            raise StreamConfigMismatchError(
                f"{self.what} has {state.retention} retention: acknowledgements of its consumers remove messages, so it has "
                "not the last message of every subject; read a copy of it with limits retention",
                diff={"retention": ("limits", state.retention)},
            )
        return state

    async def check_same(self, before: StreamState, now: StreamState | None = None) -> StreamState:
        """Return the state of the stream now; raise StreamRecreatedError if it is not the stream of `before`."""
        return await check_same_stream(self.context, before, now or await self.unchecked_state(), self.timeout)

    async def list_keys(self, patterns: Iterable[str], *, most: float = math.inf) -> list[str]:
        """Return the keys among `patterns`, and the stored keys that match the others.

        The list has every matching key that is stored during the whole call; it may end early if it has more than `most`
        keys. The server sends 100,000 keys at a time, and each such page, with all retries after transient errors, may take
        up to `timeout`. Raises as `unchecked_state` does.
        """
        keys: dict[str, None] = {}
        for pattern in patterns:
            if is_literal(pattern):
                keys[pattern] = None
            else:
                keys.update(dict.fromkeys(await self._list_matching(pattern, most)))
        return list(keys)

    async def _list_matching(self, pattern: str, most: float) -> list[str]:
        subjects: dict[str, Any] = {}
        last, offset, overlap, listed = "", 0, 1, 0
        api, retry = self._patience()
        while True:
            answer = await retry.call(partial(self._page, api, pattern, offset))
            with malformed_as_error(f"the keys of {self.what}"):
                page = dict(answer["state"].get("subjects") or {})
                total = json_number(answer.get("total") or 0, "total")
                count = min(json_number(answer.get("limit") or len(page), "limit"), total - offset)
                # Servers send bytes that are not UTF-8 as U+FFFD, so that several keys of a page may have one name.
                if count < min(2, total - offset) or (len(page) < count and "\ufffd" not in "".join(page)):
                    raise ValueError("keys are missing")
            # Pages are parts of a sorted list. If two of them do not overlap, keys were removed and others moved up.
            if offset and (not page or min(page) > last):
                offset = max(0, offset - overlap)
                why = f"the keys could not be listed completely within {self.timeout:g} s, because keys were removed during the listing"
                await retry.pause_until_deadline(RequestTimeoutError(f"{self.what}: {why}; repeat the call"))
                continue
            subjects |= page
            if offset + count >= total or len(subjects) > most:
                return [key for key in map(self.subjects().key_of, subjects) if key is not None]
            if offset + count > listed:  # not a page that was read before
                listed = offset + count
                if max(page) > last:
                    api, retry = self._patience()
            last, overlap = max(page), count // 10 + 1
            offset += count - overlap

    def _patience(self) -> tuple[Api, Retry]:
        retry = Retry(self.timeout)
        retry.start()
        return Api(self.context, self.timeout), retry

    async def _page(self, api: Api, pattern: str, offset: int) -> dict[str, Any]:
        request = {"subjects_filter": self.subject(pattern), "offset": offset}
        with self.not_found():
            return await api.stream(self.stream, request)

    @contextmanager
    def not_found(self) -> Iterator[None]:
        """Do nothing; a bucket translates the error of a stream that does not exist."""
        yield

    async def get_at_leader(self, **request: object) -> StoredMsg | None:
        with self.not_found():
            return await get_at_leader(self.context, self.stream, request, self.timeout)


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
            self.prefix: str = named[0]
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
            return key, None if message is None else entry_of_message(self.name, key, message)

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
