"""The server's side of the simulation: the reference server's engine, which shares no code with the client."""

from dataclasses import replace

from jetstream_ext.testing.reference import Engine, Profile
from jetstream_ext.testing.reference.wire.protocol import Deliver, Parser, Publish, Subscribe

Frame = tuple[bytes, bytes, int]

CREATE = b'{"name":"S","subjects":["s.>"],"storage":"memory","allow_batched":true,"max_msg_size":%d}'
STATUS_429 = b"NATS/1.0 429 Too Many Requests\r\n\r\n"
OVERLOAD = b'{"error":{"code":429,"err_code":10167,"description":"too many requests"},"stream":"S","seq":0}'
STATUS_503 = b"NATS/1.0 503\r\nNats-Subject: s.1\r\n\r\n"
START = 1_800_000_000 * 10**9


class Server:
    """One server with one stream, in virtual seconds."""

    def __init__(self, version: str, seed: int, *, max_msg_size: int = -1) -> None:
        self._engine = Engine(Profile.of(version), seed=seed)
        self._parser = Parser(1 << 20)
        self._engine.attach(1, START)
        # The server answers only to reply subjects that the client chose, and one subscription covers all of these.
        self._engine.handle(1, Subscribe("i.>", "1"), START)
        self._engine.handle(1, Publish("$JS.API.STREAM.CREATE.S", CREATE % max_msg_size, "x"), START)
        assert self._engine.jetstream is not None
        self._stream = self._engine.jetstream.streams["S"]
        self.leaderless = False
        self.overloaded = False

    @staticmethod
    def cut(data: bytes) -> list[Publish]:
        """Return the single publishes in what the client wrote."""
        found = Parser(1 << 20).feed(data)
        return [each for each in found if isinstance(each, Publish)]

    def take(self, message: Publish, now: float) -> list[Frame]:
        """Take one message and return the answers."""
        if self.leaderless:
            return [(message.reply.encode(), STATUS_503, len(STATUS_503))]
        if self.overloaded:
            return [(message.reply.encode(), STATUS_429 + OVERLOAD, len(STATUS_429))]
        return self._frames(self._engine.handle(1, replace(message), self._at(now)))

    def new_leader(self, now: float) -> list[Frame]:
        """Continue as a new leader that has every message."""
        self.leaderless = False
        self._engine.handle_timer(self._at(now))
        self._stream.fast.leader_changed()
        return self._frames(self._engine.handle_timer(self._at(now)))

    def restart(self, now: float) -> None:
        """Forget every batch, as a killed server does."""
        self._engine.handle_timer(self._at(now))
        self._stream.fast.forget_all()

    def stored(self) -> list[int]:
        """Return the numbers of the stored messages, in order."""
        return [int(message.payload) for message in self._stream.stream.store]

    def _at(self, now: float) -> int:
        return START + int(now * 1e9)

    @staticmethod
    def _frames(outputs: object) -> list[Frame]:
        assert isinstance(outputs, list)
        return [
            (each.subject.encode(), each.header + each.payload, len(each.header))
            for each in outputs
            if isinstance(each, Deliver)
        ]
