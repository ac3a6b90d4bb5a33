"""Send the same bytes to a real nats-server and to the reference server, and require the same answers.

Every call of the fixture `pair` goes to both servers. It compares their replies at once, after it has normalised the names,
ids and times that cannot be equal, and returns the reply of the reference server.

The real server is that of the newest release; with ``JETSTREAM_EXT_FULL=1`` (`python -m nox -s conformance`) it is each of
`VERSIONS` in turn. With ``--nats-image IMAGE`` it is the one in a container, and the tests that start their own server are
left out.
"""

import itertools
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import leftovers  # of the folder above, which its conftest puts on the path
import pytest

from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.reference import ReferenceServer

VERSIONS = ("2.10.26", "2.11.11", "2.12.8", "2.14.6", "2.15.1")
CHOSEN = VERSIONS if os.environ.get("JETSTREAM_EXT_FULL") else VERSIONS[-1:]
TIMEOUT = 30.0
QUIET = 0.15
IN_A_CONTAINER = "container"  # instead of a version
Address = tuple[str, int]


class Frame(NamedTuple):
    """A received message: subject, header block, payload and reply subject."""

    subject: str
    header: bytes
    payload: bytes
    reply: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.payload)

    @property
    def status(self) -> str:
        return self.header.split(b"\r\n", 1)[0].removeprefix(b"NATS/1.0").strip().decode()

    def value(self, name: str) -> str | None:
        """Return the last value under a header name."""
        found = re.findall(rb"\r\n" + re.escape(name.encode()) + rb": ?([^\r]*)", self.header)
        return found[-1].decode() if found else None


class Raw:
    """A client that sends and receives bare protocol frames."""

    def __init__(self, address: int | Address, connect: dict[str, Any] | None = None) -> None:
        self.lines: list[str] = []
        self.frames: list[Frame] = []
        self.closed = False
        self.advisories: list[Frame] = []
        self._buffer = b""
        where = ("127.0.0.1", address) if isinstance(address, int) else address
        self._socket = socket.create_connection(where, timeout=TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "protocol": 1,
            "lang": "raw",
        }
        self.send(b"CONNECT " + json.dumps(options | (connect or {})).encode() + b"\r\n")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def publish(self, subject: str, payload: bytes = b"", *, reply: str = "", header: bytes = b"") -> None:
        to = f"{subject} {reply}".strip()
        if header:
            self.send(f"HPUB {to} {len(header)} {len(header) + len(payload)}\r\n".encode() + header + payload + b"\r\n")
        else:
            self.send(f"PUB {to} {len(payload)}\r\n".encode() + payload + b"\r\n")

    def flush(self) -> None:
        """Wait until the server has read everything sent so far."""
        count = self.lines.count("PONG")
        self.send(b"PING\r\n")
        self.wait(lambda: self.lines.count("PONG") > count)

    def wait(self, done: Callable[[], bool], timeout: float = TIMEOUT) -> bool:
        """Read until `done()`, and return whether it was true in time."""
        end = time.monotonic() + timeout
        while not done() and not self.closed:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                return False
            except ConnectionError:
                data = b""
            self.closed = not data
            self._buffer += data
            self._parse()
        return done()

    def _parse(self) -> None:
        while (end := self._buffer.find(b"\r\n")) >= 0:
            line = self._buffer[:end].decode()
            name, *arguments = line.split(" ")
            if name not in ("MSG", "HMSG"):
                self.lines.append(line)
                self._buffer = self._buffer[end + 2 :]
                continue
            size = int(arguments[-1])
            if len(self._buffer) < end + 4 + size:
                return
            block = self._buffer[end + 2 : end + 2 + size]
            self._buffer = self._buffer[end + 4 + size :]
            head = int(arguments[-2]) if name == "HMSG" else 0
            reply = arguments[2] if len(arguments) == (5 if name == "HMSG" else 4) else ""
            self.frames.append(Frame(arguments[0], block[:head], block[head:], reply))

    def ask(self, subject: str, payload: bytes = b"") -> Any:
        """Send a request and return its JSON answer; other frames that arrive first are kept."""
        self.publish(subject, payload, reply="R.ask")
        assert self.wait(lambda: any(frame.subject == "R.ask" for frame in self.frames)), subject
        (answer,) = (frame for frame in self.frames if frame.subject == "R.ask")
        self.frames.remove(answer)
        return answer.json

    def close(self) -> None:
        self._socket.close()


