"""Fuzz the decoder of direct-get replies: no input raises other than documented errors.

    python tests/fuzz/direct_get.py -max_total_time=300

Needs atheris; arguments are libFuzzer's. `python -m nox -s full -- fuzz` runs it.
"""

import sys

import atheris

with atheris.instrument_imports(include=["jetstream_ext"]):
    from jetstream_ext.errors import JetStreamExtError
    from jetstream_ext.protocol.direct import StoredMsg, decode_single
    from jetstream_ext.protocol.range_read import (
        AskLeader,
        AwaitConnection,
        Deliver,
        Done,
        RangeRead,
        SendRequest,
        Wait,
    )
    from jetstream_ext.protocol.reads import MultiLast, OneReply, Request, Scan

NAMES = ["Stream", "Subject", "Sequence", "Time-Stamp", "Num-Pending", "Last-Sequence", "UpTo-Sequence", "Other"]
STATUSES = [b"", b" 204 EOB", b" 404 Message Not Found", b" 408 Bad Request", b" 413 x", b" 500", b" 503", b" x"]


def header_block(data: atheris.FuzzedDataProvider, last: int) -> bytes:
    """A header block that mostly looks like those of servers."""
    if data.ConsumeIntInRange(0, 9) == 0:
        return data.ConsumeBytes(200)
    block = b"NATS/1.0" + (data.PickValueInList(STATUSES) if data.ConsumeBool() else b"") + b"\r\n"
    for _ in range(data.ConsumeIntInRange(0, 3)):
        block += data.ConsumeBytes(20) + (b"\r\n" if data.ConsumeBool() else b"")
    if data.ConsumeIntInRange(0, 3):
        values = [
            b"S",
            b"a.b",
            b"%d" % (last + data.ConsumeIntInRange(0, 3)),
            b"2026-11-20T21:23:31.2Z",
            b"7",
            b"%d" % last,
        ]
    else:
        values = [data.ConsumeBytes(12) for _ in range(data.ConsumeIntInRange(0, 8))]
    names = list(NAMES)
    if data.ConsumeIntInRange(0, 9) == 0:
        names[data.ConsumeIntInRange(0, 5)] = "Other"
    if values and data.ConsumeIntInRange(0, 9) == 0:
        values[data.ConsumeIntInRange(0, len(values) - 1)] = b"9" * data.PickValueInList([19, 20, 5000])
    for name, value in zip(names, values, strict=False):
        block += b"Nats-%b: %b\r\n" % (name.encode(), value)
    return block + b"\r\n"


def look_at(messages: object) -> int:
    """Access every field that is decoded lazily; return the last sequence."""
    last = 0
    for message in messages:  # type: ignore[attr-defined]
        last = message.seq
        try:
            assert isinstance(message.data, bytes)
            assert isinstance(message.headers, dict)
            hash(message)
            repr(message)
            assert (message.subject, message.time, message.time_ns, message.num_pending, message.last_seq) is not None
        except JetStreamExtError:
            pass
    return last


def one_input(raw: bytes) -> None:
    data = atheris.FuzzedDataProvider(raw)
    up_to = data.ConsumeIntInRange(1, 50) if data.ConsumeBool() else None
    up_to_ns = data.PickValueInList([None, 0, 1_795_209_811_200_000_000])  # of `header_block`
    lasts = Request(multi_last=("a",), up_to_seq=9 if data.ConsumeBool() else None)
    plans = [
        Scan(max_bytes=1000, up_to_seq=up_to, up_to_ns=up_to_ns),
        OneReply(Request(batch=5, seq=1, max_bytes=1000), up_to_ns=up_to_ns),
        MultiLast(lasts, need=up_to, paged=data.ConsumeBool()),
    ]
    plan = plans[data.ConsumeIntInRange(0, 2)]
    if up_to is not None and not isinstance(plan, MultiLast):
        plan.prove(up_to)
    machine = RangeRead("S", plan, 5.0, pause=0.05, allowed=data.ConsumeBool())
    now, last = 0.0, 0
    try:
        for _ in range(200):
            match machine.next_action(now):
                case SendRequest():
                    last = 0
                case Deliver(block):
                    last = look_at(block.messages())
                case AskLeader():
                    seq = data.ConsumeIntInRange(0, 60)
                    found = StoredMsg(stream="S", subject="a.b", seq=seq) if seq else None
                    machine.leader_answered(found, data.ConsumeIntInRange(seq, 60), now)
                case AwaitConnection():
                    machine.connected()
                case Done(None):
                    break
                case Done(error):
                    raise error
                case Wait(until):
                    if data.remaining_bytes() and data.ConsumeIntInRange(0, 9):
                        frames = []
                        for _ in range(data.ConsumeIntInRange(1, 4)):
                            header = header_block(data, last)
                            frames.append((b"_INBOX.x", header + data.ConsumeBytes(5), len(header)))
                        if plan.in_flight:
                            machine.receive(plan.in_flight[0], frames, now)
                    elif data.ConsumeBool():
                        machine.disconnected()
                    now = max(now, until) if data.ConsumeBool() else now
                    machine.handle_timer(now)
        header = header_block(data, 1)
        look_at([decode_single("S", (b"_INBOX.x", header + b"x", len(header)))])
    except JetStreamExtError:
        pass


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
