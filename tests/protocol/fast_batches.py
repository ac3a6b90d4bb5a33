"""Fast batches for the tests of this folder: how to open one, and what a server answers."""

from typing import Any

import orjson

from jetstream_ext.protocol import frames
from jetstream_ext.protocol.fast import FastBatch
from jetstream_ext.protocol.frames import Command, Frame
from jetstream_ext.types import BatchMessage, GapMode

OK, FAIL = GapMode.OK, GapMode.FAIL


def batch(gap: GapMode = FAIL, *, max_payload: int = 1 << 20, **options: Any) -> FastBatch:
    """Return a batch that has sent nothing."""
    machine = FastBatch(batch_id="b1", flow=10, gap=gap, **options)
    machine.wire.max_payload = max_payload
    machine.open("_INBOX.x")
    return machine


def opened(sent: int = 5, gap: GapMode = FAIL, **options: Any) -> FastBatch:
    """Return a batch that has sent this many messages at 0 s and had its first reply."""
    machine = batch(gap, **options)
    machine.add(message(), 0.0)
    machine.receive([ack(0, op=0)], 0.0)
    for _ in range(sent - 1):
        machine.add(message(), 0.0)
    return machine


def message(subject: str = "f.1", payload: bytes = b"x", **options: Any) -> BatchMessage:
    return BatchMessage(subject, payload, **options)


def commands(data: bytes) -> list[Command]:
    return list(frames.parse_pubs(data))


def reply(body: dict[str, Any] | bytes, seq: int = 1, op: int = 1, header: bytes = b"") -> Frame:
    """An answer to the message `seq`, sent with `op`."""
    payload = body if isinstance(body, bytes) else orjson.dumps(body)
    return b"_INBOX.x.b1.10.fail.%d.%d.$FI" % (seq, op), header + payload, len(header)


def ack(up_to: int, msgs: int = 10, *, seq: int | None = None, op: int = 1) -> Frame:
    return reply({"type": "ack", "seq": up_to, "msgs": msgs}, seq or max(1, up_to), op)


def gap(first: int, seq: int, *, at: int | None = None, op: int = 1) -> Frame:
    return reply({"type": "gap", "last_seq": first, "seq": seq}, at or seq, op)


def err(seq: int, err_code: int = 10071) -> Frame:
    return reply({"type": "err", "seq": seq, "error": {"code": 400, "err_code": err_code, "description": "no"}}, seq)


def refusal(err_code: int, seq: int = 2, op: int = 1, code: int = 400) -> Frame:
    body = {"error": {"code": code, "err_code": err_code, "description": "no"}, "stream": "F", "seq": 0}
    header = b"NATS/1.0 429 Too Many Requests\r\n\r\n" if code == 429 else b""
    return reply(body, seq, op, header)


def no_responders(seq: int = 2, op: int = 1) -> Frame:
    return reply(b"", seq, op, b"NATS/1.0 503\r\nNats-Subject: f.1\r\n\r\n")


def final(count: int, batch_id: str = "b1", *, seq: int | None = None, op: int = 3) -> Frame:
    body = {"stream": "F", "seq": 100 + count, "batch": batch_id, "count": count}
    return reply(body, seq or max(1, count), op)
