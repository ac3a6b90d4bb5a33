"""What one member of a group does, event by event."""

import itertools

from cells import walk

from jetstream_ext.protocol.membership import (
    CLAIMING,
    FREE,
    LAPSED,
    OWNED,
    RELEASING,
    RETRY,
    REVOKING,
    TABLE,
    Do,
    Event,
    Membership,
    Owner,
    Phase,
)
from jetstream_ext.protocol.partitions import assign

TTL, MARGIN = 9.0, 0.9


def due(machine: Membership, now: float, do: Do) -> tuple[int, ...]:
    """Return the partitions of what is due; nothing else may be."""
    [(found, numbers)] = machine.due(now)
    assert found is do
    return numbers


def member(partitions: int = 2, *, alive: tuple[str, ...] = ("me",), renewed: float = 0.0) -> Membership:
    machine = Membership("me", partitions, ttl=TTL, margin=MARGIN)
    machine.renewed(renewed, renewed)
    machine.see(alive, (), {}, 10)
    return machine


def owning(partitions: int = 2) -> Membership:
    """A member that owns every partition, by records of the revisions 21, 22 …"""
    machine = member(partitions)
    for number in due(machine, 0.0, Do.CLAIM):
        assert machine.claimed(number, 21 + number, 0.1)
    return machine


# A member that gets the only partition of a group of two members.
OTHER = next(name for name in map(str, range(99)) if assign({"me", name}, 1)[name])


def in_phase(phase: Phase) -> Membership:
    """Return a member of a group of one partition, which is in this phase; it is assigned to `OTHER` unless it is claimed."""
    if phase is FREE:
        return member(1, alive=("me", OTHER))
    if phase in (CLAIMING, LAPSED):
        machine = member(1)
        assert due(machine, 0.0, Do.CLAIM) == (0,)
        if phase is LAPSED:
            machine.renewed(TTL, TTL)
        return machine
    machine = owning(1)
    if phase is not OWNED:
        machine.see({"me", OTHER}, (), {}, 30)
        assert due(machine, 1.0, Do.REVOKE) == (0,)
        if phase is RELEASING:
            assert machine.handed_over(0)
    return machine


def happen(machine: Membership, event: Event, now: float) -> None:
    match event:
        case Event.ASSIGNED:
            machine.see({"me"}, (), {}, 40)
            machine.due(now)
        case Event.REASSIGNED:
            machine.see({"me", OTHER}, (), {}, 40)
            machine.due(now)
        case Event.LEFT_OVER:
            machine.see({"me", OTHER}, (), {0: Owner("me", 39)}, 40)
            machine.due(now)
        case Event.CLAIMED:
            machine.claimed(0, 40, now)
        case Event.HANDED_OVER:
            machine.handed_over(0)
        case Event.RELEASED:
            machine.released(0, 40)
        case Event.FAILED:
            machine.failed(0, now)
        case Event.KEY_ENDED:
            machine.renewed(2 * TTL, 3 * TTL)
        case Event.TAKEN:
            machine.fenced(0, now)


def test_the_table() -> None:
    """Each event leads where the table says, and what the member worked on is lost if its key ends or another one takes it."""
    assert TABLE.keys() == set(Event)
    for (event, row), phase in itertools.product(TABLE.items(), Phase):
        if (event, phase) == (Event.LEFT_OVER, OWNED):
            continue  # then it is reassigned
        machine = in_phase(phase)
        assert machine.phase(0) is phase
        happen(machine, event, machine.valid_until - 1.0)
        assert machine.phase(0) is (row[list(Phase).index(phase)] or phase), f"{event} in {phase}"
        if event in (Event.KEY_ENDED, Event.TAKEN):
            lost = [numbers for do, numbers in machine.due(machine.valid_until - 0.5) if do is Do.LOSE]
            assert lost == ([(0,)] if phase in (OWNED, REVOKING) else []), f"{event} in {phase}"


class TestClaiming:
    def test_nothing_is_claimed_before_the_key_is_stored_or_after_it_may_have_ended(self) -> None:
        machine = Membership("me", 2, ttl=TTL, margin=MARGIN)
        machine.see((), (), {}, 10)
        assert machine.due(0.0) == []
        machine.renewed(5.0, 5.0)
        assert not machine.is_valid(5.0 + TTL - MARGIN)
        assert machine.due(5.0 + TTL - MARGIN) == []
        machine.renewed(15.0, 15.0)
        assert due(machine, 15.0 + TTL - MARGIN - 0.01, Do.CLAIM) == (0, 1)

    @walk(
        "owner, may",
        [
            (None, True),
            (Owner("", 40), True),  # released
            (Owner("me", 40), True),  # an earlier claim, whose answer was lost
            (Owner("gone", 10), True),
            (Owner("gone", 11), False),  # newer than what is known of the members
            (Owner("alive", 5), False),
        ],
    )
    def test_what_may_be_claimed(self, owner: Owner | None, may: bool) -> None:
        machine = member(1, alive=("me",))
        assert not machine.may_claim(0, owner), "it is not being claimed"
        assert due(machine, 0.0, Do.CLAIM) == (0,)
        machine.see(("me", "alive"), (), {}, 10)
        assert machine.may_claim(0, owner) is may

    def test_a_claim_whose_answer_comes_too_late_is_no_ownership(self) -> None:
        machine = member(1)
        assert due(machine, 0.0, Do.CLAIM) == (0,)
        assert not machine.claimed(0, 11, TTL)
        assert machine.phase(0) is FREE
        machine.renewed(TTL, TTL)
        machine.see({"me"}, (), {0: Owner("me", 11)}, 12)
        assert due(machine, TTL + 1, Do.CLAIM) == (0,)

    def test_a_claim_is_answered_before_the_next_one_begins(self) -> None:
        """Also if the key has ended and was stored again meanwhile."""
        machine = member(1)
        assert due(machine, 0.0, Do.CLAIM) == (0,)
        machine.renewed(TTL, TTL)
        assert machine.due(TTL) == []
        assert not machine.may_claim(0, None)
        assert not machine.claimed(0, 11, TTL)
        assert due(machine, TTL, Do.CLAIM) == (0,)
        assert machine.claimed(0, 12, TTL)

    def test_a_claim_that_failed_is_tried_again(self) -> None:
        machine = member(1)
        assert due(machine, 0.0, Do.CLAIM) == (0,)
        machine.failed(0, 1.0)
        assert machine.due(1.0) == []
        assert machine.wake_at(1.0) == 1.0 + RETRY
        assert due(machine, 1.0 + RETRY, Do.CLAIM) == (0,)


