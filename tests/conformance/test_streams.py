"""The API of streams, and publishing with every check."""

import base64
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest


@pytest.mark.since("2.11.11")
def test_account_info_reports_streams_and_usage(pair: Any) -> None:
    pair.api("INFO")
    pair.stream(storage="file")
    pair.publish("s.a", b"x")
    assert pair.api("INFO")["streams"] == 1


def test_streams_are_created_listed_and_deleted(pair: Any) -> None:
    pair.stream()
    pair.stream(pair.named("F"), storage="file", max_msgs=5, description="d <&>", metadata={"a": "b"})
    for _ in range(3):
        pair.publish("s.a", b"abc")
    assert pair.api(f"STREAM.INFO.{pair.name}")["state"]["messages"] == 3
    pair.api("STREAM.INFO.nope")
    pair.api("STREAM.NAMES")
    pair.api("STREAM.NAMES", {"subject": "f.x"})
    pair.api("STREAM.NAMES", {"subject": "zz"})
    pair.api("STREAM.LIST", {"offset": 1})
    pair.api(f"STREAM.CREATE.{pair.name}", {"name": pair.name, "subjects": ["s.>"], "storage": "memory"})
    pair.api(f"STREAM.CREATE.{pair.name}", {"name": pair.name, "subjects": ["other"], "storage": "memory"})
    pair.api("STREAM.CREATE.T", {"name": "T", "subjects": ["s.a"]})
    pair.forget(pair.name)
    pair.api(f"STREAM.DELETE.{pair.name}", {"x": 1})
    pair.api(f"STREAM.DELETE.{pair.name}")
    pair.api(f"STREAM.DELETE.{pair.name}")
    pair.publish("s.a", wait=1)


CONFIGURATIONS: list[dict[str, Any]] = [
    {"name": "T.x"},
    {"name": "other"},
    {"name": "T", "subjects": ["a..b"]},
    {"name": "T", "subjects": ["a", "a"]},
    {"name": "T", "subjects": ["a.*", "a.b"]},
    {"name": "T", "subjects": [">"]},
    {"name": "T", "subjects": ["$JS.API.x"]},
    {"name": "T", "num_replicas": 3},
    {"name": "T", "num_replicas": -1},
    {"name": "T", "max_age": 5},
    {"name": "T", "max_age": -5},
    {"name": "T", "max_age": 1_000_000_000},
    {"name": "T", "max_age": 1_000_000_000, "duplicate_window": 2_000_000_000},
    {"name": "T", "duplicate_window": 5},
    {"name": "T", "deny_purge": True, "allow_rollup_hdrs": True},
    {"name": "T", "subject_delete_marker_ttl": 5},
    {"name": "T", "subject_delete_marker_ttl": -5},
    {"name": "T", "subject_delete_marker_ttl": 5_000_000_000},
    {"name": "T", "allow_msg_ttl": True},
    {"name": "T", "allow_atomic": True},
    {"name": "T", "allow_batched": True},
    {"name": "T", "retention": "odd"},
    {"name": "T", "storage": "odd"},
    {"name": "T", "mirror_direct": True},
    {"name": "T", "limits_ttl": 5},
    {"name": "T", "nonsense": 5},
    {"name": "T", "max_msgs": "5"},
    {"name": "T", "first_seq": 100},
    {"name": "T", "no_ack": True},
    {"name": "T", "max_msgs": -7, "max_bytes": -7},
    {"name": "T", "mirror": {"name": "O"}, "subjects": ["t"]},
    {"name": "T", "mirror": {"name": "O"}, "allow_atomic": True},
    {"name": "T", "mirror": {"name": "O"}, "allow_batched": True},
    {"name": "T", "mirror": {"name": "O"}, "subject_delete_marker_ttl": 5_000_000_000},
    {"name": "T", "mirror": {"name": "O"}, "first_seq": 5},
    {"name": "T", "sources": [{"name": "O"}, {"name": "O"}]},
    {"name": "T", "sources": [{"name": ""}]},
    {"name": "T", "description": None, "max_msgs": None},
    {},
]


@pytest.mark.since("2.12.8")
def test_stream_configurations_are_checked_alike(pair: Any) -> None:
    for number, each in enumerate(CONFIGURATIONS):
        name = f"{pair.name}_{number}"
        config = {**each, "name": name} if each.get("name") == "T" else each
        if config.get("subjects") == ["t"]:
            config = {**config, "subjects": [f"t{number}"]}
        pair.create(name, config)
        for raw in pair._clients:
            raw.publish(f"$JS.API.STREAM.DELETE.{name}")


