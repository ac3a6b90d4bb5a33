"""What errors say about an option that is off: a Python call and a command that can be copied."""

from __future__ import annotations

import shlex

from cells import walk

from jetstream_ext.errors import ErrorCode
from jetstream_ext.protocol.advice import after_refusal, enable_bucket, enable_command, enable_stream


def test_advice_names_the_call_and_the_command() -> None:
    assert enable_stream("ORDERS", "direct", "ttl", what="them") == (
        "enable them with allow_direct=True and allow_msg_ttl=True (jetstream_ext.ensure_stream) or "
        "'jetstream-ext enable ORDERS --direct --ttl'"
    )
    assert enable_bucket("prices", "spark") == (
        "enable it with `await jetstream_ext.kv.enable(kv, spark=True)` or 'jetstream-ext enable-bucket prices --spark'"
    )


@walk("stream", ["a;rm b", "$(id)", "it's", "-x", "--server=nats://elsewhere"])
def test_a_shell_takes_the_name_of_a_stream_as_one_argument(stream: str) -> None:
    words = shlex.split(enable_command(stream, "direct"))
    assert stream in words
    assert stream == words[2] or words[3:] == ["--", stream]


def test_a_name_that_a_terminal_would_obey_is_not_in_the_command() -> None:
    assert enable_command("\x1b[2J", "direct") == "jetstream-ext enable NAME --direct"


def test_a_refusal_is_explained_as_far_as_the_streams_are_known() -> None:
    mismatch, both = ErrorCode.STREAM_MISMATCH, "a message expects stream 'A', and stream 'B' stores its subject"
    assert after_refusal(mismatch, "B", "s", {"A", "B"}) == f"; {both}"
    assert after_refusal(mismatch, "", "s", {"C", "A"}) == "; a message expects stream 'A' or 'C'"
    assert after_refusal(mismatch, "B", "s") == "; stream 'B' stores its subject"
    assert after_refusal(mismatch, "", "s") == ""
    assert after_refusal(ErrorCode.WRONG_LAST_SEQUENCE, "B", "s", {"A"}) == ""
    assert after_refusal(ErrorCode.MESSAGE_TTL_DISABLED, "", "s").endswith("NAME is the stream that stores subject 's'")
