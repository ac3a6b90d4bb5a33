"""The page on traces and metrics names everything that is reported, and its program runs."""

import json
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


def output(words: str, folder: Path) -> str:
    """Run the program of the page that has these words; return what it prints."""
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (program,) = (each for each in programs if words in each)
    with NatsServer() as server:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program.replace("nats://localhost:4222", server.url)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=folder,
            env=dict(os.environ),
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_prints_its_spans(tmp_path: Path) -> None:
    printed = output("otel.instrument()", tmp_path)
    assert "1 b'hello'" in printed
    assert re.findall(r'"name": "(.*)"', printed) == ["send traced.>", "commit TRACED", "handle", "receive TRACED"]
    sent, handled = (
        re.search(rf'"name": "{name}".*?"trace_id": "(\w+)"', printed, re.DOTALL) for name in ("send .*?", "handle")
    )
    assert sent is not None
    assert handled is not None
    assert sent[1] == handled[1]


def test_the_program_prints_its_metrics(tmp_path: Path) -> None:
    printed = output("meter_provider=", tmp_path)
    last = json.loads(printed[printed.rfind("\n{\n") + 1 :])
    metrics = last["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    sums = {each["name"]: each["data"]["data_points"][0].get("value") for each in metrics}
    assert sums["messaging.client.sent.messages"] == 1_000
    assert sums["jetstream_ext.acknowledged.messages"] == 1_000
