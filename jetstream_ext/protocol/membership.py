"""Which partitions a member of a group works on: the decisions, without I/O.

The members of a group are keys of a bucket that expire unless their members renew them. Each partition has a record there
that names its owner. A member works on a partition only while it is the owner::

    (none) ── assigned here, and its owner released it, or is gone ──► CLAIMING ── stored ──► OWNED
                                                                  refused │                    │ assigned elsewhere
                                                                       (none)                  ▼
    (none) ◄── stored ── RELEASING ◄── its work is committed ─────────────────────────────  REVOKING

    CLAIMING, OWNED, REVOKING ── the member could not renew its key in time, or another one is the owner ──► (none)

Every record is stored behind the one that was read before (compare and set), and that makes a group safe: of two members
that both think that they own a partition, only one can store its next record. The times only keep such members apart
while all is well, so that messages are handled twice rarely.

The server stores a key no earlier than its member sends it, and removes it `ttl` seconds later. The member takes the time
before it sends, by its own monotonic clock, and stops `ttl - margin` seconds after that. So it stops before the key can be
removed, unless the clocks of the servers, or the rates of the member's and the leader's clocks, differ by more than `margin`
within this time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from jetstream_ext.protocol.partitions import assign
from jetstream_ext.text import get_logger, log_state

_log: Final = get_logger("log")

RETRY: Final = 0.25
"""Seconds after which a claim or a release that failed is tried again."""


class Phase(Enum):
    """What a member does with a partition; see the module."""

    CLAIMING = "claiming"
    OWNED = "owned"
    REVOKING = "revoking"
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner in a partition's record; empty if it was released. `revision` is the record's."""

    id: str
    revision: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Store this member as the owner, if `Membership.may_claim` agrees with what the leader has; then `claimed` or `failed`."""

    partition: int
    attempt: int  # so that the result of an older attempt, which is known later, changes nothing


@dataclass(frozen=True, slots=True)
class Revoke:
    """Stop working on these partitions and commit what was handled; then `revoked`."""

    attempts: Mapping[int, int]  # of each partition the one that has claimed it


@dataclass(frozen=True, slots=True)
class Release:
    """Store that the partition has no owner; then `released` or `failed`."""

    partition: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Lose:
    """Stop working on these partitions: another member may be their owner."""

    partitions: tuple[int, ...]


Action = Claim | Revoke | Release | Lose


class Membership:
    """What one member of a group does; times are those of one monotonic clock, in seconds.

    Args:
        me: The member's id; no other member may have it, nor a later start of this one.
        partitions: How many partitions the group has.
        ttl: Seconds after which the server removes the member's key.
        margin: Seconds before that at which the member stops.
    """

    def __init__(self, me: str, partitions: int, *, ttl: float, margin: float) -> None:
        self.me: str = me
        self._source = f"member {me}"  # for the log
        self.valid_until: float = -math.inf
        """Until when the member's key is stored for sure."""
        self._count = partitions
        self._lasts = ttl - margin
        self._alive: frozenset[str] = frozenset()
        self._owners: Mapping[int, Owner] = {}
        self._known = 0  # the revision of the bucket that these two are of
        self._staying: frozenset[str] = frozenset()  # the members that partitions are assigned to
        self._target: frozenset[int] = frozenset()
        self._leaving = False
        self._phases: dict[int, Phase] = {}
        self._lapsed: set[int] = set()  # partitions that were worked on when the key may have ended
        self._attempts: dict[int, int] = {}  # the newest one of each partition
        self._count_attempts = 0
        self._stored: dict[int, Owner] = {}  # by this member's newest records
        self._not_before: dict[int, float] = {}  # when a claim or release may be tried again

    @property
    def owned(self) -> tuple[int, ...]:
        """The partitions that the member works on."""
        return tuple(sorted(number for number, phase in self._phases.items() if phase is Phase.OWNED))

    @property
    def idle(self) -> bool:
        """Whether the member does nothing with any partition, and has none to release."""
        return not self._phases and not any(self._is_mine(number) for number in range(self._count))

    @property
    def working(self) -> bool:
        """Whether the member works on a partition, has claimed it, or has not revoked it yet."""
        return any(phase is not Phase.RELEASING for phase in self._phases.values())

    def phase(self, partition: int) -> Phase | None:
        return self._phases.get(partition)

    def holds(self, partition: int, revision: int) -> bool:
        """Return whether the member owns a partition by its record of this revision, the newest that it has stored."""
        owner = self._stored.get(partition)
        owned = self._phases.get(partition) in (Phase.OWNED, Phase.REVOKING)
        return owned and owner is not None and owner.revision == revision

    def is_valid(self, now: float) -> bool:
        """Return whether the member's key is stored for sure."""
        return now < self.valid_until

    def was_renewed_since(self, then: float) -> bool:
        """Return whether the server has stored the member's key at this time or later, and so has answered."""
        return self.valid_until - self._lasts >= then

    # -- what happened ------------------------------------------------------------------------------------------------

    def renewed(self, sent: float, now: float) -> None:
        """Note that the server has stored the member's key, which was sent at the time `sent`; `due` may lose partitions."""
        if not self.is_valid(now):  # it may have ended in between, before `due` was called
            self._lapsed = {number for number, phase in self._phases.items() if phase is not Phase.RELEASING}
        self.valid_until = max(self.valid_until, sent + self._lasts)

    def see(self, alive: Collection[str], leaving: Collection[str], owners: Mapping[int, Owner], revision: int) -> None:
        """Note what the bucket has at a revision: the members that are alive, those of them that leave, and the owners."""
        self._alive, self._owners, self._known = frozenset(alive), owners, revision
        staying = (self._alive | {self.me}) - set(leaving)
        if self._leaving:
            self._target = frozenset()
        elif staying != self._staying:
            self._target = frozenset(assign(staying, self._count)[self.me])
            log_state(_log, self._source, "assigned", members=len(staying), partitions=len(self._target))
        self._staying = staying

    def leave(self) -> None:
        """Give every partition back."""
        if not self._leaving:
            log_state(_log, self._source, "leaving", partitions=len(self._phases))
        self._leaving, self._target = True, frozenset()

    def claimed(self, partition: int, attempt: int, revision: int, now: float) -> bool:
        """Note that the member is stored as the owner; return whether it may work on the partition."""
        self.stored(partition, revision)
        if not self._is_current(partition, attempt, Phase.CLAIMING):
            return False  # it was lost meanwhile
        if not self.is_valid(now) or partition in self._lapsed:
            self._enter(partition, None, "the member's key may have ended")
            return False
        self._enter(partition, Phase.OWNED, "the claim is stored")
        return True

    def stored(self, partition: int, revision: int) -> None:
        """Note the revision of a record that this member has stored as the owner."""
        self._note_stored(partition, Owner(self.me, revision))

    def revoked(self, partition: int, attempt: int) -> None:
        """Note that the member works no more on a partition that this attempt has claimed, and has committed its work."""
        if self._is_current(partition, attempt, Phase.REVOKING):
            self._enter(partition, None, "the work is committed")  # `due` releases what is not assigned here

    def released(self, partition: int, attempt: int, revision: int) -> None:
        """Note that the partition has no owner, or another one, by the record of this revision (0: there is none)."""
        self._note_stored(partition, Owner("", revision))
        if self._is_current(partition, attempt, Phase.RELEASING):
            self._enter(partition, None, "the release is stored")

    def failed(self, partition: int, attempt: int, now: float) -> bool:
        """Note that a claim or a release could not be stored; return whether it is of use to try again.

        It is not if the member's key is stored all the time: then the servers answer, but do not let the member store this.
        """
        current = self._is_current(partition, attempt, Phase.CLAIMING)
        if current or self._is_current(partition, attempt, Phase.RELEASING):
            self._enter(partition, None, "the record was not stored")
            self._not_before[partition] = now + RETRY
        return not current or not self.is_valid(now) or partition in self._lapsed

    def fenced(self, partition: int, revision: int, now: float) -> bool:
        """Note that a commit behind this member's record of `revision` found another one; return whether it was the owner."""
        if not self.holds(partition, revision):
            return False
        self._enter(partition, None, "another member has stored a record")
        self._not_before[partition] = now + RETRY
        return True

    def _is_current(self, partition: int, attempt: int, phase: Phase) -> bool:
        return self._phases.get(partition) is phase and self._attempts.get(partition) == attempt

    def _note_stored(self, partition: int, owner: Owner) -> None:
        known = self._stored.get(partition)
        if known is None or owner.revision >= known.revision or not owner.revision:
            self._stored[partition] = owner

    # -- what to do ---------------------------------------------------------------------------------------------------

    def may_store(self, action: Claim | Release) -> bool:
        """Return whether a claim or release that has read the record may still store one: no newer attempt has begun."""
        phase = Phase.CLAIMING if isinstance(action, Claim) else Phase.RELEASING
        return self._is_current(action.partition, action.attempt, phase)

    def may_claim(self, owner: Owner | None) -> bool:
        """Return whether the member may take a partition whose record names `owner` at the leader; None has no record."""
        if owner is None or owner.id in ("", self.me):
            return True
        # A newer record may be that of a member that is not known here yet.
        return owner.id not in self._alive and owner.revision <= self._known

    def due(self, now: float) -> list[Action]:
        """Return what to do now. Call it after each event, and at `wake_at`."""
        lost = [number for number in self._phases if self._is_lost(number, now)]
        self._lapsed.clear()
        for number in lost:
            self._enter(number, None, "another member may own it")
        actions: list[Action] = [Lose(tuple(sorted(lost)))] if lost else []
        revoked = tuple(number for number in self.owned if number not in self._target)
        for number in revoked:
            self._enter(number, Phase.REVOKING, "it is assigned to another member")
        if revoked:
            actions.append(Revoke({number: self._attempts[number] for number in revoked}))
        if not self.is_valid(now):
            return actions
        for number in range(self._count):
            if number in self._phases or self._not_before.get(number, -math.inf) > now:
                continue
            if number in self._target:
                if self.may_claim(self._owner(number)):
                    actions.append(Claim(number, self._begin(number, Phase.CLAIMING)))
            elif self._is_mine(number):
                actions.append(Release(number, self._begin(number, Phase.RELEASING)))
        return actions

    def _begin(self, partition: int, phase: Phase) -> int:
        self._count_attempts += 1
        self._attempts[partition] = self._count_attempts
        self._enter(partition, phase, "it is assigned here" if phase is Phase.CLAIMING else "it is not assigned here")
        return self._count_attempts

    def _enter(self, partition: int, phase: Phase | None, why: str) -> None:
        """Let a partition enter a phase; None: the member does nothing with it."""
        before = self._phases.pop(partition, None)
        if phase is not None:
            self._phases[partition] = phase
        log_state(
            _log, self._source, f"{before.name if before else 'FREE'} -> {phase.name if phase else 'FREE'}", why,
            partition=partition,
        )  # fmt: skip

    def wake_at(self, now: float) -> float:
        """Return when `due` has something to do although nothing happens; infinity if never."""
        times = [time for time in self._not_before.values() if time > now]
        if self._phases and self.is_valid(now):
            times.append(self.valid_until)
        return min(times, default=math.inf)

    def _is_lost(self, partition: int, now: float) -> bool:
        if self._phases[partition] is Phase.RELEASING:
            return False
        if not self.is_valid(now) or partition in self._lapsed:
            return True
        if self._phases[partition] is Phase.CLAIMING:
            return False
        owner = self._owner(partition)
        return owner is not None and owner.id != self.me

    def _is_mine(self, partition: int) -> bool:
        owner = self._owner(partition)
        return owner is not None and owner.id == self.me

    def _owner(self, partition: int) -> Owner | None:
        """Return the owner as far as it is known: what this member has stored last may be newer than what it has seen."""
        seen, stored = self._owners.get(partition), self._stored.get(partition)
        if stored is not None and (seen is None or seen.revision <= stored.revision):
            return stored
        return seen
