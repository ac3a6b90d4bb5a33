"""The options of both formats, parsed and checked before anything is connected.

Every option is known by name: a misspelt one, or one that would have no effect, is an error that names it and the fix.
Credentials are references (a file, an environment variable) that each worker resolves for itself, so that no secret
travels in a plan. Errors and representations never repeat the value of an option that may hold a secret.

A start is the first sequence that is read, an end the last one (both inclusive). By time, a read covers what was stored
from ``startingTime`` on and before ``endingTime``, so that ``[t0, t1)`` and ``[t1, t2)`` do not overlap.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.subjects import check_filter, check_name, check_subject
from jetstream_ext.spark.errors import OptionError

CONNECTION_OPTIONS: Final = (
    "servers",
    "domain",
    "apiPrefix",
    "requestTimeout",
    "credsFile",
    "nkeyFile",
    "user",
    "passwordEnv",
    "tokenEnv",
    "tlsCa",
    "tlsCert",
    "tlsKey",
)
READ_OPTIONS: Final = (
    "stream",
    "subjects",
    "startingOffsets",
    "startingTime",
    "endingOffsets",
    "endingTime",
    "minPartitions",
    "maxBytesPerPartition",
    "failOnDataLoss",
    "tailCheck",
    "allowUnstableRetention",
    "pushDown",
)
STREAMING_OPTIONS: Final = ("maxOffsetsPerTrigger", "maxMessagesPerTrigger", "maxBytesPerTrigger")
WRITE_OPTIONS: Final = (
    "stream",
    "subject",
    "semantics",
    "natsHeaders",
    "writeId",
    "sinkPartitions",
    "markerPrefix",
    "transactionRows",
)
KV_OPTIONS: Final = ("bucket", "keys", "asOf", "includeDeleted", "consistency", "minPartitions")

_LOAD_ARGUMENTS: Final = ("path", "paths")
_SPARK_SINK_OPTIONS: Final = ("checkpointLocation", "queryName")  # Spark passes them on to the sink
_BATCH_ONLY: Final = {
    "endingOffsets": "it ends batch reads; a streaming query has no end (use trigger(availableNow=True))",
    "endingTime": "it ends batch reads; a streaming query has no end (use trigger(availableNow=True))",
    "pushDown": "Spark passes no filters to streaming reads; leave it out and use 'subjects'",
    "maxBytesPerPartition": "the partitions of a micro-batch must not depend on what the stream holds at the moment, or "
    "a replay would be cut differently; set their number with 'minPartitions'",
}
_FOR_WRITING: Final = {
    **{name: "it belongs to writing; leave it out" for name in WRITE_OPTIONS if name != "stream"},
    "subject": "it belongs to writing; to read some subjects only, use 'subjects'",
}
_FOR_READING: Final = {
    name: "it belongs to reading; leave it out" for name in (*READ_OPTIONS, *STREAMING_OPTIONS) if name != "stream"
}
_SCHEMES: Final = ("nats", "tls", "ws", "wss")
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
_SIZE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# A batch of the server has at most 1000 messages, one of which is the marker.
_MAX_TRANSACTION_ROWS: Final = 999

_Value = TypeVar("_Value")


class OptionReader:
    """Looks up options by name, whatever their case, and parses their values.

    Args:
        options: The options as Spark passes them.
        known: The options that have a meaning here.
        elsewhere: Options that have a meaning somewhere else, and what to say about them.

    Raises:
        OptionError: An option is unknown here. Its value is not repeated: it may be a secret.
    """

    def __init__(
        self, options: Mapping[str, str], *, known: Collection[str], elsewhere: Mapping[str, str] | None = None
    ) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in (*known, *_LOAD_ARGUMENTS)}
        reasons = {name.lower(): reason for name, reason in (elsewhere or {}).items()}
        for name in self._options.keys() - names.keys():
            if name in reasons:
                self.fail(name, reasons[name])
            if name in _INLINE_SECRETS:
                self.fail(name, f"secrets are given by reference; use {_INLINE_SECRETS[name]!r}")
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {names[close[0]]!r}?" if close else f"known are: {', '.join(known)}"
            self.fail(name, f"there is no such option; {hint}")

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._options

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise the error about an option."""
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

    def get_names(self, option: str, check: Callable[[str], None]) -> tuple[str, ...]:
        """Return the comma-separated, checked names of an option, each once."""
        return self.get(option, lambda text: _checked((part.strip() for part in text.split(",")), check), ())

    def get_streams(self) -> tuple[str, ...]:
        """Return the names of the streams, from the option `stream` or the arguments of ``load``."""

        def check(name: str) -> None:
            check_name(name, "stream name")

        streams = self.get_names("stream", check)
        loaded = self.get_names("path", check) or self.get("paths", lambda text: _checked(json.loads(text), check), ())
        if streams and loaded and streams != loaded:
            self.fail("stream", f"it says {','.join(streams)}, but load() says {','.join(loaded)}; give one of them")
        if not streams and not loaded:
            self.fail("stream", "it is missing; give the name of the stream, here or as in load('ORDERS')")
        return streams or loaded