_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_NUMBERS = itertools.count(1)
_REPLY_TIME = re.compile(r"(?<=\.)\d{19}(?=\.)")
_FLOW_REPLY = re.compile(r"^(\$JS\.FC\.[^.]+\.[^.]+\.).*")
_SUBSTITUTES = [
    (_TIME, b"<time>"),
    (re.compile(rb"\bN[A-Z2-7]{55}\b"), b"<server>"),
    (re.compile(rb'"id":"[0-9A-Za-z]{22}"'), b'"id":"<id>"'),
    (re.compile(rb'"total":\d+,"errors":\d+\}\}'), b'"total":0,"errors":0}}'),
    (re.compile(rb'"description":"invalid JSON: (?!json: unknown)[^}]*"'), b'"description":"invalid JSON"'),
    (re.compile(rb'(?<="err_code":10094,"description":")[^"]*'), b"<start>"),
    (re.compile(rb"(?<=400 Bad Request - )[^\r]*"), b"<reason>"),
]


def normalise(data: bytes) -> bytes:
    """Replace times, ids and counts, which differ between two servers."""
    for pattern, substitute in _SUBSTITUTES:
        data = pattern.sub(substitute, data)
    return data


def replies(frames: list[Frame]) -> list[Frame]:
    """Return the frames that are neither advisories nor replies to a barrier."""
    return [frame for frame in frames if not frame.subject.startswith(("$JS.EVENT", "R.barrier"))]


def difference(real: list[Any], reference: list[Any]) -> str:
    """Describe the frames that differ; for JSON, also the fields that differ."""
    lines = [f"{len(real)} replies of the real server, {len(reference)} of the reference server"]
    for theirs, ours in itertools.zip_longest(real, reference):
        if theirs == ours:
            continue
        try:
            one, other = (each[2] if isinstance(each[2], dict) else json.loads(each[2]) for each in (theirs, ours))
            lines += [
                f"{name}: real {one.get(name)} reference {other.get(name)}"
                for name in one | other
                if one.get(name) != other.get(name)
            ]
        except (TypeError, ValueError, AttributeError):
            pass
        lines += [f"real      {str(theirs)[:600]}", f"reference {str(ours)[:600]}"]
    return "\n".join(lines)


