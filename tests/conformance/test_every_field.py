"""Every field and header of the newest server: the reference server models it, or refuses it by name.

The names come from the real server itself: its binary has the names of all JSON fields, and with each of them a request is
either refused for an unknown field or not. So a new release that knows another field fails here.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jetstream_ext.testing.process import find_server

SECOND = 1_000_000_000
NOT_MODELLED = "not modelled by the reference server"
STREAM, CONSUMER = "STREAM.CREATE.X", "CONSUMER.CREATE.S.C"

Wrap = Callable[[Any], dict[str, Any]]
# Where fields can stand: the request, and how the object with the fields is wrapped.
PLACES: dict[str, tuple[str, Wrap]] = {
    "stream": (STREAM, lambda fields: fields),
    "mirror": (STREAM, lambda fields: {"mirror": fields}),
    "source": (STREAM, lambda fields: {"sources": [fields]}),
    "consumer of a source": (STREAM, lambda fields: {"sources": [{"consumer": fields}]}),
    "consumer request": (CONSUMER, lambda fields: fields),
    "consumer": (CONSUMER, lambda fields: {"config": fields}),
    "info": ("STREAM.INFO.X", lambda fields: fields),
    "purge": ("STREAM.PURGE.X", lambda fields: fields),
    "delete": ("STREAM.MSG.DELETE.X", lambda fields: fields),
    "get": ("STREAM.MSG.GET.X", lambda fields: fields),
}
# The objects of these are refused as a whole.
REFUSED_OBJECTS: dict[str, tuple[str, Wrap]] = {
    "external": (STREAM, lambda fields: {"mirror": {"external": fields}}),
    "subject_transforms": (STREAM, lambda fields: {"mirror": {"subject_transforms": [fields]}}),
    "placement": (STREAM, lambda fields: {"placement": fields}),
    "subject_transform": (STREAM, lambda fields: {"subject_transform": fields}),
    "republish": (STREAM, lambda fields: {"republish": fields}),
    "consumer_limits": (STREAM, lambda fields: {"consumer_limits": fields}),
}

# Each modelled field with a test that shows its effect; of the last ones, a client can see nothing but the echo.
MODELLED: dict[str, dict[str, str]] = {
    "stream": {
        "allow_atomic": "test_batch_respects_the_stream_configuration",
        "allow_batched": "test_fast_batch_respects_the_stream_configuration",
        "allow_direct": "test_request_without_allow_direct_gets_503",
        "allow_msg_ttl": "test_ttl_values_are_accepted_or_refused_alike",
        "allow_rollup_hdrs": "test_expectations_are_checked_in_the_same_order",
        "deny_delete": "test_denied_operations_are_refused",
        "deny_purge": "test_denied_operations_are_refused",
        "discard": "test_limits_remove_or_refuse_the_same_messages",
        "duplicate_window": "test_ttl_and_max_age_expire_the_same_messages",
        "first_seq": "test_limits_of_consumers_and_the_first_sequence_have_their_effect",
        "max_age": "test_ttl_and_max_age_expire_the_same_messages",
        "max_bytes": "test_limits_remove_or_refuse_the_same_messages",
        "max_consumers": "test_limits_of_consumers_and_the_first_sequence_have_their_effect",
        "max_msg_size": "test_limits_remove_or_refuse_the_same_messages",
        "max_msgs": "test_limits_remove_or_refuse_the_same_messages",
        "max_msgs_per_subject": "test_limits_remove_or_refuse_the_same_messages",
        "mirror": "test_mirrors_and_sources_copy_the_same_messages",
        "mirror_direct": "test_mirror_keeps_sequences",
        "name": "test_streams_are_created_listed_and_deleted",
        "no_ack": "test_no_ack_stream_stores_without_an_answer",
        "num_replicas": "test_stream_configurations_are_checked_alike",
        "retention": "test_message_is_removed_when_no_consumer_needs_it",
        "sources": "test_mirrors_and_sources_copy_the_same_messages",
        "storage": "test_account_info_reports_streams_and_usage",
        "subject_delete_marker_ttl": "test_delete_marker_has_its_reason",
        "subjects": "test_streams_are_created_listed_and_deleted",
        "compression": "",
        "description": "",
        "metadata": "",
    },
    "consumer": {
        "ack_policy": "test_acknowledgements_change_the_same_state",
        "ack_wait": "test_naks_and_timeouts_redeliver",
        "backoff": "test_backoff_sets_the_times_of_redelivery",
        "deliver_group": "test_push_consumer_of_a_group_delivers_to_the_group",
        "deliver_policy": "test_consumer_configurations_are_checked_alike",
        "deliver_subject": "test_push_consumer_delivers_the_same_messages",
        "durable_name": "test_consumer_api_requests_are_answered_alike",
        "filter_subject": "test_push_consumer_delivers_the_same_messages",
        "filter_subjects": "test_push_consumer_delivers_the_same_messages",
        "flow_control": "test_flow_control_acks_limit_delivery",
        "headers_only": "test_push_consumer_delivers_the_same_messages",
        "idle_heartbeat": "test_idle_push_consumer_sends_heartbeats",
        "inactive_threshold": "test_ephemeral_consumer_without_subscriber_is_deleted",
        "max_ack_pending": "test_max_ack_pending_stops_delivery_until_an_ack",
        "max_deliver": "test_delivery_ends_at_max_deliver_with_an_advisory",
        "max_waiting": "test_pull_requests_above_max_waiting_are_refused",
        "name": "test_consumer_api_requests_are_answered_alike",
        "num_replicas": "test_consumer_configurations_are_checked_alike",
        "opt_start_seq": "test_push_consumer_delivers_the_same_messages",
        "opt_start_time": "test_consumer_configurations_are_checked_alike",
        "description": "",
        "mem_storage": "",
        "metadata": "",
    },
    "source": {
        "consumer": "test_source_copies_through_a_durable_consumer",
        "filter_subject": "test_mirrors_and_sources_copy_the_same_messages",
        "name": "test_mirrors_and_sources_copy_the_same_messages",
        "opt_start_seq": "test_mirrors_and_sources_copy_the_same_messages",
        "opt_start_time": "test_mirrors_and_sources_copy_the_same_messages",
    },
    "consumer of a source": {
        "deliver_subject": "test_source_copies_through_a_durable_consumer",
        "name": "test_source_copies_through_a_durable_consumer",
    },
    "consumer request": {
        "action": "test_consumer_api_requests_are_answered_alike",
        "config": "test_consumer_api_requests_are_answered_alike",
        "stream_name": "test_consumer_api_requests_are_answered_alike",
    },
}
MODELLED["mirror"] = MODELLED["source"]

# Each refused field with values that the server takes, and with those that it treats as absent.
REFUSED: dict[str, dict[str, tuple[dict[str, Any], list[Any]]]] = {
    "stream": {
        "allow_msg_counter": ({"allow_msg_counter": True}, [False]),
        "allow_msg_schedules": ({"allow_msg_schedules": True}, [False]),
        "discard_new_per_subject": (
            {"discard_new_per_subject": True, "discard": "new", "max_msgs_per_subject": 1},
            [False],
        ),
        "consumer_limits": ({"consumer_limits": {"max_ack_pending": 5}}, [{}]),
        "pedantic": ({"pedantic": True}, [False]),
        "persist_mode": ({"persist_mode": "async", "storage": "file"}, ["default", ""]),
        "placement": ({"placement": {"cluster": "east"}}, [{}, {"cluster": "", "tags": []}]),
        "sealed": ({"sealed": True}, [False]),
        "republish": ({"republish": {"src": ">", "dest": "copies.>"}}, []),
        "subject_transform": ({"subject_transform": {"src": "x.>", "dest": "y.>"}}, []),
    },
    "source": {
        "external": ({"external": {"api": "$JS.hub.API", "deliver": "to"}}, []),
        "subject_transforms": ({"subject_transforms": [{"src": "s.>", "dest": "t.>"}]}, [[]]),
    },
    "consumer request": {"pedantic": ({"pedantic": True}, [False])},
    "consumer": {
        "direct": ({"direct": True, "deliver_subject": "out", "ack_policy": "none", "durable_name": ""}, [False]),
        "max_batch": ({"max_batch": 5}, [0]),
        "max_bytes": ({"max_bytes": 5}, [0]),
        "max_expires": ({"max_expires": SECOND}, [0]),
        "pause_until": ({"pause_until": "2100-01-01T00:00:00Z"}, []),
        "priority_groups": ({"priority_groups": ["a"], "priority_policy": "overflow"}, [[]]),
        "priority_policy": ({"priority_policy": "overflow", "priority_groups": ["a"]}, ["none"]),
        "priority_timeout": (
            {"priority_timeout": SECOND, "priority_groups": ["a"], "priority_policy": "pinned_client"},
            [0],
        ),
        "rate_limit_bps": ({"rate_limit_bps": 1000, "deliver_subject": "out"}, [0]),
        "replay_policy": ({"replay_policy": "original"}, ["instant"]),
        "sample_freq": ({"sample_freq": "100%"}, [""]),
        "sourcing": ({"sourcing": True}, [False]),
    },
}
REFUSED["mirror"] = REFUSED["source"]

# Headers that a client may publish, with a test of the effect.
MODELLED_HEADERS = {
    "Nats-Batch-Commit": "test_batches_are_stored_or_refused_alike",
    "Nats-Batch-Id": "test_batches_are_stored_or_refused_alike",
    "Nats-Batch-Sequence": "test_batches_are_stored_or_refused_alike",
    "Nats-Expected-Last-Msg-Id": "test_expectations_are_checked_in_the_same_order",
    "Nats-Expected-Last-Sequence": "test_expectations_are_checked_in_the_same_order",
    "Nats-Expected-Last-Subject-Sequence": "test_expectations_are_checked_in_the_same_order",
    "Nats-Expected-Last-Subject-Sequence-Subject": "test_expectations_are_checked_in_the_same_order",
    "Nats-Expected-Stream": "test_expectations_are_checked_in_the_same_order",
    "Nats-Msg-Id": "test_expectations_are_checked_in_the_same_order",
    "Nats-Required-Api-Level": "test_required_api_level_is_checked",
    "Nats-Rollup": "test_expectations_are_checked_in_the_same_order",
    "Nats-Stream-Source": "test_expectations_are_checked_in_the_same_order",
    "Nats-TTL": "test_ttl_values_are_accepted_or_refused_alike",
}
REFUSED_HEADERS = {
    "Nats-Counter-Sources": "{}",
    "Nats-Incr": "+1",
    "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
    "Nats-Schedule-Next": "purge",
    "Nats-Schedule-Rollup": "sub",
    "Nats-Schedule-Source": "s.b",
    "Nats-Schedule-TTL": "5",
    "Nats-Schedule-Target": "s.b",
    "Nats-Schedule-Time-Zone": "UTC",
    "Nats-Scheduler": "s.b",
    "Nats-Trace-Dest": "trace",
    "Nats-Trace-Hop": "1",
    "Nats-Trace-Only": "true",
    "Nats-Trace-Origin-Account": "$G",
}
# Headers that servers write, or that are of HTTP, leaf nodes and services: a publisher's are stored like any other.
OTHER_HEADERS = (
    *("Nats-Consumer-Stalled", "Nats-Last-Consumer", "Nats-Last-Sequence", "Nats-Last-Stream", "Nats-Marker-Reason"),
    *("Nats-Msg-Size", "Nats-No-Masking", "Nats-Num-Pending", "Nats-Pending-Bytes", "Nats-Pending-Messages"),
    *("Nats-Pin-Id", "Nats-Request-Info", "Nats-Response-Type", "Nats-Sequence", "Nats-Server-Xkey", "Nats-Stream"),
    *("Nats-Stream-Identity", "Nats-Subject", "Nats-Time-Stamp", "Nats-UpTo-Sequence", "Nats-Wrong-Pin-Id"),
)
# Requests of the JSON API, and fields of a pull request.
REFUSED_REQUESTS = (
    *("STREAM.SNAPSHOT.S", "STREAM.RESTORE.S", "STREAM.LEADER.STEPDOWN.S", "STREAM.PEER.REMOVE.S"),
    *("CONSUMER.LEADER.STEPDOWN.S.C", "CONSUMER.UNPIN.S.C", "CONSUMER.PAUSE.S.C"),
)
REFUSED_OF_PULLS: dict[str, Any] = {
    "group": "a",
    "id": "x",
    "max_bytes": 100,
    "min_pending": 1,
    "min_ack_pending": 1,
    "priority": 3,
}


@pytest.fixture
def servers_of_newest(newest: Any) -> Iterator[tuple[Any, Any]]:
    """The connections to the real server and to the reference server; both have the stream S on `s.>`."""
    newest.stream("S")
    newest.forget("S")
    real, reference = newest._clients
    yield real, reference
    for raw in (real, reference):
        raw.ask("$JS.API.STREAM.DELETE.S")


def ask(raw: Any, subject: str, request: dict[str, Any]) -> Any:
    return raw.ask(f"$JS.API.{subject}", json.dumps(request).encode())


def error(answer: Any) -> str:
    return str(answer.get("error", {}).get("description", ""))


def field_names() -> list[str]:
    return sorted({name.decode() for name in re.findall(rb'json:"([A-Za-z0-9_]+)', Path(find_server()).read_bytes())})


def known_fields(raw: Any, place: tuple[str, Wrap], names: list[str]) -> set[str]:
    """Return those of the names that are fields: a request with another field is refused. Nothing is created."""
    subject, wrap = place
    for name in names:
        raw.publish(f"$JS.API.{subject}", json.dumps(wrap({name: None})).encode(), reply=f"R.{name}")
    assert raw.wait(lambda: len(raw.frames) >= len(names))
    found = {frame.subject[2:] for frame in raw.frames if "unknown field" not in error(frame.json)}
    raw.frames.clear()
    return found


def test_both_servers_know_the_same_fields(servers_of_newest: Any) -> None:
    real, reference = servers_of_newest
    names = field_names()
    for place in PLACES:
        known = known_fields(real, PLACES[place], names)
        assert known_fields(reference, PLACES[place], names) == known, place
        if place in MODELLED:
            assert known == MODELLED[place].keys() | REFUSED.get(place, {}).keys(), place
    for place in REFUSED_OBJECTS:
        known = known_fields(real, REFUSED_OBJECTS[place], names)
        assert known
        assert known_fields(reference, REFUSED_OBJECTS[place], names) >= known, place


def in_place(place: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a request that is complete but for the fields."""
    if place == "stream":
        return STREAM, {"name": "X", "subjects": ["x.>"], "storage": "memory", **fields}
    if place == "mirror":
        return STREAM, {"name": "X", "storage": "memory", "mirror": {"name": "S", **fields}}
    if place == "source":
        return STREAM, {"name": "X", "storage": "memory", "sources": [{"name": "S", **fields}]}
    config: dict[str, Any] = {"name": "C", "durable_name": "C", "ack_policy": "explicit"}
    if place == "consumer request":
        return CONSUMER, {"stream_name": "S", "config": config, **fields}
    return CONSUMER, {"stream_name": "S", "config": config | fields}