def _checked(names: Iterable[str], check: Callable[[str], None]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(names))
    for name in unique:
        check(name)
    return unique


# -- values -------------------------------------------------------------------------------------------------------


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or not int(text):
        raise ValueError(f"{text!r} is not an integer from 1")
    return int(text)


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


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return word

    return parse


def _boolean(text: str) -> bool:
    return _choice("true", "false")(text) == "true"


def _subject(text: str) -> str:
    subject = _text(text)
    check_subject(subject)
    return subject


def _domain(text: str) -> str:
    name = _text(text)
    check_name(name, "domain")
    return name


def _api_prefix(text: str) -> str:
    return _subject(text.strip().rstrip("."))


def _write_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise ValueError(f"{text!r} is not 1 to 64 characters of A-Z, a-z, 0-9, _ and -")
    return text


def _transaction_rows(text: str) -> int:
    rows = _positive(text)
    if rows > _MAX_TRANSACTION_ROWS:
        raise ValueError(f"{rows} rows and a marker are more than the 1000 messages that servers accept in one batch")
    return rows


def _check_bucket(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"{name!r} is not a bucket name")


def _servers(text: str) -> tuple[str, ...]:
    servers: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        url = part if "://" in part else f"nats://{part}"
        if "@" in url:
            raise ValueError(
                "a URL has credentials in it; give them by reference "
                "(user and passwordEnv, tokenEnv, credsFile or nkeyFile)"
            )
        try:
            parts = urlsplit(url)
            valid = bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.scheme not in _SCHEMES:
            raise ValueError(f"{part!r} is not a server URL such as nats://host:4222 (or {', '.join(_SCHEMES[1:])})")
        servers.append(url)
    if not servers:
        raise ValueError("it is empty; give at least one URL such as nats://host:4222")
    return tuple(dict.fromkeys(servers))


# -- where a read starts and ends ---------------------------------------------------------------------------------