class Pair:
    """Two servers that get the same bytes; their replies must be equal."""

    def __init__(self, version: str, real: Address, reference: Address) -> None:
        self.version = version
        self._addresses = (real, reference)
        self._count = itertools.count(1)
        self._clients: list[Raw] = []
        self.restart()

    def restart(self) -> None:
        """Empty the servers, and start again with new connections and names."""
        self.close()
        for address in self._addresses:
            delete_streams(address)
        self._number = next(_NUMBERS)
        self._barriers: dict[str, str] = {}
        self._history: list[str] = []
        self._created: Any = None
        self.hidden: set[tuple[str, str]] = set()
        """Fields that are not compared, each with the object in the reply that holds it."""
        if not self.since("2.14.0"):  # the floor of a new consumer is 0, and a purge may or may not be an activity
            self.hidden |= {("ack_floor", "stream_seq"), ("ack_floor", "last_active")}
        if not self.since("2.11.0"):  # the sequence is the last one that the consumer examined
            self.hidden.add(("delivered", "stream_seq"))
        self.quiet = 0.0
        """How long to wait for replies that no barrier can wait for, in seconds."""
        self._clients = [Raw(address) for address in self._addresses]
        for raw in self._clients:
            raw.send(b"SUB R.> 1\r\n")
            raw.flush()

    def each(self, cells: Iterable[Any], check: Callable[[Any], object]) -> None:
        """Call `check` with each of the cells, on empty servers, and report every cell that fails."""
        failures = []
        for cell in cells:
            self.restart()
            try:
                check(cell)
            except (AssertionError, pytest.fail.Exception) as failure:
                failures.append(f"cell {cell}:\n{failure}")
        assert not failures, "\n\n".join(failures)

    def since(self, version: str) -> bool:
        return tuple(map(int, self.version.split("."))) >= tuple(map(int, version.split(".")))

    def close(self) -> None:
        for raw in self._clients:
            raw.close()

    def api(self, subject: str, request: object = None, *, header: bytes = b"", timeout: float = TIMEOUT) -> Any:
        """Ask the JSON API, and return the decoded answer; `None` if there is no answer in time."""
        payload = request if isinstance(request, bytes) else b"" if request is None else json.dumps(request).encode()
        frames = self.publish(f"$JS.API.{subject}", payload, header=header, wait=1, timeout=timeout)
        # A waiting pull request may have got messages meanwhile.
        frames = [frame for frame in frames if frame.subject.startswith("R.")] or frames
        return frames[0].json if frames and frames[0].payload else frames[0] if frames else None

    @property
    def name(self) -> str:
        """The name of the test's main stream."""
        return self.named("S")

    def named(self, prefix: str) -> str:
        """Return the name of a stream of this test; no other test uses it.

        A real server removes the folder of a deleted stream some time after its answer. A new stream of the same name
        would lose its folder, or start with the old messages and consumers.
        """
        return f"{prefix}{self._number:04d}"

    def stream(self, name: str = "", **config: Any) -> Any:
        """Create the stream `name`; by default on `s.>`, or on the prefix of a name from `named`."""
        name = name or self.name
        if not config.get("mirror") and not config.get("sources"):
            config.setdefault("subjects", [f"{name.rstrip('0123456789').lower()}.>"])
        config.setdefault("storage", "memory")
        assert self.try_stream({"name": name, **config})
        return self._created

    def try_stream(self, config: dict[str, Any]) -> bool:
        """Create a stream, and return whether the servers accepted it; they must agree."""
        answer = self._created = self.create(config["name"], config)
        if "error" in answer:
            return False
        if answer["config"].get("subjects") and not answer["config"].get("no_ack"):
            first = answer["config"]["subjects"][0]
            self._barriers[config["name"]] = first.replace("*", "zz").replace(">", "zz")
        return True

    def create(self, name: str, config: dict[str, Any]) -> Any:
        """Create a stream, and return the answer of the servers; they must agree.

        A real server removes the folder of all streams some time after the last stream was deleted. A stream that is created
        meanwhile may fail with error 10049, and is then tried again.
        """
        payload = json.dumps(config).encode()
        for raw in self._clients:
            for attempt in range(20):
                raw.frames.clear()
                raw.publish(f"$JS.API.STREAM.CREATE.{name}", payload, reply="R.create")
                raw.wait(lambda raw=raw: bool(raw.frames))
                if attempt == 19 or raw.frames[0].json.get("error", {}).get("err_code") != 10049:
                    break
                raw.publish(f"$JS.API.STREAM.DELETE.{name}", reply="R.delete")
                raw.wait(lambda raw=raw: len(raw.frames) > 1)
        return self.settle(wait=1, what=f"create {name} {config}")[0].json

    def publish(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        header: bytes = b"",
        reply: str = "",
        wait: int = 0,
        timeout: float = TIMEOUT,
    ) -> list[Frame]:
        """Publish with a reply subject, and return the replies.

        Args:
            subject: The subject.
            payload: The payload.
            header: The header block.
            reply: The last tokens of the reply subject.
            wait: How many replies to wait for; 0 waits for those that the streams send at once.
            timeout: How long, in seconds.
        """
        to = f"R.{next(self._count)}" if not reply else f"R.{reply}"
        for raw in self._clients:
            raw.publish(subject, payload, header=header, reply=to)
        return self.settle(wait=wait, timeout=timeout, what=f"{subject} {payload[:200]!r} {header!r} -> {to}")

    def settle(self, *, wait: int = 0, timeout: float = TIMEOUT, what: str = "") -> list[Frame]:
        """Wait for replies and compare them; see `publish`."""
        found: list[list[Frame]] = []
        # The reference server answers at once, so its replies say how many to expect of the real server.
        if self.quiet:
            for raw in self._clients:
                raw.flush()
            time.sleep(self.quiet)
        for raw in reversed(self._clients):
            raw.flush()
            expected = max(wait, len(found[0]) if found else 0)
            if expected:
                raw.wait(lambda raw=raw, expected=expected: len(replies(raw.frames)) >= expected, timeout)
            for subject in self._barriers.values():
                barrier = f"R.barrier.{next(self._count)}"
                raw.publish(subject, header=b"NATS/1.0\r\nNats-Expected-Stream: <none>\r\n\r\n", reply=barrier)
                raw.wait(lambda raw=raw, barrier=barrier: any(frame.subject == barrier for frame in raw.frames))
            raw.advisories += [frame for frame in raw.frames if frame.subject.startswith("$JS.EVENT")]
            found.insert(0, replies(raw.frames))
            raw.frames.clear()
        real, reference = (
            [self._shown(frame) for frame in sorted(frames, key=lambda f: f.subject)] for frames in found
        )
        if reference != real:
            before = "\n".join(self._history[-20:])
            pytest.fail(f"after\n{before}\n{self.version}: {what}\n{difference(real, reference)}", pytrace=False)
        self._history.append(what)
        return found[1]

    def eventually(self, ask: Callable[[], object]) -> None:
        """Ask until the servers agree: a real server acknowledges a message before its consumers count it."""
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            try:
                ask()
            except pytest.fail.Exception:
                time.sleep(0.02)
            else:
                return
        ask()

    def ask_until(self, subject: str, done: Callable[[Any], bool], payload: bytes = b"") -> Any:
        """Ask each server until its answer satisfies `done`; compare nothing, and return the reference server's answer."""
        answer: Any = None
        for raw in self._clients:
            end = time.monotonic() + TIMEOUT
            while not done(answer := raw.ask(subject, payload)):
                assert time.monotonic() < end, (raw is self._clients[0], answer)
                time.sleep(0.02)
        return answer

    def compare_advisories(self) -> list[Frame]:
        """Wait until the real server has sent as many advisories as the reference server, and compare them."""
        real, reference = self._clients
        count = len(reference.advisories)
        real.wait(lambda: len(real.advisories) + len(real.frames) >= count)
        self.settle()
        assert [self._shown(each) for each in reference.advisories] == [self._shown(each) for each in real.advisories]
        return reference.advisories

    def raw(self, data: bytes) -> None:
        """Send bytes to both servers."""
        for raw in self._clients:
            raw.send(data)

    def fresh(self, **connect: Any) -> "list[Raw]":
        """Open another connection to each server; the real server's is the first."""
        return [Raw(address, connect) for address in self._addresses]

    def forget(self, name: str) -> None:
        """Stop using a stream as a barrier."""
        self._barriers.pop(name, None)

    def _shown(self, frame: Frame) -> tuple[str, bytes, object, str]:
        header, payload = normalise(frame.header), normalise(frame.payload)
        if header.startswith(b"NATS/1.0 503") and not self.since("2.12.0"):
            header = b"NATS/1.0 503\r\nNats-Subject: <new>\r\n\r\n"  # older releases do not name the subject
        shown: Any = payload
        if payload.startswith(b"{"):
            shown = json.loads(payload)  # neither the order of the fields nor the spaces are compared
            if "type" in shown and "error" in shown:
                shown = {"type": shown["type"], "error": shown["error"]}
            if (state := shown.get("state", {})).get("deleted") == [0]:  # as an empty file store reports it
                del state["deleted"], state["num_deleted"]
            hidden = [shown]
            if shown.get("type", "").endswith("list_response") and "error" not in shown:
                hidden = shown.get("streams") or shown.get("consumers") or []
                for listed in hidden:
                    for name in ("_nats.level", "_nats.ver"):  # real servers leave them out of lists
                        listed["config"].get("metadata", {}).pop(name, None)
            for each, (name, field) in itertools.product(hidden, self.hidden):
                each.get(name, {}).pop(field, None)
        return frame.subject, header, shown, _FLOW_REPLY.sub(r"\1<id>", _REPLY_TIME.sub("<time>", frame.reply))


