"""The draft dialect: behaviour of the ADRs' first wording that no released server has."""

import json
from typing import Any

from jetstream_ext.testing.reference import Engine, Profile
from jetstream_ext.testing.reference.wire.protocol import Publish, Subscribe

SECOND = 1_000_000_000


class Bench:
    def __init__(self, **config: Any) -> None:
        self.engine = Engine(Profile.of("2.15.1", draft=True))
        self.now = 1_659_745_767 * SECOND + 587_861_324
        self.engine.handle(1, Subscribe("R.>", "1"), self.now)
        self.created = self.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"], **config})

    def send(self, subject: str, payload: bytes = b"", reply: str = "R.1", header: bytes = b"") -> list[Any]:
        return self.engine.handle(1, Publish(subject, payload, reply, header), self.now)

    def api(self, subject: str, request: object = None) -> Any:
        (answer,) = self.send(f"$JS.API.{subject}", b"" if request is None else json.dumps(request).encode())
        return json.loads(answer.payload)

    def fast(self, seq: int, op: int, gap: str = "ok", header: bytes = b"", flow: int = 10) -> list[Any]:
        answers = self.send("s.a", b"x", f"R.b.{flow}.{gap}.{seq}.{op}.$FI", header)
        return [json.loads(each.payload) for each in answers]

    def get(self, subject: str = "s.a", payload: bytes = b"") -> bytes:
        (answer,) = self.send(f"$JS.API.DIRECT.GET.S.{subject}", payload)
        header: bytes = answer.header
        return header


def test_flow_frames_have_no_type() -> None:
    bench = Bench(allow_batched=True)
    assert bench.created["config"]["metadata"]["_nats.req.level"] == "3"
    assert bench.fast(1, 0, flow=2) == [{"ack_msgs": 2}]
    assert bench.fast(2, 1, flow=2) == [{"seq": 2, "ack_msgs": 2}]
    assert bench.fast(5, 1, flow=2)[0] == {"last_seq": 2, "seq": 5}
    refused = bench.fast(6, 1, header=b"NATS/1.0\r\nNats-Expected-Last-Sequence: 99\r\n\r\n")
    assert refused[0]["seq"] == 6
    assert refused[0]["error"]["err_code"] == 10071


def test_refused_message_ends_a_fail_batch_with_the_error_in_the_final_ack() -> None:
    bench = Bench(allow_batched=True)
    bench.fast(1, 0, "fail")
    (final,) = bench.fast(2, 1, "fail", b"NATS/1.0\r\nNats-Expected-Last-Sequence: 99\r\n\r\n")
    assert final["error"]["err_code"] == 10071
    assert (final["batch"], final["count"]) == ("b", 1)


def test_fast_batch_errors_have_the_old_codes() -> None:
    for config, reply, code in (
        ({}, "R.b.10.ok.1.0.$FI", 10203),
        ({"allow_batched": True}, "R.b.10.maybe.1.0.$FI", 10204),
        ({"allow_batched": True}, f"R.{'x' * 65}.10.ok.1.0.$FI", 10205),
        ({"allow_batched": True}, "R.b.10.ok.7.1.$FI", 10206),
    ):
        (answer,) = Bench(**config).send("s.a", b"x", reply)
        assert json.loads(answer.payload)["error"]["err_code"] == code, reply


def test_fast_batch_timeout_publishes_an_advisory() -> None:
    bench = Bench(allow_batched=True)
    bench.engine.handle(1, Subscribe("$JS.EVENT.ADVISORY.>", "2"), bench.now)
    bench.fast(1, 0)
    (told,) = bench.engine.handle_timer(bench.now + 10 * SECOND)
    advisory = json.loads(told.payload)
    assert advisory["type"] == "io.nats.jetstream.advisory.v1.batch_abandoned"
    assert (advisory["batch"], advisory["reason"]) == ("b", "timeout")


def test_limit_per_subject_enables_direct_get() -> None:
    assert Bench(max_msgs_per_subject=1).created["config"]["allow_direct"] is True
    assert Bench().created["config"]["allow_direct"] is False
    assert Bench().send("$JS.API.DIRECT.GET.S", b'{"seq":1}') == []  # not even 503


def test_allow_direct_of_the_request_has_no_effect() -> None:
    bench = Bench(allow_direct=True)
    assert bench.created["config"]["allow_direct"] is False
    update = {"name": "S", "subjects": ["s.>"], "max_msgs_per_subject": 1, "allow_direct": False}
    assert bench.api("STREAM.UPDATE.S", update)["config"]["allow_direct"] is True


