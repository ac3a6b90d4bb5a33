"""The reference server without sockets, tasks or clock: commands in, outputs out."""

import json
from collections.abc import Iterable
from random import Random

from . import ids, subjects
from .connections import Connection, Message, Permissions, Subscription, User
from .faults import Faults
from .injector import Injector
from .jetstream import JetStream
from .limits import Limits
from .router import Router
from .timers import Timers
from .times import SECOND
from .versions import Profile
from .wire import Command, Connect, Output, Ping, Pong, Publish, Refused, Subscribe, Unsubscribe

__all__ = ["Engine"]

MAX_PAYLOAD = 1 << 20


class Engine:
    """One server, as a pure machine.

    Every call takes `now`, integer nanoseconds since 1970 that never go back, and returns the outputs in
    order: `Deliver`, `Line` and `Close`, each for one connection. `wire.encode` makes bytes of them.

    Before anything else a call fires the timers that are due by `now`. Between calls, ask `next_timer` and
    call `handle_timer` when that instant has come.

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
        users: Iterable[User] = (),
        token: str | None = None,
        jetstream: bool = True,
        host: str = "127.0.0.1",
        port: int = 4222,
        max_payload: int = MAX_PAYLOAD,
        limits: Limits | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.profile: Profile = profile if profile is not None else Profile.of("2.15.1")
        self.max_payload = max_payload
        self.now: int = 0
        self.random: Random = Random(seed)  # noqa: S311 — reproducible on purpose, and no secret
        self.timers: Timers = Timers()
        self.router: Router = Router(self.profile, self.random)
        self._users = {user.name: user for user in users}
        self._token = token
        self._address = (host, port)
        self.server_id: str = ids.server_id(self.random)
        self.jetstream: JetStream | None = JetStream(self, limits or Limits()) if jetstream else None
        self.injector: Injector = Injector(self, faults if faults is not None else Faults())
        self._stalled: dict[int, list[Command]] = {}
        self._withheld: list[Output] = []

    def attach(self, connection: int, now: int) -> list[Output]:
        """Take a new connection, under an id of the caller's, and greet it."""
        self._advance(now)
        self.router.connections[connection] = Connection(connection, authorized=not self._needs_login)
        self.router.line(connection, f"INFO {json.dumps(self._info(connection), separators=(',', ':'))} ")
        return self._take()

    def detach(self, connection: int, now: int) -> list[Output]:
        """Forget a connection that is gone."""
        self._advance(now)
        self._drop(connection)
        return self._take()

    def handle(self, connection: int, command: Command, now: int) -> list[Output]:
        """Process a command of a connection, and return everything that follows from it.

        A connection that was not attached is attached, as one that did CONNECT with headers and without a
        login: a simulation needs no handshake.
        """
        self._advance(now)
        client = self.router.connections.get(connection)
        if client is None:
            client = Connection(connection, authorized=True, headers=True, no_responders=True)
            self.router.connections[connection] = client
        self._dispatch(client, command)
        return self._take()

    def change_leader(self, stream: str, now: int, *, unsaved: int = 0) -> list[Output]:
        """Give a stream another leader; see `ChangeLeader`.

        Raises:
            KeyError: There is no such stream.
        """
        self._advance(now)
        if self.jetstream is None:
            raise KeyError(stream)
        self.injector.change_leader(self.jetstream.streams[stream], unsaved=unsaved)
        return self._take()

    def cut(self, connection: int) -> None:
        """Close a connection, after what is on its way."""
        self.router.close(connection)
        self._drop(connection)

    def cut_all(self) -> list[Output]:
        """Close every connection."""
        for connection in list(self.router.connections):
            self.cut(connection)
        return self._take()

    def stall(self, connection: int, seconds: float) -> None:
        """Let a connection wait: what it sends and what it should get is kept for so long."""
        self._stalled.setdefault(connection, [])
        self.timers.at(self.now + round(seconds * SECOND), lambda: self._resume(connection))

    def _resume(self, connection: int) -> None:
        waiting = self._stalled.pop(connection, [])
        held = self._withheld
        self.router.outputs += [output for output in held if output.connection == connection]
        self._withheld = [output for output in held if output.connection != connection]
        for command in waiting:
            client = self.router.connections.get(connection)
            if client is not None:
                self._dispatch(client, command)

    def next_timer(self) -> int | None:
        """Return when `handle_timer` is due, or `None`."""
        return self.timers.next()

    def handle_timer(self, now: int) -> list[Output]:
        """Fire the timers that are due."""
        self._advance(now)
        return self._take()

    def info(self) -> dict[str, object]:
        """Return what INFO says to every connection."""
        host, port = self._address
        info: dict[str, object] = {
            "server_id": self.server_id,
            "server_name": self.server_id,
            "version": self.profile.version,
            "proto": 1,
            "git_commit": self.profile.git_commit,
            "go": self.profile.go,
            "host": host,
            "port": port,
            "headers": True,
        }
        if self._needs_login:
            info["auth_required"] = True
        return info | {"max_payload": self.max_payload, "jetstream": self.jetstream is not None}

    def set_address(self, host: str, port: int) -> None:
        """Say where the server listens, for INFO."""
        self._address = (host, port)

    @property
    def _needs_login(self) -> bool:
        return bool(self._users) or self._token is not None

    def _info(self, connection: int, *, after_connect: bool = False) -> dict[str, object]:
        info = self.info() | {"client_id": connection, "client_ip": "127.0.0.1"}
        if after_connect:
            info |= {"connect_info": True, "remote_account": "$G"}
        if self.profile.announces_level:
            info["api_lvl"] = self.profile.api_level
        return info | {"xkey": "X" + self.server_id[1:]}

    def _advance(self, now: int) -> None:
        while (timer := self.timers.pop(now)) is not None:
            self.now = max(self.now, timer.when)
            timer.call()
        self.now = max(self.now, now)

    def _take(self) -> list[Output]:
        outputs, self.router.outputs = self.router.outputs, []
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
                return
            case Refused(reason):
                self._end(client, reason)
                return
            case Ping() if client.authorized:
                self.router.line(client.id, "PONG")
                if client.async_info and not client.greeted and self.profile.announces_level:
                    info = self._info(client.id, after_connect=True)
                    self.router.line(client.id, f"INFO {json.dumps(info, separators=(',', ':'))} ")
                client.greeted = True
                return
            case Pong() if client.authorized:
                return
        if not client.authorized:
            self._end(client, "Authorization Violation")
            return
        match command:
            case Publish():
                self._publish(client, command)
            case Subscribe():
                self._subscribe(client, command)
            case Unsubscribe():
                self._unsubscribe(client, command)
        if client.verbose and client.id in self.router.connections:
            self.router.line(client.id, "+OK")

    def _connect(self, client: Connection, options: dict[str, object]) -> None:
        permissions = self._login(options)
        if permissions is None:
            self._end(client, "Authorization Violation")
            return
        client.authorized = True
        client.permissions = permissions
        client.verbose = options.get("verbose") is True
        client.pedantic = options.get("pedantic") is True
        client.echo = options.get("echo") is not False
        client.headers = options.get("headers") is True
        client.async_info = options.get("protocol") == 1
        client.no_responders = options.get("no_responders") is True
        if client.no_responders and not client.headers:
            self._end(client, "No Responders Requires Headers Support")
        elif client.verbose:
            self.router.line(client.id, "+OK")

    def _login(self, options: dict[str, object]) -> Permissions | None:
        if self._token is not None and options.get("auth_token") == self._token:
            return Permissions()
        user = self._users.get(str(options.get("user")))
        if user is not None and options.get("pass") == user.password:
            return user.permissions
        return None if self._needs_login else Permissions()

    def _publish(self, client: Connection, command: Publish) -> None:
        if client.pedantic and not subjects.is_literal(command.subject):
            self.router.line(client.id, "-ERR 'Invalid Publish Subject'")
            return
        if not client.permissions.may_publish(command.subject):
            self.router.line(client.id, f"-ERR 'Permissions Violation for Publish to \"{command.subject}\"'")
            return
        if not subjects.is_valid(command.subject):
            return  # matches no subscription
        message = Message(command.subject, command.payload, command.reply, command.header, client.id)
        if not self.injector.faults.rules or self.injector.incoming(message):
            self.router.publish(message)

    def _subscribe(self, client: Connection, command: Subscribe) -> None:
        if not subjects.is_valid(command.subject):
            self.router.line(client.id, "-ERR 'Invalid Subject'")
            return
        if not client.permissions.may_subscribe(command.subject):
            group = f' using queue "{command.queue}"' if command.queue else ""
            violation = f'Permissions Violation for Subscription to "{command.subject}"{group}'
            self.router.line(client.id, f"-ERR '{violation}'")
            return
        if command.sid in client.subscriptions:
            return
        subscription = Subscription(command.subject, command.queue, client.id, command.sid)
        client.subscriptions[command.sid] = subscription
        self.router.subscribe(subscription)
        if self.jetstream is not None:
            self.jetstream.interest_changed()

    def _unsubscribe(self, client: Connection, command: Unsubscribe) -> None:
        subscription = client.subscriptions.get(command.sid)
        if subscription is None:
            return
        subscription.limit = command.limit
        if command.limit == 0 or subscription.delivered >= command.limit:
            del client.subscriptions[command.sid]
            self.router.unsubscribe(subscription)
            if self.jetstream is not None:
                self.jetstream.interest_changed()

    def _end(self, client: Connection, reason: str) -> None:
        if reason:
            self.router.line(client.id, f"-ERR '{reason}'")
        self.router.close(client.id)
        self._drop(client.id)

    def _drop(self, connection: int) -> None:
        self._stalled.pop(connection, None)
        client = self.router.connections.pop(connection, None)
        if client is not None:
            for subscription in client.subscriptions.values():
                self.router.unsubscribe(subscription)
            if self.jetstream is not None:
                self.jetstream.interest_changed()
