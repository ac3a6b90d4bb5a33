"""No password leaves in the clear where TLS was asked for, and none is shown."""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_nats_server import FakeNatsServer, certificate
from run_cli import run_cli

ISSUE = "Hostile and odd input"
PASSWORD = "correct-horse"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


def read_with_spark(**options: str) -> None:
    """Read a stream as Spark's driver does, without a Spark; whatever it fails with."""
    pytest.importorskip("pyspark")
    from pyspark.sql.datasource import CaseInsensitiveDict
    from pyspark_jetstream import DefaultSource

    source = DefaultSource(CaseInsensitiveDict({"stream": "S", "requestTimeout": "1", **options}))
    with contextlib.suppress(Exception):
        source.reader(source.schema()).partitions()


def refuse() -> bytes | None:
    """End a connection once the client has said who it is."""
    return None


def sent_in_the_clear(server: FakeNatsServer) -> bool:
    assert server.connections, "nobody connected"
    return any(PASSWORD.encode() in line for line in server.clear)


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETY_NET_PASSWORD", PASSWORD)


SPARK = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=f"{ISSUE}: Spark sends the password in the clear although TLS was asked for"
)


@SPARK
@needs_openssl
@pytest.mark.parametrize("how", ["scheme", "tlsCa"])
def test_spark_sends_no_password_to_a_server_without_tls(tmp_path: Path, how: str) -> None:
    with FakeNatsServer(on_connect=refuse) as server:
        asked = {"tlsCa": str(certificate(tmp_path)), "servers": server.url}
        if how == "scheme":
            asked = {"servers": f"tls://{server.place}"}
        read_with_spark(user="u", passwordEnv="SAFETY_NET_PASSWORD", **asked)
        assert not sent_in_the_clear(server)


class LosesTls:
    """Offers TLS until a client has said who it is, loses the connection at its first request, and has none from then on."""

    def __init__(self) -> None:
        self.met = False

    def info(self, number: int) -> Mapping[str, Any]:
        return {"tls_required": not self.met}

    def on_connect(self) -> bytes | None:
        met, self.met = self.met, True
        return None if met else b""

    def on_publish(self, subject: str) -> bytes | None:
        raise ConnectionAbortedError


@SPARK
@needs_openssl
def test_spark_sends_no_password_to_a_server_that_has_lost_its_tls(tmp_path: Path) -> None:
    chain, script = certificate(tmp_path), LosesTls()
    with FakeNatsServer(
        info=script.info, on_connect=script.on_connect, on_publish=script.on_publish, chain=chain
    ) as server:
        read_with_spark(servers=server.url, tlsCa=str(chain), user="u", passwordEnv="SAFETY_NET_PASSWORD")
        assert script.met
        assert not sent_in_the_clear(server)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=f"{ISSUE}: the command line looks for TLS on another connection than it uses"
)
def test_command_line_sends_no_password_when_only_its_first_connection_is_offered_tls(tmp_path: Path) -> None:
    with FakeNatsServer(info=lambda n: {"tls_required": n == 0}, on_connect=refuse) as server:
        run_cli("doctor", f"tls://u:{PASSWORD}@{server.place}", "--timeout", "1s", home=tmp_path)
        assert not sent_in_the_clear(server)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=f"{ISSUE}: the command line does not look for TLS when it reconnects"
)
@needs_openssl
def test_command_line_sends_no_password_to_a_server_that_has_lost_its_tls(tmp_path: Path) -> None:
    chain, script = certificate(tmp_path), LosesTls()
    with FakeNatsServer(
        info=script.info, on_connect=script.on_connect, on_publish=script.on_publish, chain=chain
    ) as server:
        run_cli(
            "doctor", server.url, "--user", "u", "--password", PASSWORD, "--tlsca", chain, "--timeout", "1s", home=tmp_path
        )
        assert script.met
        assert not sent_in_the_clear(server)


# A URL parser takes these for the end of the user information, or for an address of IPv6.
ODD = ["hun/ter2", "hun?ter2", "hun#ter2", "hun[ter2", "hun]ter2", "[hunter2]", "hun,ter2"]


def options(url: str) -> tuple[list[str], dict[str, str]]:
    return ["export", "S", "-", "--format", "jsonl", "--server", url], {}


def environment(url: str) -> tuple[list[str], dict[str, str]]:
    return ["export", "S", "-", "--format", "jsonl"], {"NATS_URL": url}


def argument(url: str) -> tuple[list[str], dict[str, str]]:
    return ["doctor", url], {}


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=f"{ISSUE}: a part of a password with a special character is printed"
)
@pytest.mark.parametrize("secret", ODD)
@pytest.mark.parametrize("given", [options, environment, argument])
def test_command_line_prints_no_part_of_a_password(
    tmp_path: Path, given: Callable[[str], tuple[list[str], dict[str, str]]], secret: str
) -> None:
    arguments, variables = given(f"nats://alice:{secret}@127.0.0.1:1")
    done = run_cli(*arguments, home=tmp_path, environment=variables)
    assert done.status == 1
    for shown in ("hun", "ter2", "IPv6", "Port could not be cast"):
        assert shown not in done.output


# -- words of the server


def refuse_api(description: str) -> Callable[[str], bytes | None]:
    """Return an `on_publish` that refuses every request to JetStream."""
    error = {"code": 500, "err_code": 10049, "description": description}
    return lambda subject: json.dumps({"type": "io.nats.jetstream.api.v1.error", "error": error}).encode()


EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J"


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=f"{ISSUE}: escape sequences in a server's -ERR reach the terminal"
)
def test_no_escape_sequence_of_a_refused_connection_reaches_the_terminal(tmp_path: Path) -> None:
    words = f"-ERR 'Authorization Violation {EVIL}'\r\n".encode()
    with FakeNatsServer(on_connect=lambda: words) as server:
        done = run_cli("doctor", server.url, "--timeout", "1s", home=tmp_path)
    assert done.status == 1
    assert done.output.replace("\n", "").isprintable()


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=f"{ISSUE}: escape sequences in a server's description reach the terminal"
)
@pytest.mark.parametrize("command", [["doctor"], ["export", "S", "-", "--format", "jsonl"], ["snapshot", "B"]])
def test_no_escape_sequence_of_a_refused_request_reaches_the_terminal(tmp_path: Path, command: list[str]) -> None:
    with FakeNatsServer(on_publish=refuse_api(EVIL)) as server:
        done = run_cli(*command, "--timeout", "1s", home=tmp_path, environment={"NATS_URL": server.url})
    assert done.output
    assert done.output.replace("\n", "").isprintable()
