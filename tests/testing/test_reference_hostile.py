"""Invalid input from clients: the reference server refuses it and continues to work."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext.testing.reference import Engine, Profile
from jetstream_ext.testing.reference.wire.protocol import Deliver, Publish, Subscribe, encode

NOW = 1_800_000_000 * 10**9
DIGITS = "9" * 5000
CONSUMER = b'{"stream_name":"S","config":{"durable_name":"C","ack_policy":"explicit"}}'
CONFIG: dict[str, Any] = {
    "name": "S",
    "subjects": ["s.>"],
    "allow_direct": True,
    "allow_atomic": True,
    "allow_batched": True,
    "allow_msg_ttl": True,
    "allow_rollup_hdrs": True,
}
APIS = (
    [f"STREAM.{word}.S" for word in ("CREATE", "UPDATE", "INFO", "PURGE", "MSG.GET", "MSG.DELETE")]
    + [f"CONSUMER.{word}.S.C" for word in ("CREATE", "DURABLE.CREATE", "INFO", "MSG.NEXT", "RESET", "PAUSE")]
    + ["STREAM.NAMES", "STREAM.LIST", "CONSUMER.NAMES.S", "CONSUMER.CREATE.S.C.s.a", "DIRECT.GET.S", "DIRECT.GET.S.s.a"]
)
FIELDS = (
    "name subjects seq batch last_by_subj next_by_subj multi_last start_time up_to_time up_to_seq max_bytes max_msgs "
    "max_age discard retention mirror sources metadata subject_delete_marker_ttl duplicate_window first_seq filter "
    "keep offset subjects_filter expires idle_heartbeat no_wait pause_until deliver_subject storage persist_mode "
    "ack_policy deliver_policy opt_start_seq opt_start_time filter_subjects max_deliver backoff ack_wait max_waiting"
)
NAMES = (
    "Nats-Batch-Id Nats-Batch-Sequence Nats-Batch-Commit Nats-TTL Nats-Rollup Nats-Msg-Id Nats-Required-Api-Level "
    "Nats-Expected-Last-Sequence Nats-Expected-Last-Subject-Sequence Nats-Expected-Stream Nats-No-Expire"
)


class Bench:
    def __init__(self, *, draft: bool = False) -> None:
        self.engine = Engine(Profile.of("2.15.1", draft=draft))
        self.engine.handle(1, Subscribe("R.>", "1"), NOW)
        assert b'"error"' not in self.send("$JS.API.STREAM.CREATE.S", json.dumps(CONFIG).encode())[0].payload
        self.send("$JS.API.CONSUMER.CREATE.S.C", CONSUMER)

    def send(self, subject: str, payload: bytes = b"", reply: str = "R.1", header: bytes = b"") -> list[Deliver]:
        found = self.engine.handle(1, Publish(subject, payload, reply, header), NOW)
        for output in found:
            encode(output)
        return [each for each in found if isinstance(each, Deliver)]

    def goes_on(self) -> None:
        (answer,) = self.send("$JS.API.INFO")
        assert b"account_info_response" in answer.payload


def test_invalid_numbers_are_refused() -> None:
    for number in (DIGITS, "\u00b2", "\u0663", "-1", "1_0", ""):
        bench = Bench()
        bench.send(f"$JS.ACK.S.C.1.{number or 'x'}.1.0.0")
        bench.send("$JS.ACK.S.C.1.1.1.0.0", b"+NXT " + number.encode())
        bench.send("$JS.ACK.S.C.1.1.1.0.0", b"-NAK " + number.encode())
        bench.send("$JS.API.CONSUMER.MSG.NEXT.S.C", number.encode())
        for name in NAMES.split():
            bench.send("s.a", b"x", header=f"NATS/1.0\r\n{name}: {number}\r\n\r\n".encode())
        (refused,) = bench.send("s.a", reply=f"R.b.10.ok.{number or 'x'}.1.$FI")
        assert json.loads(refused.payload)["error"]["err_code"] in (10206, 10208), number
        bench.goes_on()


def test_invalid_ttls_are_refused_quickly() -> None:
    for ttl in (DIGITS, DIGITS + "s", "1" + "." * 3000, ".s", "1h" * 2000):
        (answer,) = Bench().send("s.a", header=f"NATS/1.0\r\nNats-TTL: {ttl}\r\n\r\n".encode())
        assert (b'"err_code":10165' in answer.payload) == (ttl != "1h" * 2000), ttl[:9]


def test_invalid_json_is_refused() -> None:
    numbers = b'{"seq":' + DIGITS.encode() + b"}"
    for subject in (*APIS, "CONSUMER.DELETE.S.C", "STREAM.DELETE.S"):
        bench = Bench()
        for payload in (b"[" * 5000, numbers, b'{"name":NaN}', b"\x00", b"\xff{", b'{"name":"\xff"}'):
            bench.send(f"$JS.API.{subject}", payload)
        bench.goes_on()


def test_unpaired_surrogate_is_replaced() -> None:
    bench = Bench()
    metadata = b'{"name":"T","metadata":{"a":"\\ud800","b":"\\ud83d\\ude00"}}'
    (answer,) = bench.send("$JS.API.STREAM.CREATE.T", metadata)
    found = json.loads(answer.payload)["config"]["metadata"]
    assert (found["a"], found["b"]) == ("\ufffd", "\U0001f600")


VALUES = """
0 1 -1 18446744073709551616 1e3 1.5 null true "s.a" ["s.a",">"] {} [] [1] x "\\ud800" "\\u0000"
"2020-01-01T00:00:00Z" "0001-01-01T00:00:00Z" "9999-12-31T23:59:59Z"
"""
values = st.sampled_from(VALUES.split())
objects = st.dictionaries(st.sampled_from(FIELDS.split()), values, max_size=4).map(
    lambda found: "{" + ",".join(f'"{key}":{value}' for key, value in found.items()) + "}"
)
payloads = st.one_of(
    objects.map(str.encode),
    objects.map(lambda found: f'{{"stream_name":"S","config":{found}}}'.encode()),
    objects.map(lambda found: ('{"name":"S",' + found[1:]).replace(",}", "}").encode()),
    st.sampled_from([b"", b"+ACK", b"-NAK", b"+NXT 3", b'-NAK {"delay":-5}', b"+TERM", b"+WPI"]),
    st.binary(max_size=20),
)
header_values = st.sampled_from(["", "0", "1", "2", "x", "b", "eob", "all", "never", "1h", DIGITS, "s.>"])
blocks = st.one_of(
    st.sampled_from([b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0", b"x", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0\r\nNats-TTL:"]),
    st.lists(st.tuples(st.sampled_from(NAMES.split()), header_values), max_size=4).map(
        lambda lines: ("NATS/1.0\r\n" + "".join(f"{name}:{value}\r\n" for name, value in lines) + "\r\n").encode()
    ),
)
subjects = st.one_of(
    st.sampled_from(["s.a", "s.b", "s.>", "s..a", ".", ">", "$JS.ACK.S.C.1.1.1.0.0", "$JS.FC.S.C.x"]),
    st.sampled_from(APIS).map("$JS.API.{}".format),
)
replies = st.one_of(
    st.sampled_from(["R.1", "", "$FI", ".$FI", "s.a", "R..1", "$JS.API.INFO"]),
    st.builds(
        "R.{}.{}.{}.{}.{}.$FI".format,
        st.sampled_from("bc"),
        st.sampled_from(["0", "1", "10", "x", DIGITS]),
        st.sampled_from(["ok", "fail", "x"]),
        st.sampled_from(["0", "1", "2", "3", DIGITS]),
        st.integers(0, 5),
    ),
)


@settings(max_examples=150, derandomize=True)
@given(
    script=st.lists(st.tuples(subjects, payloads, replies, blocks, st.sampled_from([0, 1, 10**10])), max_size=25),
    draft=st.booleans(),
)
def test_random_commands_do_not_break_the_server(script: list[Any], draft: bool) -> None:
    bench = Bench(draft=draft)
    now = NOW
    for subject, payload, reply, header, passed in script:
        now += passed
        for output in bench.engine.handle(1, Publish(subject, payload, reply, header), now):
            encode(output)
    assert bench.engine.handle(1, Publish("$JS.API.INFO", b"", "R.1"), now)
