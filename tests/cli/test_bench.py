"""bench measures on a scratch stream, deletes it, and changes nothing else."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext
from nats.js.api import StreamInfo

from jetstream_ext.testing import NatsServer

SMALL = ("bench", "--messages", 1_000, "--rounds", 2)


def scratch(url: str) -> list[StreamInfo]:
    infos = with_js(url, lambda js: js.streams_info())
    return [info for info in infos if info.config.name.startswith("JSX_BENCH_")]


def test_bench_measures_both_libraries_and_deletes_its_stream(
    server: NatsServer, ok: Json, stream_name: Callable[[], str]
) -> None:
    name = stream_name()

    async def other(js: JetStreamContext) -> StreamInfo:
        await js.add_stream(name=name, subjects=[f"{name}.>"])
        await js.publish(f"{name}.a", b"mine")
        return await js.stream_info(name)

    before = with_js(server.url, other)
    said = ok(*SMALL)
    assert (said["server"], said["server_version"], said["left_out"]) == (server.url, server.version, {})
    assert {case["by"] for case in said["cases"]} == {"jetstream_ext", "nats-py"}
    for case in said["cases"]:
        rate = case["messages_per_second"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert case["times_nats_py"] > 0
    assert scratch(server.url) == []
    after = with_js(server.url, lambda js: js.stream_info(name))
    assert (after.config, after.state) == (before.config, before.state)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_bench_without_a_url_starts_a_server_and_draws_a_plot(run: Run, tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"bench.{suffix}"
    done = run(*SMALL, "--plot", picture, url=None)
    assert done.exit_code == 0, done.output
    assert "temporary server" in done.stdout
    assert all(
        words in done.stdout for words in ("js.publish_async", "FastPublisher.add_many", "DirectGet.scan", "1.0")
    )
    data = picture.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
    else:
        assert b"DirectGet.scan" in data
        assert b"this library" in data
        assert b"</svg>" in data


@pytest.mark.parametrize(
    ("version", "left_out"),
    [
        ("2.10.26", {"publish_atomic": "2.12", "FastPublisher.add_many": "2.14", "DirectGet.scan": "2.11"}),
        ("2.12.8", {"FastPublisher.add_many": "2.14"}),
    ],
)
def test_bench_leaves_out_calls_that_an_older_server_lacks(ok: Json, version: str, left_out: dict[str, str]) -> None:
    with NatsServer(version=version) as old:
        said = ok("bench", old.url, "--messages", 500, "--rounds", 1)
        assert said["left_out"] == left_out
        assert len(said["cases"]) == 7 - len(left_out)
        assert scratch(old.url) == []


@contextmanager
def started(process: Callable[..., subprocess.Popen[str]], url: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a long bench, and wait until it publishes."""
    before = {info.config.name for info in scratch(url)}
    with process("bench", url, "--messages", 1_000_000, "--rounds", 100, **options) as running:
        end = time.monotonic() + 120
        while not any(info.state.messages > 1_000 for info in scratch(url) if info.config.name not in before):
            assert time.monotonic() < end, "bench did not start to publish"
            assert running.poll() is None, running.communicate()
            time.sleep(0.05)
        yield running


@pytest.mark.parametrize(("number", "ctrl_c"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)])
def test_a_stopped_bench_deletes_its_stream(
    server: NatsServer, process: Callable[..., subprocess.Popen[str]], number: signal.Signals, ctrl_c: bool
) -> None:
    with started(process, server.url, ctrl_c=ctrl_c) as running:
        running.send_signal(number)
        shown, said = running.communicate(timeout=60)
    assert (running.returncode, shown, said) == (130, "", "stopped; the scratch stream is deleted\n")
    assert scratch(server.url) == []


def test_bench_reports_a_killed_server_and_the_stream_that_it_left(
    process: Callable[..., subprocess.Popen[str]],
) -> None:
    with NatsServer() as doomed:
        with started(process, doomed.url) as running:
            doomed.kill()
            shown, said = running.communicate(timeout=60)
        assert (running.returncode, shown) == (1, "")
        assert said.count("\n") == 2, said
        first, second = said.splitlines()
        assert "could not be deleted; delete it" in first
        assert second.startswith("Error: ")


def test_bench_refuses_an_invalid_plot_before_it_measures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    for picture, words in {"x.pdf": "*.png or *.svg", "no/x.png": "does not exist"}.items():
        done = run(*SMALL, "--plot", tmp_path / picture)
        assert (done.exit_code, done.stderr.count("\n"), words in done.stderr) == (1, 1, True), done.output
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    done = run(*SMALL, "--plot", tmp_path / "x.png")
    assert (done.exit_code, done.stderr) == (
        1,
        "Error: a plot needs matplotlib: pip install 'nats-jetstream-ext[plot]'\n",
    )
    for url in ("nats://127.0.0.1:1", "http://localhost"):
        done = run("bench", url)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output


def test_bench_reports_that_another_stream_takes_all_subjects(run: Run, ok: Json) -> None:
    with NatsServer() as taken:
        with_js(taken.url, lambda js: js.add_stream(name="ALL", subjects=[">"], no_ack=True))
        done = run("bench", taken.url)
        assert (done.exit_code, done.stderr) == (
            1,
            "Error: the server says: subjects overlap with an existing stream\n",
        )
        assert [found["name"] for found in ok("doctor", taken.url)["streams"]] == ["ALL"]


def test_bench_ignores_the_selected_context(ok: Json, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "nats"
    (folder / "context").mkdir(parents=True)
    (folder / "context.txt").write_text("production\n")
    (folder / "context" / "production.json").write_text(json.dumps({"url": "nats://127.0.0.1:1"}))
    assert ok("bench", "--messages", 100, "--rounds", 1, url=None)["server"] == "embedded"
    assert run("bench", "--context", "production", url=None).exit_code == 1
