"""Every form of Direct Get, frame by frame."""

import itertools
import json
from typing import Any

import pytest


@pytest.fixture
def stream(pair: Any, headers: Any) -> Any:
    """A stream of 12 messages on three subjects, one deleted."""
    pair.stream(subjects=["d.>"], allow_direct=True)
    for index in range(12):
        header = headers(X_U=f"v{index}", Nats_Sequence=7) if index == 4 else b""
        pair.publish(f"d.{'ABC'[index % 3]}", b"m" * index, header=header)
    pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 8})
    return pair


REQUESTS: list[object] = [
    {"seq": 5},
    {"seq": 8},
    {"seq": 99},
    {"seq": 5, "no_hdr": True},
    {"last_by_subj": "d.A"},
    {"last_by_subj": "d.*"},
    {"last_by_subj": "nope"},
    {"next_by_subj": "d.B"},
    {"next_by_subj": "d.B", "seq": 3},
    {"next_by_subj": "d.>", "seq": 8},
    {"next_by_subj": "d.B", "seq": 12},
    {"batch": 3},
    {"batch": 3, "seq": 1},
    {"batch": 3, "seq": 7},
    {"batch": 50, "seq": 1},
    {"batch": 50, "seq": 99},
    {"batch": 1, "seq": 99},
    {"batch": 3, "next_by_subj": "d.>"},
    {"batch": 2, "seq": 4, "next_by_subj": "d.>"},
    {"batch": 2, "next_by_subj": "d.C"},
    {"batch": 9, "next_by_subj": "d.C", "no_hdr": True},
    {"batch": 9, "next_by_subj": "nope"},
    {"batch": -1, "seq": 1},
    {"batch": 0, "seq": 1},
    {"batch": 5, "seq": 1, "max_bytes": 10},
    {"batch": 5, "seq": 1, "max_bytes": 1},
    {"batch": 5, "seq": 1, "max_bytes": -1},
    {"seq": 1, "max_bytes": 1},
    {"batch": 2, "last_by_subj": "d.A"},
    {"seq": 1, "last_by_subj": "d.A"},
    {"next_by_subj": "d.A", "last_by_subj": "d.A"},
    {"seq": 1, "start_time": "2020-01-01T00:00:00Z"},
    {"start_time": "2020-01-01T00:00:00Z"},
    {"start_time": "2020-01-01T00:00:00.5+01:00", "batch": 2},
    {"start_time": "2100-01-01T00:00:00Z"},
    {"start_time": "2020-01-01T00:00:00Z", "batch": 2, "next_by_subj": "d.B"},
    *(
        {"start_time": text}
        for text in ("2022-08-06 00:29:27 +0000 UTC", "2022-08-06T00:29:27", "2022-08-06t00:29:27z", "", 5)
    ),
    {"multi_last": ["d.>"]},
    {"multi_last": ["d.A", "d.C"]},
    {"multi_last": ["d.A", "d.*", "d.A"]},
    {"multi_last": ["nope"]},
    {"multi_last": []},
    {"multi_last": [""]},
    {"multi_last": "d.>"},
    {"multi_last": ["d.>"], "batch": 2},
    {"multi_last": ["d.>"], "batch": 2, "seq": 11, "up_to_seq": 12},
    {"multi_last": ["d.>"], "seq": 12},
    {"multi_last": ["d.>"], "seq": 13},
    {"multi_last": ["d.>"], "up_to_seq": 5},
    {"multi_last": ["d.>"], "up_to_seq": 99},
    {"multi_last": ["d.>"], "max_bytes": 1},
    {"multi_last": ["d.>"], "no_hdr": True},
    {"multi_last": ["d.>"], "up_to_time": "2100-01-01T00:00:00Z"},
    {"multi_last": ["d.>"], "up_to_time": "2020-01-01T00:00:00Z"},
    {"multi_last": ["d.>"], "up_to_time": "2020-01-01T00:00:00Z", "up_to_seq": 3},
    {"multi_last": ["d.>"], "next_by_subj": "d.A"},
    {"multi_last": ["d.>"], "last_by_subj": "d.A"},
    {},
    {"seq": 0},
    {"seq": -1},
    {"seq": "1"},
    {"seq": 1.0},
    {"seq": 1, "unknown": True},
    {"seq": None},
    [],
    b"",
    b"x",
    b"{",
]


@pytest.mark.since("2.12.8")
def test_requests_get_the_same_frames(stream: Any) -> None:
    for request in REQUESTS:
        payload = request if isinstance(request, bytes) else json.dumps(request).encode()
        assert stream.publish(f"$JS.API.DIRECT.GET.{stream.name}", payload, wait=1)


PAYLOADS = (
    b"",
    b"{}",
    b'{"no_hdr":true}',
    b'{"max_bytes":5}',
    b'{"seq":1}',
    b'{"batch":1}',
    b'{"batch":-1}',
    b"x",
    b'{"up_to_seq":1}',
)


@pytest.mark.since("2.12.8")
def test_requests_with_an_appended_subject_get_the_same_frames(stream: Any) -> None:
    for subject, payload in itertools.product(("d.A", "d.>", "d.*", "nope", "d"), PAYLOADS):
        stream.publish(f"$JS.API.DIRECT.GET.{stream.name}.{subject}", payload, wait=1)


