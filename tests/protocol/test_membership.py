"""What one member of a group does, event by event."""

from cells import walk

from jetstream_ext.protocol.membership import RETRY, Claim, Lose, Membership, Owner, Release, Revoke
from jetstream_ext.protocol.partitions import assign

TTL, MARGIN = 9.0, 0.9


def claims(machine: Membership, now: float) -> dict[int, int]:
    """Return the partitions that are to be claimed, with their attempts; nothing else may be due."""
    actions = machine.due(now)
    found = {it.partition: it.attempt for it in actions if isinstance(it, Claim)}
    assert len(found) == len(actions)
    return found


def releases(machine: Membership, now: float) -> dict[int, int]:
    actions = machine.due(now)
    found = {it.partition: it.attempt for it in actions if isinstance(it, Release)}
    assert len(found) == len(actions)
    return found


def revokes(machine: Membership, now: float) -> dict[int, int]:
    """Return the partitions that are to be revoked, with the attempts that have claimed them; nothing else may be due."""
    [action] = machine.due(now)
    assert isinstance(action, Revoke)
    return dict(action.attempts)


def member(partitions: int = 2, *, alive: tuple[str, ...] = ("me",), renewed: float = 0.0) -> Membership:
    machine = Membership("me", partitions, ttl=TTL, margin=MARGIN)
    machine.renewed(renewed, renewed)
    machine.see(alive, (), {}, 10)
    return machine


def owning(partitions: int = 2) -> Membership:
    """A member that owns every partition, by records of the revisions 21, 22 …"""
    machine = member(partitions)
    for number, attempt in claims(machine, 0.0).items():
        assert machine.claimed(number, attempt, 21 + number, 0.1)
    return machine


def owned_by(*ids: str, revision: int = 21) -> dict[int, Owner]:
    return {number: Owner(owner, revision + number) for number, owner in enumerate(ids)}


def join(machine: Membership, *others: str, revision: int = 30) -> set[int]:
    """Let others join; return the partitions that they get."""
    alive = {"me", *others}
    machine.see(alive, (), owned_by("me", "me"), revision)
    return set(range(2)) - set(assign(alive, 2)["me"])


class TestClaiming:
    def test_nothing_is_claimed_before_the_key_is_stored_or_after_it_may_have_ended(self) -> None:
        machine = Membership("me", 2, ttl=TTL, margin=MARGIN)
        machine.see((), (), {}, 10)
        assert machine.due(0.0) == []
        machine.renewed(5.0, 5.0)
        assert not machine.is_valid(5.0 + TTL - MARGIN)
        assert machine.due(5.0 + TTL - MARGIN) == []
        assert list(claims(machine, 5.0 + TTL - MARGIN - 0.01)) == [0, 1]

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
        assert member(alive=("me", "alive")).may_claim(owner) is may

    def test_a_claim_whose_answer_comes_too_late_is_no_ownership(self) -> None:
        machine = member(1)
        assert not machine.claimed(0, claims(machine, 0.0)[0], 11, TTL)
        assert machine.owned == ()
        machine.renewed(TTL, TTL)
        machine.see({"me"}, (), {0: Owner("me", 11)}, 12)
        assert list(claims(machine, TTL + 1)) == [0]

    def test_the_result_of_an_older_attempt_changes_nothing(self) -> None:
        machine = member(1)
        old = claims(machine, 0.0)[0]
        assert machine.due(TTL) == [Lose((0,))]
        machine.renewed(TTL, TTL)
        new = claims(machine, TTL)[0]
        machine.failed(0, old, TTL)
        assert machine.claimed(0, new, 12, TTL)
        assert not machine.claimed(0, old, 11, TTL)
        machine.failed(0, old, TTL)
        assert machine.owned == (0,)
        assert machine.holds(0, 12)

    def test_a_new_group_is_claimed_completely(self) -> None:
        machine = member()
        attempts = claims(machine, 0.0)
        assert list(attempts) == [0, 1]
        assert machine.due(0.0) == []
        assert machine.claimed(0, attempts[0], 11, 0.1)
        assert machine.owned == (0,)
        assert machine.holds(0, 11)
        assert not machine.holds(0, 10)


class TestHandingOver:
    def test_a_member_whose_release_is_tried_again_is_not_idle(self) -> None:
        machine = owning(1)
        machine.leave()
        machine.revoked(0, revokes(machine, 1.0)[0])
        machine.failed(0, releases(machine, 1.0)[0], 1.0)
        assert machine.due(1.0) == []
        assert not machine.idle
        machine.released(0, releases(machine, 1.0 + RETRY)[0], 30)
        assert machine.idle

    def test_whether_to_try_again(self) -> None:
        """Not if the key is stored all the time: then the servers answer, and do not let the member store this."""
        machine = member(2)
        attempts = claims(machine, 0.0)
        assert not machine.failed(0, attempts[0], 1.0)
        assert machine.failed(0, attempts[0], 1.0)  # it is no attempt any more
        machine.due(TTL)
        machine.renewed(TTL, TTL)
        assert machine.failed(1, attempts[1], TTL)
        attempts = claims(machine, TTL)
        assert machine.failed(0, attempts[0], 3 * TTL)


class TestLosing:
    def test_everything_is_lost_when_the_key_was_not_renewed(self) -> None:
        machine = owning()
        end = TTL - MARGIN
        assert machine.wake_at(0.0) == end
        assert machine.due(end - 0.01) == []
        assert machine.due(end) == [Lose((0, 1))]
        assert machine.owned == ()
        assert machine.wake_at(end) == float("inf")

    def test_a_renewal_that_comes_after_the_end_does_not_hide_it(self) -> None:
        """The key may have ended before it was stored again, and the answer is handled before the timer."""
        machine = owning()
        machine.renewed(TTL - MARGIN - 0.1, TTL + 1.0)
        assert machine.is_valid(TTL + 1.0)
        [lost, *claimed] = machine.due(TTL + 1.0)
        assert lost == Lose((0, 1))
        assert [it.partition for it in claimed if isinstance(it, Claim)] == [0, 1]

    def test_a_fenced_commit_gives_the_partition_up(self) -> None:
        machine = owning()
        assert not machine.fenced(0, 20, 1.0)  # behind an older record
        assert machine.fenced(0, 21, 1.0)
        assert machine.owned == (1,)
        assert list(claims(machine, 1.0 + RETRY)) == [0]