def test_direct_get_batch_needs_a_subject_and_a_start() -> None:
    bench = Bench(max_msgs_per_subject=1)
    bench.send("s.a", b"x")
    for request in (b'{"batch":3,"next_by_subj":"s.>"}', b'{"batch":3,"seq":1}'):
        (refused,) = bench.send("$JS.API.DIRECT.GET.S", request)
        assert refused.header == b"NATS/1.0 408 Bad Request\r\n\r\n"
    for start in (b'"seq":1', b'"start_time":"2022-01-01T00:00:00Z"'):
        found, end = bench.send("$JS.API.DIRECT.GET.S", b'{"batch":3,%b,"next_by_subj":"s.>"}' % start)
        assert found.payload == b"x"
        assert end.header.startswith(b"NATS/1.0 204 EOB\r\n")


def test_time_stamps_have_the_old_format() -> None:
    bench = Bench(max_msgs_per_subject=1)
    bench.send("s.a", b"hello")
    assert bench.get(payload=b"{}") == b"NATS/1.0 408 Bad Request\r\n\r\n"
    assert b"\r\nNats-Time-Stamp: 2022-08-06 00:29:27.587861324 +0000 UTC\r\n" in bench.get()


def test_multi_last_ends_with_the_sequence_of_the_last_match() -> None:
    bench = Bench(max_msgs_per_subject=1)
    for subject in ("s.a", "s.b", "s.other"):
        bench.send(subject, b"x")
    *_, end = bench.send("$JS.API.DIRECT.GET.S", b'{"multi_last":["s.a","s.b"]}')
    assert b"Nats-UpTo-Sequence: 2\r\n" in end.header


def test_no_expire_header_and_zero_ttl_never_expire() -> None:
    bench = Bench(allow_msg_ttl=True, max_age=10 * SECOND, max_msgs_per_subject=1)
    for subject, line in (("s.zero", "Nats-TTL: 0"), ("s.never", "Nats-No-Expire: 1"), ("s.one", "Nats-TTL: 1")):
        (answer,) = bench.send(subject, b"x", header=f"NATS/1.0\r\n{line}\r\n\r\n".encode())
        assert b'"error"' not in answer.payload
    bench.now += 2 * SECOND
    assert b"404" in bench.get("s.one")
    assert b"Nats-Sequence: 1" in bench.get("s.zero")
    bench.now += 10 * SECOND
    assert b"404" in bench.get("s.zero")
    assert b"Nats-Sequence: 2" in bench.get("s.never")


def test_delete_markers_have_the_applied_limit_header() -> None:
    bench = Bench(max_age=SECOND, limits_ttl=SECOND, max_msgs_per_subject=1)
    assert bench.created["config"]["limits_ttl"] == SECOND
    bench.send("s.a", b"x")
    bench.engine.handle_timer(bench.now + SECOND)
    bench.now += SECOND
    assert bench.get().startswith(b"NATS/1.0\r\nNats-Applied-Limit: MaxAge\r\nNats-TTL: 1\r\nNats-Stream: S\r\n")


def test_consumer_reset_to_zero_is_refused() -> None:
    bench = Bench()
    bench.api("CONSUMER.CREATE.S.C", {"stream_name": "S", "config": {"durable_name": "C", "ack_policy": "explicit"}})
    assert bench.api("CONSUMER.RESET.S.C", {"seq": 0})["error"]["err_code"] == 10204
    assert bench.api("CONSUMER.RESET.S.C", {"seq": 1})["reset_seq"] == 1
    assert bench.api("CONSUMER.RESET.S.C")["reset_seq"] == 1


def test_server_creates_the_managed_consumer_of_a_source() -> None:
    bench = Bench(retention="workqueue")
    bench.send("s.a", b"x")
    source = {"name": "S", "consumer": {"name": "mine", "server_managed": True}}
    assert "error" not in bench.api("STREAM.CREATE.C", {"name": "C", "sources": [source]})
    assert bench.api("CONSUMER.NAMES.S")["consumers"] == ["mine"]
    assert bench.api("STREAM.INFO.C")["state"]["messages"] == 1
    bench.now += 2 * SECOND
    bench.engine.handle_timer(bench.now)
    assert bench.api("STREAM.INFO.S")["state"]["messages"] == 0
