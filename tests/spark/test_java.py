"""The check for a Java that Spark can run on."""

import sys
from pathlib import Path
from typing import Any

import pytest

from jetstream_ext.spark.java import JavaError, require_java

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins for java are shell scripts")


def install(home: Path, answer: str, *, status: int = 0) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{answer}\nEND\nexit {status}\n")
    java.chmod(0o755)
    return java


def test_the_version_is_parsed(cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, major in [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6)', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "25-ea" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Dversion=1\nopenjdk version "17.0.1" 2021-10-19', 17),
    ]:
        home = tmp_path / f"{major}-{len(answer)}"
        with cell(answer, major):
            path = install(home, answer)
            monkeypatch.setenv("JAVA_HOME", str(home))
            java = require_java()
            assert (java.path, java.major) == (str(path), major)


def test_java_home_is_preferred_to_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "home", 'openjdk version "21" 2023-09-19')
    on_path = install(tmp_path / "path", 'openjdk version "17" 2021-09-14')
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=":")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert require_java().major == 21
    monkeypatch.delenv("JAVA_HOME")
    assert require_java().path == str(on_path)


def test_an_unusable_java_is_named_with_the_fix(cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, status, message in [
        ('java version "1.8.0_402"', 0, "is Java 8"),
        ('openjdk version "11.0.22" 2024-01-16', 0, "is Java 11"),
        ("Unable to locate a Java Runtime.", 1, "not a working Java(?s:.*)Unable to locate"),
        ("hello", 0, "not a working Java(?s:.*)hello"),
    ]:
        home = tmp_path / f"{len(answer)}"
        with cell(answer, status, message):
            install(home, answer, status=status)
            monkeypatch.setenv("JAVA_HOME", str(home))
            with pytest.raises(JavaError, match=f"{message}(?s:.*)Java 17 or newer(?s:.*)apt install"):
                require_java()


def test_a_missing_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(JavaError, match="JAVA_HOME is not set, and java is not on PATH"):
        require_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaError, match=r"JAVA_HOME is .*, but .* does not exist"):
        require_java()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("")
    with pytest.raises(JavaError, match="does not run"):
        require_java()
