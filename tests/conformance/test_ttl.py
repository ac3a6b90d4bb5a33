"""Expiry by TTL and by age, and delete markers. These tests wait for the real clock, so they are few."""

import time
from typing import Any

SECOND = 1_000_000_000


def test_ttl_and_max_age_expire_the_same_messages(pair: Any, headers: Any) -> None:
    streams: dict[str, dict[str, Any]] = {
        "PLAIN": {},
        "AGE": {"max_age": SECOND, "duplicate_window": SECOND},
        "TTL": {"allow_msg_ttl": True},
        "BOTH": {"allow_msg_ttl": True, "max_age": SECOND},
        "MARKED": {"subject_delete_marker_ttl": 60 * SECOND},
        "HISTORY": {"allow_msg_ttl": True, "max_msgs_per_subject": 5},
    }
    if not pair.since("2.11.0"):
        streams = {"AGE": streams["AGE"]}
    for name, config in streams.items():
        pair.stream(pair.named(name), allow_direct=True, **config)
        low = name.lower()
        ttl = config.get("allow_msg_ttl") or "subject_delete_marker_ttl" in config
        pair.publish(f"{low}.a", b"old", header=headers(Nats_Msg_Id="a"))
        pair.publish(f"{low}.b", b"1s", header=headers(**({"Nats_TTL": "1"} if ttl else {})))
        pair.publish(f"{low}.c", b"10s", header=headers(**({"Nats_TTL": "10s"} if ttl else {})))
        pair.publish(f"{low}.d", b"never", header=headers(**({"Nats_TTL": "never"} if ttl else {})))
        pair.publish(f"{low}.e", b"under", header=headers(X="y"))
        pair.publish(f"{low}.e", b"over", header=headers(**({"Nats_TTL": "1"} if ttl else {}), X="z"))
    time.sleep(1.6)
    for name in streams:
        low = name.lower()
        details = {"subjects_filter": ">", "deleted_details": True}
        # A server may be late.
        pair.eventually(lambda name=name: pair.api(f"STREAM.INFO.{pair.named(name)}", details))  # noqa: B023
        for key in "abcde":
            pair.publish(f"$JS.API.DIRECT.GET.{pair.named(name)}.{low}.{key}", wait=1)
        pair.publish(f"{low}.a", b"again", header=headers(Nats_Msg_Id="a"))
        pair.publish(f"{low}.b", b"new", header=headers(Nats_Expected_Last_Subject_Sequence=0))


def test_max_age_expires_delete_markers(newest: Any) -> None:
    newest.stream(newest.named("A"), subject_delete_marker_ttl=60 * SECOND, max_age=SECOND, max_msgs_per_subject=1)
    newest.publish("a.x", b"1")
    newest.publish("a.y", b"2")

    def expired(answer: Any) -> bool:
        return (answer["state"]["messages"], answer["state"]["last_seq"]) == (0, 4)

    newest.ask_until(f"$JS.API.STREAM.INFO.{newest.named('A')}", expired)
    newest.api(f"STREAM.INFO.{newest.named('A')}", {"subjects_filter": ">"})


def test_delete_marker_has_its_reason(newest: Any, headers: Any) -> None:
    name = newest.named("M")
    newest.stream(
        name, subject_delete_marker_ttl=60 * SECOND, max_age=60 * SECOND, allow_direct=True, max_msgs_per_subject=1
    )
    newest.publish("m.a", b"value", header=headers(Nats_TTL=1, Other="x"))
    newest.ask_until(f"$JS.API.STREAM.INFO.{name}", lambda answer: answer["state"]["last_seq"] == 2)
    (marker,) = newest.publish(f"$JS.API.DIRECT.GET.{name}.m.a", wait=1)
    assert marker.payload == b""
    assert marker.header.startswith(b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\nNats-TTL: 1m0s\r\nNats-Rollup: sub\r\n")


def test_update_changes_the_expiry_of_stored_messages(newest: Any) -> None:
    changes: dict[str, dict[str, Any]] = {"U": {"max_age": SECOND}, "V": {"allow_msg_ttl": True}}
    for letter, change in changes.items():
        name, subject = newest.named(letter), letter.lower()
        newest.stream(name, max_age=3600 * SECOND)
        newest.publish(f"{subject}.a", b"x")
        config = {"name": name, "subjects": [f"{subject}.>"], "storage": "memory", "max_age": 3600 * SECOND}
        newest.api(f"STREAM.UPDATE.{name}", config | change)
    time.sleep(1.4)  # one of the two does not expire, so there is no event to wait for
    for letter in changes:
        newest.eventually(
            lambda letter=letter: newest.api(f"STREAM.INFO.{newest.named(letter)}")
        )  # a server may be late