@pytest.mark.since("2.11.11")
def test_malformed_requests_are_refused(pair: Any) -> None:
    pair.stream()
    for payload in (b"", b"x", b"[]", b"{", b"null", b'"a"'):
        for subject in (
            "STREAM.CREATE.T",
            f"STREAM.INFO.{pair.name}",
            "STREAM.NAMES",
            f"STREAM.MSG.GET.{pair.name}",
            f"STREAM.PURGE.{pair.name}",
        ):
            pair.api(subject, payload)


CHANGES: list[dict[str, Any]] = [
    {"max_msgs": 2},
    {"max_msgs_per_subject": 1},
    {"subjects": ["s.>", "t"]},
    {"storage": "file"},
    {"retention": "interest"},
    {"retention": "workqueue"},
    {"deny_delete": True},
    {"allow_direct": True},
    {"allow_msg_ttl": True},
    {"name": "Z"},
    {"num_replicas": 3},
    {"max_age": 3_600_000_000_000},
    {"duplicate_window": 1_000_000_000},
    {"description": "new"},
]


@pytest.mark.since("2.14.6")
def test_stream_updates_are_checked_alike(pair: Any) -> None:
    def check(change: dict[str, Any]) -> None:
        pair.stream(duplicate_window=2_000_000_000)
        for subject in ("s.a", "s.b", "s.a", "s.c"):
            pair.publish(subject, b"x")
        config = {"name": pair.name, "subjects": ["s.>"], "storage": "memory", "duplicate_window": 2_000_000_000}
        pair.api(f"STREAM.UPDATE.{pair.name}", config | change)
        if change.get("retention") == "interest":
            pair.forget(pair.name)
        pair.api(f"STREAM.INFO.{pair.name}")
        pair.api("STREAM.UPDATE.nope", {"name": "nope"})

    # Before 2.15, such an update keeps the messages that no consumer needs.
    pair.each([each for each in CHANGES if pair.since("2.15.0") or each.get("retention") != "interest"], check)


STORAGES = ("memory", "file")


@pytest.mark.since("2.14.6")
def test_purge_below_sequence_1(pair: Any) -> None:
    def check(cell: tuple[str, str]) -> None:
        storage, pattern = cell
        pair.stream(storage=storage)
        for subjects in ((), ("s.a", "s.b", "s.a")):
            for subject in subjects:
                pair.publish(subject, b"x")
            pair.api(f"STREAM.PURGE.{pair.name}", {"seq": 1, "filter": pattern})
            pair.api(f"STREAM.INFO.{pair.name}", {"subjects_filter": ">"})

    pair.each(product(STORAGES, ("", ">", "s.>", "s.a")), check)


@pytest.mark.since("2.14.6")
def test_message_that_fills_the_stream_exactly(pair: Any) -> None:
    def check(config: dict[str, Any]) -> None:
        pair.stream(discard="new", **config)
        for _ in range(4):
            pair.publish("s.a", b"x")
        pair.api(f"STREAM.INFO.{pair.name}")

    pair.each([{"storage": "memory", "max_bytes": 60}, {"storage": "file", "max_bytes": 102}], check)


@pytest.mark.since("2.14.6")
def test_purge_keeps_the_last_messages(pair: Any) -> None:
    def check(cell: tuple[str, str, tuple[int, ...]]) -> None:
        storage, pattern, gone = cell
        pair.stream(storage=storage)
        for _ in range(5):
            pair.publish("s.a", b"x")
        for seq in gone:
            pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": seq, "no_erase": True})
        pair.api(f"STREAM.PURGE.{pair.name}", {"keep": 2, "filter": pattern})
        pair.api(f"STREAM.INFO.{pair.name}", {"subjects_filter": ">"})

    pair.each(product(STORAGES, ("", ">", "s.>"), ((2, 4), (5,))), check)


