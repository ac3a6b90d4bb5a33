"""Fault plans: rules that say which messages and replies a fault hits, and how often.

A `Faults` is a list of rules with a seed; a rule is a frozen dataclass, so a failing plan can be printed and pasted into
a test. Rules for replies see what the server itself sends. The other rules see what clients publish, before a stream
stores it. Only the first matching rule is applied to a message.

    faults = Faults(Drop(kind="pub_ack", nth=2))                       # the second PubAck is lost
    faults = Faults(Lose("orders.>", nth=5), Lose("orders.>", nth=9))  # two messages never reach the stream
    faults = Faults(Duplicate(chance=0.1), Delay(seconds=0.02, chance=0.1), seed=7)
    async with ReferenceServer(faults=faults) as server: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from .context import ServerContext, TimerHandle
from .jetstream import HostedStream, JetStream
from .router import Message
from .streams.publish import pub_error
from .wire import subjects
from .wire.errors import api_error
from .wire.protocol import get_header, status_header

KINDS = ("pub_ack", "error", "flow_ack", "flow_gap", "flow_error", "empty", "api", "eob", "status", "message")


@dataclass(frozen=True, slots=True)
class Rule:
    """Which messages a fault hits.

    Attributes:
        subject: A pattern for the subject of the published message, or of the reply.
        kind: The kind of reply, as `kind_of` names it; empty matches all.
        nth: The first matching message that is hit, counted from 1.
        times: How many matching messages are hit, from `nth` on; `None` means all.
        chance: The probability that each of them is hit, drawn from the seeded random numbers of the plan.
        when: A further condition on the `Message`, which has `subject`, `payload`, `reply`, `header`, and `shown`, the
            subject that clients see if it differs.

    Raises:
        ValueError: No message can ever match.
    """

    subject: str = ">"
    kind: str = ""
    nth: int = 1
    times: int | None = 1
    chance: float = 1.0
    when: Callable[[Message], bool] | None = None

    def __post_init__(self) -> None:
        """Refuse a rule that can never match."""
        if not isinstance(self.subject, str) or not subjects.is_valid(self.subject):
            raise ValueError(f"{type(self).__name__}: {self.subject!r} is not a valid subject or pattern")
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"{type(self).__name__}: unknown kind {self.kind!r}; the kinds are {', '.join(KINDS)}")
        if self.kind and not isinstance(self, REPLY_RULES):
            raise ValueError(
                f"{type(self).__name__}: kind applies only to rules about replies, and this rule is about client messages"
            )
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise ValueError(f"{type(self).__name__}: nth and times must be at least 1")
        if not 0 < self.chance <= 1:
            raise ValueError(f"{type(self).__name__}: chance must be above 0 and at most 1, not {self.chance}")


# Replies of the server.


@dataclass(frozen=True, slots=True)
class Drop(Rule):
    """Lose a reply on its way to the client: the server has processed the message.

    Example::

        Faults(Drop(kind="pub_ack"))  # the message is stored, but its publisher gets no PubAck
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
    """Send a reply after the next `by` replies, or after `patience` seconds if fewer follow.

    Example::

        Faults(Reorder(kind="flow_ack", by=2, times=None, chance=0.3), seed=4)
    """

    by: int = 1
    patience: float = 0.1


# Messages of clients.


@dataclass(frozen=True, slots=True)
class Lose(Rule):
    """Lose a message: no stream stores it, and the publisher gets no answer.

    Example::

        Faults(Lose("metrics.>", nth=3))  # a gap in a fast batch
    """


@dataclass(frozen=True, slots=True)
class Ignore(Rule):
    """Never answer requests. The same as `Lose`, except that `times` defaults to all.

    Example::

        Faults(Ignore("$JS.API.DIRECT.GET.>"))
    """

    times: int | None = None


@dataclass(frozen=True, slots=True)
class Unavailable(Rule):
    """Answer 503 (no responders), as while a stream has no leader.

    Example::

        Faults(Unavailable("orders.>", nth=4, times=3))
    """


