"""``jetstream-ext bench``: this library against plain nats-py, as a table and a picture."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from jetstream_ext.cli.connection import Target, connected, connection_options, target
from jetstream_ext.cli.measuring import Case, Outcome, measure, scratch
from jetstream_ext.cli.output import console, progress, table, write_json
from jetstream_ext.client.features import features
from jetstream_ext.testing import NatsServer

_SUFFIXES: Final = (".png", ".svg")
_INK: Final = "#808080"  # readable on white and on black; the picture itself has no background
_OURS: Final = "#2f81f7"
_THEIRS: Final = "#a0a0a0"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        name: What it is.
        median: How long it is.
        least: Where its whisker begins,
        most: and ends.
        ours: Whether it is this library's.
    """

    name: str
    median: float
    least: float
    most: float
    ours: bool


def _check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is measured.

    Raises:
        click.ClickException: matplotlib is missing, the name says no format, or there is no such folder.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise click.ClickException(f"{path}: a plot is a file named {' or '.join('*' + each for each in _SUFFIXES)}")
    if not path.parent.is_dir():
        raise click.ClickException(f"{path}: there is no folder {str(path.parent)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("a plot needs matplotlib: pip install 'nats-jetstream-ext[plot]'")


def _draw_plot(path: Path, title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> None:
    """Draw groups of bars below each other.

    Args:
        path: The file; its name says whether it is a PNG or an SVG.
        title: What stands on top.
        groups: Their titles and bars.
    """
    from matplotlib import rc_context  # an extra, and heavy
    from matplotlib.figure import Figure

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {"svg.fonttype": "none", **dict.fromkeys(ink, _INK)}
    with rc_context(settings):
        heights = [len(bars) + 1.2 for _, bars in groups]
        figure = Figure(figsize=(9, 0.36 * sum(heights) + 0.6), dpi=150, layout="constrained")
        figure.suptitle(title, fontsize=10)
        for axes, (name, bars) in zip(
            figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0], groups, strict=True
        ):
            _draw_group(axes, name, bars)
        figure.savefig(path, transparent=True)


def _draw_group(axes: Any, name: str, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    axes.barh(
        places,
        [bar.median for bar in bars],
        height=0.7,
        color=[_OURS if bar.ours else _THEIRS for bar in bars],
        xerr=[[bar.median - bar.least for bar in bars], [bar.most - bar.median for bar in bars]],
        ecolor=_INK,
        capsize=2,
    )
    for place, bar in zip(places, bars, strict=True):
        axes.annotate(
            f"{bar.median:,.0f}", (bar.most, place), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(places, [bar.name for bar in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(bar.most for bar in bars) * 1.15)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(f"{name}, messages/s", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


_STOPPED: Final = 130
_STEPS: Final = 1_000  # of the progress bar
_ROOM_FOR_ALL: Final = 76
_GROUPS: Final = {"publish": "publish", "read": "read back"}


@click.command("bench", short_help="Measure this library against plain nats-py.")
@click.argument("url", envvar="NATS_URL", default="")
@click.option(
    "--messages",
    type=click.IntRange(1),
    default=100_000,
    metavar="N",
    show_default=True,
    help="How many the fastest calls move; slower ones move a part of it.",
)
@click.option("--size", type=click.IntRange(0), default=128, metavar="N", show_default=True, help="Bytes per payload.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    metavar="N",
    show_default=True,
    help="How often; one round more warms up.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw a picture, too: *.png or *.svg.",
)
@click.option("--json", "as_json", is_flag=True, help="The result as a JSON object; no progress bar.")
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
    """Measure this library and plain nats-py in turn, on the server at URL or else on one of its own.

    It works on a scratch stream, which it deletes at the end and after Ctrl-C, and touches no other. It loads the
    server as much as it can. A server of its own needs nats-jetstream-ext[server].
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
            deleted = job.began and not job.left
            click.echo("stopped; the scratch stream is deleted" if deleted else "stopped", err=True)
            ctx.exit(_STOPPED)
        finally:
            if job.left and own is None:
                click.echo(f"the scratch stream {job.left} could not be deleted; delete it if it is there", err=True)
    conditions = {
        "server": where.shown if own is None else "embedded",
        "server_version": outcome.version,
        "nats_py": version("nats-py"),
        "jetstream_ext": version("nats-jetstream-ext"),
        "messages": messages,
        "size": size,
        "rounds": rounds,
    }
    if picture is not None:
        _draw_plot(picture, _title(conditions), [(title, _bars(outcome, name)) for name, title in _GROUPS.items()])
    if as_json:
        write_json(conditions | _as_json(outcome))
        return
    _show(outcome, conditions)
    if picture is not None:
        click.echo(f"plot in {picture}")


class _Bench:
    """One run; `began` with a scratch stream, which is `left` if it could not be deleted."""

    def __init__(self, messages: int, size: int, rounds: int) -> None:
        self.began = False
        self.left = ""
        self._messages = messages
        self._size = size
        self._rounds = rounds
        self._task: asyncio.Task[Outcome] | None = None

    def stop(self) -> None:
        """End as by Ctrl-C, which is not raised: what a shell starts with `&` ignores that."""
        if self._task is None:
            raise KeyboardInterrupt
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def run(self, where: Target, *, show: bool) -> Outcome:
        """Measure."""
        self._task = asyncio.ensure_future(self._run(where, show=show))
        try:
            return await self._task
        finally:
            self._task = None

    async def _run(self, where: Target, *, show: bool) -> Outcome:
        async with connected(where) as js:
            found = await features(js)
            with progress("measuring", _STEPS, show=show) as tell:
                async with scratch(js, found, self._on_left) as stream:
                    self.began = True
                    return await measure(
                        js,
                        found,
                        stream,
                        self._messages,
                        self._size,
                        self._rounds,
                        lambda share, moved: tell(int(share * _STEPS), moved),
                    )

    def _on_left(self, stream: str) -> None:
        self.left = stream


@contextmanager
def _sigterm_as_ctrl_c(job: _Bench) -> Iterator[None]:
    """The scratch stream is to go, whoever ends this."""
    before = signal.signal(signal.SIGTERM, lambda *_: job.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _title(conditions: dict[str, Any]) -> str:
    return (
        f"nats-server {conditions['server_version']}, nats-py {conditions['nats_py']}: messages of "
        f"{conditions['size']:,} bytes, {_rounds(conditions)}"
    )


def _rounds(conditions: dict[str, Any]) -> str:
    return "one round" if conditions["rounds"] == 1 else f"medians of {conditions['rounds']} rounds"


def _bars(outcome: Outcome, group: str) -> list[Bar]:
    return [
        Bar(case.name, case.median, min(case.rates), max(case.rates), case.ours)
        for case in outcome.cases
        if case.group == group
    ]


def _as_json(outcome: Outcome) -> dict[str, Any]:
    def row(case: Case) -> dict[str, Any]:
        return {
            "call": case.name,
            "group": case.group,
            "by": "jetstream_ext" if case.ours else "nats-py",
            "messages_per_second": {"min": min(case.rates), "median": case.median, "max": max(case.rates)},
            "times_nats_py": case.median / outcome.base(case.group).median,
        }

    return {
        "cases": [row(case) for case in outcome.cases],
        "left_out": {case.name: case.needs.since for case in outcome.left_out if case.needs},
    }


def _show(outcome: Outcome, conditions: dict[str, Any]) -> None:
    screen = console()
    own = " of its own" if conditions["server"] == "embedded" else f" at {conditions['server']}"
    screen.print(f"nats-server {outcome.version}{own}, nats-py {conditions['nats_py']}", markup=False)
    screen.print(f"{conditions['messages']:,} messages of {conditions['size']:,} bytes, {_rounds(conditions)}")
    for group, title in _GROUPS.items():
        base = outcome.base(group)
        rates = table(title, "messages/s", *(["min", "max"] if screen.width >= _ROOM_FOR_ALL else []), "times nats-py")
        for column in rates.columns[1:]:
            column.justify = "right"
        for case in outcome.cases:
            if case.group == group:
                span = [min(case.rates), max(case.rates)] if screen.width >= _ROOM_FOR_ALL else []
                rates.add_row(
                    Text(case.name, "bold" if case.ours else ""),
                    *(f"{rate:,.0f}" for rate in [case.median, *span]),
                    f"{case.median / base.median:.1f}",
                )
        screen.print(rates)
    screen.print("Times nats-py: its faster call is 1.0.", style="dim")
    for case in outcome.left_out:
        assert case.needs is not None
        screen.print(f"left out: {case.name} needs nats-server {case.needs.since}", markup=False)
