"""The options that a user gave a format: looked up by name whatever the case, parsed, and refused by name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NoReturn, TypeVar

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.subjects import check_name

# What Spark itself puts there: the arguments of load().
_LOADED: Final = ("path", "paths")
# People will try these; the value is a secret and must appear nowhere.
_INLINE_SECRETS: Final = {
    "password": "passwordEnv",
    "pass": "passwordEnv",
    "token": "tokenEnv",
    "creds": "credsFile",
    "credentials": "credsFile",
    "nkey": "nkeyFile",
    "seed": "nkeyFile",
}
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_Value = TypeVar("_Value")


class OptionError(ValueError):
    """An option is missing, unknown, malformed or in conflict with another; the text names it and the fix."""


class Given:
    """The options as given.

    Args:
        options: As Spark hands them over.
        known: The options that have a meaning here.
        elsewhere: Options that have one in another place, and what to say about them.

    Raises:
        OptionError: One of them is unknown here. Values of unknown options are not repeated: they may be secrets.
    """

    def __init__(
        self, options: Mapping[str, str], *, known: Collection[str], elsewhere: Mapping[str, str] | None = None
    ) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        spelt = {name.lower(): name for name in (*known, *_LOADED)}
        reasons = {name.lower(): reason for name, reason in (elsewhere or {}).items()}
        for name in self._options.keys() - spelt.keys():
            if name in reasons:
                self.fail(name, reasons[name])
            if name in _INLINE_SECRETS:
                self.fail(name, f"secrets are given by reference; use {_INLINE_SECRETS[name]!r}")
            close = difflib.get_close_matches(name, spelt, n=1)
            hint = f"did you mean {spelt[close[0]]!r}?" if close else f"known are: {', '.join(known)}"
            self.fail(name, f"there is no such option; {hint}")

    def fail(self, option: str, problem: str) -> NoReturn:
        """Raise the error about an option."""
        raise OptionError(f"option {option!r}: {problem}")

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._options

    def exclude(self, *names: str) -> None:
        """Refuse more than one of `names`."""
        both = [name for name in names if name in self]
        if len(both) > 1:
            self.fail(both[0], f"it cannot go together with {both[1]!r}; give one of them")

    def need(self, name: str, other: str) -> None:
        """Refuse `name` without `other`."""
        if name in self and other not in self:
            self.fail(name, f"it needs {other!r} as well")

    def take(self, name: str, parse: Callable[[str], _Value], default: _Value) -> _Value:
        """Return the parsed value of an option; a ValueError of `parse` becomes an error about it."""
        text = self._options.get(name.lower())
        if text is None:
            return default
        try:
            return parse(text)
        except (ValueError, BadSubjectError) as error:
            raise OptionError(f"option {name!r}: {error}") from None

    def names(self, option: str, check: Callable[[str], None]) -> tuple[str, ...]:
        """Return the comma-separated, checked names of an option, each once."""

        def parse(text: str) -> tuple[str, ...]:
            return _checked((part.strip() for part in text.split(",")), check)

        return self.take(option, parse, ())

    def streams(self) -> tuple[str, ...]:
        """Return the names of the streams, from the option `stream` or the arguments of ``load``."""

        def check(name: str) -> None:
            check_name(name, "stream name")

        streams = self.names("stream", check)
        loaded = self.names("path", check) or self.take("paths", lambda text: _checked(json.loads(text), check), ())
        if streams and loaded and streams != loaded:
            self.fail("stream", f"it says {','.join(streams)}, but load() says {','.join(loaded)}; give one of them")
        if not streams and not loaded:
            self.fail("stream", "it is missing; give the name of the stream, here or as in load('ORDERS')")
        return streams or loaded


def _checked(names: Iterable[str], check: Callable[[str], None]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(names))
    for name in unique:
        check(name)
    return unique


def nonempty(text: str) -> str:
    """Return `text` without the space around it."""
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def positive(text: str) -> int:
    """Return an integer from 1."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or not int(text):
        raise ValueError(f"{text!r} is no integer from 1")
    return int(text)


def size(text: str) -> int:
    """Return a number of bytes, such as 67108864, 64m or 64mb."""
    match = re.fullmatch(r"([0-9]{1,15})([kmg]?)b?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is no number of bytes such as 67108864 or 64m")
    return int(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> float:
    """Return a number of seconds over 0, an hour at most."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise ValueError(f"{text!r} is no number of seconds over 0 and up to 3600")
    return value


def boolean(text: str) -> bool:
    """Return true or false."""
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return word == "true"