class Named(Enum):
    """An end of the stream at the time the read is planned."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class AtSequence:
    """A stream sequence."""

    seq: int


@dataclass(frozen=True, slots=True)
class AtTime:
    """A timezone-aware moment."""

    when: datetime


Bound = Named | AtSequence | AtTime


def _bounds(reader: OptionReader, end: str, streams: Sequence[str], default: Named) -> dict[str, Bound]:
    """Return the start or the end of every stream, from ``<end>Offsets`` or ``<end>Time``."""
    offsets, time = f"{end}Offsets", f"{end}Time"
    reader.exclude(offsets, time)
    bounds: dict[str, Bound] = dict.fromkeys(streams, default)
    if time in reader:
        return reader.get(time, lambda text: _times(text, streams, default), bounds)
    return reader.get(offsets, lambda text: _offsets(text, streams, default), bounds)


def _offsets(text: str, streams: Sequence[str], default: Named) -> dict[str, Bound]:
    """Parse ``earliest``, ``latest`` or JSON such as ``{"ORDERS": 42, "RETURNS": "latest"}``."""
    if (named := _named(text)) is not None:
        return dict.fromkeys(streams, named)
    if not text.lstrip().startswith("{"):
        raise ValueError(f'{text!r} is not earliest, latest, or JSON such as {{"{streams[0]}": 42}}')

    def bound(value: Any) -> Bound:
        if isinstance(value, str) and (name := _named(value)) is not None:
            return name
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 63:
            raise ValueError(f"{value!r} is not a stream sequence (an integer from 1), 'earliest' or 'latest'")
        return AtSequence(value)

    return _per_stream(text, streams, default, bound)


def _times(text: str, streams: Sequence[str], default: Named) -> dict[str, Bound]:
    """Parse an RFC 3339 time with its zone, or JSON with one per stream."""
    if text.lstrip().startswith("{"):
        return _per_stream(text, streams, default, _time)
    return dict.fromkeys(streams, _time(text))


def _named(text: str) -> Named | None:
    word = text.strip().lower()
    return Named(word) if word in ("earliest", "latest") else None


def _time(value: Any) -> AtTime:
    example = "2026-01-31T13:45:00Z"
    try:
        when = datetime.fromisoformat(value.strip())
    except (AttributeError, ValueError):
        raise ValueError(f"{value!r} is not an RFC 3339 time such as {example}") from None
    if when.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; write it with Z or an offset, such as {example}")
    return AtTime(when)


def _per_stream(text: str, streams: Sequence[str], default: Named, bound: Callable[[Any], Bound]) -> dict[str, Bound]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)  # a dict would silently keep the last of two entries
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    bounds: dict[str, Bound] = {}
    for stream, value in pairs:
        if stream not in streams:
            raise ValueError(f"it names {stream!r}, which is not among the streams that are read: {', '.join(streams)}")
        if stream in bounds:
            raise ValueError(f"it names {stream!r} twice")
        bounds[stream] = bound(value)
    return {stream: bounds.get(stream, default) for stream in streams}


def _as_of(text: str) -> AtSequence | AtTime | None:
    text = text.strip()
    if text.lower() == "now":
        return None
    return AtSequence(_positive(text)) if text.isdigit() else _time(text)


# -- the options of each use --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class ConnectionOptions:
    """How to reach the JetStream; also the key of the connection cache.

    Attributes:
        servers: URLs without credentials.
        creds_file: Path of a ``.creds`` file, or the bare name of one shipped with ``--files``.
        nkey_file: The same for an nkey seed.
        user: User name; needs `password_env`.
        password_env: Name of the environment variable that holds the password.
        token_env: Name of the environment variable that holds the token.
        tls_ca: Path of the CA certificates to trust instead of the system's.
        tls_cert: Path of the client's certificate.
        tls_key: Path of its key.
        timeout: Seconds to get a connection, and to wait for each reply.
        domain: JetStream domain.
        api_prefix: Prefix of the JetStream API, such as of an imported account.
    """

    servers: tuple[str, ...]
    creds_file: str | None = None
    nkey_file: str | None = None
    user: str | None = None
    password_env: str | None = None
    token_env: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    timeout: float = 10.0
    domain: str | None = None
    api_prefix: str | None = None

    @classmethod
    def parse(cls, reader: OptionReader) -> ConnectionOptions:
        """Read how to connect.

        Raises:
            OptionError: An option is missing, malformed or in conflict with another.
        """
        if "servers" not in reader:
            reader.fail(
                "servers", "it is missing; give the URLs of the servers, as in nats://nats-1:4222,nats://nats-2:4222"
            )
        reader.exclude("domain", "apiPrefix")
        reader.exclude("credsFile", "nkeyFile", "user", "tokenEnv")
        reader.pair("user", "passwordEnv")
        reader.pair("tlsCert", "tlsKey")
        return cls(
            servers=reader.get("servers", _servers, ()),
            creds_file=reader.get("credsFile", _text, None),
            nkey_file=reader.get("nkeyFile", _text, None),
            user=reader.get("user", _text, None),
            password_env=reader.get("passwordEnv", _text, None),
            token_env=reader.get("tokenEnv", _text, None),
            tls_ca=reader.get("tlsCa", _text, None),
            tls_cert=reader.get("tlsCert", _text, None),
            tls_key=reader.get("tlsKey", _text, None),
            timeout=reader.get("requestTimeout", _seconds, 10.0),
            domain=reader.get("domain", _domain, None),
            api_prefix=reader.get("apiPrefix", _api_prefix, None),
        )

    def __repr__(self) -> str:
        # Only which references are given: users put the secret itself where its name belongs.
        given = [name for name in self.__slots__ if name not in ("servers", "timeout") and getattr(self, name)]
        return f"ConnectionOptions(servers={','.join(self.servers)!r}, with={given})"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read of streams.

    Attributes:
        connection: How to connect.
        streams: The stream names, each once; at least one.
        subjects: Filters, any of which lets a message through; none means all messages.
        starting: Where each stream starts.
        ending: Where each stream ends.
        min_partitions: The least number of partitions, if there are as many sequences.
        max_bytes_per_partition: Approximate limit of a partition's messages in bytes.
        fail_on_data_loss: Fail where messages that should be there are gone, instead of logging a warning.
        tail_check: Prove the end of every partition at the stream's leader.
        allow_unstable_retention: Read streams whose consumers' acknowledgements delete messages.
        push_down: Use the filters that Spark pushes down.
        max_offsets: Limit of a micro-batch in sequences.
        max_bytes: Approximate limit of a micro-batch in bytes of messages.
    """

    connection: ConnectionOptions
    streams: tuple[str, ...]
    subjects: tuple[str, ...]
    starting: Mapping[str, Bound]
    ending: Mapping[str, Bound]
    min_partitions: int = 2
    max_bytes_per_partition: int = 64 << 20
    fail_on_data_loss: bool = True
    tail_check: bool = True
    allow_unstable_retention: bool = False
    push_down: bool = False
    max_offsets: int | None = None
    max_bytes: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> ReadOptions:
        """Parse the options of a read.

        Args:
            options: The options as Spark passes them.
            streaming: Whether they belong to a streaming query; None where that is not known yet.

        Raises:
            OptionError: An option is missing, unknown, malformed or in conflict with another.
        """
        reader = _read_option_reader(options, streaming)
        reader.exclude("maxOffsetsPerTrigger", "maxMessagesPerTrigger")
        streams = reader.get_streams()
        max_offsets = reader.get("maxMessagesPerTrigger", _positive, None)
        read = cls(
            connection=ConnectionOptions.parse(reader),
            streams=streams,
            subjects=reader.get_names("subjects", check_filter),
            starting=_bounds(reader, "starting", streams, Named.EARLIEST),
            ending=_bounds(reader, "ending", streams, Named.LATEST),
            min_partitions=reader.get("minPartitions", _positive, 2),
            max_bytes_per_partition=reader.get("maxBytesPerPartition", _size, 64 << 20),
            fail_on_data_loss=reader.get("failOnDataLoss", _boolean, True),
            tail_check=reader.get("tailCheck", _boolean, True),
            allow_unstable_retention=reader.get("allowUnstableRetention", _boolean, False),
            push_down=reader.get("pushDown", _boolean, False),
            max_offsets=reader.get("maxOffsetsPerTrigger", _positive, max_offsets),
            max_bytes=reader.get("maxBytesPerTrigger", _size, None),
        )
        for stream in streams:
            start, end = read.starting[stream], read.ending[stream]
            if end is Named.EARLIEST:
                reader.fail("endingOffsets", "a read cannot end at 'earliest'; give 'latest' or a last sequence")
            if isinstance(start, AtTime) and isinstance(end, AtTime) and start.when > end.when:
                reader.fail("endingTime", f"stream {stream!r} would end before its start")
            if isinstance(start, AtSequence) and isinstance(end, AtSequence) and start.seq > end.seq + 1:
                reader.fail("endingOffsets", f"stream {stream!r} would end at {end.seq}, before its start {start.seq}")
        return read