def test_purge_removes_the_same_messages(pair: Any) -> None:
    pair.stream()
    for index in range(12):
        pair.publish(f"s.{'abc'[index % 3]}", b"x")
    pair.api(f"STREAM.PURGE.{pair.name}", {"filter": "s.a", "keep": 1})
    pair.api(f"STREAM.INFO.{pair.name}", {"deleted_details": True})
    pair.api(f"STREAM.PURGE.{pair.name}", {"seq": 5})
    pair.api(f"STREAM.PURGE.{pair.name}", {"seq": 5, "keep": 2})
    pair.api(f"STREAM.PURGE.{pair.name}", {"filter": "s.b", "seq": 9})
    pair.api(f"STREAM.PURGE.{pair.name}", {"keep": 2})
    pair.api(f"STREAM.PURGE.{pair.name}", {"seq": 1})
    pair.api(f"STREAM.INFO.{pair.name}", {"subjects_filter": ">"})
    pair.api(f"STREAM.PURGE.{pair.name}")
    pair.api(f"STREAM.INFO.{pair.name}")
    pair.api(f"STREAM.PURGE.{pair.name}", {"seq": 100})
    pair.publish("s.a", b"x")
    pair.api(f"STREAM.INFO.{pair.name}")
    pair.api("STREAM.PURGE.nope")


def test_single_messages_are_read_and_deleted(pair: Any, headers: Any) -> None:
    pair.stream()
    for index in range(5):
        pair.publish(f"s.{'ab'[index % 2]}", b"x" * index, header=headers(A="b") if index == 3 else b"")
    for request in (
        {"seq": 1},
        {"seq": 4},
        {"seq": 9},
        {"last_by_subj": "s.a"},
        {"last_by_subj": "s.*"},
        {"next_by_subj": "s.b"},
        {"next_by_subj": "s.b", "seq": 3},
        {"last_by_subj": "zz"},
        {"seq": 1, "last_by_subj": "s.a"},
        {"seq": -1},
        {},
        {"x": 1},
    ):
        pair.api(f"STREAM.MSG.GET.{pair.name}", request)
    if pair.since("2.12.0"):
        pair.api(f"STREAM.MSG.GET.{pair.name}", {"seq": 4, "no_hdr": True})
    if pair.since("2.11.0"):
        pair.api(f"STREAM.MSG.GET.{pair.name}", {"seq": 1, "batch": 2})
    pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 2})
    pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 2})
    pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 99})
    pair.api(f"STREAM.MSG.DELETE.{pair.name}")
    pair.api("STREAM.MSG.DELETE.nope", {"seq": 2})
    pair.api("STREAM.MSG.GET.nope", {"seq": 2})
    pair.api(f"STREAM.INFO.{pair.name}", {"deleted_details": True})
    answer = pair.api(f"STREAM.MSG.GET.{pair.name}", {"seq": 4})
    assert base64.b64decode(answer["message"]["data"]) == b"xxx"


def test_denied_operations_are_refused(pair: Any) -> None:
    pair.stream(deny_delete=True, deny_purge=True)
    pair.publish("s.a", b"x")
    pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 1})
    pair.api(f"STREAM.PURGE.{pair.name}")


LIMITS: list[dict[str, Any]] = [
    {"max_msgs": 3},
    {"max_bytes": 120},
    {"max_msgs_per_subject": 1},
    {"max_msgs": 3, "discard": "new"},
    {"max_bytes": 120, "discard": "new"},
    {"max_msgs_per_subject": 2, "discard": "new"},
    {"max_msgs": 2, "max_msgs_per_subject": 1, "discard": "new"},
    {"max_msg_size": 20},
]


def test_limits_remove_or_refuse_the_same_messages(pair: Any, headers: Any) -> None:
    def check(cell: tuple[str, dict[str, Any]]) -> None:
        storage, limits = cell
        pair.stream(storage=storage, **limits)
        for index in range(8):
            header = headers(A="b") if index % 4 == 3 else b""
            pair.publish(f"s.{'abc'[index % 3]}", b"x" * (index * 3), header=header)
        pair.api(f"STREAM.INFO.{pair.name}", {"subjects_filter": "s.*", "deleted_details": True})

    pair.each(product(STORAGES, LIMITS), check)


