"""Random histories against a model: the bucket at every revision and at every time."""

import asyncio
import os
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import present, reads

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
KEYS = ["a", "b", "a.x", "a.y", "a.x.1", "b.x", "c/1", "d=1"]
FILTERS = [None, ["a.>"], ["a.*"], ["*.x"], ["a", "b"], ["a.>", "c/1", "nothing"], ["*"], ["nothing.>"]]


def matches(pattern: str, key: str) -> bool:
    wanted, tokens = pattern.split("."), key.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > i
        if i >= len(tokens) or token not in ("*", tokens[i]):
            return False
    return len(tokens) == len(wanted)


@dataclass
class Event:
    seq: int
    key: str
    operation: str
    value: bytes
    time: datetime | None = None
    created: bool = False


@dataclass
class Model:
    """Every event of a bucket, and what a server keeps of it."""

    history: int
    events: list[Event] = field(default_factory=list)

    def state(self, revision: int) -> dict[str, Event]:
        """Return each key's last event up to a revision."""
        state: dict[str, Event] = {}
        for event in self.events[:revision]:
            state[event.key] = event
        return state

    def held(self, key: str) -> list[Event]:
        """Return the events of a key that are still stored."""
        mine = [event for event in self.events if event.key == key]
        purges = [i for i, event in enumerate(mine) if event.operation == "PURGE"]
        return mine[purges[-1] if purges else 0 :][-self.history :]

    def gapless(self, revision: int) -> bool:
        """Whether every message up to a revision is still stored."""
        left = {event.seq for key in {e.key for e in self.events} for event in self.held(key)}
        return all(seq in left for seq in range(1, revision + 1))

    def hidden(self, key: str, revision: int, *, precise: bool) -> bool:
        """Whether the documentation says that a key's state at a revision is not known."""
        held = self.held(key)
        if self.gapless(revision if precise else len(self.events)) or any(event.seq <= revision for event in held):
            return False
        if not held:
            return False
        first = held[0]
        if first.operation == "PURGE":
            return True
        return not first.created and len(held) >= self.history


async def scribble(kv: KeyValue, model: Model, rng: random.Random, count: int) -> None:
    """Write, delete and purge random keys."""
    js, prefix = kv._js, kv._pre
    for n in range(count):
        key = rng.choice(KEYS)
        last = model.state(len(model.events)).get(key)
        value = b"%d" % n
        seq = len(model.events) + 1
        action = rng.choices(["put", "update", "create", "delete", "purge"], [8, 3, 3, 3, 1])[0]
        operation, created = "PUT", False
        if action == "update" and last is not None:
            await kv.update(key, value, last=last.seq)
        elif action == "create" and (last is None or last.operation != "PUT"):
            await kv.create(key, value)
            created = last is None
        elif action == "delete":
            operation, value = "DEL", b""
            await kv.delete(key)
        elif action == "purge":
            operation, value = "PURGE", b""
            await kv.purge(key)
        else:
            await js.publish(f"{prefix}{key}", value)
        model.events.append(Event(seq, key, operation, value, created=created))
    for message in await jsx.DirectGet(js, kv._stream).scan().to_list():
        assert model.events[message.seq - 1].key == message.subject[len(prefix) :]
        model.events[message.seq - 1].time = message.time


def check(
    snap: kvx.KeyValueSnapshot,
    model: Model,
    revision: int,
    patterns: list[str] | None,
    *,
    deletes: bool,
    precise: bool,
) -> None:
    truth = {
        key: event
        for key, event in model.state(revision).items()
        if patterns is None or any(matches(pattern, key) for pattern in patterns)
    }
    for key, entry in snap.items():
        event = truth[key]
        assert (entry.key, entry.revision, entry.created) == (key, event.seq, event.time)
        assert (entry.operation, entry.value) == (event.operation, event.value)
        assert entry.operation == "PUT" or deletes
    held = {key: any(event.seq <= revision for event in model.held(key)) for key in KEYS}
    for key, event in truth.items():
        if held[key] and (deletes or event.operation == "PUT"):
            assert key in snap, f"{key} at {revision}"
        elif not held[key]:
            assert key in snap.unavailable, f"{key} at {revision}"
    for key in snap.unavailable:
        assert key not in snap
        assert model.hidden(key, revision, precise=precise) or key == "nothing", f"{key} at {revision}"


