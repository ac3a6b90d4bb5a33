"""A message that no stream stores: its refusal proves that the leader has processed what was sent before it.

A request can overtake messages: they wait in nats-py's buffer or in the stream's queue while a server already answers.
Another message on the same connection cannot.
"""

from __future__ import annotations

import re
from typing import Final

from jetstream_ext.errors import ErrorCode, ServerError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.numbers import parse_number

# An expectation that no stream meets (the largest that servers parse): the refusal names the stream's last sequence.
_IMPOSSIBLE_SEQ: Final = (1 << 63) - 1
_LAST_SEQ: Final = re.compile(r"wrong last sequence: ([0-9]+)\Z")


def mark(stream: str) -> bytes:
    """Return the header block of a message that expects a last sequence that no stream has.

    Its refusal names the last sequence that the leader has assigned. That includes messages that are still being
    replicated and cannot be read yet.
    """
    return h.encode(list(mark_headers(stream).items()))


def mark_headers(stream: str) -> dict[str, str]:
    """Return the headers of a `mark`."""
    return {h.EXPECTED_STREAM: stream, h.EXPECTED_LAST_SEQ: str(_IMPOSSIBLE_SEQ)}


def marked_seq(refusal: object) -> int | None:
    """Return the sequence that the leader will reach, if the answer to a `mark` names one."""
    if not isinstance(refusal, ServerError) or refusal.err_code != ErrorCode.WRONG_LAST_SEQUENCE:
        return None
    found = _LAST_SEQ.search(refusal.description or "")
    return parse_number(found[1]) if found else None
