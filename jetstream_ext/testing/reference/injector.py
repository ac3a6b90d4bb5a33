"""Carries out a plan of faults inside the engine."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from . import headers, subjects
from .acks import pub_error
from .errors import api_error
from .faults import (
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
from .times import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .connections import Message
    from .engine import Engine
    from .stream import Stream
    from .timers import Timer

__all__ = ["Injector"]


class Injector:
    """Sits between the clients and the server, and between the server and the clients."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine = engine
        self.faults = faults
        faults.seen.clear()
        self._random = Random(faults.seed)  # noqa: S311 — reproducible on purpose, and no secret
        self._held: list[tuple[int, Message, Timer]] = []
        self._leaderless: dict[str, int] = {}
        engine.router.intercept = self._outgoing

    def incoming(self, message: Message) -> bool:
        """Apply the rules to what a client published; return whether it goes on to whom it is for."""
        stream = self._stream_of(message)
        if stream is not None and self._leaderless.get(stream.name, 0):
            self._leaderless[stream.name] -= 1
            self._answer_503(message)
            return False
        rule = next((rule for rule in self._matching(message) if not isinstance(rule, REPLY_RULES)), None)
        match rule:
            case Lose() | Ignore():
                return False
            case Unavailable():
                self._answer_503(message)
                return False
            case Overload():
                self._answer_429(message, stream)
                return False
            case ChangeLeader() if stream is not None:
                self.change_leader(stream, unsaved=rule.unsaved)
                self._leaderless[stream.name] = rule.unavailable
                return self.incoming(message)
            case StaleReplica():
                self._read_stale(message, rule.behind)
                return False
            case Cut():
                assert message.origin is not None
                if not rule.before:
                    self._engine.router.publish(message)
                self._engine.cut(message.origin)
                return False
            case Stall():
                assert message.origin is not None
                self._engine.stall(message.origin, rule.seconds)
        return True

    def change_leader(self, stream: Stream, *, unsaved: int = 0) -> None:
        """Let a stream go on under another leader."""
        stream.fast.lose_unsaved(unsaved)
        stream.atomic.forget_all()
        stream.fast.leader_changed()

    def _matching(self, message: Message, kind: str = "") -> Iterator[Rule]:
        """Yield the rules that hit this message; each one that could is counted."""
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
        rule = next(self._matching(message, kind_of(message)), None)
        now: list[Message] = []
        match rule:
            case Drop():
                pass
            case Duplicate():
                now = [message, message]
            case Delay():
                self._later(message, rule.seconds)
            case Reorder():
                timer = self._engine.timers.at(
                    self._engine.now + round(rule.patience * SECOND), lambda: self._release(message)
                )
                self._held.append((rule.by + 1, message, timer))
            case _:
                now = [message]
        return now + self._due(len(now))

    def _due(self, sent: int) -> list[Message]:
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
        self._engine.router.publish(message)

    def _later(self, message: Message, seconds: float) -> None:
        when = self._engine.now + round(seconds * SECOND)
        self._engine.timers.at(when, lambda: self._engine.router.publish(message))

    def _stream_of(self, message: Message) -> Stream | None:
        jetstream = self._engine.jetstream
        if jetstream is None:
            return None
        for stream in jetstream.streams.values():
            if any(subjects.matches(subject, message.subject) for subject in stream.config["subjects"]):
                return stream
        return None

    def _answer_503(self, message: Message) -> None:
        self._engine.router.no_responders(message)

    def _answer_429(self, message: Message, stream: Stream | None) -> None:
        if message.reply:
            name = stream.name if stream is not None else ""
            body = pub_error(name, api_error(10167))
            self._engine.router.send(message.reply, body, header=headers.status("429 Too Many Requests"))

    def _read_stale(self, message: Message, behind: int) -> None:
        jetstream = self._engine.jetstream
        name = message.subject.split(".")[4] if message.subject.startswith("$JS.API.DIRECT.GET.") else ""
        stream = jetstream.streams.get(name) if jetstream is not None else None
        if stream is None:
            self._engine.router.publish(message)
            return
        stream.replica = stream.store.as_of(behind)
        try:
            self._engine.router.publish(message)
        finally:
            stream.replica = None
