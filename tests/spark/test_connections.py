"""The connections of a worker process."""

import asyncio
import os
import shutil
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import APIError

from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.spark.connection import (
    ConnectError,
    Connections,
    Lease,
    RefusedError,
    WorkerConnection,
    connections,
)
from jetstream_ext.spark.options import ConnectionOptions, OptionError
from jetstream_ext.testing import NatsServer

Names = Callable[[], list[str]]


@pytest.fixture
def options(guarded: NatsServer, secret: str, monkeypatch: pytest.MonkeyPatch) -> ConnectionOptions:
    monkeypatch.setenv("JETSTREAM_EXT_PASSWORD", secret)
    return ConnectionOptions(servers=(guarded.url,), user="all", password_env="JETSTREAM_EXT_PASSWORD", timeout=5)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def rtt(client: object) -> float:
    return float(await client.rtt())  # type: ignore[attr-defined]


def test_a_connection_is_kept_between_tasks(
    cache: Connections, options: ConnectionOptions, connection_names: Names
) -> None:
    clients = set()
    for _ in range(3):
        with cache.lend(options, "kept") as lease, cache.lend(options, "not made") as other:
            clients |= {id(lease.connection.client), id(other.connection.client)}
            assert lease.run(rtt(lease.connection.client)) > 0
    assert len(clients) == 1
    assert [name for name in connection_names() if name in ("kept", "not made")] == ["kept"]


def test_an_unused_connection_answers_pings(cache: Connections) -> None:
    with NatsServer(config='ping_interval: "2s"\nping_max: 2') as impatient:
        options = ConnectionOptions(servers=(impatient.url,), timeout=5)
        with cache.lend(options, "pinged") as lease:
            client = lease.connection.client
        time.sleep(7)  # the server disconnects clients that miss two pings
        with cache.lend(options, "pinged") as lease:
            assert lease.connection.client is client
            assert client.stats["reconnects"] == 0


def test_an_idle_connection_is_closed(options: ConnectionOptions, connection_names: Names) -> None:
    with closing(Connections(idle=0.1)) as cache:
        with cache.lend(options, "idle"):
            time.sleep(0.3)
            assert "idle" in connection_names()
        eventually(lambda: "idle" not in connection_names())
        with cache.lend(options, "idle"):
            assert "idle" in connection_names()
    eventually(lambda: "idle" not in connection_names())


def test_the_connection_of_a_failed_task_is_dropped(
    cache: Connections, options: ConnectionOptions, connection_names: Names
) -> None:
    with cache.lend(options, "other task") as other:
        with pytest.raises(ZeroDivisionError), cache.lend(options, "failed task"):
            raise ZeroDivisionError
        with cache.lend(options, "next task") as lease:
            assert lease.connection is not other.connection
        assert other.run(rtt(other.connection.client)) > 0  # still usable by the other task
    eventually(lambda: "other task" not in connection_names())


