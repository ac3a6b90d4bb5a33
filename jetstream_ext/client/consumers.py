"""Consumer reset (ADR-60)."""

from __future__ import annotations

from datetime import datetime

from nats.js import JetStreamContext
from nats.js.api import ConsumerReset

from jetstream_ext.client.api import Api, get_at_leader, reading, stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.options import rfc3339
from jetstream_ext.protocol.stream_state import answering_server
from jetstream_ext.protocol.subjects import check_name


async def reset_consumer(
    js: JetStreamContext,
    stream: str,
    consumer: str,
    *,
    seq: int | None = None,
    time: datetime | None = None,
    timeout: float | None = None,
) -> ConsumerReset:
    """Start a consumer again, from its ack floor, a sequence or a time.

    ADR-60, Consumer delivery state reset API. What was delivered and not acknowledged is delivered again, with delivery
    counts from 1; without `seq` and `time` also what was acknowledged out of order above the floor. Subscribers go on
    where the consumer now stands, and need not be told. An acknowledgement of a delivery from before the reset is
    ignored, unless the message was delivered again meanwhile. On a work queue, messages that a reset skips stay in the
    stream; on an interest stream they are removed.

    As nats-py's ``js.reset_consumer``, but a server never answers a reset of what it does not have, or does not know:
    here the consumer is asked for first, once, so that both fail at once instead of by timeout.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        stream: The stream's name.
        consumer: The consumer's name, durable or not, pull or push.
        seq: The next message to deliver is the first with this sequence or a later one; from 1. A sequence beyond the
            end is accepted: the consumer then waits for it.
        time: The next message to deliver is the first that was stored at or after this aware datetime, as the
            stream's leader has it now; where there is none yet, the next one to be stored. Instead of `seq`.
        timeout: Seconds for all of it; None is the context's timeout.

    Returns:
        nats-py's ``ConsumerReset``: ``reset_seq``, the first sequence that may be delivered next, and the consumer's
        new ``info``.

    Raises:
        ValueError: `seq` is not from 1 to 2**64-1, `time` is naive, or both are given.
        nats.js.errors.NotFoundError: there is no such stream or consumer.
        UnsupportedFeatureError: The consumer's server is older than 2.14.
        ConsumerInvalidResetError: 10204: with `seq` or `time` the deliver policy must be ``all``,
            ``by_start_sequence`` or ``by_start_time``, and the new start not before its own.
        RequestTimeoutError: No answer in time, as while a leader is elected. The reset may have happened.
        nats.js.errors.ServiceUnavailableError: there is no JetStream.
        ServerError: Any other refusal.
        ResponseError: An answer that makes no sense.

    Cancellation: The reset may have happened; nothing is left behind.

    Requires: nats-server 2.14 (API level 4).
    """
    check_name(stream, "stream name")
    check_name(consumer, "consumer name")
    if seq is not None and (isinstance(seq, bool) or not isinstance(seq, int) or not 1 <= seq < 1 << 64):
        raise ValueError(f"seq must be a stream sequence from 1 up, not {seq!r} (None starts at the ack floor)")
    if time is not None:
        if seq is not None:
            raise ValueError("give seq or time, not both")
        rfc3339(time, "time")
    context = Context(js)
    api = Api(context, timeout)
    info = await api.ask(f"CONSUMER.INFO.{stream}.{consumer}")
    with reading(f"consumer {consumer!r}"):
        version, level = answering_server(info.get("config") or {})
    if not feature_table.CONSUMER_RESET.at(level):
        raise feature_table.CONSUMER_RESET.unsupported(
            server_version=version or context.connection.server_version, api_level=level, detail="nothing was changed"
        )
    if time is not None:
        seq = await _first_at(api, stream, time)
    answer = await api.ask(f"CONSUMER.RESET.{stream}.{consumer}", None if seq is None else {"seq": seq})
    with reading(f"the reset of consumer {consumer!r}, which has happened,"):
        return ConsumerReset.from_response(answer)


async def _first_at(api: Api, stream: str, when: datetime) -> int:
    """Return the first sequence stored at or after `when`, or the one that comes next."""
    # The end first: a message that is stored between the two questions must not be skipped.
    end = (await stream_state(api.context, stream, api.remaining)).last_seq + 1
    found = await get_at_leader(api.context, stream, {"start_time": rfc3339(when, "time")}, api.remaining)
    return end if found is None else found.seq
