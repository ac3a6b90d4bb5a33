"""What stored messages say about keys: operation and TTL; and the newest message of each key."""

import random
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext.kv.entries import KeyValueEntry, KeyValueSnapshot, Subjects, entry_of_record, ttl_of, updates_of
from jetstream_ext.protocol.direct import Block, StoredMsg, stored_block
from jetstream_ext.protocol.headers import format_time_ns
from jetstream_ext.protocol.subjects import matcher
from jetstream_ext.protocol.table import Content
from jetstream_ext.protocol.updates import each

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ALL = Subjects("B", "$KV.B.", matcher([">"]))


def test_headers_decide_the_operation() -> None:
    for headers, found in (
        ({}, ("PUT", None)),
        ({"X": "y"}, ("PUT", None)),
        ({"KV-Operation": "DEL"}, ("DEL", None)),
        ({"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, ("PURGE", None)),
        ({"KV-Operation": "NEW"}, ("PUT", None)),
        ({"Nats-Marker-Reason": "MaxAge", "Nats-TTL": "1m0s"}, ("PURGE", "MaxAge")),
        ({"Nats-Marker-Reason": "Purge"}, ("PURGE", "Purge")),
        ({"Nats-Marker-Reason": "Remove"}, ("DEL", "Remove")),
        ({"Nats-Marker-Reason": "Tomorrow"}, ("PURGE", "Tomorrow")),
        ({"Nats-Applied-Limit": "MaxAge"}, ("PURGE", "MaxAge")),
    ):
        stored = b"NATS/1.0\r\n" + b"".join(f"{name}: {text}\r\n".encode() for name, text in headers.items()) + b"\r\n"
        entry = entry_of_record("B", "k", (7, b"v", format_time_ns(int(NOW.timestamp()) * 10**9).encode(), stored))
        assert entry == KeyValueEntry("B", "k", b"v", 7, NOW, *found), headers  # type: ignore[arg-type]


def test_ttl_is_read_as_servers_read_it() -> None:
    seconds = {"5": 5, "05": 5, "1h": 3600, "1h30m": 5400, "1m0s": 60, "1.5s": 1, "1500ms": 1, " 5": 5}
    none = ("never", "", "1d", "abc", "-1", "9223372036854775807", "\u00b2", "\u0663", "\u0663s", "9" * 60_000)
    for text, value in (seconds | dict.fromkeys(none)).items():
        expected = None if value is None else timedelta(seconds=value)
        assert ttl_of({"Nats-TTL": text}) == expected, text[:20]


def put(seq: int, key: str, value: bytes = b"v", *, prefix: str = "$KV.B.", **headers: str) -> StoredMsg:
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    time_ns = (int(NOW.timestamp()) + seq) * 1_000_000_000
    return StoredMsg(stream="KV_B", subject=prefix + key, seq=seq, data=value, headers=names, time_ns=time_ns)


def test_the_newest_message_of_each_key_wins_in_any_order() -> None:
    messages = [
        *(put(n, f"k{n % 7}", b"%d" % n) for n in range(1, 40)),
        put(40, "k1", b"", KV_Operation="DEL"),
        put(41, "k2", b"", KV_Operation="PURGE"),
        put(42, "k3", b"", Nats_Marker_Reason="MaxAge"),
        put(43, "k4", b"", KV_Operation="DEL"),
        put(44, "k4", b"again", Nats_TTL="1h"),
        put(45, "k5", prefix="$KV.C."),
        put(46, "k5", prefix=""),
    ]
    random.Random(1).shuffle(messages)
    content = Content()
    for start in range(0, len(messages), 5):
        content.feed(updates_of(messages[start : start + 5], ALL))
    content.feed(updates_of(messages[:10], ALL))  # a page that is read twice
    assert {key: record[0] for key, record in content.values.items()} == {"k0": 35, "k4": 44, "k5": 33, "k6": 34}
    gone = KeyValueSnapshot({**content.deleted}, bucket="B", revision=44, time=NOW)
    assert {key: (entry.operation, entry.reason) for key, entry in gone.items()} == {
        "k1": ("DEL", None), "k2": ("PURGE", None), "k3": ("PURGE", "MaxAge"),
    }  # fmt: skip


def block_of(messages: list[StoredMsg]) -> Block:
    """The messages as a reply has them."""
    block = Block("S")
    for message in messages:
        lines = [
            stored_block(message) or b"NATS/1.0", b"Nats-Stream: S", b"Nats-Subject: " + message.raw_subject,
            b"Nats-Sequence: %d" % message.seq, b"Nats-Time-Stamp: " + format_time_ns(message.time_ns).encode(),
            b"Nats-Num-Pending: 0", b"Nats-Last-Sequence: %d" % (message.seq - 1), b"", b"",
        ]  # fmt: skip
        header = b"\r\n".join(lines)
        block.seqs.append(message.seq)
        block.bodies.append(header + message.data)
        block.header_sizes.append(len(header))
    return block


@settings(deadline=None)
@given(st.data())
def test_blocks_from_the_wire_and_the_leaders_messages_are_the_same(data: st.DataObject) -> None:
    """Also where only some messages of a block have headers, and for subjects that look like the server's lines."""
    messages = []
    for seq in range(1, data.draw(st.integers(1, 6)) + 1):
        key = data.draw(st.sampled_from(["a", "Nats-Subject:", "Nats-Time-Stamp:", "NATS/1.0"]))
        headers = data.draw(
            st.sampled_from(
                [{}, {}, {"Nats_TTL": "1"}, {"KV_Operation": "DEL"}, {"KV_Operation ": "DEL"}, {"Nats_Subject": "x"}]
            )
        )
        messages.append(put(seq, key, data.draw(st.binary(max_size=4)), **headers))
    block = block_of(messages)
    times = [format_time_ns(message.time_ns).encode() for message in messages]
    columns = block.columns()
    stored = list(map(stored_block, messages))
    assert columns is None or columns == ([message.subject for message in messages], times, stored)
    assert columns is not None or any(stored)
    assert list(each(updates_of(block, ALL))) == updates_of(messages, ALL)
