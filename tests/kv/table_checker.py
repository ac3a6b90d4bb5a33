"""Writers and readers of a bucket, and the check of what tables have shown against what writers were acknowledged."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx


@dataclass
class Write:
    """A write: its key and value (None: a deletion), and its revision once it is known."""

    key: str
    value: bytes | None
    revision: int | None = None


@dataclass
class Sample:
    """What a table showed between two turns of the loop, or a watcher's copy of it."""

    revision: int
    entries: dict[str, int]


@dataclass
class TableChecker:
    """Records what happens; `check` says what is wrong."""

    writes: list[Write] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    reads: int = 0

    async def write(self, kv: KeyValue, seed: int, keys: int, stop: asyncio.Event, *, tables: list[kvx.Table]) -> None:
        """Write until `stop`; after some acknowledged writes, wait for a table and read."""
        dice = random.Random(seed)
        while not stop.is_set():
            key = f"k{dice.randrange(keys)}"
            write = Write(key, None if dice.random() < 0.1 else b"%d.%d" % (seed, dice.randrange(1 << 30)))
            self.writes.append(write)
            try:
                if write.value is None:  # as nats-py's `delete`, which does not return the revision
                    ack = await kv._js.publish(f"{kv._pre}{key}", headers={"KV-Operation": "DEL"})
                    write.revision = ack.seq
                else:
                    write.revision = await kv.put(key, write.value)
            except (nats.errors.Error, nats.js.errors.Error):
                await asyncio.sleep(0.02)
                continue
            if dice.random() < 0.2:
                table = dice.choice(tables)
                await table.wait_for(write.revision, timeout=60)
                entry = table.get(key)
                assert table.revision >= write.revision
                assert entry is None or entry.revision >= write.revision, "a read of an own write goes backwards"
                if entry is not None and entry.revision == write.revision:
                    assert entry.value == write.value

    async def read(self, name: str, table: kvx.Table, seed: int, stop: asyncio.Event, *, reads: int = 1) -> None:
        """Take samples until `stop`."""
        dice, samples = random.Random(seed), self.samples.setdefault(name, [])
        revision, newest = 0, dict[str, int]()
        while not stop.is_set():
            assert table.revision >= revision, "the revision goes backwards"
            if table.revision != revision:
                entries = {key: entry.revision for key, entry in table.items()}
                samples.append(Sample(table.revision, entries))
                revision = table.revision
            for _ in range(reads):
                key = f"k{dice.randrange(64)}"
                entry = table.get(key)
                if entry is not None:
                    assert entry.revision >= newest.get(key, 0), "a read goes backwards"
                    newest[key] = entry.revision
            self.reads += reads
            await asyncio.sleep(dice.random() * 0.01)

    def check(self, log: list[tuple[int, str, bool]] | None = None) -> None:
        """Compare the samples with all messages that the bucket had (revision, key, whether it deletes).

        Without a `log`, these are the acknowledged writes, and a key may have what a write of unknown outcome gave it.
        """
        acknowledged = {it.revision: (it.key, it.value is None) for it in self.writes if it.revision is not None}
        stored = acknowledged if log is None else {revision: (key, deletes) for revision, key, deletes in log}
        assert acknowledged.items() <= stored.items(), "a write was acknowledged, and is not stored"
        unknown = {(it.key, it.value is None) for it in self.writes if it.revision is None and log is None}
        for name, samples in self.samples.items():
            state: dict[str, int] = {}
            at = 0
            for sample in samples:
                for revision in range(at + 1, sample.revision + 1):
                    if revision not in stored:
                        assert unknown, f"{name} has revision {revision}, which was never stored"
                        continue
                    key, deletes = stored[revision]
                    if deletes:
                        state.pop(key, None)
                    else:
                        state[key] = revision
                at = sample.revision
                for key in {key for key, _ in unknown} & (state.keys() | sample.entries.keys()):
                    found, expected = sample.entries.get(key), state.get(key, 0)
                    put = found is not None and found > expected and found not in stored and (key, False) in unknown
                    if put or (found is None and (key, True) in unknown):
                        state.pop(key, None)
                        if found is not None:
                            state[key] = found
                assert sample.entries == state, f"{name} at revision {at}: {difference(sample.entries, state)}"


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    return (
        f"found {sorted(found.items() - expected.items())[:5]}, expected {sorted(expected.items() - found.items())[:5]}"
    )
