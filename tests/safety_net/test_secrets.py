"""No password is sent in the clear if TLS was requested, and none is printed."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_nats_server import FakeNatsServer, certificate
from read_as_spark import read_as_spark
from run_cli import run_cli

pytestmark = pytest.mark.usefixtures("collect_connections")

PASSWORD = "correct-horse"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


def refuse() -> bytes | None:
    """Refuse every client, so that it does not retry for long."""
    return b"-ERR 'Authorization Violation'\r\n"


def sent_in_the_clear(server: FakeNatsServer) -> bool:
    assert server.connections, "no client connected"
    return any(PASSWORD.encode() in line for line in server.clear)


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETY_NET_PASSWORD", PASSWORD)


class LosesTls:
    """Offers TLS until a client has authenticated, drops it at its first request, and offers no TLS after that."""

    def __init__(self) -> None:
        self.met = False

    def info(self, number: int) -> Mapping[str, Any]:
        return {"tls_required": not self.met}

    def on_connect(self) -> bytes | None:
        met, self.met = self.met, True
        return None if met else b""

    def on_publish(self, subject: str) -> bytes | None:
        raise ConnectionAbortedError


@needs_openssl
def test_spark_sends_no_password_to_a_server_that_has_lost_its_tls(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    chain, script = certificate(tmp_path), LosesTls()
    with FakeNatsServer(
        info=script.info, on_connect=script.on_connect, on_publish=script.on_publish, chain=chain
    ) as server:
        read_as_spark(server.url, requestTimeout="5", tlsCa=str(chain), user="u", passwordEnv="SAFETY_NET_PASSWORD")
        assert script.met
        assert not sent_in_the_clear(server)


def test_command_line_sends_no_password_when_only_its_first_connection_is_offered_tls(tmp_path: Path) -> None:
    with FakeNatsServer(info=lambda n: {"tls_required": n == 0}, on_connect=refuse) as server:
        run_cli("doctor", f"tls://u:{PASSWORD}@{server.place}", "--timeout", "20s", home=tmp_path)
        assert not sent_in_the_clear(server)


@needs_openssl
def test_command_line_sends_no_password_to_a_server_that_has_lost_its_tls(tmp_path: Path) -> None:
    chain, script = certificate(tmp_path), LosesTls()
    with FakeNatsServer(
        info=script.info, on_connect=script.on_connect, on_publish=script.on_publish, chain=chain
    ) as server:
        run_cli(
            "doctor",
            server.url,
            "--user",
            "u",
            "--password",
            PASSWORD,
            "--tlsca",
            chain,
            "--timeout",
            "8s",
            home=tmp_path,
        )
        assert script.met
        assert not sent_in_the_clear(server)


# A URL parser mistakes these characters for the end of the user information or for an IPv6 address.
ODD = ["hun/ter2", "hun?ter2", "hun#ter2", "hun[ter2", "hun]ter2", "[hunter2]", "hun,ter2"]


def test_command_line_prints_no_part_of_a_password(tmp_path: Path) -> None:
    export = ["export", "S", "-", "--format", "jsonl"]
    failures = []
    for secret in ODD:
        url = f"nats://alice:{secret}@127.0.0.1:1"
        ways: list[tuple[list[str], dict[str, str]]] = [
            ([*export, "--server", url], {}),
            (export, {"NATS_URL": url}),
            (["doctor", url], {}),
        ]
        for arguments, variables in ways:
            done = run_cli(*arguments, home=tmp_path, environment=variables)
            words = [word for word in ("hun", "ter2", "IPv6", "Port could not be cast") if word in done.output]
            if done.status != 1 or words:
                failures.append(f"{secret}, {arguments}: status {done.status}, shows {words}: {done.output}")
    assert not failures, "\n".join(failures)
