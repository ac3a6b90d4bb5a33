"""What the leader says of a stream, and what of it makes a read impossible."""

from __future__ import annotations

import logging
from typing import Protocol

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.api import stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ErrorCode, JetStreamExtError
from jetstream_ext.protocol.stream_state import StreamState

_log = logging.getLogger("jetstream_ext")


class PlanningError(JetStreamExtError):
    """A query that cannot work; the text says what to change."""


class DataLossError(JetStreamExtError):
    """Messages that should be read are gone (with ``failOnDataLoss``)."""


class LossPolicy(Protocol):
    """Whether a loss is a failure."""

    @property
    def fail_on_data_loss(self) -> bool:
        """Fail, or go on with a warning."""


def lose(options: LossPolicy, what: str) -> None:
    """Fail, or warn if the user said that a loss is no failure."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{what} (to read what there is, set failOnDataLoss to false)")
    _log.warning("%s; reading what there is, because failOnDataLoss is false", what)


async def look(context: JetStreamContext, stream: str) -> StreamState | None:
    """Return the state of a stream as its leader has it, or None: there is no such stream.

    Raises:
        PlanningError: There is no JetStream where the options point.
        RequestTimeoutError: No answer.
        ServerError: Another refusal.
    """
    js = Context(context)
    try:
        return await stream_state(js, stream)
    except NotFoundError as error:
        if error.err_code == ErrorCode.STREAM_NOT_FOUND:
            return None
        raise
    except ServiceUnavailableError as error:
        raise PlanningError(
            f"no server answers {js.prefix}.STREAM.INFO.{stream}: JetStream is not enabled there, or the option 'domain' "
            "or 'apiPrefix' is wrong"
        ) from error


def check_readable(state: StreamState, *, allow_unstable_retention: bool) -> None:
    """Refuse a stream that cannot be read by direct gets, or whose rows others take away.

    Raises:
        PlanningError: With what to change.
    """
    name = state.name
    if not state.config.get("allow_direct"):
        raise PlanningError(
            f"stream {name!r} has no allow_direct, which reading it without a consumer needs; turn it on "
            f"(nats stream edit {name} --allow-direct, or allow_direct=True in its configuration)"
        )
    retention = state.config.get("retention", "limits")
    if retention != "limits" and not allow_unstable_retention:
        raise PlanningError(
            f"stream {name!r} has {retention} retention: acknowledgements of its consumers delete messages, so a task "
            "that is tried again could read other rows. Read a mirror or another copy of it with limits retention, or "
            "set allowUnstableRetention to true to read what there happens to be"
        )
