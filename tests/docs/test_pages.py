"""The programs of the documentation, typed as they stand into ``python -m asyncio``, print what the pages say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
URL = "nats://localhost:4222"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```{code-block} python\n:caption: (\S+)\n\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Python writes ">>> " in another thread than the one that runs the program, so it could come in the middle of a line.
# From Python 3.13 on, that prompt takes blocks from a terminal only: give it back the reading of lines it had before.
PROMPT = """
import code, runpy, sys
sys.ps1 = sys.ps2 = ""
if sys.version_info >= (3, 13):
    from _pyrepl.console import InteractiveColoredConsole
    InteractiveColoredConsole.runsource = code.InteractiveConsole.runsource
runpy.run_module("asyncio", run_name="__main__", alter_sys=True)
"""

SAVED = re.compile(r"^Save this program as `(\S+)`.*?\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OF_FILES = {"test-with-faults"}
OF_PROGRAMS = [DOCS / "quick-start.md", DOCS / "web-service.md", ROOT / "README.md"]
TYPED = [DOCS / "tutorial.md"] + [
    path for path in sorted((DOCS / "how-to").glob("*.md")) if path.stem not in {"index", *OF_FILES}
]


@pytest.fixture
def empty_server() -> Iterator[NatsServer]:
    """A server of the page's own: pages choose plain names."""
    with NatsServer() as server:
        yield server


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # as in an activated environment
    return {**os.environ, "PATH": path}