def test_batch_frames_have_the_documented_headers(newest: Any, headers: Any) -> None:
    newest.stream(subjects=["d.>"], allow_direct=True)
    newest.publish("d.A", b"one")
    newest.publish("d.B", b"two", header=headers(X="y"))
    stream = newest.name.encode()
    first, second, end = newest.publish(f"$JS.API.DIRECT.GET.{newest.name}", b'{"batch":5,"seq":1}', wait=3)
    assert first.header.startswith(
        b"NATS/1.0\r\nNats-Stream: %b\r\nNats-Subject: d.A\r\nNats-Sequence: 1\r\nNats-Time-Stamp: " % stream
    )
    assert first.header.endswith(b"Z\r\nNats-Num-Pending: 1\r\nNats-Last-Sequence: 0\r\n\r\n")
    assert second.header.startswith(b"NATS/1.0\r\nX: y\r\nNats-Stream: %b\r\n" % stream)
    assert end.header == b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 2\r\n\r\n"


def test_required_api_level_is_checked(pair: Any, headers: Any) -> None:
    pair.stream(subjects=["d.>"], allow_direct=True)
    pair.publish("d.A", b"one")
    for level in ("0", "1", "99", "x", ""):
        pair.publish(
            f"$JS.API.DIRECT.GET.{pair.name}", b'{"seq":1}', header=headers(Nats_Required_Api_Level=level), wait=1
        )
        pair.publish(f"$JS.API.DIRECT.GET.{pair.name}.d.A", header=headers(Nats_Required_Api_Level=level), wait=1)
        pair.api(f"STREAM.INFO.{pair.name}", header=headers(Nats_Required_Api_Level=level))


STORAGES = ("memory", "file")


@pytest.mark.since("2.11.11")
def test_last_message_after_the_newest_was_deleted(pair: Any) -> None:
    def check(storage: str) -> None:
        pair.stream(subjects=["d.>"], allow_direct=True, storage=storage)
        for _ in range(3):
            pair.publish("d.A", b"x")
        pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 3})
        for pattern in (">", "d.>", "d.A"):
            pair.publish(f"$JS.API.DIRECT.GET.{pair.name}", json.dumps({"last_by_subj": pattern}).encode(), wait=1)
            pair.api(f"STREAM.MSG.GET.{pair.name}", {"last_by_subj": pattern})

    pair.each(STORAGES, check)


def test_sequences_beyond_the_end_get_the_same_frames(pair: Any) -> None:
    def check(storage: str) -> None:
        pair.stream(subjects=["d.>"], allow_direct=True, storage=storage)
        get = f"$JS.API.DIRECT.GET.{pair.name}"
        for point in (1, 99):
            pair.publish(get, b'{"multi_last":["d.>"],"up_to_seq":%d}' % point, wait=1)
        for subject in ("d.A", "d.B", "d.C"):
            pair.publish(subject, b"x")
        for _ in range(2):
            for point, seq, pattern in itertools.product((2, 3, 4, 99), (0, 2, 4), (b"d.>", b"d.B", b"nope")):
                pair.publish(get, b'{"multi_last":["%b"],"up_to_seq":%d,"seq":%d}' % (pattern, point, seq), wait=1)
            pair.api(f"STREAM.MSG.DELETE.{pair.name}", {"seq": 3})

    pair.each(STORAGES, check)


def test_request_without_allow_direct_gets_503(pair: Any) -> None:
    pair.stream(subjects=["d.>"], max_msgs_per_subject=1)
    pair.publish(f"$JS.API.DIRECT.GET.{pair.name}", b'{"seq":1}', wait=1)
    pair.publish(f"$JS.API.DIRECT.GET.{pair.name}.d.A", wait=1)


def test_multi_last_above_1024_subjects_gets_413(newest: Any) -> None:
    newest.stream(subjects=["d.>"], allow_direct=True)
    for index in range(1025):
        for raw in newest._clients:
            raw.publish(f"d.{index}", b"x")
    newest.settle()
    frames = newest.publish(f"$JS.API.DIRECT.GET.{newest.name}", b'{"multi_last":["d.>"],"batch":2}', wait=1)
    assert frames[0].status == "413 Too Many Results"
    frames = newest.publish(f"$JS.API.DIRECT.GET.{newest.name}", b'{"multi_last":["d.>"],"up_to_seq":1024}', wait=1025)
    assert len(frames) == 1025


def test_start_times_select_the_same_messages(newest: Any) -> None:
    newest.stream(subjects=["d.>"], allow_direct=True)
    times = []
    for index in range(3):
        newest.publish("d.A", b"x" * index)
        newest.publish("d.B", b"y" * index)
    for raw in newest._clients:
        raw.publish(f"$JS.API.DIRECT.GET.{newest.name}", b'{"seq":3}', reply="R.time")
        raw.wait(lambda raw=raw: len(raw.frames) == 1)
        times.append(raw.frames.pop().value("Nats-Time-Stamp"))
    for request in ('{"start_time":"%s"}', '{"start_time":"%s","batch":9}', '{"multi_last":[">"],"up_to_time":"%s"}'):
        for raw, when in zip(newest._clients, times, strict=True):
            raw.publish(f"$JS.API.DIRECT.GET.{newest.name}", (request % when).encode(), reply="R.get")
        newest.settle(wait=1, what=request)
