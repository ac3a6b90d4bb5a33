"""Play a newcomer: type the README and the Quick start as they stand, then work with files on the command line.

`python -m nox -s newcomer` runs this with the Python of an environment that has nothing but the wheel and the extras that
the pages name. Each story compares what a stream holds, or what a file holds, row by row.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pyarrow.parquet as pq
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx

ROOT = Path(__file__).parents[2]
PORT = 4222  # of the pages
ROWS = 20_000
SHOWN = 30  # lines of an output
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"`(\w+\.py)`")
# By the session that runs this script; or, the two commands of the README, by sessions of their own.
ALREADY_DONE = re.compile(r"python3 -m venv|\. \.venv|(python -m )?pip install")

Message = tuple[str, bytes, dict[str, str]]


@dataclass(frozen=True)
class Newcomer:
    """A user with a terminal in an empty folder."""

    folder: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {**os.environ, "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]])}
    )

    def types(self, line: str, *, given: bytes = b"", status: int = 0) -> str:
        """Run a line in a shell with `given` as its input; return what it prints on both streams."""
        print(f"$ {line}", flush=True)
        done = subprocess.run(
            ["bash", "-c", line],
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env=self.environment,
            timeout=300,
            check=False,
        )
        text = done.stdout.decode(errors="replace")
        lines = text.splitlines()
        print(
            *lines[:SHOWN],
            *([f"… {len(lines) - SHOWN} more lines"] if len(lines) > SHOWN else []),
            sep="\n",
            flush=True,
        )
        assert done.returncode == status, f"the line ended with status {done.returncode} instead of {status}"
        return text

    def write(self, name: str, header: list[str], rows: list[list[str]], **options: Any) -> Path:
        path = self.folder / name
        with path.open("w", newline="", encoding=options.pop("encoding", "utf-8")) as file:
            csv.writer(file, lineterminator="\n", **options).writerows([header, *rows])
        return path

    def table(self, name: str) -> list[list[str]]:
        with (self.folder / name).open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))


@contextlib.contextmanager
def serve(newcomer: Newcomer) -> Iterator[None]:
    """Run `jetstream-ext serve`, as the pages say, for the duration of a block; its output goes to the file serve.txt."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=1):
        sys.exit(f"another program listens on port {PORT}, which the pages use")
    with (newcomer.folder / "serve.txt").open("wb") as output:
        process = subprocess.Popen(["jetstream-ext", "serve"], env=newcomer.environment, stdout=output)
    try:
        deadline = time.monotonic() + 30
        while "Ctrl-C" not in (newcomer.folder / "serve.txt").read_text(encoding="utf-8"):
            assert process.poll() is None, "jetstream-ext serve ended"
            assert time.monotonic() < deadline, "after 30 s, jetstream-ext serve has not started"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(30)


def with_js(function: Callable[[JetStreamContext], Any]) -> Any:
    """Return what `function` returns for a connection of its own."""

    async def connected() -> Any:
        nc = await nats.connect(f"nats://127.0.0.1:{PORT}")
        try:
            return await function(nc.jetstream(timeout=30))
        finally:
            await nc.close()

    return asyncio.run(connected())


def messages(stream: str) -> list[Message]:
    """Return the subject, payload and own headers of each message of a stream."""

    async def read(js: JetStreamContext) -> list[Message]:
        stored = await jsx.DirectGet(js, stream).scan(confirm=True).to_list()
        return [
            (each.subject, each.data, {k: v for k, v in (each.headers or {}).items() if not k.startswith("Nats-")})
            for each in stored
        ]

    return with_js(read)


