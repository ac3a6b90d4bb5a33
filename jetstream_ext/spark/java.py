"""Check for a Java that Spark runs on, because Spark itself fails without a clear error.

Standard library only: the noxfile loads this file where the package's dependencies are not installed.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MINIMUM_JAVA = 17  # the oldest major version that Spark 4 runs on

_INSTALL = {  # by sys.platform
    "linux": ("Debian, Ubuntu", "sudo apt install openjdk-17-jre-headless"),
    "darwin": ("macOS", "brew install --cask temurin@21"),
    "win32": ("Windows", "winget install EclipseAdoptium.Temurin.21.JDK"),
}
_COMMANDS = "\n".join(f"    {system:<16} {command}" for system, command in _INSTALL.values())
_ADVICE = f"""\
Spark 4 needs Java {MINIMUM_JAVA} or newer (Spark is tested with {MINIMUM_JAVA} and 21). To install it:
{_COMMANDS}
then open a new terminal, or set JAVA_HOME to its folder"""


class JavaError(Exception):
    """Spark cannot run with the installed Java; the text says how to install another.

    Attributes:
        one_line: The same in one line, with the command for this system only.
    """

    def __init__(self, problem: str, answer: str = "") -> None:
        super().__init__(f"{problem}; it answers:\n{answer}\n{_ADVICE}" if answer else f"{problem}.\n{_ADVICE}")
        system, command = _INSTALL.get(sys.platform, _INSTALL["linux"])
        self.one_line: str = f"{problem}; Spark needs Java {MINIMUM_JAVA} or newer: {command} ({system})"


@dataclasses.dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run with: the path of its launcher, and its major version, such as 17."""

    path: str
    major: int


def require_java() -> Java:
    """Return the Java that Spark would use: the one in `JAVA_HOME` if that is set, else the one on `PATH`.

    Raises:
        JavaError: Java is not installed, does not run, or is older than `MINIMUM_JAVA`.
    """
    path = _find()
    try:
        done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{path} does not run: {error}") from error
    answer = done.stderr + done.stdout
    # Before Java 9 the major version was the second number: 1.8.0 is Java 8.
    version = re.search(r'version "(?:1\.)?(\d+)', answer)
    if done.returncode or version is None:
        # macOS has a launcher that only asks the user to install Java.
        raise JavaError(f"{path} is not a working Java", answer.strip())
    major = int(version[1])
    if major < MINIMUM_JAVA:
        raise JavaError(f"{path} is Java {major}")
    return Java(path, major)


def _find() -> str:
    if home := os.environ.get("JAVA_HOME"):
        path = Path(home) / "bin" / ("java.exe" if sys.platform == "win32" else "java")
        if not path.is_file():
            raise JavaError(f"JAVA_HOME is {home}, but {path} does not exist")
        return str(path)
    if (found := shutil.which("java")) is None:
        raise JavaError("Java was not found: JAVA_HOME is not set, and java is not on PATH")
    return found
