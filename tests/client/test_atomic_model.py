"""Random batches against a model of the stream: the real server agrees on every outcome and every error code.

The model implements the server's checks and this library's a second time, and shares no code with the package.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

SIZE = 500
CLASSES = {
    10054: errors.MessageTooLargeError, 10060: errors.StreamMismatchError, 10071: errors.WrongLastSequenceError,
    10111: errors.BatchServerError, 10165: errors.MessageTTLInvalidError, 10166: errors.MessageTTLDisabledError,
    10193: errors.BatchServerError, 10201: errors.AtomicPublishDuplicateMessageIDError,
}  # fmt: skip


@dataclass
class Stream:
    """The messages that are stored, and the ids that the server has seen."""

    name: str
    ttl: bool
    messages: list[tuple[str, bytes]] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def last(self, subject: str) -> int:
        return max((seq for seq, (name, _) in enumerate(self.messages, 1) if name == subject), default=0)

    def commit(self, batch: list[jsx.BatchMessage]) -> int | None:
        """Store a batch, or return the error code of the first check that fails."""
        seen: set[str] = set()
        for message in batch:
            headers = message.headers or {}
            if message.stream not in (None, self.name):
                return 10060
            ttl = str(message.msg_ttl or headers.get("Nats-TTL", ""))
            if ttl and not self.ttl:
                return 10166
            if ttl == "bad":
                return 10165
            if message.msg_id is not None:
                if message.msg_id in self.ids | seen:
                    return 10201
                seen.add(message.msg_id)
            if message.expected_last_seq not in (None, len(self.messages)):
                return 10071
            if message.expected_last_subject_seq is not None:
                subject = message.expected_last_subject or message.subject
                if message.expected_last_subject_seq != self.last(subject):
                    return 10071
            elif "Nats-Expected-Last-Subject-Sequence-Subject" in headers:
                return 10193
            if "Nats-Rollup" in headers:
                return 10111
        self.messages += [(message.subject, message.payload) for message in batch]
        self.ids |= seen
        return None


@dataclass
class Batch:
    """The messages that the server has staged."""

    version: str
    staged: list[jsx.BatchMessage] = field(default_factory=list)

    def refused_locally(self, message: jsx.BatchMessage) -> bool:
        """Whether the message is refused before it is sent."""
        if message.expected_last_subject_seq is not None and self.version == "2.12.0":
            return True  # that server compares it with the subject of the last message
        if len(message.payload) == SIZE:
            return True
        written = {each.subject for each in self.staged}
        if message.expected_last_seq is not None and self.staged:
            return True
        return message.expected_last_subject_seq is not None and (
            (message.expected_last_subject or message.subject) in written
        )


class Run:
    """The random batches of one seed."""

    def __init__(self, seed: int, js: JetStreamContext, version: str) -> None:
        self.random = random.Random(seed)
        self.js = js
        self.version = version
        self.outcomes: list[str] = []

    def message(self, stream: Stream) -> jsx.BatchMessage:
        rng = self.random
        options: dict[str, Any] = {}
        subject = f"{stream.name}.{rng.randrange(3)}"
        if rng.random() < 0.15:
            options["expected_last_seq"] = rng.choice([len(stream.messages)] * 3 + [7])
        if rng.random() < 0.25:
            options["expected_last_subject_seq"] = rng.choice([stream.last(subject)] * 3 + [0, 5])
            if rng.random() < 0.4:
                other = options["expected_last_subject"] = f"{stream.name}.{rng.randrange(4)}"
                options["expected_last_subject_seq"] = rng.choice([stream.last(other)] * 3 + [0])
        if rng.random() < 0.15 and self.version != "2.12.0":  # it refuses them (10177)
            options["msg_id"] = f"id{rng.randrange(12)}"
        if rng.random() < 0.1:
            options["stream"] = rng.choice([stream.name, stream.name, "OTHER"])
        if rng.random() < 0.1:
            options["msg_ttl"] = 60
        elif rng.random() < 0.05:
            options["headers"] = rng.choice([{"Nats-TTL": "bad"}, {"Nats-Rollup": "sub"}, {"K": "v"}])
            if rng.random() < 0.3 and "expected_last_subject_seq" not in options:
                options["headers"] = {"Nats-Expected-Last-Subject-Sequence-Subject": f"{stream.name}.1"}
        large = rng.random() < 0.06
        return jsx.BatchMessage(subject, bytes(SIZE) if large else rng.randbytes(rng.randrange(9)), **options)

    async def batch(self, stream: Stream) -> None:
        rng = self.random
        batch = jsx.AtomicBatch(self.js)
        model = Batch(self.version)
        locally = ValueError, errors.UnsupportedFeatureError, errors.MessageTooLargeError
        try:
            for _ in range(rng.randrange(7)):
                message = self.message(stream)
                if len(message.payload) == SIZE and [*model.staged, message][0].stream == "OTHER":
                    continue  # the first message has named the batch's stream, so its limit is not known
                if model.refused_locally(message):
                    with pytest.raises(locally, match=r"expected_last|max_msg_size"):
                        await batch.add_many([message])
                    assert (batch.size, batch.state) == (len(model.staged), "open")
                    continue
                await batch.add_many([message])
                model.staged.append(message)
            end = rng.choice(["eob", "eob", "message", "discard"])
            if end == "discard":
                await batch.discard()
            else:
                await self.commit(stream, batch, model, end)
        finally:
            await batch.discard()
        assert batch.state in ("committed", "failed", "discarded", "open")

    async def commit(self, stream: Stream, batch: jsx.AtomicBatch, model: Batch, end: str) -> None:
        last = None
        if end == "message":
            last = self.message(stream)
            while model.refused_locally(last):
                last = self.message(stream)
            model.staged.append(last)
        expected = stream.commit(model.staged) if model.staged else None
        error: errors.BatchError | None = None
        try:
            if last is not None:
                options = {name: getattr(last, name) for name in (
                    "headers", "msg_id", "msg_ttl", "stream", "expected_last_seq", "expected_last_subject_seq",
                    "expected_last_subject",
                )}  # fmt: skip
                ack = await batch.commit(last.subject, last.payload, **options)
            else:
                ack = await batch.commit_eob()
        except errors.BatchError as caught:
            error = caught
        if not model.staged:
            assert isinstance(error, errors.EmptyBatchError)
        elif expected is not None:
            assert isinstance(error, errors.BatchServerError)
            assert (error.err_code, error.outcome) == (expected, "not_stored"), (model.staged, stream)
            assert type(error) is CLASSES[expected]
            assert batch.state == "failed"
            self.outcomes.append(str(expected))
        else:
            assert error is None, (model.staged, stream)
            assert (ack.seq, ack.batch_size) == (len(stream.messages), len(model.staged))
            assert (batch.state, batch.size) == ("committed", len(model.staged))
            self.outcomes.append("stored")


async def read(js: JetStreamContext, stream: str, version: str) -> list[tuple[str, bytes]]:
    if version == "2.12.0":
        # A direct get right after a commit can lock up this server.
        last = (await js.stream_info(stream)).state.last_seq
        found = [await js.get_msg(stream, seq) for seq in range(1, last + 1)]
        return [(message.subject or "", message.data or b"") for message in found]
    return [(message.subject, message.data) for message in await jsx.DirectGet(js, stream).scan().to_list()]


@pytest.mark.parametrize("version", ["2.12.0", "2.12.8", "2.14.6", "2.15.1"])
async def test_the_server_agrees_with_the_model(version: str) -> None:
    outcomes: set[str] = set()
    async with NatsServer(version=version) as server, await nats.connect(server.url, connect_timeout=10) as nc:
        js = nc.jetstream(timeout=30)
        for seed in range(18):
            run = Run(seed, js, version)
            ttl = run.random.random() < 0.5
            stream = Stream(f"S{seed}", ttl)
            await js.add_stream(
                name=stream.name, subjects=[f"{stream.name}.>"], allow_atomic=True, allow_direct=True,
                allow_msg_ttl=ttl, max_msg_size=SIZE,
            )  # fmt: skip
            try:
                for _ in range(16):
                    await run.batch(stream)
                stored = await read(js, stream.name, version)
                assert stored == stream.messages
            except BaseException as error:
                error.add_note(f"version {version}, seed {seed}")
                raise
            outcomes |= set(run.outcomes)
    every = {"stored", "10060", "10071", "10111", "10165", "10166", "10193"}
    every |= set() if version == "2.12.0" else {"10201"}
    assert outcomes == every
