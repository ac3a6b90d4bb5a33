"""What a type checker says about programs that use this library: one run of mypy for all of them."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# The pages that tests/docs/test_pages.py types at a prompt. Spark's own stubs lack some of what its pages use.
PAGES = [
    ROOT / "docs" / "tutorial.md",
    *(page for page in sorted((ROOT / "docs" / "how-to").glob("*.md")) if "spark" not in page.stem),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What is typed at a prompt has few annotations, and may define a function again.
OF_A_PAGE = """\
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-redefinition, disable-error-code="no-redef"
async def page() -> None:
"""

# Each line with a comment has that error, and no other line has one.
PROGRAM = """
from datetime import timedelta

from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType, StreamConfig, StreamSource
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import BatchError


async def streams(js: JetStreamContext) -> None:
    await jsx.ensure_stream(js, StreamConfig(name="S"), allow_direct=True)
    await jsx.ensure_stream(js, name="S", subjects=["s.>"], storage="memory", max_age=60, retention="limits")
    await jsx.ensure_stream(js, name="S", storage=StorageType.FILE, sources=[StreamSource(name="T")])
    await jsx.ensure_stream(js, name="S", max_agee=60)  # Unexpected keyword argument "max_agee" for "ensure_stream"; did you mean "max_age"?
    await jsx.ensure_stream(js, name="S", allow_atomics=True)  # Unexpected keyword argument "allow_atomics"
    await jsx.ensure_stream(js, name="S", subjects="s.>")  # incompatible type "str"; expected
    await jsx.ensure_stream(js, name="S", storage="disk")  # incompatible type "Literal['disk']"
    await jsx.ensure_stream(js, "S")  # incompatible type "str"; expected "StreamConfig | None"


async def buckets(js: JetStreamContext) -> KeyValue:
    await kvx.ensure_bucket(js, "B", history=5, direct=True, atomic=True, spark=True, ttl=60, storage="memory")
    await kvx.ensure_bucket(js, "B", limit_marker_ttl=timedelta(minutes=1), replicas=3, max_bytes=1 << 20)
    await kvx.ensure_bucket(js, "B", histroy=5)  # Unexpected keyword argument "histroy" for "ensure_bucket"; did you mean "history"?
    await kvx.ensure_bucket(js, "B", history="5")  # incompatible type "str"; expected "int | None"
    await kvx.ensure_bucket(js, KeyValueConfig("B"))  # incompatible type "KeyValueConfig"; expected "str"
    return await kvx.ensure_bucket(js, "B")


async def areas(js: JetStreamContext, kv: KeyValue) -> jsx.kv.KeyValueSnapshot:
    jsx.log.LogReader(js, "S")
    jsx.otel.instrument()
    jsx.spark.lag, jsx.arrow.to_arrow, jsx.errors.ServerError
    await jsx.kv.get_manyy(kv, ["a"])  # Module has no attribute "get_manyy"
    jsx.nothing  # Module has no attribute "nothing"
    return await jsx.kv.snapshot(kv)


async def workers(js: JetStreamContext, reader: jsx.log.LogReader) -> None:
    def count(msg: jsx.StoredMsg, state: jsx.log.State) -> tuple[str, bytes]:
        state[msg.subject] = b"%d" % (int(state.get(msg.subject, b"0")) + 1)
        state["sum"] = 1  # Incompatible types in assignment (expression has type "int", target has type "bytes")
        state.put(msg.subject, b"", ttl=timedelta(minutes=1))
        return "counts", state.pop("sum", b"0")

    async def count_lists(msgs: list[jsx.StoredMsg], state: jsx.log.State) -> None:
        state.update({msg.subject: msg.data for msg in msgs})

    def three(msg: jsx.StoredMsg, state: jsx.log.State, more: int) -> None: ...

    await jsx.log.exactly_once(reader, "T", count, name="w", prefix="at", state="state")
    await jsx.log.exactly_once(reader, "T", count_lists, name="w", prefix="at", state="state", grouped=True)
    await jsx.log.exactly_once(
        reader, "T", lambda msg, state: [("t", msg.data + state["a"])], name="w", prefix="at", state="state"
    )
    await jsx.log.exactly_once(reader, "T", lambda msg: ("t", msg.data), name="w", prefix="at")
    await jsx.log.exactly_once(reader, "T", three, name="w", prefix="at", state="state")  # has incompatible type "Callable[[StoredMsg, State, int], None]"
    await jsx.log.exactly_once(reader, "T", count, name="w", prefix="at", state=b"state")  # incompatible type "bytes"; expected "str | None"


async def acks(js: JetStreamContext) -> tuple[int, int | None]:
    async with jsx.AtomicBatch(js) as batch:
        await batch.add("s.a", b"1")
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add("s.a", b"1", msg_idd="1")  # Unexpected keyword argument "msg_idd" for "add" of "FastPublisher"
    try:
        return batch.ack.seq, publisher.ack.batch_size
    except BatchError as error:
        return 0, error.ack.batch_size  # Item "None" of "BatchAck | None" has no attribute "batch_size"
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The errors of `mypy --strict` by program and line."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)):
        if "import jetstream_ext" in block:  # a whole program; others continue one, or are for Spark's own `spark`
            (folder / f"readme_{number}.py").write_text(block, encoding="utf-8")
    for page in PAGES:
        blocks = [block for block in BLOCK.findall(page.read_text(encoding="utf-8")) if "spark" not in block]
        if blocks:
            code = textwrap.indent("\n".join(blocks), "    ")
            (folder / f"page_{page.stem.replace('-', '_')}.py").write_text(OF_A_PAGE + code, encoding="utf-8")
    programs = sorted(folder.glob("*.py"))
    assert len(programs) >= 14
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--hide-error-context", "--no-error-summary"]
    done = subprocess.run(
        [*command, "--cache-dir", str(folder / "cache"), *map(str, programs)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors: dict[str, dict[int, str]] = {path.stem: {} for path in programs}
    for path, line, text in re.findall(r"^(.*?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        errors[Path(path).stem][int(line)] = text
    return errors


def test_a_type_checker_finds_misspelt_options_and_wrong_values(said: dict[str, dict[int, str]]) -> None:
    wanted = {n: line.partition("  # ")[2] for n, line in enumerate(PROGRAM.splitlines(), 1) if "  # " in line}
    assert said["program"].keys() == wanted.keys(), said["program"]
    assert [text for line, text in said["program"].items() if wanted[line] not in text] == []
    assert len(wanted) == 15


def test_the_programs_of_the_readme_and_of_the_pages_are_typed(said: dict[str, dict[int, str]]) -> None:
    assert {name: errors for name, errors in said.items() if name != "program" and errors} == {}
