"""Makes malformed frames out of valid ones, repeatably: the same random generator makes the same frames."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Final

Block = tuple[bytes, bytes]
"""A header block (or nothing) and a payload."""

NUMBERS: Final = (
    "0", "1", "2", "-1", "-5", "+7", " 7", "7 ", "1_000", "007", "1.0", "1e3", "0x7", "65535", "65536",
    str((1 << 62) - 1), str(1 << 62), str((1 << 63) - 1), str(1 << 63), str((1 << 64) - 1), str(1 << 64), "9" * 25, "9" * 5000,
    "\u0663", "\uff15", "\u00b2", "\u221e", "NaN",
)  # fmt: skip
TIMES: Final = (
    "2024-01-01T00:00:00Z", "2024-01-01T00:00:00", "2024-01-01T00:00:00.123456789Z", "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999999Z", "9999-12-31T23:59:59-23:59", "2024-W01-1T00:00:00Z",
    "2024-02-30T00:00:00Z", "2022-08-06 00:29:27.5 +0000 UTC", "\u0662\u0660\u0662\u0664-01-01T00:00:00Z", "12:00", "Z",
)  # fmt: skip
WORDS: Final = (
    "", " ", "a b", "a.b", "a..b", "*", ">", "all", "never", "1h", "99999999h", "5s5s", "MaxAge", "Purge", "DEL", "S", "wrong",
    "a\r\nPUB x 0\r\n", "\0", "\ufffd", "\x7f", "\u00e9" * 60, "a" * 300, "{{wildcard(1)}}", "{{split(1,-)}}", "$1", "v2", "2.15.1-x",
    "$JS.API", "memory",
)  # fmt: skip
VALUES: Final = (
    *(text.encode() for text in (*NUMBERS, *TIMES, *WORDS)), b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\n", b"9" * 60_000,
)  # fmt: skip
JUNK: Final = (b"\0", b"\r", b"\n", b"\r\n", b":", b": ", b" ", b"\xff", b"\r\n\r\n", b"\t", b"NATS/1.0", b"\xd9\xa3")
STATUSES: Final = (
    b" 204 EOB",
    b" 404",
    b" 408 Bad",
    b" 413 x",
    b" 429 y",
    b" 500",
    b" 503",
    b" x",
    b" 99999999999",
    b" -1",
)

_DEEP: Final = "[" * 900 + "]" * 900
JSON_VALUES: Final = tuple(
    text.encode()
    for text in (
        "null", "true", "false", "1e300", "0.5", "-0.0", "[]", "{}", "[null]", "[1]", '["a"]', '[{}]', '{"a":1}', '[[]]',
        '{"name":1}', '{"api":[]}', '{"src":1}', '{"code":"a","err_code":[],"description":{}}', '"\\ud800"', '"\\u0000"', _DEEP,
        f'{{"a":{_DEEP}}}', *(number for number in NUMBERS if number.lstrip("-").isascii() and number.lstrip("-").isdigit()),
        *(json.dumps(text) for text in (*NUMBERS, *TIMES, *WORDS)),
    )
)  # fmt: skip


class Document:
    """A valid JSON document, cut up so that any of its values can be replaced or left out by joining bytes."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.data: bytes = json.dumps(value).encode()
        self.places: list[tuple[bytes, bytes, bytes]] = []  # before a value, the value, after it
        self.without: list[bytes] = []
        own = json.loads(self.data)
        self._cut(own, own)

    def _cut(self, root: dict[str, Any], holder: Any) -> None:
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            value, holder[key] = holder[key], "\x01"
            before, after = json.dumps(root).encode().split(b'"\\u0001"')
            self.places.append((before, json.dumps(value).encode(), after))
            if isinstance(holder, dict):
                kept = dict(holder)
                del holder[key]
                self.without.append(json.dumps(root).encode())
                holder.update(kept)
            holder[key] = value
            if isinstance(value, dict | list):
                self._cut(root, value)


class Mutator:
    """Mutates with one random generator."""

    def __init__(self, rng: Random) -> None:
        self._random = rng.random
        self.rng: Random = rng

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self._random() * len(values))]

    def document(self, document: Document) -> bytes:
        """Return a document of which usually one value is another, or missing; sometimes its bytes are damaged."""
        what = self.below(20)
        if what == 0:
            return self.damaged(document.data)
        if what == 1:
            return self.pick(document.without)
        before, value, after = self.pick(document.places)
        if what < 4:  # a value of another place
            value = self.pick(document.places)[1]
        elif what == 4:
            value = self.damaged(value)
        else:
            value = self.pick(JSON_VALUES)
        data = b"%b%b%b" % (before, value, after)
        if what == 5:  # a second mutation, where the place is still there
            before, _, after = self.pick(document.places)
            if data.startswith(before) and data.endswith(after) and len(before) + len(after) < len(data):
                data = b"%b%b%b" % (before, self.pick(JSON_VALUES), after)
        return data

    def damaged(self, data: bytes) -> bytes:
        """Return bytes with flipped bits, cut off, or with junk."""
        if not data:
            return self.pick(JUNK)
        at = self.below(len(data))
        match self.below(4):
            case 0:
                return b"%b%c%b" % (data[:at], data[at] ^ (1 << self.below(8)), data[at + 1 :])
            case 1:
                return data[:at]
            case 2:
                return b"%b%b%b" % (data[:at], self.pick(JUNK), data[at:])
            case _:
                return data[:at] + data[at + 1 + self.below(8) :]

    def header(self, block: bytes, other: bytes) -> bytes:
        """Return a header block that differs in a line from `block`, or in a part that is of `other`."""
        what = self.below(10)
        if what == 0:
            return self.damaged(block)
        if what == 1:
            return block[: self.below(len(block) + 1)] + other[self.below(len(other) + 1) :]
        if what == 2:
            return block[:8] + self.pick(STATUSES) + block[8:]
        lines = block.split(b"\r\n")
        one, two = self.below(len(lines)), self.below(len(lines))
        if what == 3:
            lines.insert(two, lines[one])
        elif what == 4:
            del lines[one]
        elif what == 5:
            lines[one], lines[two] = lines[two], lines[one]
        else:
            name = lines[one].partition(b":")[0]
            changed = b"%b: %b" % (name, self.pick(VALUES))
            if what == 6:
                lines.insert(two, changed)
            else:
                lines[one] = changed
        return b"\r\n".join(lines)
