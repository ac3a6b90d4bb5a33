"""Every way in which a user asks for TLS keeps the credentials from a server without it, and from one with another name."""

import asyncio
import json
import shutil
from pathlib import Path

import nkeys
import pytest
from fake_nats_server import FakeNatsServer, certificate
from run_cli import run_cli

from jetstream_ext.own_client import OwnClient, tls_context

pytestmark = pytest.mark.usefixtures("collect_connections")

PASSWORD = "correct-horse"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("certificate"))


def nothing_was_told(server: FakeNatsServer) -> bool:
    assert server.connections, "no client connected"
    return not any(b"CONNECT" in line or PASSWORD.encode() in line for line in server.clear)


def refuse() -> bytes:
    return b"-ERR 'Authorization Violation'\r\n"


# Arguments, environment and context of a command. PLACE is the server's host and port, CHAIN a file in PEM format.
WAYS_OF_THE_COMMAND_LINE = {
    "argument": (["doctor", "tls://PLACE"], {}, {}),
    "upper case": (["doctor", "TLS://PLACE"], {}, {}),
    "option": (["snapshot", "B", "--server", "tls://PLACE"], {}, {}),
    "NATS_URL": (["snapshot", "B"], {"NATS_URL": "tls://PLACE"}, {}),
    "another server's scheme": (["doctor", "nats://PLACE,tls://127.0.0.1:1"], {}, {}),
    "scheme of the first": (["doctor", "tls://PLACE,127.0.0.1:1"], {}, {}),
    "--tlsca": (["doctor", "nats://PLACE", "--tlsca", "CHAIN"], {}, {}),
    "NATS_CA": (["doctor", "nats://PLACE"], {"NATS_CA": "CHAIN"}, {}),
    "--tlscert": (["doctor", "nats://PLACE", "--tlscert", "CHAIN", "--tlskey", "CHAIN"], {}, {}),
    "NATS_CERT": (["doctor", "nats://PLACE"], {"NATS_CERT": "CHAIN", "NATS_KEY": "CHAIN"}, {}),
    "--tlsfirst": (["doctor", "nats://PLACE", "--tlsfirst"], {}, {}),
    "context's URL": (["doctor", "--context", "c"], {}, {"url": "tls://PLACE"}),
    "context's ca": (["doctor", "--context", "c"], {}, {"url": "nats://PLACE", "ca": "CHAIN"}),
    "context's cert": (["doctor", "--context", "c"], {}, {"url": "nats://PLACE", "cert": "CHAIN", "key": "CHAIN"}),
    "context's tls_first": (["doctor", "--context", "c"], {}, {"url": "nats://PLACE", "tls_first": True}),
    "NATS_CONTEXT": (["snapshot", "B"], {"NATS_CONTEXT": "c"}, {"url": "tls://PLACE"}),
    "selected context": (["doctor"], {}, {"url": "tls://PLACE"}),
}


@needs_openssl
def test_command_line_tells_a_server_without_tls_nothing(tmp_path: Path, chain: Path) -> None:
    told = []
    for number, (way, (arguments, environment, context)) in enumerate(WAYS_OF_THE_COMMAND_LINE.items()):
        with FakeNatsServer(on_connect=refuse) as server:

            def filled(text: str, place: str = server.place) -> str:
                return text.replace("PLACE", place).replace("CHAIN", str(chain))

            home = tmp_path / str(number)
            folder = home / "nats" / "context"
            folder.mkdir(parents=True)
            (folder / "c.json").write_text(filled(json.dumps(context)))
            (home / "nats" / "context.txt").write_text("c" if way == "selected context" else "")
            done = run_cli(
                *map(filled, arguments),
                *("--user", "u", "--password", PASSWORD, "--timeout", "10s"),
                home=home,
                environment={name: filled(value) for name, value in environment.items()},
            )
            if done.status != 1 or not nothing_was_told(server):
                told.append(f"{way}: status {done.status}: {done.output}")
    assert not told, "\n".join(told)


WAYS_OF_SPARK = {
    "scheme": {"servers": "tls://PLACE"},
    "upper case": {"servers": "TLS://PLACE"},
    "another server's scheme": {"servers": "nats://PLACE,tls://127.0.0.1:1"},
    "tlsCa": {"servers": "nats://PLACE", "tlsCa": "CHAIN"},
    "tlsCert": {"servers": "nats://PLACE", "tlsCert": "CHAIN", "tlsKey": "CHAIN"},
}