def _read_option_reader(options: Mapping[str, str], streaming: bool | None) -> OptionReader:
    known: tuple[str, ...] = (*READ_OPTIONS, *CONNECTION_OPTIONS)
    elsewhere = dict(_FOR_WRITING)
    if streaming is False:
        reason = "it limits streaming reads and has no effect on a batch read; leave it out"
        elsewhere |= dict.fromkeys(STREAMING_OPTIONS, reason)
    else:
        known += STREAMING_OPTIONS
    if streaming:
        known = tuple(name for name in known if name not in _BATCH_ONLY)
        elsewhere |= _BATCH_ONLY
    return OptionReader(options, known=known, elsewhere=elsewhere)


class Semantics(Enum):
    """What a sink promises for rows that Spark passes to it more than once."""

    DEDUPE = "dedupe"
    TRANSACTIONAL = "transactional"
    NONE = "none"


class NatsHeaders(Enum):
    """What the sink does with ``Nats-*`` headers in rows, which servers act upon."""

    REFUSE = "refuse"
    STRIP = "strip"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a write to a stream.

    Attributes:
        connection: How to connect.
        stream: The stream's name.
        subject: The subject of every row, instead of a column.
        semantics: What is promised for replayed rows.
        nats_headers: What happens to ``Nats-*`` headers.
        write_id: Names a batch write, so that it can be run again.
        sink_partitions: The number of partitions that the rows have.
        marker_prefix: The subject below which the markers of transactions are stored.
        transaction_rows: The largest number of rows in a transaction.
    """

    connection: ConnectionOptions
    stream: str
    subject: str | None = None
    semantics: Semantics = Semantics.DEDUPE
    nats_headers: NatsHeaders = NatsHeaders.REFUSE
    write_id: str | None = None
    sink_partitions: int | None = None
    marker_prefix: str = ""
    transaction_rows: int = _MAX_TRANSACTION_ROWS

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Parse the options of a write.

        Raises:
            OptionError: An option is missing, unknown, malformed or in conflict with another.
        """
        known = (*WRITE_OPTIONS, *CONNECTION_OPTIONS, *_SPARK_SINK_OPTIONS)
        reader = OptionReader(options, known=known, elsewhere=_FOR_READING)
        stream, *more = reader.get_streams()
        if more:
            reader.fail("stream", f"rows are written to one stream, not to {', '.join((stream, *more))}")
        write = cls(
            connection=ConnectionOptions.parse(reader),
            stream=stream,
            subject=reader.get("subject", _subject, None),
            semantics=Semantics(reader.get("semantics", _choice(*(each.value for each in Semantics)), "dedupe")),
            nats_headers=NatsHeaders(reader.get("natsHeaders", _choice("refuse", "strip"), "refuse")),
            write_id=reader.get("writeId", _write_id, None),
            sink_partitions=reader.get("sinkPartitions", _positive, None),
            marker_prefix=reader.get("markerPrefix", _subject, f"_spark.{stream}"),
            transaction_rows=reader.get("transactionRows", _transaction_rows, _MAX_TRANSACTION_ROWS),
        )
        if write.write_id is not None and streaming:
            reader.fail("writeId", "it names a batch write; a streaming query has its own id, in its checkpoint")
        if write.write_id is not None and write.semantics is Semantics.NONE:
            reader.fail("writeId", "it has no effect with semantics=none; leave it out, or use dedupe")
        if write.semantics is not Semantics.TRANSACTIONAL:
            for name in ("sinkPartitions", "markerPrefix", "transactionRows"):
                if name in reader:
                    what = write.semantics.value
                    reader.fail(name, f"it belongs to semantics=transactional, not {what}; leave it out")
        elif write.sink_partitions is None and (streaming or write.write_id is not None):
            reader.fail(
                "sinkPartitions",
                "it is missing; a transactional write that can be repeated must have the same partitions each time: "
                "give their number, and fix it with df.repartition(n) or the source's minPartitions",
            )
        return write


