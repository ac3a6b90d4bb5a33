"""enable and enable-bucket turn on what a stream or a bucket lacks, all or nothing, and say what was on already."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_tools import Json, Run, assert_fails, assert_usage, with_js
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource

from jetstream_ext.testing import NatsServer, ReferenceServer


def config_of(server: NatsServer | ReferenceServer, stream: str) -> StreamConfig:
    return with_js(server.url, lambda js: js.stream_info(stream)).config


def test_enable_turns_on_what_a_stream_lacks_and_can_be_repeated(
    server: NatsServer, run: Run, ok: Json, stream_name: Callable[[], str]
) -> None:
    stream = stream_name()
    with_js(server.url, lambda js: js.add_stream(name=stream, subjects=[stream], max_msgs=7, allow_direct=True))
    arguments = ("enable", stream, "--direct", "--atomic", "--batched")
    assert ok(*arguments) == {
        "stream": stream,
        "enabled": ["allow_atomic", "allow_batched"],
        "already": ["allow_direct"],
    }
    before = config_of(server, stream)
    assert (before.allow_atomic, before.allow_batched, before.allow_msg_ttl, before.max_msgs) == (True, True, False, 7)
    assert run(*arguments).stdout == f"stream {stream}: allow_direct, allow_atomic, allow_batched were on already\n"
    assert run("enable", stream, "--ttl", "--direct").stdout == (
        f"stream {stream}: enabled allow_msg_ttl; allow_direct was on already\n"
    )
    assert config_of(server, stream) == before.evolve(allow_msg_ttl=True, metadata=config_of(server, stream).metadata)


def test_enable_bucket_turns_on_what_a_bucket_lacks_and_can_be_repeated(
    server: NatsServer, run: Run, ok: Json, stream_name: Callable[[], str]
) -> None:
    bucket = stream_name()
    with_js(server.url, lambda js: js.create_key_value(bucket=bucket))
    first = run("enable-bucket", bucket).stdout
    assert first == f"bucket {bucket}: enabled allow_direct, allow_atomic; recorded since when its limits hold\n"
    assert run("enable-bucket", bucket).stdout == f"bucket {bucket}: allow_direct, allow_atomic were on already\n"
    markers = f"_spark.KV_{bucket}.>"
    found = ok("enable-bucket", bucket, "--ttl", "--spark", "--marker-ttl", "1m")
    assert found == {
        "bucket": bucket,
        "stream": f"KV_{bucket}",
        "enabled": [f"subject {markers}", "subject_delete_marker_ttl"],
        "already": ["allow_msg_ttl", "allow_atomic"],
    }
    config = config_of(server, f"KV_{bucket}")
    assert config.subject_delete_marker_ttl == 60
    assert config.subjects == [f"$KV.{bucket}.>", f"_reads.KV_{bucket}", markers]
    assert ok("enable-bucket", bucket, "--spark", "--marker-ttl", "60s")["enabled"] == []


def test_what_a_stream_cannot_have_is_refused_and_nothing_is_changed(
    server: NatsServer, run: Run, stream_name: Callable[[], str]
) -> None:
    cells: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({"mirror": StreamSource(name="none")}, "--batched", "cannot have allow_batched: it is a mirror"),
        ({"sealed": True}, "--ttl", "cannot have allow_msg_ttl: it is sealed, so it takes no messages"),
        ({"allow_msg_counter": True}, "--ttl", "cannot have allow_msg_ttl: it holds counters"),
        ({"persist_mode": "async"}, "--atomic", "cannot have allow_atomic: it persists asynchronously"),
    )
    for config, option, words in cells:
        stream = stream_name()

        async def create(js: JetStreamContext, stream: str = stream, config: dict[str, Any] = config) -> None:
            await js.add_stream(name=stream, **{name: value for name, value in config.items() if name != "sealed"})
            if "sealed" in config:
                await js.update_stream((await js.stream_info(stream)).config.evolve(sealed=True))

        with_js(server.url, create)
        done = run("enable", stream, "--direct", option)
        assert_fails(done, f"Error: stream '{stream}' {words}; nothing was changed\n")
        assert not config_of(server, stream).allow_direct, words
        assert run("enable", stream, "--direct").exit_code == 0
        assert config_of(server, stream).allow_direct, words


def test_the_command_that_an_error_names_goes_to_the_server_that_was_named_without_credentials(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.csv").write_text("a\n1\n")

    async def create(js: JetStreamContext) -> None:
        for name in "RPID":
            await js.add_stream(name=name, subjects=[name])
            await js.publish(name)
        await js.create_key_value(bucket="B")

    with NatsServer(config="authorization { token: a-token }") as named:
        url = named.url.replace("nats://", "nats://a-token@")
        with_js(url, create)
        for command, fix in {
            ("export", "R", "rows.csv"): "enable R --direct",
            ("export", "P", "rows.parquet"): "enable P --direct",
            ("ingest", "given.csv", "--stream", "I", "--subject", "I"): "enable I --batched --direct",
            ("ingest", "given.csv", "--stream", "D", "--subject", "D", "--dry-run"): "enable D --batched --direct",
            ("snapshot", "B"): "enable-bucket B --direct",
        }.items():
            printed = f"jetstream-ext {fix} --server {named.url} --js-api-prefix '$JS.API'"
            done = run(*command, "--server", url, "--js-api-prefix", "$JS.API", url=None)
            assert_fails(done, f"'{printed}'")
            assert "a-token" not in done.output
            assert "the stream does not exist" not in done.stderr
            assert run(*shlex.split(printed)[1:], "--token", "a-token", url=None).exit_code == 0
            assert run(*command, "--server", url, url=None).exit_code == 0, command


def test_an_old_server_refuses_all_of_the_options(run: Run, tmp_path: Path) -> None:
    with ReferenceServer(dialect="2.12") as old:

        async def create(js: JetStreamContext) -> None:
            await js.add_stream(name="S", subjects=["s"])
            await js.create_key_value(bucket="B")

        with_js(old.url, create)
        done = run("enable", "S", "--direct", "--batched", "--atomic", url=old.url)
        assert_fails(done, "fast ingest needs nats-server 2.14", "nothing was changed")
        assert not config_of(old, "S").allow_atomic
        rows = tmp_path / "rows.csv"
        rows.write_text("a\n1\n")
        for option in ([], ["--create", "s"]):
            done = run("ingest", rows, "--stream", "S", "--subject", "s", *option, url=old.url)
            assert_fails(done, "fast ingest needs nats-server 2.14")
            assert "jetstream-ext enable" not in done.stderr
    with ReferenceServer(dialect="2.11") as old:
        with_js(old.url, create)
        assert_fails(run("enable-bucket", "B", url=old.url), "atomic batch needs nats-server 2.12")
        assert not config_of(old, "KV_B").allow_direct


def test_wrong_usage_and_what_does_not_exist_are_reported(run: Run) -> None:
    assert_usage(run("enable", "S"), "name what to enable: --direct, --atomic, --batched, --ttl")
    for wrong in ("soon", "500ms", "1.5s"):
        assert run("enable-bucket", "B", "--marker-ttl", wrong).exit_code == 2
    for arguments, words in (
        (("enable", "NONE", "--direct"), "stream 'NONE' does not exist"),
        (("enable-bucket", "NONE"), "bucket 'NONE' does not exist"),
        (("enable", "a.b", "--direct"), "stream name 'a.b'"),
        (("enable-bucket", "a.b"), "bucket name 'a.b'"),
    ):
        assert_fails(run(*arguments), words)