def headers(**lines: object) -> bytes:
    """Return a header block; `Nats_TTL=5` is the line `Nats-TTL: 5`."""
    return b"NATS/1.0\r\n" + b"".join(f"{k.replace('_', '-')}: {v}\r\n".encode() for k, v in lines.items()) + b"\r\n"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "since(version): the first release that the test can compare with the model")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with the chosen releases from its mark `since` on, or with the one in the container."""
    if "version" in metafunc.fixturenames and "version" not in _parametrized(metafunc):
        mark = metafunc.definition.get_closest_marker("since")
        first = VERSIONS.index(mark.args[0]) if mark else 0
        chosen = [version for version in CHOSEN if VERSIONS.index(version) >= first]
        chosen = [IN_A_CONTAINER] if metafunc.config.getoption("--nats-image") else chosen
        metafunc.parametrize("version", chosen, indirect=True)


def _parametrized(metafunc: pytest.Metafunc) -> set[str]:
    """Return the argument names that the marks of a test parametrize."""
    names: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        given = mark.args[0]
        names |= set(given.split(",") if isinstance(given, str) else given)
    return names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a container, deselect the tests that do not use it."""
    if not config.getoption("--nats-image"):
        return
    folder = Path(__file__).parent
    out = [item for item in items if item.path.parent == folder and not _in_a_container(item)]
    items[:] = [item for item in items if item not in out]
    config.hook.pytest_deselected(items=out)