def created(raw: Any, place: str, fields: dict[str, Any]) -> str:
    """Create a stream or consumer and delete it again; return the error, if there was one."""
    subject, request = in_place(place, fields)
    answer = error(ask(raw, subject, request))
    ask(raw, subject.replace("CREATE", "DELETE"), {})
    return answer


def test_a_field_that_is_not_modelled_is_refused_by_its_name(servers_of_newest: Any) -> None:
    real, reference = servers_of_newest
    failures = []
    for place, fields in REFUSED.items():
        for name, (taken, defaults) in fields.items():
            if name != "sealed" and (refusal := created(real, place, taken)):  # an update seals a stream
                failures.append(f"{place} {taken}: the real server answers {refusal!r}")
            refusal = created(reference, place, taken)
            if NOT_MODELLED not in refusal or not any(each in refusal for each in taken):
                failures.append(f"{place} {taken}: {refusal!r}")
            for default in defaults:
                refusals = {created(raw, place, {name: default}) for raw in servers_of_newest} - {""}
                failures += [f"{place} {name}={default} is a default: {refusal!r}" for refusal in refusals]
    assert not failures, "\n".join(failures)


def test_each_modelled_field_and_header_has_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tests = set(re.findall(r"def (test_\w+)\(", text))
    shown = {name for fields in MODELLED.values() for name in fields.values()} | set(MODELLED_HEADERS.values())
    assert shown - {""} <= tests


