"""ingest stores each row once, however often the command runs; the stream is compared row by row."""

from __future__ import annotations

import asyncio
import csv
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from cli_tools import Json, Run, with_js
from nats.js import JetStreamContext
from nats.js.api import StreamSource
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
from jetstream_ext.cli import ingest as cli_ingest
from jetstream_ext.cli.files import stored_rows
from jetstream_ext.cli.files.row_files import Row
from jetstream_ext.cli.ingest import _Ingest
from jetstream_ext.errors import IngestError
from jetstream_ext.testing import NatsServer

WINDOW = 0.1  # seconds, the shortest that servers take: afterwards they know no id


class Stream:
    """A stream whose server soon forgets message ids, and a CSV file for it."""

    def __init__(self, server: NatsServer, name: str, path: Path, run: Run, ok: Json) -> None:
        self.name = name
        self.path = path
        self._url = server.url
        self._run = run
        self._ok = ok
        self.how: tuple[object, ...] = (
            "ingest",
            path,
            "--stream",
            name,
            "--subject",
            f"{name}.{{to}}",
            "--data-from",
            "n",
        )

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

    def ingest(self, *options: object) -> tuple[int, int]:
        """Run the command when the server has forgotten all ids; return how many rows were stored before, and sent."""
        time.sleep(1.2 * WINDOW)
        done = self._ok(*self.how, *options)
        return done["already_stored"], done["sent"]

    def refused(self, *options: object) -> str:
        time.sleep(1.2 * WINDOW)
        done = self._run(*self.how, *options)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.exception or done.output
        return str(done.stderr)

    @property
    def rows(self) -> list[str]:
        async def read(js: JetStreamContext) -> list[str]:
            return [message.data.decode() for message in await jsx.DirectGet(js, self.name).scan().to_list()]

        found: list[str] = self.js(read)
        return found


@pytest.fixture
def stream(server: NatsServer, stream_name: Callable[[], str], tmp_path: Path, run: Run, ok: Json) -> Stream:
    return Stream(server, stream_name(), tmp_path / "rows.csv", run, ok)


def numbers(*ranges: range) -> list[str]:
    return [str(n) for some in ranges for n in some]


def test_the_same_command_minutes_later_stores_nothing_again(stream: Stream, run: Run) -> None:
    stream.create()
    stream.write(*range(300), 7, 7)
    assert stream.ingest() == (0, 302)
    assert stream.ingest() == (302, 0)
    assert stream.ingest("--resume") == (302, 0)
    assert f"302 rows of {stream.path} are in {stream.name}: 302 already stored, 0 sent" in run(*stream.how).stdout
    assert stream.rows == [*numbers(range(300)), "7", "7"]


def test_again_stores_all_rows_again_and_later_runs_still_know_them(stream: Stream) -> None:
    stream.create(duplicate_window=120.0)
    stream.write(*range(3))
    assert stream.ingest() == (0, 3)
    assert stream.ingest("--again") == (0, 3)
    assert stream.ingest() == (3, 0)
    assert stream.rows == [*numbers(range(3)), *numbers(range(3))]


def sends_the_rest(said: str) -> tuple[str, ...]:
    """Return the options that a message names for the command that sends the rest."""
    found = re.search(r"the (?:same )?command with (.*?) (?:then )?sends the rest", said)
    assert found is not None, said
    return tuple(found[1].split())


def test_again_goes_on_after_a_bad_row_with_the_options_that_the_error_names(stream: Stream) -> None:
    stream.create(max_msg_size=250)
    stream.write(*range(5))
    stream.ingest()
    stream.write(*range(3), "x" * 300, 4)
    said = stream.refused("--again")
    assert "this run has stored the 3 rows before it; correct the row" in said
    stream.write(*range(5))
    assert stream.ingest("--again", *sends_the_rest(said)) == (0, 2)
    with stream.path.open("a") as file:
        file.write("a,1,too many\n")
    said = stream.refused("--again", "--skip", 2)
    assert "row 6: the number of fields differs from the header; this run has stored the 3 rows before it; " in said
    stream.write(*range(6))
    assert stream.ingest("--again", "--skip", 2, *sends_the_rest(said)) == (0, 1)
    stream.write("x" * 300)
    assert stream.refused("--again").endswith("; this run has stored nothing\n")


