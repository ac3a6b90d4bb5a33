"""Random commands to a real server and to the reference server, every reply compared.

`JETSTREAM_EXT_DIFFERENTIAL` sets the number of sequences. Without it, the tests run the same 90 sequences every time, so
that an unrelated change cannot fail. `python -m nox -s full -- differential` tries 10,000.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("JETSTREAM_EXT_DIFFERENTIAL", "0"))
VERSION = "2.15.1"  # the only release of which the model is exact
SECOND = 1_000_000_000

Step = tuple[str, dict[str, Any]]

sequences = st.integers(0, 9)
subjects = st.sampled_from(["s.a", "s.b", "s.c.d"])
patterns = st.sampled_from(["s.a", "s.b", "s.*", "s.>", ">", "zz", "s.c.d"])
payloads = st.sampled_from([b"", b"x", b"x" * 30])
# Before and after all messages: stored times differ between two servers.
instants = st.sampled_from(["2020-01-01T00:00:00Z", "2100-01-01T00:00:00+01:00", "x"])


def some(**choices: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return dicts with at most three of these keys."""
    return st.fixed_dictionaries({}, optional=choices).flatmap(
        lambda found: st.sets(st.sampled_from(sorted(found) or [""]), max_size=3).map(
            lambda keep: {key: value for key, value in found.items() if key in keep}
        )
    )


stream_configs = some(
    max_msgs=st.integers(1, 4),
    max_bytes=st.sampled_from([60, 120, 300]),
    max_msgs_per_subject=st.integers(1, 3),
    discard=st.sampled_from(["old", "new"]),
    retention=st.sampled_from(["limits", "interest", "workqueue"]),
    max_msg_size=st.sampled_from([20, 60]),
    allow_rollup_hdrs=st.just(True),
    allow_msg_ttl=st.just(True),
    subject_delete_marker_ttl=st.just(60 * SECOND),
    deny_delete=st.just(True),
    deny_purge=st.just(True),
    storage=st.sampled_from(["memory", "file"]),
    first_seq=st.just(5),
)
header_lines = some(
    **{
        "Nats-Expected-Last-Sequence": sequences,
        "Nats-Expected-Last-Subject-Sequence": sequences,
        "Nats-Expected-Last-Subject-Sequence-Subject": patterns,
        "Nats-Expected-Last-Msg-Id": st.sampled_from(["i", "j"]),
        "Nats-Expected-Stream": st.sampled_from(["S", "T"]),
        "Nats-Msg-Id": st.sampled_from(["i", "j", "k"]),
        "Nats-Rollup": st.sampled_from(["sub", "all", "odd"]),
        "Nats-TTL": st.sampled_from(["30", "1h", "never", "0", "x", ""]),
        "Nats-Required-Api-Level": st.sampled_from(["0", "2", "99"]),
        "X": st.just("y"),
    }
)
few_headers = st.one_of(st.just({}), st.just({}), header_lines)


def steps(**fields: st.SearchStrategy[Any]) -> Callable[[str], st.SearchStrategy[Step]]:
    return lambda name: st.tuples(st.just(name), st.fixed_dictionaries(fields))


