"""No test leaves anything behind that a later test of the same process would meet: a client, task, loop or thread.

A test that does fails itself, at its own end, by name. What nats-py itself leaves after its client was closed is ended here,
and nowhere else: clients that are open again, tasks that still reconnect, callbacks of subscriptions, sockets.
"""

import asyncio
import contextlib
import inspect
import os
import sys
import threading
import weakref
from asyncio.base_events import BaseEventLoop
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest
from nats.aio.client import Client

# How long a task may take that has been told to end; only a test that fails waits for it.
GRACE = 20.0

# Kept until the test ends: what the garbage collector finds would depend on the moment.
_clients: set[Client] = set()
_loops: weakref.WeakSet[BaseEventLoop] = weakref.WeakSet()
# What the test found, what its wider fixtures made, and what it must not leave.
_earlier: weakref.WeakSet[Any] = weakref.WeakSet()


def _record(kind: type, made: "weakref.WeakSet[Any] | set[Any]") -> None:
    """Add each new instance of a class to `made`."""
    initialise: Callable[..., None] = kind.__init__  # type: ignore[misc]

    def recorded(self: Any, *arguments: Any, **options: Any) -> None:
        initialise(self, *arguments, **options)
        made.add(self)

    kind.__init__ = recorded  # type: ignore[misc]


_record(Client, _clients)
_record(BaseEventLoop, _loops)

# A client that was closed while it reconnected may be open again: nats-py loses the cancellation of that task.
_closed: weakref.WeakSet[Client] = weakref.WeakSet()
_close = Client.close


async def _recorded_close(self: Client) -> None:
    _closed.add(self)
    await _close(self)


Client.close = _recorded_close  # type: ignore[method-assign]


def _name(task: "asyncio.Task[Any]") -> str:
    return getattr(task.get_coro(), "__qualname__", repr(task))


def _is_open(client: Client) -> bool:
    """Return whether a client that was not closed still has a socket, or tries to get one."""
    writer = getattr(client._transport, "_bare_io_writer", None)
    has_socket = writer is not None and not writer.transport.is_closing()
    reconnecting = client._reconnection_task is not None and not client._reconnection_task.done()
    return not client.is_closed and (has_socket or reconnecting)


def _close_connections_of_spark() -> None:
    """Close the connections that the connector keeps in this process, where a test has used it without a session."""
    if (module := sys.modules.get("jetstream_ext.spark.connection")) is not None:
        for process in list(module._by_process):
            connections = module._by_process.pop(process)
            if process == os.getpid():
                connections.close()


def _things() -> set[Any]:
    """Return what a test could leave behind in this process."""
    return {*_clients, *(loop for loop in _loops if not loop.is_closed()), *threading.enumerate()}


# What each fixture of a wider scope has made.
_made: dict[int, set[Any]] = {}


@contextlib.contextmanager
def kept() -> Iterator[set[Any]]:
    """Let a test make in this block what a fixture of a wider scope keeps and ends; the value lists it at the end."""
    before, made = _things(), set[Any]()
    yield made
    made |= _things() - before
    _earlier.update(made)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """What a fixture makes that several tests share is not the test's that asked for it first."""
    if fixturedef.scope == "function":
        return (yield)
    with kept() as made:
        result = yield
    _made[id(fixturedef)] = made - set().union(*_made.values())  # without what fixtures inside it have made
    return result


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Fail the last test of a fixture that leaves something behind."""
    if names := _left(_made.pop(id(fixturedef), set())):
        pytest.fail(f"the fixture {fixturedef.argname} left behind: {', '.join(names)}", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    _earlier.update(_things())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail the test that left something behind, after all of its fixtures have ended."""
    try:
        result = yield
    except BaseException:
        _finish_fixtures(item)
        _find_left()  # what is left is a consequence of that error, and no later test's
        raise
    if names := _find_left():
        pytest.fail(f"{item.nodeid} left behind: {', '.join(sorted(names))}", pytrace=False)
    return result


def _finish_fixtures(item: pytest.Item) -> None:
    """End the fixtures that pytest does not end after one that was cancelled.

    pytest would give their values to all later tests, and never end them again: what one test patches would stay patched.
    """
    request: Any = getattr(item, "_request", None)
    for fixture in reversed([] if request is None else list(request._fixture_defs.values())):
        if fixture.scope == "function":
            with contextlib.suppress(BaseException):  # the first error is reported
                fixture.finish(request)


