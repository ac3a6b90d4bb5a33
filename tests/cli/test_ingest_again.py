"""ingest stores each row once, however often the command runs."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cli_tools import Run, assert_fails, assert_usage, payloads, with_js
from click.testing import Result
from nats.js import JetStreamContext
from nats.js.api import StreamSource
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
from jetstream_ext.errors import IngestError
from jetstream_ext.testing import NatsServer

Messages = Iterable[jsx.BatchMessage]
Sending = Callable[..., AbstractContextManager[None]]
WINDOW = 0.1  # seconds, the shortest that servers take: afterwards they know no id


class Stream:
    """A stream whose server soon forgets message ids, and a CSV file for it."""

    def __init__(self, url: str, name: str, path: Path, run: Run) -> None:
        self.name = name
        self.path = path
        self._url = url
        self._run = run
        self._sent_at = -WINDOW
        self.options: dict[str, object] = {"--subject": f"{name}.{{to}}", "--data-from": "n"}

    @property
    def how(self) -> list[object]:
        options = [part for option in self.options.items() for part in option]
        return ["ingest", self.path, "--stream", self.name, *options]

    def js(self, call: Callable[[JetStreamContext], Any]) -> Any:
        return with_js(self._url, call)

    def create(self, **options: Any) -> None:
        config = {
            "subjects": [f"{self.name}.>"],
            "allow_direct": True,
            "allow_batched": True,
            "duplicate_window": WINDOW,
        }
        self.js(lambda js: jsx.ensure_stream(js, name=self.name, **(config | options)))

    def write(self, *rows: object) -> None:
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([("to", "n"), *(("a", row) for row in rows)])

    def run(self, *options: object) -> Result:
        """Run the command when the server has forgotten all ids."""
        time.sleep(max(0.0, self._sent_at + 1.2 * WINDOW - time.monotonic()))
        done = self._run(*self.how, *options)
        self._sent_at = time.monotonic()
        return done

    def ingest(self, *options: object) -> tuple[int, int]:
        """Return how many rows were stored before, and sent."""
        done = self.run("--json", *options)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        return found["already_stored"], found["sent"]

    def refused(self, *options: object) -> str:
        done = self.run(*options)
        assert_fails(done)
        return str(done.stderr)

    @property
    def rows(self) -> list[str]:
        return [payload.decode() for payload in payloads(self._url, self.name)]


@pytest.fixture
def make(server: NatsServer, stream_name: Callable[[], str], tmp_path: Path, run: Run) -> Callable[..., Stream]:
    """Create one more stream, with a file of its own."""

    def make(**options: Any) -> Stream:
        name = stream_name()
        stream = Stream(server.url, name, tmp_path / f"{name}.csv", run)
        stream.create(**options)
        return stream

    return make


@pytest.fixture
def stream(server: NatsServer, stream_name: Callable[[], str], tmp_path: Path, run: Run) -> Stream:
    """A stream that is not created yet."""
    return Stream(server.url, stream_name(), tmp_path / "rows.csv", run)


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> Sending:
    """Let the command call another function instead of `jetstream_ext.ingest`, for the duration of a block."""

    @contextmanager
    def sending(function: Callable[..., Awaitable[jsx.IngestReport]]) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr("jetstream_ext.cli.ingest.ingest", function)
            yield

    return sending


def numbers(*ranges: range) -> list[str]:
    return [str(n) for some in ranges for n in some]


def sends_the_rest(said: str) -> tuple[str, ...]:
    """Return the options that a message names for the command that sends the rest."""
    found = re.search(r"the (?:same )?command with (.*?) (?:then )?sends the rest", said)
    assert found is not None, said
    return tuple(found[1].split())


def test_the_same_command_minutes_later_stores_nothing_again(stream: Stream) -> None:
    stream.create()
    stream.write(*range(300), 7, 7)
    assert stream.ingest() == (0, 302)
    assert stream.ingest() == (302, 0)
    assert stream.ingest("--resume") == (302, 0)
    assert f"302 rows of {stream.path} are in {stream.name}: 302 already stored, 0 sent" in stream.run().stdout
    assert stream.rows == [*numbers(range(300)), "7", "7"]


def test_again_stores_all_rows_again_and_later_runs_still_know_them(stream: Stream) -> None:
    stream.create(duplicate_window=120.0)
    stream.write(*range(3))
    assert stream.ingest() == (0, 3)
    assert stream.ingest("--again") == (0, 3)
    assert stream.ingest() == (3, 0)
    assert stream.rows == [*numbers(range(3)), *numbers(range(3))]


def test_rows_are_stored_after_a_purge_although_the_server_remembers_their_ids(stream: Stream) -> None:
    stream.create(duplicate_window=120)
    stream.write(*range(50))
    stream.ingest()
    stream.js(lambda js: js.purge_stream(stream.name))
    assert stream.ingest() == (0, 50)
    stream.js(lambda js: js.purge_stream(stream.name, keep=20))
    stream.write(*range(50), "new")
    assert stream.ingest("--resume") == (50, 1)
    assert stream.rows == [*numbers(range(30, 50)), "new"]
    assert stream.ingest("--again") == (0, 51)


def test_two_runs_at_the_same_time_store_each_row_once(make: Callable[..., Stream], sending: Sending) -> None:
    async def remove_one(js: JetStreamContext) -> None:
        await js.publish(f"{stream.name}.other", b"x")
        await js.delete_msg(stream.name, 1)

    async def other_run_first(js: JetStreamContext, messages: Messages, **options: Any) -> jsx.IngestReport:
        with sending(jsx.ingest):
            assert await asyncio.to_thread(stream.ingest) == (0, 20)
        return await jsx.ingest(js, messages, **options)

    for removed in (False, True):
        stream = make(duplicate_window=120)
        if removed:
            stream.js(remove_one)
        stream.write(*range(20))
        with sending(other_run_first):
            assert stream.ingest() == (0, 20)
        assert stream.rows == numbers(range(20)), removed


def test_skipped_rows_are_not_taken_as_stored(stream: Stream) -> None:
    stream.create()
    stream.write(*range(100))
    assert stream.ingest("--skip", 40) == (0, 60)
    assert stream.ingest("--skip", 30) == (60, 10)
    assert stream.ingest("--skip", 30, "--resume") == (70, 0)
    assert stream.ingest() == (70, 30)
    assert stream.ingest("--skip", 100) == (0, 0)
    assert stream.ingest() == (100, 0)
    assert stream.rows == numbers(range(40, 100), range(30, 40), range(30))
    for more in (101, 2**63 - 1):
        assert f"{stream.path} has only 100 rows; --skip {more} is more" in stream.refused("--skip", more)


# -- errors and interruptions ------------------------------------------------------------------------------------------


def test_after_a_bad_row_the_corrected_file_continues_with_resume(stream: Stream) -> None:
    stream.create(max_msg_size=250)
    stream.write(*range(50), "x" * 300, *range(50, 80))
    said = stream.refused()
    assert said == (
        f"Error: row 51 of {stream.path}: the server says: message size exceeds maximum allowed; the 50 rows before it are "
        "stored; correct the row or the options; the command with --resume then sends the rest\n"
    )
    assert stream.refused() == said
    stream.write(*range(50), "short", *range(50, 80))
    assert "50 of its 81 rows are stored; --resume sends the other 31" in stream.refused()
    assert stream.ingest("--resume") == (50, 31)
    assert stream.rows == [*numbers(range(50)), "short", *numbers(range(50, 80))]
    # The number of a row is that in the file, whichever rows are sent.
    stream.write("first", *range(50), "short", *range(50, 80), "x" * 300)
    said = stream.refused("--resume")
    assert f"row 83 of {stream.path}" in said
    assert "the 82 rows before it are stored" in said


def test_again_goes_on_after_ctrl_c_with_the_options_that_are_printed(stream: Stream, sending: Sending) -> None:
    stream.create()
    stream.write(*range(3_000))

    async def stopped(js: JetStreamContext, messages: Messages, **options: Any) -> jsx.IngestReport:
        def until_ctrl_c() -> Iterator[jsx.BatchMessage]:
            for number, message in enumerate(messages):
                if number == 20:
                    signal.raise_signal(signal.SIGINT)
                yield message

        return await jsx.ingest(js, until_ctrl_c(), **options)

    with sending(stopped):
        done = stream.run("--again", "--skip", 10)
    assert (done.exit_code, done.stdout) == (130, "")
    assert "stopping after the messages in flight; press Ctrl-C again to stop at once" in done.stderr
    stored = len(stream.rows)
    assert f"stopped: this run has stored exactly {stored:,} rows of {stream.path} in {stream.name}; " in done.stderr
    assert stream.ingest("--again", "--skip", 10, *sends_the_rest(done.stderr)) == (0, 2_990 - stored)
    assert stream.rows == numbers(range(10, 3_000))


def test_again_goes_on_after_an_outage_with_the_options_that_the_error_names(stream: Stream, sending: Sending) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()

    async def lost(js: JetStreamContext, messages: Messages, **_: Any) -> jsx.IngestReport:
        await jsx.ingest(js, list(islice(messages, 4)))
        raise IngestError("no server", index=4, in_doubt=2)

    with sending(lost):
        said = stream.refused("--again")
        assert "the same command continues" in stream.refused("--skip", 1, "--resume")
    assert "row 5" in said
    assert "this run has stored the 4 rows before it; this row and the next 1 may be stored; " in said
    assert said.endswith("sends the rest, and these rows once more\n")
    assert stream.ingest("--again", *sends_the_rest(said)) == (0, 6)
    assert stream.rows == numbers(range(10), range(10))


async def recreate(js: JetStreamContext, name: str) -> None:
    config = (await js.stream_info(name)).config
    await js.delete_stream(name)
    await js.add_stream(config)


@pytest.mark.parametrize("again", [False, True])
def test_a_stream_that_is_created_again_while_rows_are_sent_is_an_error_and_the_next_run_sends_the_missing_rows(
    stream: Stream, sending: Sending, again: bool
) -> None:
    stream.create()
    stream.write(*range(5))
    stream.ingest()
    stream.write(*range(3_000))

    async def recreated_after_500(js: JetStreamContext) -> None:
        async with asyncio.timeout(60):
            while (await js.stream_info(stream.name)).state.messages < 500:
                await asyncio.sleep(0.01)
        await recreate(js, stream.name)

    async def recreated(js: JetStreamContext, messages: Messages, **options: Any) -> jsx.IngestReport:
        def recreated_meanwhile() -> Iterator[jsx.BatchMessage]:
            for number, message in enumerate(messages):
                if number == 1_000:
                    with ThreadPoolExecutor(1) as other:
                        other.submit(stream.js, recreated_after_500).result()
                yield message

        return await jsx.ingest(js, recreated_meanwhile(), **options)

    with sending(recreated):
        said = stream.refused("--again" if again else "--resume")
    assert f"Error: stream '{stream.name}' was deleted and created again while the rows were sent: " in said
    without = " without --again" if again else ""
    assert f"; the same command{without} sends the rows that the stream does not have" in said
    stored, sent = stream.ingest("--resume")
    assert (stored + sent, sent > 0) == (3_000, True)
    assert Counter(stream.rows) == Counter(numbers(range(3_000)))


# -- changed files and options -----------------------------------------------------------------------------------------


def test_a_changed_file_is_refused_with_counts_and_resume_sends_its_new_rows(stream: Stream) -> None:
    stream.create()
    stream.write(*range(100))
    stream.ingest()
    changed = [*range(40), "corrected", *range(41, 100), "new", 5, "last"]  # row 5 once more
    stream.write(*changed)
    said = stream.refused()
    assert said == (
        f"Error: {stream.path} was changed since it was stored in {stream.name}, or stored with other options: 99 of its 103 rows are stored; "
        "--resume sends the other 4, --again sends all\n"
    )
    assert stream.rows == numbers(range(100))
    assert stream.ingest("--resume") == (99, 4)
    assert stream.ingest() == (103, 0)
    assert stream.rows == [*numbers(range(100)), "corrected", "new", "5", "last"]
    stream.write(*range(9, 3, -1))  # rows were only removed or moved
    assert stream.ingest() == (6, 0)


def test_another_file_and_other_content_at_the_same_place_are_sent_whole(stream: Stream, tmp_path: Path) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()
    stream.write(*range(10, 20))
    assert stream.ingest() == (0, 10)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(stream.path.read_bytes())
    stream.path = copy
    assert stream.ingest() == (0, 10)
    assert stream.rows == numbers(range(20), range(10, 20))


def test_a_brace_that_belongs_to_no_column_is_a_usage_error(stream: Stream, run: Run) -> None:
    stream.write(1)
    for option, text in (
        ("--subject", "S.{c"),
        ("--subject", "S.{}"),
        ("--subject", "S.c}"),
        ("--subject-from", "t{o"),
    ):
        done = run("ingest", stream.path, "--stream", stream.name, option, text)
        assert_usage(done, f"{option} {text!r}: {{ and }} can only enclose the name of a column")


def test_an_id_that_someone_else_made_up_hides_no_row(stream: Stream) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()

    async def forge(js: JetStreamContext) -> None:
        message = await js.get_last_msg(stream.name, f"{stream.name}.a")
        assert message.headers is not None
        path, content, _, row = message.headers["Nats-Msg-Id"].split(".")
        await js.purge_stream(stream.name, keep=None, seq=6)
        for index in (8, 10**15, "x", ""):
            forged = {"Nats-Msg-Id": f"{path}.{content}.{index}.{row}"}
            await js.publish(f"{stream.name}.a", b"forged", headers=forged)

    async def remove_last(js: JetStreamContext) -> None:
        for seq in range(8, 11):
            await js.delete_msg(stream.name, seq)

    stream.js(forge)
    stream.js(remove_last)
    assert stream.ingest() == (7, 3)
    assert stream.rows == ["5", "6", *["forged"] * 4, "7", "8", "9"]


def test_a_forged_id_with_a_large_number_is_ignored(stream: Stream) -> None:
    stream.create()
    stream.write(1)
    stream.ingest()

    async def forge(js: JetStreamContext) -> None:
        message = await js.get_last_msg(stream.name, f"{stream.name}.a")
        path, content, _, row = (message.headers or {})["Nats-Msg-Id"].split(".")
        for forged in (f"{content}.{2**63}", f"other.{2**63}", f"{content}.{2**64}-1"):
            await js.publish(f"{stream.name}.a", b"x", headers={"Nats-Msg-Id": f"{path}.{forged}.{row}"})

    stream.js(forge)
    stream.write(1, 2)
    assert stream.ingest("--resume") == (1, 1)


def test_equal_rows_with_skip_and_resume_in_any_order_are_stored_as_often_as_the_file_has_them(
    stream: Stream,
) -> None:
    stream.create()
    random = Random(7)
    rows: list[str] = []
    sent: set[int] = set()
    for _ in range(25):
        rows += random.choices("xy", k=random.randrange(3))
        skip = random.randrange(len(rows) + 1) if random.random() < 0.5 else 0
        if not rows:
            continue
        stream.write(*rows)
        stream.ingest("--resume", *(["--skip", skip] if skip else []))
        sent |= set(range(skip, len(rows)))
        assert Counter(stream.rows) == Counter(rows[at] for at in sent)


# -- streams that remove messages --------------------------------------------------------------------------------------


def test_rows_that_the_stream_has_removed_since_are_not_sent_again(stream: Stream) -> None:
    stream.create(max_msgs=60)
    stream.write(*range(100))
    assert stream.ingest() == (0, 100)
    assert stream.ingest() == (100, 0)
    assert stream.rows == numbers(range(40, 100))


def test_a_value_that_was_replaced_does_not_come_back(stream: Stream) -> None:
    stream.create(max_msgs_per_subject=1)
    stream.path.write_text("to,n\nde,1\nfr,2\nde,4\n")
    stream.ingest()
    stream.path.write_text("to,n\nde,1\nfr,2\nde,4\nes,5\n")
    assert stream.ingest("--resume") == (3, 1)
    assert stream.rows == ["2", "4", "5"]


async def last_values(js: JetStreamContext, name: str) -> dict[str, str]:
    found = await jsx.DirectGet(js, name).scan().to_list()
    return {message.subject.rpartition(".")[2]: message.data.decode() for message in found}


def test_a_row_that_was_changed_and_changed_back_is_sent_where_the_stream_keeps_the_last_value(
    make: Callable[..., Stream],
) -> None:
    def write(*values: str) -> None:
        stream.path.write_text("to,n\n" + "".join(f"{n},{value}\n" for n, value in enumerate(values)))

    def last() -> Any:
        return stream.js(lambda js: last_values(js, stream.name))

    for limit in ({}, {"max_msgs": 100}):
        stream = make(duplicate_window=120, max_msgs_per_subject=1, **limit)
        write(*"abcd")
        assert stream.ingest() == (0, 4), limit
        write(*"abCd")
        assert stream.ingest("--resume") == (3, 1), limit
        write(*"abcd")
        assert "3 already stored, 1 to send" in stream.run("--dry-run").stdout, limit
        assert stream.ingest() == (3, 1), limit
        assert last() == dict(zip("0123", "abcd", strict=True)), limit
        assert stream.ingest() == (4, 0), limit
        write(*"aBCd")
        assert stream.ingest("--resume") == (2, 2), limit
        write(*"abcde")  # both changed back, and a new one
        assert stream.ingest("--resume") == (2, 3), limit
        assert last() == dict(zip("01234", "abcde", strict=True)), limit
        assert stream.ingest() == (5, 0), limit
        stream.js(lambda js, name=stream.name: js.publish(f"{name}.1", b"newer, by another program"))
        assert stream.ingest() == (5, 0), limit
        write(*"abcdef")
        assert stream.ingest("--resume") == (5, 1), limit
        assert last()["1"] == "newer, by another program", limit


def test_what_a_stream_has_removed_is_said(make: Callable[..., Stream]) -> None:
    removed = "has removed messages: "
    maybe = f"{removed}if rows of this file were among them, they may be sent again"
    counted = f"{removed}rows of this file that were among them count as stored; --again sends all rows"
    consumed = "deletes messages that were consumed (retention workqueue)"

    async def replace_the_last(js: JetStreamContext) -> None:
        await js.publish(f"{stream.name}.b", b"newer")

    cells: dict[str, tuple[dict[str, Any], int, str, Callable[[JetStreamContext], Any]]] = {
        "all consumed": ({"retention": "workqueue"}, 2, consumed, lambda js: js.purge_stream(stream.name)),
        "all removed": ({"max_age": 3600}, 2, maybe, lambda js: js.purge_stream(stream.name)),
        "last row replaced": ({"max_msgs_per_subject": 1}, 1, maybe, replace_the_last),
        "one deleted": ({}, 0, counted, lambda js: js.delete_msg(stream.name, 1)),
    }
    for cell, (options, sent, words, remove) in cells.items():
        stream = make(**options)
        stream.path.write_text("to,n\na,1\nb,2\n")
        stream.ingest()
        stream.js(remove)
        for dry in (True, False):
            done = stream.run(*(["--dry-run"] if dry else []))
            assert done.exit_code == 0, (cell, done.output)
            assert done.stderr.startswith(f"stream '{stream.name}' {words}"), cell
            assert (f"{sent} to send" if dry else f"{sent} sent") in done.stdout, cell


async def forget_all_but(stream: Stream, js: JetStreamContext, first: int) -> None:
    """Create the stream again, with what an ingest that was running then has stored since: the rows from `first` on."""
    kept = await jsx.DirectGet(js, stream.name).scan(seq=first + 1).to_list()
    config = (await js.stream_info(stream.name)).config
    await js.delete_stream(stream.name)
    await js.add_stream(config)
    for message in kept:
        await js.publish(message.subject, message.data, headers=dict(message.headers))


@pytest.mark.parametrize("deleted", [False, True])
def test_rows_that_a_stream_never_had_since_it_was_created_again_are_sent(stream: Stream, deleted: bool) -> None:
    stream.create()
    stream.write(*range(50))
    stream.ingest()
    stream.js(lambda js: forget_all_but(stream, js, 20))
    if deleted:  # from now on the stream has removed a message; no row proves more rows than the stream has stored
        stream.js(lambda js: js.delete_msg(stream.name, 3))
        assert stream.ingest() == (29, 21)
    else:
        assert stream.ingest() == (30, 20)
        assert stream.ingest() == (50, 0)
    assert Counter(stream.rows) == Counter(numbers(range(50)))


# -- which streams take rows, and under which subjects -----------------------------------------------------------------


def test_a_stream_without_direct_get_is_refused_unless_it_is_empty_or_again(stream: Stream) -> None:
    stream.create(allow_direct=False)
    stream.write(1)
    enable = f"'jetstream-ext enable {stream.name} --direct' enables it"
    done = stream.run()
    assert (done.exit_code, done.stderr) == (
        0,
        f"stream '{stream.name}' does not allow direct get, so the next run cannot look for the rows of this one; {enable}\n",
    )
    for _ in range(2):
        assert stream.refused() == (
            f"Error: stream '{stream.name}' does not allow direct get, so ingest cannot look for rows that are already stored; "
            f"nothing was sent; {enable}, --again sends all rows\n"
        )
        assert stream.ingest("--again") == (0, 1)
    assert "does not allow direct get" in stream.refused("--dry-run")
    done = stream.run("--create", stream.name, "--dry-run")
    assert (done.exit_code, done.stderr.count("\n"), "1 to send" in done.stdout) == (0, 1, True)
    assert f"stream '{stream.name}' does not allow direct get, which --create turns on; " in done.stderr
    assert stream.ingest("--create", stream.name) == (1, 0)
    assert "1 already stored, 0 to send" in stream.run("--create", stream.name, "--dry-run").stdout


def test_what_ingest_needs_is_asked_for_at_once_and_the_command_that_is_named_enables_it(
    stream: Stream, run: Run
) -> None:
    stream.create(allow_direct=False, allow_batched=False)
    stream.write(1)
    for dry in ((), ("--dry-run",)):
        said = stream.refused(*dry)
        assert said == (
            f"Error: stream '{stream.name}' does not allow fast ingest and direct get; nothing was sent; "
            f"'jetstream-ext enable {stream.name} --batched --direct' enables them\n"
        )
    assert "does not allow fast ingest; nothing was sent; " in stream.refused("--again")
    assert run(*shlex.split(said.split("'")[3])[1:]).exit_code == 0
    assert stream.ingest() == (0, 1)
    assert stream.ingest() == (1, 0)


def test_a_stream_that_takes_no_rows_is_refused_by_name(make: Callable[..., Stream], stream: Stream, run: Run) -> None:
    stream.js(lambda js: js.add_stream(name=stream.name, mirror=StreamSource(name="none")))
    silent = make(no_ack=True)
    for each, words in (
        (stream, "it is a mirror"),
        (silent, "it has no_ack, so the server does not confirm what it has stored"),
    ):
        each.write(1)
        for options in ((), ("--dry-run",), ("--create", "any"), ("--create", "any", "--dry-run"), ("--again",)):
            assert each.refused(*options) == f"Error: stream '{each.name}' takes no rows: {words}; nothing was sent\n"
    done = run("doctor", "--stream", silent.name, "--for", "ingest")
    assert (done.exit_code, "cannot have allow_batched: it has no_ack" in done.stdout) == (1, True)
    assert "enable it with" not in done.stdout


def test_a_stream_that_keeps_messages_for_its_consumers_is_refused_without_one(stream: Stream) -> None:
    stream.create(retention="interest")
    stream.write(1, 2, 3)
    for options in ((), ("--again",), ("--dry-run",)):
        said = stream.refused(*options)
        assert (
            f"stream '{stream.name}' keeps messages only for its consumers (retention interest), and it has none"
            in said
        )
        assert "nothing was sent; create the consumer first" in said
    stream.js(lambda js: js.add_consumer(stream.name, durable_name="c", filter_subject=f"{stream.name}.b"))
    done = stream.run()
    assert done.exit_code == 0
    assert "has removed 3 messages while the rows were sent, because no consumer has yet to acknowledge" in done.stderr
    again = stream.run()
    assert "keeps only messages that a consumer has yet to acknowledge (retention interest): rows of" in again.stderr


def test_no_stream_is_created_for_rows_that_it_would_not_store(stream: Stream) -> None:
    stream.write(1)
    for subject, words in (("elsewhere", "does not store its subject 'elsewhere'"), ("a..b", "subject 'a..b'")):
        stream.options["--subject"] = subject
        said = stream.refused("--create", f"{stream.name}.>")
        assert f"{stream.path}, row 1: " in said
        assert words in said
        assert said.endswith("; nothing is stored\n")
    with pytest.raises(NotFoundError):
        stream.js(lambda js: js.stream_info(stream.name))


def test_a_row_is_no_request_to_another_program(stream: Stream) -> None:
    stream.create()
    stream.write(1)
    stream.ingest()
    purge = f"$JS.API.STREAM.PURGE.{stream.name}"
    for subject, foreign in (("{to}", purge), (purge, purge), ("{to}", "elsewhere")):
        stream.path.write_text(f'to,n\n{foreign},""\n')
        stream.options["--subject"] = subject
        assert f"row 1: stream '{stream.name}' does not store its subject '{foreign}'; " in stream.refused("--again")
    assert stream.rows == ["1"]
