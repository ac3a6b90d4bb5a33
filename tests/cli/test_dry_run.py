"""ingest --dry-run finds the rows that cannot be sent, and sends none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer


@pytest.fixture
def stream(server: NatsServer, stream_name: Callable[[], str]) -> str:
    name = stream_name()
    config: Any = {"subjects": [f"{name}.a", f"{name}.b.*"], "allow_direct": True, "allow_batched": True}
    with_js(server.url, lambda js: jsx.ensure_stream(js, name=name, max_msg_size=300, **config))
    return name


def messages(url: str, stream: str) -> int:
    found: int = with_js(url, lambda js: js.stream_info(stream)).state.messages
    return found


def test_a_dry_run_counts_and_shows_what_would_be_sent(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream: str
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("to,n\n" + "".join(f"b.{n},{n}\n" for n in range(4)))
    how = ("ingest", rows, "--stream", stream, "--subject", f"{stream}.{{to}}")
    ok(*how)
    rows.write_text(rows.read_text() + "".join(f"a,{'x' * n}\n" for n in range(110, 120)))
    done = run(*how, "--resume", "--skip", 1, "--dry-run")
    first = f'  {stream}.a  {{"to":"a","n":"{"x" * 84}…\n'
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        f"{rows} to {stream}: 1 skipped, 3 already stored, 10 to send; nothing was sent\n{first * 3}"
    )
    assert messages(server.url, stream) == 4
    found = ok(*how, "--again", "--dry-run")
    assert (found["to_send"], found["cannot_be_sent"], found["problems"]) == (14, 0, [])
    assert found["examples"][1] == {"subject": f"{stream}.b.1", "data": '{"to":"b.1","n":"1"}'}
    assert messages(server.url, stream) == 4


def test_a_dry_run_names_every_row_that_the_server_would_refuse(
    server: NatsServer, run: Run, tmp_path: Path, stream: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines: list[dict[str, object]] = [
        {"to": "a", "h": None, "n": 1},
        {"to": "b", "h": {}, "n": 2},
        {"to": None, "h": {}},
        {"to": "a", "h": {}, "n": "x" * 300},
        {"to": "b.*", "h": {}},
        {"to": "a", "h": {"X": "a\nb"}},
        {"to": "a", "h": {}, "n": "x" * 2_000_000},
        *({"to": f"b.{n}", "h": {}} for n in range(3)),
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{")
    how = ("ingest", rows, "--stream", stream, "--subject", f"{stream}.{{to}}", "--headers-from", "h")
    done = run(*how, "--dry-run")
    assert done.exit_code == 1
    problems = [*done.stdout.splitlines()[4:], *done.stderr.splitlines()]
    for problem, words in zip(
        problems,
        [
            f"row 2: stream '{stream}' does not store its subject '{stream}.b'",
            "row 3: column 'to' has no value; the subject needs it",
            "row 4: the message has ",
            "row 5: subject ",
            "row 6: the value of header 'X' has a line break",
            "row 7: the message on subject",
            f"{rows}, line 11: ",
            f"Error: 7 rows of {rows} cannot be sent; nothing was sent",
        ],
        strict=True,
    ):
        assert problem.startswith(words)
    assert "max_msg_size of 300" in problems[2]
    assert "max_payload of 1048576" in problems[5]
    # The server agrees about the first one, and about the size.
    assert "row 2" in run(*how).stderr
    assert "row 4" in run(*how, "--skip", 3).stderr
    assert messages(server.url, stream) == 1


def test_a_message_of_the_largest_size_is_no_problem_for_a_dry_run_or_the_server(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    how = ("ingest", rows, "--stream", stream, "--subject", f"{stream}.a", "--again")
    rows.write_text(json.dumps({"n": "x" * 300}))
    [_, problem] = run(*how, "--dry-run").stdout.splitlines()
    size = int(problem.partition("has ")[2].split()[0])
    rows.write_text(json.dumps({"n": "x" * (600 - size)}))
    assert ok(*how, "--dry-run")["cannot_be_sent"] == 0
    assert ok(*how)["sent"] == 1
    rows.write_text(json.dumps({"n": "x" * (601 - size)}))
    assert run(*how, "--dry-run").exit_code == 1
    assert "message size exceeds maximum allowed" in run(*how).stderr


def test_a_dry_run_creates_no_stream_and_names_what_a_stream_lacks(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream_name: Callable[[], str]
) -> None:
    stream, rows = stream_name(), tmp_path / "rows.jsonl"
    rows.write_text("{}\n{}\n")
    how = ("ingest", rows, "--stream", stream, "--subject", f"{stream}.a", "--dry-run")
    assert ok(*how, "--create", f"{stream}.*")["to_send"] == 2
    assert "does not store its subject" in run(*how, "--create", f"{stream}.b").stdout
    assert f"stream '{stream}' does not exist; --create SUBJECT creates it" in run(*how).stderr
    with_js(server.url, lambda js: js.add_stream(name=stream, subjects=[f"{stream}.a"]))
    assert f"jetstream-ext enable {stream} --batched" in run(*how).stderr


def test_create_leaves_the_subjects_and_limits_of_an_existing_stream(
    server: NatsServer, run: Run, ok: Json, tmp_path: Path, stream: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    how = ("ingest", rows, "--stream", stream, "--create", f"{stream}.new", "--subject")
    for dry in (("--dry-run",), ()):
        done = run(*how, f"{stream}.new", *dry)
        assert (done.exit_code, f"'{stream}' does not store its subject '{stream}.new'" in done.output) == (1, True)
    assert ok(*how, f"{stream}.a")["sent"] == 1

    async def seal(js: JetStreamContext) -> None:
        config = (await js.stream_info(stream)).config.as_dict()
        await js._api_request(f"$JS.API.STREAM.UPDATE.{stream}", json.dumps(config | {"sealed": True}).encode())

    with_js(server.url, seal)
    assert f"stream '{stream}' takes no rows: it is sealed" in run(*how, f"{stream}.a", "--dry-run").stderr
