"""The options of both formats, parsed and checked before anything is connected.

Each option is declared once, in the class of the use that has it: its names, how its value is parsed, its default, and
where it applies. An option that would have no effect is an error. Credentials are references (a file, an environment
variable) that each worker resolves for itself, so that no secret travels in a plan. Errors and representations never
repeat the value of an option that may hold a secret.

A start is the first sequence that is read, an end the last one (both inclusive). By time, a read covers what was stored
from ``startingTime`` on and before ``endingTime``, so that ``[t0, t1)`` and ``[t1, t2)`` do not overlap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn, Self, TypeAlias

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
from jetstream_ext.spark.ttls import parse_duration, parse_ttl, ttl_text
from jetstream_ext.text import did_you_mean
from jetstream_ext.types import TTL

Bound: TypeAlias = Literal["earliest", "latest"] | int | datetime
"""Where a read starts or ends: an end of the stream when the read is planned, a stream sequence, or an aware time."""

_SIZE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MOST_PARTITIONS: Final = 100_000
"""The largest number of partitions of a read: Spark keeps all of them in the memory of its driver."""
# A batch of the server has at most 1000 messages, two of which may be the sink's own.
_MAX_TRANSACTION_ROWS: Final = 998
# Options that users will try; the value is a secret and must appear nowhere.
_INLINE_SECRETS: Final = {
    **dict.fromkeys(("password", "pass"), "passwordEnv"),
    **dict.fromkeys(("creds", "credentials"), "credsFile"),
    **dict.fromkeys(("nkey", "seed"), "nkeyFile"),
    "token": "tokenEnv",
}
_EXCLUSIVE: Final = (
    ("domain", "apiPrefix"),
    ("credsFile", "nkeyFile", "user", "tokenEnv"),
    *(("streamPattern", name) for name in ("stream", "path", "paths")),
    ("writeId", "txnAppId"),
    ("perMicroBatch", "txnAppId"),
)
_TOGETHER: Final = (("user", "passwordEnv"), ("tlsCert", "tlsKey"), ("txnAppId", "txnVersion"))
# What load(), save(), a checkpoint and a query name become: options whose names no error suggests.
_OF_SPARK: Final = frozenset({"path", "paths", "checkpointLocation", "queryName"})
_NO_TABLES: Final = (
    "a table of Spark's catalog does not pass its options on (CREATE TABLE … USING, INSERT INTO, saveAsTable or toTable "
    "without options): use load(), save(), start(), or CREATE TEMPORARY VIEW … USING {} OPTIONS (…)"
)

_Parser: TypeAlias = Callable[[str], Any]


class OptionError(ValueError):
    """An option is missing, unknown, malformed or in conflict with another; the text names it and the fix."""


# -- declarations -------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """A setting: the options that set it, of which one may be given, each with its parser."""

    parsers: Mapping[str, _Parser]
    default: Any
    only: str  # "batch" or "streaming"; "": both
    instead: str  # what to do where it does not apply
    required: str  # how to give it; "": it need not be given


def _option(
    *, default: Any = None, only: str = "", instead: str = "leave it out", required: str = "", **parsers: _Parser
) -> Any:
    return Option(parsers, default, only, instead, required)


class Options:
    """The options of one use, as attributes: those that are declared with `_option`, and `connection`.

    Not a dataclass, which takes a millisecond to make in each of the processes that Spark starts.
    """

    use: ClassVar[str] = ""
    when: ClassVar[str] = ""  # "batch" or "streaming"; "": both
    declared: ClassVar[dict[str, Option]] = {}

    def __init_subclass__(cls, use: str = "", when: str = "") -> None:
        cls.use, cls.when = use or cls.use, when
        cls.declared = {name: value for name, value in vars(cls).items() if isinstance(value, Option)} | cls.declared

    def __init__(self, **values: Any) -> None:
        vars(self).update({name: option.default for name, option in self.declared.items()} | values)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        given = (name for name, option in self.declared.items() if getattr(self, name) != option.default)
        return f"{type(self).__name__}({', '.join(given)})"  # no values: some may be secrets

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> Self:
        """Return the options, checked together; `streaming` is None where that is not known yet."""
        given = Given(options, cls, streaming)
        connection = ConnectionOptions(**given.values(ConnectionOptions))
        parsed = cls(connection=connection, **given.values(cls))
        parsed.check(given, streaming=streaming)
        return parsed

    def check(self, given: Given, *, streaming: bool | None) -> None:
        """Raise OptionError if the options do not fit together."""

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options, without those that Spark makes of its own arguments."""
        return [name for option in cls.declared.values() for name in option.parsers if name not in _OF_SPARK]


