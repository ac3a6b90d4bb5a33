"""The documented example prints the documented output."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_example_prints_the_documented_output() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "key_value.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    shown = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "key-value.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(shown) >= 7
    assert "".join(shown) == done.stdout