def test_again_goes_on_after_ctrl_c_with_the_options_that_are_printed(
    stream: Stream, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.create()
    stream.write(*range(50))
    stream.ingest()
    rows_to_send = _Ingest._rows_to_send

    def stopped_after_20(ingest: _Ingest) -> Generator[tuple[int, Row, str | None, int], None, None]:
        for number, row in enumerate(rows_to_send(ingest)):
            ingest.stopping = number == 20
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(_Ingest, "_rows_to_send", stopped_after_20)
        done = run(*stream.how, "--again", "--skip", 10)
    assert (done.exit_code, done.stdout) == (130, "")
    assert f"stopped: this run has stored exactly 20 rows of {stream.path} in {stream.name}; " in done.stderr
    assert stream.ingest("--again", "--skip", 10, *sends_the_rest(done.stderr)) == (0, 20)
    assert stream.rows == numbers(range(50), range(10, 50))


def test_again_goes_on_after_an_outage_with_the_options_that_the_error_names(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()

    async def lost(js: JetStreamContext, messages: Iterable[jsx.BatchMessage], **_: object) -> None:
        await jsx.ingest(js, list(islice(messages, 4)))
        raise IngestError("no server", index=4, in_doubt=2)

    with monkeypatch.context() as patch:
        patch.setattr(cli_ingest, "ingest", lost)
        said = stream.refused("--again")
        assert "the same command continues" in stream.refused("--skip", 1, "--resume")
    assert "row 5" in said
    assert "this run has stored the 4 rows before it; this row and the next 1 may be stored; " in said
    assert said.endswith("sends the rest, and these rows once more\n")
    assert stream.ingest("--again", *sends_the_rest(said)) == (0, 6)
    assert stream.rows == numbers(range(10), range(10))


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_msgs": 3}, "maximum messages exceeded"),
        ({"max_bytes": 500}, "maximum bytes exceeded"),
        ({"max_msgs_per_subject": 3, "discard_new_per_subject": True}, "maximum messages per subject exceeded"),
    ],
    ids=["messages", "bytes", "per subject"],
)
def test_a_full_stream_asks_for_a_higher_limit_before_the_same_command_continues(
    stream: Stream, limit: dict[str, Any], words: str
) -> None:
    stream.create(discard="new", **limit)
    stream.write(*range(9))
    for again in ((), ("--again",)):
        said = stream.refused(*again)
        assert words in said
        assert "; raise this limit first, then the same command " in said
    free = {"max_msgs": -1, "max_bytes": -1, "max_msgs_per_subject": -1, "discard_new_per_subject": False}

    async def raise_limit(js: JetStreamContext) -> None:
        await js.update_stream((await js.stream_info(stream.name)).config.evolve(**free))

    stream.js(raise_limit)
    assert sum(stream.ingest()) == 9
    assert stream.rows == numbers(range(9))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--subject", "{}.{{c"), ("--subject", "{}.{{}}"), ("--subject", "{}.c}}"), ("--subject-from", "t{{o")],
)
def test_a_brace_that_belongs_to_no_column_is_a_usage_error(stream: Stream, run: Run, option: str, value: str) -> None:
    stream.create()
    stream.write(1)
    text = value.format(stream.name)
    done = run(*stream.how[:4], option, text)
    assert (done.exit_code, f"{option} {text!r}: {{ and }} can only enclose the name of a column" in done.stderr) == (
        2,
        True,
    )
    assert stream.rows == []


def test_other_options_need_resume_which_the_first_error_names(stream: Stream) -> None:
    stream.create()
    stream.path.write_text("to,n\na,x\na,\u00e9\n", encoding="latin-1")
    said = stream.refused()
    assert "give its --encoding; the 1 row before it is stored; correct the row or the options; " in said
    assert ", or stored with other options: 1 of its 2 rows is stored; " in stream.refused("--encoding", "latin-1")
    assert stream.ingest("--encoding", "latin-1", *sends_the_rest(said)) == (1, 1)
    assert stream.rows == ["x", "\u00e9"]


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
    assert stream.ingest("--resume") == (103, 0)
    assert stream.rows == [*numbers(range(100)), "corrected", "new", "5", "last"]


def test_a_file_whose_rows_were_only_removed_or_moved_has_nothing_to_send(stream: Stream) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()
    stream.write(*range(9, 3, -1))
    assert stream.ingest() == (6, 0)
    assert stream.rows == numbers(range(10))


def test_another_file_and_other_content_at_the_same_place_are_sent_whole(stream: Stream, tmp_path: Path) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()
    stream.write(*range(10, 20))
    assert stream.ingest() == (0, 10)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(stream.path.read_bytes())
    stream.how = ("ingest", copy, *stream.how[2:])
    assert stream.ingest() == (0, 10)
    assert stream.rows == numbers(range(20), range(10, 20))


def test_earlier_rows_of_which_the_file_has_none_any_more_are_said(stream: Stream, run: Run) -> None:
    stream.create()
    stream.write(*range(3))
    stream.ingest()
    words = f"{stream.name} has {{}} of an earlier content of {stream.path}, or stored with other options, "
    stream.how = (*stream.how[:-2], "--data-from", "to")  # another option
    for options in (("--dry-run",), ()):
        done = run(*stream.how, *options)
        assert (done.exit_code, done.stderr.count("\n")) == (0, 1)
        assert done.stderr.startswith(
            f"{words.format('3 rows')}none of which is in it now: all its rows count as new\n"
        )
    assert run(*stream.how).stderr == ""
    stream.path.write_text("to,n,new\na,1,x\n")
    stream.how = stream.how[:-2]
    assert words.format("6 rows") in run(*stream.how).stderr
    stream.path.write_text("to,n,new\na,1,x\na,2,x\n")
    assert run(*stream.how, "--skip", 1).stderr == ""  # the skipped row is stored
    stream.path.write_text("to,n,new\nb c,1,x\na,1,x\n")
    assert "earlier content" not in stream.refused()  # the row after the refused one is stored


def test_the_same_rows_on_another_subject_are_other_messages(stream: Stream) -> None:
    stream.create()
    stream.write(*range(3))
    stream.ingest()
    stream.how = (*stream.how[:5], f"{stream.name}.b", *stream.how[6:])
    assert stream.ingest() == (0, 3)
    assert stream.ingest() == (3, 0)


def test_after_a_bad_row_the_corrected_file_continues_with_resume(stream: Stream) -> None:
    stream.create(max_msg_size=250)
    stream.write(*range(50), "x" * 300, *range(50, 80))
    said = stream.refused()
    assert (
        f"row 51 of {stream.path}: the server says: message size exceeds maximum allowed; the 50 rows before it are stored; "
        in said
    )
    assert "correct the row or the options; the command with --resume then sends the rest" in said
    assert stream.refused() == said
    stream.write(*range(50), "short", *range(50, 80))
    assert "50 of its 81 rows are stored; --resume sends the other 31" in stream.refused()
    assert stream.ingest("--resume") == (50, 31)
    assert stream.rows == [*numbers(range(50)), "short", *numbers(range(50, 80))]


def test_after_a_malformed_row_the_same_command_sends_nothing_twice(stream: Stream) -> None:
    stream.create()
    stream.write(*range(5))
    with stream.path.open("a") as file:
        file.write("a,1,too many\n")
    said = stream.refused()
    assert "row 6: the number of fields differs from the header; the 5 rows before it are stored; correct" in said
    assert stream.refused() == said
    assert stream.rows == numbers(range(5))


def test_a_refused_row_of_a_resumed_file_is_named_by_its_number_in_the_file(stream: Stream) -> None:
    stream.create(max_msg_size=250)
    stream.write(*range(50))
    stream.ingest()
    stream.write("first", *range(50), "x" * 300)
    said = stream.refused("--resume")
    assert f"row 52 of {stream.path}" in said
    assert "the 51 rows before it are stored" in said


def test_rows_that_the_stream_has_removed_since_are_not_sent_again(stream: Stream) -> None:
    stream.create(max_msgs=60)
    stream.write(*range(100))
    assert stream.ingest() == (0, 100)
    assert stream.ingest() == (100, 0)
    assert stream.rows == numbers(range(40, 100))


def test_a_resumed_run_shows_that_the_rows_after_its_own_are_stored(stream: Stream) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()
    stream.write(0, "corrected", 2, 3, "too", *range(5, 10))
    assert stream.ingest("--resume") == (8, 2)
    stream.js(lambda js: js.purge_stream(stream.name, keep=2))
    assert stream.ingest() == (10, 0)
    stream.js(lambda js: js.delete_msg(stream.name, 12))
    assert stream.ingest() == (4, 6)  # nothing shows them any more
    assert stream.rows == ["corrected", "too", *numbers(range(5, 10))]


def test_rows_are_stored_after_a_purge_although_the_server_remembers_their_ids(stream: Stream, ok: Json) -> None:
    stream.create(duplicate_window=120)
    stream.write(*range(50))
    ok(*stream.how)
    stream.js(lambda js: js.purge_stream(stream.name))
    assert ok(*stream.how)["sent"] == 50
    assert stream.rows == [str(n) for n in range(50)]
    stream.js(lambda js: js.purge_stream(stream.name, keep=20))
    stream.write(*range(50), "new")
    assert ok(*stream.how, "--resume")["sent"] == 1
    assert stream.rows == [*numbers(range(30, 50)), "new"]
    assert ok(*stream.how, "--again")["sent"] == 51
    assert len(stream.rows) == 21 + 51


@pytest.mark.parametrize("removed", [0, 1])
def test_two_runs_at_the_same_time_store_each_row_once(
    stream: Stream, ok: Json, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    stream.create(duplicate_window=120)
    stream.write(*range(20))

    async def remove(js: JetStreamContext) -> None:
        for seq in range(1, removed + 1):
            await js.publish(f"{stream.name}.other", b"x")
            await js.delete_msg(stream.name, seq)

    stream.js(remove)
    with monkeypatch.context() as patch:
        # Another run ends while this one sends: what it has stored was not there when this one looked.
        patch.setattr(_Ingest, "_look", _nothing_found)
        assert ok(*stream.how)["sent"] == 20
        assert ok(*stream.how)["sent"] == 20
    assert stream.rows == numbers(range(20))


async def _nothing_found(*_: object, **__: object) -> None: ...


def test_skipped_rows_are_not_taken_as_stored(stream: Stream) -> None:
    stream.create()
    stream.write(*range(100))
    assert stream.ingest("--skip", 40) == (0, 60)
    assert stream.ingest("--skip", 30) == (60, 10)
    assert stream.ingest("--skip", 30, "--resume") == (70, 0)
    assert stream.ingest() == (70, 30)
    assert stream.ingest() == (100, 0)
    assert stream.rows == numbers(range(40, 100), range(30, 40), range(30))


def test_rows_after_a_skipped_row_that_cannot_be_sent_are_stored_once(stream: Stream) -> None:
    stream.create()
    stream.path = stream.path.with_suffix(".jsonl")
    stream.how = ("ingest", stream.path, *stream.how[2:])
    stream.path.write_text("".join(f'{{"{to}": "a", "n": "{n}"}}\n' for n, to in enumerate(["to", "ot", "to", "to"])))
    assert "the 1 row before it is stored" in stream.refused()
    assert stream.ingest("--skip", 2) == (0, 2)
    assert stream.ingest("--skip", 2) == (2, 0)
    assert stream.ingest("--skip", 2, "--resume") == (2, 0)
    assert stream.rows == ["0", "2", "3"]


def test_the_error_of_the_first_row_does_not_deny_the_rows_of_earlier_runs(stream: Stream) -> None:
    stream.create()
    stream.write(1, 2)
    stream.ingest()
    stream.path.write_text("to,n\nb c,1\na,2\n")
    earlier = f"; rows of earlier runs stay in {stream.name}, nothing else is stored"
    assert earlier in stream.refused("--resume")
    stream.path.write_text("to,n\na,1\na,2,3\n")
    assert f"{earlier}; correct the row" in stream.refused("--skip", 1)


def test_skip_past_the_end_is_an_error(stream: Stream) -> None:
    stream.create()
    stream.write(*range(3))
    assert stream.ingest("--skip", 3) == (0, 0)
    for more in (4, 2**63 - 1):
        assert f"{stream.path} has only 3 rows; --skip {more} is more" in stream.refused("--skip", more)
    assert stream.rows == []


def test_a_stream_without_direct_get_is_refused_unless_it_is_empty_or_again(stream: Stream, run: Run) -> None:
    stream.create(allow_direct=False)
    stream.write(1)
    enable = f"'jetstream-ext enable {stream.name} --direct' enables it"
    done = run(*stream.how)
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
    assert stream.js(lambda js: js.stream_info(stream.name)).state.messages == 3


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


@pytest.mark.parametrize("create", [(), ("--create", "any")])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_mirror_is_called_a_mirror(stream: Stream, create: tuple[str, ...], dry: tuple[str, ...]) -> None:
    stream.js(lambda js: js.add_stream(name=stream.name, mirror=StreamSource(name="none")))
    stream.write(1)
    assert (
        stream.refused(*create, *dry)
        == f"Error: stream '{stream.name}' takes no rows: it is a mirror; nothing was sent\n"
    )


@pytest.mark.parametrize(
    ("subject", "words"), [("elsewhere", "does not store its subject 'elsewhere'"), ("a..b", "subject 'a..b'")]
)
def test_no_stream_is_created_for_rows_that_it_would_not_store(stream: Stream, subject: str, words: str) -> None:
    stream.write(1)
    stream.how = (*stream.how[:5], subject, *stream.how[6:])
    said = stream.refused("--create", f"{stream.name}.>")
    assert f"{stream.path}, row 1: " in said
    assert words in said
    assert said.endswith("; nothing is stored\n")
    with pytest.raises(NotFoundError):
        stream.js(lambda js: js.stream_info(stream.name))


def test_create_allows_direct_get_and_a_dry_run_says_that_it_cannot_look_before(stream: Stream, run: Run) -> None:
    stream.create(allow_direct=False)
    stream.write(1, 2)
    stream.ingest("--again")
    assert "does not allow direct get" in stream.refused("--dry-run")
    done = run(*stream.how, "--create", stream.name, "--dry-run")
    assert (done.exit_code, done.stderr.count("\n"), "2 to send" in done.stdout) == (0, 1, True)
    assert f"stream '{stream.name}' does not allow direct get, which --create turns on; " in done.stderr
    assert stream.ingest("--create", stream.name) == (2, 0)
    assert "2 already stored, 0 to send" in run(*stream.how, "--create", stream.name, "--dry-run").stdout


@pytest.mark.parametrize("before", [0, 5])
def test_the_end_of_the_stream_shows_that_all_rows_are_stored(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    stream.create()

    async def others(js: JetStreamContext) -> None:
        for _ in range(before):
            await js.publish(f"{stream.name}.other", b"x")

    stream.js(others)
    stream.write(*range(100))
    stream.ingest()
    looked: list[int] = []

    class Reader(jsx.DirectGet):
        def scan(self, **options: Any) -> Any:
            looked.append(options["seq"])
            return super().scan(**options)

    monkeypatch.setattr(stored_rows, "DirectGet", Reader)
    monkeypatch.setattr(stored_rows, "_FIRST_BLOCK", 10)
    assert stream.ingest() == (100, 0)
    assert looked == [before + 91]
    looked.clear()
    stream.write(*range(101))
    assert "100 of its 101 rows" in stream.refused()
    assert [max(1, seq - before) for seq in looked] == [91, 71, 31, 1]


def test_rows_are_found_where_the_stream_changes_subjects(stream: Stream) -> None:
    async def create(js: JetStreamContext) -> None:
        transform = {"src": f"{stream.name}.*", "dest": f"moved.{stream.name}.{{{{wildcard(1)}}}}"}
        config = {"name": stream.name, "subjects": [f"{stream.name}.>"], "subject_transform": transform}
        config |= {"allow_direct": True, "allow_batched": True, "storage": "file", "retention": "limits"}
        await js._api_request(
            f"$JS.API.STREAM.CREATE.{stream.name}",
            orjson.dumps(config | {"duplicate_window": int(WINDOW * 1e9), "num_replicas": 1, "discard": "old"}),
        )

    stream.js(create)
    stream.write(*range(10))
    assert stream.ingest() == (0, 10)
    assert stream.ingest() == (10, 0)


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


def test_a_forged_id_with_a_large_number_is_ignored(stream: Stream, run: Run) -> None:
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


def test_rows_that_are_stored_for_certain_use_up_their_own_messages(stream: Stream) -> None:
    stream.create()
    stream.write("k")
    stream.ingest()
    stream.write("x", "x", "y")
    assert stream.ingest("--skip", 1) == (0, 2)
    assert stream.ingest() == (2, 1)
    assert sorted(stream.rows) == ["k", "x", "x", "y"]


@pytest.mark.parametrize(("skip", "before"), [(0, 10), (5, 5)])
def test_a_message_of_a_skipped_row_does_not_stand_for_an_equal_row(stream: Stream, skip: int, before: int) -> None:
    stream.create()
    stream.write(*["x"] * 10)
    assert stream.ingest("--skip", skip) == (0, before)
    stream.write(*["x"] * 11)
    assert "5 of its 6 rows are stored; --resume sends the other 1" in stream.refused("--skip", 5)
    assert stream.ingest("--resume", "--skip", 5) == (5, 1)
    assert len(stream.rows) == before + 1


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


def test_old_rows_that_the_stream_has_removed_are_not_sent_again_after_newer_ones(stream: Stream) -> None:
    stream.create(max_msgs=5)
    stream.write(*range(20))
    stream.ingest()
    stream.write(*range(21))
    said = "20 of its 21 rows are stored (15 of them and removed since, to judge by the rows around); --resume sends the other 1"
    assert said in stream.refused()
    stream.write(*range(17), "corrected", *range(18, 21))
    assert stream.ingest("--resume") == (19, 2)
    assert stream.rows == ["17", "18", "19", "corrected", "20"]
    assert stream.ingest() == (21, 0)


def test_a_value_that_was_replaced_does_not_come_back(stream: Stream) -> None:
    stream.create(max_msgs_per_subject=1)
    stream.path.write_text("to,n\nde,1\nfr,2\nde,4\n")
    stream.ingest()
    stream.path.write_text("to,n\nde,1\nfr,2\nde,4\nes,5\n")
    assert stream.ingest("--resume") == (3, 1)
    assert stream.rows == ["2", "4", "5"]


def test_equal_rows_of_which_the_stream_has_removed_some_are_not_sent_again(stream: Stream) -> None:
    stream.create(max_msgs=2)
    stream.write("x", "y", "x", "x")
    stream.ingest()
    stream.write("x", "y", "x", "x", "z")
    assert stream.ingest("--resume") == (4, 1)
    assert stream.rows == ["x", "z"]


def test_rows_that_may_be_new_or_may_have_been_removed_are_refused(stream: Stream) -> None:
    stream.create(max_msgs=5)
    stream.write(*range(20))
    stream.ingest()
    stream.write("new", *range(21))  # all indexes have moved
    for options in ((), ("--resume",)):
        said = stream.refused(*options)
        assert said == (
            f"Error: {stream.path} was changed since it was stored in {stream.name}, or stored with other options, and the stream has "
            "removed messages since: it is not known whether 16 rows before row 21 of it are new, or stored and removed; --resume --skip 21 sends only "
            "the rows after that one, --again sends all\n"
        )
    assert stream.ingest("--resume", "--skip", 21) == (0, 1)
    assert stream.rows == numbers(range(16, 21))


def test_rows_inserted_among_others_that_are_all_there_are_new_whatever_else_the_stream_has_removed(
    stream: Stream,
) -> None:
    stream.create()
    stream.js(lambda js: js.publish(f"{stream.name}.other", b"x"))
    stream.js(lambda js: js.delete_msg(stream.name, 1))
    stream.write(*range(5))
    stream.ingest()
    stream.write("new", *range(5))
    assert stream.ingest("--resume") == (5, 1)
    assert stream.rows == [*numbers(range(5)), "new"]


REMOVED = "has removed messages: "
MAYBE_AGAIN = f"{REMOVED}if rows of this file were among them, they may be sent again"


@pytest.mark.parametrize(
    ("options", "sent", "words"),
    [
        ({"retention": "workqueue"}, 2, "deletes messages that were consumed (retention workqueue)"),
        ({"max_age": 3600}, 2, MAYBE_AGAIN),
        ({"max_msgs_per_subject": 1}, 1, MAYBE_AGAIN),
        ({}, 0, f"{REMOVED}rows of this file that were among them count as stored; --again sends all rows"),
    ],
    ids=["all consumed", "all removed", "last row replaced", "one deleted"],
)
def test_what_a_stream_has_removed_is_said(
    stream: Stream, run: Run, options: dict[str, Any], sent: int, words: str
) -> None:
    stream.create(**options)
    stream.path.write_text("to,n\na,1\nb,2\n")
    stream.ingest()

    async def remove(js: JetStreamContext) -> None:
        if "max_msgs_per_subject" in options:
            await js.publish(f"{stream.name}.b", b"newer")
        elif options:
            await js.purge_stream(stream.name)
        else:
            await js.delete_msg(stream.name, 1)

    stream.js(remove)
    time.sleep(1.2 * WINDOW)
    for dry in (True, False):
        done = run(*stream.how, *(["--dry-run"] if dry else []))
        removes_more = "max_msgs_per_subject" in options and not dry
        assert (done.exit_code, done.stderr.count("\n")) == (0, 1 + removes_more)
        assert done.stderr.startswith(f"stream '{stream.name}' {words}")
        assert f"{sent} to send" in done.stdout if dry else f"{sent} sent" in done.stdout


@pytest.mark.parametrize(
    ("how", "subject"), [("row", "$JS.API.STREAM.PURGE.{}"), ("file", "$JS.API.STREAM.PURGE.{}"), ("row", "elsewhere")]
)
def test_a_row_is_no_request_to_another_program(stream: Stream, how: str, subject: str) -> None:
    stream.create()
    stream.write(1)
    stream.ingest()
    foreign = subject.format(stream.name)
    stream.path.write_text(f'to,n\n{foreign},""\n')
    stream.how = (*stream.how[:5], foreign if how == "file" else "{to}", *stream.how[6:])
    assert f"row 1: stream '{stream.name}' does not store its subject '{foreign}'; " in stream.refused("--again")
    assert stream.rows == ["1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retention": "workqueue"}, "deletes messages that were consumed (retention workqueue)"),
        ({"max_msgs": 1}, MAYBE_AGAIN),
    ],
)
def test_what_cannot_be_known_is_said(stream: Stream, run: Run, options: dict[str, Any], words: str) -> None:
    stream.create(**options)

    async def other(js: JetStreamContext) -> None:
        for _ in range(2):
            await js.publish(f"{stream.name}.other", b"x")
        if "retention" in options:
            await js.delete_msg(stream.name, 1)

    stream.js(other)
    stream.write(1)
    done = run(*stream.how)
    assert (done.exit_code, done.stderr.count("\n")) == (0, 1 + ("max_msgs" in options))
    assert done.stderr.startswith(f"stream '{stream.name}' {words}")


