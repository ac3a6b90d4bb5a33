"""The engine of the reference server, without sockets and with virtual time."""

import json
from typing import Any

import pytest

from jetstream_ext.testing.reference import Engine, Limits, Profile
from jetstream_ext.testing.reference.wire.protocol import Deliver, Parser, Publish, Subscribe

SECOND = 1_000_000_000


class Bench:
    """Drives an engine from one connection."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(**options)
        self.now = 1_800_000_000 * SECOND
        self.engine.handle(1, Subscribe("R.>", "1"), self.now)

    def publish(self, subject: str, payload: bytes = b"", header: bytes = b"", reply: str = "R.1") -> list[Deliver]:
        outputs = self.engine.handle(1, Publish(subject, payload, reply, header), self.now)
        return [output for output in outputs if isinstance(output, Deliver)]

    def api(self, subject: str, request: object = None) -> Any:
        (answer,) = self.publish(f"$JS.API.{subject}", b"" if request is None else json.dumps(request).encode())
        return json.loads(answer.payload)

    def stream(self, **config: Any) -> None:
        answer = self.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"], **config})
        assert "error" not in answer, answer

    def wait(self, seconds: float) -> list[Any]:
        """Let time pass, timer by timer."""
        end = self.now + round(seconds * SECOND)
        outputs = []
        while (when := self.engine.next_timer()) is not None and when <= end:
            assert when >= self.now
            self.now = when
            outputs += self.engine.handle_timer(when)
        self.now = end
        return outputs


def fast(batch: str, seq: int, op: int, *, flow: int = 10, gap: str = "fail") -> str:
    return f"R.{batch}.{flow}.{gap}.{seq}.{op}.$FI"


def test_idle_fast_batch_is_dropped_without_an_advisory() -> None:
    bench = Bench()
    bench.stream(allow_batched=True, allow_atomic=True)
    bench.publish("s.a", b"x", reply=fast("b", 1, 0))
    bench.wait(9.9)
    bench.publish("s.a", reply=fast("b", 1, 4))
    assert bench.wait(9.9) == []
    bench.publish("s.a", b"y", reply=fast("b", 2, 1))
    assert bench.wait(10) == []
    (reply,) = bench.publish("s.a", b"z", reply=fast("b", 3, 1))
    assert json.loads(reply.payload)["error"]["err_code"] == 10208


def test_idle_atomic_batch_is_dropped_with_an_advisory() -> None:
    bench = Bench()
    bench.stream(allow_atomic=True)
    bench.engine.handle(1, Subscribe("$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.*", "2"), bench.now)
    bench.publish("s.a", b"x", b"NATS/1.0\r\nNats-Batch-Id: b\r\nNats-Batch-Sequence: 1\r\n\r\n")
    (told,) = bench.wait(10)
    assert json.loads(told.payload)["reason"] == "timeout"


def test_limits_can_be_lowered() -> None:
    bench = Bench(limits=Limits(fast_per_stream=1, batch_timeout=2))
    bench.stream(allow_batched=True)
    bench.publish("s.a", reply=fast("a", 1, 0))
    (reply,) = bench.publish("s.a", reply=fast("b", 1, 0))
    assert json.loads(reply.payload)["error"]["err_code"] == 10211
    bench.wait(2)
    (reply,) = bench.publish("s.a", reply=fast("b", 1, 0))
    assert json.loads(reply.payload)["type"] == "ack"


def test_ttls_expire_and_leave_markers_in_virtual_time() -> None:
    bench = Bench()
    bench.stream(subject_delete_marker_ttl=60 * SECOND, allow_direct=True)
    bench.publish("s.a", b"x", b"NATS/1.0\r\nNats-TTL: 1h\r\n\r\n")
    bench.wait(3599)
    assert bench.publish("$JS.API.DIRECT.GET.S.s.a")[0].payload == b"x"
    bench.wait(1)
    (marker,) = bench.publish("$JS.API.DIRECT.GET.S.s.a")
    assert b"Nats-Marker-Reason: MaxAge" in marker.header
    bench.wait(60)
    (gone,) = bench.publish("$JS.API.DIRECT.GET.S.s.a")
    assert gone.header == b"NATS/1.0 404 Message Not Found\r\n\r\n"
    assert bench.engine.next_timer() is None


def test_message_ids_are_removed_after_the_duplicate_window() -> None:
    bench = Bench()
    bench.stream(duplicate_window=2 * SECOND, max_msgs=1)
    for index in range(100):
        bench.publish("s.a", header=f"NATS/1.0\r\nNats-Msg-Id: {index}\r\n\r\n".encode())
        bench.wait(0.1)
    (answer,) = bench.publish("s.a", header=b"NATS/1.0\r\nNats-Msg-Id: 99\r\n\r\n")
    assert b"duplicate" in answer.payload
    (answer,) = bench.publish("s.a", header=b"NATS/1.0\r\nNats-Msg-Id: 50\r\n\r\n")
    assert b"duplicate" not in answer.payload


def test_the_same_seed_gives_the_same_outputs() -> None:
    def run(seed: int) -> list[Any]:
        engine = Engine(seed=seed)
        for sid in range(5):
            engine.handle(1, Subscribe("work", str(sid), "group"), 0)
        return [engine.attach(2, 0), *(engine.handle(1, Publish("work"), 0) for _ in range(20))]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_parser_accepts_bytes_split_at_any_position() -> None:
    data = b'CONNECT {"a":1}\r\nSUB a.b q 1\r\nHPUB a.b r 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPUB x 0\r\n\r\nUNSUB 1 5\r\nPING\r\n'
    whole = Parser(100).feed(data)
    assert len(whole) == 6
    parser = Parser(100)
    assert [command for byte in data for command in parser.feed(bytes([byte]))] == whole


def test_invalid_profile_version_is_refused() -> None:
    for version in ("2.9.1", "2.10", "x"):
        with pytest.raises(ValueError, match=r"version|knows"):
            Profile.of(version)