class Given:
    """The options that are given, by name, whatever their case. Each problem raises OptionError.

    The error about an unknown option does not repeat its value, which may be a secret.
    """

    def __init__(self, options: Mapping[str, str], kind: type[Options], streaming: bool | None) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        self._format, kinds = next((name, kinds) for name, kinds in _FORMATS.items() if kind in kinds)
        if "provider" in self._options:  # of CREATE TABLE, for which Spark asks for the columns
            raise OptionError(_NO_TABLES.format(self._format))
        when = None if streaming is None else kind.when or ("streaming" if streaming else "batch")
        every = [(one, option) for one in kinds for option in one.declared.values()]

        if when is None:
            here = [option for one, option in every if one.use in ("", kind.use)]
        else:
            here = [option for one, option in every if one in (kind, ConnectionOptions) and option.only in ("", when)]
        names = {name.lower(): name for option in here for name in option.parsers}
        for name in (name for name in self._options if name not in names):
            found = [(spelt, one, option) for one, option in every for spelt in option.parsers if spelt.lower() == name]
            if found:
                self.fail(found[0][0], _elsewhere(*(each[1:] for each in found)))
            self.fail(name, _unknown(name, names.values()))
        self._names = {names[name] for name in self._options}  # as they are documented
        for group in _EXCLUSIVE:
            self.exclude(*group)
        for pair in _TOGETHER:
            for one, other in (pair, pair[::-1]):
                if one in self._names and other not in self._names:
                    self.fail(one, f"it needs {other!r} as well")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def fail(self, name: str, problem: str) -> NoReturn:
        raise OptionError(f"option {name!r}: {problem}")

    def exclude(self, *names: str) -> None:
        """Refuse more than one of `names`."""
        if len(self._names.intersection(names)) > 1:
            first, *more = [name for name in names if name in self._names]
            what = "the argument of load() or save()" if more[0] in _OF_SPARK else repr(more[0])
            self.fail(first, f"it cannot be combined with {what}; give one of them")

    def require(self, name: str, how: str) -> NoReturn:
        """Say that an option is missing, and `how` to give it."""
        hint = f"; {_NO_TABLES.format(self._format)}" if not self._options else ""
        self.fail(name, f"it is missing; give {how}{hint}")

    def values(self, kind: type[Options]) -> dict[str, Any]:
        """Return the values of the settings that `kind` declares."""
        return {name: self._value(option) for name, option in kind.declared.items()}

    def _value(self, option: Option) -> Any:
        if self._names.isdisjoint(option.parsers):
            if option.required:
                self.require(next(iter(option.parsers)), option.required)
            return option.default
        found = {name: self._parse(name, parse) for name, parse in option.parsers.items() if name in self._names}
        first, *more = found.values()
        if more != [first] or not _OF_SPARK.intersection(found):  # option() and load() may say the same
            self.exclude(*found)
        return first

    def _parse(self, name: str, parse: _Parser) -> Any:
        try:
            return parse(self._options[name.lower()])
        except (ValueError, BadSubjectError) as error:
            raise OptionError(f"option {name!r}: {error}") from None


def _unknown(name: str, names: Iterable[str]) -> str:
    """Return what to say about an option that no use has; `names` are those that apply."""
    if name in _INLINE_SECRETS:
        return f"secrets are given by reference; use {_INLINE_SECRETS[name]!r}"
    known = [name for name in names if name not in _OF_SPARK]
    hint = did_you_mean(name, known).removeprefix("; ") or f"the options are: {', '.join(known)}"
    return f"unknown option; {hint}"


def _elsewhere(*found: tuple[type[Options], Option]) -> str:
    """Return what to say about an option that other uses have."""
    scopes = {option.only or kind.when for kind, option in found}
    scope = scopes.pop() if len(scopes) == 1 else ""
    kind, option = found[0]
    return f"it applies only to {f'{scope} {kind.use}'.strip()}; {option.instead}"


# -- values -------------------------------------------------------------------------------------------------------


def _json(text: str, **how: Any) -> Any:
    try:
        return json.loads(text, **how)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text[:1024]!r} is not valid JSON: {error}") from None


