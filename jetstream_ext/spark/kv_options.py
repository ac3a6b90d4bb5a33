"""The options of the `jetstream_kv` format, parsed and checked before anything is connected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from jetstream_ext.protocol.subjects import check_filter
from jetstream_ext.spark.bounds import AtSequence, AtTime, Named, parse_times
from jetstream_ext.spark.given import Given, boolean, positive
from jetstream_ext.spark.options import CONNECTION_OPTIONS, ConnectionOptions, api_prefix, connection_options, domain

_KV_OPTIONS: Final = ("bucket", "keys", "asOf", "includeDeleted", "consistency", "minPartitions")


@dataclass(frozen=True, slots=True)
class KvOptions:
    """A read of a bucket, checked.

    Attributes:
        connection: How to connect.
        bucket: Its name.
        keys: Keys and patterns of keys.
        as_of: The point in time: a revision, a time, or now.
        include_deleted: Return the markers of deleted keys, too.
        strict: Fail where a key changed since and its history is gone, instead of returning what it is now.
        min_partitions: At least so many partitions, if there are as many keys.
        domain: JetStream domain.
        api_prefix: Prefix of the JetStream API.
    """

    connection: ConnectionOptions
    bucket: str
    keys: tuple[str, ...] = (">",)
    as_of: AtSequence | AtTime | None = None
    include_deleted: bool = False
    strict: bool = False
    min_partitions: int = 2
    domain: str | None = None
    api_prefix: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> KvOptions:
        """Parse the options.

        Raises:
            OptionError: One is missing, unknown, malformed or in conflict with another.
        """
        given = Given(options, known=(*_KV_OPTIONS, *CONNECTION_OPTIONS))
        given.exclude("domain", "apiPrefix")
        buckets = given.names("bucket", _check_bucket) or given.names("path", _check_bucket)
        if len(buckets) != 1:
            given.fail("bucket", "give the name of one bucket, here or as in load('PRICES')")
        return cls(
            connection=connection_options(given),
            bucket=buckets[0],
            keys=given.names("keys", check_filter) or (">",),
            as_of=given.take("asOf", _as_of, None),
            include_deleted=given.take("includeDeleted", boolean, False),
            strict=given.take("consistency", _strict, False),
            min_partitions=given.take("minPartitions", positive, 2),
            domain=given.take("domain", domain, None),
            api_prefix=given.take("apiPrefix", api_prefix, None),
        )


def _check_bucket(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"{name!r} is no name of a bucket")


def _as_of(text: str) -> AtSequence | AtTime | None:
    text = text.strip()
    if text.lower() == "now":
        return None
    if text.isdigit():
        return AtSequence(positive(text))
    [when] = parse_times(text, [""], Named.LATEST).values()
    assert isinstance(when, AtTime)
    return when


def _strict(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("latest", "strict"):
        raise ValueError(f"{text!r} is neither latest nor strict")
    return word == "strict"
