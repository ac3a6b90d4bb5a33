"""A gap in a fast batch: its sequence jumps, because messages were lost on their way to the server (ADR-50).

The server reports a gap with a gap frame. In gap mode `ok` the batch continues after the gap. In mode `fail` the server
commits the messages before the gap, and ignores the rest.
"""

from dataclasses import dataclass

from ..releases import Profile
from ..wire import gojson


@dataclass(frozen=True, slots=True)
class Gap:
    """What the server does with a message that is out of order."""

    frame: bytes | None
    """The frame that reports the gap; `None` if the release sends none."""
    ends_batch: bool


def find_gap(profile: Profile, *, last: int, seq: int, gap_ok: bool) -> Gap | None:
    """Return the gap between the last message of a batch and the message with sequence `seq`, or `None`.

    A repeated or smaller sequence also counts as a gap, and ends the batch in both modes.
    """
    expected = last + 1
    if seq == expected:
        return None
    reported = seq > expected or profile.fast_backward_gap
    return Gap(_frame(profile, expected, seq) if reported else None, ends_batch=seq < expected or not gap_ok)


def _frame(profile: Profile, expected: int, seq: int) -> bytes:
    """Return the frame for the lost messages from `expected` up to and excluding `seq`."""
    if profile.draft:
        return gojson.dumps({**({"last_seq": expected - 1} if expected > 1 else {}), "seq": seq})
    return gojson.dumps({"type": "gap", "last_seq": expected, "seq": seq})
