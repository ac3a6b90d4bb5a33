"""The options of reads and writes."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from jetstream_ext.spark import options
from jetstream_ext.spark.options import Bounds, ConnectionOptions, OptionError, ReadOptions, WriteOptions

URL = "nats://n:4222"


def parse(**options: str) -> ReadOptions:
    return ReadOptions.parse(CaseInsensitiveDict({"servers": URL, "stream": "A"} | options))


def test_every_option_is_parsed() -> None:
    read = parse(
        servers=" nats://a:4222, tls://b ,c:4333,nats://a:4222",
        stream="A, B",
        subjects="x.*,y.>",
        STARTINGOFFSETS='{"A": 42, "B": "latest"}',
        endingTime='{"A": "2026-01-31T13:45:00+01:00"}',
        minPartitions="7",
        maxBytesPerPartition="16MB",
        failOnDataLoss="False",
        tailCheck="false",
        apiPrefix="JS.other.API.",
        requestTimeout="2.5",
        user="me",
        passwordEnv="PW",
        tlsCa="ca.pem",
        tlsCert="c.pem",
        tlsKey="k.pem",
    )
    assert read.connection == ConnectionOptions(
        ("nats://a:4222", "tls://b", "nats://c:4333"),
        user="me",
        password_env="PW",
        tls_ca="ca.pem",
        tls_cert="c.pem",
        tls_key="k.pem",
        timeout=2.5,
        api_prefix="JS.other.API",
    )
    assert read.streams == ("A", "B")
    assert read.subjects == ("x.*", "y.>")
    assert read.starting == Bounds("earliest", {"A": 42, "B": "latest"})
    moment = datetime(2026, 1, 31, 13, 45, tzinfo=timezone(timedelta(hours=1)))
    assert read.ending == Bounds("latest", {"A": moment})
    assert (read.min_partitions, read.max_bytes_per_partition) == (7, 16 << 20)
    assert (read.fail_on_data_loss, read.tail_check) == (False, False)


def test_one_time_applies_to_all_streams() -> None:
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    assert parse(stream="A,B", startingTime="2026-01-31T00:00:00Z").starting == Bounds(moment)


def test_load_names_the_streams(cell: Any) -> None:
    for loaded in [{"path": "A"}, {"path": "A,B"}, {"paths": '["A","B"]'}, {"stream": "A,B", "path": "A,B"}]:
        with cell(loaded):
            read = ReadOptions.parse(CaseInsensitiveDict({"servers": URL} | loaded))
            assert read.streams == ("A", "B")[: len(read.streams)]


def test_an_error_names_the_option_and_the_fix(cell: Any) -> None:
    for given, message in [
        ({"servers": ""}, "'servers'.*empty"),
        ({"servers": "ftp://x"}, "'servers'.*server 1 is invalid: its scheme"),
        ({"servers": "nats://x:notaport"}, "'servers'.*server 1 is invalid: it needs a host, and a port"),
        ({"stream": "A.B"}, "'stream'.*not allowed in a name"),
        ({"stream": "A,,B"}, "'stream'.*empty"),
        ({"path": "B"}, "'stream'.*says A, but load.* says B"),
        ({"paths": '["B","C"]'}, "'stream'.*says A, but load.* says B,C"),
        ({"subjects": "a..b"}, "'subjects'.*empty token"),
        ({"subjects": "a.>.b"}, "'subjects'.*'>'"),
        (
            {"startingOffsets": "first"},
            r"'startingOffsets'.*'earliest', 'latest' or, in JSON such as \{\"ORDERS\": 42\}, a stream seq",
        ),
        ({"startingOffsets": "42"}, "'startingOffsets'.*JSON such as"),
        ({"startingOffsets": "{"}, "'startingOffsets'.*not valid JSON"),
        ({"startingOffsets": '{"B": 1}'}, "'startingOffsets'.*'B', which is not among"),
        ({"startingOffsets": '{"A": 1, "A": 2}'}, "'startingOffsets'.*twice"),
        (
            {"startingOffsets": '{"A": 0}'},
            r"'startingOffsets': 0 is not .*a stream sequence \(an integer of at least 1\)",
        ),
        ({"startingOffsets": '{"A": true}'}, "'startingOffsets': True is not .*a stream sequence"),
        ({"startingOffsets": '{"A": 1.5}'}, "'startingOffsets': 1.5 is not .*a stream sequence"),
        ({"endingOffsets": "earliest"}, "'endingOffsets'.*cannot end at 'earliest'"),
        (
            {"startingOffsets": '{"A": 9}', "endingOffsets": '{"A": 7}'},
            "'endingOffsets'.*'A' .7. is before its start .9.",
        ),
        ({"startingTime": "2026-01-31T13:45:00"}, "'startingTime'.*no time zone; write it with Z"),
        ({"startingTime": "yesterday"}, "'startingTime'.*RFC 3339"),
        ({"endingTime": '{"A": 5}'}, "'endingTime'.*RFC 3339"),
        (
            {"startingTime": "2026-01-02T00:00:00Z", "endingTime": "2026-01-01T00:00:00Z"},
            "'endingTime'.*before its start",
        ),
        (
            {"startingTime": "2026-01-02T00:00:00Z", "startingOffsets": "latest"},
            "cannot be combined with 'startingTime'",
        ),
        ({"endingTime": "2026-01-02T00:00:00Z", "endingOffsets": "latest"}, "cannot be combined with 'endingTime'"),
        ({"minPartitions": "0"}, "'minPartitions'.*integer of at least 1"),
        ({"minPartitions": "100001"}, "'minPartitions'.*100001 is more than 100000"),
        ({"minPartitions": "two"}, "'minPartitions'.*integer of at least 1"),
        ({"maxBytesPerPartition": "64 apples"}, "'maxBytesPerPartition'.*bytes such as"),
        ({"failOnDataLoss": "yes"}, "'failOnDataLoss'.*not one of true, false"),
        ({"requestTimeout": "-1"}, "'requestTimeout'.*seconds"),
        ({"requestTimeout": "nan"}, "'requestTimeout'.*seconds"),
        ({"domain": "hub", "apiPrefix": "X"}, "'domain'.*cannot be combined with 'apiPrefix'"),
        ({"domain": " "}, "'domain'.*empty"),
        ({"domain": "a b"}, "'domain'.*empty or has white space"),
        ({"apiPrefix": "JS.a b.API"}, "'apiPrefix'.*white space"),
        ({"user": "me"}, "'user'.*needs 'passwordEnv'"),
        ({"passwordEnv": "PW"}, "'passwordEnv'.*needs 'user'"),
        ({"tlsCert": "c"}, "'tlsCert'.*needs 'tlsKey'"),
        ({"tlsKey": "k"}, "'tlsKey'.*needs 'tlsCert'"),
        ({"credsFile": "c", "tokenEnv": "T"}, "'credsFile'.*cannot be combined with 'tokenEnv'"),
        ({"startingOffset": "latest"}, "unknown option; did you mean 'startingOffsets'"),
        ({"failOnDataLoss": "flase"}, "'flase' is not one of true, false; did you mean 'false'"),
        ({"zzz": "1"}, "unknown option; the options are: stream, subjects, .*tlsKey"),
        ({"maxOffsetsPerTrigger": "5"}, "streaming reads"),
        ({"subject": "a"}, "applies only to writes; to read some subjects only, use 'subjects'"),
        ({"semantics": "none"}, "applies only to writes"),
    ]:
        with cell(given, message), pytest.raises(OptionError, match=message):
            parse(**given)


def test_a_missing_option_is_named(cell: Any) -> None:
    for missing, message in [("servers", "'servers': it is missing"), ("stream", "or as in load")]:
        with cell(missing, message):
            options = {"servers": URL, "stream": "A"}
            del options[missing]
            with pytest.raises(OptionError, match=message):
                ReadOptions.parse(CaseInsensitiveDict(options))


def test_a_secret_in_the_wrong_place_is_not_repeated(cell: Any) -> None:
    for given in [
        {"password": "hunter2"},
        {"token": "hunter2"},
        {"creds": "hunter2"},
        {"secretSauce": "hunter2"},
        {"servers": "nats://me:hunter2@host:4222"},
        {"servers": "nats://hunter2@host"},
    ]:
        with cell(given):
            with pytest.raises(OptionError) as caught:
                parse(**given)
            assert "hunter2" not in str(caught.value)


def test_repr_shows_no_credentials() -> None:
    read = parse(user="hunter2", passwordEnv="hunter2")
    assert "hunter2" not in repr(read)
    assert "password_env" in repr(read)
    assert URL in repr(read)


def test_an_option_of_the_other_direction_is_named_as_such() -> None:
    connect = {"servers": "nats://n", "stream": "S"}
    reading, writing = {*options.READ_OPTIONS}, {*options.WRITE_OPTIONS}
    for name in writing - reading:
        with pytest.raises(OptionError, match=f"'{name.lower()}': it applies only to writes"):
            ReadOptions.parse(connect | {name: "1"})
    for name in reading - writing:
        with pytest.raises(OptionError, match=f"'{name.lower()}': it applies only to reads"):
            WriteOptions.parse(connect | {name: "1"}, streaming=False)


def test_a_read_by_pattern_cannot_end_at_earliest() -> None:
    for end in ("earliest", '{"B": "earliest"}'):
        with pytest.raises(OptionError, match="cannot end at 'earliest'"):
            ReadOptions.parse({"servers": URL, "streamPattern": "A.*", "endingOffsets": end})