def _in_a_container(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return "newest" in fixtures or ("pair" in fixtures and "version" in fixtures)


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[Callable[[str], tuple[str, Address, Address]]]:
    """The release and the addresses of the real server and the reference server, started on first use."""
    with ExitStack() as stack:
        running: dict[str, tuple[str, Address, Address]] = {}

        def get(version: str) -> tuple[str, Address, Address]:
            if version not in running:
                if version == IN_A_CONTAINER:
                    url = urlsplit(request.getfixturevalue("container_url"))
                    real = (str(url.hostname), int(url.port or 4222))
                    release = version_of(real)
                else:
                    real, release = ("127.0.0.1", stack.enter_context(NatsServer(version=version)).port), version
                with leftovers.kept():
                    reference = stack.enter_context(ReferenceServer(version=release))
                running[version] = (release, real, ("127.0.0.1", reference.port))
            return running[version]

        yield get


def version_of(address: Address) -> str:
    """Return the release that a server reports in INFO."""
    with socket.create_connection(address, timeout=TIMEOUT) as connection, connection.makefile("rb") as lines:
        found: str = json.loads(lines.readline().removeprefix(b"INFO "))["version"]
        return found


def delete_streams(address: Address) -> None:
    """Delete all streams of a server."""
    raw = Raw(address)
    # Not `R.>`: deleted consumers may still send to the inbox of the last test, and the next test uses it as well.
    raw.send(b"SUB deleter.> 1\r\n")
    raw.publish("$JS.API.STREAM.NAMES", reply="deleter.names")
    assert raw.wait(lambda: bool(raw.frames))
    names = raw.frames[0].json["streams"] or []
    for name in names:
        raw.publish(f"$JS.API.STREAM.DELETE.{name}", reply="deleter.gone")
    assert raw.wait(lambda: len(raw.frames) > len(names))
    raw.close()


@pytest.fixture
def version(request: pytest.FixtureRequest) -> str:
    """Each release in turn, or the one in the container."""
    chosen: str = request.param
    return chosen


def make_pair(version: str, servers: Callable[[str], tuple[str, Address, Address]]) -> Iterator[Pair]:
    release, *addresses = servers(version)
    pair = Pair(release, *addresses)
    yield pair
    pair.close()


@pytest.fixture
def pair(version: str, servers: Callable[[str], tuple[str, Address, Address]]) -> Iterator[Pair]:
    """A real server and the reference server of one release, both empty."""
    yield from make_pair(version, servers)


@pytest.fixture
def newest(request: pytest.FixtureRequest, servers: Callable[[str], tuple[str, Address, Address]]) -> Iterator[Pair]:
    """The pair of the newest release, or of the one in the container."""
    yield from make_pair(IN_A_CONTAINER if request.config.getoption("--nats-image") else VERSIONS[-1], servers)


@pytest.fixture(name="headers")
def headers_fixture() -> Callable[..., bytes]:
    """The function that builds header blocks."""
    return headers


@pytest.fixture
def raw_client() -> type[Raw]:
    """The class of bare protocol clients."""
    return Raw


@pytest.fixture(name="make_pair")
def make_pair_fixture() -> Callable[..., Iterator[Pair]]:
    """The function that makes pairs, for a release that is not in `VERSIONS`."""
    return make_pair
