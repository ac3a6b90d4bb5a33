"""The page "CSV and Parquet" shows what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_tools import Run

from jetstream_ext.testing import NatsServer

PAGE = Path(__file__).parents[2] / "docs" / "csv-and-parquet.md"
BLOCK = re.compile(r"^```(bash|text|none)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_page_print_what_it_shows(
    own_server: NatsServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (_, content), *blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    Path("sales.csv").write_text(content)
    assert [kind for kind, _ in blocks] == ["bash", "text"] * 7
    for (_, command), (_, output) in zip(blocks[::2], blocks[1::2], strict=True):
        program, *arguments = shlex.split(command)
        assert program == "jetstream-ext"
        done = run(*arguments, url=own_server.url)
        shown = done.stderr + done.stdout if "COPY" in arguments else done.stdout + done.stderr
        pattern = re.escape(output).replace("…\\ s", r"\d+\.\d s")
        assert re.fullmatch(pattern, shown), shown
    assert Path("table.csv").read_text().replace('"', "") == content
