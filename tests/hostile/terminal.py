"""Run a program in a terminal of 80 columns, and judge what it writes there."""

import asyncio
import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attacks import SGR

# What rich writes: colours, the cursor shown or hidden, moved up, and lines cleared.
_RICH = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[hl]|[0-9]*A|2K|1;?[0-9]*H)")


@dataclass(frozen=True, slots=True)
class Screen:
    """What a program did: its exit status (None: it did not end in time) and all that it wrote."""

    status: int | None
    output: str

    def wrong(self, *, secret: str, plain: bool) -> str:
        """Return what no hostile server may cause, or an empty text; a `plain` terminal has no colours."""
        if self.status is None:
            return f"does not end; so far: {self.output[-1000:]!r}"
        if self.status not in (0, 1):
            return f"ends with status {self.status}: {self.output[-2000:]!r}"
        if "Traceback" in self.output or (self.status and not self.output.strip()):
            return f"fails without its own words: {self.output[-2000:]!r}"
        if secret in self.output:
            return f"shows a secret: {self.output!r}"
        text = self.output if plain else _RICH.sub("", self.output)
        text = re.sub(r"[\r\n]", "", text)
        if SGR in self.output or not text.isprintable():
            odd = next((n for n, char in enumerate(text) if not char.isprintable()), 0)
            return f"shows what the terminal obeys: {text[max(0, odd - 100) : odd + 100]!r}"
        return ""


async def run_in_terminal(
    *command: str,
    environment: Mapping[str, str],
    timeout: float,
    stdout: int | None = None,
    folder: Path | None = None,
) -> Screen:
    """Run a Python module with a terminal as standard input, output (unless it is `stdout`) and error."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    written, closed = bytearray(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # EIO: the program has ended
            data = b""
        written.extend(data[: (1 << 22) - len(written)])
        if not data:
            loop.remove_reader(master)
            closed.set()

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command),
        stdin=slave,
        stdout=stdout or slave,
        stderr=slave,
        env=dict(environment),
        cwd=folder,
    )
    os.close(slave)
    loop.add_reader(master, read)
    status: int | None = None
    try:
        async with asyncio.timeout(timeout):
            status = await process.wait()
            await closed.wait()
    except TimeoutError:
        if process.returncode is None:
            process.kill()
            await process.wait()
    finally:
        loop.remove_reader(master)
        os.close(master)
    return Screen(status, written.decode(errors="backslashreplace"))
