"""What the driver checks of the stream that is written to, before any task runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from nats.js import JetStreamContext

from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.protocol.subjects import covers
from jetstream_ext.spark.states import PlanningError, look
from jetstream_ext.spark.write_options import Semantics, WriteOptions

_log = logging.getLogger("jetstream_ext")

_SHORT_WINDOW: Final = 120.0


@dataclass(frozen=True, slots=True)
class SinkFacts:
    """What tasks need to know of the stream.

    Attributes:
        subjects: Its subjects.
        rollup: Whether a new marker may take away the one before.
    """

    subjects: tuple[str, ...]
    rollup: bool


async def check_sink(context: JetStreamContext, options: WriteOptions) -> SinkFacts:
    """Return what tasks need to know of the stream.

    Raises:
        PlanningError: It cannot be written to this way; the text says what to change.
        TimeoutError: No answer.
    """
    name = options.stream
    state = await look(context, name)
    if state is None:
        raise PlanningError(
            f"stream {name!r} does not exist; create it, or check 'stream', 'servers', 'domain' and 'apiPrefix'"
        )
    config = state.config
    if config.get("mirror") or config.get("sealed"):
        what = "a mirror" if config.get("mirror") else "sealed"
        raise PlanningError(f"stream {name!r} is {what}: nothing can be published to it")
    subjects = tuple(config.get("subjects") or ())
    if options.semantics is Semantics.TRANSACTIONAL:
        _check_transactional(options, state, subjects)
    else:
        _check_fast(options, state)
    if options.subject is not None and not any(covers(one, options.subject) for one in subjects):
        raise PlanningError(
            f"option 'subject': {options.subject!r} is not among the subjects of stream {name!r} ({', '.join(subjects)})"
        )
    return SinkFacts(subjects, bool(config.get("allow_rollup_hdrs")))


def _check_fast(options: WriteOptions, state: StreamState) -> None:
    name, config = state.name, state.config
    if not config.get("allow_batched"):
        raise PlanningError(
            f"stream {name!r} has no allow_batched, which semantics={options.semantics.value} needs; turn it on "
            f"(nats stream edit {name} --allow-batch-publish, or allow_batched=True in its configuration; it needs "
            "nats-server 2.14), or use semantics=transactional with allow_atomic"
        )
    if config.get("persist_mode") == "async":
        # Such a stream acknowledges what it has not written yet.
        what = f"stream {name!r} has persist_mode=async, so a server that is killed loses rows it acknowledged"
        if options.semantics is Semantics.DEDUPE:
            raise PlanningError(f"{what}; make it without that, or use semantics=none if some rows may be lost")
        _log.warning("%s", what)
    if options.semantics is Semantics.DEDUPE:
        window = int(config.get("duplicate_window") or 0) / 1e9
        if not window:
            raise PlanningError(
                f"stream {name!r} has no duplicate window, without which semantics=dedupe repeats rows; give it one, "
                "or use semantics=transactional"
            )
        if window < _SHORT_WINDOW:
            _log.warning(
                "stream %r: its duplicate window is %g s; rows of a batch that is tried again later than that are "
                "stored twice",
                name,
                window,
            )


def _check_transactional(options: WriteOptions, state: StreamState, subjects: tuple[str, ...]) -> None:
    name, config = state.name, state.config
    if not config.get("allow_atomic"):
        raise PlanningError(
            f"stream {name!r} has no allow_atomic, which semantics=transactional needs; turn it on "
            f"(nats stream edit {name} --allow-atomic-publish, or allow_atomic=True in its configuration; it needs "
            "nats-server 2.12)"
        )
    if config.get("subject_transform"):
        raise PlanningError(f"stream {name!r} renames subjects, so that markers could not be found again")
    markers = f"{options.marker_prefix}.>"
    if not any(covers(one, markers) for one in subjects):
        raise PlanningError(
            f"stream {name!r} does not store {markers!r}, where semantics=transactional keeps its markers: add that to "
            f"the stream's subjects ({', '.join(subjects)}), or set markerPrefix to a subject below them that rows do "
            "not use"
        )