async def forget_all_but(stream: Stream, js: JetStreamContext, first: int) -> None:
    """Create the stream again, with what an ingest that was running then has stored since: the rows from `first` on."""
    kept = await jsx.DirectGet(js, stream.name).scan(seq=first + 1).to_list()
    config = (await js.stream_info(stream.name)).config
    await js.delete_stream(stream.name)
    await js.add_stream(config)
    for message in kept:
        await js.publish(message.subject, message.data, headers=dict(message.headers))


@pytest.mark.parametrize("first", [1, 20, 49])
def test_rows_that_a_stream_never_had_since_it_was_created_again_are_sent(stream: Stream, first: int) -> None:
    stream.create()
    stream.write(*range(50))
    stream.ingest()
    stream.js(lambda js: forget_all_but(stream, js, first))
    assert stream.ingest() == (50 - first, first)
    assert stream.ingest() == (50, 0)
    assert stream.rows == [*numbers(range(first, 50)), *numbers(range(first))]


def test_rows_of_another_run_do_not_prove_those_that_were_lost_with_the_former_stream(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.create()
    stream.write(*range(50))
    stream.ingest()
    stream.js(lambda js: forget_all_but(stream, js, 30))
    rows_to_send = _Ingest._rows_to_send
    monkeypatch.setattr(stored_rows, "_FIRST_BLOCK", 5)
    with monkeypatch.context() as patch:
        patch.setattr(_Ingest, "_rows_to_send", lambda ingest: islice(rows_to_send(ingest), 10))
        patch.setattr(cli_ingest, "closing", nullcontext)
        assert stream.ingest("--again") == (0, 10)
    assert stream.ingest() == (30, 20)
    assert stream.ingest() == (50, 0)


def test_a_row_proves_no_more_rows_than_the_stream_has_ever_stored(stream: Stream) -> None:
    stream.create()
    stream.write(*range(50))
    stream.ingest()
    stream.js(lambda js: forget_all_but(stream, js, 40))
    stream.js(lambda js: js.delete_msg(stream.name, 3))  # from now on the stream has removed a message
    assert stream.ingest() == (9, 41)
    assert Counter(stream.rows) == Counter(numbers(range(50)))


@pytest.mark.parametrize("options", [(), ("--again",)])
@pytest.mark.parametrize("before", [0, 5])
def test_a_stream_that_is_created_again_while_rows_are_sent_is_an_error_and_the_next_run_sends_the_missing_rows(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], before: int
) -> None:
    stream.create()
    stream.write(*range(before))
    if before:
        stream.ingest()
        stream.write(*range(3_000))
        options = options or ("--resume",)
    else:
        stream.write(*range(3_000))
    rows_to_send = _Ingest._rows_to_send

    def recreated_after_1_000(ingest: _Ingest) -> Generator[tuple[int, Row, str | None, int], None, None]:
        for number, row in enumerate(rows_to_send(ingest)):
            if number == 1_000:
                with ThreadPoolExecutor(1) as other:
                    other.submit(lambda: stream.js(recreate)).result()
            yield row

    async def recreate(js: JetStreamContext) -> None:
        async with asyncio.timeout(60):
            while (await js.stream_info(stream.name)).state.messages < 500:
                await asyncio.sleep(0.01)
        config = (await js.stream_info(stream.name)).config
        await js.delete_stream(stream.name)
        await js.add_stream(config)

    with monkeypatch.context() as patch:
        patch.setattr(_Ingest, "_rows_to_send", recreated_after_1_000)
        said = stream.refused(*options)
    assert f"Error: stream '{stream.name}' was deleted and created again while the rows were sent: " in said
    again = " without --again" if "--again" in options else ""
    assert f"; the same command{again} sends the rows that the stream does not have" in said
    stored, sent = stream.ingest("--resume")
    assert (stored + sent, sent > 0) == (3_000, True)
    assert Counter(stream.rows) == Counter(numbers(range(3_000)))