publish = steps(subject=subjects, payload=payloads, lines=few_headers)("publish")
atomic = steps(
    subject=subjects,
    payload=payloads,
    lines=few_headers,
    batch=st.sampled_from(["b", "c"]),
    seq=st.integers(0, 4),
    commit=st.sampled_from([None, None, None, "1", "eob", "x"]),
)("atomic")
fast = steps(
    subject=subjects,
    payload=payloads,
    lines=few_headers,
    batch=st.sampled_from(["f", "g"]),
    flow=st.sampled_from([1, 2, 3, 10]),
    gap=st.sampled_from(["ok", "fail"]),
    seq=st.integers(0, 6),
    operation=st.sampled_from([0, 1, 1, 1, 2, 3, 4]),
)("fast")
# Messages of a batch in order, so that more than its first message is accepted.
atomic_run = steps(
    size=st.integers(1, 4),
    batch=st.sampled_from(["b", "c"]),
    commit=st.sampled_from(["1", "eob", None]),
    lines=few_headers,
)("atomic_run")
fast_run = steps(
    size=st.integers(1, 7),
    batch=st.sampled_from(["f", "g"]),
    flow=st.sampled_from([1, 2, 10]),
    gap=st.sampled_from(["ok", "fail"]),
    end=st.sampled_from([1, 2, 3, 4]),
)("fast_run")
get = st.tuples(
    st.just("get"),
    some(
        seq=sequences,
        last_by_subj=patterns,
        next_by_subj=patterns,
        batch=st.integers(-1, 4),
        max_bytes=st.integers(-1, 60),
        multi_last=st.lists(patterns, max_size=3),
        up_to_seq=sequences,
        start_time=instants,
        up_to_time=instants,
        no_hdr=st.booleans(),
    ),
)
get_subject = steps(subject=patterns.filter(lambda each: each != ">"))("get_subject")
msg_get = st.tuples(st.just("msg_get"), some(seq=sequences, last_by_subj=patterns, next_by_subj=patterns))
delete = steps(seq=sequences)("delete")
purge = st.tuples(st.just("purge"), some(filter=patterns, seq=sequences, keep=st.integers(0, 3)))
update = st.tuples(st.just("update"), stream_configs)
stream_info = st.just(("info", {}))
consumer_create = st.tuples(
    st.just("consumer"),
    some(
        ack_policy=st.sampled_from(["explicit", "all", "none"]),
        deliver_policy=st.sampled_from(["all", "last", "new", "last_per_subject", "by_start_sequence"]),
        opt_start_seq=sequences,
        filter_subject=patterns,
        max_ack_pending=st.integers(1, 3),
        max_deliver=st.integers(1, 3),
        headers_only=st.just(True),
        durable_name=st.just("C"),
        deliver_subject=st.just("P.push"),
    ),
)
consumer_next = steps(batch=st.integers(1, 4))("next")
consumer_ack = steps(
    seq=st.integers(1, 9), delivery=sequences, word=st.sampled_from([b"", b"+ACK", b"-NAK", b"+WPI", b"+TERM", b"+NXT"])
)("ack")
consumer_info = st.just(("consumer_info", {}))
reset = st.tuples(st.just("reset"), some(seq=sequences))

plans = {
    "publish": st.one_of(publish, publish, publish, get, get_subject, msg_get, delete, purge, update, stream_info),
    "batches": st.one_of(publish, atomic, atomic_run, fast, fast_run, fast_run, stream_info, delete, get),
    "consumers": st.one_of(
        publish,
        publish,
        consumer_create,
        consumer_next,
        consumer_next,
        consumer_ack,
        consumer_info,
        reset,
        delete,
        purge,
        stream_info,
    ),
}

# Most steps of a consumer need messages and a consumer.
beginnings = {
    "publish": st.just([]),
    "batches": st.just([]),
    "consumers": st.builds(
        lambda messages, consumer: [*messages, consumer], st.lists(publish, max_size=6), consumer_create
    ),
}