@dataclass(frozen=True, slots=True)
class Overload(Rule):
    """Answer 429 (too many requests) and store nothing, as a stream with a full queue does.

    Example::

        Faults(Overload("orders.>", times=2))
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeLeader(Rule):
    """Change the leader of the stream just before the matching message arrives.

    The server drops the open atomic batches and sends nothing about them. Fast batches continue: each gets a frame that
    restarts its flow, and a gap frame if the next message reveals a gap.

    Attributes:
        unavailable: How many messages get a 503 before there is a new leader, including the matching one.
        unsaved: How many of the newest messages are lost with the old leader. It loses only messages of fast batches
            that no frame has acknowledged.

    Example::

        Faults(ChangeLeader("orders.>", nth=20, unavailable=3, unsaved=2))
    """

    unavailable: int = 0
    unsaved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleReplica(Rule):
    """Answer a Direct Get from a replica that is `behind` messages behind the leader.

    Example::

        Faults(StaleReplica("$JS.API.DIRECT.GET.ORDERS.>", behind=3, times=None, chance=0.5))
    """

    behind: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Rule):
    """Close the connection that publishes the message: after processing it, or with `before` without processing it.

    Example::

        Faults(Cut("orders.>", nth=100))
    """

    before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(Rule):
    """Stop reading from and writing to the connection that publishes the message, for some seconds.

    Example::

        Faults(Stall("orders.>", nth=10, seconds=2))
    """

    seconds: float = 1.0


REPLY_RULES = (Drop, Duplicate, Delay, Reorder)


class Faults:
    """A fault plan: rules, and the seed of their random numbers.

    Rules can be added and removed while the server runs. The counts of a plan restart with every server that uses it,
    so do not share a plan between running servers.
    """

    def __init__(self, *rules: Rule, seed: int = 0) -> None:
        self.rules: list[Rule] = list(rules)
        self.seed = seed
        self.seen: dict[int, int] = {}
        """How many messages each rule has matched so far, by the rule's `id`."""

    def add(self, rule: Rule) -> None:
        """Add a rule."""
        self.rules.append(rule)

    def remove(self, rule: Rule) -> None:
        """Remove a rule: this object, not an equal one.

        Raises:
            ValueError: The rule is not in the plan.
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
    """Return the kind of a reply.

    Returns:
        `pub_ack`, `error` (a refused publish or API request), `flow_ack`, `flow_gap`, `flow_error`, `empty`
        (the acknowledgement inside an atomic batch), `api` (any other answer of the JSON API), `eob` (the end
        of a Direct Get batch), `status` (any other status), or `message`.
    """
    if reply.header:
        line = reply.header.split(b"\r\n", 1)[0].removeprefix(b"NATS/1.0").strip()
        if line:
            return "eob" if line == b"204 EOB" and not get_header(reply.header, "Nats-Sequence") else "status"
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


class Injector:
    """Apply the rules of a fault plan."""

    def __init__(
        self,
        context: ServerContext,
        jetstream: JetStream | None,
        faults: Faults,
        cut: Callable[[int], None],
        stall: Callable[[int, float], None],
    ) -> None:
        self.faults = faults
        faults.seen.clear()
        self._context = context
        self._streams = jetstream.streams if jetstream is not None else {}
        self._cut = cut
        self._stall = stall
        self._random = Random(faults.seed)  # noqa: S311 — must be reproducible, and protects no secret
        self._held: list[tuple[int, Message, TimerHandle]] = []
        """Reordered replies, each with the number of replies to wait for."""
        self._leaderless: dict[str, int] = {}
        """How many more messages each stream answers with 503."""
        context.router.intercept = self._outgoing

    def incoming(self, message: Message) -> bool:
        """Apply the rules to a message of a client; return whether the server still routes it."""
        hosted = self._stream_of(message)
        if hosted is not None and self._leaderless.get(hosted.stream.name, 0):
            self._leaderless[hosted.stream.name] -= 1
            self._context.router.send_no_responders(message)
            return False
        rule = next((rule for rule in self._matching(message) if not isinstance(rule, REPLY_RULES)), None)
        match rule:
            case Lose() | Ignore():
                return False
            case Unavailable():
                self._context.router.send_no_responders(message)
                return False
            case Overload():
                self._answer_429(message, hosted)
                return False
            case ChangeLeader() if hosted is not None:
                hosted.change_leader(unsaved=rule.unsaved)
                if rule.unavailable:
                    self._leaderless[hosted.stream.name] = rule.unavailable - 1
                    self._context.router.send_no_responders(message)
                    return False
            case StaleReplica():
                self._read_stale(message, rule.behind)
                return False
            case Cut():
                assert message.origin is not None
                if not rule.before:
                    self._context.router.publish(message)
                self._cut(message.origin)
                return False
            case Stall():
                assert message.origin is not None
                self._stall(message.origin, rule.seconds)
        return True

    def _matching(self, message: Message, kind: str = "") -> Iterator[Rule]:
        """Yield the rules that hit a message, and count it for each rule it matches."""
        seen = self.faults.seen
        for rule in list(self.faults.rules):
            if isinstance(rule, REPLY_RULES) != bool(kind) or (kind and rule.kind not in ("", kind)):
                continue
            if not subjects.matches(rule.subject, message.subject) or (
                rule.when is not None and not rule.when(message)
            ):
                continue
            count = seen[id(rule)] = seen.get(id(rule), 0) + 1
            if count < rule.nth or (rule.times is not None and count >= rule.nth + rule.times):
                continue
            if rule.chance >= 1 or self._random.random() < rule.chance:
                yield rule

    def _outgoing(self, message: Message) -> list[Message]:
        if not self.faults.rules and not self._held:
            return [message]
        now: list[Message] = []
        match next(self._matching(message, kind_of(message)), None):
            case Drop():
                pass
            case Duplicate():
                now = [message, message]
            case Delay(seconds=seconds):
                self._context.call_later(seconds, lambda: self._context.router.publish(message))
            case Reorder(by=by, patience=patience):
                timer = self._context.call_later(patience, lambda: self._release(message))
                self._held.append((by + 1, message, timer))
            case _:
                now = [message]
        return now + self._overtaken(len(now))

    def _overtaken(self, sent: int) -> list[Message]:
        """Return the reordered replies that enough later ones have now overtaken."""
        if not sent or not self._held:
            return []
        held = [(left - sent, message, timer) for left, message, timer in self._held]
        self._held = [each for each in held if each[0] > 1]
        due = [each for each in held if each[0] <= 1]
        for _, _, timer in due:
            timer.cancel()
        return [message for _, message, _ in due]

    def _release(self, message: Message) -> None:
        self._held = [each for each in self._held if each[1] is not message]
        self._context.router.publish(message)

    def _stream_of(self, message: Message) -> HostedStream | None:
        for hosted in self._streams.values():
            if any(subjects.matches(subject, message.subject) for subject in hosted.stream.config["subjects"]):
                return hosted
        return None

    def _answer_429(self, message: Message, hosted: HostedStream | None) -> None:
        if message.reply:
            body = pub_error(hosted.stream.name if hosted is not None else "", api_error(10167))
            self._context.send(message.reply, body, header=status_header("429 Too Many Requests"))

    def _read_stale(self, message: Message, behind: int) -> None:
        name = message.subject.split(".")[4] if message.subject.startswith("$JS.API.DIRECT.GET.") else ""
        hosted = self._streams.get(name)
        if hosted is None:
            self._context.router.publish(message)
            return
        hosted.stream.replica = hosted.stream.store.as_of(behind)
        try:
            self._context.router.publish(message)
        finally:
            hosted.stream.replica = None