def expect(found: object, wanted: object) -> None:
    if found != wanted:
        if isinstance(found, list) and isinstance(wanted, list):
            first = next(
                (n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
            )
            found, wanted = (f"{len(all_)} rows, row {first}: {all_[first : first + 1]}" for all_ in (found, wanted))
        raise AssertionError(f"found {found}\nexpected {wanted}")


def says(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"the output does not say {part!r}"


def row(n: int) -> list[str]:
    return [str(n), ("eu", "us", "asia")[n % 3], f"item {n}, “größer”", f"{n / 4:.2f}"]


HEADER = ["id", "region", "text", "price"]
TABLE = [row(n) for n in range(ROWS)]


def as_messages(rows: list[list[str]], subject: str) -> list[Message]:
    """Return the messages that `ingest` makes of rows, with the region as the subject's last token."""
    return [
        (
            f"{subject}.{each[1]}",
            json.dumps(dict(zip(HEADER, each, strict=True)), ensure_ascii=False, separators=(",", ":")).encode(),
            {},
        )
        for each in rows
    ]


STORIES: list[Callable[[Newcomer], None]] = []


def story(function: Callable[[Newcomer], None]) -> Callable[[Newcomer], None]:
    STORIES.append(function)
    return function


def types_page(newcomer: Newcomer, page: str) -> None:
    """Save the programs of a page, type its commands, and compare each output that the page shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    output, end, compared = "", 0, 0
    for block in BLOCK.finditer(text):
        kind, code = block.groups()
        before, end = text[end : block.start()], block.end()
        if kind == "python":
            name = PROGRAM.findall(before)[0]
            (newcomer.folder / name).write_text(code, encoding="utf-8")
            if f"python {name}`" in before:  # with or without the folder of the environment
                output = newcomer.types(f"python {name}")
        elif kind == "bash":
            for line in code.splitlines():
                if line.startswith("jetstream-ext serve"):
                    output = (newcomer.folder / "serve.txt").read_text(encoding="utf-8")
                elif not ALREADY_DONE.match(line):
                    output = newcomer.types(line)
        elif kind == "text":
            pattern = re.escape(code).replace("…", ".*")
            assert re.fullmatch(pattern, output), f"{page} shows\n{code}but the output is\n{output}"
            compared += 1
    assert compared, f"{page} shows no output"


@story
def the_readme_as_it_stands(newcomer: Newcomer) -> None:
    types_page(newcomer, "README.md")


@story
def the_quick_start_as_it_stands(newcomer: Newcomer) -> None:
    types_page(newcomer, "docs/quick-start.md")


INGEST = "jetstream-ext ingest items.csv --stream ITEMS --subject 'items.{region}'"


@story
def a_file_is_stored_once_whatever_is_typed(newcomer: Newcomer) -> None:
    newcomer.write("items.csv", HEADER, TABLE)
    says(newcomer.types(f"{INGEST} --create 'items.>'"), "20,000 rows", "20,000 sent")
    expect(messages("ITEMS"), as_messages(TABLE, "items"))
    says(newcomer.types(INGEST), "20,000 already stored", "0 sent")
    expect(len(messages("ITEMS")), ROWS)

    corrected = [*TABLE[:7_000], [TABLE[7_000][0], "eu", "corrected", "1.00"], *TABLE[7_001:]]
    newcomer.write("items.csv", HEADER, corrected)
    says(newcomer.types(INGEST, status=1), "19,999", "--resume", "--again")
    expect(len(messages("ITEMS")), ROWS)
    newcomer.types(f"{INGEST} --resume")
    expect(messages("ITEMS"), as_messages([*TABLE, corrected[7_000]], "items"))

    says(newcomer.types(f"{INGEST} --skip 30000", status=1), "20,000 rows")
    newcomer.types(f"{INGEST} --again")
    expect(len(messages("ITEMS")), 2 * ROWS + 1)


@story
def a_bad_row_is_corrected(newcomer: Newcomer) -> None:
    command = "jetstream-ext ingest bad.csv --stream BAD --subject 'bad.{region}'"
    newcomer.write("bad.csv", HEADER, [*TABLE[:300], ["300", "two words", "", ""], *TABLE[301:500]])
    says(newcomer.types(f"{command} --create 'bad.>'", status=1), "300 rows", "--resume")
    newcomer.write("bad.csv", HEADER, TABLE[:500])
    newcomer.types(f"{command} --resume")
    expect(messages("BAD"), as_messages(TABLE[:500], "bad"))


def odd_messages() -> list[tuple[str, bytes, dict[str, str]]]:
    return [
        ("odd.text", "größer, “quoted”\r\nsecond line".encode(), {"Content-Type": "text/plain", "Kind": "a, b"}),
        ("odd.bytes", bytes(range(256)), {"Kind": "bytes"}),
        ("odd.empty", b"", {}),
        ("odd.json", b'{"a": [1, 2], "b": null}', {"Empty": ""}),
        ("odd.formula", b"=1+1", {}),
    ]


@story
def an_exported_stream_comes_back_whole(newcomer: Newcomer) -> None:
    async def publish(js: JetStreamContext) -> None:
        await jsx.ensure_stream(js, name="ODD", subjects=["odd.>"], allow_direct=True, allow_batched=True)
        for subject, data, headers in odd_messages():
            await js.publish(subject, data, headers=headers or None)

    with_js(publish)
    expect(messages("ODD"), odd_messages())
    for n, name in enumerate(("odd.csv", "odd.jsonl", "odd.parquet", "odd.jsonl.gz", "odd.csv.zst")):
        newcomer.types(f"jetstream-ext export ODD {name}")
        # The same subjects, in a server of their own.
        newcomer.types(
            f"jetstream-ext ingest {name} --stream BACK{n} --create 'back{n}.>' --subject 'back{n}.{{subject}}'"
        )
        expect(messages(f"BACK{n}"), [(f"back{n}.{subject}", *rest) for subject, *rest in odd_messages()])


@story
def a_table_comes_back_as_the_same_table(newcomer: Newcomer) -> None:
    newcomer.write("table.csv", HEADER, TABLE)
    newcomer.types("jetstream-ext ingest table.csv --stream TABLE --create 'table.>' --subject 'table.{region}'")
    newcomer.types("jetstream-ext export TABLE again.csv --rows")
    expect(newcomer.table("again.csv"), [HEADER, *TABLE])


@story
def nothing_is_lost_silently(newcomer: Newcomer) -> None:
    table = pa.table({"subject": ["inf.a", "inf.b"], "value": [1.5, float("inf")]})
    pq.write_table(table, newcomer.folder / "inf.parquet")
    command = "jetstream-ext ingest inf.parquet --stream INF"
    says(newcomer.types(f"{command} --create 'inf.>'", status=1), "value", "--non-finite")
    newcomer.types(f"{command} --non-finite null --resume")
    expect([json.loads(data)["value"] for _, data, _ in messages("INF")], [1.5, None])


@story
def files_in_every_form(newcomer: Newcomer) -> None:
    rows = TABLE[:2_000]
    plain = newcomer.write("plain.csv", HEADER, rows).read_bytes()
    (newcomer.folder / "plain.csv.gz").write_bytes(gzip.compress(plain))
    newcomer.write("semicolons.csv", HEADER, rows, delimiter=";", encoding="utf-16")
    forms = {
        "GZ": "ingest plain.csv.gz",
        "PIPE": "ingest - --format csv",
        "SEMI": "ingest semicolons.csv --delimiter ';' --encoding utf-16",
        "SERVER": "ingest plain.csv -s nats://127.0.0.1:4222",
    }
    for stream, what in forms.items():
        name = stream.lower()
        options = f"--stream {stream} --create '{name}.>' --subject '{name}.{{region}}'"
        given = plain if " - " in what else b""
        says(newcomer.types(f"jetstream-ext {what} {options} --dry-run", given=given), "2,000 to send")
        newcomer.types(f"jetstream-ext {what} {options}", given=given)
        expect(messages(stream), as_messages(rows, name))
    newcomer.types("jetstream-ext export GZ - --format jsonl | cut -d , -f 1 > sequences.txt")
    sequences = (newcomer.folder / "sequences.txt").read_text(encoding="utf-8").split()
    expect(sequences, [f'{{"seq":{n}' for n in range(1, 2_001)])


def advised(text: str, command: str) -> str:
    """Return the line that a text advises to type."""
    found = re.search(rf"jetstream-ext {command} [^\n`';]*", text)
    assert found, f"the output names no command {command!r}"
    return found[0].strip().rstrip(".,")


@story
def the_advice_is_typed_as_it_stands(newcomer: Newcomer) -> None:
    async def plain(js: JetStreamContext) -> None:
        await js.add_stream(name="PLAIN", subjects=["plain.>"])
        await js.publish("plain.a", b"1")
        await js.create_key_value(bucket="PRICES", history=5)

    with_js(plain)
    text = newcomer.types("jetstream-ext export PLAIN advice.csv", status=1)
    newcomer.types(advised(text, "enable"))
    newcomer.types("jetstream-ext export PLAIN advice.csv")
    text = newcomer.types("jetstream-ext enable-bucket PRICES --direct --atomic")
    newcomer.types("jetstream-ext doctor")

    async def transact(js: JetStreamContext) -> None:
        kv = await js.key_value("PRICES")
        async with kvx.transaction(kv) as transaction:
            transaction.put("apple", b"1")
            transaction.put("pear", b"x" * 5_000)

    with_js(transact)
    for at in ("'10 minutes ago'", "2020-01-01", "'2020-01-01 14:30'"):
        expect("apple" in newcomer.types(f"jetstream-ext snapshot PRICES --at {at}"), False)
    text = newcomer.types("jetstream-ext snapshot PRICES")
    says(text, "apple", "pear")
    assert text.count("x") < 500, "a long value is not shortened"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        newcomer = Newcomer(Path(folder))
        with serve(newcomer):
            for each in STORIES:
                print(f"\n=== {each.__name__.replace('_', ' ')}", flush=True)
                each(newcomer)
    print(f"\n{len(STORIES)} stories passed")


if __name__ == "__main__":
    main()
