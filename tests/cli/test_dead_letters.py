"""dlq list, show, redrive and drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext

from jetstream_ext import DirectGet, StoredMsg
from jetstream_ext.log import DeadLetter, LogReader, exactly_once
from jetstream_ext.testing import NatsServer

LONG = b"0" + b" " * 1999 + b"end"


@pytest.fixture
def names(server: NatsServer, stream_name: Callable[[], str]) -> tuple[str, str, str]:
    """A stream with three dead letters, their subject, and the stream of their inputs."""
    source, target = stream_name(), stream_name()

    async def create(js: JetStreamContext) -> None:
        for name in (source, target):
            options: dict[str, Any] = {"allow_direct": True, "allow_atomic": True}
            await js.add_stream(name=name, subjects=[f"{name}.>"], **options)
        for number in range(3):
            payload = (LONG, b"1", b"\xff")[number]
            await js.publish(f"{source}.{number}", payload, headers={"Kind": "a\x1b[31mb" if number else "test"})

        def fail(_: StoredMsg) -> None:
            raise ZeroDivisionError("no \x1b[31m")

        letters = DeadLetter(f"{target}.dead", attempts=1, backoff=0)
        await exactly_once(LogReader(js, source), target, fail, name="w", prefix=f"{target}.at", dead_letter=letters)

    with_js(server.url, create)
    return target, f"{target}.dead", source


def test_letters_are_listed_and_shown(run: Run, ok: Json, names: tuple[str, str, str]) -> None:
    stream, dead, source = names
    found = ok("dlq", "list", stream, dead)
    assert [it["origin"]["subject"] for it in found["letters"]] == [f"{source}.{n}" for n in range(3)]
    assert not found["more"]
    assert ok("dlq", "list", stream, dead, "--limit", "2")["more"]
    shown = run("dlq", "list", stream, dead).stdout
    assert "3 dead letters" in shown
    assert "ZeroDivisionError" in shown
    assert "\x1b" not in shown
    seqs = [str(it["seq"]) for it in found["letters"]]
    one = ok("dlq", "show", stream, dead, seqs[0])
    assert (one["data"], one["headers"]) == (LONG.decode(), [["Kind", "test"]])
    assert "payload, 2,003 bytes: 0 " in run("dlq", "show", stream, dead, seqs[0]).stdout
    for options, end in (([], "… (--full shows all of it)\n"), (["--full"], " end\n")):
        assert run("dlq", "show", stream, dead, seqs[0], *options).stdout.endswith(end)
    assert ok("dlq", "show", stream, dead, seqs[2])["data_base64"] == "/w=="
    text = run("dlq", "show", stream, dead, seqs[1]).stdout
    assert f"subject: {source}.1" in text
    assert "payload, 1 byte: 1" in text
    assert "\x1b" not in text
    missing = run("dlq", "show", stream, dead, "999")
    assert missing.exit_code == 1
    assert "has no dead letter with sequence 999" in missing.stderr


def test_letters_are_handed_back_and_dropped(
    server: NatsServer, run: Run, ok: Json, names: tuple[str, str, str], stream_name: Callable[[], str]
) -> None:
    stream, dead, source = names
    bucket = stream_name()
    seqs = [str(it["seq"]) for it in ok("dlq", "list", stream, dead)["letters"]]
    assert ok("dlq", "redrive", stream, dead, seqs[1], "--bucket", bucket)["sent"] == 1
    assert ok("dlq", "drop", stream, seqs[2])["dropped"] == 1
    assert run("dlq", "redrive", stream, dead, "--bucket", bucket).stdout == "handed back 1 dead letter\n"
    assert run("dlq", "drop", stream, seqs[0]).stdout == "deleted 0 dead letters\n"

    async def read(js: JetStreamContext) -> list[bytes]:
        return [it.data async for it in DirectGet(js, source).scan()]

    assert with_js(server.url, read) == [LONG, b"1", b"\xff", b"1", LONG]


def test_a_limit_and_another_stream(
    run: Run, ok: Json, names: tuple[str, str, str], stream_name: Callable[[], str]
) -> None:
    stream, dead, source = names
    bucket = stream_name()
    refused = run("dlq", "redrive", stream, dead, "--to-stream", stream, "--bucket", bucket)
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert "was refused, and stays" in refused.stderr
    assert len(ok("dlq", "list", stream, dead)["letters"]) == 3
    done = ok("dlq", "redrive", stream, dead, "--limit", 2, "--to-stream", source, "--bucket", bucket)
    assert done == {"stream": stream, "sent": 2, "found": 0, "left": 0}
    assert [it["origin"]["seq"] for it in ok("dlq", "list", stream, dead)["letters"]] == [3]


def test_messages_that_are_no_dead_letters_stay(
    server: NatsServer, run: Run, names: tuple[str, str, str], stream_name: Callable[[], str]
) -> None:
    stream, dead, _ = names
    with_js(server.url, lambda js: js.publish(dead, b"no letter"))
    done = run("dlq", "redrive", stream, dead, "--bucket", stream_name())
    left = "left in place: 1 message (no dead letter, or cannot be sent as it was)"
    assert (done.exit_code, done.stdout) == (0, f"handed back 3 dead letters; {left}\n")
    assert run("dlq", "list", stream, dead).stdout.endswith("0 dead letters\n")


def test_wrong_names_and_values_are_reported(run: Run) -> None:
    for arguments, status, words in (
        (["list", "a.b", "s"], 1, "stream name 'a.b'"),
        (["list", "S", "a..b"], 1, "'a..b'"),
        (["list", "S", "s", "--limit", "0"], 2, "0 is not in the range"),
        (["show", "S", "s", "0"], 2, "0 is not in the range"),
        (["redrive", "S", "s", "--bucket", "a b"], 1, "bucket name 'a b'"),
        (["redrive", "S", "s", "--to-stream", "a b"], 1, "stream name 'a b'"),
        (["drop", "S"], 2, "Missing argument"),
        (["drop", "S", "x"], 2, "'x' is not a valid integer"),
    ):
        done = run("dlq", *arguments)
        assert (done.exit_code, words in done.stderr) == (status, True), (arguments, done.output)


def test_what_is_missing_is_said(run: Run, names: tuple[str, str, str]) -> None:
    stream, dead, _ = names
    assert "does not exist" in run("dlq", "list", "MISSING", dead).stderr
    assert "is no dead letter" in run("dlq", "drop", stream, "1").stderr


def test_what_was_cut_is_shown(
    server: NatsServer, run: Run, ok: Json, names: tuple[str, str, str], stream_name: Callable[[], str]
) -> None:
    stream, dead, _ = names
    assert "lacks" not in run("dlq", "list", stream, dead).stdout

    async def cut(js: JetStreamContext) -> int:
        letter = await DirectGet(js, stream).get_last(dead)
        ack = await js.publish(dead, b"", headers={**letter.headers, "Dead-Letter-Cut": "data, headers"})
        return ack.seq

    seq = with_js(server.url, cut)
    shown = run("dlq", "list", stream, dead).stdout
    assert "lacks" in shown
    assert "data, headers" in shown
    one = ok("dlq", "show", stream, dead, str(seq))
    assert (one["cut"], one["complete"]) == (["data", "headers"], False)
    assert "lacks, because it was too large: data, headers" in run("dlq", "show", stream, dead, str(seq)).stdout
    done = run("dlq", "redrive", stream, dead, str(seq), "--bucket", stream_name())
    assert "left in place: 1 message (no dead letter, or cannot be sent as it was)" in done.stdout
