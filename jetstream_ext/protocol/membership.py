"""What one member of a group does with its partitions, and until when it may, as a machine without I/O.

The members of a group are keys of a bucket that expire unless their members renew them. Each partition has a record there
that names its owner. A member works on a partition only while it is the owner. `TABLE` says where each event leads in each
phase.

Every record is stored behind the one that was read before (compare and set), and that makes a group safe: of two members
that both think that they own a partition, only one can store its next record. The times only keep such members apart
while all is well, so that messages are handled twice rarely.

The server stores a key no earlier than its member sends it, and removes it `ttl` seconds later. The member takes the time
before it sends, by its own monotonic clock, and stops `ttl - margin` seconds after that. So it stops before the key can be
removed, unless the clocks of the servers, or the rates of the member's and the leader's clocks, differ by more than `margin`
within this time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from jetstream_ext.protocol.partitions import assign
from jetstream_ext.text import get_logger, log_state

_log: Final = get_logger("log")

RETRY: Final = 0.25
"""Seconds after which a claim or a release that failed is tried again."""


class Phase(enum.Enum):
    """What a member does with a partition: the columns of `TABLE`."""

    FREE = "free"  # nothing
    CLAIMING = "claiming"  # it stores itself as the owner
    LAPSED = "lapsed"  # its key may have ended while it was claiming: the answer is still awaited, and is of no use
    OWNED = "owned"  # it works on the partition
    REVOKING = "revoking"  # it ends its work
    RELEASING = "releasing"  # it stores that the partition has no owner, and its position


class Event(enum.Enum):
    """What can happen to a partition: the rows of `TABLE`."""

    ASSIGNED = "it is assigned to the member, and its owner has released it, or is gone"
    REASSIGNED = "it is assigned to another member, or the member leaves"
    LEFT_OVER = "its record names the member, which it is not assigned to"
    CLAIMED = "the claim is stored"
    HANDED_OVER = "the work on it has ended, or has taken too long"
    RELEASED = "the release is stored, or another member is the owner"
    FAILED = "the claim or the release is not stored"
    KEY_ENDED = "the member's key may have ended"
    TAKEN = "another member has stored a record of it"


FREE, CLAIMING, LAPSED, OWNED, REVOKING, RELEASING = Phase
___: Final = None

TABLE: Final[dict[Event, tuple[Phase | None, ...]]] = {
    #                   FREE       CLAIMING  LAPSED  OWNED     REVOKING   RELEASING
    Event.ASSIGNED:    (CLAIMING,  ___,      ___,    ___,      ___,       ___),
    Event.REASSIGNED:  (___,       ___,      ___,    REVOKING, ___,       ___),
    Event.LEFT_OVER:   (RELEASING, ___,      ___,    ___,      ___,       ___),
    Event.CLAIMED:     (___,       OWNED,    FREE,   ___,      ___,       ___),
    Event.HANDED_OVER: (___,       ___,      ___,    ___,      RELEASING, ___),
    Event.RELEASED:    (___,       ___,      ___,    ___,      ___,       FREE),
    Event.FAILED:      (___,       FREE,     FREE,   ___,      ___,       FREE),
    Event.KEY_ENDED:   (___,       LAPSED,   ___,    FREE,     FREE,      ___),
    Event.TAKEN:       (___,       ___,      ___,    FREE,     FREE,      ___),
}  # fmt: skip
"""Where an event leads; ``___`` changes nothing."""

_NEXT: Final = {(phase, event): after for event, row in TABLE.items() for phase, after in zip(Phase, row, strict=True)}
_LOSSES: Final = frozenset({Event.KEY_ENDED, Event.TAKEN})


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner in a partition's record; empty if it was released. `revision` is the record's."""

    id: str
    revision: int


class Do(enum.Enum):
    """What the shell does with some partitions, and what it tells the machine then."""

    LOSE = "stop working on them: another member may be their owner"
    REVOKE = "stop working on them; then `handed_over`, and as for `RELEASE`, at the position of what was handled"
    CLAIM = "store this member as the owner, if `may_claim` agrees with what the leader has; then `claimed` or `failed`"
    RELEASE = "store that they have no owner; then `released` or `failed`"


