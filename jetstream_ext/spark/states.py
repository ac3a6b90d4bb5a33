"""What the leader says of a stream, and what of it makes a read impossible."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final, Protocol

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.api import Api
from jetstream_ext.client.connection import JetStream
from jetstream_ext.errors import JetStreamExtError, ResponseError

_log = logging.getLogger("jetstream_ext")

STREAM_NOT_FOUND: Final = 10059


class PlanningError(JetStreamExtError):
    """A query that cannot work; the text says what to change."""


class DataLossError(JetStreamExtError):
    """Messages that should be read are gone (with ``failOnDataLoss``)."""


class LossPolicy(Protocol):
    """Whether a loss is a failure."""

    @property
    def fail_on_data_loss(self) -> bool:
        """Fail, or go on with a warning."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the leader says about a stream.

    Attributes:
        name: Its name.
        first: The first sequence it holds; one more than `last` when it is empty.
        last: The last sequence it ever stored.
        messages: How many it holds.
        size: Their bytes.
        created: When it was created, in the server's words.
        config: Its configuration, in the server's words.
    """

    name: str
    first: int
    last: int
    messages: int
    size: int
    created: str
    config: dict[str, Any]

    @property
    def gapless(self) -> bool:
        """Whether it holds every sequence from its first to its last."""
        return self.messages == self.last - self.first + 1


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
    js = JetStream(context)
    try:
        info = await Api(js, js.timeout).ask(f"STREAM.INFO.{stream}")
    except NotFoundError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        raise
    except ServiceUnavailableError as error:
        raise PlanningError(
            f"nobody answers {js.prefix}.STREAM.INFO.{stream}: JetStream is not enabled there, or the option 'domain' "
            "or 'apiPrefix' is wrong"
        ) from error
    try:
        state = info["state"]
        messages, last = int(state["messages"]), int(state["last_seq"])
        return StreamState(
            name=stream,
            first=int(state["first_seq"]) if messages else last + 1,
            last=last,
            messages=messages,
            size=int(state["bytes"]),
            created=str(info["created"]),
            config=dict(info["config"]),
        )
    except (KeyError, TypeError, ValueError):
        raise ResponseError(f"the answer on STREAM.INFO.{stream} lacks its state") from None


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
