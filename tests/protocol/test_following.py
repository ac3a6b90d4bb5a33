"""The phases of a live table, and the doubts that let it load again."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.following import PHASES, Doubt, Event, Mark, Phase, find_doubt, mark_of, settings_of

TIME = datetime(2026, 1, 1, tzinfo=UTC)


def state(first: int, last: int, messages: int, keys: int = 10, **config: Any) -> StreamState:
    return StreamState(
        "S", "2026-01-01T00:00:00Z", config, first_seq=first, last_seq=last, messages=messages, num_subjects=keys
    )


def test_a_table_shows_nothing_new_before_the_leader_has_confirmed_it() -> None:
    """Every way to `FOLLOWING` is a load, or a look at the leader that confirms what the table has; nothing leaves `ENDED`."""
    for phase in Phase:
        for event in Event:
            after = PHASES.get((phase, event), phase)
            if after is Phase.FOLLOWING and phase is not Phase.FOLLOWING:
                assert event in (Event.LOADED, Event.CONFIRMED)
                assert (event is Event.CONFIRMED) == (phase is Phase.CHECKING)
            if event is Event.UNSURE:
                assert after is not Phase.FOLLOWING
            if event is Event.DOUBTED and phase in (Phase.CHECKING, Phase.FOLLOWING):
                assert after is Phase.RELOADING
            if phase is Phase.ENDED or event is Event.ENDED:
                assert after is Phase.ENDED


ALL, PART = {"keys": 10, "partial": False}, {"keys": None, "partial": True}
ONE, FIVE, TTL, ROLLUP = (
    {"max_msgs_per_subject": 1},
    {"max_msgs_per_subject": 5},
    {"allow_msg_ttl": True},
    {"allow_rollup_hdrs": True},
)


@pytest.mark.parametrize(
    ("what", "now", "config", "table", "found"),
    [
        ("nothing", (1, 20, 20), {}, ALL, None),
        ("writes", (1, 25, 25), {}, ALL, None),
        ("a limit or a purge from the front", (8, 25, 18), {}, PART, None),
        ("one message", (1, 20, 19), {}, ALL, Doubt.REMOVED),
        ("the newest one, and another one is written", (1, 21, 20), {}, PART, Doubt.REMOVED),
        ("all", (21, 20, 0), {}, PART, None),
        ("writes that replace", (1, 25, 20), ONE, PART, Doubt.PERHAPS),
        ("writes that replace in a table of everything", (1, 25, 20, 10), ONE, ALL, None),
        ("a key of a table of everything", (1, 25, 19, 9), ONE, ALL, Doubt.KEYS),
        ("more than writes can replace", (1, 25, 19), ONE, PART, Doubt.REMOVED),
        ("a message that a write can explain", (1, 22, 21), FIVE, ALL, Doubt.PERHAPS),
        ("a rollup", (1, 21, 3), ROLLUP, ALL, Doubt.PERHAPS),
        ("a rollup of a bucket", (1, 21, 15), ROLLUP | FIVE, ALL, Doubt.REMOVED),
        ("a message, while a limit removes the first ones", (15, 25, 10), {}, PART, Doubt.REMOVED),
        ("a message with a TTL", (1, 20, 19), TTL, PART | {"current": True}, Doubt.PERHAPS),
        ("a message with a TTL, not seen", (1, 20, 19), TTL, PART, Doubt.REMOVED),
        ("a message with a TTL, of a table of everything", (1, 20, 19), TTL, ALL | {"current": True}, Doubt.REMOVED),
    ],
)
def test_what_was_removed(
    what: str, now: tuple[int, ...], config: dict[str, Any], table: dict[str, Any], found: Doubt | None
) -> None:
    before = state(1, 20, 20, **config)
    assert find_doubt(before, state(*now, **config), **({"current": False} | table)) is found, what


def test_sequences_that_a_mirror_leaves_out_are_no_removal() -> None:
    before, now = (replace(state(1, last, last), origin={"name": "S"}) for last in (20, 30))
    assert find_doubt(before, replace(now, messages=22), **PART, current=True) is Doubt.PERHAPS


def test_other_limits_or_subjects() -> None:
    before = state(1, 20, 20, subjects=["a"], max_age=0)
    for config in ({"subjects": ["a", "b"]}, {"subjects": ["a"], "max_age": 1}, {"subjects": ["a"], **TTL}):
        assert settings_of(before) != settings_of(state(1, 20, 20, **config))
    assert settings_of(before) == settings_of(state(1, 20, 20, subjects=["a"], description="new"))


def test_what_is_missing_although_nothing_was_written_was_removed() -> None:
    """Also where a write could have removed any number of messages."""
    before, now = (state(1, 20, left, allow_rollup_hdrs=True) for left in (20, 19))
    assert find_doubt(before, now, **ALL, current=True) is Doubt.REMOVED


def test_a_mark_survives_its_note() -> None:
    before = replace(state(1, 20, 19, subjects=["a"], max_msgs=5), now=TIME, last_time=TIME)
    mark = mark_of("S", Mark(before, (20, TIME)).note())
    assert (mark.newest, mark.state.last_time) == ((20, TIME), TIME)
    assert find_doubt(mark.state, before, **ALL, current=True) is None
    assert find_doubt(mark.state, replace(before, messages=18), **ALL, current=True) is Doubt.REMOVED
    with pytest.raises(KeyError):
        mark_of("S", {})