EXPECTATIONS: list[dict[str, Any]] = [
    {"Nats_Expected_Stream": "S"},
    {"Nats_Expected_Stream": "T"},
    {"Nats_Expected_Last_Sequence": 3},
    {"Nats_Expected_Last_Sequence": 2},
    {"Nats_Expected_Last_Sequence": "x"},
    {"Nats_Expected_Last_Sequence": ""},
    {"Nats_Expected_Last_Subject_Sequence": 3},
    {"Nats_Expected_Last_Subject_Sequence": 1},
    {"Nats_Expected_Last_Subject_Sequence": 0},
    {"Nats_Expected_Last_Subject_Sequence": 2, "Nats_Expected_Last_Subject_Sequence_Subject": "s.b"},
    {"Nats_Expected_Last_Subject_Sequence": 3, "Nats_Expected_Last_Subject_Sequence_Subject": "s.>"},
    {"Nats_Expected_Last_Subject_Sequence_Subject": "s.b"},
    {"Nats_Expected_Last_Msg_Id": "id3"},
    {"Nats_Expected_Last_Msg_Id": "other"},
    {"Nats_Msg_Id": "id1"},
    {"Nats_Msg_Id": "new"},
    {"Nats_Msg_Id": ""},
    {"nats_msg_id": "id1"},
    {"Nats_Msg_Id": "id1", "Nats_Expected_Stream": "T"},
    {"Nats_Msg_Id": "id1", "Nats_Expected_Last_Sequence": 1},
    {"Nats_Msg_Id": "id1", "Nats_Expected_Last_Msg_Id": "x"},
    {"Nats_Expected_Last_Sequence": 1, "Nats_Expected_Last_Subject_Sequence": 9},
    {"Nats_Expected_Last_Sequence": 1, "Nats_Expected_Last_Msg_Id": "x"},
    {"Nats_Rollup": "sub"},
    {"Nats_Rollup": "all"},
    {"Nats_Rollup": "odd"},
    {"Nats_Stream_Source": "O 1"},
    {"Nats_Required_Api_Level": 99},
    {"Nats_TTL": "5"},
    {"Nats_TTL": "x"},
]


@pytest.mark.since("2.12.8")
def test_expectations_are_checked_in_the_same_order(pair: Any, headers: Any) -> None:
    rollups = pair.named("T")
    pair.stream(allow_rollup_hdrs=False)
    pair.stream(rollups, allow_rollup_hdrs=True)
    for lines in EXPECTATIONS:
        for name in (pair.name, rollups) if "Nats_Rollup" in lines else (pair.name,):
            prefix = name[0].lower()
            pair.api(f"STREAM.PURGE.{name}")
            first = pair.api(f"STREAM.INFO.{name}")["state"]["last_seq"]
            for index, subject in enumerate("aba", 1):
                pair.publish(f"{prefix}.{subject}", header=headers(Nats_Msg_Id=f"{name}{first}.{index}"))
            shown = {key: _shifted(value, first, name) for key, value in lines.items()}
            pair.publish(f"{prefix}.a", b"x", header=headers(**shown))
            pair.api(f"STREAM.INFO.{name}", {"subjects_filter": ">"})


def _shifted(value: Any, first: int, name: str) -> Any:
    """Adapt a value to a stream that starts after `first`: its name, sequences and message ids."""
    if value == "S":
        return name
    if isinstance(value, int) and 0 < value < 99:
        return value + first
    if isinstance(value, str) and value.startswith("id"):
        return f"{name}{first}.{value[2:]}"
    return value.replace("s.", f"{name[0].lower()}.") if isinstance(value, str) else value


TTLS = [
    "5",
    "05",
    "1h30m",
    "90s",
    "1500ms",
    "never",
    "NEVER",
    "9223372036854775807",
    "0",
    "0s",
    "-1",
    "999ms",
    "1d",
    "5.0",
    "+5",
    "abc",
    "1h,2h",
    "1_000",
    "9223372036854775808",
    "1.5h",
    "+1s",
    "-1s",
    "1us",
    "1e3s",
    "2562047h48m",
]


def test_ttl_values_are_accepted_or_refused_alike(newest: Any, headers: Any) -> None:
    def check(enabled: bool) -> None:
        newest.stream(allow_msg_ttl=enabled)
        for ttl in (*TTLS, "", " 7", "5 ", "1m 1s"):
            newest.publish("s.a", header=headers(Nats_TTL=ttl))

    newest.each([True, False], check)


def test_ttl_is_raised_to_the_marker_ttl(pair: Any, headers: Any) -> None:
    for letter, config in (("S", {}), ("T", {"max_msgs_per_subject": 1})):
        name, subject = pair.named(letter), f"{letter.lower()}.a"
        pair.stream(name, subject_delete_marker_ttl=10_000_000_000, allow_direct=True, **config)
        pair.publish(subject, header=headers(Nats_TTL=2, B="c"))
        pair.publish(f"$JS.API.DIRECT.GET.{name}.{subject}", wait=1)