class Membership:
    """What one member of a group does; times are those of one monotonic clock, in seconds.

    Call `due` after each event and at `wake_at`, and carry out what it returns.

    Args:
        me: The member's id; no other member may have it, nor a later start of this one.
        partitions: How many partitions the group has.
        ttl: Seconds after which the server removes the member's key.
        margin: Seconds before that at which the member stops.
    """

    def __init__(self, me: str, partitions: int, *, ttl: float, margin: float) -> None:
        self.me: str = me
        self.valid_until: float = -math.inf
        """Until when the member's key is stored for sure."""
        self.leaving: bool = False
        self._count = partitions
        self._lasts = ttl - margin
        self._alive: frozenset[str] = frozenset()
        self._known = 0  # the revision of the bucket at which they were
        self._owners: dict[int, Owner] = {}  # by the newest record, which this member may have stored before it is seen
        self._staying: frozenset[str] = frozenset()  # the members that partitions are assigned to
        self._target: frozenset[int] = frozenset()
        self._phases: dict[int, Phase] = {}  # without those that are FREE
        self._lost: list[int] = []  # for the next `LOSE`
        self._sent = -math.inf  # the last renewal that was answered
        self._answered_since = math.inf
        self._not_before: dict[int, float] = {}  # when a claim or release may be tried again

    @property
    def owned(self) -> tuple[int, ...]:
        """The partitions that the member works on."""
        return self._in(OWNED)

    @property
    def idle(self) -> bool:
        """Whether the member does nothing with any partition, and has none to release."""
        return not self._phases and not any(self._is_mine(number) for number in range(self._count))

    @property
    def working(self) -> bool:
        """Whether the member works on a partition, claims it, or has not handed it over yet."""
        return any(phase is not RELEASING for phase in self._phases.values())

    def phase(self, partition: int) -> Phase:
        return self._phases.get(partition, FREE)

    def is_valid(self, now: float) -> bool:
        """Return whether the member's key is stored for sure."""
        return now < self.valid_until

    def answered_since(self, then: float) -> bool:
        """Return whether the servers have answered the member at this time and later, without a longer pause."""
        return self._answered_since <= then <= self._sent

    # -- what happened ------------------------------------------------------------------------------------------------

    def renewed(self, sent: float, now: float) -> None:
        """Note that the server has stored the member's key, which was sent at the time `sent`."""
        self._expire(now)  # it may have ended in between
        if sent - self._sent > self._lasts / 2:
            self._answered_since = sent
        self._sent = sent
        self.valid_until = max(self.valid_until, sent + self._lasts)

    def see(self, alive: Collection[str], leaving: Collection[str], owners: Mapping[int, Owner], revision: int) -> None:
        """Note what the bucket has at a revision: the members that are alive, those of them that leave, and the owners."""
        self._alive, self._known = frozenset(alive), revision
        for number, owner in owners.items():
            self._note_owner(number, owner)
        for number in [it for it, owner in self._owners.items() if it not in owners and owner.revision <= revision]:
            del self._owners[number]  # another program has deleted the record
        staying = (self._alive | {self.me}) - set(leaving)
        if self.leaving:
            self._target = frozenset()
        elif staying != self._staying:
            self._target = frozenset(assign(staying, self._count)[self.me])
            log_state(_log, f"member {self.me}", "assigned", members=len(staying), partitions=len(self._target))
        self._staying = staying

    def leave(self) -> None:
        """Give every partition back."""
        self.leaving, self._target = True, frozenset()

    def claimed(self, partition: int, revision: int, now: float) -> bool:
        """Note that the member is stored as the owner; return whether it may work on the partition."""
        self._expire(now)
        self.stored(partition, revision)
        self._apply(partition, Event.CLAIMED)
        return self.phase(partition) is OWNED

    def stored(self, partition: int, revision: int) -> None:
        """Note the revision of a record that this member has stored as the owner."""
        self._note_owner(partition, Owner(self.me, revision))

    def handed_over(self, partition: int) -> bool:
        """Note that the member works no more on a partition that it revokes; return whether to release it now."""
        self._apply(partition, Event.HANDED_OVER)
        return self.phase(partition) is RELEASING

    def released(self, partition: int, revision: int) -> None:
        """Note that the partition has no owner, or another one, by the record of this revision (0: there is none)."""
        if not revision:
            self._owners.pop(partition, None)
        self._note_owner(partition, Owner("", revision))
        self._apply(partition, Event.RELEASED)

    def failed(self, partition: int, now: float) -> None:
        """Note that a claim or a release was not stored."""
        self._apply(partition, Event.FAILED)
        self._not_before[partition] = now + RETRY

    def fenced(self, partition: int, now: float) -> None:
        """Note that a commit found a record of another member, or none."""
        self._apply(partition, Event.TAKEN)
        self._not_before[partition] = now + RETRY

    def _note_owner(self, partition: int, owner: Owner) -> None:
        known = self._owners.get(partition)
        if known is None or owner.revision >= known.revision:
            self._owners[partition] = owner

    def _expire(self, now: float) -> None:
        if not self.is_valid(now):
            for number in tuple(self._phases):
                self._apply(number, Event.KEY_ENDED)

    def _apply(self, partition: int, event: Event) -> None:
        """Do what `TABLE` says."""
        before = self.phase(partition)
        after = _NEXT[before, event]
        if after is None:
            return
        if after is FREE:
            del self._phases[partition]
        else:
            self._phases[partition] = after
        if event in _LOSSES and after is FREE:
            self._lost.append(partition)
        log_state(_log, f"member {self.me}", f"{before.name} -> {after.name}", event.value, partition=partition)

    # -- what to do ---------------------------------------------------------------------------------------------------

    def may_claim(self, partition: int, owner: Owner | None) -> bool:
        """Return whether a claim may store this member behind a record of `owner` at the leader; None has no record."""
        return self.phase(partition) is CLAIMING and self._is_free(owner)

    def due(self, now: float) -> list[tuple[Do, tuple[int, ...]]]:
        """Return what to do now."""
        self._expire(now)
        for number in self._in(OWNED, REVOKING):
            owner = self._owners.get(number)
            if owner is not None and owner.id != self.me:
                self._apply(number, Event.TAKEN)
        revoked = tuple(number for number in self.owned if number not in self._target)
        for number in revoked:
            self._apply(number, Event.REASSIGNED)
        claims, releases = list[int](), list[int]()
        for number in range(self._count) if self.is_valid(now) else ():
            if number in self._phases or self._not_before.get(number, -math.inf) > now:
                continue
            if number in self._target:
                if self._is_free(self._owners.get(number)):
                    self._apply(number, Event.ASSIGNED)
                    claims.append(number)
            elif self._is_mine(number):
                self._apply(number, Event.LEFT_OVER)
                releases.append(number)
        lost, self._lost = tuple(sorted(self._lost)), []
        return [it for it in zip(Do, (lost, revoked, tuple(claims), tuple(releases)), strict=True) if it[1]]

    def wake_at(self, now: float) -> float:
        """Return when `due` has something to do although nothing happens; infinity if never."""
        times = [time for time in self._not_before.values() if time > now]
        if self._phases and self.is_valid(now):
            times.append(self.valid_until)
        return min(times, default=math.inf)

    def _in(self, *phases: Phase) -> tuple[int, ...]:
        return tuple(sorted(number for number, phase in self._phases.items() if phase in phases))

    def _is_free(self, owner: Owner | None) -> bool:
        if owner is None or owner.id in ("", self.me):
            return True
        # A newer record may be that of a member that is not known here yet.
        return owner.id not in self._alive and owner.revision <= self._known

    def _is_mine(self, partition: int) -> bool:
        owner = self._owners.get(partition)
        return owner is not None and owner.id == self.me
