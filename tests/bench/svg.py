"""Bar charts as SVG; the same figures give the same bytes."""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

# Readable on white and on black, because the chart has no background and cannot know whether the page is dark: CSS in
# an image knows only the setting of the system.
INK, OURS, THEIRS, LIMIT = "#767c85", "#2f81f7", "#9aa0a8", "#c9772b"
LEGEND = {OURS: "this library", THEIRS: "nats-py", LIMIT: "bare socket (upper limit)"}
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 760, 250, 80, 26, 34, 36


class Bar(NamedTuple):
    """A bar: its name, its length, the range of its runs, and its colour."""

    name: str
    median: float
    least: float
    most: float
    colour: str


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return a chart of horizontal bars, each with its median, its range as a whisker, and a legend below them."""
    height = TOP + ROW * len(rows) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(bar.most for bar in rows)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for number, bar in enumerate(rows):
        top = TOP + ROW * number
        middle = top + ROW / 2 - 2
        length, low, high = (round(value * scale, 1) for value in (bar.median, bar.least, bar.most))
        out += [
            f'<text x="{LEFT - 8}" y="{middle + 4.5}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{max(length, 1)}" height="{ROW - 6}" rx="2" fill="{bar.colour}"/>',
            f'<path d="M{LEFT + low} {middle}H{LEFT + high}" stroke="{INK}" stroke-width="1.5"/>',
            f'<text x="{LEFT + max(high, length) + 6}" y="{middle + 4.5}">{bar.median:,.0f}</text>',
        ]
    return "\n".join([*out, *_legend({bar.colour for bar in rows}, height - 12), "</svg>", ""])


def _legend(colours: set[str], bottom: float) -> list[str]:
    """Return the line that says what the colours and the whiskers mean."""
    out, left = [], 8.0
    for colour, text in LEGEND.items():
        if colour in colours:
            out += [
                f'<rect x="{left}" y="{bottom - 11}" width="12" height="12" rx="2" fill="{colour}"/>',
                f'<text x="{left + 18}" y="{bottom}">{text}</text>',
            ]
            left += 18 + 6.5 * len(text) + 20
    return [
        *out,
        f'<path d="M{left} {bottom - 5}h24" stroke="{INK}" stroke-width="1.5"/>',
        f'<text x="{left + 30}" y="{bottom}">slowest to fastest round (figure: median)</text>',
    ]