def test_a_wrong_password_fails_at_once(
    cache: Connections, options: ConnectionOptions, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JETSTREAM_EXT_PASSWORD", "wrong")
    patient = ConnectionOptions(**vars(options) | {"timeout": 60})
    start = time.monotonic()
    with pytest.raises(ConnectError, match=r"(?i)authorization") as caught, cache.lend(patient, "x"):
        pass
    assert time.monotonic() - start < 30
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("JETSTREAM_EXT_PASSWORD", secret)
    with cache.lend(options, "x") as lease:  # the failure is not remembered
        assert lease.connection.client.is_connected


def test_an_unreachable_server_is_a_connect_error(cache: Connections) -> None:
    options = ConnectionOptions(servers=("nats://127.0.0.1:1",), timeout=2)
    with (
        pytest.raises(ConnectError, match=r"127\.0\.0\.1:1 within 2 s: .*Connect call failed"),
        cache.lend(options, "x"),
    ):
        pass


def test_a_server_that_stops_in_the_tls_handshake_is_a_connect_error(cache: Connections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:

        def greet() -> socket.socket:
            peer, _ = listener.accept()
            peer.sendall(b'INFO {"server_id": "F", "version": "2.15.1", "tls_required": true}\r\n')
            return peer

        def connect() -> None:
            options = ConnectionOptions(servers=(f"nats://127.0.0.1:{listener.getsockname()[1]}",), timeout=1)
            with pytest.raises(ConnectError, match="within 1 s"), cache.lend(options, "x"):
                pass

        greeting, connecting = threads.submit(greet), threads.submit(connect)
        try:
            connecting.result(timeout=20)
        finally:
            greeting.result().close()


def test_a_timeout_names_the_missing_permission(cache: Connections, options: ConnectionOptions) -> None:
    less = ConnectionOptions(servers=options.servers, user="less", password_env="JETSTREAM_EXT_PASSWORD", timeout=5)
    with (
        pytest.raises(RefusedError, match=r"(?i)permissions Violation for Publish to .*\$JS.API.STREAM.INFO.A"),
        cache.lend(less, "less") as lease,
    ):
        lease.run(lease.connection.context().stream_info("A"))


def test_the_context_uses_the_domain_or_prefix(cell: Any) -> None:
    for where, prefix in [
        ({}, "$JS.API"),
        ({"domain": "hub"}, "$JS.hub.API"),
        ({"api_prefix": "JS.other"}, "JS.other"),
    ]:
        with cell(where, prefix):
            context = WorkerConnection(ConnectionOptions(servers=("nats://unused",), timeout=7, **where)).context()  # type: ignore[arg-type]
            assert (context._prefix, context._timeout) == (prefix, 7)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_tls_authenticates_server_and_client(cache: Connections, tmp_path: Path) -> None:
    for name in ("server", "client"):
        subprocess.run(
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name} "
            f"-addext subjectAltName=IP:127.0.0.1 -keyout {name}.key -out {name}.pem".split(),
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    pem = {name: str(tmp_path / name) for name in ("server.pem", "server.key", "client.pem", "client.key")}
    tls = f"""tls {{cert_file: "{pem["server.pem"]}", key_file: "{pem["server.key"]}",
                    ca_file: "{pem["client.pem"]}", verify: true}}"""
    with NatsServer(config=tls) as server:
        trusted = ConnectionOptions(
            servers=(server.url,),
            tls_ca=pem["server.pem"],
            tls_cert=pem["client.pem"],
            tls_key=pem["client.key"],
            timeout=5,
        )
        with cache.lend(trusted, "tls") as lease:
            assert lease.run(rtt(lease.connection.client)) > 0
        subprocess.run(
            ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", "client.key", "-out", "locked.key"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        locked = ConnectionOptions(**vars(trusted) | {"tls_key": str(tmp_path / "locked.key")})
        with pytest.raises(OptionError, match="unencrypted"), cache.lend(locked, "x"):
            pass
        stranger = ConnectionOptions(servers=(server.url,), tls_ca=pem["client.pem"], timeout=3)
        with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"), cache.lend(stranger, "x"):
            pass


def test_an_invalid_reference_is_named_without_its_value(cell: Any, cache: Connections, server: NatsServer) -> None:
    for given, message in [
        ({"user": "u", "password_env": "JETSTREAM_EXT_NOT_SET"}, "'passwordEnv'.*environment variable that is set"),
        ({"token_env": "JETSTREAM_EXT_NOT_SET"}, "'tokenEnv'.*environment variable that is set"),
        ({"tls_ca": "/no/such/file"}, "'tlsCa'.*file '/no/such/file' does not exist on this node"),
        ({"nkey_file": "SU" + "A" * 56}, "'nkeyFile'.*holds the secret itself"),
        ({"creds_file": "-----BEGIN NATS USER JWT-----\nJSX_NOT_SET" + "x" * 1000}, "'credsFile'.*holds the secret"),
        ({"nkey_file": "JETSTREAM_EXT_NOT_SET" + "x" * 300}, "'nkeyFile'.*holds the secret itself"),
        ({"tls_ca": __file__}, "'tlsCa'.*holds no certificates"),
        ({"tls_cert": __file__, "tls_key": __file__}, "'tlsCert', 'tlsKey'"),
    ]:
        with cell(given, message):
            with (
                pytest.raises(OptionError, match=message) as caught,
                cache.lend(ConnectionOptions(servers=(server.url,), **given), "x"),  # type: ignore[arg-type]
            ):
                pass
            assert "JETSTREAM_EXT_NOT_SET" not in str(caught.value)
            assert "SUAA" not in str(caught.value)


def test_unusable_credentials_files_are_refused(
    cache: Connections, server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "a.creds"
    wrong.write_text("nothing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with (
        pytest.raises(OptionError, match=r"'credsFile'.*no user JWT"),
        cache.lend(ConnectionOptions(servers=(server.url,), creds_file=str(wrong)), "x"),
    ):
        pass
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(OptionError, match=r"'nkeyFile'.*nats-py\[nkeys\]"),
        cache.lend(ConnectionOptions(servers=(server.url,), nkey_file=str(wrong)), "x"),
    ):
        pass


EVIL = "\x1b]0;owned\x07\x9b2J"
ESCAPED = r"\x1b]0;owned\x07\x9b2J"


def test_each_process_has_its_own_connections() -> None:
    assert connections() is connections()
    with pytest.MonkeyPatch.context() as patch:
        mine = connections()
        patch.setattr(os, "getpid", lambda: -1)
        forked = connections()
        assert forked is not mine
        forked.close()


def test_the_traceback_that_spark_logs_is_printable(cache: Connections, options: ConnectionOptions) -> None:
    async def fail() -> None:
        try:
            try:
                raise KeyError("harmless")
            except KeyError:
                raise APIError(description=f"one {EVIL}")  # noqa: B904 # the context is the point
        except APIError as error:
            raise JetStreamExtError(f"two {EVIL}") from error

    with pytest.raises(JetStreamExtError) as caught, cache.lend(options, "x") as lease:
        lease.run(fail())
    text = "".join(traceback.format_exception(caught.value))
    assert text.replace("\n", "").isprintable()
    for words in ("KeyError: 'harmless'", f"one {ESCAPED}", f"two {ESCAPED}", "raise APIError"):
        assert words in text
    assert caught.value.message == f"two {EVIL}"


async def _tasks() -> set[object]:
    return asyncio.all_tasks() - {asyncio.current_task()}


def test_a_connection_that_is_closed_during_an_outage_leaves_no_task(
    cache: Connections, options: ConnectionOptions
) -> None:
    """nats-py's own close() stops where it cannot send what is still to be sent."""

    async def send(lease: Lease) -> None:
        await lease.connection.client.publish("a")

    def lose(server: NatsServer) -> None:
        with cache.lend(ConnectionOptions(servers=(server.url,)), "lost") as lease:
            lease.run(lease.connection.context().account_info())
            server.kill()
            eventually(lambda: not lease.connection.client.is_connected)
            lease.run(send(lease))
            raise ZeroDivisionError

    with cache.lend(options, "beside") as beside, NatsServer() as server:
        before = beside.run(_tasks())
        with pytest.raises(ZeroDivisionError):
            lose(server)
        eventually(lambda: beside.run(_tasks()) <= before)
