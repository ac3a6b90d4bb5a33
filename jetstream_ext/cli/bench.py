"""``jetstream-ext bench``: compare this library with plain nats-py, as a table and a plot."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from jetstream_ext.cli.connection import Target, connected, connection_options, target
from jetstream_ext.cli.measuring import Case, Outcome, measure, scratch
from jetstream_ext.cli.output import STOPPED, console, progress, table, write_json
from jetstream_ext.client.features import features
from jetstream_ext.testing import NatsServer

_SUFFIXES: Final = (".png", ".svg")
_INK: Final = "#808080"  # readable on white and on black: the plot has no background
_OURS: Final = "#2f81f7"
_THEIRS: Final = "#a0a0a0"
_PROGRESS_STEPS: Final = 1_000
_WIDTH_OF_ALL_COLUMNS: Final = 76
_GROUPS: Final = {"publish": "publish", "read": "read back"}


def _check_plot(path: Path) -> None:
    """Raise an error for a plot that cannot be written, before anything is measured."""
    if path.suffix.lower() not in _SUFFIXES:
        raise click.ClickException(f"{path}: a plot must be {' or '.join('*' + each for each in _SUFFIXES)}")
    if not path.parent.is_dir():
        raise click.ClickException(f"{path}: folder {str(path.parent)!r} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("a plot needs matplotlib: pip install 'nats-jetstream-ext[plot]'")


def _draw_plot(path: Path, title: str, outcome: Outcome) -> None:
    from matplotlib import rc_context  # an extra, and slow to import
    from matplotlib.figure import Figure

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {"svg.fonttype": "none", **dict.fromkeys(ink, _INK)}
    groups = [(label, [case for case in outcome.cases if case.group == name]) for name, label in _GROUPS.items()]
    with rc_context(settings):
        heights = [len(cases) + 1.2 for _, cases in groups]
        figure = Figure(figsize=(9, 0.36 * sum(heights) + 0.6), dpi=150, layout="constrained")
        figure.suptitle(title, fontsize=10)
        rows = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (label, cases) in zip(rows, groups, strict=True):
            _draw_group(axes, label, cases)
        figure.savefig(path, transparent=True)


def _draw_group(axes: Any, label: str, cases: list[Case]) -> None:
    places = range(len(cases))
    axes.barh(
        places,
        [case.median for case in cases],
        height=0.7,
        color=[_OURS if case.ours else _THEIRS for case in cases],
        xerr=[[case.median - case.least for case in cases], [case.most - case.median for case in cases]],
        ecolor=_INK,
        capsize=2,
    )
    for place, case in zip(places, cases, strict=True):
        text = f"{case.median:,.0f}"
        axes.annotate(text, (case.most, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, [case.name for case in cases], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(case.most for case in cases) * 1.15)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(f"{label}, messages/s", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


@click.command("bench", short_help="Compare this library with plain nats-py.")
@click.argument("url", envvar="NATS_URL", default="")
@click.option(
    "--messages",
    type=click.IntRange(1),
    default=100_000,
    metavar="N",
    show_default=True,
    help="Messages of the fastest calls; slower calls move a fraction of them.",
)
@click.option("--size", type=click.IntRange(0), default=128, metavar="N", show_default=True, help="Bytes per payload.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    metavar="N",
    show_default=True,
    help="Measured rounds, after one round of warm-up.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also draw a plot: *.png or *.svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and no progress bar.")
@connection_options(server=False)
@click.pass_context
def command(
    ctx: click.Context,
    url: str,
    messages: int,
    size: int,
    rounds: int,
    picture: Path | None,
    as_json: bool,
    timeout: float,
) -> None:
    """Compare this library with plain nats-py, on the server at URL or else on a temporary one.

    The command works on a scratch stream, which it deletes at the end and after Ctrl-C. It touches no other stream. It
    puts as much load on the server as it can. A temporary server needs nats-jetstream-ext[server].
    """
    if picture is not None:
        _check_plot(picture)
    where = target(ctx, timeout, url, selected=False)
    job = _Bench(messages, size, rounds)
    with _sigterm_as_ctrl_c(job), nullcontext() if where.settings.url else NatsServer() as own:
        if own is not None:
            where = target(ctx, timeout, own.url, selected=False)
        try:
            outcome = asyncio.run(job.run(where, show=not as_json))
        except (KeyboardInterrupt, asyncio.CancelledError):
            deleted = job.created and not job.left
            click.echo("stopped; the scratch stream is deleted" if deleted else "stopped", err=True)
            ctx.exit(STOPPED)
        finally:
            if job.left and own is None:
                click.echo(f"the scratch stream {job.left} could not be deleted; delete it if it exists", err=True)
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
    if picture is not None:
        title = f"nats-server {outcome.version}, nats-py {conditions['nats_py']}: messages of {size:,} bytes, {spread}"
        _draw_plot(picture, title, outcome)
    if as_json:
        write_json(conditions | _as_json(outcome))
        return
    place = "temporary server" if own is not None else f"at {where.shown}"
    screen = console()
    screen.print(f"nats-server {outcome.version}, {place}; nats-py {conditions['nats_py']}", markup=False)
    screen.print(f"{messages:,} messages of {size:,} bytes, {spread}")
    _show(outcome)
    if picture is not None:
        click.echo(f"plot in {picture}")


class _Bench:
    """One run; `left` is its scratch stream if that could not be deleted."""

    def __init__(self, messages: int, size: int, rounds: int) -> None:
        self.created = False
        self.left = ""
        self._messages = messages
        self._size = size
        self._rounds = rounds
        self._task: asyncio.Task[Outcome] | None = None

    def stop(self) -> None:
        """End as after Ctrl-C; SIGINT itself is ignored by processes that a shell starts with `&`."""
        if self._task is None:
            raise KeyboardInterrupt
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def run(self, where: Target, *, show: bool) -> Outcome:
        self._task = asyncio.ensure_future(self._run(where, show=show))
        try:
            return await self._task
        finally:
            self._task = None

    async def _run(self, where: Target, *, show: bool) -> Outcome:
        async with connected(where) as js:
            found = await features(js)
            with progress("measuring", _PROGRESS_STEPS, show=show) as report:
                async with scratch(js, found, self._on_left) as stream:
                    self.created = True

                    def on_progress(share: float, moved: int) -> None:
                        report(int(share * _PROGRESS_STEPS), moved)

                    return await measure(js, found, stream, self._messages, self._size, self._rounds, on_progress)

    def _on_left(self, stream: str) -> None:
        self.left = stream


@contextmanager
def _sigterm_as_ctrl_c(job: _Bench) -> Iterator[None]:
    """Delete the scratch stream after SIGTERM too."""
    before = signal.signal(signal.SIGTERM, lambda *_: job.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _as_json(outcome: Outcome) -> dict[str, Any]:
    def row(case: Case) -> dict[str, Any]:
        return {
            "call": case.name,
            "group": case.group,
            "by": "jetstream_ext" if case.ours else "nats-py",
            "messages_per_second": {"min": case.least, "median": case.median, "max": case.most},
            "times_nats_py": case.median / outcome.base(case.group).median,
        }

    return {
        "cases": [row(case) for case in outcome.cases],
        "left_out": {case.name: case.needs.since for case in outcome.left_out if case.needs},
    }


def _show(outcome: Outcome) -> None:
    screen = console()
    wide = screen.width >= _WIDTH_OF_ALL_COLUMNS
    for group, title in _GROUPS.items():
        base = outcome.base(group)
        rates = table(title, "messages/s", *(["min", "max"] if wide else []), "times nats-py")
        for column in rates.columns[1:]:
            column.justify = "right"
        for case in outcome.cases:
            if case.group == group:
                figures = [case.median, case.least, case.most] if wide else [case.median]
                name = Text(case.name, "bold" if case.ours else "")
                rates.add_row(name, *(f"{rate:,.0f}" for rate in figures), f"{case.median / base.median:.1f}")
        screen.print(rates)
    screen.print("Times nats-py: relative to its fastest call.", style="dim")
    for case in outcome.left_out:
        assert case.needs is not None
        screen.print(f"left out: {case.name} needs nats-server {case.needs.since}", markup=False)