def _names(check: Callable[[str], None], text: str) -> tuple[str, ...]:
    """Parse names with commas between them, or a JSON list, in which a name may have a comma."""
    names = _json(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{text[:1024]!r} is not a JSON list of texts, such as ["orders.eu", "orders.us"]')
    for name in names:
        check(name)
    return tuple(dict.fromkeys(names))


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def _subject(text: str) -> str:
    check_subject(_text(text))
    return text.strip()


def _domain(text: str) -> str:
    check_name(_text(text), what="domain")
    return text.strip()


def _bad_row_policy(text: str) -> str:
    """Parse ``onBadRow``: ``fail``, ``drop``, or the subject of dead letters."""
    word = text.strip().lower()
    return word if word in ("fail", "drop") else _subject(text)


def _like(pattern: str, what: str, text: str) -> str:
    if not re.fullmatch(pattern, text.strip()):
        raise ValueError(f"{text.strip()!r} is not {what}")
    return text.strip()


_stream_names = partial(_names, partial(check_name, what="stream name"))
_filters = partial(_names, check_filter)
_bucket = partial(_like, r"[A-Za-z0-9_-]+", "a valid bucket name (characters of A-Z, a-z, 0-9, _ and -)")
_application_id = partial(_like, r"[A-Za-z0-9_.-]{1,128}", "1 to 128 characters of A-Z, a-z, 0-9, _, . and -")
_write_id = partial(_like, r"[A-Za-z0-9_-]{1,64}", "1 to 64 characters of A-Z, a-z, 0-9, _ and -")


def _one_stream(text: str) -> str:
    stream, *more = _stream_names(text)
    if more:
        raise ValueError(f"a write goes to one stream, not to {', '.join((stream, *more))}")
    return stream


def _integer(text: str, least: int = 1, most: int = 10**18, because: str = "") -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) < least:
        raise ValueError(f"{text!r} is not an integer of at least {least}")
    if int(text) > most:
        raise ValueError(f"{int(text)} is more than {most}{because}")
    return int(text)


_partitions = partial(_integer, most=MOST_PARTITIONS, because=", which is the most that a read can have")
_transaction_rows = partial(
    _integer,
    most=_MAX_TRANSACTION_ROWS,
    because=": by default servers accept 1000 messages in one batch, and two are the sink's own",
)


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})([kmg]?)b?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is not a number of bytes such as 67108864 or 64m")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _seconds(text: str) -> float:
    value = parse_duration(text)
    if value is None or not 0 < value <= 3600:
        raise ValueError(f"{text!r} is not a number of seconds, or a duration such as 500ms, over 0 and up to one hour")
    return value


def _delay(text: str) -> float:
    value = parse_duration(text)
    if value is None or text.strip()[-1].isdigit():  # Kafka's source takes a bare number for milliseconds
        raise ValueError(f"{text!r} is not a duration such as 500ms, 90s, 15m or 1h")
    return value


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(_text(text))
    except (re.error, RecursionError) as error:
        raise ValueError(f"{text[:1024]!r} is not a regular expression: {error}") from None


def _choice(values: Mapping[str, Any], text: str) -> Any:
    word = text.strip().lower()
    if word not in values:
        raise ValueError(f"{text!r} is not one of {', '.join(values)}{did_you_mean(text.strip(), values)}")
    return values[word]


def _words(*words: str) -> _Parser:
    return partial(_choice, dict(zip(words, words, strict=True)))


_boolean = partial(_choice, {"true": True, "false": False})


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
        if when.tzinfo is not None:
            when.astimezone(UTC)  # raises OverflowError before the year 1 and after 9999
    except (AttributeError, ValueError, OverflowError):
        raise ValueError(f"{value!r} is not an RFC 3339 time such as {example}") from None
    if when.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; write it with Z or an offset, such as {example}")
    return when


def _milliseconds(value: Any) -> datetime:
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=partial(_integer, least=0)(str(value)))
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a time in milliseconds since 1970, such as 1769867100000") from None


