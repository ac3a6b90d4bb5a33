"""``jetstream-ext bench``: this library and plain nats-py in turn on a scratch stream, as a table and a plot."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, PubAck
from nats.nuid import NUID

from jetstream_ext.cli.connection import Target, connected, connection_options
from jetstream_ext.cli.options import OUTPUT, Command, cli_option, json_option
from jetstream_ext.cli.output import Stopped, console, on_signal, progress, say, styled, table, write_json
from jetstream_ext.client.api import stream_state
from jetstream_ext.client.atomic import publish_atomic
from jetstream_ext.client.base_connection import cancel
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.streams import Features, features
from jetstream_ext.errors import RequestTimeoutError, ResponseError
from jetstream_ext.protocol.feature_table import ATOMIC, DIRECT_BATCH, DIRECT_GET, FAST_INGEST, Feature
from jetstream_ext.testing import NatsServer
from jetstream_ext.text import printable
from jetstream_ext.types import BatchMessage

_ATOMIC_BATCH: Final = 500  # servers accept 1,000 by default
_FETCH: Final = 500
_ASYNC_PART: Final = 1000  # messages that nats-py takes within the timeout
_CLOSE_TIMEOUT: Final = 5.0
_POLL: Final = 0.5
_SUBJECTS: Final = 10
_SYNCHRONOUS_SHARE: Final = 50  # calls that wait for each answer move this fraction of the messages
_WINDOWED_SHARE: Final = 5
_GROUPS: Final = {"publish": "publish", "read": "read back"}
_WIDTH_OF_ALL_COLUMNS: Final = 76

_NUMBER: Final[dict[str, Any]] = {"metavar": "N", "show_default": True}

_PLOT_SUFFIXES: Final = (".png", ".svg")
_INK: Final = "#808080"  # readable on white and on black: the plot has no background
_OURS: Final = "#2f81f7"
_THEIRS: Final = "#a0a0a0"


@click.command("bench", cls=Command, short_help="Compare this library with plain nats-py.")
@cli_option(
    "--messages",
    type=click.IntRange(1),
    default=100_000,
    help="Number of messages for the fastest calls; slower calls use a fraction of it.",
    **_NUMBER,
)
@cli_option("--size", type=click.IntRange(0), default=128, help="Bytes per payload.", **_NUMBER)
@cli_option("--rounds", type=click.IntRange(1), default=3, help="Measured rounds, after one warm-up round.", **_NUMBER)
@cli_option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    group=OUTPUT,
    help="Also draw a plot: *.png or *.svg.",
)
@json_option("Print one JSON object, and no progress bar.")
@connection_options(url_argument=True, own_server=True)
def command(where: Target, messages: int, size: int, rounds: int, plot: Path | None, as_json: bool) -> None:
    """Compare this library with plain nats-py, on a server that you name or a temporary one.

    URL is the same as --server URL. You can also name the server with NATS_URL or --context; the selected context is not
    used.

    The command works on a scratch stream, which it deletes at the end and after Ctrl-C. It touches no other stream. It
    loads the server as much as it can. A temporary server needs nats-jetstream-ext[server].

    Examples:
        jetstream-ext bench
        jetstream-ext bench -s nats://localhost:4222 --messages 200000 --plot bench.svg
    """
    if plot is not None:
        _check_plot(plot)
    job = _Bench(messages, size, rounds)
    # SIGTERM too deletes the scratch stream.
    with on_signal(job.stop, signal.SIGTERM), nullcontext() if where.settings.url else NatsServer() as own:
        try:
            outcome = asyncio.run(job.run(where if own is None else where.at(own.url), show=not as_json))
        except (KeyboardInterrupt, asyncio.CancelledError):
            deleted = job.created and not job.left
            raise Stopped("stopped; the scratch stream is deleted" if deleted else "stopped") from None
        finally:
            if job.left and own is None:
                say(f"the scratch stream {job.left} could not be deleted; delete it if it exists", err=True)
    conditions = {
        "server": where.shown if own is None else "embedded",
        "server_version": outcome.version,
        "nats_py": version("nats-py"),
        "jetstream_ext": version("nats-jetstream-ext"),
        "messages": messages,
        "size": size,
        "rounds": rounds,
    }
    spread = "one round" if rounds == 1 else f"medians of {rounds} rounds"
    if plot is not None:
        title = f"nats-server {outcome.version}, nats-py {conditions['nats_py']}: messages of {size:,} bytes, {spread}"
        _draw_plot(plot, title, outcome)
    if as_json:
        write_json(conditions | _as_json(outcome))
        return
    place = f"at {where.shown}" if own is None else "temporary server"
    screen = console()
    screen.print(f"nats-server {outcome.version}, {place}; nats-py {conditions['nats_py']}")
    screen.print(f"{messages:,} messages of {size:,} bytes, {spread}")
    _show(outcome)
    if plot is not None:
        say(f"plot in {plot}")


@dataclass(slots=True)
class _Case:
    """One row of the table: a call, and the messages per second of each round."""

    name: str
    group: str
    ours: bool
    needs: Feature | None
    run: Callable[[], Coroutine[object, object, int]]  # moves messages and returns their number
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True, slots=True)
class _Outcome:
    version: str
    cases: tuple[_Case, ...]
    left_out: dict[str, str]  # the name of a case, and the release that it needs

    def base(self, group: str) -> _Case:
        """Return the fastest of nats-py's calls in a group."""
        return max((case for case in self.cases if case.group == group and not case.ours), key=lambda case: case.median)


