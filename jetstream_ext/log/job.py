"""What one worker does, and where it stores that: the options of `exactly_once`, and checks of the streams.

A worker stores messages on subjects of its own: its position, its state, dead letters, its lease. The streams that it stores
them in must keep them, and its reader must not return them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from jetstream_ext.client.api import lookup_stream, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import BatchServerError, ErrorCode, MessageTooLargeError, Status, StreamConfigMismatchError
from jetstream_ext.log.dead_letter import DeadLetter, check_dead_letter
from jetstream_ext.log.offsets import OffsetStore, PositionedReader, StoredOffset, matches
from jetstream_ext.protocol.advice import enable_stream
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import ATOMIC, FENCED_BATCHES
from jetstream_ext.protocol.options import check_function, check_int, check_seconds, shown
from jetstream_ext.protocol.subjects import check_name, check_subject, check_type, overlap
from jetstream_ext.types import NEVER, TTL

# What a server refuses because of the stream or the account, whatever the message is.
_OF_THE_STREAM: Final = frozenset({
    ErrorCode.ACCOUNT_RESOURCES_EXCEEDED, ErrorCode.MEMORY_EXCEEDED, ErrorCode.NOT_ENABLED, ErrorCode.STORAGE_EXCEEDED,
    ErrorCode.NOT_ENABLED_FOR_ACCOUNT, ErrorCode.STORE_FAILED, ErrorCode.STREAM_NOT_FOUND, ErrorCode.STREAM_SEALED,
    ErrorCode.ATOMIC_DISABLED, ErrorCode.ATOMIC_MIRROR,
})  # fmt: skip
_MOST_KNOWN: Final = 10_000  # subjects


class Source(PositionedReader, Protocol):
    """What a worker reads from: a `LogReader`, or one partition's part of one.

    `read_for` returns None at the end, behind which nothing comes: the worker then stores its position and returns.
    """

    confirm: bool
    offsets: OffsetStore

    def seek(self, start: StoredOffset | int) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """What the worker `name` does, and its output stream as the leader has described it last.

    Attributes:
        keeps_state: What the subjects of its state begin with; None: it has none.
        record: The subject of its position.
        state_prefix: What the subject of a key of its state has before the key.
        what: The worker in errors and log records.
        where: The same with its output stream.
        state: The output stream, once `check` has looked.
        looked: When, by the loop's clock.
        unsure: For how long it has waited for the answer: so late can `now` be.
        known: Literal subjects that the output stream stores.

    Raises:
        BadSubjectError, ValueError, TypeError: An option is out of range, or of another type.
    """

    context: Context
    output_stream: str
    handler: Callable[..., Any]
    name: str
    prefix: str
    max_messages: int
    grouped: bool
    dead_letter: DeadLetter | None
    position_may_vanish: bool
    keeps_state: str | None
    timeout: float | None
    patience: float
    record: str = field(init=False)
    state_prefix: str = field(init=False)
    what: str = field(init=False)
    where: str = field(init=False)
    state: StreamState = field(init=False)
    known: set[str] = field(default_factory=set, init=False)
    looked: float = field(init=False)
    unsure: float = field(init=False)
    _ahead: float = field(init=False)  # of the loop's clock: the leader's

    def __post_init__(self) -> None:
        check_name(self.output_stream, "stream name")
        check_function(self.handler, "handler")
        check_dead_letter(self.dead_letter)
        check_int(self.max_messages, "max_messages")
        check_seconds(self.patience, "patience")
        self.context.resolve_timeout(self.timeout)
        check_type(self.prefix, "prefix")
        check_type(self.name, "name")
        self.record, self.what = f"{self.prefix}.{self.name}", f"worker {self.name!r}"
        self.where = f"{self.what} on stream {self.output_stream!r}"
        check_subject(self.record)
        letters = None if self.dead_letter is None else self.dead_letter.subject
        if letters == self.record:
            raise ValueError(
                f"subject {self.record!r} is that of the worker's position; use another one for dead letters"
            )
        arguments = ("an input",) if self.keeps_state is None else ("an input", "the state")
        with contextlib.suppress(ValueError):  # of C code without a signature
            try:
                inspect.signature(self.handler).bind(*arguments)
            except TypeError:
                given = " and ".join(arguments)
                raise TypeError(
                    f"the handler is called with {given}, and {shown(self.handler)} does not take that"
                ) from None
        if self.keeps_state is None:
            return
        check_type(self.keeps_state, "state")
        check_subject(self.keeps_state)
        self.state_prefix = f"{self.keeps_state}.{self.name}."
        if self.position_may_vanish:
            raise ValueError("a worker with a state needs its position: leave out position_may_vanish")
        for subject, what in ((self.record, "the worker's position"), (letters or "", "dead letters")):
            if self.in_state(subject):
                raise ValueError(
                    f"{what} ({subject!r}) would be among those of state={self.keeps_state!r}; use another state="
                )

    async def look(self) -> StreamState:
        """Ask the leader for the state of the output stream."""
        look = partial(stream_state, self.context, self.output_stream, self.timeout)
        clock, began = asyncio.get_running_loop().time, 0.0

        async def attempt() -> StreamState:
            nonlocal began
            began = clock()
            return await look()

        self.state = await Retry(self.patience).call(attempt)
        self.looked = clock()
        self.unsure = self.looked - began
        self._ahead = self.state.now.timestamp() - self.looked
        return self.state

    def now(self) -> float:
        """Return the time by the clock of the output stream's leader, in seconds since 1970."""
        return self._ahead + asyncio.get_running_loop().time()

    def in_state(self, subject: str) -> bool:
        """Whether a subject is one of the worker's state, or of that of another worker or partition."""
        return self.keeps_state is not None and subject.startswith(f"{self.keeps_state}.")

    async def check(self) -> None:
        """Raise an error unless the output stream can hold outputs, the position and the dead letters."""
        state = await self.look()
        version = state.server_version or self.context.connection.server_version
        ATOMIC.check(state.api_level, version, "nothing was stored")
        FENCED_BATCHES.check(version, "nothing was stored")
        state.check_sequences()
        letter, may_vanish = self.dead_letter, self.position_may_vanish
        what, kept = "outputs and the position of a worker", () if may_vanish else ("kept",)
        check_keeps(state, self.record, what, "stored", "atomic", *kept)
        if letter is not None:
            what, kept = f"dead letters on {letter.subject!r}", () if may_vanish else ("letters",)
            check_keeps(state, letter.subject, what, "stored", *kept)
        if self.keeps_state is not None:
            state.check_direct_reads(version)
            check_keeps(state, f"{self.state_prefix}>", "the state of a worker", "stored", "kept")

    @property
    def rolls_up(self) -> bool:
        """Whether each message that holds the position or a key of the state removes the one before."""
        return bool(self.state.config.get("allow_rollup_hdrs")) and not self.state.config.get("deny_purge")

    @property
    def keeps_one(self) -> bool:
        """Whether the stream keeps only the newest message of a key of the state."""
        return self.rolls_up or self.state.config.get("max_msgs_per_subject") == 1

    @property
    def forever(self) -> TTL | None:
        """The time to live of a message that the output stream's ``max_age`` must not remove."""
        return NEVER if self.state.max_age and self.state.config.get("allow_msg_ttl") else None

    async def stores(self, subject: str) -> bool:
        """Return whether the output stream stores messages on a literal subject."""
        if subject not in self.known:
            if not self.state.stores(subject) and not (await self.look()).stores(subject):
                return False
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known.add(subject)
        return True

    def refuses_outputs(self, error: Exception) -> bool:
        """Return whether a commit failed because of its outputs, whatever the state of the stream is."""
        if isinstance(error, MessageTooLargeError) and error.subject == self.record:
            return False
        if isinstance(error, BatchServerError):
            if error.outcome != "not_stored" or is_transient(error) or error.err_code in _OF_THE_STREAM:
                return False
            return (error.code or 0) < Status.INTERNAL_ERROR or error.err_code == ErrorCode.ROLLUP_REFUSED
        return isinstance(error, TypeError | ValueError)  # raised before anything was sent