@dataclass(frozen=True, slots=True)
class KvOptions:
    """The options of a read of a bucket.

    Attributes:
        connection: How to connect.
        bucket: The bucket's name.
        keys: Keys and patterns of keys.
        as_of: The point in time: a revision, a time, or now.
        include_deleted: Return the markers of deleted keys as well.
        strict: Fail where the history of a key that changed since is gone, instead of returning its present value.
        min_partitions: The least number of partitions, if there are as many keys.
    """

    connection: ConnectionOptions
    bucket: str
    keys: tuple[str, ...] = (">",)
    as_of: AtSequence | AtTime | None = None
    include_deleted: bool = False
    strict: bool = False
    min_partitions: int = 2

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> KvOptions:
        """Parse the options.

        Raises:
            OptionError: An option is missing, unknown, malformed or in conflict with another.
        """
        reader = OptionReader(options, known=(*KV_OPTIONS, *CONNECTION_OPTIONS))
        buckets = reader.get_names("bucket", _check_bucket) or reader.get_names("path", _check_bucket)
        if len(buckets) != 1:
            reader.fail("bucket", "give the name of one bucket, here or as in load('PRICES')")
        return cls(
            connection=ConnectionOptions.parse(reader),
            bucket=buckets[0],
            keys=reader.get_names("keys", check_filter) or (">",),
            as_of=reader.get("asOf", _as_of, None),
            include_deleted=reader.get("includeDeleted", _boolean, False),
            strict=reader.get("consistency", _choice("latest", "strict"), "latest") == "strict",
            min_partitions=reader.get("minPartitions", _positive, 2),
        )
