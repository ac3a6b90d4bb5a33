"""group list, status and reset."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.log import Group, exactly_once_group
from jetstream_ext.testing import NatsServer


@pytest.fixture
def names(server: NatsServer, stream_name: Callable[[], str]) -> tuple[str, str]:
    """The names of a stream with ten messages, and of a bucket."""
    stream, bucket = stream_name(), stream_name()

    async def create(js: JetStreamContext) -> None:
        options: dict[str, Any] = {"allow_direct": True, "allow_atomic": True}
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], **options)
        for number in range(10):
            await js.publish(f"{stream}.{number % 5}", b"%d" % number)

    with_js(server.url, create)
    return stream, bucket


def work(
    url: str, stream: str, bucket: str, handled: int, *, then: Callable[[], Any] = lambda: None, **options: Any
) -> Any:
    """Handle some messages as a member; return what `then` returns while it is alive."""

    async def join(js: JetStreamContext) -> Any:
        group = Group(js, stream, "g", bucket=bucket, **{"partitions": 2, "key": [1], "poll": 0.05, **options})
        async with group.join(label="oslo") as member, asyncio.timeout(60):
            for _ in range(handled):
                await anext(member)
            await member.commit()
            return await asyncio.to_thread(then)

    return with_js(url, join)


def test_list_and_status(server: NatsServer, run: Run, ok: Json, names: tuple[str, str]) -> None:
    stream, bucket = names

    def look() -> Any:
        shown = run("group", "status", stream, "g", "--bucket", bucket).stdout
        return ok("group", "status", stream, "g", "--bucket", bucket), shown

    now, shown = work(server.url, stream, bucket, 10, then=look)
    [member] = now["members"]
    assert (member["label"], member["partitions"], member["leaving"]) == ("oslo", [0, 1], False)
    assert [each["owner"] for each in now["partitions"]] == [member["id"]] * 2
    assert f"group g of stream {stream}, whose last sequence is 10" in shown
    assert member["id"] in shown
    assert ok("group", "list", "--bucket", bucket)["groups"] == [{"stream": stream, "group": "g"}]
    listed = run("group", "list", "--bucket", bucket).stdout
    assert stream in listed
    assert "1 group\n" in listed
    later = ok("group", "status", stream, "g", "--bucket", bucket)
    assert later["members"] == []
    assert later["partitions"] == [{"partition": n, "owner": None, "position": 11, "lag": 0} for n in range(2)]
    assert "No member is alive." in run("group", "status", stream, "g", "--bucket", bucket).stdout


def test_members_with_one_label_are_told_apart(server: NatsServer, run: Run, names: tuple[str, str]) -> None:
    stream, bucket = names

    async def join(js: JetStreamContext) -> None:
        group = Group(js, stream, "g", partitions=2, bucket=bucket, heartbeat=0.5)
        async with group.join(label="same") as one, group.join(label="same") as other, asyncio.timeout(60):
            while not (one.partitions and other.partitions):
                await asyncio.sleep(0.01)
            while True:  # the key of a member that had no time to renew it is missing for a moment
                shown = await asyncio.to_thread(run, "group", "status", stream, "g", "--bucket", bucket)
                if all(f"same {member.id}" in shown.stdout for member in (one, other)):
                    return

    with_js(server.url, join)


def test_no_escape_sequence_of_a_foreign_member_reaches_the_terminal(
    server: NatsServer, run: Run, names: tuple[str, str]
) -> None:
    stream, bucket = names
    work(server.url, stream, bucket, 1)

    async def write(js: JetStreamContext) -> None:
        record = {"v": 1, "label": "\x1b[31mred", "leaving": False, "seconds": 60}
        await (await js.key_value(bucket)).put(f"{stream}.g.members.foreign", json.dumps(record).encode())

    with_js(server.url, write)
    shown = run("group", "status", stream, "g", "--bucket", bucket).output
    assert "\x1b" not in shown
    assert r"\x1b[31mred" in shown


def test_reset_keeps_the_settings_that_are_not_given(
    server: NatsServer, run: Run, ok: Json, names: tuple[str, str]
) -> None:
    stream, bucket = names
    work(server.url, stream, bucket, 10)
    where = [stream, "g", "--bucket", bucket]
    assert ok("group", "reset", *where) == {"stream": stream, "group": "g", "start": 11, "partitions": 2}
    assert ok("group", "reset", *where, "--partitions", 3, "--start", "4")["partitions"] == 3
    assert [each["position"] for each in ok("group", "status", *where)["partitions"]] == [4, 4, 4]
    work(server.url, stream, bucket, 7, partitions=3)
    done = run("group", "reset", *where, "--key", "0,1", "--start", "first")
    assert done.stdout == f"group g of stream {stream} starts at sequence 1, with 3 partitions\n"
    work(server.url, stream, bucket, 10, partitions=3, key=[0, 1])
    for start, seq in (("last", 10), ("new", 11), ("2020-01-01T00:00:00Z", 1)):
        assert ok("group", "reset", *where, "--key", "all", "--start", start)["start"] == seq
    work(server.url, stream, bucket, 10, partitions=3, key=None)
    done = run("group", "reset", *where, "--start", "2020-01-01 00:00 UTC")
    assert "starts at sequence 1 (messages from 2020-01-01 00:00:00 UTC on), with 3 partitions" in done.stdout


def test_reset_is_refused_while_a_member_is_alive(server: NatsServer, run: Run, names: tuple[str, str]) -> None:
    stream, bucket = names
    done = work(server.url, stream, bucket, 1, then=lambda: run("group", "reset", stream, "g", "--bucket", bucket))
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "has members that are alive: oslo; nothing was changed" in done.stderr


def test_reset_of_an_exactly_once_group_needs_a_start(
    server: NatsServer, run: Run, ok: Json, names: tuple[str, str]
) -> None:
    stream, bucket = names
    output = f"{stream}-OUT"

    async def process(js: JetStreamContext) -> None:
        await js.add_stream(name=output, subjects=[f"{output}.>"], allow_direct=True, allow_atomic=True)
        group = Group(js, stream, "g", partitions=2, key=[1], bucket=bucket, poll=0.05)
        seen: list[int] = []
        done = asyncio.Event()

        def handle(message: jsx.StoredMsg) -> None:
            seen.append(message.seq)
            if len(seen) == 10:
                done.set()

        running = asyncio.ensure_future(exactly_once_group(group, output, handle, prefix=f"{output}.at"))
        async with asyncio.timeout(60):
            await done.wait()
        running.cancel()
        await asyncio.wait([running])

    with_js(server.url, process)
    where = [stream, "g", "--bucket", bucket]
    done = run("group", "reset", *where)
    assert (done.exit_code, done.stderr.count("\n"), "give --start" in done.stderr) == (1, 1, True)
    assert ok("group", "reset", *where, "--start", "11")["start"] == 11
    assert [each["position"] for each in ok("group", "status", *where)["partitions"]] == [11, 11]


def test_wrong_names_and_values_are_reported(run: Run) -> None:
    for arguments, status, words in (
        (["list", "--bucket", "NONE"], 1, "bucket 'NONE' does not exist"),
        (["status", "S", "g", "--bucket", "NONE"], 1, "bucket 'NONE' does not exist"),
        (["reset", "S", "g", "--bucket", "NONE"], 1, "bucket 'NONE' does not exist"),
        (["list", "--bucket", "a b"], 1, "bucket name 'a b'"),
        (["status", "a.b", "g"], 1, "stream name 'a.b'"),
        (["reset", "S", "*"], 1, "group name '*'"),
        (
            ["reset", "S", "g", "--start", "tomorrow"],
            2,
            "'tomorrow' is not first, last, new, a sequence from 1, or a time",
        ),
        (
            ["reset", "S", "g", "--start", "next week"],
            2,
            "is not first, last, new, a sequence from 1, or a time such as",
        ),
        (["reset", "S", "g", "--start", "0"], 2, "'0' is not first"),
        (["reset", "S", "g", "--key", "1,x"], 2, "'1,x' is neither"),
        (["reset", "S", "g", "--partitions", "0"], 2, "0 is not in the range"),
    ):
        done = run("group", *arguments)
        assert (done.exit_code, words in done.stderr) == (status, True), (arguments, done.output)


def test_a_group_that_does_not_exist_is_reported(server: NatsServer, run: Run, names: tuple[str, str]) -> None:
    stream, bucket = names
    work(server.url, stream, bucket, 1)
    for what in ("status", "reset"):
        done = run("group", what, stream, "other", "--bucket", bucket)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
        assert done.stderr == f"Error: bucket '{bucket}' has no group 'other' of stream '{stream}'\n"


def test_a_stream_that_was_deleted_is_reported(server: NatsServer, run: Run, names: tuple[str, str]) -> None:
    stream, bucket = names
    work(server.url, stream, bucket, 1)
    with_js(server.url, lambda js: js.delete_stream(stream))
    done = run("group", "status", stream, "g", "--bucket", bucket)
    assert (done.exit_code, done.stderr) == (1, f"Error: stream '{stream}' does not exist\n")