def check_keeps(state: StreamState, subject: str, what: str, *needs: str) -> None:
    """Raise an error unless a stream can hold `what` on `subject`, which may be a filter, as far as it `needs`.

    ``stored``: it stores the subject. ``atomic``: it takes atomic batches. ``kept``: its limits do not remove the newest message.
    ``letters``: nor does one replace another, or the absence of a consumer remove it.
    """
    config, oldest = state.config, str(state.config.get("discard") or "old") == "old"
    transform = config.get("subject_transform") or {}
    moved = bool(transform) and overlap(str(transform.get("src") or ">"), subject)
    most, size, each = ((config.get(name) or -1) for name in ("max_msgs", "max_bytes", "max_msgs_per_subject"))
    expires, retention = state.max_age and not config.get("allow_msg_ttl"), state.retention
    own, wide = state.subjects, (*state.subjects, subject)
    replaced = "remove max_msgs_per_subject, by which one replaces another"
    unkept = "use limits or workqueue retention, not interest"
    # What needs it, the option, whether it is wrong, the wanted and the actual value, and what to do.
    rules: list[tuple[str, str, object, object, object, str]] = [
        ("stored", "subjects", not state.stores(subject), wide, own, f"add {subject!r} to its subjects"),
        ("stored", "subject_transform", moved, None, transform, f"exclude {subject!r} from its subject_transform"),
        ("atomic", "allow_atomic", not config.get("allow_atomic"), True, False, enable_stream(state.name, "atomic")),
        ("kept", "retention", retention != "limits", "limits", retention, "use limits retention"),
        ("kept", "max_age", expires, 0, config.get("max_age"), "set allow_msg_ttl, or remove max_age"),
        ("kept", "max_msgs", oldest and most > 0, -1, most, "set discard='new', or remove max_msgs"),
        ("kept", "max_bytes", oldest and size > 0, -1, size, "set discard='new', or remove max_bytes"),
        ("letters", "max_msgs_per_subject", each > 0, -1, each, replaced),
        ("letters", "retention", retention == "interest", "limits", retention, unkept),
    ]  # fmt: skip
    wrong = [rule for rule in rules if rule[0] in needs and rule[2]]
    if wrong:
        advice = "; ".join(rule[-1] for rule in wrong)
        diff = {name: (wanted, actual) for _, name, _, wanted, actual, _ in wrong}
        raise StreamConfigMismatchError(f"stream {state.name!r} cannot hold {what}: {advice}", diff=diff)


async def check_unread(
    reader: Source,
    what: str,
    kind: str,
    stream: str,
    subject: str,
    *,
    where: str = "the output stream",
    timeout: float | None,
    patience: float,
) -> None:
    """Raise ValueError if a reader would return the messages of a `kind` that `what` stores in a stream on a subject or filter."""
    context, how, copies = Context(reader.context), f"copies {where} {stream!r}", [subject]
    if reader.stream == stream:
        how = f"is {where}"
    elif reader.confirm:
        look = partial(stream_state, context, reader.stream, timeout)
        copies = (await Retry(patience).call(look)).copies_of(stream, subject)
    else:  # its leader may be away, or not to be asked
        known = await lookup_stream(context, subject, reader.stream, context.resolve_timeout(timeout))
        copies = [] if known is None else known[0].copies_of(stream, subject)
    for copy in copies:
        if matches(reader, copy):
            raise ValueError(
                f"{what}: the stream {reader.stream!r} that it reads {how}, so it would read each {kind} of its own (on {copy!r}) as "
                "an input, without end; nothing was stored; read with a filter (subject=) that does not match this subject"
            )
