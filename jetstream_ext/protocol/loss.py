"""Gaps in a run of stream sequences, and whether newer messages replaced what is missing at a stream's beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from jetstream_ext.protocol.api import StreamState

# The largest message that a server can be configured to take, in bytes: its ``max_payload``.
_LARGEST_MESSAGE: Final = 64 << 20


def find_gaps(previous: int, seqs: Sequence[int], last: int) -> Iterator[range]:
    """Yield the sequences after `previous`, up to `last`, that are missing before and between `seqs`, as ranges.

    `seqs` are ascending and over `previous`. The sequences after the end of `seqs` are not missing yet, because more
    may follow. Append ``last + 1`` to include them.
    """
    if not seqs or seqs[-1] - previous == len(seqs):
        return
    for seq in seqs:
        if previous >= last:
            return
        if seq != previous + 1:
            yield range(previous + 1, min(seq, last + 1))
        previous = seq


class Gaps:
    """The missing sequences of ``first … last``; those that are there come in pieces, ascending."""

    def __init__(self, first: int, last: int) -> None:
        self.lowest: int = 0  # the lowest missing sequence (0: none so far)
        self.highest: int = 0  # the highest one
        self._previous = first - 1
        self._last = last

    def add(self, seqs: Sequence[int]) -> None:
        for gap in find_gaps(self._previous, seqs, self._last):
            self.lowest = self.lowest or gap.start
            self.highest = gap.stop - 1
        if seqs:
            self._previous = seqs[-1]

    def close(self) -> None:
        if self._previous < self._last:
            self.add([self._last + 1])


def were_replaced(state: StreamState, before: StreamState | None, since: datetime | None) -> bool:
    """Return whether newer messages replaced the messages that are missing at the beginning of a stream; else they are lost.

    A removed message leaves no trace of its subject, so the state of the stream decides: its messages were replaced if it
    *compacts* (``max_msgs_per_subject``, unless the stream refuses the newer messages, or rollups), and if nothing shows
    that something else removed messages. Compaction keeps the newest messages of every subject. This shows another cause:

    * the stream has no messages, or too few for one subject to have reached ``max_msgs_per_subject``;
    * a limit that removes the oldest messages may have acted: ``max_msgs`` is reached, less than one message fits into
      ``max_bytes`` (both with discard ``old``), or the messages may be older than ``max_age``, and the delete markers that
      replaced them may be gone;
    * since `before` subjects have disappeared, or (without rollups) the stream has fewer messages. With rollups see
      `only_a_rollup`.

    An option counts if the stream has it now or had it `before`.

    Args:
        state: The stream now, as its leader reports it.
        before: The stream when its beginning was checked last; None if it was not.
        since: A time, by the server's clock, before which the first missing message had not been stored; None is the
            creation of the stream. A mirror keeps the times of its origin, so there None is any time.
    """
    held = [state] if before is None else [state, before]
    limits = {limit for it in held if (limit := _replaces_above(it))}
    rollups = any(it.config.get("allow_rollup_hdrs") for it in held)
    if not (limits or rollups) or not state.messages or any(it.retention != "limits" for it in held):
        return False
    if not rollups and state.messages < state.num_subjects + min(limits) - 1:
        return False
    if since is None and not any(it.origin for it in held):
        since = state.created_at
    for it in held:
        if it.max_age and (since is None or state.now - since >= it.max_age + _markers_stay(it)):
            return False
        if _discard(it) == "old":
            max_msgs, max_bytes = it.config.get("max_msgs") or -1, it.config.get("max_bytes") or -1
            largest = it.max_msg_size or _LARGEST_MESSAGE
            if 0 < max_msgs <= state.messages:
                return False
            if 0 < max_bytes < state.size + largest:
                return False
    if before is None:
        return True
    return state.num_subjects >= before.num_subjects and (rollups or not _has_fewer(state, before))


def only_a_rollup(state: StreamState, before: StreamState) -> bool:
    """Return whether only a rollup that was stored since `before` can have replaced what is missing."""
    rollups = any(it.config.get("allow_rollup_hdrs") for it in (state, before))
    return rollups and _has_fewer(state, before)


def _markers_stay(state: StreamState) -> timedelta:
    """Return how long the delete marker of an expired subject, which is a newer message of it, is stored at least."""
    return min(state.marker_ttl or timedelta(0), state.max_age or timedelta.max)


def _has_fewer(state: StreamState, before: StreamState) -> bool:
    """Return whether messages are missing beyond what a limit per subject removes: one for each new message at most."""
    return state.messages < before.messages and _replaces_above(before) == _replaces_above(state)


def _discard(state: StreamState) -> str:
    return str(state.config.get("discard") or "old")


def _replaces_above(state: StreamState) -> int:
    """Return after how many messages of a subject the stream replaces the oldest one (0: never)."""
    refuses = _discard(state) == "new" and state.config.get("discard_new_per_subject")
    return 0 if refuses else state.max_msgs_per_subject
