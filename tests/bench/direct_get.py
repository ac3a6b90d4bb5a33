"""The cost of a scan by request size, with and without headers, of the same messages as Arrow columns, and of a single get.

The limits are a bare socket that only counts frames, and one that also cuts them. A single get is compared with nats-py's own
request.
"""

import asyncio

import bare
import nats
from nats.js import JetStreamContext
from record import Case, Clock, Group

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

HEADERS = {"Trace-Id": "0af7651916cd43dd8448eb211c80319c", "Content-Type": "application/json"}
TWO_HEADERS = "two headers"
NO_HEADERS = "no headers"
BATCHES = (1_000, 10_000)
BY_HAND = "by hand over nats-py"
ORDERED = "nats-py's ordered consumer"
GET, REQUEST = "get, one after the other", "nats-py's request for the same"
AS_IT_COMES = "scan, no headers, as it comes"
USED = "scan, no headers, seq and data of each message"
TO_ARROW, TO_ARROW_TWO = "to_arrow, no headers, all columns", "to_arrow, no headers, seq and data"
TO_ARROW_HEADERS = "to_arrow, two headers, all columns"


def scan_name(what: str, batch: int) -> str:
    return f"scan, {what}, requests of {batch:,}"


def bare_name(what: str, batch: int) -> str:
    return f"bare socket, {what}, requests of {batch:,}"


def cut_name(what: str, batch: int) -> str:
    return f"bare socket that cuts frames, {what}, requests of {batch:,}"


async def fill(
    js: JetStreamContext, name: str, messages: int, size: int, headers: dict[str, str] | None = None
) -> None:
    payload = b"x" * size
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True)
    async with jsx.FastPublisher(js, flow=500) as publisher:
        await publisher.add_many((f"{name}.{i % 10}", payload, headers) for i in range(messages))


async def scan(js: JetStreamContext, name: str, batch: int | None) -> int:
    count = 0
    async with jsx.DirectGet(js, name, timeout=30).scan(batch=batch) as messages:
        async for _ in messages:
            count += 1
    return count


async def use(js: JetStreamContext, name: str) -> int:
    count = size = 0
    async with jsx.DirectGet(js, name, timeout=30).scan() as messages:
        async for message in messages:
            count += message.seq > 0
            size += len(message.data)
    return count


async def as_table(js: JetStreamContext, name: str, columns: tuple[str, ...]) -> int:
    import pyarrow as pa  # here, so that the memory of other cases is without it

    from jetstream_ext.arrow import SCHEMA, to_arrow

    schema = pa.schema([SCHEMA.field(column) for column in columns or SCHEMA.names])
    return (await to_arrow(js, name, schema=schema, timeout=30)).num_rows


async def by_hand(js: JetStreamContext, name: str, count: int) -> int:
    """The same read with nats-py alone."""
    nc, read, seq = js._nc, 0, 1
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    while read < count:
        await nc.publish(f"$JS.API.DIRECT.GET.{name}", b'{"seq":%d,"batch":1000}' % seq, reply=inbox)
        while (headers := (await subscription.next_msg(timeout=5)).headers or {}).get("Status") != "204":
            seq = int(headers["Nats-Sequence"]) + 1
            read += 1
    await subscription.unsubscribe()
    return read


async def ordered(js: JetStreamContext, name: str, count: int) -> int:
    subscription = await js.subscribe(f"{name}.>", ordered_consumer=True)
    for _ in range(count):
        await subscription.next_msg(timeout=5)
    await subscription.unsubscribe()
    return count


async def gets(js: JetStreamContext, name: str, count: int) -> int:
    direct = jsx.DirectGet(js, name, timeout=30)
    for seq in range(1, count + 1):
        await direct.get(seq)
    return count


async def requests(js: JetStreamContext, name: str, count: int) -> int:
    for seq in range(1, count + 1):
        await js._nc.request(f"$JS.API.DIRECT.GET.{name}", b'{"seq":%d}' % seq, timeout=30)
    return count


def run(name: str, *, quick: bool) -> Group:
    """Measure `direct_get`."""
    messages, size, rounds = (2_000, 128, 1) if quick else (200_000, 128, 7)
    group = Group(name, messages=messages, size=size, rounds=rounds)
    with NatsServer() as server:
        asyncio.run(_measure(server.url, group, messages, size, rounds))
    return group


async def _measure(url: str, group: Group, messages: int, size: int, rounds: int) -> None:
    nc = await nats.connect(url)
    js, socket = nc.jetstream(), bare.Bare(url)
    cases: dict[str, Case] = {}

    def add(stream: str, what: str, batch: int) -> None:
        async def bare_read() -> int:
            return bare.read(socket, stream, messages, batch, 8 << 20)

        async def bare_read_and_cut() -> int:
            return bare.read_and_cut(socket, stream, messages, batch, 8 << 20)

        cases[bare_name(what, batch)] = bare_read
        cases[cut_name(what, batch)] = bare_read_and_cut
        cases[scan_name(what, batch)] = lambda: scan(js, stream, batch)

    for stream, what, headers in (("PLAIN", NO_HEADERS, None), ("OWN", TWO_HEADERS, HEADERS)):
        await fill(js, stream, messages, size, headers)
        for batch in BATCHES:
            add(stream, what, batch)
    cases[AS_IT_COMES] = lambda: scan(js, "PLAIN", None)
    cases[USED] = lambda: use(js, "PLAIN")
    cases[TO_ARROW] = lambda: as_table(js, "PLAIN", ())
    cases[TO_ARROW_TWO] = lambda: as_table(js, "PLAIN", ("seq", "data"))
    cases[TO_ARROW_HEADERS] = lambda: as_table(js, "OWN", ())
    cases[BY_HAND] = lambda: by_hand(js, "PLAIN", messages // 4)
    cases[ORDERED] = lambda: ordered(js, "PLAIN", messages // 4)
    cases[GET] = lambda: gets(js, "PLAIN", messages // 50)
    cases[REQUEST] = lambda: requests(js, "PLAIN", messages // 50)
    for number in range(rounds + 1):  # the first warms up
        for case, measure in cases.items():
            await asyncio.sleep(0.05)  # let the server finish the work of the last case
            clock = Clock()
            count = await measure()
            if number:
                clock.note(group, case, count)
    await nc.close()
    socket.close()