def test_limits_of_consumers_and_the_first_sequence_have_their_effect(pair: Any) -> None:
    pair.stream(max_consumers=1, first_seq=10)
    [ack] = pair.publish("s.a")
    assert ack.json["seq"] == 10
    for name in ("C", "D"):
        config = {"durable_name": name, "ack_policy": "explicit"}
        answer = pair.api(f"CONSUMER.CREATE.{pair.name}.{name}", {"stream_name": pair.name, "config": config})
    assert answer["error"]["err_code"] == 10026


def test_headers_of_the_newest_server_are_known() -> None:
    found = {name.decode() for name in re.findall(rb"Nats-[A-Z][A-Za-z-]*", Path(find_server()).read_bytes())}
    known = (*MODELLED_HEADERS, *REFUSED_HEADERS, *OTHER_HEADERS)
    # Text that the binary has next to a name can look like a part of it.
    assert [each for each in found if not each.startswith((*known, "Nats-Batch-")) and each != "Nats-Expected-"] == []


def test_a_header_that_is_not_modelled_is_refused_by_its_name(servers_of_newest: Any, headers: Any) -> None:
    _, reference = servers_of_newest
    failures = []

    def publish(**lines: object) -> Any:
        reference.publish("s.a", b"x", header=headers(**lines), reply="R.header")
        assert reference.wait(lambda: bool(reference.frames))
        return reference.frames.pop().json

    batch = {"Nats_Batch_Id": "b", "Nats_Batch_Sequence": 1, "Nats_Batch_Commit": 1}
    ask(reference, "STREAM.UPDATE.S", {"name": "S", "subjects": ["s.>"], "storage": "memory", "allow_atomic": True})
    for name, value in REFUSED_HEADERS.items():
        for more in ({}, batch):
            refusal = error(publish(**{name: value}, **more))
            if NOT_MODELLED not in refusal or name not in refusal:
                failures.append(f"{name} {more}: {refusal!r}")
        if refusal := error(publish(**{name: ""})):
            failures.append(f"{name} without a value: {refusal!r}")
    failures += [f"{name} is refused" for name in OTHER_HEADERS if error(publish(**{name: "x"}))]
    assert not failures, "\n".join(failures)


