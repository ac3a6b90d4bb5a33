"""The position of a consumer after purges, deletions, and acknowledgements that come too early."""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from consuming import ack, create, info, pull

PURGES: list[dict[str, Any]] = [
    {},
    {"seq": 1},
    {"seq": 1, "filter": ">"},
    {"seq": 4},
    {"seq": 99},
    {"keep": 2},
    {"keep": 99},
    {"filter": "s.a"},
    {"filter": "s.a", "seq": 1},
    {"filter": "s.a", "seq": 4},
    {"filter": "s.a", "keep": 1},
    {"filter": "zz"},
]


CONSUMERS = {"ALL": "", "ONE": "s.a", "MATCHING": "s.*"}  # names and filters


STORAGES = ("memory", "file")


@pytest.mark.since("2.14.6")
def test_purge_moves_the_consumers(pair: Any) -> None:
    def settle() -> None:
        for name in CONSUMERS:
            pair.eventually(lambda name=name: info(pair, name))

    def check(cell: tuple[str, int, dict[str, Any]]) -> None:
        storage, taken, purge = cell
        pair.stream(storage=storage, max_msgs=5)
        for name, pattern in CONSUMERS.items():
            create(pair, name, filter_subject=pattern)
        for subject in ("s.a", "s.b", "s.a"):
            pair.publish(subject)
        settle()  # until the consumers count all three messages as pending
        if taken:
            for name in CONSUMERS:
                pull(pair, {"batch": taken, "no_wait": True}, wait=taken, name=name)
        for subject in ("s.b", "s.a", "s.b", "s.a"):
            pair.publish(subject)
        pair.api(f"STREAM.PURGE.{pair.name}", purge)
        settle()
        for name in CONSUMERS:
            pull(pair, {"batch": 4, "no_wait": True}, name=name)
        settle()

    pair.each(product(STORAGES, (0, 2), PURGES), check)


@pytest.mark.since("2.14.6")
def test_purge_of_some_unacknowledged_messages_moves_the_floor(pair: Any) -> None:
    """Between those that are gone and those that are left is a message that does not match."""

    def check(cell: tuple[str, dict[str, Any]]) -> None:
        storage, purge = cell
        pair.stream(storage=storage)
        for subject in ("s.b", "s.a", "s.a", "s.b"):
            pair.publish(subject)
        create(pair, filter_subject="s.a")
        for subject in ("s.a", "s.b", "s.a"):
            pair.publish(subject)
        pull(pair, {"batch": 4}, wait=4)
        pair.api(f"STREAM.PURGE.{pair.name}", purge)
        pair.eventually(lambda: info(pair))

    pair.each(product(STORAGES, [{"seq": 3}, {"seq": 4}, {"seq": 5}, {"keep": 3, "filter": ">"}]), check)


def test_last_per_subject_waits_at_a_deleted_message(pair: Any) -> None:
    pair.stream()
    for subject in ("s.a", "s.b"):
        pair.publish(subject)
    create(pair, deliver_policy="last_per_subject", filter_subject="s.*")
    pair.api(f"STREAM.PURGE.{pair.name}", {"filter": "s.a"})
    pull(pair, {"batch": 1}, wait=0)  # finds the deleted message, and waits for the next event
    assert len(pair.publish("s.b", wait=2)) == 2  # the ack and the pulled message
    pair.eventually(lambda: info(pair))


@pytest.mark.since("2.14.6")
def test_request_passes_deleted_messages(pair: Any) -> None:
    def check(storage: str) -> None:
        pair.stream(storage=storage)
        pair.publish("s.a")
        create(pair)
        pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 1, "no_erase": True})
        pull(pair, {"batch": 1}, wait=0)
        pair.eventually(lambda: info(pair))

    pair.each(STORAGES, check)


@pytest.mark.since("2.14.6")
def test_ack_below_the_start_of_the_consumer(pair: Any) -> None:
    def check(cell: tuple[str, str, bytes]) -> None:
        storage, policy, word = cell
        pair.stream(storage=storage)
        for _ in range(3):
            pair.publish("s.a")
        pair.api(f"STREAM.PURGE.{pair.name}", {"seq": 3})
        create(pair, ack_policy=policy)
        for seq in (1, 2):
            ack(pair, seq, word, delivery=1)
            pair.eventually(lambda: info(pair))
        pull(pair)
        ack(pair, 1, word, delivery=1)
        pair.eventually(lambda: info(pair))
        ack(pair, 3, word, delivery=1)
        pair.eventually(lambda: info(pair))

    pair.each(product(STORAGES, ("all", "explicit"), (b"", b"-NAK", b"+TERM")), check)
