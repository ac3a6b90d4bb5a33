"""The reference server as a state machine: commands in, outputs out, without sockets, tasks or a clock."""

import json

from .api import Api
from .context import Limits, ServerContext
from .faults import Faults, Injector
from .jetstream import JetStream
from .releases import DIALECTS, Profile
from .router import Connection, Message, Subscription
from .streams.publish import pub_error
from .wire import subjects
from .wire.errors import not_modelled
from .wire.protocol import Command, Connect, Output, Ping, Publish, Refused, Subscribe, Unsubscribe, get_header

MAX_PAYLOAD = 1 << 20


class Engine:
    """One server as a state machine.

    Every call takes `now`, the time in nanoseconds since 1970, which must not decrease. It first fires the timers that
    are due by then, and returns its outputs in order: `Deliver`, `Line` and `Close`, each for one connection.
    `wire.encode` turns them into bytes. Call `handle_timer` at the time that `next_timer` returns.

    Example::

        engine = Engine()
        engine.attach(1, now=0)                                  # the greeting
        engine.handle(1, Subscribe("_INBOX.>", "1"), now=0)
        engine.handle(1, Publish("orders.1", b"x", "_INBOX.a"), now=0)   # [Deliver(1, "1", "_INBOX.a", ...)]
    """

    def __init__(
        self,
        profile: Profile | None = None,
        *,
        seed: int = 0,
        jetstream: bool = True,
        host: str = "127.0.0.1",
        port: int = 4222,
        max_payload: int = MAX_PAYLOAD,
        limits: Limits | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.profile: Profile = profile if profile is not None else Profile.of(DIALECTS["2.15"])
        self.context: ServerContext = ServerContext(self.profile, limits or Limits(), seed)
        self._router = self.context.router
        self.max_payload = max_payload
        self.address: tuple[str, int] = (host, port)
        """What INFO reports."""
        self.jetstream: JetStream | None = JetStream(self.context) if jetstream else None
        if self.jetstream is not None:
            Api(self.jetstream)
        plan = faults if faults is not None else Faults()
        self.injector: Injector = Injector(self.context, self.jetstream, plan, self.cut, self.stall)
        self._stalled: dict[int, list[Command]] = {}
        self._withheld: list[Output] = []

    def attach(self, connection: int, now: int) -> list[Output]:
        """Add a connection, under an id that the caller chooses, and send it INFO."""
        self._advance(now)
        self._router.connections[connection] = Connection(connection)
        self._send_info(connection)
        return self._take()

    def detach(self, connection: int, now: int) -> list[Output]:
        """Remove a connection that is closed."""
        self._advance(now)
        self._drop(connection)
        return self._take()

    def handle(self, connection: int, command: Command, now: int) -> list[Output]:
        """Process a command of a connection.

        An unknown connection is added as one that understands headers, so a simulation needs no handshake.
        """
        self._advance(now)
        client = self._router.connections.get(connection)
        if client is None:
            client = Connection(connection, headers=True, no_responders=True)
            self._router.connections[connection] = client
        self._dispatch(client, command)
        return self._take()

    def change_leader(self, stream: str, now: int, *, unsaved: int = 0) -> list[Output]:
        """Change the leader of a stream; see `ChangeLeader`.

        Raises:
            KeyError: The stream does not exist.
        """
        self._advance(now)
        if self.jetstream is None:
            raise KeyError(stream)
        self.jetstream.streams[stream].change_leader(unsaved=unsaved)
        return self._take()

    def cut(self, connection: int) -> None:
        """Close a connection after everything already sent to it."""
        self._router.close(connection)
        self._drop(connection)

    def cut_all(self) -> list[Output]:
        """Close every connection."""
        for connection in list(self._router.connections):
            self.cut(connection)
        return self._take()

    def stall(self, connection: int, seconds: float) -> None:
        """Stop processing a connection for some seconds: keep its commands and its outputs until then."""
        self._stalled.setdefault(connection, [])
        self.context.call_later(seconds, lambda: self._resume(connection))

    def next_timer(self) -> int | None:
        """Return the time at which `handle_timer` is due, or `None`."""
        return self.context.timers.next()

    def handle_timer(self, now: int) -> list[Output]:
        """Fire the timers that are due."""
        self._advance(now)
        return self._take()

    def info(self) -> dict[str, object]:
        """Return the fields of INFO that are the same for every connection."""
        host, port = self.address
        return {
            "server_id": self.context.server_id,
            "server_name": self.context.server_id,
            "version": self.profile.version,
            "proto": 1,
            "host": host,
            "port": port,
            "headers": True,
            "max_payload": self.max_payload,
            "jetstream": self.jetstream is not None,
        }

    def _send_info(self, connection: int) -> None:
        info = self.info() | {"client_id": connection, "client_ip": "127.0.0.1"}
        if self.profile.strict:
            info["api_lvl"] = self.profile.api_level
        self._router.send_line(connection, f"INFO {json.dumps(info, separators=(',', ':'))} ")

    def _advance(self, now: int) -> None:
        context = self.context
        while (timer := context.timers.pop(now)) is not None:
            context.now = max(context.now, timer.when)
            timer.call()
        context.now = max(context.now, now)

    def _take(self) -> list[Output]:
        outputs, self._router.outputs = self._router.outputs, []
        if self._stalled:
            self._withheld += [output for output in outputs if output.connection in self._stalled]
            outputs = [output for output in outputs if output.connection not in self._stalled]
        return outputs

    def _dispatch(self, client: Connection, command: Command) -> None:
        if client.id in self._stalled:
            self._stalled[client.id].append(command)
            return
        match command:
            case Connect(options):
                self._connect(client, options)
            case Refused(reason):
                self._end(client, reason)
            case Ping():
                self._router.send_line(client.id, "PONG")
            case Publish():
                self._publish(client, command)
            case Subscribe():
                self._subscribe(client, command)
            case Unsubscribe():
                self._unsubscribe(client, command)

    def _connect(self, client: Connection, options: dict[str, object]) -> None:
        client.echo = options.get("echo") is not False
        client.headers = options.get("headers") is True
        client.no_responders = options.get("no_responders") is True
        if client.no_responders and not client.headers:
            self._end(client, "No Responders Requires Headers Support")
        for name in ("verbose", "pedantic"):
            if options.get(name):
                self._end(client, str(not_modelled(f"option {name} of CONNECT")))

    def _publish(self, client: Connection, command: Publish) -> None:
        if not subjects.is_valid(command.subject):
            return  # no subscription matches it
        if self.profile.tracing and get_header(command.header, "Nats-Trace-Dest"):
            refusal = not_modelled("header Nats-Trace-Dest")
            if command.reply:
                self.context.send(command.reply, pub_error("", refusal))
            else:
                self._router.send_line(client.id, f"-ERR '{refusal}'")
            return
        message = Message(command.subject, command.payload, command.reply, command.header, client.id)
        if not self.injector.faults.rules or self.injector.incoming(message):
            self._router.publish(message)

    def _subscribe(self, client: Connection, command: Subscribe) -> None:
        if not subjects.is_valid(command.subject):
            self._router.send_line(client.id, "-ERR 'Invalid Subject'")
            return
        if command.sid in client.subscriptions:
            return
        subscription = Subscription(command.subject, command.queue, client.id, command.sid)
        client.subscriptions[command.sid] = subscription
        self._router.subscribe(subscription)
        if self.jetstream is not None:
            self.jetstream.interest_changed()

    def _unsubscribe(self, client: Connection, command: Unsubscribe) -> None:
        subscription = client.subscriptions.get(command.sid)
        if subscription is None:
            return
        subscription.limit = command.limit
        if command.limit == 0 or subscription.delivered >= command.limit:
            del client.subscriptions[command.sid]
            self._router.unsubscribe(subscription)
            if self.jetstream is not None:
                self.jetstream.interest_changed()

    def _end(self, client: Connection, reason: str) -> None:
        if reason:
            self._router.send_line(client.id, f"-ERR '{reason}'")
        self.cut(client.id)

    def _resume(self, connection: int) -> None:
        commands = self._stalled.pop(connection, [])
        held = self._withheld
        self._router.outputs += [output for output in held if output.connection == connection]
        self._withheld = [output for output in held if output.connection != connection]
        for command in commands:
            client = self._router.connections.get(connection)
            if client is not None:
                self._dispatch(client, command)

    def _drop(self, connection: int) -> None:
        self._stalled.pop(connection, None)
        client = self._router.connections.pop(connection, None)
        if client is not None:
            self._router.unsubscribe(*client.subscriptions.values())
            if self.jetstream is not None:
                self.jetstream.interest_changed()
