"""The layout record of a transactional write: in how many partitions a micro-batch comes.

Rows are found again by partition and place. In other partitions the same rows would look new, so a micro-batch that
comes in another number of them is refused before anything of it is stored. Spark tells a task its partition, not how
many there are: that is the option ``sinkPartitions``, and at the end of each batch the driver sees whether it was true.
"""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.errors import APIError

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.context import Context
from jetstream_ext.errors import FencedError
from jetstream_ext.protocol.options import message_headers
from jetstream_ext.spark.markers import Layout, ReplayError
from jetstream_ext.spark.patience import Patience, passes
from jetstream_ext.spark.write_options import WriteOptions

_WRONG_LAST_SEQUENCE = (10071, 10164)


async def claim_layout(
    context: JetStreamContext, options: WriteOptions, writer: str, batch: int, partitions: int, *, rollup: bool
) -> None:
    """Record that micro-batch `batch` comes in `partitions` partitions, or find it recorded.

    Raises:
        FencedError: A later micro-batch has been here.
        ReplayError: It came in another number before.
        SinkError: It could not be done.
    """
    js = Context(context)
    subject = f"{options.marker_prefix}.{writer}._layout"
    what = f"stream {options.stream!r}, micro-batch {batch}"
    patience = Patience(what)
    while True:
        try:
            stored = await get_at_leader(js, options.stream, {"last_by_subj": subject}, js.timeout)
            known = Layout(-1, 0) if stored is None else Layout.decode(stored)
            if known.batch > batch:
                raise FencedError(f"{what}: micro-batch {known.batch} has been here; this attempt is out of date")
            if known.batch == batch:
                if known.partitions != partitions:
                    raise ReplayError(
                        f"{what} came in {known.partitions} partitions before, and in {partitions} now, where its rows "
                        f"cannot be told from new ones; make them {known.partitions} again (sinkPartitions, and what it "
                        "follows: df.repartition(n), or the source's minPartitions). Nothing was stored"
                    )
                return
            message = Layout(batch, partitions).message(subject, known.seq, rollup=rollup)
            await context.publish(
                subject,
                message.payload,
                timeout=js.timeout,
                stream=options.stream,
                headers=dict(message_headers(message)),
            )
            return
        except (FencedError, ReplayError):
            raise
        except APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                continue  # another task was first
            if not passes(error):
                raise
            await patience.after(error)
        except Exception as error:
            if not passes(error):
                raise
            await patience.after(error)


async def correct_layout(
    context: JetStreamContext, options: WriteOptions, writer: str, batch: int, partitions: int, *, rollup: bool
) -> None:
    """Record how many partitions there really were.

    Raises:
        FencedError, APIError, TimeoutError: It could not be done; the record stays as it was.
    """
    js = Context(context)
    subject = f"{options.marker_prefix}.{writer}._layout"
    stored = await get_at_leader(js, options.stream, {"last_by_subj": subject}, js.timeout)
    known = Layout(-1, 0) if stored is None else Layout.decode(stored)
    if known.batch > batch:
        raise FencedError(f"micro-batch {known.batch} has been here; this attempt is out of date")
    message = Layout(batch, partitions).message(subject, known.seq, rollup=rollup)
    await context.publish(
        subject, message.payload, timeout=js.timeout, stream=options.stream, headers=dict(message_headers(message))
    )
