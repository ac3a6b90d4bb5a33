"""Play a newcomer: type the README and the Quick start as they stand, then work with files on the command line.

`python -m nox -s newcomer` runs this with the Python of an environment that has nothing but the wheel and the extras that
the pages name. Each story compares what a stream holds, or what a file holds, row by row.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
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
from nats.js import JetStreamContext

import jetstream_ext as jsx

ROOT = Path(__file__).parents[2]
PORT = 4222  # of the pages
ROWS = 20_000
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
        print(text, end="", flush=True)
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
            if f"`python {name}`" in before:
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
