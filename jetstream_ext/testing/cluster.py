"""A cluster of real nats-servers with JetStream."""

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from .process import HeldPort, NatsServerStartError
from .server import Lifecycle, NatsServer

_POLL_INTERVAL = 0.02
_REQUEST_TIMEOUT = 1.0
_LOG_CHARS_IN_ERRORS = 1500
_MOST_REPLICAS = 5
_NOT_YET = (10005, 10008)  # no suitable peers for placement; no leader
_TRIAL_STREAM = "nats_cluster_trial"


class NatsCluster(Lifecycle):
    """Run a JetStream cluster on 127.0.0.1 for the length of a `with` or `async with` block.

    Each of `servers` is a `NatsServer` that can be killed, paused and restarted. As there, every method but `async with`
    blocks.

    Example::

        async with NatsCluster() as cluster:
            nc = await nats.connect(cluster.urls)
            await nc.jetstream().add_stream(name="ORDERS", num_replicas=3)
    """

    def __init__(
        self,
        n: int = 3,
        *,
        version: str | None = None,
        config: str | os.PathLike[str] | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        """Describe the cluster; `start` or `with` starts it.

        Args:
            n: The number of servers, at least 2; a stream can have that many replicas, up to 5.
            version: An exact release, as for `NatsServer`.
            config: Extra configuration of each server, as for `NatsServer`.
            start_timeout: How long `start` waits for the cluster to be ready, in seconds.

        Raises:
            ValueError: `n` is less than 2.
        """
        if n < 2:
            raise ValueError(f"a cluster has at least 2 servers, not {n}; for a single server, use NatsServer")
        self._n = n
        self._version = version
        self._config = config
        self._start_timeout = start_timeout
        self._servers: tuple[NatsServer, ...] = ()
        self._cleanup = contextlib.ExitStack()

    def start(self) -> Self:
        """Start the servers, and wait until streams with `n` replicas can be created.

        Returns:
            The cluster itself.

        Raises:
            NatsServerNotFoundError: There is no nats-server binary; the text says how to install one.
            NatsServerStartError: A server did not start, or the cluster was not ready in time.
            RuntimeError: The cluster is started already.
        """
        if self._servers:
            raise RuntimeError("the cluster is already started; call stop() first")
        deadline = time.monotonic() + self._start_timeout
        with contextlib.ExitStack() as cleanup:
            ports = [HeldPort() for _ in range(self._n)]
            for port in ports:
                cleanup.callback(port.close)
            routes = ",".join(f"nats://127.0.0.1:{port.port}" for port in ports)
            servers = []
            for number, port in enumerate(ports, 1):
                server = NatsServer(
                    version=self._version,
                    config=self._config,
                    name=f"n{number}",
                    args=_cluster_args(port.port, routes),
                    start_timeout=self._start_timeout,
                )
                port.make_way()
                servers.append(cleanup.enter_context(server))
            self._servers = tuple(servers)
            cleanup.callback(self._forget_servers)
            self.wait_ready(timeout=max(0.0, deadline - time.monotonic()))
            self._cleanup = cleanup.pop_all()
        return self

    def stop(self) -> None:
        """Stop all servers and remove their stores. Stopping twice is fine."""
        self._cleanup.close()

    def kill(self) -> None:
        """End all servers with SIGKILL, as a power failure would, and keep their stores and ports for `restart`.

        To end one server, use `cluster.servers[0].kill()`.

        Raises:
            RuntimeError: The cluster is not started.
        """
        for server in self.servers:
            server.kill()

    def restart(self) -> None:
        """Stop the running servers, start all of them on the same ports and stores, and wait for a leader.

        Raises:
            NatsServerStartError: A server did not start, or the cluster was not ready in time.
            RuntimeError: The cluster is not started.
        """
        deadline = time.monotonic() + self._start_timeout
        for server in self.servers:
            server.restart()
        self.wait_ready(timeout=max(0.0, deadline - time.monotonic()))

    def pause(self) -> None:
        """Pause all servers: until `resume`, connections stay open and they answer nothing.

        Raises:
            RuntimeError: The cluster is not started, one of its servers is not running, or this is Windows.
        """
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        """Resume all servers. The cluster may need some seconds to elect its leaders again; see `wait_ready`.

        Raises:
            RuntimeError: The cluster is not started, one of its servers is not running, or this is Windows.
        """
        for server in self.servers:
            server.resume()

    def wait_ready(self, *, timeout: float = 30.0) -> NatsServer:
        """Wait until the running servers are a majority with one JetStream leader, and all of them take streams.

        To find that out, this creates and deletes a stream named ``nats_cluster_trial``, if the configuration admits
        clients without credentials. After the leader was killed, paused or restarted, the election takes some seconds.
        Each stream has its own leader, which this does not wait for.

        Args:
            timeout: How long to wait, in seconds.

        Returns:
            The server that leads the JetStream meta group.

        Raises:
            NatsServerStartError: The cluster is not ready within `timeout`.
            RuntimeError: The cluster is not started.
        """
        deadline = time.monotonic() + timeout
        while (leader := self._settled_leader()) is None or not _takes_requests(leader, self._running()):
            if time.monotonic() > deadline:
                logs = "\n".join(f"{server!r}:\n{server.log[-_LOG_CHARS_IN_ERRORS:]}" for server in self.servers)
                raise NatsServerStartError(
                    f"the cluster of {self._n} has no JetStream leader, or not all its servers take streams, "
                    f"after {timeout:g} s. The end of its logs:\n{logs}"
                )
            time.sleep(_POLL_INTERVAL)
        return leader

    @property
    def servers(self) -> Sequence[NatsServer]:
        """The servers, running or not, in a fixed order."""
        if not self._servers:
            raise RuntimeError("the cluster is not started; use `with NatsCluster() as cluster:`, or start()")
        return self._servers

    @property
    def urls(self) -> list[str]:
        """The URLs of all servers, running or not, for `nats.connect`."""
        return [server.url for server in self.servers]

    @property
    def url(self) -> str:
        """The URL of one server, if possible of a running one; clients learn the other URLs from it."""
        return next((server.url for server in self.servers if server.running), self.servers[0].url)

    def _running(self) -> list[NatsServer]:
        return [server for server in self.servers if server.running]

    def _settled_leader(self) -> NatsServer | None:
        running = {server.name: server for server in self._running()}
        groups = {name: _meta_group(server) for name, server in running.items()}
        leaders = {group.get("leader") for group in groups.values()}
        leader = leaders.pop() if len(leaders) == 1 else None
        if leader not in running:
            return None
        replicas = groups[leader].get("replicas", ())  # absent until the leader knows them
        # The leader reports a dead server as current for some more seconds, so count only the running ones.
        # For a moment after it has started, a server is current but still offline, and gets no stream.
        settled = {leader} | {
            peer["name"] for peer in replicas if peer["current"] and not peer.get("offline") and peer["name"] in running
        }
        return running[leader] if settled == running.keys() and len(settled) > self._n // 2 else None

    def _forget_servers(self) -> None:
        self._servers = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {list(self._servers)}>"


def _cluster_args(port: int, routes: str) -> list[str]:
    own = f"nats://127.0.0.1:{port}"
    return ["--cluster_name", "test", "--cluster", own, "--routes", routes, "--http_port", "-1"]


def _meta_group(server: NatsServer) -> dict[str, Any]:
    """Return what a server reports about the meta group, and nothing if it does not answer."""
    address = urlsplit(server.endpoints["monitoring"][0])
    connection = http.client.HTTPConnection(address.netloc, timeout=_REQUEST_TIMEOUT)
    try:
        connection.request("GET", "/jsz")
        group: dict[str, Any] = json.loads(connection.getresponse().read()).get("meta_cluster") or {}
    except (OSError, http.client.HTTPException):
        return {}  # the server was paused or killed meanwhile; the caller asks again
    finally:
        connection.close()
    return group


def _takes_requests(leader: NatsServer, servers: Sequence[NatsServer]) -> bool:
    """Return whether every server passes requests on to the JetStream leader, and the leader gives each a replica.

    The leader has to know the free space of a server, which the server tells it some time after it has joined the cluster,
    and which no server's monitoring shows. If a client without credentials cannot find it out, the result is true.
    """
    try:
        for server in servers:
            _ask(server, "INFO")
        answers = [_ask(leader, f"STREAM.CREATE.{_TRIAL_STREAM}", _trial_config(len(servers)))]
        if answers == [0]:
            answers.append(_ask(leader, f"STREAM.DELETE.{_TRIAL_STREAM}"))
            if _ask(leader, f"STREAM.INFO.{_TRIAL_STREAM}") == 0:
                return False  # the stream's leader has deleted it earlier than the JetStream leader
    except OSError:
        return False
    return not any(answer in _NOT_YET for answer in answers)


def _trial_config(servers: int) -> Mapping[str, Any]:
    return {"name": _TRIAL_STREAM, "storage": "memory", "num_replicas": min(servers, _MOST_REPLICAS)}


def _ask(server: NatsServer, what: str, body: Mapping[str, Any] | None = None) -> int | None:
    """Return the error code of the JetStream API's answer (0: none), or None if the API answers no such client.

    Raises:
        OSError: There is no answer yet.
    """
    payload = json.dumps(body or {}).encode()
    address = urlsplit(server.url)
    with (
        socket.create_connection((address.hostname, address.port), _REQUEST_TIMEOUT) as connection,
        connection.makefile("rb") as lines,
    ):
        info = json.loads(lines.readline().removeprefix(b"INFO ") or b"{}")
        if info.get("auth_required") or info.get("tls_required"):
            return None
        connection.sendall(
            b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB answer 1\r\n'
            b"PUB $JS.API.%s answer %d\r\n%s\r\n" % (what.encode(), len(payload), payload)
        )
        for line in lines:
            if line.startswith(b"MSG "):
                error = json.loads(lines.read(int(line.split()[-1]))).get("error") or {}
                return int(error.get("err_code", 0))
            if line.startswith((b"HMSG ", b"-ERR")):
                return None  # no responders, because the account has no JetStream; or the client may not ask
    raise ConnectionResetError
