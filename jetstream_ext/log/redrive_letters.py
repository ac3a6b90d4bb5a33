"""The stream that the dead letters are in, as its leader has it."""

from __future__ import annotations

from jetstream_ext.client.api import SETTLE, Api, get_at_leader, settled_state, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import RequestTimeoutError, ServerError, StreamConfigMismatchError
from jetstream_ext.log.redrive_note import Key, key_of
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg


class LetterStream:
    """Finds and deletes dead letters; each call retries after transient errors for `patience` seconds."""

    def __init__(self, context: Context, name: str, timeout: float, patience: float) -> None:
        self._context = context
        self._name = name
        self._timeout = timeout
        self._patience = patience
        self._settle = SETTLE

    async def check(self) -> StreamState:
        """Return the stream's state; raise an error if its letters cannot be read or deleted."""
        state = await Retry(self._patience).call(self._state)
        state.check_direct_reads(self._context.connection.server_version)
        if state.config.get("deny_delete"):
            raise StreamConfigMismatchError(
                f"stream {self._name!r} has deny_delete, so its dead letters cannot be deleted; nothing was sent or deleted",
                diff={"deny_delete": (False, True)},
            )
        if state.origin:
            raise StreamConfigMismatchError(
                f"stream {self._name!r} is a mirror, and deleting its copies leaves the dead letters in stream "
                f"{state.origin.get('name')!r}; name that one; nothing was sent or deleted",
                diff={"mirror": (None, state.origin.get("name"))},
            )
        return state

    async def get(self, seq: int) -> StoredMsg | None:
        return await Retry(self._patience).call(lambda: self._get(seq))

    async def find(self, key: Key) -> StoredMsg | None:
        """Return a letter, or None if it was deleted, or if another message has its sequence in a stream created again."""

        async def attempt() -> StoredMsg | None:
            seq = key[0]
            message = await self._get(seq)
            if message is None:
                # A new leader may still have to apply the letter, and a former one may not know of it.
                state = await settled_state(self._state, seq, self._settle)
                if state.last_seq < seq:
                    self._settle = 0.0  # the stream has lost its last messages, or was created again
                if not state.leader_is_certain:
                    raise RequestTimeoutError(
                        f"stream {self._name!r}: its leader has not heard from the other servers lately, so it is not known whether "
                        f"dead letter {seq} is stored"
                    )
                message = await self._get(seq)
            return message if message is not None and key_of(message) == key else None

        return await Retry(self._patience).call(attempt)

    async def delete(self, key: Key) -> None:
        """Delete a dead letter; another message that has its sequence now, in a stream that was created again, stays."""

        async def attempt() -> None:
            if await self.find(key) is None:
                return
            try:
                body = {"seq": key[0], "no_erase": True}
                await Api(self._context, self._timeout).ask(f"STREAM.MSG.DELETE.{self._name}", body, repeat=True)
            except ServerError:
                if await self.find(key) is not None:  # else an earlier request has deleted it
                    raise

        await Retry(self._patience).call(attempt)

    async def _get(self, seq: int) -> StoredMsg | None:
        return await get_at_leader(self._context, self._name, {"seq": seq}, self._timeout)

    async def _state(self) -> StreamState:
        return await stream_state(self._context, self._name, self._timeout)
