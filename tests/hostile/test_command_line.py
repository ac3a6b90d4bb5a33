"""A hostile server: every command ends, with a documented exit status, and shows neither its escapes nor a secret.

CI runs a sample; ``nox -s full -- hostile`` runs every command with every attack. A failure begins with the case that
failed. To repeat it: ``JETSTREAM_EXT_HOSTILE='texts:7:doctor' python -m pytest tests/hostile/test_command_line.py``.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1] / "safety_net")])

pytest.importorskip("termios")

from attacks import ATTACKS, MARK, SGR, attack
from hostile_proxy import HostileProxy
from library_cases import Case
from terminal import Screen, run_in_terminal
from wait_matrix import fill

from jetstream_ext.testing import ReferenceServer

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
SECRET = "correct-horse"
TIMEOUT = "500ms"  # for each answer
LIMIT = 100.0  # seconds: `ingest` gives up a minute after the last stored row
AT_ONCE = 6 if FULL else 2

Command = Callable[[str, Path], list[str]]


def to_file(url: str, folder: Path) -> list[str]:
    return ["export", "R0", str(folder / "rows.csv"), "--server", url]


def ingest(url: str, folder: Path) -> list[str]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"n":{n}}}\n' for n in range(30)))
    return ["ingest", str(rows), "--stream", "W0", "--subject", "w0.rows", "--server", url]


COMMANDS: dict[str, Command] = {
    "doctor": lambda url, folder: ["doctor", "--need", "direct,atomic", url],
    "doctor-json": lambda url, folder: ["doctor", "--json", url],
    "enable": lambda url, folder: ["enable", "R0", "--direct", "--ttl", "--server", url],
    "enable-bucket": lambda url, folder: ["enable-bucket", "B0", "--spark", "--server", url],
    "snapshot": lambda url, folder: ["snapshot", "B0", "--server", url],
    "snapshot-at": lambda url, folder: ["snapshot", "B0", "--at", "2", "--partial", "--server", url],
    "export": to_file,
    "export-lines": lambda url, folder: ["export", "R0", str(folder / "rows.jsonl"), "--json", "--server", url],
    "export-stdout": lambda url, folder: ["export", "R0", "-", "--format", "csv", "--server", url],
    "ingest": ingest,
    "group": lambda url, folder: ["group", "list", "--bucket", "B0", "--server", url],
    "group-status": lambda url, folder: ["group", "status", "R0", "g", "--bucket", "B0", "--server", url],
    "group-reset": lambda url, folder: [
        "group",
        "reset",
        "R0",
        "g",
        "--bucket",
        "B0",
        "--start",
        "first",
        "--server",
        url,
    ],
    "dlq": lambda url, folder: ["dlq", "list", "R0", "r0.>", "--server", url],
    "dlq-show": lambda url, folder: ["dlq", "show", "R0", "r0.>", "1", "--server", url],
    "dlq-redrive": lambda url, folder: ["dlq", "redrive", "R0", "r0.>", "--bucket", "B0", "--server", url],
    "dlq-drop": lambda url, folder: ["dlq", "drop", "R0", "1", "--server", url],
}
DATA = {"export-lines", "doctor-json"}
"""Their standard output is data for another program: it is not the terminal here."""


def parts() -> list[list[Case]]:
    """Return the cases of each test: the ones to repeat, or all with one attack, or a few."""
    if repeated := os.environ.get("JETSTREAM_EXT_HOSTILE"):
        return [[case for case in map(Case.parse, repeated.split(",")) if case.call in COMMANDS]]
    if FULL:
        # `ingest` may take a minute each time.
        calls = {0: COMMANDS, **dict.fromkeys(range(1, 6), COMMANDS.keys() - {"ingest"})}
        return [[Case(name, seed, call) for seed in calls for call in sorted(calls[seed])] for name in ATTACKS]
    sample = "refusal:0:enable-bucket same-answer:0:doctor texts:4:doctor texts:5:snapshot texts:6:export texts:9:export-lines texts:7:export-stdout"
    return [
        [
            Case.parse(text)
            for text in f"{sample} errors:0:doctor texts:1:group-status texts:2:dlq texts:3:dlq-show texts:10:group errors:1:dlq-redrive refusal:1:snapshot texts:8:snapshot-at second-info:5:doctor status:5:doctor texts:1:enable".split()
        ]
    ]


async def run_case(case: Case, folder: Path) -> Screen:
    """Run the command of a case, with the secret given in one of three ways."""
    plain = case.seed % 2 == 1
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("NATS_", "COLUMNS", "LINES"))}
    settings |= {"XDG_CONFIG_HOME": str(folder), "NATS_TIMEOUT": TIMEOUT, "PYTHONWARNINGS": "error::RuntimeWarning"}
    settings |= {"TERM": "dumb", "NO_COLOR": "1"} if plain else {"TERM": "xterm-256color"}
    async with ReferenceServer() as server:
        await fill(server)  # type: ignore[arg-type]
        async with HostileProxy(server.port, attack(case.attack, case.seed), armed=True) as proxy:
            url, given = proxy.url, list[str]()
            match case.seed % 3:
                case 0:
                    url = f"nats://alice:{SECRET}@{proxy.place}"
                case 1:
                    given = ["--user", "alice", "--password", SECRET]
                case 2:
                    settings |= {"NATS_USER": "alice", "NATS_PASSWORD": SECRET}
            command = [*COMMANDS[case.call](url, folder), *given]
            with (folder / "stdout").open("wb") as stdout:
                return await run_in_terminal(
                    "jetstream_ext.cli",
                    *command,
                    folder=folder,
                    environment=settings,
                    timeout=LIMIT,
                    stdout=stdout.fileno() if case.call in DATA else None,
                )


@pytest.mark.parametrize("part", parts(), ids=lambda part: part[0].attack if part else "none")
async def test_every_command_ends_and_shows_neither_escapes_nor_secrets(tmp_path: Path, part: list[Case]) -> None:
    waiting, wrong = iter(part), list[str]()

    async def work(folder: Path) -> None:
        for case in waiting:
            own = folder / str(case)
            own.mkdir(parents=True)
            screen = await run_case(case, own)
            if found := screen.wrong(secret=SECRET, plain=case.seed % 2 == 1):
                wrong.append(f"{case}: {found}")

    await asyncio.gather(*(work(tmp_path / str(n)) for n in range(AT_ONCE)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (f"{SGR}{MARK}", "obeys"),
        ("\x1b]0;title\x07", "obeys"),
        (f"{MARK}\x9b2J", "obeys"),
        ("\u202egnp.exe", "obeys"),
        (f"no connection to nats://alice:{SECRET}@h", "secret"),
        ("Traceback (most recent call last):", "own words"),
        ("\x1b[1;31mbold red\x1b[0m \x1b[?25l\x1b[2K\x1b[1A", ""),
    ],
)
def test_the_campaign_finds_what_is_wrong(written: str, found: str) -> None:
    wrong = Screen(1, written).wrong(secret=SECRET, plain=False)
    assert found in wrong
    assert bool(found) == bool(wrong)


def test_a_plain_terminal_gets_no_sequence_at_all() -> None:
    assert "obeys" in Screen(0, "\x1b[1mbold\x1b[0m").wrong(secret=SECRET, plain=True)


async def test_the_campaign_reads_what_a_program_writes_to_its_terminal() -> None:
    screen = await run_in_terminal("timeit", "-n", "1", "-r", "1", "print('seen', __import__('sys').stdout.isatty())",
                                   environment=os.environ, timeout=60)  # fmt: skip
    assert screen.status == 0
    assert "seen True" in screen.output
    slow = await run_in_terminal(
        "timeit", "-n", "1", "import time; time.sleep(60)", environment=os.environ, timeout=0.2
    )
    assert slow.wrong(secret=SECRET, plain=True).startswith("does not end")


def _names() -> Iterator[str]:
    from jetstream_ext.cli.__main__ import cli

    yield from cli.commands


def test_every_command_that_connects_meets_the_campaign(tmp_path: Path) -> None:
    assert {command("nats://host", tmp_path)[0] for command in COMMANDS.values()} | {"demo", "serve"} == set(_names())
