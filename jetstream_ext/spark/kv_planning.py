"""Which keys of a bucket are read, as of which revision: decided on the driver."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

from nats.js import JetStreamContext

from jetstream_ext.client.api import Api, get_at_leader
from jetstream_ext.client.context import Context
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.spark.bounds import AtSequence, AtTime
from jetstream_ext.spark.kv_options import KvOptions
from jetstream_ext.spark.planning import first_from
from jetstream_ext.spark.states import PlanningError, look

# What servers take of explicit names in one request; one place is for the canary.
NAMES_AT_ONCE: Final = 1024
_KEYS_PER_PARTITION: Final = 50_000
_LISTINGS: Final = 5


@dataclass(frozen=True, slots=True)
class KvPart:
    """Some keys of a bucket.

    Attributes:
        stream: The bucket's stream.
        prefix: What comes before the key in a subject.
        keys: The keys.
        revision: The one revision that all parts are read at.
        now: That is the present, not a point in the past.
        history: How many messages the bucket keeps of a key (0 or less: all).
        canary: The subject of the message with that revision: whoever has it has everything before it; empty: unknown.
        replicated: More than one server answers.
    """

    stream: str
    prefix: str
    keys: tuple[str, ...]
    revision: int
    now: bool
    history: int
    canary: str
    replicated: bool


async def plan_kv(context: JetStreamContext, options: KvOptions) -> list[KvPart]:
    """Return the partitions of a read.

    Raises:
        PlanningError: There is no such bucket, it cannot be read this way, or the revision is in the future.
        TimeoutError: No answer.
    """
    stream = f"KV_{options.bucket}"
    state = await look(context, stream)
    if state is None:
        raise PlanningError(
            f"bucket {options.bucket!r} does not exist; check 'bucket', 'servers', 'domain', 'apiPrefix'"
        )
    if not state.config.get("allow_direct"):
        raise PlanningError(
            f"bucket {options.bucket!r} has no allow_direct, which this read is made of; turn it on "
            f"(nats stream edit {stream} --allow-direct)"
        )
    origin = (state.config.get("mirror") or {}).get("name", stream)
    prefix = f"$KV.{origin.removeprefix('KV_')}."
    keys, last = await _keys(context, options, state, prefix)
    revision = await _revision(context, options, state, last)
    if not keys or not revision:
        return []
    js = Context(context)
    newest = await get_at_leader(js, stream, {"seq": revision}, js.timeout)
    parts = max(min(options.min_partitions, len(keys)), -(-len(keys) // _KEYS_PER_PARTITION))
    cuts = [len(keys) * part // parts for part in range(parts + 1)]
    return [
        KvPart(
            stream=stream,
            prefix=prefix,
            keys=tuple(keys[start:stop]),
            revision=revision,
            now=options.as_of is None,
            history=int(state.config.get("max_msgs_per_subject", 0)),
            canary=newest.subject if newest is not None else "",
            replicated=int(state.config.get("num_replicas", 1)) > 1,
        )
        for start, stop in itertools.pairwise(cuts)
    ]


async def _revision(context: JetStreamContext, options: KvOptions, state: StreamState, last: int) -> int:
    if isinstance(options.as_of, AtSequence):
        if options.as_of.seq > state.last_seq:
            raise PlanningError(
                f"option 'asOf': bucket {options.bucket!r} is at revision {state.last_seq}, not {options.as_of.seq} yet"
            )
        return options.as_of.seq
    if isinstance(options.as_of, AtTime):
        return await first_from(context, state, options.as_of) - 1
    return last


async def _keys(
    context: JetStreamContext, options: KvOptions, state: StreamState, prefix: str
) -> tuple[list[str], int]:
    """Return the keys, sorted, and the revision at which they were listed."""
    wild = [one for one in options.keys if one.endswith(">") or "*" in one.split(".")]
    keys = {key for key in options.keys if key not in wild}
    last = state.last_seq
    for pattern in [">"] if ">" in wild else wild:
        for _ in range(_LISTINGS):
            listed, at, steady = await _list(context, state.name, prefix + pattern)
            if steady:
                break
        else:
            if options.strict:
                raise PlanningError(
                    f"bucket {options.bucket!r}: keys disappear faster than they can be listed; read it with "
                    "consistency=latest, or fewer keys at a time"
                )
        keys.update(subject.removeprefix(prefix) for subject in listed)
        last = min(last, at) if options.as_of is None and len(wild) == 1 else last
    return sorted(keys), last


async def _list(context: JetStreamContext, stream: str, pattern: str) -> tuple[list[str], int, bool]:
    """Return the subjects of a stream, the revision at the first page, and whether none slipped between the pages."""
    js = Context(context)
    subjects: dict[str, Any] = {}
    offset, last, total, steady = 0, 0, -1, True
    while True:
        question = {"subjects_filter": pattern, "offset": offset}
        info = await Api(js, js.timeout).ask(f"STREAM.INFO.{stream}", question)
        page = info["state"].get("subjects") or {}
        if total < 0:
            last, total = int(info["state"]["last_seq"]), int(info.get("total", len(page)))
        elif int(info.get("total", total)) < total:
            steady = False
        subjects.update(page)
        offset += len(page)
        if not page or offset >= int(info.get("total", 0)):
            return list(subjects), last, steady