def test_no_ack_stream_stores_without_an_answer(newest: Any) -> None:
    newest.stream(no_ack=True)
    newest.quiet = 0.05
    assert newest.publish("s.a", b"x") == []
    newest.ask_until(f"$JS.API.STREAM.INFO.{newest.name}", lambda answer: answer["state"]["messages"] == 1)


@pytest.mark.since("2.12.8")
def test_a_status_line_is_not_stored(pair: Any) -> None:
    pair.stream(allow_direct=True)
    pair.publish("s.a", b"x", header=b"NATS/1.0 204 EOB\r\nA: b\r\n\r\n")
    pair.publish("s.b", b"x", header=b"NATS/1.0 204 EOB\r\n\r\n")
    pair.publish(f"$JS.API.DIRECT.GET.{pair.name}.s.a", wait=1)
    pair.publish(f"$JS.API.DIRECT.GET.{pair.name}.s.b", wait=1)


# Each with a value that the server would refuse, or notice the second time.
INSTRUCTIONS: dict[str, object] = {
    "Nats-Msg-Id": "a",
    "Nats-Expected-Stream": "other",
    "Nats-Expected-Last-Sequence": 999,
    "Nats-Expected-Last-Subject-Sequence": 999,
    "Nats-Expected-Last-Msg-Id": "other",
    "Nats-TTL": "bad",
    "Nats-Rollup": "bad",
    "Nats-Incr": "+1",
    "Nats-Batch-Id": "b",
    "Nats-Batch-Sequence": 7,
    "Nats-Batch-Commit": "1",
    "Nats-Schedule": "bad",
}


def test_headers_are_instructions_only_with_exactly_their_names(pair: Any, headers: Any) -> None:
    def check(cell: tuple[str, Callable[[str], str]]) -> None:
        name, respelled = cell
        config: dict[str, Any] = {"allow_rollup_hdrs": True, "allow_direct": True}
        config |= {"allow_msg_ttl": True} if pair.since("2.11.0") else {}
        config |= {"allow_atomic": True} if pair.since("2.12.0") else {}
        pair.stream(**config)
        lines = {respelled(name): INSTRUCTIONS[name]}
        for count in (1, 2):
            [stored] = pair.publish("s.a", b"x", header=headers(**lines))
            assert stored.json == {"stream": pair.name, "seq": count}
        if pair.since("2.12.0"):
            batch = {"Nats-Batch-Id": "batch"}
            pair.publish("s.a", b"x", header=headers(**batch, Nats_Batch_Sequence=1, **lines))
            last = headers(**batch, Nats_Batch_Sequence=2, Nats_Batch_Commit=1, **lines)
            [stored] = pair.publish("s.a", b"x", header=last)
            assert (stored.json["seq"], stored.json["count"]) == (4, 2)

    pair.each(product(INSTRUCTIONS, (str.lower, str.upper)), check)


def test_interest_stream_without_consumers_stores_nothing(newest: Any, headers: Any) -> None:
    newest.stream(retention="interest")
    newest.publish("s.a", b"x", header=headers(Nats_Msg_Id="a"))
    newest.publish("s.a", b"x", header=headers(Nats_Msg_Id="a"))
    newest.publish("s.a", b"x")
    newest.api(f"STREAM.INFO.{newest.name}")


def test_unknown_api_subjects_get_no_answer(newest: Any) -> None:
    for subject in ("NOPE", f"STREAM.NOPE.{newest.name}", "STREAM.INFO", f"STREAM.INFO.{newest.name}.x"):
        assert newest.api(subject, timeout=0.1) is None
    assert newest.api(f"CONSUMER.MSG.NEXT.{newest.name}.c").status == "503"
    assert newest.api(f"DIRECT.GET.{newest.name}").status == "503"


def test_message_larger_than_the_stream_reaches_no_consumer(pair: Any) -> None:
    pair.stream(max_bytes=60)
    config = {"ack_policy": "explicit", "durable_name": "C"}
    pair.api(f"CONSUMER.CREATE.{pair.name}.C", {"stream_name": pair.name, "config": config})
    pair.publish("s.a")
    pair.publish(f"$JS.API.CONSUMER.MSG.NEXT.{pair.name}.C", b'{"batch": 2}')
    pair.publish("s.a", b"x" * 60)
    pair.api(f"STREAM.INFO.{pair.name}")
