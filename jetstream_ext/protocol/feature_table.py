"""Which servers have which feature: the one table behind the checks, their errors and the documentation.

`client.streams` asks a server, `docs/_ext/feature_table.py` draws the table, and
`tests/conformance/test_feature_table.py` tries every row on every released line of servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from jetstream_ext.errors import UnsupportedFeatureError
from jetstream_ext.protocol.numbers import parse_number

RELEASES: Final = {"2.10": 0, "2.11": 1, "2.12": 2, "2.14": 4, "2.15": 5}
"""The lines of servers that are tested, oldest first (there was no 2.13), with the JetStream API level of their first release
(ADR-44); 0 is before levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature that begins with a line of servers."""

    title: str  # its name in errors and in the documentation
    calls: str  # the calls of this library that need it
    since: str  # the first line of servers that has it
    field: str = ""  # the field of the stream's configuration that enables it, if there is one
    older: str = ""  # what an older server does with a request for it

    @property
    def api_level(self) -> int:
        """The JetStream API level that has it; 0: it is older than levels."""
        return RELEASES[self.since]

    def on(self, release: str) -> bool:
        """Whether the line of servers `release`, such as ``"2.12"``, or a version of a server has it."""
        return _numbers(release) >= _numbers(self.since)

    def at(self, api_level: int) -> bool:
        """Whether a server of this API level (0: before 2.11) has it."""
        return api_level >= self.api_level

    def check(self, api_level: int, server_version: str | None, detail: str = "") -> None:
        """Raise UnsupportedFeatureError if a server of this API level lacks it; `detail` says what is stored or changed."""
        if not self.at(api_level):
            raise self.unsupported(server_version=server_version, api_level=api_level, detail=detail)

    def unsupported(
        self, *, server_version: str | None = None, api_level: int | None = None, detail: str = ""
    ) -> UnsupportedFeatureError:
        """Return the error for a server that lacks it; `detail` says what is stored or changed."""
        needs = f"{self.title} needs nats-server {self.since}"
        if self.api_level:
            needs += f" (JetStream API level {self.api_level})"
        found = server_version or "older"
        if api_level is not None:
            found += f" (level {api_level})"
        message = f"{needs}, but the server is {found}"
        return UnsupportedFeatureError(
            f"{message}; {detail}" if detail else message,
            feature=self.title,
            required_api_level=self.api_level or None,
            server_version=server_version or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk:
    """A fault of some releases in one of their features."""

    title: str  # the affected part of the feature, in errors and in the documentation
    calls: str  # the calls of this library that need it
    feature: Feature
    since: str  # the first release without the fault
    wrong: str  # what earlier releases do, after "which"

    def check(self, server_version: str | None, detail: str) -> None:
        """Raise UnsupportedFeatureError if a server of this version has the fault; `detail` says what is stored."""
        numbers = _numbers(server_version or "")  # a release candidate counts as its release
        if len(numbers) > 2 and numbers < _numbers(self.since):
            raise UnsupportedFeatureError(
                f"{self.title} needs nats-server {self.since}, but the server is {server_version}, which {self.wrong}; {detail}",
                feature=self.feature.title,
                required_api_level=self.feature.api_level,
                server_version=server_version,
            )


DIRECT_GET: Final = Feature(
    title="direct get",
    calls="`DirectGet.get`, `get_last`, `get_next`",
    since="2.10",
    field="allow_direct",
)
DIRECT_BATCH: Final = Feature(
    title="batched direct get",
    calls="`DirectGet.batch`, `scan`, `multi_last`, `get_at`, `log.LogReader`",
    since="2.11",
    field="allow_direct",
    older="answers with one message, often the wrong one",
)
MSG_TTL: Final = Feature(
    title="message TTL",
    calls="`msg_ttl=`, `ttl_headers`",
    since="2.11",
    field="allow_msg_ttl",
    older="stores the header and never expires the message",
)
DELETE_MARKERS: Final = Feature(
    title="delete markers",
    calls="`with_ttl(marker_ttl=)`, `marker_reason`",
    since="2.11",
    field="subject_delete_marker_ttl",
    older="drops the option silently",
)
ATOMIC: Final = Feature(
    title="atomic batch",
    calls="`AtomicBatch`, `publish_atomic`",
    since="2.12",
    field="allow_atomic",
    older="stores each message immediately, as an ordinary message",
)
ATOMIC_EOB: Final = Feature(
    title="end-of-batch marker",
    calls="used by `AtomicBatch` if available",
    since="2.14",
    field="allow_atomic",
    older="2.12.0 stores the marker as a message; later 2.12 releases refuse it",
)
COUNTERS: Final = Feature(
    title="counter stream",
    calls="`ensure_stream`",
    since="2.12",
    field="allow_msg_counter",
    older="drops the option silently",
)
SCHEDULES: Final = Feature(
    title="scheduled messages",
    calls="`ensure_stream`",
    since="2.12",
    field="allow_msg_schedules",
    older="drops the option silently",
)
FAST_INGEST: Final = Feature(
    title="fast ingest",
    calls="`FastPublisher`, `ingest`",
    since="2.14",
    field="allow_batched",
    older="stores every message, including pings, as a separate message",
)
CONSUMER_RESET: Final = Feature(
    title="consumer reset",
    calls="`reset_consumer`",
    since="2.14",
    older="never answers",
)
DURABLE_SOURCE: Final = Feature(
    title="durable sourcing",
    calls="`create_source_consumer`, `source_health`",
    since="2.14",
    older="2.10, 2.11: drops the consumer silently, so that a work queue can lose messages; 2.12: refuses",
)

FEATURES: Final = (
    DIRECT_GET,
    DIRECT_BATCH,
    MSG_TTL,
    DELETE_MARKERS,
    ATOMIC,
    ATOMIC_EOB,
    COUNTERS,
    SCHEDULES,
    FAST_INGEST,
    CONSUMER_RESET,
    DURABLE_SOURCE,
)
"""All rows, in the order of the documentation."""

FENCED_BATCHES: Final = Quirk(
    title="fenced atomic batch (expected_last_subject_seq)",
    calls="`expected_last_subject_seq=` in batches, `log.exactly_once`, `kv.transaction`, Spark's `transactional`",
    feature=ATOMIC,
    since="2.12.1",
    wrong="compares the expectation with another subject and commits batches whose expectations do not hold",
)
COUNTERS_IN_BATCHES: Final = Quirk(
    title="counter (Nats-Incr) in an atomic batch",
    calls='`AtomicBatch.add(headers={"Nats-Incr": "+1"})`',
    feature=ATOMIC,
    since="2.14.3",
    wrong="stores an empty value instead of the sum",
)
QUIRKS: Final = (FENCED_BATCHES, COUNTERS_IN_BATCHES)  # the faults of some releases

COUNTED_MARKER: Final = frozenset({"2.14.0", "2.14.1", "2.14.2"})
"""Releases that count the end-of-batch marker as a message, and so refuse it (10199) after as many as a batch can have."""

START_TIME_LEVEL: Final = 2
"""Servers below this API level find a time (`start_time`, `up_to_time`) at another message if sequences were deleted."""

BY_FIELD: Final = {
    feature.field: feature
    for feature in FEATURES
    if feature.field and feature.api_level and feature not in (DIRECT_BATCH, ATOMIC_EOB)
}
"""The feature that each field of a stream's configuration enables, for fields that some tested server lacks."""


def api_level(release: str) -> int:
    """Return the API level that a server of this version has at least (0: before 2.11)."""
    return max((level for line, level in RELEASES.items() if _numbers(release) >= _numbers(line)), default=0)


@lru_cache(maxsize=64)
def _numbers(release: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in release.partition("-")[0].split("."):
        number = parse_number(part)
        if number is None:
            break
        numbers.append(number)
    return tuple(numbers)
