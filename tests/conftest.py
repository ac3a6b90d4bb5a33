"""Fixtures shared by all tests: one real server per session, one connection per test; clusters; a server in a container.

Tests with a container need a running container engine; ``.ci/container-engine`` starts one. Without an engine they are
skipped with the reason. ``JETSTREAM_EXT_REQUIRE_CONTAINER=1`` makes them fail instead, so that a job with an engine
cannot pass by skipping them.
"""

import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from hypothesis import HealthCheck, settings
from nats.aio.client import Client
from nats.js import JetStreamContext

sys.path.insert(0, str(Path(__file__).parent))

import leftovers
from clients import close, quiet

from jetstream_ext.client import connection
from jetstream_ext.client.base_connection import FallbackConnection
from jetstream_ext.testing import NatsCluster, NatsServer
from jetstream_ext.testing.process import HeldPort

# The time of an example depends on the machine, so a deadline would only make tests fail at random.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

DEFAULT_IMAGE = os.environ.get("JETSTREAM_EXT_IMAGE", "nats:2.15.1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nats-image",
        nargs="?",
        const=DEFAULT_IMAGE,
        metavar="IMAGE",
        help="run the conformance tests against a server in a container of this image (alone: JETSTREAM_EXT_IMAGE, "
        "or else nats:2.15.1)",
    )
    parser.addoption(
        "--fallback",
        action="store_true",
        help="run the tests as with a nats-py whose internals are unknown; those marked as tests of internals are left out",
    )
    parser.addoption("--without-spark", action="store_true", help="leave out the tests that need Java")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the tests of whole folders in several processes, because most of them wait; `-n 0` or `-s` runs them in one."""
    option = config.option
    parallel = config.pluginmanager.hasplugin("xdist") and option.numprocesses is None and option.capture != "no"
    parallel = parallel and "PYTEST_XDIST_WORKER" not in os.environ and not (option.usepdb or option.trace)
    if parallel and not option.collectonly and all(Path(each).is_dir() for each in config.args):
        option.numprocesses = 2 * (os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leftovers)
    if config.getoption("--fallback"):
        connection._internals_known = lambda _: False  # type: ignore[assignment]
        config.addinivalue_line("filterwarnings", "ignore:jetstream_ext does not know the internals:RuntimeWarning")


# Where these are set, pytest compares the collections of a failed assertion line by line, whatever their size. For some
# thousand rows it took more than ten minutes, also in tests that are expected to fail.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# Spark's JVMs live only for seconds here, so an optimising compiler, parallel collectors, the verification of classes and
# the web UI cost more than they gain.
os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
os.environ.setdefault(
    "SPARK_SUBMIT_OPTS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    "-Dspark.ui.enabled=false -Dspark.sql.shuffle.partitions=2",
)

# The Python processes that it starts run tests/spark/preload/sitecustomize.py.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "spark" / "preload"), os.environ.get("PYTHONPATH")])
)

# The scopes that `pytest -n` starts first, longest first. Otherwise one worker would run a long scope alone at the end.
LONGEST = (
    "spark faults",
    "spark processes",
    "spark session",
    "spark sinks",
    "tests/test_permissions.py",
    "tests/docs/test_pages.py",
    "tests/test_examples.py",
    "tests/safety_net/test_waits_end.py",
    "tests/log/test_cluster.py",
    "tests/log/test_cluster.py::test_a_worker_stores_each_output_once_when_leaders_die",
    "tests/spark/test_kv.py",
    "tests/faults/test_groups.py",
    "tests/cli/test_files.py",
    "tests/faults/test_ingest.py",
    "tests/safety_net/test_hostile_corpus.py",
    "tests/kv/test_whole_history.py",
)
# These tests run programs that use Spark.
SPARK_PROCESSES = (
    "tests/spark/test_secrets.py",
    "tests/docs/test_pages.py::test_a_page_does_what_it_says[tutorial]",
    "tests/docs/test_pages.py::test_a_page_does_what_it_says[spark-pipeline]",
    "tests/docs/test_pages.py::test_a_page_does_what_it_says[spark-payloads]",
    "tests/docs/test_pages.py::test_a_page_does_what_it_says[spark-on-a-cluster]",
    "tests/docs/test_pages.py::test_a_page_does_what_it_says[follow-a-bucket-with-spark]",
    "tests/test_examples.py::test_an_example_runs_and_prints_its_results[07_spark_batch]",
    "tests/test_examples.py::test_an_example_runs_and_prints_its_results[10_spark_streaming]",
)


# The files of tests that share a session of Spark, and so a JVM. The other files of tests/spark start none.
SPARK_SESSIONS = {
    "spark faults": ("test_faults", "test_source_faults"),
    "spark sinks": (
        "test_bad_rows",
        "test_kv_sink",
        "test_msg_ttl",
        "test_feed_queries",
        "test_time_nanos",
    ),
    "spark session": (
        *("test_application", "test_batch_read", "test_flights_example", "test_kv", "test_packed_environment"),
        *("test_sink", "test_streaming"),
    ),
}
SPARK_FILES = {f"tests/spark/{file}.py": name for name, files in SPARK_SESSIONS.items() for file in files}
if "JETSTREAM_EXT_SPARK_REMOTE" in os.environ:  # servers of Spark Connect listen on the same port
    SPARK_FILES = dict.fromkeys(SPARK_FILES, "spark session")

# Each of these tests is a group of its own, because its file takes long.
ALONE = ("tests/spark/test_query_history.py", "tests/log/test_cluster.py::test_a_worker_stores_each_output_once_when")


def scope_of(nodeid: str) -> str:
    """Return the name of the group of tests that one worker runs in turn: a file, or the tests that share a JVM."""
    if nodeid.startswith(SPARK_PROCESSES):
        return "spark processes"
    if nodeid.startswith(ALONE):
        return nodeid
    file = nodeid.split("::", 1)[0]
    return SPARK_FILES.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n`, run each scope on one worker, where its tests share servers, and at most four JVMs at once."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Scopes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False  # keep the order of the collection
    return Scopes(config, log)


def _leave_out(config: pytest.Config, items: list[pytest.Item], unwanted: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if unwanted(item)])
    items[:] = [item for item in items if not unwanted(item)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fallback"):
        _leave_out(config, items, lambda item: item.get_closest_marker("internals") is not None)
    if config.getoption("--without-spark"):
        _leave_out(config, items, lambda item: item.nodeid.startswith(("tests/spark/", *SPARK_PROCESSES)))
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {scope: place for place, scope in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(scope_of(item.nodeid).partition("[")[0], len(rank)))


def pytest_collection_finish() -> None:
    """Let no collection of garbage go through the half million objects of all tests, which takes 0.4 s each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Drop the traceback entries that have no line: pytest cannot print them, and its worker process would die instead.

    CPython 3.11 makes such an entry where a test's timeout arrives between two lines.
    """
    error, seen = call.excinfo and call.excinfo.value, set[int]()
    while error is not None and id(error) not in seen:  # causes and contexts may form a ring
        seen.add(id(error))
        entry = error.__traceback__
        while entry is not None:
            while entry.tb_next is not None and entry.tb_next.tb_lineno is None:
                entry.tb_next = entry.tb_next.tb_next
            entry = entry.tb_next
        error = error.__cause__ or error.__context__


@pytest.fixture
def found() -> Callable[..., Awaitable[Any]]:
    """Call nats-py's `keys` or `history`, which find nothing if no message has arrived when the server has sent them all."""

    async def call(ask: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(nats.js.errors.NoKeysError):
                    return await ask(*arguments)

    return call


@pytest.fixture(scope="session")
def server() -> Iterator[NatsServer]:
    """A server that all tests share: use unique names, and do not kill, pause or restart it."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def _spark_jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    from pyspark.java_gateway import launch_gateway

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        environment = dict(os.environ)
        gateway = launch_gateway(popen_kwargs={"cwd": tmp_path_factory.mktemp("spark")})
    address = gateway.gateway_parameters
    shared = {"PYSPARK_GATEWAY_PORT": str(address.port), "PYSPARK_GATEWAY_SECRET": address.auth_token}
    yield gateway.jvm, environment | shared
    gateway.close()
    gateway.proc.stdin.close()  # which ends the JVM
    gateway.proc.wait(60)


@pytest.fixture
def spark_environment(_spark_jvm: tuple[Any, dict[str, str]]) -> Iterator[dict[str, str]]:
    """The environment for a program that uses Spark: as in an activated venv, and with one JVM for all such programs.

    A program that finds no JVM in its environment starts one, which takes longer than most of them run; those of
    tests/spark/test_secrets.py and tests/spark/test_faults.py do.
    """
    jvm, environment = _spark_jvm
    yield environment
    left = jvm.org.apache.spark.sql.classic.SparkSession.getDefaultSession()
    if left.isDefined():  # by a program that failed
        left.get().stop()


@pytest.fixture
def publish_raw() -> Callable[..., None]:
    """Publish pairs of subject and payload, and a block of headers, all of any bytes; return when they are stored."""

    def publish_raw(server: NatsServer, messages: Iterable[tuple[bytes, bytes]], *, block: bytes = b"") -> None:
        sent = list(messages)
        lines = [b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB _RAW.acks 1\r\n']
        for subject, data in sent:
            size = len(block) + len(data)
            sizes = b"%d %d" % (len(block), size) if block else b"%d" % size
            lines.append(b"%bPUB %b _RAW.acks %b\r\n%b%b\r\n" % (b"H" if block else b"", subject, sizes, block, data))
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw, raw.makefile("rb") as answers:
            raw.sendall(b"".join(lines))
            for _ in sent:
                while not answers.readline().startswith(b"MSG _RAW.acks"):
                    pass
                ack = json.loads(answers.readline())
                assert "error" not in ack, ack

    return publish_raw


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """A server that the test may kill, pause and restart."""
    with NatsServer() as server:
        yield server


@pytest.fixture
async def nc(server: NatsServer) -> AsyncIterator[Client]:
    """A connection for this test only."""
    nc = await nats.connect(server.url, connect_timeout=10)
    try:
        yield nc
    finally:
        await nc.close()


@pytest.fixture
async def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Take down for how many seconds the test itself would sleep, and let it go on at once.

    Whatever else sleeps in this process, such as a connection that another test has left to reconnect in a thread, does so.
    """
    seconds: list[float] = []
    sleep, loop = asyncio.sleep, asyncio.get_running_loop()

    async def recorded(delay: float, result: Any = None) -> Any:
        if asyncio.get_running_loop() is not loop:
            return await sleep(delay, result)
        seconds.append(delay)
        return result

    monkeypatch.setattr(asyncio, "sleep", recorded)
    return seconds


@pytest.fixture
def js(nc: Client) -> JetStreamContext:
    """A JetStream context on this test's connection, with a timeout that a busy machine does not reach."""
    return nc.jetstream(timeout=30)


@pytest.fixture
def stream_name() -> Callable[[], str]:
    """A factory of names that are unique in the session, for streams, buckets and subject tokens."""
    return lambda: f"T{uuid.uuid4().hex[:12]}"


async def has_only(nc: Client, held: set[int]) -> bool:
    """Return whether `nc` has only the subscriptions `held`, on the fallback when it has unsubscribed in the background."""
    if isinstance(connection.connection_of(nc), FallbackConnection):
        async with asyncio.timeout(30):
            while set(nc._subs) - held:
                await asyncio.sleep(0.001)
    return set(nc._subs) <= held


@pytest.fixture(name="has_only")
def _has_only() -> Callable[[Client, set[int]], Awaitable[bool]]:
    return has_only


class LeakCheck:
    """Compares the subscriptions, tasks and timers of a connection and the loop with those at the beginning."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc
        self.before = self._held()

    def _held(self) -> tuple[set[int], set[str], set[str]]:
        loop: Any = asyncio.get_running_loop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        tasks = {task.get_coro().__qualname__ for task in others if not task.done()}  # type: ignore[union-attr]
        timers = {repr(handle._callback) for handle in loop._scheduled if not handle.cancelled()}
        return set(self.nc._subs), tasks, {timer for timer in timers if "jetstream_ext" in timer or "Timeout" in timer}

    def leaked(self) -> tuple[set[int], set[str], set[str]]:
        """Subscriptions, tasks and timers that were not there before."""
        return tuple(now - then for now, then in zip(self._held(), self.before, strict=True))  # type: ignore[return-value]

    async def assert_clean(self) -> None:
        """Fail if subscriptions or timers of ours are left now, or tasks with their timeouts after 30 s."""
        await has_only(self.nc, self.before[0])
        subscriptions, _, timers = self.leaked()
        assert (subscriptions, {timer for timer in timers if "jetstream_ext" in timer}) == (set(), set())
        async with asyncio.timeout(30):
            while self.leaked()[1]:
                await asyncio.sleep(0.001)
        # From Python 3.12 on, a wait of nats-py has a Timeout, which ends with the task that waits.
        assert self.leaked()[2] == set()


@pytest.fixture
async def leak_check(nc: Client, js: JetStreamContext) -> LeakCheck:
    """A check for leaks on `nc`, begun before the test."""
    await js.account_info()  # the first request creates nats-py's own response subscription
    return LeakCheck(nc)


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    """Three servers that the tests of a module share; a test that breaks one of them must restore it."""
    with NatsCluster(3) as cluster:
        yield cluster


@pytest.fixture
async def cluster_nc(cluster: NatsCluster) -> AsyncIterator[Client]:
    """A connection to the cluster that reconnects indefinitely."""

    nc = await nats.connect(
        cluster.urls, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=quiet, connect_timeout=10
    )
    yield nc
    await close(nc)


@pytest.fixture(scope="module", params=["2.14.6", None], ids=["2.14", "newest"])
def leaf(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server of domain ``leaf``, a leaf node of one of domain ``hub``."""
    held = HeldPort()
    hub = f"jetstream {{ domain: hub }}\nleafnodes {{ port: {held.port} }}"
    remote = f"{{ url: 'nats://127.0.0.1:{held.port}' }}"
    leaf = f"jetstream {{ domain: leaf }}\nleafnodes {{ reconnect: 1, remotes: [ {remote} ] }}"
    with contextlib.ExitStack() as stack:
        stack.callback(held.close)
        held.make_way()
        stack.enter_context(NatsServer(version=request.param, name="hub", config=hub))
        yield stack.enter_context(NatsServer(version=request.param, name="leaf", config=leaf))


WaitForInterest = Callable[[JetStreamContext, str], Awaitable[None]]


@pytest.fixture(scope="session")
def wait_for_interest() -> WaitForInterest:
    """Wait until a message on a subject reaches its stream; needed after a stream was created on a cluster.

    The client may publish through another server than the one that created the stream. That server learns of the
    stream's interest in the subject a moment later, and answers "no responders" until then.
    """

    async def wait_for_interest(js: JetStreamContext, subject: str) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    await js.publish(subject, stream="none")
                except nats.js.errors.NoStreamResponseError:
                    await asyncio.sleep(0.02)
                except nats.js.errors.BadRequestError:
                    return  # 10060: the stream has answered, because its name is not "none"

    return wait_for_interest


@pytest.fixture
async def make_replicated(
    cluster_nc: Client, stream_name: Callable[[], str], wait_for_interest: WaitForInterest
) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Create a stream with three replicas (or as given); its subjects are ``<name>.>``, unless it is a mirror."""
    js = cluster_nc.jetstream(timeout=10)
    made: list[str] = []

    async def make(**config: Any) -> str:
        name = stream_name()
        config = {"allow_direct": True, "num_replicas": 3, **config}
        if "mirror" not in config:
            config = {"subjects": [f"{name}.>"], "allow_atomic": True, **config}
        async with asyncio.timeout(60):
            while True:
                try:
                    await js.add_stream(name=name, **config)
                    break
                except (
                    nats.js.errors.ServiceUnavailableError,
                    nats.errors.TimeoutError,
                    nats.errors.NoRespondersError,
                    nats.errors.ConnectionReconnectingError,
                    nats.errors.StaleConnectionError,
                ):
                    await asyncio.sleep(0.2)  # the cluster is still recovering from the previous test
        made.append(name)
        if "mirror" not in config:
            await wait_for_interest(js, f"{name}.new")
        return name

    yield make
    for name in reversed(made):
        with contextlib.suppress(nats.errors.Error):  # a server that the test broke may still be recovering
            await js.delete_stream(name)


def no_container(image: str) -> str | None:
    """Return why this machine cannot run a container of the image, or None."""
    try:
        import docker
        import docker.errors
        import testcontainers.community.nats  # noqa: F401
    except ImportError as error:
        return f"testcontainers is not installed ({error})"
    try:
        client = docker.from_env(timeout=5)
    except docker.errors.DockerException:
        return "no container engine answers"
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(image)
        except docker.errors.APIError:
            return f"the engine has no image {image} and cannot pull it"
    except docker.errors.APIError as error:
        return f"the engine refuses: {error.explanation}"
    finally:
        client.close()
    return None


@pytest.fixture(scope="session")
def container_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server in a container; the test is skipped with the reason if the machine cannot run one."""
    image = request.config.getoption("--nats-image") or DEFAULT_IMAGE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from testcontainers itself
        if reason := no_container(image):
            if os.environ.get("JETSTREAM_EXT_REQUIRE_CONTAINER"):
                pytest.fail(f"a container is required: {reason}", pytrace=False)
            pytest.skip(f"container: {reason}")
        from testcontainers.community.nats import NatsContainer

        with NatsContainer(image, jetstream=True, ready_timeout_secs=30) as container:
            url = container.nats_uri()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield url