class _Bench:
    """One run; `left` is its scratch stream if that could not be deleted."""

    def __init__(self, messages: int, size: int, rounds: int) -> None:
        self.created = False
        self.left = ""
        self._messages = messages
        self._size = size
        self._rounds = rounds
        self._task: asyncio.Task[Any] | None = None

    def stop(self) -> None:
        """End as after Ctrl-C; SIGINT itself is ignored by processes that a shell starts with `&`."""
        if self._task is None:
            raise KeyboardInterrupt
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def run(self, where: Target, *, show: bool) -> _Outcome:
        """Warm up, then run every case once per round, in turn: a machine that slows down slows all of them."""
        self._task = asyncio.current_task()
        try:
            async with connected(where) as js:
                found = await features(js)
                async with self._scratch_stream(js, found) as stream:
                    return await self._measure(js, found, _Cases(js, stream, self._messages, self._size), show=show)
        finally:
            self._task = None

    @asynccontextmanager
    async def _scratch_stream(self, js: JetStreamContext, found: Features) -> AsyncIterator[str]:
        name = f"JSX_BENCH_{NUID().next().decode()}"
        # Servers may refuse options that they do not know.
        able = [feature for feature in (DIRECT_GET, ATOMIC, FAST_INGEST) if feature.at(found.api_level)]
        options: dict[str, Any] = {feature.option: True for feature in able}
        connection = Context(js).connection
        try:
            description = "Temporary stream of `jetstream-ext bench`; safe to delete."
            adding = js.add_stream(name=name, subjects=[f"{name}.*"], description=description, **options)
            await connection.bounded(adding, Context(js).timeout, "the scratch stream")
            self.created = True
            yield name
        finally:
            # Even if the creation was not answered: it may have happened, and the name is unique.
            try:
                await connection.bounded(js.delete_stream(name), _CLOSE_TIMEOUT, "the end of the scratch stream")
            except nats.js.errors.NotFoundError:
                pass
            except (nats.errors.Error, OSError):
                self.left = name

    async def _measure(self, js: JetStreamContext, found: Features, cases: _Cases, *, show: bool) -> _Outcome:
        able: list[_Case] = []
        left_out: dict[str, str] = {}
        for case in cases.all():
            if case.needs is None or case.needs.at(found.api_level):
                able.append(case)
            else:
                left_out[case.name] = case.needs.since
        context, done, moved = Context(js), 0, 0
        with progress("measuring", len(able) * (self._rounds + 1), show=show) as report:
            for number in range(self._rounds + 1):
                purging = cases.empty_stream()
                await context.connection.bounded(purging, 2 * context.timeout, "the purge of the scratch stream")
                for case in able:
                    start = time.perf_counter()
                    count = await _while_connected(js, case)
                    elapsed = time.perf_counter() - start
                    if number:
                        case.rates.append(count / elapsed)
                    done, moved = done + 1, moved + count
                    report(done, moved)
        return _Outcome(found.server_version, tuple(able), left_out)


