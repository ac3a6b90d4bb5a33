"""The picture of a table of rates. Needs matplotlib, which is imported only when there is something to draw."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

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


def check(path: Path) -> None:
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


def draw(path: Path, title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> None:
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
            _group(axes, name, bars)
        figure.savefig(path, transparent=True)


def _group(axes: Any, name: str, bars: Sequence[Bar]) -> None:
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
