"""The options of reads and writes."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from jetstream_ext.spark.options import Bounds, ConnectionOptions, KvOptions, OptionError, ReadOptions, WriteOptions

URL = "nats://n:4222"


def parse(**options: str) -> ReadOptions:
    return ReadOptions.parse(CaseInsensitiveDict({"servers": URL, "stream": "A"} | options))


def test_every_option_is_parsed() -> None:
    read = parse(
        servers=" nats://a:4222, tls://b ,c:4333,nats://a:4222",
        stream="A, B",
        subjects="x.*,y.>",
        STARTINGOFFSETS='{"A": 42, "B": -2}',
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
        servers=("nats://a:4222", "tls://b", "nats://c:4333"),
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
    assert read.starting == Bounds("earliest", {"A": 42, "B": "earliest"}, "startingOffsets")
    moment = datetime(2026, 1, 31, 13, 45, tzinfo=timezone(timedelta(hours=1)))
    assert read.ending == Bounds("latest", {"A": moment}, "endingTime")
    assert (read.min_partitions, read.max_bytes_per_partition) == (7, 16 << 20)
    assert (read.fail_on_data_loss, read.tail_check) == (False, False)


def test_one_time_applies_to_all_streams() -> None:
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    assert parse(stream="A,B", startingTime="2026-01-31T00:00:00Z").starting == Bounds(moment, {}, "startingTime")


def test_a_timestamp_is_a_time_in_milliseconds() -> None:
    moment = datetime(2026, 1, 31, 13, 45, 0, 123000, tzinfo=UTC)
    read = parse(stream="A,B", startingTimestamp="1769867100123", endingTimestamp='{"A": 1769867100123}')
    assert read.starting == Bounds(moment, {}, "startingTimestamp")
    assert read.ending == Bounds("latest", {"A": moment}, "endingTimestamp")


def test_every_duration_takes_a_unit(cell: Any) -> None:
    for text, seconds in [
        ("5s", 5),
        ("500ms", 0.5),
        ("2m", 120),
        ("2min", 120),
        ("1h", 3600),
        ("2.5", 2.5),
        ("1.5s", 1.5),
    ]:
        with cell(text):
            assert parse(requestTimeout=text).connection.timeout == seconds
            if text != "2.5":
                query = {"servers": URL, "stream": "A", "minRowsPerTrigger": "1", "maxTriggerDelay": text}
                assert ReadOptions.parse(query, streaming=True).max_delay == seconds
            if seconds >= 1 and seconds % 1 == 0:
                write = WriteOptions.parse({"servers": URL, "stream": "A", "msgTtl": text}, streaming=False)
                assert write.msg_ttl == f"{seconds}"


def test_lists_may_be_json(cell: Any) -> None:
    for given, names in [("a,b", ("a", "b")), ('["a,b", "c.>", "c.>"]', ("a,b", "c.>")), (' ["a"]', ("a",))]:
        with cell(given):
            assert parse(subjects=given).subjects == names
            assert KvOptions.parse({"servers": URL, "bucket": "B", "keys": given}).keys == names
    assert parse(stream='["A,1", "B"]').streams == ("A,1", "B")


def test_a_streaming_query_may_start_at_latest() -> None:
    options = {"servers": URL, "stream": "A", "startingOffsets": '{"A": -1}'}
    assert ReadOptions.parse(options, streaming=True).starting.of("A") == "latest"


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
        ({"path": "B"}, r"'stream'.*cannot be combined with the argument of load\(\)"),
        ({"paths": '["B","C"]'}, r"'stream'.*cannot be combined with the argument of load\(\)"),
        ({"subjects": '["a,b", 1]'}, "'subjects'.*not a JSON list of texts"),
        ({"subjects": "[]"}, "'subjects'.*not a JSON list of texts"),
        ({"subjects": '["a"'}, "'subjects'.*not valid JSON"),
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
        ({"startingOffsets": '{"A": -3}'}, r"'startingOffsets': -3 is not .*-2 \(earliest\) or -1 \(latest\)"),
        ({"startingOffsets": "-1"}, "'startingOffsets': '-1' is not"),
        ({"startingOffsets": "latest"}, "'startingOffsets'.*batch read from 'latest' has no rows"),
        ({"startingOffsets": '{"A": -1}'}, "'startingOffsets'.*batch read from 'latest' has no rows"),
        ({"endingOffsets": "earliest"}, "'endingOffsets'.*cannot end at 'earliest'"),
        ({"endingOffsets": '{"A": -2}'}, "'endingOffsets'.*cannot end at 'earliest'"),
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
        (
            {"startingTimestamp": "0", "startingTime": "2026-01-02T00:00:00Z"},
            "'startingTime'.*cannot be combined with 'startingTimestamp'",
        ),
        ({"startingTimestamp": "2026-01-02T00:00:00Z"}, "'startingTimestamp'.*milliseconds since 1970, such as 1769"),
        ({"startingTimestamp": '{"A": 1.5}'}, "'startingTimestamp': 1.5 is not a time in milliseconds"),
        ({"endingTimestamp": "9" * 18}, "'endingTimestamp'.*milliseconds"),
        ({"endingTimestamp": '{"B": 0}'}, "'endingTimestamp'.*'B', which is not among"),
        ({"startingTimestamp": "2", "endingTimestamp": "1"}, "'endingTimestamp'.*before its start"),
        ({"minPartitions": "0"}, "'minPartitions'.*integer of at least 1"),
        ({"minPartitions": "100001"}, "'minPartitions'.*100001 is more than 100000"),
        ({"minPartitions": "two"}, "'minPartitions'.*integer of at least 1"),
        ({"maxBytesPerPartition": "64 apples"}, "'maxBytesPerPartition'.*bytes such as"),
        ({"failOnDataLoss": "yes"}, "'failOnDataLoss'.*not one of true, false"),
        ({"requestTimeout": "-1"}, "'requestTimeout'.*seconds"),
        ({"requestTimeout": "nan"}, "'requestTimeout'.*seconds"),
        ({"requestTimeout": "2h"}, "'requestTimeout'.*up to one hour"),
        ({"requestTimeout": "5 s"}, "'requestTimeout'.*seconds"),
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
        ({"zzz": "1"}, "unknown option; the options are: stream, startingOffsets, .*tlsKey"),
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
    assert repr(read.connection) == "ConnectionOptions(servers, user, password_env)"


def test_an_option_of_the_other_direction_is_named_as_such() -> None:
    connect = {"servers": "nats://n", "stream": "S"}
    reading, writing = {*ReadOptions.names()}, {*WriteOptions.names()}
    for name in writing - reading:
        with pytest.raises(OptionError, match=f"'{name}': it applies only to (batch )?writes"):
            ReadOptions.parse(connect | {name: "1"})
    for name in reading - writing:
        with pytest.raises(OptionError, match=f"'{name}': it applies only to (batch |streaming )?reads"):
            WriteOptions.parse(connect | {name: "1"}, streaming=False)


def test_a_read_by_pattern_cannot_end_at_earliest() -> None:
    for end in ("earliest", '{"B": "earliest"}'):
        with pytest.raises(OptionError, match="cannot end at 'earliest'"):
            ReadOptions.parse({"servers": URL, "streamPattern": "A.*", "endingOffsets": end})
