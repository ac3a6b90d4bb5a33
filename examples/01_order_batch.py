"""Store an order with all its lines, or nothing: ``python examples/01_order_batch.py nats://localhost:4222``."""

import asyncio
import json
import secrets
import sys

import nats

import jetstream_ext as jsx

LINES = [("book", 2), ("lamp", 1), ("pen", 12)]


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="ORDERS", subjects=["orders.>"], allow_atomic=True, allow_direct=True)

        # The order must be new: its subject must have no message yet.
        order = f"orders.{secrets.token_hex(4)}"
        async with jsx.AtomicBatch(js) as batch:
            await batch.add(order, b'{"customer": "ann"}', expected_last_subject_seq=0)
            for number, (item, count) in enumerate(LINES):
                await batch.add(f"{order}.{number}", json.dumps({"item": item, "count": count}).encode())
        print(f"stored {batch.ack.batch_size} messages at once, the last at sequence {batch.ack.seq}")

        # The server refuses a second batch for the same order as a whole.
        try:
            async with jsx.AtomicBatch(js) as batch:
                await batch.add(f"{order}.9", b"{}")
                await batch.add(order, b"{}", expected_last_subject_seq=0)
        except jsx.errors.WrongLastSequenceError as error:
            print(f"refused, {error.outcome}: {error}")

        info = await js.stream_info("ORDERS")
        print(f"the stream has {info.state.messages} messages")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
