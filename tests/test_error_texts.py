"""The texts of errors about common mistakes: they name what is wrong, where, and what to do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import nats
import nats.errors
import pyarrow as pa
import pytest
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamSource
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import arrow, errors, log
from jetstream_ext.testing import NatsServer

ENTRY = "a BatchMessage, (subject, payload) or (subject, payload, headers)"


class Env(NamedTuple):
    """What a call of a table needs; the subjects of stream ``<name>`` are ``<name>.>``."""

    js: JetStreamContext
    one: str
    two: str
    kv: KeyValue


@pytest.fixture
async def env(js: JetStreamContext, stream_name: Callable[[], str]) -> Env:
    one, two, bucket = sorted(stream_name() for _ in range(3))
    for name in (one, two):
        await jsx.ensure_stream(
            js, name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True, allow_batched=True
        )
    return Env(js, one, two, await kvx.ensure_bucket(js, bucket))


async def text_of(call: Callable[[], Any], kind: type[BaseException]) -> str:
    """Return the text of the error of a call, which may return an awaitable or an async iterator."""

    async def run() -> None:
        result = call()
        if hasattr(result, "__await__"):
            await result
        else:
            [each async for each in result]

    with pytest.raises(kind) as caught:
        await run()
    return str(caught.value)


# -- batches -------------------------------------------------------------------------------------------------------------


PUBLISHERS: dict[str, Callable[[JetStreamContext, Any], Awaitable[Any]]] = {
    "AtomicBatch.add_many": lambda js, messages: add_many(jsx.AtomicBatch(js), messages),
    "FastPublisher.add_many": lambda js, messages: add_many(jsx.FastPublisher(js), messages),
    "publish_atomic": jsx.publish_atomic,
    "publish_atomic_many": lambda js, messages: jsx.publish_atomic_many(js, [messages]).to_list(),
    "ingest": jsx.ingest,
}


async def add_many(batch: Any, messages: Any) -> None:
    async with batch:
        await batch.add_many(messages)


async def test_a_batch_over_two_streams_names_the_stream_and_the_subject(env: Env) -> None:
    for subject in (f"{env.two}.b", f"{env.one}-other"):  # of another stream, and of none
        messages = [(f"{env.one}.a", b"1"), (subject, b"2")]
        for publisher in ("AtomicBatch.add_many", "publish_atomic", "publish_atomic_many"):
            text = await text_of(partial(PUBLISHERS[publisher], env.js, messages), errors.BadSubjectError)
            assert text == (
                f"stream {env.one!r}, which stores the first message of the batch, does not store subject {subject!r}; all "
                "messages of a batch must be of one stream, so the message was not added; if the stream has just got this "
                "subject, begin another batch"
            ), publisher


async def endless_entries() -> AsyncIterator[jsx.BatchMessage]:
    while True:
        yield jsx.BatchMessage("a")


async def entries() -> list[jsx.BatchMessage]:
    return []


BULKS = {
    "bytes": (b"x", "bytes; give [(subject, payload)]"),
    "str": ("x", "str; give [(subject, payload)]"),
    "one tuple": (("a", b"x"), "one message; give [('a', ...)]"),
    "one message": (jsx.BatchMessage("a", b"x"), "one BatchMessage; give [message]"),
    "dict": ({"a": b"x"}, "dict; give its items()"),
    "None": (None, "NoneType"),
    "int": (5, "int"),
    "an async generator function": (endless_entries, "function; call it"),
}


async def test_a_bulk_that_is_no_list_of_messages_is_a_type_error(js: JetStreamContext) -> None:
    called = entries()
    for publisher, call in PUBLISHERS.items():
        for messages, given in [*BULKS.values(), (called, "coroutine; await it")]:
            text = await text_of(partial(call, js, messages), TypeError)
            wanted = f"messages must be a list or another iterable of messages, each {ENTRY}, not {given}"
            assert text == wanted, publisher
        kind = errors.IngestError if publisher == "ingest" else TypeError
        text = await text_of(partial(call, js, [called]), kind)
        assert f"a message must be {ENTRY}, not coroutine; await it" in text, publisher
    await called


ENTRIES = {
    "bytes": (b"x", f"a message must be {ENTRY}, not bytes; a payload needs its subject: (subject, payload)"),
    "str": ("x", f"a message must be {ENTRY}, not str; a payload needs its subject: (subject, payload)"),
    "short": (("a",), f"a message must be {ENTRY}, not a tuple of 1 item"),
    "long": (("a", b"", {}, 4), f"a message must be {ENTRY}, not a tuple of 4 items"),
    "text": (("a", "x"), "the payload on subject 'a' must be bytes, not str; encode it, for example with .encode()"),
    "header": (("a", b"x", {"n": 1}), "header 'n': the value must be str, not int"),
    "name": (("a", b"x", {1: "v"}), "a header's name must be str, not int"),
}


async def test_an_entry_that_is_no_message_is_explained(js: JetStreamContext) -> None:
    for publisher, call in PUBLISHERS.items():
        for entry, expected in ENTRIES.values():
            kind = errors.IngestError if publisher == "ingest" else TypeError
            assert expected in await text_of(partial(call, js, [entry]), kind), publisher


async def test_a_payload_or_value_of_another_type_is_shown_with_its_subject_or_key(env: Env) -> None:
    text: Any = "text"
    for batch in (jsx.AtomicBatch(env.js), jsx.FastPublisher(env.js)):
        expected = f"the payload on subject '{env.one}.a' must be bytes, not str; encode it, for example with .encode()"
        assert await text_of(lambda: batch.add(f"{env.one}.a", text), TypeError) == expected  # noqa: B023
        await batch.discard()
    async with kvx.transaction(env.kv) as tx:
        for write in (tx.put, tx.create, partial(tx.update, last=1)):
            expected = "the value of key 'a' must be bytes, not str; encode it, for example with .encode()"
            assert await text_of(lambda: write("a", text), TypeError) == expected  # noqa: B023
    assert tx.revisions == {}


async def test_a_message_that_is_too_large_is_shown_with_its_subject(env: Env) -> None:
    subject, large = f"{env.one}.a", bytes(2 << 20)
    for call in (jsx.publish_atomic, PUBLISHERS["FastPublisher.add_many"]):
        for headers in ({}, {"a": "1"}):
            entries = [(subject, b""), (f"{env.one}.b", large, headers)]
            text = await text_of(partial(call, env.js, entries), errors.MaxPayloadError)
            assert f"the message on subject '{env.one}.b' has " in text


# -- arguments -----------------------------------------------------------------------------------------------------------


def plain(tx: kvx.Transaction) -> int:
    tx.put("a", b"1")
    return 5


async def test_retry_transaction_needs_an_async_function_and_not_its_call(env: Env) -> None:
    called = entries()
    wanted = "fn must be an async function"
    given: Any
    for given, expected in (
        (plain, ": plain() returned int, which cannot be awaited; nothing was written; define it with `async def`"),
        (None, ", not NoneType"),
        (called, ", not coroutine; give the function itself, without calling it"),
    ):
        assert await text_of(partial(kvx.retry_transaction, env.kv, given), TypeError) == wanted + expected
    assert await kvx.get_many(env.kv, ["a"]) == {}
    await called


async def on_change(table: Any, function: Any) -> None:
    async with table:
        table.on_change(function)


FUNCTIONS: dict[str, tuple[Callable[[Env, Any], Any], str]] = {
    "on_change": (lambda env, given: on_change(kvx.Table(env.kv), given), "a function"),
    "log on_change": (lambda env, given: on_change(log.Table(env.js, env.one), given), "a function"),
    "on_progress": (lambda env, given: jsx.ingest(env.js, [], on_progress=given), "a function or None"),
    "msg_id": (lambda env, given: jsx.ingest(env.js, [], msg_id=given), "a function or None"),
    "payload": (
        lambda env, given: arrow.to_arrow(env.js, env.one, payload=given),
        "a pyarrow.Schema (for JSON), 'ipc' or a function",
    ),
}
ASYNC_FUNCTIONS: dict[str, tuple[Callable[[Env, Any], Any], str]] = {
    **{
        name: (lambda env, given, name=name: jsx.FastPublisher(env.js, **{name: given}), "a function or None")
        for name in ("on_gap", "on_error", "on_flow")
    },
    **{
        name: (lambda env, given, name=name: group_of(env).join(**{name: given}), "a function or None")
        for name in ("on_assigned", "on_revoked", "on_partitions_lost")
    },
}


def group_of(env: Env) -> log.Group:
    return log.Group(env.js, env.one, "g", partitions=2)


async def coroutine_function(_: object) -> None: ...


class AsyncCallable:
    async def __call__(self, _: object) -> None: ...

    async def method(self, _: object) -> None: ...


async def async_generator(_: object) -> AsyncIterator[int]:
    yield 1


async def test_what_is_no_function_is_refused_at_the_call(env: Env) -> None:
    called = coroutine_function(1)
    call_hint = "coroutine; give the function itself, without calling it"
    for name, (call, wanted) in (FUNCTIONS | ASYNC_FUNCTIONS).items():
        for given, shown in (("x", "'x'"), (5, "int"), (called, call_hint)):
            text = await text_of(partial(call, env, given), TypeError)
            said = repr(given) if name == "payload" else shown
            assert text == f"{name.rpartition(' ')[2]} must be {wanted}, not {said}"
    await called


async def test_an_async_function_is_refused_where_it_would_never_run_and_taken_where_it_is_awaited(env: Env) -> None:
    given_ones = (
        coroutine_function,
        partial(coroutine_function),
        AsyncCallable(),
        AsyncCallable().method,
        async_generator,
    )
    for name, (call, _) in FUNCTIONS.items():
        for given in given_ones:
            text = await text_of(partial(call, env, given), TypeError)
            assert text == (
                f"{name.rpartition(' ')[2]} must be a plain function, not an async one, which would never run; give a "
                "function that starts a task"
            ), given
    for call, _ in ASYNC_FUNCTIONS.values():
        for given in given_ones[:3]:
            call(env, given)


async def test_the_key_of_a_group_must_be_a_list_of_positions(js: JetStreamContext) -> None:
    wanted = "key must be a list of positions of subject tokens, from 0, or None"
    for key, expected in (
        (1, f"{wanted}, not int; give [1]"),
        ("orders", f"{wanted}, not 'orders'"),
        (b"ab", f"{wanted}, not bytes"),
        (1.5, f"{wanted}, not float"),
    ):
        given: Any = key
        text = await text_of(lambda: log.Group(js, "S", "g", partitions=2, key=given), TypeError)  # noqa: B023
        assert text == expected
    names: Any = ["orders"]
    text = await text_of(lambda: log.Group(js, "S", "g", partitions=2, key=names), ValueError)
    assert text == "a position in key must be an integer of at least 0, not 'orders'"


async def in_transaction(kv: KeyValue, keys: Any) -> None:
    async with kvx.transaction(kv) as tx:
        await tx.get_many(keys)


LISTS: dict[str, tuple[Callable[[Env, Any], Any], str, str]] = {
    "multi_last": (lambda env, given: jsx.DirectGet(env.js, env.one).multi_last(given), "subjects", "subjects"),
    "get_many": (lambda env, given: kvx.get_many(env.kv, given), "keys", "keys"),
    "transaction": (lambda env, given: in_transaction(env.kv, given), "keys", "keys"),
    "snapshot": (lambda env, given: kvx.snapshot(env.kv, given), "filters", "keys or key patterns"),
    "Table": (lambda env, given: kvx.Table(env.kv, given), "filters", "keys or key patterns"),
}


async def test_a_text_where_a_list_is_needed_is_shown_as_a_list(env: Env) -> None:
    for call, (made, name, what) in LISTS.items():
        for given, shown in (("x.>", "'x.>'; give ['x.>']"), (b"x", "bytes"), (5, "int")):
            text = await text_of(partial(made, env, given), TypeError)
            assert text == f"{name} must be a list of {what}, not {shown}", call


async def test_the_subjects_of_a_stream_must_be_a_list_of_texts(env: Env) -> None:
    for given, expected in (
        ("x.>", "subjects must be a list of str, not 'x.>'; give ['x.>']"),
        ({"x.>"}, "subjects must be a list of str, not set"),
        ([5], "subjects[0] must be str, not int"),
    ):
        options: Any = {"subjects": given}
        text = await text_of(lambda: jsx.ensure_stream(env.js, name="NEW", **options), TypeError)  # noqa: B023
        assert text == f"stream 'NEW': {expected}"


WORDS: dict[str, tuple[Callable[[JetStreamContext, Any], Any], str]] = {
    "gap": (lambda js, word: jsx.FastPublisher(js, gap=word), "gap must be 'ok' or 'fail'"),
    "on_bad": (lambda js, word: jsx.DirectGet(js, "S").scan(on_bad=word), "on_bad must be 'error' or 'skip'"),
    "on_lost": (lambda js, word: log.LogReader(js, "S", on_lost=word), "on_lost must be 'error' or 'skip'"),
    "dialect": (lambda _, word: jsx.ttl_headers(5, dialect=word), "dialect must be '2.14' or 'draft'"),
}


async def test_a_word_that_is_not_allowed_comes_with_those_that_are(js: JetStreamContext) -> None:
    for name, (make, expected) in WORDS.items():
        nearest = {"gap": "ok", "dialect": "draft"}.get(name, "skip")
        for word, hint in ((f"{nearest}p", f"; did you mean {nearest!r}?"), ("?", ""), (7, "")):
            assert await text_of(partial(make, js, word), ValueError) == f"{expected}, not {word!r}{hint}"


COLUMNS = {
    "subjct": "subject",
    "Payload": "data",
    "value": "data",
    "topic": "subject",
    "msgid": "msg_id",
}


async def test_a_column_that_cannot_be_stored_comes_with_those_that_can(js: JetStreamContext) -> None:
    columns = "subject, data, headers, msg_id, stream, seq, time"
    for name in [*COLUMNS, "zzz"]:
        table = pa.table({"subject": ["a"], "data": [b""], name: ["x"]})
        text = await text_of(partial(arrow.from_arrow, js, table), ValueError)
        hint = (
            f"did you mean {COLUMNS[name]!r}?"
            if name in COLUMNS
            else "select those, and put other values into data or headers"
        )
        assert text == f"column {name!r}: only the columns {columns} can be stored; {hint}"


async def test_a_column_or_option_of_a_read_that_does_not_exist_comes_with_the_nearest(js: JetStreamContext) -> None:
    for name, hint in (("subjekt", "; did you mean 'subject'?"), ("payload", "; did you mean 'data'?"), ("zzz", "")):
        schema = pa.schema([(name, pa.string())])
        text = await text_of(lambda: arrow.to_arrow(js, "S", schema=schema), ValueError)  # noqa: B023 - called at once
        columns = "stream, seq, subject, time, data, headers"
        assert text == f"schema: there is no column {name!r}; the columns are {columns}{hint}"
    options: dict[str, Any] = {"subjects": "a.>"}
    text = await text_of(lambda: arrow.to_arrow(js, "S", **options), TypeError)
    assert text == "record_batches() has no option 'subjects'; did you mean 'subject'?"


# -- what is missing -----------------------------------------------------------------------------------------------------


async def read(reader: log.LogReader) -> None:
    await reader.read(1, 0.1)


async def enter(context: Any) -> None:
    async with context:
        pass


async def work(js: JetStreamContext, stream: str, output: str) -> None:
    async def handle(_: jsx.StoredMsg) -> list[jsx.BatchMessage]:
        return []

    await log.exactly_once(log.LogReader(js, stream), output, handle, name="w", prefix="p")


MISSING_STREAMS: dict[str, Callable[[Env, str], Any]] = {
    "LogReader": lambda env, name: read(log.LogReader(env.js, name)),
    "Group": lambda env, name: enter(log.Group(env.js, name, "g", partitions=2).join()),
    "log.Table": lambda env, name: enter(log.Table(env.js, name)),
    "exactly_once": lambda env, name: work(env.js, env.one, name),
    "dead_letters": lambda env, name: log.dead_letters(env.js, name, "dead"),
    "redrive": lambda env, name: log.redrive(env.js, name, "dead"),
    "reset_consumer": lambda env, name: jsx.reset_consumer(env.js, name, "c"),
    "create_source_consumer": lambda env, name: jsx.create_source_consumer(env.js, name, "c", deliver_subject="d"),
    "source_health": lambda env, name: jsx.source_health(env.js, name),
    "scan": lambda env, name: jsx.DirectGet(env.js, name).scan(confirm=True),
}


async def test_every_error_about_a_missing_stream_names_it(env: Env) -> None:
    for name, call in MISSING_STREAMS.items():
        text = await text_of(partial(call, env, "NOPE"), nats.errors.Error)
        assert "stream 'NOPE' does not exist" in text, name


async def test_a_missing_consumer_is_named_with_its_stream(env: Env) -> None:
    text = await text_of(lambda: jsx.reset_consumer(env.js, env.one, "c"), Exception)
    assert f"stream {env.one!r} has no consumer 'c'" in text


MISSING_MESSAGES: dict[str, tuple[Callable[[jsx.DirectGet], Any], str]] = {
    "get": (lambda direct: direct.get(7), "with sequence 7"),
    "get_last": (lambda direct: direct.get_last("a.b"), "on 'a.b'"),
    "get_next": (lambda direct: direct.get_next("a.*", seq=3), "on 'a.*' from sequence 3 on"),
    "get_at": (
        lambda direct: direct.get_at(datetime(2026, 3, 1, tzinfo=UTC), subject="a.b"),
        "on 'a.b' stored at 2026-03-01T00:00:00+00:00 or later",
    ),
}


async def test_a_missing_message_is_described(env: Env) -> None:
    direct = jsx.DirectGet(env.js, env.one)
    for get, expected in MISSING_MESSAGES.values():
        text = await text_of(partial(get, direct), errors.MessageNotFoundError)
        assert text == f"stream {env.one!r}: no message {expected} was found"


async def test_a_transaction_in_a_missing_bucket_names_it(env: Env, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    kv = await kvx.ensure_bucket(env.js, name)
    await env.js.delete_key_value(name)

    async def put() -> None:
        async with kvx.transaction(kv) as tx:
            tx.put("a", b"1")

    text = await text_of(put, errors.NoStreamError)
    assert text == f"bucket {name!r} does not exist, or has no leader; nothing was written"


# -- what the JetStream API refuses -------------------------------------------------------------------------------------


async def add_options_to_a_mirror(env: Env, name: str) -> None:
    await env.js.add_stream(name=name, mirror=StreamSource(name=env.one))
    await jsx.ensure_stream(env.js, name=name, allow_atomic=True)


async def add_markers_to_a_mirror(env: Env, name: str) -> None:
    await env.js.add_stream(name=f"KV_{name}", mirror=StreamSource(name=env.one), max_msgs_per_subject=1)
    await kvx.enable(await env.js.key_value(name))


async def reset(env: Env, name: str) -> None:
    config = ConsumerConfig(durable_name=name, deliver_policy=DeliverPolicy.NEW)
    await env.js.add_consumer(env.one, config)
    await jsx.reset_consumer(env.js, env.one, name, seq=3)


async def create_another_consumer(env: Env, name: str) -> None:
    for subject in ("d.1", "d.2"):
        await jsx.create_source_consumer(env.js, env.one, name, deliver_subject=subject)


async def join_without_a_bucket(env: Env, name: str) -> None:
    await env.js.add_stream(name=f"H{name}", subjects=[f"$KV.{name}.>"])
    await enter(log.Group(env.js, env.one, "g", partitions=2, bucket=name).join())


REPLICAS = "replicas > 1 not supported in non-clustered mode (error 10074)"
REFUSED_BY_THE_API: dict[str, tuple[Callable[[Env, str], Any], str]] = {
    "new stream": (
        lambda env, name: jsx.ensure_stream(env.js, name=name, num_replicas=3),
        f"stream '{{name}}': {REPLICAS}",
    ),
    "subject": (
        lambda env, name: jsx.ensure_stream(env.js, name=name, subjects=["a b"]),
        "stream '{name}': invalid subject (error 10052)",
    ),
    "update": (
        add_options_to_a_mirror,
        "stream '{name}': stream mirrors can not also use atomic publishing (error 10198)",
    ),
    "new bucket": (lambda env, name: kvx.ensure_bucket(env.js, name, replicas=3), f"bucket '{{name}}': {REPLICAS}"),
    "enable": (
        add_markers_to_a_mirror,
        "bucket '{name}': stream mirrors can not also use atomic publishing (error 10198)",
    ),
    "positions": (lambda env, name: log.OffsetStore(env.js, name).create(replicas=3), f"bucket '{{name}}': {REPLICAS}"),
    "group": (
        join_without_a_bucket,
        "bucket '{name}': nothing was created: stream 'H{name}' stores messages on '$KV.{name}.>'; a subject belongs to",
    ),
    "reset": (reset, "consumer '{name}' of stream '{one}': invalid reset: "),
    "source consumer": (
        create_another_consumer,
        "consumer '{name}' of stream '{one}': consumer already exists (error 10148)",
    ),
}


async def test_a_refusal_names_the_stream_the_bucket_or_the_consumer(env: Env, stream_name: Callable[[], str]) -> None:
    for refused, expected in REFUSED_BY_THE_API.values():
        name = stream_name()
        text = await text_of(partial(refused, env, name), errors.ServerError)
        assert text.startswith(expected.format(name=name, one=env.one))


# -- permissions and logins ----------------------------------------------------------------------------------------------

USERS = """
authorization { users = [
  {user: admin, password: secret}
  {user: reader, password: secret, permissions: {publish: ["$JS.API.>", "$JS.ACK.>"], subscribe: ["_INBOX.>"]}}
  {user: writer, password: secret, permissions: {publish: ["a.>"], subscribe: ["_INBOX.>"]}}
  {user: deaf, password: secret, permissions: {publish: [">"], subscribe: ["a.>"]}}
] }
"""


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    with NatsServer(config=USERS) as server:
        yield server


async def ignore(_: Exception) -> None: ...


@asynccontextmanager
async def connected(server: NatsServer, user: str, timeout: float) -> AsyncIterator[JetStreamContext]:
    nc = await nats.connect(
        server.url, user=user, password="secret", error_cb=ignore, connect_timeout=10, reconnect_time_wait=0.01
    )
    try:
        yield nc.jetstream(timeout=timeout)
    finally:
        await nc.close()


SILENT: dict[str, Callable[[JetStreamContext], Any]] = {
    "AtomicBatch": lambda js: add_many(jsx.AtomicBatch(js), [("a.1", b"")]),
    "publish_atomic": lambda js: jsx.publish_atomic(js, [("a.1", b"")]),
    "FastPublisher": lambda js: add_many(jsx.FastPublisher(js), [("a.1", b"")]),
    "ingest": lambda js: jsx.ingest(js, [("a.1", b"")], patience=4),
    "get": lambda js: jsx.DirectGet(js, "A").get(1),
    "scan": lambda js: jsx.DirectGet(js, "A").scan(),
    "source_health": lambda js: jsx.source_health(js, "A"),
}
NO_PUBLISH = "the server has refused a message to {!r}: the user had no permission to publish to it"
REFUSED = {
    "reader": (("AtomicBatch", "publish_atomic", "FastPublisher", "ingest"), NO_PUBLISH.format("a.1")),
    "writer": (("get", "scan"), NO_PUBLISH.format("$JS.API.DIRECT.GET.A")),
    "deaf": (
        tuple(SILENT),
        "; the server has refused a subscription: the user had no permission to subscribe to _INBOX.>, where answers come",
    ),
}


async def test_an_answer_that_does_not_come_for_lack_of_a_permission_names_it(guarded: NatsServer) -> None:
    async with connected(guarded, "admin", 30) as js:
        await jsx.ensure_stream(
            js, name="A", subjects=["a.>"], allow_direct=True, allow_atomic=True, allow_batched=True
        )

    async def without_the_reason(user: str, calls: Iterable[str], why: str) -> list[str]:
        async with connected(guarded, user, 4) as js:
            texts = await asyncio.gather(*(text_of(partial(SILENT[call], js), nats.errors.Error) for call in calls))
        return [f"{user}, {call}: {text}" for call, text in zip(calls, texts, strict=True) if why not in text]

    found = await asyncio.gather(*(without_the_reason(user, *row) for user, row in REFUSED.items()))
    assert found == [[]] * len(REFUSED)