class TestHandingOver:
    def test_to_a_member_that_joins(self) -> None:
        machine = owning()
        machine.see({"me", "other"}, (), {n: Owner("me", 21 + n) for n in range(2)}, 30)
        theirs = tuple(assign({"me", "other"}, 2)["other"])
        assert due(machine, 1.0, Do.REVOKE) == theirs
        assert machine.due(1.0) == []
        assert machine.handed_over(theirs[0])
        assert machine.due(1.0) == []
        machine.released(theirs[0], 31)
        assert machine.due(1.0) == []
        assert machine.owned == tuple(assign({"me", "other"}, 2)["me"])

    def test_a_partition_that_comes_back_is_claimed_again(self) -> None:
        machine = owning(1)
        machine.see({"me", OTHER}, (), {0: Owner("me", 21)}, 30)
        assert due(machine, 1.0, Do.REVOKE) == (0,)
        machine.see({"me"}, (), {0: Owner("me", 21)}, 31)
        assert machine.handed_over(0)
        machine.released(0, 32)
        assert due(machine, 1.0, Do.CLAIM) == (0,)

    def test_a_partition_that_was_lost_meanwhile_is_not_released(self) -> None:
        machine = owning(1)
        machine.leave()
        assert due(machine, 1.0, Do.REVOKE) == (0,)
        assert due(machine, TTL, Do.LOSE) == (0,)
        assert not machine.handed_over(0)

    def test_a_member_whose_release_is_tried_again_is_not_idle(self) -> None:
        machine = owning(1)
        machine.leave()
        assert due(machine, 1.0, Do.REVOKE) == (0,)
        assert machine.handed_over(0)
        assert not machine.working
        machine.failed(0, 1.0)
        assert machine.due(1.0) == []
        assert not machine.idle
        assert due(machine, 1.0 + RETRY, Do.RELEASE) == (0,)
        machine.released(0, 30)
        assert machine.idle


class TestLosing:
    def test_everything_is_lost_when_the_key_was_not_renewed(self) -> None:
        machine = owning()
        end = TTL - MARGIN
        assert machine.wake_at(0.0) == end
        assert machine.due(end - 0.01) == []
        assert due(machine, end, Do.LOSE) == (0, 1)
        assert machine.owned == ()
        assert machine.wake_at(end) == float("inf")

    def test_a_renewal_that_comes_after_the_end_does_not_hide_it(self) -> None:
        """The key may have ended before it was stored again, and the answer is handled before the timer."""
        machine = owning()
        machine.renewed(TTL - MARGIN - 0.1, TTL + 1.0)
        assert machine.is_valid(TTL + 1.0)
        assert machine.due(TTL + 1.0) == [(Do.LOSE, (0, 1)), (Do.CLAIM, (0, 1))]

    def test_a_record_of_another_member_ends_the_work(self) -> None:
        machine = owning()
        machine.see({"me"}, (), {0: Owner("x", 20), 1: Owner("x", 30)}, 31)
        assert machine.due(1.0)[0] == (Do.LOSE, (1,)), "the record of 0 is older than this member's"

    def test_a_record_that_was_deleted_has_no_owner(self) -> None:
        machine = member(1)
        machine.see({"me", OTHER}, {OTHER}, {0: Owner(OTHER, 20)}, 20)
        assert machine.due(0.5) == [], "its owner still has it"
        machine.see({"me", OTHER}, {OTHER}, {}, 21)
        assert due(machine, 1.0, Do.CLAIM) == (0,)

    def test_an_outage_lasts_until_the_servers_have_answered_for_a_while(self) -> None:
        machine = member()
        machine.renewed(3.0, 3.1)
        assert [machine.answered_since(then) for then in (-1.0, 0.0, 3.0, 4.0)] == [False, True, True, False]
        machine.renewed(8.0, 8.1)
        assert [machine.answered_since(then) for then in (3.0, 7.9, 8.0)] == [False, False, True]

    def test_a_fenced_commit_gives_the_partition_up(self) -> None:
        machine = owning()
        machine.fenced(0, 1.0)
        assert due(machine, 1.0, Do.LOSE) == (0,)
        assert machine.owned == (1,)
        assert due(machine, 1.0 + RETRY, Do.CLAIM) == (0,)
