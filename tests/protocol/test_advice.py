"""What errors say about an option that is off: a Python call and a command that can be copied."""

from __future__ import annotations

import shlex

import pytest

from jetstream_ext.protocol.advice import enable_bucket, enable_command, enable_stream


def test_advice_names_the_call_and_the_command() -> None:
    assert enable_stream("ORDERS", "direct", "ttl", what="them") == (
        "enable them with allow_direct=True and allow_msg_ttl=True (jetstream_ext.ensure_stream) or "
        "'jetstream-ext enable ORDERS --direct --ttl'"
    )
    assert enable_bucket("prices", "spark") == (
        "enable it with `await jetstream_ext.kv.enable(kv, spark=True)` or 'jetstream-ext enable-bucket prices --spark'"
    )


@pytest.mark.parametrize("stream", ["a;rm b", "$(id)", "it's", "-x", "--server=nats://elsewhere"])
def test_a_shell_takes_the_name_of_a_stream_as_one_argument(stream: str) -> None:
    words = shlex.split(enable_command(stream, "direct"))
    assert stream in words
    assert stream == words[2] or words[3:] == ["--", stream]


def test_a_name_that_a_terminal_would_obey_is_not_in_the_command() -> None:
    assert enable_command("\x1b[2J", "direct") == "jetstream-ext enable NAME --direct"
