"""Texts of a server reach terminals and logs without their escape sequences."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nats_server import FakeNatsServer
from nats.js import JetStreamContext
from read_as_spark import read_as_spark
from run_cli import run_cli

import jetstream_ext as jsx

pytestmark = pytest.mark.usefixtures("collect_connections")


EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J"


def test_no_escape_sequence_of_a_refused_connection_reaches_the_terminal(tmp_path: Path) -> None:
    words = f"-ERR 'Authorization Violation {EVIL}'\r\n".encode()
    with FakeNatsServer(on_connect=lambda: words) as server:
        done = run_cli("doctor", server.url, "--timeout", "20s", home=tmp_path)
    assert done.status == 1
    assert done.output.replace("\n", "").isprintable()


def test_no_escape_sequence_of_a_refused_connection_reaches_sparks_log() -> None:
    pytest.importorskip("pyspark")
    words = f"-ERR 'Authorization Violation {EVIL}'\r\n".encode()
    with FakeNatsServer(on_connect=lambda: words) as server:
        read = read_as_spark(server.url)
    assert "Authorization Violation" in read.error
    assert read.error.replace("\n", "").isprintable()


async def test_no_escape_sequence_of_a_malformed_advisory_reaches_the_log(
    js: JetStreamContext, stream_name: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    name = stream_name()
    caplog.set_level(logging.DEBUG, "jetstream_ext")
    advisory = f"$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.{name}"
    event = {"stream": name, "batch": "b", "reason": "timeout", "timestamp": EVIL}
    async with jsx.watch_abandoned(js, name) as batches:
        await js._nc.publish(advisory, json.dumps(event).encode())
        await js._nc.publish(advisory, EVIL.encode())
        await js._nc.publish(advisory, json.dumps(event | {"timestamp": "2026-01-01T00:00:00Z"}).encode())
        async with asyncio.timeout(60):
            assert (await anext(batches)).batch_id == "b"
    assert sum("malformed advisory" in message for message in caplog.messages) == 2, caplog.messages
    assert all(message.isprintable() for message in caplog.messages)
