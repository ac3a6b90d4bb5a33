"""The options of writing with the `jetstream` format, parsed and checked before anything is connected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from jetstream_ext.protocol.subjects import check_subject
from jetstream_ext.spark.given import Given, nonempty, positive
from jetstream_ext.spark.options import CONNECTION_OPTIONS, ConnectionOptions, api_prefix, connection_options, domain

_WRITE_OPTIONS: Final = (
    "stream",
    "subject",
    "semantics",
    "natsHeaders",
    "writeId",
    "sinkPartitions",
    "markerPrefix",
    "transactionRows",
)
# Spark hands these over with the rest.
_SPARKS_OWN: Final = ("checkpointLocation", "queryName")
_ONLY_READING: Final = dict.fromkeys(
    (
        "subjects",
        "startingOffsets",
        "startingTime",
        "endingOffsets",
        "endingTime",
        "minPartitions",
        "maxBytesPerPartition",
        "maxOffsetsPerTrigger",
        "maxMessagesPerTrigger",
        "maxBytesPerTrigger",
        "failOnDataLoss",
        "tailCheck",
        "allowUnstableRetention",
        "pushDown",
    ),
    "it belongs to reading; leave it out",
)
# The server's limit for a batch is 1000 messages, one of which is the marker.
_MOST_ROWS: Final = 999


class Semantics(Enum):
    """What a sink promises for rows that Spark hands it more than once."""

    DEDUPE = "dedupe"
    TRANSACTIONAL = "transactional"
    NONE = "none"


class NatsHeaders(Enum):
    """What becomes of ``Nats-*`` headers in the rows, which servers act upon."""

    REFUSE = "refuse"
    STRIP = "strip"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """A write, checked.

    Attributes:
        connection: How to connect.
        stream: The stream's name.
        subject: The subject of every row, instead of a column.
        semantics: What happens to rows that come again.
        nats_headers: What happens to ``Nats-*`` headers.
        write_id: Names a batch write, so that it can be run again.
        sink_partitions: How many partitions the rows come in.
        marker_prefix: Where the markers of transactions are stored.
        transaction_rows: Rows per transaction, at most.
        domain: JetStream domain.
        api_prefix: Prefix of the JetStream API.
    """

    connection: ConnectionOptions
    stream: str
    subject: str | None = None
    semantics: Semantics = Semantics.DEDUPE
    nats_headers: NatsHeaders = NatsHeaders.REFUSE
    write_id: str | None = None
    sink_partitions: int | None = None
    marker_prefix: str = ""
    transaction_rows: int = _MOST_ROWS
    domain: str | None = None
    api_prefix: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Parse the options of a write.

        Raises:
            OptionError: One is missing, unknown, malformed or in conflict with another.
        """
        given = Given(options, known=(*_WRITE_OPTIONS, *CONNECTION_OPTIONS, *_SPARKS_OWN), elsewhere=_ONLY_READING)
        given.exclude("domain", "apiPrefix")
        streams = given.streams()
        if len(streams) > 1:
            given.fail("stream", f"rows go into one stream, not into {', '.join(streams)}")
        [stream] = streams
        semantics = given.take("semantics", _semantics, Semantics.DEDUPE)
        write = cls(
            connection=connection_options(given),
            stream=stream,
            subject=given.take("subject", _subject, None),
            semantics=semantics,
            nats_headers=given.take("natsHeaders", _nats_headers, NatsHeaders.REFUSE),
            write_id=given.take("writeId", _write_id, None),
            sink_partitions=given.take("sinkPartitions", positive, None),
            marker_prefix=given.take("markerPrefix", _subject, f"_spark.{stream}"),
            transaction_rows=given.take("transactionRows", _transaction_rows, _MOST_ROWS),
            domain=given.take("domain", domain, None),
            api_prefix=given.take("apiPrefix", api_prefix, None),
        )
        if streaming and write.write_id is not None:
            given.fail("writeId", "it names a batch write; a streaming query has an id of its own, in its checkpoint")
        if semantics is Semantics.NONE and write.write_id is not None:
            given.fail("writeId", "it has no effect with semantics=none; leave it out, or use dedupe")
        if semantics is not Semantics.TRANSACTIONAL:
            for name in ("sinkPartitions", "markerPrefix", "transactionRows"):
                if name in given:
                    given.fail(name, f"it belongs to semantics=transactional, not {semantics.value}; leave it out")
        elif write.sink_partitions is None and (streaming or write.write_id is not None):
            given.fail(
                "sinkPartitions",
                "it is missing; a transactional write that can be repeated must come in the same partitions each time: "
                "give their number, and make it so with df.repartition(n) or the source's minPartitions",
            )
        return write


def _semantics(text: str) -> Semantics:
    try:
        return Semantics(text.strip().lower())
    except ValueError:
        raise ValueError(f"{text!r} is none of dedupe, transactional, none") from None


def _nats_headers(text: str) -> NatsHeaders:
    try:
        return NatsHeaders(text.strip().lower())
    except ValueError:
        raise ValueError(f"{text!r} is neither refuse nor strip") from None


def _subject(text: str) -> str:
    subject = nonempty(text)
    check_subject(subject)
    return subject


def _write_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise ValueError(f"{text!r} is not 1 to 64 characters of A-Z, a-z, 0-9, _ and -")
    return text


def _transaction_rows(text: str) -> int:
    rows = positive(text)
    if rows > _MOST_ROWS:
        raise ValueError(f"{rows} rows and a marker are more than the 1000 messages that servers take in one batch")
    return rows
