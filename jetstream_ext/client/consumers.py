"""Consumer reset (ADR-60)."""

from __future__ import annotations

from datetime import datetime

from nats.js import JetStreamContext
from nats.js.api import ConsumerReset

from jetstream_ext.client.api import Api, get_at_leader, reading, stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.options import check_sequence, rfc3339
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
    """Restart a consumer from its ack floor, a sequence or a time.

    ADR-60, Consumer delivery state reset API. Messages that were delivered and not acknowledged are delivered again,
    with delivery counts from 1. Without `seq` and `time`, this includes messages above the ack floor that were
    acknowledged out of order. Subscribers continue at the new position without any action. An acknowledgement of a
    delivery before the reset is ignored, unless the message has been delivered again since. On a work queue, the
    messages that a reset skips stay in the stream; on an interest stream they are removed.

    Servers never answer a reset of an unknown consumer, nor do servers without this feature. nats-py's
    ``js.reset_consumer`` then times out; this call first asks for the consumer, and fails at once.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        stream: The stream's name.
        consumer: The consumer's name; it may be durable or ephemeral, pull or push.
        seq: Deliver next the first message with this sequence (from 1) or a later one. If the stream does not have
            it yet, the consumer waits for it.
        time: Deliver next the first message that was stored at or after this aware datetime, or else the next one to
            be stored. Excludes `seq`.
        timeout: Seconds for the whole call; None is the context's timeout.

    Returns:
        nats-py's ``ConsumerReset``: ``reset_seq``, the first sequence that may be delivered next, and the consumer's
        new ``info``.

    Raises:
        ValueError: `seq` is not from 1 to 2**64-1, `time` is naive, or both are given.
        nats.js.errors.NotFoundError: There is no such stream or consumer.
        UnsupportedFeatureError: The consumer's server is older than 2.14.
        ConsumerInvalidResetError: 10204: with `seq` or `time`, the deliver policy must be ``all``,
            ``by_start_sequence`` or ``by_start_time``, and the new start must not be before the policy's own.
        RequestTimeoutError: No answer in time, for instance during an election. The reset may have happened.
        nats.js.errors.ServiceUnavailableError: There is no JetStream.
        ServerError: Any other refusal.
        ResponseError: The answer is malformed.

    Cancellation: The reset may have happened; nothing is left behind.

    Requires: nats-server 2.14 (API level 4).
    """
    check_name(stream, "stream name")
    check_name(consumer, "consumer name")
    if seq is not None:
        check_sequence(seq, "seq")
    if time is not None:
        if seq is not None:
            raise ValueError("seq and time exclude each other")
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
    """Return the first sequence stored at or after `when`, or the next one to be stored."""
    # The end first: a message that is stored between the two requests must not be skipped.
    end = (await stream_state(api.context, stream, api.remaining)).last_seq + 1
    found = await get_at_leader(api.context, stream, {"start_time": rfc3339(when, "time")}, api.remaining)
    return end if found is None else found.seq
