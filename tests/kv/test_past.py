"""`Past`: the table of docs/key-value.md ("Reads of the past"), of which test_model.py has random histories."""

from datetime import UTC, datetime, timedelta
from typing import Any

from jetstream_ext.kv.entries import Row, Subjects
from jetstream_ext.kv.history import Past
from jetstream_ext.protocol.subjects import matcher

ALL = Subjects("B", "$KV.B.", matcher([">"]))
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
DELETE = {"KV-Operation": "DEL"}
PURGE = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
MARKER = {"Nats-Marker-Reason": "MaxAge", "Nats-Rollup": "sub"}
EMPTIED = {"Nats-Rollup": "all"}


def message(seq: int, key: str = "a", headers: dict[str, str] | None = None) -> Row:
    time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seq)
    return seq, f"$KV.B.{key}", b"%d" % seq, headers or {}, time


def first(expected: int, seq: int = 5) -> Row:
    """A message that says which revision of the key it replaced."""
    return message(seq, headers={EXPECTED: str(expected)})


def test_oldest_message_decides_if_none_is_old_enough() -> None:
    """At revision 4, of which messages are missing; with `expire`, messages may have expired."""
    of_another = message(5, headers={EXPECTED: "0", f"{EXPECTED}-Subject": "$KV.B.other"})
    for history, after, unavailable, with_expire in (
        (1, [message(5)], True, True),
        (1, [first(0)], False, False),
        (1, [first(3)], True, True),
        (1, [of_another], True, True),
        (3, [message(5)], False, True),
        (3, [message(5), message(6)], False, True),
        (3, [message(5), message(6), message(7)], True, True),
        (3, [message(5), message(6), message(5), message(6)], False, True),  # read twice
        (3, [first(0), message(6), message(7)], False, False),
        (3, [first(2)], True, True),
        (3, [message(5, headers=PURGE)], True, True),
        (3, [message(5, headers=MARKER)], True, True),
        (3, [message(5, headers=EMPTIED)], True, True),
        (3, [message(5, headers=DELETE)], False, True),
        (3, [message(5, headers={"Nats-Rollup": "sub", EXPECTED: "0"})], True, True),
        (0, [message(n) for n in range(5, 90)], False, True),
    ):
        past = Past(ALL, revision=4, history=history)
        past.feed(after)
        past.feed([message(2, "held")])
        assert past.uncertain(()), after

        def judge(past: Past = past, **facts: Any) -> tuple[str, ...]:
            facts = {"named": (), "wild": True, "missing": True, "lost": False} | facts
            verdict = past.verdict(**facts)
            assert {key: entry.revision for key, entry in verdict.entries.items()} == {"held": 2}
            assert verdict.complete == (not facts["missing"] or not facts["wild"])
            assert verdict.lost == (facts["missing"] and facts["wild"] and facts["lost"])
            return verdict.unavailable

        assert judge() == (("a",) if unavailable else ()), (history, after)
        assert judge(expire=True) == (("a",) if with_expire else ()), (history, after)
        assert judge(missing=False, lost=True) == (), after
        # Where keys may have vanished, no named key is known not to have existed; nor is one without messages ever.
        assert judge(named=("a", "gone", "held"), wild=False, lost=True) == ("a", "gone"), after
        assert "gone" in judge(named=("gone",))


def test_what_explains_missing_sequences() -> None:
    """The histories of stored keys, and what says what it replaced."""
    for history, messages, explained in (
        (2, [message(3, "b"), message(4, "c"), message(6, "b"), message(7)], 3),
        (2, [message(3, "b"), message(6, "b"), message(8, "d", PURGE)], 8),
        (1, [first(0, 8)], 0),
        (1, [first(4, 7)], 4),
        (1, [message(6)], 6),
        (1, [message(5, "x", EMPTIED), message(6)], 6),
        (3, [message(5, "x", EMPTIED), message(6)], 5),
        (3, [message(9, "x", EMPTIED), message(10)], 0),
    ):
        past = Past(ALL, revision=8, history=history)
        past.feed(messages, log=True)
        assert past.accounts_for() == explained, (history, messages)
        assert past.emptied == (messages[0][0] == 9)