async def _while_connected(js: JetStreamContext, case: _Case) -> int:
    """Run a case until it ends or the connection is lost: some of nats-py's calls then never return."""
    client = Context(js).nc
    this = asyncio.current_task()
    if this is not None and this.cancelling():
        # nats-py swallowed the cancellation; see `cancel`.
        raise asyncio.CancelledError
    task = asyncio.ensure_future(case.run())
    try:
        while not (await asyncio.wait({task}, timeout=_POLL))[0]:
            if not client.is_connected:
                raise nats.errors.ConnectionClosedError
        return task.result()
    except (nats.errors.Error, OSError):
        raise
    except Exception as error:
        if case.ours:
            raise
        # On malformed words of a server, nats-py raises whatever its code meets.
        raise ResponseError(f"nats-py cannot process what the server sent to {case.name}: {error!r:.200}") from error
    finally:
        await cancel(task, _CLOSE_TIMEOUT)  # publish_async raises another error when it is cancelled


class _Cases:
    """The cases. Those that read come last: they read what the others published."""

    def __init__(self, js: JetStreamContext, stream: str, messages: int, size: int) -> None:
        self._js = js
        self._stream = stream
        self._subjects = [f"{stream}.{n}" for n in range(_SUBJECTS)]
        self._messages = messages
        self._payload = b"x" * size
        self._first = 1

    def all(self) -> list[_Case]:
        return [
            _Case("js.publish", "publish", False, None, self._publish),
            _Case("js.publish_async", "publish", False, None, self._publish_async),
            _Case("publish_atomic", "publish", True, ATOMIC, self._publish_atomic),
            _Case("FastPublisher.add_many", "publish", True, FAST_INGEST, self._add_many),
            _Case("js.get_msg(direct=True)", "read", False, None, self._get_msg),
            _Case("pull_subscribe, fetch", "read", False, None, self._fetch),
            _Case("DirectGet.scan", "read", True, DIRECT_BATCH, self._scan),
        ]

    async def empty_stream(self) -> None:
        await self._js.purge_stream(self._stream)
        self._first = (await stream_state(Context(self._js), self._stream)).last_seq + 1

    def _some(self, count: int) -> Iterator[tuple[str, bytes]]:
        return ((self._subjects[n % _SUBJECTS], self._payload) for n in range(count))

    async def _publish(self) -> int:
        count = max(1, self._messages // _SYNCHRONOUS_SHARE)
        for subject, payload in self._some(count):
            await self._js.publish(subject, payload)
        return count

    async def _publish_async(self) -> int:
        count = max(1, self._messages // _WINDOWED_SHARE)
        waiting, timeout = set[asyncio.Future[PubAck]](), Context(self._js).timeout
        # nats-py waits for room without bound, and `publish_async_completed` for an ack that it could not read.
        async with asyncio.timeout(timeout) as limit:
            for subject, payload in self._some(count):
                waiting.add(await self._js.publish_async(subject, payload))
                if len(waiting) % _ASYNC_PART == 0:
                    limit.reschedule(asyncio.get_running_loop().time() + timeout)
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=timeout)
            if not done:
                raise RequestTimeoutError(f"no ack of js.publish_async within {timeout:.4g} s")
            await asyncio.gather(*done)
        return count

    async def _publish_atomic(self) -> int:
        batches = max(1, self._messages // _WINDOWED_SHARE // _ATOMIC_BATCH)
        batch = [BatchMessage(subject, payload) for subject, payload in self._some(_ATOMIC_BATCH)]
        for _ in range(batches):
            await publish_atomic(self._js, batch)
        return batches * _ATOMIC_BATCH

    async def _add_many(self) -> int:
        async with FastPublisher(self._js) as publisher:
            await publisher.add_many(self._some(self._messages))
        return self._messages

    async def _get_msg(self) -> int:
        count = max(1, self._messages // _SYNCHRONOUS_SHARE)
        for seq in range(self._first, self._first + count):
            await self._js.get_msg(self._stream, seq, direct=True)
        return count

    async def _fetch(self) -> int:
        """Measure nats-py's usual way to read in bulk; it is fastest without acknowledgements."""
        count, read = max(1, self._messages // _WINDOWED_SHARE), 0
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True)
        subscription = await self._js.pull_subscribe(f"{self._stream}.*", stream=self._stream, config=config)
        try:
            while read < count:
                read += len(await subscription.fetch(min(_FETCH, count - read)))
        finally:
            await subscription.unsubscribe()
        return read

    async def _scan(self) -> int:
        count = 0
        async with DirectGet(self._js, self._stream).scan() as messages:
            async for _ in messages:
                count += 1
        return count


def _as_json(outcome: _Outcome) -> dict[str, Any]:
    rows = [
        {
            "call": case.name,
            "group": case.group,
            "by": "jetstream_ext" if case.ours else "nats-py",
            "messages_per_second": {"min": min(case.rates), "median": case.median, "max": max(case.rates)},
            "times_nats_py": case.median / outcome.base(case.group).median,
        }
        for case in outcome.cases
    ]
    return {"cases": rows, "left_out": outcome.left_out}


def _show(outcome: _Outcome) -> None:
    screen = console()
    wide = screen.width >= _WIDTH_OF_ALL_COLUMNS
    for group, title in _GROUPS.items():
        base = outcome.base(group)
        rates = table(title, "messages/s", *(["min", "max"] if wide else []), "times nats-py")
        for column in rates.columns[1:]:
            column.justify = "right"
        for case in outcome.cases:
            if case.group == group:
                figures = [case.median, min(case.rates), max(case.rates)] if wide else [case.median]
                call = styled(case.name, "bold" if case.ours else "")
                rates.add_row(call, *(f"{rate:,.0f}" for rate in figures), f"{case.median / base.median:.1f}")
        screen.print(rates)
    screen.print('Column "times nats-py": relative to the fastest call of nats-py.', style="dim")
    for name, release in outcome.left_out.items():
        screen.print(f"left out: {name} needs nats-server {release}")


def _check_plot(path: Path) -> None:
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise click.ClickException(f"{path}: a plot must be {' or '.join('*' + each for each in _PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise click.ClickException(f"{path}: folder {str(path.parent)!r} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("a plot needs matplotlib: pip install 'nats-jetstream-ext[plot]'")


def _draw_plot(path: Path, title: str, outcome: _Outcome) -> None:
    from matplotlib import rc_context  # an extra, and slow to import
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {"svg.fonttype": "none", **dict.fromkeys(ink, _INK)}
    groups = [(label, [case for case in outcome.cases if case.group == name]) for name, label in _GROUPS.items()]
    with rc_context(settings):
        heights = [len(cases) + 1.2 for _, cases in groups]
        figure = Figure(figsize=(9, 0.36 * sum(heights) + 0.9), dpi=150, layout="constrained")
        figure.suptitle(printable(title), fontsize=10, parse_math=False)
        rows = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (label, cases) in zip(rows, groups, strict=True):
            _draw_group(axes, label, cases)
        legend = [Patch(color=_OURS, label="this library"), Patch(color=_THEIRS, label="nats-py")]
        figure.legend(handles=legend, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
        figure.savefig(path, transparent=True)


def _draw_group(axes: Any, label: str, cases: list[_Case]) -> None:
    places = range(len(cases))
    axes.barh(
        places,
        [case.median for case in cases],
        height=0.7,
        color=[_OURS if case.ours else _THEIRS for case in cases],
        xerr=[[case.median - min(case.rates) for case in cases], [max(case.rates) - case.median for case in cases]],
        ecolor=_INK,
        capsize=2,
    )
    for place, case in zip(places, cases, strict=True):
        text = f"{case.median:,.0f}"
        axes.annotate(text, (max(case.rates), place), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, [case.name for case in cases], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(case.rates) for case in cases) * 1.15)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(f"{label}, messages/s", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
