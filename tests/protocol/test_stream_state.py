"""The state of a stream as its leader reports it, and what follows from it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cells import walk

from jetstream_ext.errors import (
    ResponseError,
    StreamConfigMismatchError,
)
from jetstream_ext.protocol.api import StreamState, parse_stream_state

CREATED = "2026-01-02T03:04:05.000000006Z"


def answer(**more: Any) -> dict[str, Any]:
    return {
        "config": {"name": "S"},
        "created": CREATED,
        "ts": "2026-01-02T03:06:05Z",
        "state": {"messages": 9, "first_seq": 1, "last_seq": 9, "last_ts": "2026-01-02T03:05:05Z"},
        **more,
    }


def test_a_single_server_without_a_version() -> None:
    state = parse_stream_state(answer())
    assert (state.name, state.created, state.first_seq, state.last_seq, state.messages) == ("S", CREATED, 1, 9, 9)
    assert (state.api_level, state.server_version, state.replicated) == (0, None, False)
    assert state.leader_is_certain
    assert state.last_time == datetime(2026, 1, 2, 3, 5, 5, tzinfo=UTC)
    assert state.has_every_sequence
    assert state.never_removed


def test_an_empty_stream_begins_after_its_last_sequence() -> None:
    state = parse_stream_state(
        answer(state={"messages": 0, "first_seq": 0, "last_seq": 7, "last_ts": "0001-01-01T00:00:00Z"})
    )
    assert (state.first_seq, state.last_seq) == (8, 7)
    assert state.last_time == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert not state.never_removed


@walk(
    "active, offline, certain",
    [((1, 1), (), True), ((1, 9), (), True), ((9, 9), (), False), ((1, 9), (0,), False)],
)
def test_a_leader_is_certain_while_a_majority_hears_from_it(
    active: tuple[int, ...], offline: tuple[int, ...], certain: bool
) -> None:
    peers = [
        {"name": f"n{i}", "active": seconds * 1_000_000_000, "offline": i in offline}
        for i, seconds in enumerate(active)
    ]
    state = parse_stream_state(answer(cluster={"leader": "n9", "replicas": peers}))
    assert (state.leader, state.replicated, state.leader_is_certain) == ("n9", True, certain)


def test_the_configuration_that_the_server_returns() -> None:
    config = {
        "name": "S",
        "subjects": ["a", "b.>"],
        "allow_direct": True,
        "num_replicas": 3,
        "sources": [{}],
        "duplicate_window": 5_000_000_000,
        "max_age": 1_000_000_000,
        "metadata": {"_nats.level": "4", "_nats.ver": "2.14.6"},
    }
    state = parse_stream_state(answer(config=config))
    assert state.subjects == ("a", "b.>")
    assert state.stores("b.c")
    assert not state.stores("c")
    assert state.allows_direct
    assert not state.contiguous
    assert (state.duplicate_window, state.max_age, state.marker_ttl) == (
        timedelta(seconds=5),
        timedelta(seconds=1),
        None,
    )
    assert (state.api_level, state.server_version) == (4, "2.14.6")
    state.check_direct_reads("2.15.1")


@walk("broken", [
    {"config": None}, {"state": {}}, {"state": {"messages": "x", "last_seq": 1, "first_seq": 1}}, {"ts": "now"},
    {"cluster": {"replicas": [3]}}, {"config": {"name": "S", "mirror": ["ORIGIN"]}}, {"config": {"name": 1}},
    {"config": {"name": "OTHER"}}, {"config": {"name": "S", "max_msg_size": "5"}},
    {"config": {"name": "S", "max_msgs_per_subject": 1.5}}, {"config": {"name": "S", "max_age": True}},
    {"config": {"name": "S", "max_msg_size": {}}}, {"config": {"name": "S", "first_seq": ""}},
    {"config": {"name": "S", "max_age": 1 << 63}}, {"config": {"name": "S", "first_seq": -1}},
    {"config": {"name": "S", "subjects": [1]}}, {"config": {"name": "S", "subjects": 1}},
    {"config": {"name": "S", "sources": [{"name": 1}]}},
    {"config": {"name": "S", "sources": [{"subject_transforms": [{"src": 1}]}]}},
    {"config": {"name": "S", "metadata": {"a": 1}}}, {"created": "2026-01-02T03:04:05"}, {"created": ""},
    {"created": "9999-12-31T23:59:59-23:59"},
    {"state": {"messages": 9.0, "first_seq": 1, "last_seq": 9, "last_ts": CREATED}},
    {"state": {"messages": 9, "first_seq": 1, "last_seq": 1 << 64, "last_ts": CREATED}},
    {"state": {"messages": 9, "first_seq": -1, "last_seq": 9, "last_ts": CREATED}},
])  # fmt: skip
def test_a_malformed_answer_is_a_response_error_that_names_the_stream(broken: dict[str, Any]) -> None:
    with pytest.raises(ResponseError, match="'S'"):
        parse_stream_state(answer(**broken), "S")


@walk("config, last_seq, refused", [
    ({}, (1 << 62) - 1, False), ({}, 1 << 62, True), ({"storage": "file"}, (1 << 64) - 1, True),
    ({"storage": "memory"}, (1 << 64) - 1, False),
])  # fmt: skip
def test_a_stream_whose_server_cannot_find_its_newest_messages_is_refused(
    config: dict[str, Any], last_seq: int, refused: bool
) -> None:
    config = {"allow_direct": True, **config}
    state = StreamState("S", CREATED, config, first_seq=last_seq + 1, last_seq=last_seq, api_level=1)
    for check in (state.check_sequences, lambda: state.check_direct_reads("2.15.1")):
        if refused:
            with pytest.raises(StreamConfigMismatchError, match=f"stream 'S'.*{last_seq}.*new stream"):
                check()
        else:
            check()
    state.check_sequences((1 << 62) - 1)


def transform(source: str, destination: str) -> dict[str, str]:
    return {"src": source, "dest": destination}


@walk(
    "config, copies",
    [
        ({}, []),
        ({"mirror": {"name": "O"}}, ["o.at.w"]),
        ({"mirror": {"name": "OTHER"}}, []),
        ({"mirror": {"name": "O", "external": {"api": "$JS.hub.API"}}}, []),
        ({"mirror": {"name": "O", "filter_subject": "o.out.>"}}, []),
        ({"mirror": {"name": "O", "filter_subject": "o.*.w"}}, ["o.at.w"]),
        ({"sources": [{"name": "A"}, {"name": "O"}]}, ["o.at.w"]),
        ({"sources": [{"name": "O", "subject_transforms": [transform("o.out.>", "q.>")]}]}, []),
        ({"sources": [{"name": "O", "subject_transforms": [transform("o.at.*", "")]}]}, ["o.at.w"]),
        ({"sources": [{"name": "O", "subject_transforms": [transform("o.at.*", "p.{{wildcard(1)}}.x")]}]}, ["p.*.x"]),
        ({"sources": [{"name": "O", "subject_transforms": [transform("o.at.*", "p.$1")]}]}, ["p.*"]),
        ({"sources": [{"name": "O", "subject_transforms": [transform("", "p-{{ partition(3,1) }}.$K")]}]}, ["*.$K"]),
        ({"sources": [{"name": "O", "subject_transforms": [transform("o.>", "p.{{split(1,-)}}.x")]}]}, ["p.>"]),
        ({"mirror": {"name": "O"}, "subject_transform": transform("o.>", "z.>")}, ["z.>"]),
        ({"mirror": {"name": "O"}, "subject_transform": transform("a.>", "z.>")}, ["o.at.w"]),
        (
            {
                "mirror": {"name": "O", "subject_transforms": [transform("o.>", "p.>")]},
                "subject_transform": transform("p.a", "z"),
            },
            ["p.>", "z"],
        ),
    ],
)
def test_a_stream_copies_what_its_filters_and_transforms_take(config: dict[str, Any], copies: list[str]) -> None:
    assert parse_stream_state(answer(config={"name": "S", **config})).copies_of("O", "o.at.w") == copies