def _find_left() -> list[str]:
    """Return the names of what a test has left, and forget it."""
    _close_connections_of_spark()
    names = _left(_things() - set(_earlier))
    for loop in [loop for loop in _loops if loop.is_closed()]:
        names += [f"task {_name(task)} of a closed event loop" for task in asyncio.all_tasks(loop)]
        _loops.discard(loop)
    _clients.intersection_update([client for client in _clients if client in _earlier and not client.is_closed])
    return names


def _left(things: set[Any]) -> list[str]:
    """Return the names of those that are still there."""
    mine = [thing for thing in things if not _is_foreign(thing)]  # a thread that is about to end closes its loop first
    there = [thing for thing in mine if not isinstance(thing, Client) or (_is_open(thing) and thing not in _closed)]
    return [_describe(thing) for thing in there if not isinstance(thing, BaseEventLoop) or not thing.is_closed()]


def _is_foreign(thing: Any) -> bool:
    """Return whether a thread belongs to a library that keeps it until the process ends, or is about to end."""
    if not isinstance(thing, threading.Thread):
        return False
    if thing.name == "jetstream_ext.testing":  # starts the servers of this process, and ends with it
        return True
    target = getattr(thing, "_target", None) or type(thing)
    module = getattr(target, "__module__", "") or ""
    if module.startswith(("py4j", "pyspark", "execnet", "polars", "duckdb", "grpc")):
        return True
    thing.join(GRACE)
    return not thing.is_alive()


def _describe(thing: Any) -> str:
    if isinstance(thing, Client):
        return f"a client of nats-py that is not closed ({type(thing).__name__})"
    return f"thread {thing.name}" if isinstance(thing, threading.Thread) else f"event loop {thing!r}"


@pytest.fixture(autouse=True)
def _nothing_left_in_the_loop(request: pytest.FixtureRequest) -> None:
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("opened_sockets")


@pytest.fixture
async def opened_sockets(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """The sockets that the test has opened; at its end, nothing of it runs on in its event loop."""
    writers: list[asyncio.StreamWriter] = []
    open_connection = asyncio.open_connection

    async def recorded(*arguments: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection(*arguments, **options)
        writers.append(writer)
        return reader, writer

    before, clients = asyncio.all_tasks(), set(_clients)
    monkeypatch.setattr(asyncio, "open_connection", recorded)
    yield writers
    left = await _end(before, clients)
    for writer in writers:
        # nats-py leaves the socket of a connection that it lost open. The garbage collector may find it only during
        # another test. asyncio cannot abort what closed after its last bytes were written.
        with contextlib.suppress(AttributeError):
            writer.transport.abort()
    await asyncio.sleep(0)
    if left:
        pytest.fail(f"left behind in the event loop: {', '.join(sorted(left))}", pytrace=False)


async def _end(before: set["asyncio.Task[Any]"], clients: set[Client]) -> list[str]:
    """End what runs in this loop and was not there before; return the names of what should have ended by itself."""
    loop: Any = asyncio.get_running_loop()
    mine = [client for client in set(_clients) - clients if _loop_of(client) is loop]
    still_open = [client for client in mine if _is_open(client)]
    left = [_describe(client) for client in still_open if client not in _closed]
    closing = [asyncio.ensure_future(client.close()) for client in still_open]
    if closing:
        await asyncio.wait(closing, timeout=5)
    await end_lost_tasks()
    deadline = loop.time() + GRACE
    while (tasks := _running(before)) and loop.time() < deadline:
        await asyncio.wait(tasks, timeout=0.05)
        await end_lost_tasks()
    left += [f"task {_name(task)}" for task in tasks]
    for task in tasks:
        task.cancel()
    return left


def _loop_of(client: Client) -> Any:
    """Return the loop that a client's tasks run in (None: it has had no connection)."""
    task = getattr(client, "_reading_task", None) or getattr(client, "_reconnection_task", None)
    return task and task.get_loop()


def _running(before: set["asyncio.Task[Any]"]) -> list["asyncio.Task[Any]"]:
    return [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]


async def end_lost_tasks() -> None:
    """End nats-py's own tasks of closed clients: those that still reconnect, or that nats-py has lost track of.

    Before Python 3.12, `wait_for` loses a cancellation that arrives together with its result. Such a task
    goes on, and the end of the event loop, which cancels it only once, waits for it.
    """
    deadline = asyncio.get_running_loop().time() + GRACE
    while tasks := [task for task in asyncio.all_tasks() if _name(task).startswith(("Client.", "Subscription."))]:
        for task in tasks:  # a task that ends may have started another one
            task.cancel()
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0)
