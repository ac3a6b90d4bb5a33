"""Every message that a user can read is in one file, which is current."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_collected_messages_are_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "_ext" / "messages.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python docs/_ext/messages.py"
