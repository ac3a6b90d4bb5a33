"""Faults, as rules: what goes wrong, for which messages, when, and how often.

A `Faults` is a list of rules with a seed; a rule is a frozen dataclass, so a failing plan can be printed
and pasted. Rules about replies look at what the server sends on its own account; rules about messages look
at what clients publish, before any stream has it. The first rule that applies to a message is the one that
is carried out.

    faults = Faults(Drop(kind="pub_ack", nth=2))                       # the second PubAck never comes
    faults = Faults(Lose("orders.>", nth=5), Lose("orders.>", nth=9))  # two messages vanish on their way
    faults = Faults(Duplicate(chance=0.1), Delay(seconds=0.02, chance=0.1), seed=7)
    async with ReferenceServer(faults=faults) as server: ...
"""

from collections.abc import Callable
from dataclasses import dataclass

from . import headers, subjects
from .connections import Message

__all__ = [
    "ChangeLeader",
    "Cut",
    "Delay",
    "Drop",
    "Duplicate",
    "Faults",
    "Ignore",
    "Lose",
    "Overload",
    "Reorder",
    "Rule",
    "StaleReplica",
    "Stall",
    "Unavailable",
    "kind_of",
]


KINDS = ("pub_ack", "error", "flow_ack", "flow_gap", "flow_error", "empty", "api", "eob", "status", "message")


@dataclass(frozen=True, slots=True)
class Rule:
    """Which messages a fault is for.

    Attributes:
        subject: A pattern for the subject: of the published message, or of the reply.
        kind: For replies, what `kind_of` must say; empty for any.
        nth: The first of the matching messages to be hit, counted from 1.
        times: How many are hit from then on; `None` is all.
        chance: The share of those that is really hit, by the seeded random numbers of the plan.
        when: A further condition; it gets the `Message` with `subject`, `payload`, `reply` and `header`.

    Raises:
        ValueError: No message could ever match: a rule that is never carried out would prove nothing.
    """

    subject: str = ">"
    kind: str = ""
    nth: int = 1
    times: int | None = 1
    chance: float = 1.0
    when: Callable[[Message], bool] | None = None

    def __post_init__(self) -> None:
        """Check what was given."""
        if not isinstance(self.subject, str) or not subjects.is_valid(self.subject):
            raise ValueError(f"a rule's subject must be a pattern, not {self.subject!r}")
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"there are no replies of kind {self.kind!r}; there are {', '.join(KINDS)}")
        if self.kind and not isinstance(self, REPLY_RULES):
            raise ValueError(f"{type(self).__name__} is for messages of clients, which have no kind")
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise ValueError("nth and times count from 1")
        if not 0 < self.chance <= 1:
            raise ValueError(f"chance must be above 0 and at most 1, not {self.chance}")


# Replies of the server.


@dataclass(frozen=True, slots=True)
class Drop(Rule):
    """Send no such reply; what it reports has happened all the same.

    Example::

        Faults(Drop(kind="pub_ack"))  # stored, but the publisher never hears of it
    """


