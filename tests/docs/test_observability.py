"""The page on traces and metrics names everything that is reported, and its program runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

from jetstream_ext.client.telemetry import Count, Kind
from jetstream_ext.testing import NatsServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")


def test_the_page_names_every_span_metric_and_attribute() -> None:
    source = (ROOT / "jetstream_ext" / "otel.py").read_text(encoding="utf-8")
    others = [path.read_text(encoding="utf-8") for path in (ROOT / "jetstream_ext").rglob("*.py")]
    named = set(re.findall(r"\"((?:messaging|server|jetstream_ext)\.[a-z_.]+)\"", source))
    named |= {name for text in others for name in re.findall(r"\"(messaging\.[a-z_.]+)\"", text)}
    named |= {each.value for each in Count}
    assert len(named) > 20
    assert {name for name in named if f"`{name}`" not in PAGE} == set()
    assert {each.value for each in Kind if f"| `{each.value} {{" not in PAGE} == set()


def test_the_program_prints_its_spans(tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (program,) = (each for each in programs if "otel.instrument()" in each)
    with NatsServer() as server:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program.replace("nats://localhost:4222", server.url)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
            env=dict(os.environ),
        )
    assert done.returncode == 0, done.stderr
    assert "1 b'hello'" in done.stdout
    assert re.findall(r'"name": "(.*)"', done.stdout) == ["send traced.>", "commit TRACED", "handle", "receive TRACED"]
    sent, handled = (
        re.search(rf'"name": "{name}".*?"trace_id": "(\w+)"', done.stdout, re.DOTALL) for name in ("send .*?", "handle")
    )
    assert sent is not None
    assert handled is not None
    assert sent[1] == handled[1]
