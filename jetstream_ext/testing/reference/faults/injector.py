"""The fault injector: applies a plan to the messages of clients and to the replies of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from ..context import ServerContext, TimerHandle
from ..jetstream import HostedStream, JetStream
from ..publishing.publish import pub_error
from ..router import Message
from ..wire import headers, subjects
from ..wire.errors import api_error
from .rules import (
    REPLY_RULES,
    ChangeLeader,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Faults,
    Ignore,
    Lose,
    Overload,
    Reorder,
    Rule,
    StaleReplica,
    Stall,
    Unavailable,
    kind_of,
)

__all__ = ["Injector"]


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
        """Apply a plan from now on.

        Args:
            context: The server.
            jetstream: Its streams, `None` without JetStream.
            faults: The plan.
            cut: Closes a connection.
            stall: Stalls a connection for some seconds.
        """
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
                self._leaderless[hosted.stream.name] = rule.unavailable
                return self.incoming(message)
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
            self._context.send(message.reply, body, header=headers.status("429 Too Many Requests"))

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
