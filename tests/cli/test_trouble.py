"""Every failure is one line and exit status 1; doctor reports what a server and its streams lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nkeys
import pytest
from cli_tools import Json, Run, assert_fails, lacking, run_fix, with_js
from nats.js.api import StreamSource

from jetstream_ext.testing import NatsServer, ReferenceServer
from jetstream_ext.testing.reference import Faults, Ignore, Unavailable


def commands(folder: Path, rows: Path) -> list[list[object]]:
    """Return every command that connects."""
    return [
        ["doctor"],
        ["enable", "S", "--direct"],
        ["enable-bucket", "B"],
        ["snapshot", "B"],
        ["group", "list"],
        ["group", "status", "S", "g"],
        ["group", "reset", "S", "g"],
        ["dlq", "list", "S", "s"],
        ["dlq", "show", "S", "s", 1],
        ["dlq", "redrive", "S", "s"],
        ["dlq", "drop", "S", 1],
        ["export", "S", folder / "x.csv"],
        ["ingest", rows, "--stream", "S", "--subject", "s"],
        ["ingest", rows, "--stream", "S", "--subject", "s", "--create", "s"],
    ]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("a\n1\n")
    return path


def test_a_wrong_url_and_a_stopped_server_are_reported(run: Run, tmp_path: Path, rows: Path) -> None:
    for url, words in {
        "nats://127.0.0.1:1": "no connection to nats://127.0.0.1:1",
        "nats://no-such-host.invalid:4222": "no connection to nats://no-such-host.invalid:4222",
        "http://127.0.0.1:4222": "its scheme must be nats, tls, ws or wss",
        "nats://127.0.0.1:port": "it needs a host, and a port",
        "nats://": "it needs a host",
    }.items():
        for arguments in commands(tmp_path, rows):
            assert_fails(run(*arguments, url=url), "Error: ", words)


def test_a_server_without_jetstream_is_reported(run: Run, tmp_path: Path, rows: Path) -> None:
    with NatsServer(jetstream=False) as bare:
        for arguments in commands(tmp_path, rows):  # none of them tries again until its timeout
            assert_fails(run(*arguments, "--timeout", "900s", url=bare.url), "the server runs without JetStream")


def test_an_account_without_jetstream_is_reported(run: Run, tmp_path: Path, rows: Path) -> None:
    accounts = """
        accounts { A { users = [{user: a, password: a-word}] }, B { jetstream: enabled, users = [{user: b, password: b}] } }
    """
    with NatsServer(config=accounts) as server:
        for arguments in commands(tmp_path, rows):
            done = run(*arguments, "--user", "a", "--password", "a-word", url=server.url)
            assert_fails(done, "JetStream is not enabled for this account")


def test_a_stream_without_a_leader_is_waited_for(run: Run, ok: Json) -> None:
    election = Faults(
        Unavailable("$JS.API.STREAM.INFO.S", nth=2, times=3), Ignore("$JS.API.STREAM.INFO.KV_groups", times=1)
    )
    with ReferenceServer(faults=election) as server:
        with_js(server.url, lambda js: js.add_stream(name="S", subjects=["s"], allow_direct=True))
        assert ok("dlq", "list", "S", "s", url=server.url)["letters"] == []
        done = run("group", "status", "S", "g", url=server.url)
        assert "bucket 'groups' does not exist" in done.stderr


SINCE_2_14 = {"end-of-batch marker", "fast ingest", "consumer reset", "durable sourcing"}
SINCE_2_11 = {"batched direct get", "message TTL", "delete markers"}
SINCE_2_12 = {"atomic batch", "counter stream", "scheduled messages"}


@pytest.mark.parametrize(
    ("version", "level", "missing", "fix"),
    [
        ("2.10.26", 0, SINCE_2_11 | SINCE_2_12 | SINCE_2_14, "--direct"),
        ("2.12.8", 3, SINCE_2_14, "--direct --atomic --ttl"),
        ("2.15.1", 5, set(), "--direct --atomic --batched --ttl"),
    ],
)
def test_doctor_reports_the_features_of_every_release_line(
    run: Run, ok: Json, version: str, level: int, missing: set[str], fix: str
) -> None:
    with NatsServer(version=version) as server:
        with_js(server.url, lambda js: js.add_stream(name="S", subjects=["s.>"]))
        found = ok("doctor", server.url)
        assert (found["server_version"], found["api_level"]) == (version, level)
        assert set(found["missing"]) == missing
        assert missing.isdisjoint(found["works"])
        shown = run("doctor", server.url)
        assert shown.exit_code == 0
        assert f"nats-server {version}, JetStream API level {level}" in shown.stdout
        assert shown.stdout.count("needs 2.") == len(missing)
        everything = ("--need", "direct,atomic", "--need", "batched,ttl")
        [stream] = lacking(run, *everything, url=server.url)
        assert len(stream["lacks"]) == 4
        assert stream["fix"] == f"jetstream-ext enable S {fix}"
        run_fix(run, stream["fix"], url=server.url)
        [stream] = lacking(run, *everything, url=server.url)
        too_new = [f"{option}: it needs nats-server" for option in stream["lacks"]]
        assert (stream["fix"], [reason[:-5] for reason in stream["never"]]) == ("", too_new)
        assert len(too_new) == 4 - fix.count("--")


def test_doctor_reports_a_mirror_of_a_missing_stream(
    server: NatsServer, run: Run, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    with_js(server.url, lambda js: js.add_stream(name=name, mirror=StreamSource(name=f"{name}-origin")))
    shown = run("doctor", "--stream", name).stdout
    assert f"  {name}-origin: stream missing: stream '{name}-origin' does not exist" in shown


def test_invalid_files_and_names_are_reported(run: Run, tmp_path: Path, rows: Path) -> None:
    broken = tmp_path / "broken"
    jwt = "-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n"
    for text, option, words in (
        ("", "--nkey", "no nkey seed"),
        ("SUBAD", "--nkey", "no nkey seed"),
        ("x", "--creds", "no user JWT"),
        (jwt, "--creds", "no nkey seed"),
        (f"{jwt}-----BEGIN USER NKEY SEED-----\nSUBAD\n", "--creds", "no nkey seed"),
        ("x", "--tlsca", "the TLS files are not valid"),
    ):
        broken.write_text(text)
        assert_fails(run("doctor", option, broken), words)
    (tmp_path / "rows.parquet").write_text("x")
    for arguments, words in (
        (["ingest", tmp_path / "rows.parquet", "--stream", "S", "--subject", "s"], "is not a valid Parquet file"),
        (["doctor", "--stream", "a.b"], "stream name 'a.b'"),
        (["export", "a b", tmp_path / "x.csv"], "stream name 'a b'"),
        (["ingest", rows, "--stream", "*", "--subject", "s"], "stream name '*'"),
        (["export", "NONE", tmp_path / "x.csv"], "stream 'NONE' does not exist"),
        (["doctor", "--stream", "NONE"], "stream 'NONE' does not exist"),
        (["snapshot", "NONE"], "Error: bucket 'NONE' does not exist"),
        (["snapshot", "a b"], "bucket name 'a b' is"),
    ):
        assert_fails(run(*arguments), words)


def test_a_valid_nkey_is_accepted(ok: Json, tmp_path: Path) -> None:
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    file = tmp_path / "user.nk"
    file.write_bytes(seed + b"\n")
    with NatsServer(config=f"authorization {{ users = [{{ nkey: {public} }}] }}") as guarded:
        assert ok("doctor", guarded.url, "--nkey", file)["streams"] == []
