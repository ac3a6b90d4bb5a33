"""The options of both formats, parsed and checked before anything is connected.

An option that would have no effect is an error. Credentials are references (a file, an environment variable) that each
worker resolves for itself, so that no secret travels in a plan. Errors and representations never repeat the value of an
option that may hold a secret.

A start is the first sequence that is read, an end the last one (both inclusive). By time, a read covers what was stored
from ``startingTime`` on and before ``endingTime``, so that ``[t0, t1)`` and ``[t1, t2)`` do not overlap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.subjects import (
    bucket_prefix,
    bucket_stream,
    check_filter,
    check_name,
    check_subject,
    covers,
)
from jetstream_ext.servers import parse_servers
from jetstream_ext.spark.ttls import parse_ttl, ttl_text
from jetstream_ext.text import did_you_mean
from jetstream_ext.types import TTL

Bound: TypeAlias = Literal["earliest", "latest"] | int | datetime
"""Where a read starts or ends: an end of the stream when the read is planned, a stream sequence, or an aware time."""

_SIZE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MOST_PARTITIONS: Final = 100_000
"""The largest number of partitions of a read: Spark keeps all of them in the memory of its driver."""
# A batch of the server has at most 1000 messages, one of which is the marker.
_MAX_TRANSACTION_ROWS: Final = 999
# For a bucket, another one may have to carry the fence.
_MAX_KEY_WRITES: Final = 998
# Options that users will try; the value is a secret and must appear nowhere.
_INLINE_SECRETS: Final = {
    "password": "passwordEnv",
    "pass": "passwordEnv",
    "token": "tokenEnv",
    "creds": "credsFile",
    "credentials": "credsFile",
    "nkey": "nkeyFile",
    "seed": "nkeyFile",
}

_Value = TypeVar("_Value")


class OptionError(ValueError):
    """An option is missing, unknown, malformed or in conflict with another; the text names it and the fix."""


class OptionReader:
    """Looks up options by name, whatever their case, and parses their values. Each problem raises OptionError.

    `known` are the options of this use, `elsewhere` those of another use and what to say about them. The error about any
    other option does not repeat its value, which may be a secret.
    """

    def __init__(self, options: Mapping[str, str], known: Iterable[str], elsewhere: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        known = [name for name in known if name not in elsewhere]
        names = {name.lower(): name for name in (*known, "path", "paths")}  # the last two are arguments of load()
        reasons = {name.lower(): reason for name, reason in elsewhere.items()}
        for name in self._options.keys() - names.keys():
            if name in reasons:
                self.fail(name, reasons[name])
            if name in _INLINE_SECRETS:
                self.fail(name, f"secrets are given by reference; use {_INLINE_SECRETS[name]!r}")
            hint = did_you_mean(name, known).removeprefix("; ") or f"the options are: {', '.join(known)}"
            self.fail(name, f"unknown option; {hint}")

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._options

    def fail(self, name: str, problem: str) -> NoReturn:
        raise OptionError(f"option {name!r}: {problem}")

    def exclude(self, *names: str) -> None:
        """Refuse more than one of `names`."""
        given = [name for name in names if name in self]
        if len(given) > 1:
            self.fail(given[0], f"it cannot be combined with {given[1]!r}; give one of them")

    def pair(self, one: str, other: str) -> None:
        """Refuse one of two options without the other."""
        for name, needed in ((one, other), (other, one)):
            if name in self and needed not in self:
                self.fail(name, f"it needs {needed!r} as well")

    def get(self, name: str, parse: Callable[[str], _Value], default: _Value) -> _Value:
        """Return the parsed value of an option; a ValueError of `parse` becomes an OptionError about it."""
        text = self._options.get(name.lower())
        if text is None:
            return default
        try:
            return parse(text)
        except (ValueError, BadSubjectError) as error:
            raise OptionError(f"option {name!r}: {error}") from None

    def values(self, kind: type) -> dict[str, Any]:
        """Return the values of the fields that `kind` declares with `_option`."""
        return {
            each.name: self.get(each.metadata["option"], each.metadata["parse"], each.default)
            for each in fields(kind)
            if each.metadata
        }

    def get_bucket(self, how: str) -> str:
        """Return the name of the bucket; `how` says how one is given."""
        bucket = self.get("bucket", _bucket, "") or self.get("path", _bucket, "")
        if not bucket:
            self.fail("bucket", f"it is missing; give the name of one bucket, {how}")
        return bucket

    def get_streams(self) -> tuple[str, ...]:
        """Return the names of the streams, from the option `stream` or the arguments of ``load``."""
        check = partial(check_name, what="stream name")
        absent: tuple[str, ...] = ()
        streams = self.get("stream", _names(check), absent)
        listed = self.get("paths", lambda text: _unique(json.loads(text), check), absent)
        loaded = self.get("path", _names(check), listed)
        if streams and loaded and streams != loaded:
            self.fail("stream", f"it says {','.join(streams)}, but load() says {','.join(loaded)}; give one of them")
        if not streams and not loaded:
            self.fail("stream", "it is missing; give the name of the stream, here or as in load('ORDERS')")
        return streams or loaded


def _option(name: str, parse: Callable[[str], Any], default: Any = None) -> Any:
    """Declare a field: the option that sets it, how the option is parsed, and the value if it is not given."""
    return field(default=default, metadata={"option": name, "parse": parse})


def _declared(kind: type) -> list[str]:
    return [each.metadata["option"] for each in fields(kind) if each.metadata]


# -- values -------------------------------------------------------------------------------------------------------


def _unique(names: Iterable[str], check: Callable[[str], None]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(names))
    for name in unique:
        check(name)
    return unique


def _names(check: Callable[[str], None]) -> Callable[[str], tuple[str, ...]]:
    return lambda text: _unique((part.strip() for part in text.split(",")), check)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def _text_checked_by(check: Callable[[str], None]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        text = _text(text)
        check(text)
        return text

    return parse


def _text_like(pattern: str, what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        text = text.strip()
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {what}")
        return text

    return parse


_subject = _text_checked_by(check_subject)


def _bad_row_policy(text: str) -> str:
    """Parse ``onBadRow``: ``fail``, ``drop``, or the subject of dead letters."""
    word = text.strip().lower()
    return word if word in ("fail", "drop") else _subject(text)


_bucket = _text_like(r"[A-Za-z0-9_-]+", "a valid bucket name (characters of A-Z, a-z, 0-9, _ and -)")
_application_id = _text_like(r"[A-Za-z0-9_.-]{1,128}", "1 to 128 characters of A-Z, a-z, 0-9, _, . and -")
_write_id = _text_like(r"[A-Za-z0-9_-]{1,64}", "1 to 64 characters of A-Z, a-z, 0-9, _ and -")


def _version(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise ValueError(f"{text!r} is not an integer of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or not int(text):
        raise ValueError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _partitions(text: str) -> int:
    number = _positive(text)
    if number > MOST_PARTITIONS:
        raise ValueError(f"{number} is more than {MOST_PARTITIONS}, which is the most that a read can have")
    return number


def _transaction_rows(most: int, others: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        rows = _positive(text)
        if rows > most:
            raise ValueError(
                f"{rows} is more than {most}: by default servers accept 1000 messages in one batch, and {others}"
            )
        return rows

    return parse


_rows_and_a_marker = _transaction_rows(_MAX_TRANSACTION_ROWS, "one is the marker")
_key_writes = _transaction_rows(_MAX_KEY_WRITES, "two are the sink's own")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})([kmg]?)b?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is not a number of bytes such as 67108864 or 64m")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise ValueError(f"{text!r} is not a number of seconds over 0 and up to 3600")
    return value


def _delay(text: str) -> float:
    """Parse a duration as Spark and Kafka's source write it: ``15m``, ``90s``, ``500ms``, ``1h``."""
    match = re.fullmatch(r"([0-9]{1,9})(ms|s|m|min|h)", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 500ms, 90s, 15m or 1h")
    return int(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}[match[2]]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(_text(text))
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None


def _choice(**values: _Value) -> Callable[[str], _Value]:
    def parse(text: str) -> _Value:
        word = text.strip().lower()
        if word not in values:
            raise ValueError(f"{text!r} is not one of {', '.join(values)}{did_you_mean(text.strip(), values)}")
        return values[word]

    return parse


_boolean = _choice(true=True, false=False)


def _servers(text: str) -> tuple[str, ...]:
    servers = parse_servers(text)
    if servers.user is not None:
        raise ValueError(
            "a URL has credentials in it; give them by reference "
            "(user and passwordEnv, tokenEnv, credsFile or nkeyFile)"
        )
    return servers.urls


def _time(value: Any) -> datetime:
    example = "2026-01-31T13:45:00Z"
    try:
        when = datetime.fromisoformat(value.strip())
    except (AttributeError, ValueError):
        raise ValueError(f"{value!r} is not an RFC 3339 time such as {example}") from None
    if when.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; write it with Z or an offset, such as {example}")
    return when


def _offset(value: Any) -> Bound:
    match value.strip().lower() if isinstance(value, str) else value:
        case "earliest" | "latest" as end:
            return end
        case int(seq) if not isinstance(value, bool) and 1 <= seq < 1 << 63:
            return seq
    raise ValueError(
        f"{value!r} is not 'earliest', 'latest' or, in JSON such as {{\"ORDERS\": 42}}, a stream sequence (an integer of at least 1)"
    )


def _feed_start(text: str) -> Literal["snapshot", "latest"] | int:
    match text.strip().lower():
        case "snapshot" | "latest" as start:
            return start
        case number if re.fullmatch(r"[0-9]{1,18}", number) and int(number):
            return int(number)
    raise ValueError(f"{text!r} is not 'snapshot', 'latest' or a revision (an integer of at least 1)")


def _as_of(text: str) -> int | datetime | None:
    text = text.strip()
    if text.lower() == "now":
        return None
    return _positive(text) if text.isdigit() else _time(text)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The start or the end of every stream: its own one in `each`, or else the common one."""

    common: Bound
    each: Mapping[str, Bound] = field(default_factory=dict)

    def of(self, stream: str) -> Bound:
        return self.each.get(stream, self.common)


def _bounds(
    reader: OptionReader, side: Literal["starting", "ending"], streams: Sequence[str] | None, default: Bound
) -> Bounds:
    """Return the starts or the ends: one for all streams, or JSON with one for each; `streams` is None for a pattern."""
    offsets, time = f"{side}Offsets", f"{side}Time"
    reader.exclude(offsets, time)
    name, parse = (time, _time) if time in reader else (offsets, _offset)

    def bounds(text: str) -> Bounds:
        if not text.lstrip().startswith("{"):
            return Bounds(parse(text))
        try:
            pairs = json.loads(text, object_pairs_hook=list)  # a dict would silently keep the last of two entries
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{text[:1024]!r} is not valid JSON: {error}") from None
        found: dict[str, Bound] = {}
        for stream, value in pairs:
            if streams is not None and stream not in streams:
                raise ValueError(f"it names {stream!r}, which is not among the streams to read: {', '.join(streams)}")
            if stream in found:
                raise ValueError(f"it names {stream!r} twice")
            found[stream] = parse(value)
        return Bounds(default, found)

    return reader.get(name, bounds, Bounds(default))


# -- the options of each use --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class ConnectionOptions:
    """How to reach the JetStream; also the key of the connection cache."""

    servers: tuple[str, ...] = _option("servers", _servers, ())
    domain: str | None = _option("domain", _text_checked_by(partial(check_name, what="domain")))
    api_prefix: str | None = _option("apiPrefix", lambda text: _subject(text.strip().rstrip(".")))
    timeout: float = _option("requestTimeout", _seconds, 10.0)  # to get a connection, and to wait for each reply
    creds_file: str | None = _option("credsFile", _text)  # files: a path, or the bare name of a file shipped by Spark
    nkey_file: str | None = _option("nkeyFile", _text)
    user: str | None = _option("user", _text)
    password_env: str | None = _option("passwordEnv", _text)
    token_env: str | None = _option("tokenEnv", _text)
    tls_ca: str | None = _option("tlsCa", _text)
    tls_cert: str | None = _option("tlsCert", _text)
    tls_key: str | None = _option("tlsKey", _text)
    application_id: str | None = _option("applicationId", _application_id)  # in the names of the connections

    @classmethod
    def parse(cls, reader: OptionReader) -> ConnectionOptions:
        if "servers" not in reader:
            reader.fail(
                "servers", "it is missing; give the URLs of the servers, as in nats://nats-1:4222,nats://nats-2:4222"
            )
        reader.exclude("domain", "apiPrefix")
        reader.exclude("credsFile", "nkeyFile", "user", "tokenEnv")
        reader.pair("user", "passwordEnv")
        reader.pair("tlsCert", "tlsKey")
        return cls(**reader.values(cls))

    def __repr__(self) -> str:
        # Lists only which references are given, because users may put the secret itself where its name belongs.
        shown = ("servers", "timeout", "application_id")
        given = [name for name in self.__slots__ if name not in shown and getattr(self, name)]
        return f"ConnectionOptions(servers={','.join(self.servers)!r}, with={given})"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    connection: ConnectionOptions
    streams: tuple[str, ...]  # none with a pattern
    starting: Bounds
    ending: Bounds
    subjects: tuple[str, ...] = _option("subjects", _names(check_filter), ())  # any may match; none: all messages
    stream_pattern: re.Pattern[str] | None = _option("streamPattern", _pattern)  # noqa: RUF009 - of whole names
    min_partitions: int = _option("minPartitions", _partitions, 2)
    max_bytes_per_partition: int = _option("maxBytesPerPartition", _size, 64 << 20)
    fail_on_data_loss: bool = _option("failOnDataLoss", _boolean, True)
    tail_check: bool = _option("tailCheck", _boolean, True)
    skip_bad: bool = _option("onBad", _choice(error=False, skip=True), False)
    allow_unstable_retention: bool = _option("allowUnstableRetention", _boolean, False)
    push_down: bool = _option("pushDown", _boolean, False)
    max_records_per_partition: int | None = _option("maxRecordsPerPartition", _positive)
    # What to do about a stream that was deleted and created again; None: fail, or else what `fail_on_data_loss` says.
    on_recreate: Literal["fail", "earliest", "keep"] | None = _option(
        "onRecreate", _choice(fail="fail", earliest="earliest", keep="keep")
    )
    max_rows: int | None = _option("maxRowsPerTrigger", _positive)
    max_bytes: int | None = _option("maxBytesPerTrigger", _size)
    min_rows: int | None = _option("minRowsPerTrigger", _positive)
    max_delay: float = _option("maxTriggerDelay", _delay, 900.0)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> ReadOptions:
        """Return the options, checked together; `streaming` is None where that is not known yet."""
        elsewhere = {None: {}, False: _STREAMING_ONLY, True: _BATCH_ONLY}[streaming] | _FOR_WRITING
        reader = OptionReader(options, (*READ_OPTIONS, *CONNECTION_OPTIONS), elsewhere)
        by_pattern = "streamPattern" in reader
        for name in ("stream", "path", "paths") if by_pattern else ():
            reader.exclude("streamPattern", name)
        streams = () if by_pattern else reader.get_streams()
        named = None if by_pattern else streams
        values = _read_values(reader)
        read = cls(
            connection=ConnectionOptions.parse(reader),
            streams=streams,
            starting=_bounds(reader, "starting", named, "earliest"),
            ending=_bounds(reader, "ending", named, "latest"),
            **values,
        )
        # With a pattern, "" stands for the streams that only the common start and end apply to.
        for stream in streams or ("", *read.starting.each, *read.ending.each):
            start, end = read.starting.of(stream), read.ending.of(stream)
            if end == "earliest":
                reader.fail("endingOffsets", "a read cannot end at 'earliest'; give 'latest' or a last sequence")
            if isinstance(start, datetime) and isinstance(end, datetime) and start > end:
                reader.fail("endingTime", f"the end of stream {stream!r} is before its start")
            if isinstance(start, int) and isinstance(end, int) and start > end + 1:
                reader.fail("endingOffsets", f"the end of stream {stream!r} ({end}) is before its start ({start})")
        return read


def _read_values(reader: OptionReader) -> dict[str, Any]:
    """Return the values of the declared fields of `ReadOptions`."""
    reader.exclude("maxRowsPerTrigger", "maxOffsetsPerTrigger")
    if "maxTriggerDelay" in reader and "minRowsPerTrigger" not in reader:
        reader.fail("maxTriggerDelay", "it limits the wait for minRowsPerTrigger; give that as well, or leave it out")
    values = reader.values(ReadOptions)
    # Kafka's name for it. Kafka's offsets have no gaps, so there it counts rows as well.
    values["max_rows"] = reader.get("maxOffsetsPerTrigger", _positive, values["max_rows"])
    return values


@dataclass(frozen=True, slots=True)
class WriteOptions:
    connection: ConnectionOptions
    stream: str
    subject: str | None = _option("subject", _subject)  # of every row, instead of a column
    semantics: Literal["dedupe", "transactional", "none"] = _option(
        "semantics", _choice(dedupe="dedupe", transactional="transactional", none="none"), "dedupe"
    )
    msg_ttl: str | None = _option("msgTtl", ttl_text)  # of every row, instead of a column; as ``Nats-TTL`` has it
    on_bad_row: str = _option("onBadRow", _bad_row_policy, "fail")
    write_id: str | None = _option("writeId", _write_id)
    txn_app_id: str | None = _option("txnAppId", _write_id)  # with `txn_version`, instead of `write_id`
    txn_version: int | None = _option("txnVersion", _version)
    sink_partitions: int | None = _option("sinkPartitions", _positive)
    marker_prefix: str = _option("markerPrefix", _subject)  # ``_spark.<stream>`` if it is not given
    transaction_rows: int = _option("transactionRows", _rows_and_a_marker, _MAX_TRANSACTION_ROWS)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        reader = OptionReader(options, (*WRITE_OPTIONS, *CONNECTION_OPTIONS, *_SPARK_SINK_OPTIONS), _FOR_READING)
        stream, *more = reader.get_streams()
        if more:
            reader.fail("stream", f"a write goes to one stream, not to {', '.join((stream, *more))}")
        values = reader.values(cls)
        values["marker_prefix"] = values["marker_prefix"] or f"_spark.{stream}"
        write = cls(ConnectionOptions.parse(reader), stream, **values)
        reader.exclude("writeId", "txnAppId")
        reader.pair("txnAppId", "txnVersion")
        for name in ("writeId", "txnAppId"):
            if name in reader and streaming:
                reader.fail(
                    name, "it is for batch writes; a streaming query takes its id from its checkpoint; leave it out"
                )
            if name in reader and write.semantics == "none":
                reader.fail(name, "it has no effect with semantics=none; leave it out, or use dedupe")
        if write.semantics != "transactional":
            for name in ("sinkPartitions", "markerPrefix", "transactionRows"):
                if name in reader:
                    reader.fail(name, f"it is for semantics=transactional, not for {write.semantics}; leave it out")
        elif write.sink_partitions is None and (streaming or write.write_id or write.txn_app_id):
            reader.fail(
                "sinkPartitions",
                "it is missing; a transactional write that can be repeated must have the same partitions each time: "
                "give their number, and fix it with df.repartition(n) or the source's minPartitions",
            )
        elif covers(f"{write.marker_prefix}.>", write.on_bad_row):
            reader.fail(
                "onBadRow", f"subjects below {write.marker_prefix!r} are for the markers of the sink; give another"
            )
        return write


@dataclass(frozen=True, slots=True)
class KvOptions:
    connection: ConnectionOptions
    bucket: str
    keys: tuple[str, ...] = _option("keys", _names(check_filter), (">",))  # keys and patterns of keys
    as_of: int | datetime | None = _option("asOf", _as_of)  # noqa: RUF009 - a revision, a time, or now
    include_deleted: bool = _option("includeDeleted", _boolean, False)
    # Fail where the value that a key had then is no longer stored, instead of returning its present value.
    strict: bool = _option("consistency", _choice(latest=False, strict=True), False)
    min_partitions: int = _option("minPartitions", _partitions, 2)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> KvOptions:
        """Return the options of a batch read; `streaming` is None where it is not known yet whether it is one."""
        reader = _bucket_reader(options, {} if streaming is None else _FEED_ONLY)
        return cls(ConnectionOptions.parse(reader), reader.get_bucket(_LOADED), **reader.values(cls))


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """The options of the change feed of a bucket."""

    bucket: str
    read: ReadOptions  # of the bucket's stream
    keys: tuple[str, ...] = _option("keys", _names(check_filter), (">",))
    starting: Literal["snapshot", "latest"] | int = _option("startingOffsets", _feed_start, "snapshot")
    include_deleted: bool = _option("includeDeleted", _boolean, False)  # in the snapshot

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = True) -> FeedOptions:
        """Return the options of a streaming read; `streaming` is None where it is not known yet whether it is one."""
        reader = _bucket_reader(options, {} if streaming is None else _KV_BATCH_ONLY)
        bucket, own = reader.get_bucket(_LOADED), reader.values(cls)
        start = own["starting"]
        read = ReadOptions(
            connection=ConnectionOptions.parse(reader),
            streams=(bucket_stream(bucket),),
            starting=Bounds("earliest" if start == "snapshot" else start),
            ending=Bounds("latest"),
            # Other subjects that the bucket's stream may store are never keys.
            **_read_values(reader) | {"subjects": tuple(bucket_prefix(bucket) + key for key in own["keys"])},
        )
        if streaming and "includeDeleted" in reader and start != "snapshot":
            reader.fail(
                "includeDeleted",
                f"it applies to the snapshot, and a query with startingOffsets={start} reads no snapshot. Changes always include deletions; "
                "leave it out",
            )
        return cls(bucket, read, **own)


_LOADED: Final = "here or as in load('PRICES')"


def _bucket_reader(options: Mapping[str, str], elsewhere: dict[str, str]) -> OptionReader:
    known = dict.fromkeys((*KV_OPTIONS, *FEED_OPTIONS, *CONNECTION_OPTIONS))
    return OptionReader(options, known, elsewhere | _KV_FOR_WRITING)


@dataclass(frozen=True, slots=True)
class KvWriteOptions:
    connection: ConnectionOptions
    bucket: str
    ttl: TTL | None = _option("ttl", parse_ttl)  # noqa: RUF009 - of every value, instead of a column
    on_bad_row: str = _option("onBadRow", _bad_row_policy, "fail")
    write_id: str | None = _option("writeId", _write_id)
    txn_app_id: str | None = _option("txnAppId", _write_id)  # with `txn_version`, instead of `write_id`
    txn_version: int | None = _option("txnVersion", _version)
    per_micro_batch: bool = _option("perMicroBatch", _boolean, False)  # the same, but Spark names both (`upsert`)
    marker_prefix: str = _option("markerPrefix", _subject)  # ``_spark.KV_<bucket>`` if it is not given
    transaction_rows: int = _option("transactionRows", _key_writes, _MAX_KEY_WRITES)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> KvWriteOptions:
        reader = OptionReader(options, (*KV_WRITE_OPTIONS, *CONNECTION_OPTIONS, *_SPARK_SINK_OPTIONS), _KV_FOR_READING)
        bucket = reader.get_bucket("as in option('bucket', 'PRICES')")
        values = reader.values(cls)
        values["marker_prefix"] = values["marker_prefix"] or f"_spark.KV_{bucket}"
        reader.exclude("writeId", "txnAppId")
        reader.exclude("perMicroBatch", "txnAppId")
        reader.pair("txnAppId", "txnVersion")
        for name in ("writeId", "txnAppId", "perMicroBatch"):
            if name in reader and streaming:
                reader.fail(
                    name, "it is for batch writes; a streaming query takes its id from its checkpoint; leave it out"
                )
        write = cls(ConnectionOptions.parse(reader), bucket, **values)
        if covers("$KV.>", f"{write.marker_prefix}.>"):
            reader.fail(
                "markerPrefix", "below '$KV', the markers would be keys of a bucket; give a prefix outside of it"
            )
        if covers(f"{write.marker_prefix}.>", write.on_bad_row):
            reader.fail(
                "onBadRow", f"subjects below {write.marker_prefix!r} are for the markers of the sink; give another"
            )
        return write


CONNECTION_OPTIONS: Final = tuple(_declared(ConnectionOptions))
READ_OPTIONS: Final = (
    "stream",
    *_declared(ReadOptions),
    *("startingOffsets", "startingTime", "endingOffsets", "endingTime", "maxOffsetsPerTrigger"),
)
WRITE_OPTIONS: Final = ("stream", *_declared(WriteOptions))
KV_OPTIONS: Final = ("bucket", *_declared(KvOptions))
KV_WRITE_OPTIONS: Final = ("bucket", *_declared(KvWriteOptions))
FEED_OPTIONS: Final = (
    "bucket",
    *_declared(FeedOptions),
    *("minPartitions", "maxRecordsPerPartition", "failOnDataLoss", "onRecreate", "tailCheck"),
    *("maxRowsPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minRowsPerTrigger", "maxTriggerDelay"),
)
_SPARK_SINK_OPTIONS: Final = ("checkpointLocation", "queryName")  # Spark passes them on to the sink

_NO_END: Final = "it is for batch reads; a streaming query has no end (use trigger(availableNow=True))"
_BATCH_ONLY: Final = {
    "endingOffsets": _NO_END,
    "endingTime": _NO_END,
    "pushDown": "Spark does not push filters into streaming reads; leave it out and use 'subjects'",
    "maxBytesPerPartition": "it is for batch reads; a micro-batch has the same number of partitions each time: set their "
    "number with 'minPartitions', or their size with 'maxRecordsPerPartition'",
}
_STREAMING_ONLY: Final = {
    **dict.fromkeys(
        ("maxRowsPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minRowsPerTrigger", "maxTriggerDelay"),
        "it limits streaming reads and has no effect on a batch read; leave it out",
    ),
    "onRecreate": "it applies to streaming reads and has no effect on a batch read; leave it out",
}
_FOR_READING: Final = {
    name: "it applies only to reads; leave it out" for name in READ_OPTIONS if name not in WRITE_OPTIONS
}
_KV_FOR_READING: Final = {
    name: "it applies only to reads; leave it out"
    for name in (*KV_OPTIONS, *FEED_OPTIONS)
    if name not in KV_WRITE_OPTIONS
}
_KV_FOR_WRITING: Final = {
    name: "it applies only to writes; leave it out"
    for name in KV_WRITE_OPTIONS
    if name not in (*KV_OPTIONS, *FEED_OPTIONS)
}
_KV_BATCH_ONLY: Final = {
    "asOf": "it is for batch reads; a streaming query starts at 'startingOffsets'",
    "consistency": "it is for batch reads; the snapshot of a streaming query leaves out keys that change before they are read, "
    "and their changes follow",
}
_FEED_ONLY: Final = {
    name: "it applies to streaming reads and has no effect on a batch read; leave it out"
    for name in FEED_OPTIONS
    if name not in KV_OPTIONS
}
_FOR_WRITING: Final = {
    **{name: "it applies only to writes; leave it out" for name in WRITE_OPTIONS if name not in READ_OPTIONS},
    "subject": "it applies only to writes; to read some subjects only, use 'subjects'",
}
