"""Servers, users, contexts and TLS of a command's connection; no output shows a secret."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from cli_tools import Json, Run, assert_fails, assert_usage

from jetstream_ext.cli import connection
from jetstream_ext.cli.__main__ import cli
from jetstream_ext.testing import NatsServer

SECRET = "s3cret@w:ord"


def write_context(name: str, **settings: object) -> None:
    folder = connection.context_folder() / "context"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(settings))


def test_a_url_is_shown_without_its_secrets(run: Run) -> None:
    for url in (
        f"nats://u:{SECRET}@127.0.0.1:1",
        f"nats://{SECRET}@127.0.0.1:1",
        f"u:{SECRET}@127.0.0.1:1",
        f"nats://u:{SECRET}@127.0.0.1:port",
        f"http://u:{SECRET}@127.0.0.1:1",
        f"nats://127.0.0.1:1,nats://u:{SECRET}@127.0.0.1:2",
    ):
        for arguments in (["doctor", url], ["snapshot", "B", "--server", url]):
            done = run(*arguments, url=None)
            assert_fails(done, "127.0.0.1")
            assert "ord@" not in done.stderr, arguments
            assert "s3cret" not in done.stderr, arguments


def test_a_named_server_precedes_the_environment(run: Run, ok: Json, server: NatsServer) -> None:
    for place in (["URL"], ["--server", "URL"], ["-s", "URL"], ["-s", "URL", "URL"]):
        found = ok("doctor", *(each.replace("URL", server.url) for each in place), url="nats://127.0.0.1:1")
        assert found["server_version"] == server.version, place
    done = run("doctor", "nats://u:s3cret@127.0.0.1:1", "--server", "nats://127.0.0.1:2")
    assert_usage(done, "--server and the argument URL name different servers; give only one of them")
    assert "s3cret" not in done.output


def test_every_command_that_connects_takes_a_server() -> None:
    def options(command: click.Command) -> set[str]:
        return {flag for parameter in command.params for flag in parameter.opts}

    def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for part, each in command.commands.items():
                yield from leaves(f"{name} {part}".strip(), each)
        else:
            yield name, command

    assert {name for name, command in leaves("", cli) if not {"-s", "--server"} <= options(command)} == {
        "demo",  # starts a server
        "serve",  # is the server
    }


def test_credentials_come_from_options_or_a_context_and_no_output_shows_them(run: Run, ok: Json) -> None:
    with NatsServer(config='authorization { user: u, password: "s3cret-word" }') as guarded:
        for wrong in (["--user", "u", "--password", "wr0ng"], [guarded.url.replace("://", "://u:wr0ng@")]):
            done = run("doctor", *wrong, url=guarded.url)
            assert_fails(done, "uthorization")
            assert "wr0ng" not in done.output
        write_context("mine", url=guarded.url, user="u", password="s3cret-word")
        assert ok("doctor", "--context", "mine", url=None)["streams"] == []
        (connection.context_folder() / "context.txt").write_text("mine\n")
        assert ok("doctor", url=None)["streams"] == []
        # The credentials of the selected context are only for its own server.
        assert_fails(run("doctor", guarded.url, url=None), "uthorization")
        # A password precedes other credentials, as in the nats tool.
        write_context("both", url=guarded.url, user="u", password="s3cret-word", token="other", nkey="/no/such/file")
        assert ok("doctor", "--context", "both", url=None)["streams"] == []


def test_invalid_contexts_are_refused(run: Run) -> None:
    write_context("flag", tls_first="yes")
    write_context("number", token=5)
    for name, words in {
        "flag": "'tls_first' is not true or false",
        "number": "'token' is not a string",
        "other": "context 'other' does not exist",
        "../mine": "'../mine' is not a valid context name",
    }.items():
        assert_fails(run("doctor", "--context", name, url=None), words)
    (connection.context_folder() / "context.txt").write_bytes(b"\xff\xfe")
    assert_fails(run("doctor", url=None), "does not exist")


def test_a_timeout_is_a_duration_of_the_nats_tool(run: Run, ok: Json) -> None:
    assert ok("doctor", "--timeout", "1m30s")["missing"] == {}
    assert_usage(run("doctor", "--timeout", "1 s"), "is not a duration")


def test_a_websocket_url_without_aiohttp_names_the_package(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "aiohttp" else find(name, *rest)
    )
    words = "Error: WebSockets need the package aiohttp: pip install 'nats-py[aiohttp]'\n"
    assert_fails(run("doctor", "ws://127.0.0.1:1"), words)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls_connects_with_and_without_handshake_first(
    process: Callable[..., subprocess.Popen[str]], run: Run, ok: Json, tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}".split(),
        capture_output=True,
        check=True,
    )
    for first in (False, True):
        options = "handshake_first: true" if first else ""
        with NatsServer(config=f'tls {{ cert_file: "{certificate}", key_file: "{key}", {options} }}') as server:
            write_context("mine", url=server.url, ca=str(certificate), tls_first=first)
            assert ok("doctor", "--context", "mine", url=None)["streams"] == []
            # As a process: warnings of asyncio about TLS would be on its stderr.
            flags = ["--tlsfirst"] if first else []
            with process("doctor", "--json", server.url, "--tlsca", certificate, *flags, url=None) as asking:
                shown, said = asking.communicate(timeout=60)
            assert (asking.returncode, said) == (0, "")
            assert json.loads(shown)["streams"] == []
            assert_fails(run("doctor", server.url, "--timeout", "2s"))  # a certificate that is not trusted
