"""Text that people read: foreign text made safe for errors, logs and terminals; hints for misspelt names; numbers.

A server, a file or a message may hold escape sequences, which a terminal obeys, and characters that hide or reorder text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Literal

Area = Literal["atomic", "cli", "client", "direct", "fast", "ingest", "kv", "log", "spark"]
"""The part of the package that a logger is for."""


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


def did_you_mean(name: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return "; did you mean 'max_age'?" for the known name that is most like `name`, or "" if none is like it.

    `synonyms` are the known names of what others call differently.
    """
    from difflib import get_close_matches  # only errors need it

    given, names = str(name).casefold(), {each.casefold(): each for each in reversed(list(known))}
    found = [(synonyms or {}).get(given, "").casefold(), *get_close_matches(given, names, n=1, cutoff=0.6)]
    return next((f"; did you mean {names[each]!r}?" for each in found if each in names), "")


def numbered(first: int, last: int, noun: str = "message") -> str:
    """Return "message 7", or "messages 7 to 9" for more than one."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def counted(number: int, noun: str) -> str:
    """Return "1 message", or "2,000 messages"."""
    return f"{number:,} {plural(number, noun, f'{noun}s')}"


def plural(number: int, one: str, many: str) -> str:
    """Return the form of a word for a number: `one` for 1, and `many` for any other."""
    return one if number == 1 else many


def safe_text(error: BaseException) -> str:
    """Return the text of an error, or "" if it may quote what is never logged or reported: payloads, values of headers.

    Only the texts of this library and of nats-py are known. Those of a ValueError quote what it refuses.
    """
    known = type(error).__module__.partition(".")[0] in ("jetstream_ext", "nats") and not isinstance(error, ValueError)
    return str(error) if known else ""


def get_logger(area: Area) -> logging.Logger:
    """Return the logger ``jetstream_ext.<area>``; the text of every record is printable."""
    logger = logging.getLogger(f"jetstream_ext.{area}")
    logger.addFilter(_make_printable)
    return logger


def log_state(logger: logging.Logger, source: str, event: str, why: object = "", /, **fields: object) -> None:
    """Log a change of state as one DEBUG record: ``batch b1: NEW -> STARTING (a message is sent); sent=1``.

    A formatter finds the parts in attributes of the record, each named ``jetstream_`` and its key. Never pass payloads, values
    of headers or credentials. Nothing is formatted while the logger is off.

    Args:
        logger: The logger of the area.
        source: What has changed: its kind and its name, such as ``batch b1`` or ``stream 'ORDERS'``.
        event: ``BEFORE -> AFTER``, or what happened while the state stays.
        why: What has caused it; of an exception, its `safe_text`, or its class.
        fields: What belongs to it: numbers, names, durations; of an exception, its class. None and "" are left out.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        return
    known = {name: _plain(value) for name, value in fields.items() if value is not None and value != ""}
    reason = printable(safe_text(why) or type(why).__name__) if isinstance(why, BaseException) else printable(str(why))
    text = f"{source}: {event}" + (f" ({reason})" if reason else "")
    if known:
        text += "; " + ", ".join(f"{name}={value}" for name, value in known.items())
    parts = {"source": printable(source), "event": event, **({"why": reason} if reason else {}), **known}
    logger.debug("%s", text, extra={f"jetstream_{name}": value for name, value in parts.items()}, stacklevel=2)


def _plain(value: object) -> str | int | float:
    """Return a value that every formatter and exporter of log records takes."""
    if isinstance(value, int | float):
        return value
    return type(value).__name__ if isinstance(value, BaseException) else printable(str(value))


def _make_printable(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if not text.isprintable():
        record.msg, record.args = printable(text), ()
    return True