def test_a_message_to_be_traced_is_refused_without_a_stream(newest: Any, raw_client: Any, headers: Any) -> None:
    real, reference = newest.fresh()
    real.close()
    reference.send(b"SUB elsewhere 1\r\n")
    reference.publish("elsewhere", b"x", header=headers(Nats_Trace_Dest="trace"))
    reference.flush()
    assert reference.frames == []
    assert any(NOT_MODELLED in line and "Nats-Trace-Dest" in line for line in reference.lines)
    reference.close()


def test_requests_that_are_not_modelled_are_refused(servers_of_newest: Any) -> None:
    real, reference = servers_of_newest
    for subject in REFUSED_REQUESTS:
        assert ask(real, subject, {})["type"] == ask(reference, subject, {})["type"], subject
        assert NOT_MODELLED in error(ask(reference, subject, {})), subject
    ask(reference, *in_place("consumer", {}))
    for name, value in REFUSED_OF_PULLS.items():
        for given in (value, type(value)()):
            request = json.dumps({"batch": 1, "no_wait": True, name: given}).encode()
            reference.publish("$JS.API.CONSUMER.MSG.NEXT.S.C", request, reply="R.pull")
            assert reference.wait(lambda: bool(reference.frames))
            status = reference.frames.pop().status
            assert (NOT_MODELLED in status and name in status) if given else status == "404 No Messages", (name, given)
    changed = ask(reference, *in_place("consumer", {"max_ack_pending": 5}))
    assert "update of a consumer" in error(changed)


def test_options_of_a_connection_that_are_not_modelled_end_it(newest: Any, raw_client: Any) -> None:
    for option in ("verbose", "pedantic"):
        real, reference = newest.fresh(**{option: True})
        real.close()
        assert not reference.wait(lambda: False), option
        assert any(NOT_MODELLED in line and option in line for line in reference.lines)
        reference.close()