def test_a_stream_that_is_created_again_after_the_search_is_an_error(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()
    stream.write(*range(12))
    look = _Ingest._look

    async def recreated_afterwards(ingest: _Ingest, js: JetStreamContext, *rest: Any, **options: Any) -> None:
        await look(ingest, js, *rest, **options)
        config = (await js.stream_info(stream.name)).config
        await js.delete_stream(stream.name)
        await js.add_stream(config)

    with monkeypatch.context() as patch:
        patch.setattr(_Ingest, "_look", recreated_afterwards)
        assert "was deleted and created again while the rows were sent" in stream.refused("--resume")
    assert stream.ingest() == (2, 10)
    assert Counter(stream.rows) == Counter(numbers(range(12)))


def test_a_stream_that_is_deleted_while_rows_are_sent_is_an_error(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.create()
    stream.write(*range(10))
    stream.ingest()
    look = _Ingest._look

    async def deleted_afterwards(ingest: _Ingest, js: JetStreamContext, *rest: Any, **options: Any) -> None:
        await look(ingest, js, *rest, **options)
        await js.delete_stream(stream.name)

    monkeypatch.setattr(_Ingest, "_look", deleted_afterwards)
    assert (
        f"stream '{stream.name}' was deleted while the rows were sent: no row of {stream.path} is" in stream.refused()
    )


@pytest.mark.parametrize("options", [{"max_msgs_per_subject": 1}, {"max_msgs_per_subject": 1, "max_msgs": 100}])
def test_a_row_that_was_changed_and_changed_back_is_sent_where_the_stream_keeps_the_last_value(
    stream: Stream, run: Run, options: dict[str, Any]
) -> None:
    stream.create(duplicate_window=120, **options)

    def write(*values: str) -> None:
        stream.path.write_text("to,n\n" + "".join(f"{n},{value}\n" for n, value in enumerate(values)))

    async def last(js: JetStreamContext) -> dict[str, str]:
        found = await jsx.DirectGet(js, stream.name).scan().to_list()
        return {message.subject.rpartition(".")[2]: message.data.decode() for message in found}

    write(*"abcd")
    assert stream.ingest() == (0, 4)
    write(*"abCd")
    assert stream.ingest("--resume") == (3, 1)
    write(*"abcd")
    assert "3 already stored, 1 to send" in run(*stream.how, "--dry-run").stdout
    assert stream.ingest() == (3, 1)
    assert stream.js(last) == dict(zip("0123", "abcd", strict=True))
    assert stream.ingest() == (4, 0)
    write(*"aBCd")
    assert stream.ingest("--resume") == (2, 2)
    write(*"abcde")  # both changed back, and a new one
    assert stream.ingest("--resume") == (2, 3)
    assert stream.js(last) == dict(zip("01234", "abcde", strict=True))
    assert stream.ingest() == (5, 0)
    stream.js(lambda js: js.publish(f"{stream.name}.1", b"newer, by another program"))
    assert stream.ingest() == (5, 0)
    write(*"abcdef")
    assert stream.ingest("--resume") == (5, 1)
    assert stream.js(last)["1"] == "newer, by another program"


def test_a_row_that_is_changed_back_after_a_run_that_was_interrupted_is_sent(stream: Stream) -> None:
    stream.create(max_msgs_per_subject=1)

    def write(*values: str) -> None:
        stream.path.write_text("to,n\n" + "".join(f"{n},{value}\n" for n, value in enumerate(values)))

    write(*"abcde")
    stream.ingest()
    write(*"aBcDe")
    assert stream.ingest("--resume") == (3, 2)
    write(*"abcde")
    rows_to_send = _Ingest._rows_to_send

    def only_one(ingest: _Ingest) -> Generator[tuple[int, Row, str | None, int], None, None]:
        yield from islice(rows_to_send(ingest), 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Ingest, "_rows_to_send", only_one)
        assert stream.ingest() == (3, 1)
    assert stream.ingest() == (4, 1)
    assert sorted(stream.rows) == list("abcde")


def test_rows_are_found_under_the_subjects_that_a_transform_made_of_them_before(stream: Stream) -> None:
    async def create(js: JetStreamContext, transform: dict[str, str] | None, verb: str) -> None:
        config = {"name": stream.name, "subjects": [f"{stream.name}.>"], "subject_transform": transform}
        config |= {"allow_direct": True, "allow_batched": True, "storage": "file", "retention": "limits"}
        await js._api_request(
            f"$JS.API.STREAM.{verb}.{stream.name}",
            orjson.dumps(config | {"duplicate_window": int(WINDOW * 1e9), "num_replicas": 1, "discard": "old"}),
        )

    transform = {"src": f"{stream.name}.*", "dest": f"moved.{stream.name}.{{{{wildcard(1)}}}}"}
    stream.js(lambda js: create(js, transform, "CREATE"))
    stream.write(*range(10))
    assert stream.ingest() == (0, 10)
    stream.js(lambda js: create(js, None, "UPDATE"))
    stream.js(lambda js: js.publish(f"{stream.name}.a", b"of another program"))
    assert stream.ingest() == (10, 0)
    stream.write(*range(12))
    assert stream.ingest("--resume") == (10, 2)  # now under two subjects
    assert stream.ingest() == (12, 0)


def test_rows_are_found_under_the_subjects_that_the_account_maps_them_to(
    tmp_path: Path, stream_name: Callable[[], str], run: Run, ok: Json
) -> None:
    with NatsServer(config='mappings = {"o.*": "p.v2.$1"}') as mapping:
        stream = Stream(mapping, "O", tmp_path / "rows.csv", run, lambda *given: ok(*given, url=mapping.url))
        stream.create(subjects=["o.>", "p.>"])
        stream.how = ("ingest", stream.path, "--stream", "O", "--subject", "o.new")
        stream.write(1, 2, 3)
        assert stream.ingest() == (0, 3)
        assert stream.ingest() == (3, 0)


@pytest.mark.parametrize("many", [False, True], ids=["few subjects", "many subjects"])
def test_rows_under_another_subject_are_said_before_the_rows_are_sent(
    stream: Stream, run: Run, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    stream.create()
    stream.write(*range(3))
    stream.ingest()
    if many:
        monkeypatch.setattr(stored_rows, "_MOST_SUBJECTS", 0)
    stream.how = (*stream.how[:5], f"{stream.name}.b", *stream.how[6:])
    words = f"{stream.name} has 3 rows of an earlier content of {stream.path}, or stored with other options, "
    for options in (("--dry-run",), ()):
        done = run(*stream.how, *options)
        assert (done.exit_code, done.stderr.startswith(words)) == (0, True), done.output
    assert len(stream.rows) == 6


def test_other_subjects_are_not_read_whole_if_nothing_there_is_of_the_file(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.create()
    monkeypatch.setattr(stored_rows, "_NEWEST", 2)
    monkeypatch.setattr(stored_rows, "_FIRST_BLOCK", 100)

    async def others(js: JetStreamContext) -> None:
        for n in range(10):
            await js.publish(f"{stream.name}.other.{n % 3}", b"x")

    stream.js(others)
    looked: list[tuple[Any, int]] = []

    class Reader(jsx.DirectGet):
        def scan(self, **options: Any) -> Any:
            looked.append((options.get("subject"), options["seq"]))
            return super().scan(**options)

    monkeypatch.setattr(stored_rows, "DirectGet", Reader)
    stream.how = (*stream.how[:5], f"{stream.name}.a", *stream.how[6:])
    stream.write(1)
    assert stream.ingest() == (0, 1)
    assert looked == [(f"{stream.name}.a", 1), (None, 9)]


GONE = "rows of this file may be among them"


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"max_msgs": 10}, 10), ({"max_msgs_per_subject": 1}, 1)],
    ids=["max_msgs", "max_msgs_per_subject"],
)
def test_rows_that_the_stream_removes_while_they_are_sent_are_said(
    stream: Stream, run: Run, options: dict[str, Any], kept: int
) -> None:
    stream.create(**options)
    stream.write(*range(100))
    done = run(*stream.how)
    assert (done.exit_code, done.stderr.count("\n")) == (0, 1)
    assert done.stderr == (
        f"stream '{stream.name}' has removed {100 - kept} messages while the rows were sent, because of its limits, newer "
        f"messages of the same subjects, or a deletion: {GONE}\n"
    )
    assert done.stdout.startswith(f"100 rows of {stream.path} were stored in {stream.name}: 100 sent")
    assert len(stream.rows) == kept
    stream.write(*range(101))
    time.sleep(1.2 * WINDOW)
    assert run(*stream.how, "--again", "--json").stdout.count('"removed_meanwhile":101') == 1


