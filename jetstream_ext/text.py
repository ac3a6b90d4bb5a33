"""Foreign text as people may safely see it: in errors, in logs and on terminals.

A server, a file or a message may hold escape sequences, which a terminal obeys, and characters that hide or reorder text.
"""

from __future__ import annotations

import logging


def printable(text: str, *, keep_lines: bool = False) -> str:
    r"""Return `text` with every character that is not printable as an escape, such as ``\x1b``.

    Args:
        text: Any text. ``str.isprintable`` decides: control and format characters, separators other than the space, and
            surrogates are not printable.
        keep_lines: Keep line feeds, for text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (keep_lines and char == "\n") else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def get_logger(area: str = "") -> logging.Logger:
    """Return the logger ``jetstream_ext``, or the one of an area of it; the text of every record is printable."""
    logger = logging.getLogger(f"jetstream_ext.{area}" if area else "jetstream_ext")
    logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if not text.isprintable():
        record.msg, record.args = printable(text), ()
    return True