def _offset(value: Any) -> Bound:
    match value.strip().lower() if isinstance(value, str) else value:
        case "earliest" | "latest" as end:
            return end
        case int(seq) if not isinstance(value, bool) and 1 <= seq < 1 << 63:
            return seq
        case -1 | -2 as end:  # as Kafka's source writes them
            return "latest" if end == -1 else "earliest"
    raise ValueError(
        f"{value!r} is not 'earliest', 'latest' or, in JSON such as {{\"ORDERS\": 42}}, a stream sequence (an integer of at least 1), "
        "-2 (earliest) or -1 (latest)"
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
    return _integer(text) if text.isdigit() else _time(text)


class Bounds(NamedTuple):
    """The start or the end of every stream: its own one in `each`, or else the common one."""

    common: Bound
    each: Mapping[str, Bound] = {}
    option: str = ""

    def of(self, stream: str) -> Bound:
        return self.each.get(stream, self.common)


def _bounds(option: str, parse: Callable[[Any], Bound], default: Bound, text: str) -> Bounds:
    """Parse the starts or the ends: one for all streams, or JSON with one for each."""
    if not text.lstrip().startswith("{"):
        return Bounds(parse(text), {}, option)
    found: dict[str, Bound] = {}
    for stream, value in _json(text, object_pairs_hook=list):  # a dict would silently keep the last of two entries
        if stream in found:
            raise ValueError(f"it names {stream!r} twice")
        found[stream] = parse(value)
    return Bounds(default, found, option)


# -- the options of each use --------------------------------------------------------------------------------------


class ConnectionOptions(Options):
    """How to reach the JetStream; also the key of the connection cache."""

    servers: tuple[str, ...] = _option(
        servers=_servers, required="the URLs of the servers, as in nats://nats-1:4222,nats://nats-2:4222"
    )
    domain: str | None = _option(domain=_domain)
    api_prefix: str | None = _option(apiPrefix=lambda text: _subject(text.strip().rstrip(".")))
    timeout: float = _option(requestTimeout=_seconds, default=10.0)  # to get a connection, and to wait for each reply
    creds_file: str | None = _option(credsFile=_text)  # files: a path, or the bare name of a file shipped by Spark
    nkey_file: str | None = _option(nkeyFile=_text)
    user: str | None = _option(user=_text)
    password_env: str | None = _option(passwordEnv=_text)
    token_env: str | None = _option(tokenEnv=_text)
    tls_ca: str | None = _option(tlsCa=_text)
    tls_cert: str | None = _option(tlsCert=_text)
    tls_key: str | None = _option(tlsKey=_text)
    application_id: str | None = _option(applicationId=_application_id)  # in the names of the connections


_of_triggers: Final = partial(_option, only="streaming", instead="it has no effect on a batch read; leave it out")


class _LogOptions(Options, use="reads"):
    """What the reads of a stream, and the change feed of a bucket, have in common."""

    connection: ConnectionOptions
    min_partitions: int | None = _option(minPartitions=_partitions)
    max_records_per_partition: int | None = _option(maxRecordsPerPartition=_integer)
    fail_on_data_loss: bool = _option(failOnDataLoss=_boolean, default=True)
    tail_check: bool = _option(tailCheck=_boolean, default=True)
    # What to do about a stream that was deleted and created again; None: fail, or else what `fail_on_data_loss` says.
    on_recreate: Literal["fail", "earliest", "keep"] | None = _of_triggers(
        onRecreate=_words("fail", "earliest", "keep")
    )
    # Kafka has the second name. Its offsets have no gaps, so there it counts rows as well.
    max_rows: int | None = _of_triggers(maxRowsPerTrigger=_integer, maxOffsetsPerTrigger=_integer)
    max_bytes: int | None = _of_triggers(maxBytesPerTrigger=_size)
    min_rows: int | None = _of_triggers(minRowsPerTrigger=_integer)
    max_delay: float = _of_triggers(maxTriggerDelay=_delay, default=900.0)

    def check(self, given: Given, *, streaming: bool | None) -> None:
        if self.min_rows is not None and self.max_rows is not None and self.min_rows > self.max_rows:
            given.fail("minRowsPerTrigger", f"{self.min_rows} is more than maxRowsPerTrigger ({self.max_rows})")
        if "maxTriggerDelay" in given and self.min_rows is None:
            given.fail(
                "maxTriggerDelay", "it limits the wait for minRowsPerTrigger; give that as well, or leave it out"
            )


def _bound_option(side: Literal["starting", "ending"], default: Bound, only: str = "", instead: str = "") -> Any:
    kinds = {"Offsets": _offset, "Time": _time, "Timestamp": _milliseconds}
    parsers = {f"{side}{name}": partial(_bounds, f"{side}{name}", parse, default) for name, parse in kinds.items()}
    return Option(parsers, Bounds(default), only, instead or "leave it out", required="")


class ReadOptions(_LogOptions):
    streams: tuple[str, ...] = _option(stream=_stream_names, path=_stream_names, paths=_stream_names, default=())
    starting: Bounds = _bound_option("starting", "earliest")
    ending: Bounds = _bound_option(
        "ending", "latest", only="batch", instead="a streaming query has no end (use trigger(availableNow=True))"
    )
    subjects: tuple[str, ...] = _option(subjects=_filters, default=())  # any may match; none: all messages
    stream_pattern: re.Pattern[str] | None = _option(streamPattern=_pattern)  # of whole names; then without `streams`
    max_bytes_per_partition: int = _option(
        maxBytesPerPartition=_size,
        default=64 << 20,
        only="batch",
        instead="for a streaming query, set 'minPartitions' or 'maxRecordsPerPartition'",
    )
    skip_bad: bool = _option(onBad=partial(_choice, {"error": False, "skip": True}), default=False)
    allow_unstable_retention: bool = _option(allowUnstableRetention=_boolean, default=False)

    def check(self, given: Given, *, streaming: bool | None) -> None:
        super().check(given, streaming=streaming)
        if not self.streams and self.stream_pattern is None:
            given.require("stream", "the name of the stream, here or as in load('ORDERS')")
        for bounds in (self.starting, self.ending) if self.streams else ():
            if unknown := bounds.each.keys() - self.streams:
                streams = ", ".join(self.streams)
                given.fail(
                    bounds.option, f"it names {min(unknown)!r}, which is not among the streams to read: {streams}"
                )
        # With a pattern, "" stands for the streams that only the common start and end apply to.
        for stream in self.streams or ("", *self.starting.each, *self.ending.each):
            start, end = self.starting.of(stream), self.ending.of(stream)
            if start == "latest" and streaming is False:
                given.fail(
                    self.starting.option, "a batch read from 'latest' has no rows; give 'earliest' or a sequence"
                )
            if end == "earliest":
                given.fail(self.ending.option, "a read cannot end at 'earliest'; give 'latest' or a last sequence")
            if isinstance(start, datetime) and isinstance(end, datetime) and start > end:
                given.fail(self.ending.option, f"the end of stream {stream!r} is before its start")
            if isinstance(start, int) and isinstance(end, int) and start > end + 1:
                given.fail(self.ending.option, f"the end of stream {stream!r} ({end}) is before its start ({start})")


_of_batches: Final = partial(
    _option, only="batch", instead="a streaming query takes its id from its checkpoint; leave it out"
)
_TARGET: Final = (
    "the name of one {0}, as in option('{0}', 'ORDERS') or save('ORDERS') (saveAsTable and toTable do not pass the name "
    "of the table on)"
)


class _SinkOptions(Options, use="writes"):
    """What both sinks have in common."""

    connection: ConnectionOptions
    on_bad_row: str = _option(onBadRow=_bad_row_policy, default="fail")
    write_id: str | None = _of_batches(writeId=_write_id)
    txn_app_id: str | None = _of_batches(txnAppId=_write_id)  # with `txn_version`, instead of `write_id`
    txn_version: int | None = _of_batches(txnVersion=partial(_integer, least=0))
    own_prefix: str | None = _option(markerPrefix=_subject)
    checkpoint: str | None = _option(checkpointLocation=str)  # Spark passes these two on
    query_name: str | None = _option(queryName=str)

    @property
    def target(self) -> str:
        """The name of the stream that is written to."""
        raise NotImplementedError

    @property
    def marker_prefix(self) -> str:
        """The prefix of the markers' subjects."""
        return self.own_prefix or f"_spark.{self.target}"

    def check(self, given: Given, *, streaming: bool | None) -> None:
        if covers(f"{self.marker_prefix}.>", self.on_bad_row):
            given.fail(
                "onBadRow", f"subjects below {self.marker_prefix!r} are for the markers of the sink; give another"
            )


class WriteOptions(_SinkOptions):
    stream: str = _option(stream=_one_stream, path=_one_stream, paths=_one_stream, required=_TARGET.format("stream"))
    subject: str | None = _option(
        subject=_subject, instead="to read some subjects only, use 'subjects'"
    )  # of every row
    semantics: Literal["dedupe", "transactional", "none"] = _option(
        semantics=_words("dedupe", "transactional", "none"), default="dedupe"
    )
    msg_ttl: str | None = _option(msgTtl=ttl_text)  # of every row, instead of a column; as ``Nats-TTL`` has it
    sink_partitions: int | None = _option(sinkPartitions=_integer)
    transaction_rows: int = _option(transactionRows=_transaction_rows, default=_MAX_TRANSACTION_ROWS)

    @property
    def target(self) -> str:
        return self.stream

    def check(self, given: Given, *, streaming: bool | None) -> None:
        super().check(given, streaming=streaming)
        for name in ("writeId", "txnAppId") if self.semantics == "none" else ():
            if name in given:
                given.fail(name, "it has no effect with semantics=none; leave it out, or use dedupe")
        for name in ("sinkPartitions", "markerPrefix", "transactionRows") if self.semantics != "transactional" else ():
            if name in given:
                given.fail(name, f"it is for semantics=transactional, not for {self.semantics}; leave it out")
        can_be_repeated = streaming or self.write_id or self.txn_app_id
        if self.semantics == "transactional" and self.sink_partitions is None and can_be_repeated:
            given.fail(
                "sinkPartitions",
                "it is missing; a transactional write that can be repeated must have the same partitions each time: "
                "give their number, and fix it with df.repartition(n) or the source's minPartitions",
            )


def _bucket_option(required: str) -> Any:
    return _option(bucket=_bucket, path=_bucket, required=required)


_LOADED: Final = "the name of one bucket, here or as in load('PRICES')"


class KvOptions(Options, use="reads", when="batch"):
    connection: ConnectionOptions
    bucket: str = _bucket_option(_LOADED)
    keys: tuple[str, ...] = _option(keys=_filters, default=(">",))  # keys and patterns of keys
    # A revision, a time, or None: now.
    as_of: int | datetime | None = _option(asOf=_as_of, instead="a streaming query starts at 'startingOffsets'")
    include_deleted: bool = _option(includeDeleted=_boolean, default=False)
    # Fail where the value that a key had then is no longer stored, instead of returning its present value.
    strict: bool = _option(
        consistency=partial(_choice, {"latest": False, "strict": True}),
        default=False,
        instead="the snapshot of a streaming query leaves out keys that change before they are read, and their changes follow",
    )
    min_partitions: int = _option(minPartitions=_partitions, default=2)


class FeedOptions(_LogOptions, when="streaming"):
    """The options of the change feed of a bucket."""

    bucket: str = _bucket_option(_LOADED)
    keys: tuple[str, ...] = _option(keys=_filters, default=(">",))
    starting: Literal["snapshot", "latest"] | int = _option(
        startingOffsets=_feed_start, default="snapshot", instead="a batch read has 'asOf'"
    )
    include_deleted: bool = _option(includeDeleted=_boolean, default=False)  # in the snapshot

    def check(self, given: Given, *, streaming: bool | None) -> None:
        super().check(given, streaming=streaming)
        if streaming is not None and "includeDeleted" in given and self.starting != "snapshot":
            given.fail(
                "includeDeleted",
                f"it applies to the snapshot, and a query with startingOffsets={self.starting} reads no snapshot. Changes always "
                "include deletions; leave it out",
            )

    @property
    def read(self) -> ReadOptions:
        """The options that the bucket's stream is read with."""
        return ReadOptions(
            connection=self.connection,
            streams=(bucket_stream(self.bucket),),
            starting=Bounds("earliest" if self.starting == "snapshot" else self.starting),
            # Other subjects that the bucket's stream may store are never keys.
            subjects=tuple(bucket_prefix(self.bucket) + key for key in self.keys),
            **{name: getattr(self, name) for name in _LogOptions.declared},
        )


class KvWriteOptions(_SinkOptions):
    bucket: str = _bucket_option(_TARGET.format("bucket"))
    ttl: TTL | None = _option(ttl=parse_ttl)  # of every value, instead of a column
    per_micro_batch: bool = _of_batches(perMicroBatch=_boolean, default=False)  # an id that Spark names (`upsert`)
    transaction_rows: int = _option(transactionRows=_transaction_rows, default=_MAX_TRANSACTION_ROWS)

    @property
    def target(self) -> str:
        return bucket_stream(self.bucket)

    def check(self, given: Given, *, streaming: bool | None) -> None:
        super().check(given, streaming=streaming)
        if covers("$KV.>", f"{self.marker_prefix}.>"):
            given.fail(
                "markerPrefix", "below '$KV', the markers would be keys of a bucket; give a prefix outside of it"
            )


_FORMATS: Final[dict[str, tuple[type[Options], ...]]] = {
    "jetstream": (ReadOptions, WriteOptions, ConnectionOptions),
    "jetstream_kv": (KvOptions, FeedOptions, KvWriteOptions, ConnectionOptions),
}