@dataclass(frozen=True, slots=True)
class Duplicate(Rule):
    """Send a reply twice.

    Example::

        Faults(Duplicate(kind="flow_ack", times=None, chance=0.2))
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(Rule):
    """Send a reply later.

    Example::

        Faults(Delay(kind="flow_ack", seconds=0.5))
    """

    seconds: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reorder(Rule):
    """Send a reply after the next `by` ones, or after `patience` seconds if fewer follow.

    Example::

        Faults(Reorder(kind="flow_ack", by=2, times=None, chance=0.3), seed=4)
    """

    by: int = 1
    patience: float = 0.1


# Messages of clients.


@dataclass(frozen=True, slots=True)
class Lose(Rule):
    """Let a message vanish: no stream stores it, and nobody answers.

    Example::

        Faults(Lose("metrics.>", nth=3))  # a gap in a fast batch
    """


@dataclass(frozen=True, slots=True)
class Ignore(Rule):
    """Take requests and never answer. Like `Lose`, but for good: `times` is all unless given.

    Example::

        Faults(Ignore("$JS.API.DIRECT.GET.>"))
    """

    times: int | None = None


@dataclass(frozen=True, slots=True)
class Unavailable(Rule):
    """Answer 503, no responders, as while a stream has no leader.

    Example::

        Faults(Unavailable("orders.>", nth=4, times=3))
    """


@dataclass(frozen=True, slots=True)
class Overload(Rule):
    """Answer 429, too many requests, and store nothing, as a stream with a full queue.

    Example::

        Faults(Overload("orders.>", times=2))
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeLeader(Rule):
    """Give the stream of the matching message another leader just before that message arrives.

    Atomic batches are lost without a word. Fast batches go on: each gets a frame with the flow started
    afresh, and a gap when the next message shows one.

    Attributes:
        unavailable: How many messages, the matching one first, get a 503 while there is no leader.
        unsaved: How many of the newest messages the old leader took without saving them; only messages of
            fast batches that no frame has acknowledged can be lost like that.

    Example::

        Faults(ChangeLeader("orders.>", nth=20, unavailable=3, unsaved=2))
    """

    unavailable: int = 0
    unsaved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleReplica(Rule):
    """Answer a Direct Get out of a replica that is `behind` messages behind. Match the stream by its subject.

    Example::

        Faults(StaleReplica("$JS.API.DIRECT.GET.ORDERS.>", behind=3, times=None, chance=0.5))
    """

    behind: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Rule):
    """Close the connection that publishes the message, after the message or, with `before`, instead of it.

    Example::

        Faults(Cut("orders.>", nth=100))
    """

    before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(Rule):
    """Neither read from nor write to the connection that publishes the message, for so many seconds.

    Example::

        Faults(Stall("orders.>", nth=10, seconds=2))
    """

    seconds: float = 1.0


REPLY_RULES = (Drop, Duplicate, Delay, Reorder)


class Faults:
    """A plan of faults.

    Rules can be added and taken away while the server runs: `faults.add(rule)`, `faults.remove(rule)`. A plan
    begins afresh with every server that is given it; give it to one at a time.
    """

    def __init__(self, *rules: Rule, seed: int = 0) -> None:
        self.rules: list[Rule] = list(rules)
        self.seed = seed
        self.seen: dict[int, int] = {}
        """How many messages each rule has matched so far, by the rule's identity."""

    def add(self, rule: Rule) -> None:
        """Have one more rule from now on."""
        self.rules.append(rule)

    def remove(self, rule: Rule) -> None:
        """Have this very rule no more.

        Raises:
            ValueError: It is not one of the rules.
        """
        for index, each in enumerate(self.rules):
            if each is rule:
                del self.rules[index]
                self.seen.pop(id(rule), None)
                return
        raise ValueError(f"{rule!r} is not in the plan")

    def __repr__(self) -> str:
        rules = "".join(f"{rule!r}, " for rule in self.rules)
        return f"Faults({rules}seed={self.seed})"


def kind_of(reply: Message) -> str:
    """Return what a reply of the server is.

    Returns:
        `pub_ack`, `error` (a refused publish or API request), `flow_ack`, `flow_gap`, `flow_error`, `empty`
        (the acknowledgement inside an atomic batch), `api` (another answer of the JSON API), `eob` (the end
        of a Direct Get batch), `status` (any other status), or `message`.
    """
    if reply.header:
        line = reply.header.split(b"\r\n", 1)[0].removeprefix(b"NATS/1.0").strip()
        if line:
            return "eob" if line == b"204 EOB" and not headers.get(reply.header, "Nats-Sequence") else "status"
        return "message"
    if not reply.payload:
        return "empty"
    for start, kind in _STARTS:
        if reply.payload.startswith(start):
            return kind
    if reply.payload.startswith(b'{"type":"io.nats.jetstream.api.'):
        return "error" if b'"error":{' in reply.payload else "api"
    return "message"


_STARTS = (
    (b'{"stream":', "pub_ack"),
    (b'{"error":', "error"),
    (b'{"type":"ack",', "flow_ack"),
    (b'{"type":"gap",', "flow_gap"),
    (b'{"type":"err",', "flow_error"),
    (b'{"ack_msgs":', "flow_ack"),
    (b'{"last_seq":', "flow_gap"),
    (b'{"seq":', "flow_ack"),
)