def typed(program: str, folder: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Type a program at Python's prompt, which shows nothing; return what it printed, and what went wrong."""
    done = subprocess.run(
        [sys.executable, "-c", PROMPT],
        input=program,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        cwd=folder,
        env=environment,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(
    page: Path, empty_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    program = "\n".join(code for language, code in blocks if language == "python")
    assert program
    check_blank_lines(program)
    given = request.getfixturevalue("spark_environment") if "pyspark" in program else environment()
    out, err = typed(program.replace(URL, empty_server.url), tmp_path, given)
    assert not re.search(r"^(Traceback|\w+Error:)", err, re.MULTILINE), err
    where = 0
    for text in (text for language, text in blocks if language == "text"):
        found = out.find(text, where)
        assert found >= 0, f"the page says\n{text}\nprinted was\n{out[where:]}\n{err}"
        where = found + len(text)


BEFORE_SPARK = """
import nats, jetstream_ext as jsx, jetstream_ext.kv as kvx
from pyspark.sql import SparkSession

js = (await nats.connect("nats://localhost:4222")).jetstream()
features = {"allow_direct": True, "allow_batched": True, "allow_atomic": True}
stream = await jsx.ensure_stream(js, name="ORDERS", subjects=["orders.*"], **features)
stream = await jsx.ensure_stream(js, name="BILLED", subjects=["billed.>", "_spark.BILLED.>"], **features)
bucket = await kvx.ensure_bucket(js, "PRICES", spark=True)
stream = await jsx.ensure_stream(js, name="TALLY", subjects=["tally.>"], **features)
acks = [await js.publish("orders.eu", b"1"), await js.publish("orders.us", b"2")]
acks = [await js.publish("tally.state.a.eu", b"%d" % n) for n in range(3)]
acks = [await js.publish("tally.state.a.us", b"", headers={"KV-Operation": "DEL"})]
spark = SparkSession.builder.getOrCreate()
"""
AFTER_SPARK = """
query.processAllAvailable()
query.stop()
save(rows, 0)
save(rows, 0)
writer = changes.writeStream.format("memory").queryName("changes").trigger(availableNow=True)
writer.option("checkpointLocation", "/checkpoints/changes").start().awaitTermination()
billed = await jsx.DirectGet(js, "BILLED").scan(subject="billed.>").to_list()
print(sorted(message.subject for message in billed))
print(counts.collect())
print(now.count(), "values,", spark.table("changes").count(), "changes")
spark.stop()
"""


def test_the_spark_page(empty_server: NatsServer, tmp_path: Path, spark_environment: dict[str, str]) -> None:
    """Its pieces of code run together: they read and write, and what is stored twice under one name is there once."""
    blocks = BLOCK.findall((DOCS / "spark.md").read_text(encoding="utf-8"))
    program = "\n".join([BEFORE_SPARK, *(code for language, code in blocks if language == "python"), AFTER_SPARK])
    program = program.replace(URL, empty_server.url).replace("/checkpoints", str(tmp_path))
    out, err = typed(program, tmp_path, spark_environment)
    assert not re.search(r"^(Traceback|\w+Error:)", err, re.MULTILINE), err
    assert "['billed.orders.eu', 'billed.orders.us', 'billed.refunds', 'billed.refunds']" in out
    assert "[Row(subject='tally.state.a.eu', value='2')]" in out
    assert "2 values, 2 changes" in out


def check_blank_lines(program: str) -> None:
    """A prompt takes an indented block for ended at a blank line only; its error would come some lines later."""
    for before, after in re.findall(r"^( +\S.*)\n(\S.*)$", program, re.MULTILINE):
        assert after.startswith((")", "]", "}", '"""', "except", "finally", "else", "elif")), f"{before}\n{after}"


@pytest.mark.parametrize("name", sorted(OF_FILES))
def test_a_page_of_files(name: str, tmp_path: Path) -> None:
    text = (DOCS / "how-to" / f"{name}.md").read_text(encoding="utf-8")
    files = dict(FILE.findall(text))
    assert set(files) == {"app.py", "test_app.py"}
    for file, code in files.items():
        (tmp_path / file).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly"],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout
    (said,) = re.findall(r"```text\n(.*)\n```", text)
    assert said in done.stdout


def test_pages_can_be_typed_one_after_the_other() -> None:
    """Into one server: no page uses a stream or bucket of another, or of the README."""
    made: dict[str, str] = {}
    for page in [*TYPED, *OF_PROGRAMS]:
        text = page.read_text(encoding="utf-8")
        for name in set(re.findall(r"""\b(?:name|bucket)="(\w+)\"""", text)):
            assert made.setdefault(name, page.name) == page.name, name
    assert len(made) > 8


def test_every_page_is_run() -> None:
    pages = {path.stem for path in (DOCS / "how-to").glob("*.md")} - {"index"}
    assert pages == {path.stem for path in TYPED if path.stem != "tutorial"} | OF_FILES
    listed = (DOCS / "how-to" / "index.md").read_text(encoding="utf-8")
    assert all(f"\n{page}\n" in listed for page in pages)


INDEX = {
    "snapshot": "how-to/key-value-at-a-point-in-time.md",
    "transaction": "how-to/transactions.md",
    "publish": "fast-ingest.md",
    "exactly once": "log.md",
    "dead letter": "how-to/dead-letters.md",
    "ttl": "ttl-consumers-sources.md",
    "csv": "csv-and-parquet.md",
    "export": "csv-and-parquet.md",
    "group": "groups.md",
    "batch": "atomic-batches.md",
    "table": "tables.md",
    "mirror": "ttl-consumers-sources.md",
    "source": "ttl-consumers-sources.md",
    "opentelemetry": "observability.md",
    "metrics": "observability.md",
    "pytest": "testing-your-application.md",
    "permission": "permissions.md",
    "cli": "command-line.md",
}


def test_a_search_finds_the_page_about_a_word_first() -> None:
    """Sphinx's search puts the main index entry before every title and text."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCS.glob("**/*.md")}
    for word, page in INDEX.items():
        entry = re.compile(rf"^```{{index}}.* ! {word}(,|$)", re.MULTILINE)
        assert [path for path, text in texts.items() if entry.search(text)] == [DOCS / page], word


def saved(page: Path, folder: Path, url: str) -> list[Path]:
    """Write the programs of a page into the files that it names."""
    programs = []
    for name, code in SAVED.findall(page.read_text(encoding="utf-8")):
        programs.append(folder / name)
        programs[-1].write_text(code.replace(URL, url), encoding="utf-8")
    return programs


def outputs(page: Path) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language == "text"]


def says(page: str, printed: str) -> bool:
    """Return whether a program printed what a page says; … on the page is any text."""
    return re.fullmatch(re.escape(page).replace("…", ".*"), printed) is not None


def test_the_program_of_the_readme(empty_server: NatsServer, tmp_path: Path) -> None:
    page = ROOT / "README.md"
    (program,) = saved(page, tmp_path, empty_server.url)
    done = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stderr
    (output,) = outputs(page)
    assert says(output, done.stdout), done.stdout


@contextlib.contextmanager
def web_service(folder: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    """Run the service of the page for the duration of a block, on a free port."""
    (program,) = saved(DOCS / "web-service.md", folder, url)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "uvicorn", "service:app", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=program.parent,
        env=environment() | {"NATS_URL": url},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_web_service(empty_server: NatsServer, tmp_path: Path) -> None:
    """It answers as the page says, and stores at its end what was still in memory."""
    page = DOCS / "web-service.md"
    commands = [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    assert "uvicorn service:app\n" in commands
    with web_service(tmp_path, empty_server.url) as service:
        assert service.stderr is not None
        places = (re.search(r"running on http://127\.0\.0\.1:(\d+)", line) for line in service.stderr)
        port = next(int(place[1]) for place in places if place is not None)
        answers = "".join(answer(line, port) for line in commands[-1].splitlines())
        assert answers == outputs(page)[0]
        service.terminate()
        log = service.communicate(timeout=60)[1]
    assert "Application shutdown complete" in log, log
    assert asyncio.run(last_message(empty_server.url, "PAGEVIEWS")) == ("pageviews.3", b"from Lagos")


def test_the_web_service_ends_without_a_nats_server(tmp_path: Path) -> None:
    """Within the time of the page, also after Ctrl-C, and with the reason."""
    with socket.socket() as held, contextlib.ExitStack() as stack:
        held.bind(("127.0.0.1", 0))  # no server listens on it
        service = stack.enter_context(web_service(tmp_path, f"nats://127.0.0.1:{held.getsockname()[1]}"))
        assert service.stderr is not None
        assert any("Connect call failed" in line for line in service.stderr)
        service.send_signal(signal.SIGINT)
        log = service.communicate(timeout=300)[1]
    assert "ConnectionError: no connection to NATS within 10 s" in log, log
    assert "Application startup failed. Exiting." in log, log


def answer(command: str, port: int) -> str:
    """Do what a line with curl does, which not every machine has; return the answer as a line."""
    _, *words, url = shlex.split(command)
    options = dict(zip(words[::2], words[1::2], strict=True))
    data = options["-d"].encode() if "-d" in options else None
    request = urllib.request.Request(url.replace("8000", str(port)), data, method=options.get("-X", "GET"))
    with urllib.request.urlopen(request, timeout=60) as found:
        return f"{found.read().decode()}\n"


async def last_message(url: str, stream: str) -> tuple[str, bytes]:
    async with await nats.connect(url) as nc:
        message = await jsx.DirectGet(nc.jetstream(), stream).get_last(">")
    return message.subject, message.data
