"""The entry point of the command line."""

from __future__ import annotations

import importlib.util
import io
import sys


def main() -> None:
    """Run the command line; the exit status is 0, 1 (failed), 2 (wrong usage) or 130 (stopped with Ctrl-C)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for terminals that lack a character
            stream.reconfigure(errors="backslashreplace")
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"jetstream-ext: needs {' and '.join(missing)}: pip install 'nats-jetstream-ext[cli]'\n")
        sys.exit(1)
    try:
        from jetstream_ext.cli.app import cli  # it imports click and rich

        cli(prog_name="jetstream-ext")
    except KeyboardInterrupt:  # before the group of commands handles it
        sys.exit(130)


if __name__ == "__main__":
    main()
