"""A stream as a table: the newest message of each key, where a key is a subject without a prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from nats.js import JetStreamContext

from jetstream_ext.client.api import (
    Api,
    check_same_stream,
    get_at_leader,
    malformed_as_error,
    stream_state,
)
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import RequestTimeoutError, StreamConfigMismatchError
from jetstream_ext.kv.entries import EVERYTHING, Subjects
from jetstream_ext.protocol.api import StreamState, parse_stream_state
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import json_number
from jetstream_ext.protocol.options import reads_subject
from jetstream_ext.protocol.subjects import anything, covers, is_literal
from jetstream_ext.ttl import marker_reason


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

    def replace_prefix(self, prefix: str) -> None:
        self.prefix = prefix

    def subject(self, key: str) -> str:
        return self.prefix + key

    def key(self, subject: str) -> str:
        return subject.removeprefix(self.prefix)

    def subjects(self, wanted: Callable[[str], bool] = anything) -> Subjects:
        return Subjects(self.stream, self.prefix, wanted, lambda headers: marker_reason(headers) is not None)

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