def test_a_stream_that_keeps_messages_for_its_consumers_is_refused_without_one(stream: Stream, run: Run) -> None:
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
    done = run(*stream.how)
    assert done.exit_code == 0
    assert (
        "has removed 3 messages while the rows were sent, because no consumer has yet to acknowledge them"
        in done.stderr
    )
    assert f"3 rows of {stream.path} were stored in {stream.name}" in done.stdout
    time.sleep(1.2 * WINDOW)
    again = run(*stream.how)
    assert "consumed" not in again.stderr
    assert "keeps only messages that a consumer has yet to acknowledge (retention interest): rows of" in again.stderr


def test_a_stream_with_no_ack_is_refused_by_name(stream: Stream, run: Run) -> None:
    stream.create(no_ack=True)
    stream.write(1)
    for options in ((), ("--again",), ("--dry-run",), ("--create", "any")):
        assert stream.refused(*options) == (
            f"Error: stream '{stream.name}' takes no rows: it has no_ack, so the server does not confirm what it has stored; "
            "nothing was sent\n"
        )
    done = run("doctor", "--stream", stream.name, "--for", "ingest")
    assert (done.exit_code, "cannot have allow_batched: it has no_ack" in done.stdout) == (1, True)
    assert "enable it with" not in done.stdout
    assert stream.rows == []
