"""The options of the `jetstream` format, parsed and checked before anything is connected.

Every option is known by name: a misspelt one, or one that would be without effect, is an error that names it and the
fix. Credentials are references (a file, an environment variable) that each worker resolves for itself, so that no
secret travels in a plan; texts and representations never repeat what was given for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from jetstream_ext.protocol.subjects import check_filter, check_name, check_subject
from jetstream_ext.spark.bounds import AtSequence, AtTime, Bound, Named, parse_offsets, parse_times
from jetstream_ext.spark.given import Given, boolean, nonempty, positive, seconds, size

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
_READ_OPTIONS: Final = (
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
_ONLY_STREAMING: Final = ("maxOffsetsPerTrigger", "maxMessagesPerTrigger", "maxBytesPerTrigger")
_ONLY_BATCH: Final = {
    "endingOffsets": "it ends batch reads; a streaming query has no end (use trigger(availableNow=True))",
    "endingTime": "it ends batch reads; a streaming query has no end (use trigger(availableNow=True))",
    "pushDown": "Spark hands no filters to streaming reads; leave it out and use 'subjects'",
    "maxBytesPerPartition": "in a streaming query the partitions of a batch must not depend on what the stream holds "
    "at the moment, or a replay would cut it differently; give their number by 'minPartitions'",
}
_ONLY_WRITING: Final = {
    "subject": "it belongs to writing; to read some subjects only, use 'subjects'",
    **dict.fromkeys(
        ("semantics", "sinkPartitions", "markerPrefix", "transactionRows", "writeId", "natsHeaders"),
        "it belongs to writing; leave it out",
    ),
}
_NOT_FOR_BATCH: Final = {
    **_ONLY_WRITING,
    **dict.fromkeys(_ONLY_STREAMING, "it limits streaming reads and has no effect on a batch read; leave it out"),
}
_SCHEMES: Final = ("nats", "tls", "ws", "wss")


@dataclass(frozen=True, slots=True, repr=False)
class ConnectionOptions:
    """How to connect: the key of the connection cache, too.

    Attributes:
        servers: URLs without credentials.
        creds_file: Path of a ``.creds`` file, or the bare name of one shipped with ``--files``.
        nkey_file: The same for an nkey seed.
        user: User name; goes with `password_env`.
        password_env: Name of the environment variable that holds the password.
        token_env: Name of the environment variable that holds the token.
        tls_ca: Path of the CA certificates to trust instead of the system's.
        tls_cert: Path of the client's certificate.
        tls_key: Path of its key.
        timeout: Seconds to get a connection, and to wait for each reply.
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

    def __repr__(self) -> str:
        # Only which references are given: people put the secret itself where its name belongs.
        given = [name for name in self.__slots__ if name not in ("servers", "timeout") and getattr(self, name)]
        return f"ConnectionOptions(servers={','.join(self.servers)!r}, with={given})"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """A read, checked.

    Attributes:
        connection: How to connect.
        streams: At least one stream name, each once.
        subjects: Filters, any of which lets a message through; none is all.
        starting: Where each stream starts.
        ending: Where each stream ends.
        min_partitions: At least so many partitions, if there are as many sequences.
        max_bytes_per_partition: About how many bytes of messages one partition has.
        fail_on_data_loss: Fail where messages that should be there are gone, instead of a warning.
        tail_check: Prove the end of every partition at the stream's leader.
        domain: JetStream domain.
        api_prefix: Prefix of the JetStream API, such as of an imported account.
        allow_unstable_retention: Read streams whose consumers' acknowledgements delete messages.
        push_down: Take the filters that Spark hands down.
        max_offsets: Sequences per micro-batch at most.
        max_bytes: Bytes of messages per micro-batch, about.
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
    domain: str | None = None
    api_prefix: str | None = None
    allow_unstable_retention: bool = False
    push_down: bool = False
    max_offsets: int | None = None
    max_bytes: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None = False) -> ReadOptions:
        """Parse the options of a read.

        Args:
            options: As Spark hands them over.
            streaming: Whether they are those of a streaming query; None is not known yet.

        Raises:
            OptionError: One is missing, unknown, malformed or in conflict with another.
        """
        given = Given(options, **_known(streaming))
        given.exclude("domain", "apiPrefix")
        given.exclude("maxOffsetsPerTrigger", "maxMessagesPerTrigger")
        streams = given.streams()
        read = cls(
            connection=connection_options(given),
            streams=streams,
            subjects=given.names("subjects", check_filter),
            starting=_bounds(given, "starting", streams, Named.EARLIEST),
            ending=_bounds(given, "ending", streams, Named.LATEST),
            min_partitions=given.take("minPartitions", positive, 2),
            max_bytes_per_partition=given.take("maxBytesPerPartition", size, 64 << 20),
            fail_on_data_loss=given.take("failOnDataLoss", boolean, True),
            tail_check=given.take("tailCheck", boolean, True),
            domain=given.take("domain", domain, None),
            api_prefix=given.take("apiPrefix", api_prefix, None),
            allow_unstable_retention=given.take("allowUnstableRetention", boolean, False),
            push_down=given.take("pushDown", boolean, False),
            max_offsets=given.take(
                "maxOffsetsPerTrigger", positive, given.take("maxMessagesPerTrigger", positive, None)
            ),
            max_bytes=given.take("maxBytesPerTrigger", size, None),
        )
        for stream in streams:
            start, end = read.starting[stream], read.ending[stream]
            if end is Named.EARLIEST:
                given.fail("endingOffsets", "a read cannot end at 'earliest'; give 'latest' or a last sequence")
            if isinstance(start, AtTime) and isinstance(end, AtTime) and start.when > end.when:
                given.fail("endingTime", f"stream {stream!r} would end before its start")
            if isinstance(start, AtSequence) and isinstance(end, AtSequence) and start.seq > end.seq + 1:
                given.fail("endingOffsets", f"stream {stream!r} would end at {end.seq}, before its start {start.seq}")
        return read


def _bounds(given: Given, end: str, streams: tuple[str, ...], default: Named) -> dict[str, Bound]:
    offsets, time = f"{end}Offsets", f"{end}Time"
    given.exclude(offsets, time)
    everywhere: dict[str, Bound] = dict.fromkeys(streams, default)
    if time in given:
        return given.take(time, lambda text: parse_times(text, streams, default), everywhere)
    return given.take(offsets, lambda text: parse_offsets(text, streams, default), everywhere)


def _known(streaming: bool | None) -> dict[str, Any]:
    everywhere = (*_READ_OPTIONS, *CONNECTION_OPTIONS)
    if streaming is None:
        return {"known": (*everywhere, *_ONLY_STREAMING), "elsewhere": _ONLY_WRITING}
    if streaming:
        known = (*(name for name in everywhere if name not in _ONLY_BATCH), *_ONLY_STREAMING)
        return {"known": known, "elsewhere": _ONLY_WRITING | _ONLY_BATCH}
    return {"known": everywhere, "elsewhere": _NOT_FOR_BATCH}


def api_prefix(text: str) -> str:
    """Return a prefix of the JetStream API, without the dot at its end."""
    prefix = nonempty(text).rstrip(".")
    check_subject(prefix)
    return prefix


def domain(text: str) -> str:
    """Return a JetStream domain, which is one token of a subject."""
    name = nonempty(text)
    check_name(name, "domain")
    return name


def connection_options(given: Given) -> ConnectionOptions:
    """Return how to connect.

    Raises:
        OptionError: An option is missing, malformed or in conflict with another.
    """
    if "servers" not in given:
        given.fail(
            "servers", "it is missing; give the URLs of the servers, as in nats://nats-1:4222,nats://nats-2:4222"
        )
    given.need("user", "passwordEnv")
    given.need("passwordEnv", "user")
    given.need("tlsCert", "tlsKey")
    given.need("tlsKey", "tlsCert")
    given.exclude("credsFile", "nkeyFile", "user", "tokenEnv")
    return ConnectionOptions(
        servers=given.take("servers", _servers, ()),
        creds_file=given.take("credsFile", nonempty, None),
        nkey_file=given.take("nkeyFile", nonempty, None),
        user=given.take("user", nonempty, None),
        password_env=given.take("passwordEnv", nonempty, None),
        token_env=given.take("tokenEnv", nonempty, None),
        tls_ca=given.take("tlsCa", nonempty, None),
        tls_cert=given.take("tlsCert", nonempty, None),
        tls_key=given.take("tlsKey", nonempty, None),
        timeout=given.take("requestTimeout", seconds, 10.0),
    )


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
            raise ValueError(f"{part!r} is no server URL such as nats://host:4222 (or {', '.join(_SCHEMES[1:])})")
        servers.append(url)
    if not servers:
        raise ValueError("it is empty; give at least one URL such as nats://host:4222")
    return tuple(dict.fromkeys(servers))
