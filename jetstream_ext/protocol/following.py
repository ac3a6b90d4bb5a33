"""The phases of a live table, and when it doubts that it has what is stored. No I/O.

A table that is not loaded follows the log of its stream. It asks the leader for the stream's state at each step and compares
it with the state of an earlier one. Whatever the doubt, the answer is the same: the table is loaded again. A message that was
removed without another message shows in two numbers. A stream with fewer subjects than the table of all of it has keys has
lost a key. And between the first and the last sequence, more messages are missing than writes can have replaced.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from jetstream_ext.protocol.api import StreamState


class Phase(enum.Enum):
    """Where a table is."""

    OPENING = "it has nothing yet"
    CHECKING = "the leader has yet to show that it has the newest message of the table"
    FOLLOWING = "it was current when it looked last"
    RELOADING = "what is stored has to be read again"
    ENDED = "it is closed, or has failed"


class Event(enum.Enum):
    """What happens to a table."""

    LOADED = "what is stored was read"
    RESTORED = "a checkpoint was read"
    UNSURE = "the connection or the leader changed, a step failed, or the leader lacks the table's revision"
    CONFIRMED = "everything that is stored was read, and the leader had what the table has"
    DOUBTED = "the leader's state differs from the table"
    ENDED = "the table ended"


PHASES: Final = {
    (Phase.OPENING, Event.LOADED): Phase.FOLLOWING,
    (Phase.OPENING, Event.RESTORED): Phase.CHECKING,
    (Phase.CHECKING, Event.CONFIRMED): Phase.FOLLOWING,
    (Phase.CHECKING, Event.DOUBTED): Phase.RELOADING,
    (Phase.FOLLOWING, Event.UNSURE): Phase.CHECKING,
    (Phase.FOLLOWING, Event.DOUBTED): Phase.RELOADING,
    (Phase.RELOADING, Event.LOADED): Phase.FOLLOWING,
    **{(phase, Event.ENDED): Phase.ENDED for phase in Phase},
}
"""The phase after an event; the phase stays in every other case."""


class Doubt(enum.Enum):
    """Why a table may differ from what is stored, the strongest reason first."""

    LOST = "messages were lost, and others have their sequences"
    LIMITS = "its limits or its subjects were changed"
    KEYS = "keys were removed without delete markers"
    REMOVED = "messages were removed that no write has replaced"
    PERHAPS = "messages were removed, perhaps not by writes alone"


_SETTINGS: Final = (
    "allow_msg_ttl", "discard", "max_age", "max_bytes", "max_msgs", "max_msgs_per_subject", "retention",
    "subject_delete_marker_ttl", "subjects",
)  # fmt: skip
_NUMBERS: Final = "first_seq", "last_seq", "messages", "num_subjects"
_TIMES: Final = "first_time", "last_time", "now"


@dataclass(frozen=True, slots=True)
class Mark:
    """What the leader said at a revision of a table, and the newest message up to the revision: its sequence and time."""

    state: StreamState
    newest: tuple[int, datetime]

    def note(self) -> dict[str, Any]:
        """Return what `mark_of` reads, for a checkpoint."""
        numbers = {name: getattr(self.state, name) for name in _NUMBERS}
        times = {name: getattr(self.state, name).isoformat() for name in _TIMES}
        newest = {"newest": self.newest[0], "stored": self.newest[1].isoformat()}
        return {"created": self.state.created, "config": settings_of(self.state)} | numbers | times | newest


def mark_of(stream: str, note: Mapping[str, Any]) -> Mark:
    """Return a mark from its note; raise KeyError, TypeError or ValueError if that is malformed."""
    numbers: dict[str, Any] = {name: int(note[name]) for name in _NUMBERS}
    times: dict[str, Any] = {name: datetime.fromisoformat(note[name]) for name in _TIMES}
    state = StreamState(stream, str(note["created"]), dict(note["config"]), **numbers, **times)
    return Mark(state, (int(note["newest"]), datetime.fromisoformat(note["stored"])))


def find_doubt(
    before: StreamState, now: StreamState, *, keys: int | None, partial: bool, current: bool
) -> Doubt | None:
    """Return why a table that was right when the stream was in a state may be wrong, or None.

    Args:
        before: That state.
        now: A later one. The table has read every message up to its last sequence.
        keys: How many subjects the table knows to have a message now, if it has all subjects of the stream; else None.
        partial: There are subjects that are not in the table.
        current: The table has read every change while it was stored: no delete marker has come and gone, and no value of
            the table is overdue. So what has expired is none of its keys.
    """
    if keys is not None and keys > now.num_subjects:
        return Doubt.KEYS
    if keys is not None and now.max_msgs_per_subject == 1:
        return None  # each key has one message, and so each message is known
    holes, appended = _holes(now), now.last_seq - before.last_seq
    grown = holes - _holes(before)
    if grown > 0 and (not appended or grown > appended * _replaced_by_a_write(now)):
        return Doubt.PERHAPS if current and partial and now.config.get("allow_msg_ttl") else Doubt.REMOVED
    removed = appended - (now.messages - before.messages)
    return Doubt.PERHAPS if removed > 0 and holes else None


def _holes(state: StreamState) -> int:
    """How many sequences from the first to the last one have no message."""
    return state.last_seq - state.first_seq + 1 - state.messages


def _replaced_by_a_write(state: StreamState) -> float:
    """How many messages above the first one a write can remove, or (in a mirror) how many sequences it leaves out."""
    if state.config.get("allow_rollup_hdrs"):
        return state.max_msgs_per_subject or float("inf")
    return 1 if state.max_msgs_per_subject or state.origin else 0


def settings_of(state: StreamState) -> dict[str, Any]:
    """Return the configuration by which a table judges what it does not find."""
    return {name: value for name in _SETTINGS if (value := state.config.get(name)) not in (None, 0, -1)}