@pytest.fixture(params=["as it is", "by name"])
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the past is read: small buckets by their log, large ones by the names of the keys."""
    if request.param == "by name":
        monkeypatch.setattr(present, "_DEEP", 0)
        monkeypatch.setattr(reads, "_ROWS_PER_LOOKUP", 1)
    return request.param


async def test_snapshots_of_every_revision_match_the_model(make_bucket, strategy: str) -> None:
    for seed in range(3 if FULL else 1):
        for history in (1, 2, 5, 64):
            await check_every_revision(
                await make_bucket(history=history), history, seed, precise=strategy == "as it is"
            )


async def check_every_revision(kv: KeyValue, history: int, seed: int, *, precise: bool) -> None:
    count = 60 if FULL else 40
    model, rng = Model(history), random.Random(seed)
    await scribble(kv, model, rng, count)
    for revision in range(1, count + 1):
        patterns = rng.choice(FILTERS)
        deletes = rng.random() < 0.5
        snap = await kvx.snapshot(kv, patterns, at=revision, strict=False, include_deletes=deletes)
        assert snap.revision == revision
        check(snap, model, revision, patterns, deletes=deletes, precise=precise)
        if snap.unavailable:
            with pytest.raises(HistoryUnavailableError) as caught:
                await kvx.snapshot(kv, patterns, at=revision)
            assert caught.value.keys == snap.unavailable
        else:
            strictly = await kvx.snapshot(kv, patterns, at=revision, include_deletes=deletes)
            assert dict(strictly) == dict(snap)
    now = await kvx.snapshot(kv, include_deletes=True)
    check(now, model, count, None, deletes=True, precise=True)


async def test_reads_at_every_time_match_the_model(make_bucket, strategy: str) -> None:
    for history in (1, 4):
        await check_every_time(await make_bucket(history=history), history, precise=strategy == "as it is")


async def check_every_time(kv: KeyValue, history: int, *, precise: bool) -> None:
    count = 40 if FULL else 25
    model, rng = Model(history), random.Random(history)
    await scribble(kv, model, rng, count)
    stored = [event for event in model.events if event.time is not None]
    for event in stored:
        for time in (event.time, event.time - timedelta(microseconds=1)):
            revision = next((later.seq - 1 for later in stored if later.time > time), count)
            snap = await kvx.snapshot(kv, at=time, strict=False)
            assert (snap.time, snap.revision) == (time, revision)
            check(snap, model, revision, None, deletes=False, precise=precise)
            keys = rng.sample(KEYS, 3)
            truth = {key: e for key, e in model.state(revision).items() if key in keys}
            lost = {key for key in truth if not any(e.seq <= revision for e in model.held(key))}
            try:
                found = await kvx.get_many(kv, keys, at=time)
            except HistoryUnavailableError as error:
                named = error.keys
            else:
                named = ()
                assert {key: entry.value for key, entry in found.items()} == {
                    key: e.value for key, e in truth.items() if e.operation == "PUT"
                }
            assert lost <= set(named) <= set(keys)
            assert not {key for key in named if any(e.seq <= revision for e in model.held(key))}


@pytest.mark.usefixtures("strategy")
async def test_reads_of_expired_keys_are_right_or_refused(make_bucket) -> None:
    """After keys have expired, every answer about an earlier revision is right or refused."""
    async with asyncio.TaskGroup() as group:  # they wait for the expiry at the same time
        for history, markers in ((1, None), (1, 60), (3, None), (3, 1)):
            kv = await make_bucket(history=history, limit_marker_ttl=markers)
            group.create_task(check_expired(kv, history))


async def check_expired(kv: KeyValue, history: int) -> None:
    model, rng = Model(history), random.Random(history)
    sessions = [f"session.{n}" for n in range(8)]
    await kv.create("long", b"0", msg_ttl=3600)
    model.events.append(Event(1, "long", "PUT", b"0", created=True))
    messages = []
    for n, key in enumerate(rng.sample([*sessions, *KEYS * 3], 22), 2):
        once = {"msg_ttl": 1, "expected_last_subject_seq": 0} if key in sessions else {}
        messages.append(jsx.BatchMessage(f"{kv._pre}{key}", b"%d" % n, **once))
        model.events.append(Event(n, key, "PUT", b"%d" % n))
    await jsx.publish_atomic(kv._js, messages)  # all at once: no marker of an expired key comes in between
    async with asyncio.timeout(60):
        while set(await kvx.snapshot(kv)) & set(sessions):
            await asyncio.sleep(0.1)
    last = len(model.events)
    keys = ["long", *sessions, *KEYS]
    exact = 0
    for revision in range(1, last + 1):
        truth = {key: event.value for key, event in model.state(revision).items()}
        loose = await kvx.snapshot(kv, at=revision, strict=False)
        for key, entry in loose.items():
            assert entry.value == truth[key], f"{key} at {revision}"
        unknown = truth.keys() - loose.keys() - set(loose.unavailable)
        present = revision == last == (await kvx.snapshot(kv)).revision  # then keys that have expired may be missing
        assert not unknown or not loose.complete or present, f"{unknown} at {revision}"
        try:
            strict = await kvx.snapshot(kv, at=revision)
        except HistoryUnavailableError:
            assert loose.unavailable or not loose.complete
        else:
            assert {key: entry.value for key, entry in strict.items()} == truth or present, f"at {revision}"
        try:
            many = await kvx.get_many(kv, keys, at=revision)
        except HistoryUnavailableError as error:
            refused = set(error.keys)
        else:
            refused = set()
            exact += 1
            assert {key: entry.value for key, entry in many.items()} == truth or present, f"at {revision}"
        assert refused.isdisjoint(loose.keys())
    assert exact