@needs_openssl
def test_spark_tells_a_server_without_tls_nothing(monkeypatch: pytest.MonkeyPatch, chain: Path) -> None:
    pytest.importorskip("pyspark")
    from jetstream_ext.spark.connection import ConnectError, Connections
    from jetstream_ext.spark.options import ReadOptions

    monkeypatch.setenv("SAFETY_NET_PASSWORD", PASSWORD)
    secret = {"user": "u", "passwordEnv": "SAFETY_NET_PASSWORD"}
    for way, options in WAYS_OF_SPARK.items():
        connections = Connections()
        with FakeNatsServer(on_connect=refuse) as server:
            given = {
                name: text.replace("PLACE", server.place).replace("CHAIN", str(chain)) for name, text in options.items()
            }
            read = ReadOptions.parse({"stream": "S", "requestTimeout": "10"} | given | secret)
            with (
                pytest.raises(ConnectError, match=r"TLS was requested|127\.0\.0\.1:1"),
                connections.lend(read.connection, "x"),
            ):
                pass
            assert nothing_was_told(server), way
        connections.close()


def seed_file(folder: Path) -> Path:
    path = folder / "user.nk"
    path.write_bytes(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER))
    return path


def test_no_kind_of_credentials_is_told_to_a_server_without_tls(tmp_path: Path) -> None:
    seed = seed_file(tmp_path)
    creds = tmp_path / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{PASSWORD}\n------END NATS USER JWT------\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.read_text()}\n------END USER NKEY SEED------\n"
    )
    kinds: list[list[object]] = [
        ["--user", "u", "--password", PASSWORD],
        ["--token", PASSWORD],
        ["--nkey", seed],
        ["--creds", creds],
        [],  # in the URL
    ]
    for options in kinds:
        user = "" if options else f"u:{PASSWORD}@"
        with FakeNatsServer(info=lambda n: {"nonce": "n", "auth_required": True}, on_connect=refuse) as server:
            plain = run_cli("doctor", f"nats://{user}{server.place}", *options, "--timeout", "10s", home=tmp_path)
            # The user did not ask for TLS.
            assert (plain.status, nothing_was_told(server)) == (1, False), options
            server.clear.clear()
            done = run_cli("doctor", f"tls://{user}{server.place}", *options, "--timeout", "10s", home=tmp_path)
            assert (done.status, nothing_was_told(server)) == (1, True), options
            assert "TLS was requested; nothing was sent" in done.output


@needs_openssl
@pytest.mark.parametrize("why", ["unknown authority", "another host"])
def test_a_certificate_that_does_not_prove_the_server_keeps_the_credentials(
    tmp_path: Path, chain: Path, why: str
) -> None:
    told: list[bool] = []

    def on_connect() -> None:
        told.append(True)

    theirs = chain
    if why == "another host":
        theirs = certificate(tmp_path, name="DNS:other.example")
    trust = ["--tlsca", theirs] if why == "another host" else []
    with FakeNatsServer(info=lambda n: {"tls_required": True}, on_connect=on_connect, chain=theirs) as server:
        done = run_cli(*("doctor", f"tls://u:{PASSWORD}@{server.place}", *trust, "--timeout", "10s"), home=tmp_path)
        assert (done.status, told, nothing_was_told(server)) == (1, [], True)
        assert "CERTIFICATE_VERIFY_FAILED" in done.output


@needs_openssl
async def test_a_discovered_server_must_have_a_certificate_for_the_host_that_the_user_named(
    tmp_path: Path, chain: Path
) -> None:
    """INFO comes before TLS: an attacker on the network can name a server, for which they have a valid certificate."""
    theirs = certificate(tmp_path, name="DNS:localhost")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(chain.read_bytes() + theirs.read_bytes())
    told: list[bool] = []
    tried = asyncio.Event()
    loop = asyncio.get_running_loop()

    def info_of_attacker(number: int) -> dict[str, bool]:
        if number:
            loop.call_soon_threadsafe(tried.set)  # the client has come back, so its first attempt has ended
        return {"tls_required": True}

    with (
        FakeNatsServer(info=info_of_attacker, on_connect=lambda: told.append(True), chain=theirs) as attacker,
        FakeNatsServer(
            info=lambda n: {"tls_required": True, "connect_urls": [attacker.place.replace("127.0.0.1", "localhost")]},
            chain=chain,
        ) as server,
    ):
        client = OwnClient()
        context = tls_context(trusted, None, None)
        await client.open(
            [server.url], shown="h", timeout=30, user="u", password=PASSWORD, tls=context, dont_randomize=True
        )
        server.close()
        async with asyncio.timeout(60):
            await tried.wait()
        await client.close_quickly()
    assert told == []
    assert nothing_was_told(attacker)