class Player:
    """Performs steps on a pair of servers."""

    def __init__(self, pair: Any, headers: Any, config: dict[str, Any]) -> None:
        self._pair = pair
        self._headers = headers
        flags = dict.fromkeys(("allow_direct", "allow_atomic", "allow_batched"), True)
        self._config = {"name": pair.name, "subjects": ["s.>"], "storage": "memory", **flags, **config}
        self._consumer_config: dict[str, Any] = {}
        pair.raw(b"SUB P.push 2\r\n")  # the deliver subject of push consumers
        self.created = pair.try_stream(self._config)

    def play(self, name: str, arguments: dict[str, Any]) -> None:
        getattr(self, f"_{name}")(**arguments)

    def _header(self, lines: dict[str, Any]) -> bytes:
        if lines.get("Nats-Expected-Stream") == "S":
            lines = lines | {"Nats-Expected-Stream": self._pair.name}
        found: bytes = self._headers(**{key.replace("-", "_"): value for key, value in lines.items()}) if lines else b""
        return found

    def _publish(self, subject: str, payload: bytes, lines: dict[str, Any]) -> None:
        self._pair.publish(subject, payload, header=self._header(lines))

    def _atomic(
        self, subject: str, payload: bytes, lines: dict[str, Any], batch: str, seq: int, commit: str | None
    ) -> None:
        own = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": seq, **({"Nats-Batch-Commit": commit} if commit else {})}
        self._pair.publish(subject, payload, header=self._header(own | lines))

    def _atomic_run(self, size: int, batch: str, commit: str | None, lines: dict[str, Any]) -> None:
        for seq in range(1, size + 1):
            last = seq == size
            self._atomic(
                "s.a" if seq % 2 else "s.b", b"run", lines if seq == 2 else {}, batch, seq, commit if last else None
            )

    def _fast(
        self,
        subject: str,
        payload: bytes,
        lines: dict[str, Any],
        batch: str,
        flow: int,
        gap: str,
        seq: int,
        operation: int,
    ) -> None:
        self._pair.publish(
            subject, payload, header=self._header(lines), reply=f"{batch}.{flow}.{gap}.{seq}.{operation}.$FI"
        )

    def _fast_run(self, size: int, batch: str, flow: int, gap: str, end: int) -> None:
        for seq in range(1, size + 1):
            self._fast("s.a", b"run", {}, batch, flow, gap, seq, end if seq == size else 0 if seq == 1 else 1)

    def _get(self, **request: Any) -> None:
        self._pair.publish(f"$JS.API.DIRECT.GET.{self._pair.name}", json.dumps(request).encode(), wait=1)

    def _get_subject(self, subject: str) -> None:
        self._pair.publish(f"$JS.API.DIRECT.GET.{self._pair.name}.{subject}", wait=1)

    def _msg_get(self, **request: Any) -> None:
        self._pair.api(f"STREAM.MSG.GET.{self._pair.name}", request)

    def _delete(self, seq: int) -> None:
        self._pair.api(f"STREAM.MSG.DELETE.{self._pair.name}", {"seq": seq, "no_erase": True})

    def _purge(self, **request: Any) -> None:
        self._pair.api(f"STREAM.PURGE.{self._pair.name}", request)

    def _update(self, **config: Any) -> None:
        wanted = {
            **self._config,
            **config,
            "storage": self._config["storage"],
            "first_seq": self._config.get("first_seq", 0),
        }
        if "error" not in self._pair.api(f"STREAM.UPDATE.{self._pair.name}", wanted):
            self._config = wanted

    def _info(self) -> None:
        self._pair.api(f"STREAM.INFO.{self._pair.name}", {"subjects_filter": ">", "deleted_details": True})

    def _consumer(self, **config: Any) -> None:
        config = {"ack_policy": "explicit", "durable_name": "C", "ack_wait": 60 * SECOND, **config}
        config = self._before_the_end(config, "opt_start_seq")
        if self._config.keys() & {"max_msgs", "max_bytes", "max_msgs_per_subject"}:
            # A delivery that follows the removal of a message may or may not count the new message as pending.
            config.pop("max_ack_pending", None)
        if config != self._consumer_config:  # the model does not change a consumer
            self._pair.api(f"CONSUMER.DELETE.{self._pair.name}.C")
        self._consumer_config = config
        self._pair.api(f"CONSUMER.CREATE.{self._pair.name}.C", {"stream_name": self._pair.name, "config": config})

    def _before_the_end(self, request: dict[str, Any], start: str) -> dict[str, Any]:
        # A real server counts new messages as pending although they are below a start beyond the end.
        if start not in request:
            return request
        end = self._pair.api(f"STREAM.INFO.{self._pair.name}").get("state", {}).get("last_seq", 0) + 1
        return request | {start: min(request[start], end)}

    def _next(self, batch: int) -> None:
        self._pair.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self._pair.name}.C", json.dumps({"batch": batch}).encode())

    def _ack(self, seq: int, delivery: int, word: bytes) -> None:
        self._pair.publish(f"$JS.ACK.{self._pair.name}.C.1.{seq}.{delivery}.1.0", word)
        # A real server processes acks later; the next step must not depend on that.
        self._consumer_info()

    def _consumer_info(self) -> None:
        self._pair.eventually(lambda: self._pair.api(f"CONSUMER.INFO.{self._pair.name}.C"))

    def _reset(self, **request: Any) -> None:
        if self._pair.api(f"CONSUMER.NAMES.{self._pair.name}")["consumers"]:
            self._pair.api(f"CONSUMER.RESET.{self._pair.name}.C", self._before_the_end(request, "seq"))
            # A real server removes messages that no consumer needs a moment later.
            self._pair.eventually(self._info)


@pytest.mark.parametrize("plan", plans)
@pytest.mark.timeout(7200)
def test_the_servers_agree(make_pair: Any, servers: Any, headers: Any, plan: str) -> None:
    @settings(
        max_examples=max((EXAMPLES or 90) // len(plans), 1),
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(config=stream_configs, beginning=beginnings[plan], script=st.lists(plans[plan], min_size=3, max_size=14))
    def agree(config: dict[str, Any], beginning: list[Step], script: list[Step]) -> None:
        for pair in make_pair(VERSION, servers):
            player = Player(pair, headers, config)
            for step in beginning + script if player.created else []:
                player.play(*step)

    agree()
