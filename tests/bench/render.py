"""Write the figures of docs/bench.json into the pages that show them, between comments, and draw the charts.

    python tests/bench/render.py [--check]

``--check`` changes nothing; its exit status shows whether the pages and pictures agree with the record.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import direct_get
import groups
import kv
import memory
import publish
import sharing
import svg
import tables
from memory import LONG, RESIDENT
from record import CLIENT, RATE, SERVER, WORKERS

Record = dict[str, Any]

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "bench.json"


# The title of a row, its case, and the bare socket that does the same work.
PUBLISHED = (
    ("`js.publish`", publish.JS_PUBLISH, publish.BARE, ""),
    ("`js.publish_async`", publish.PUBLISH_ASYNC, publish.BARE, ""),
    ("`FastPublisher.add`", publish.ADD, publish.BARE, ""),
    ("`FastPublisher.add_many`", publish.ADD_MANY, publish.BARE, ""),
    ("`add_many` with `Nats-Msg-Id`", publish.ADD_MANY_IDS, publish.BARE_IDS, " (bare socket with ids)"),
    ("`ingest`", publish.INGEST, publish.BARE_IDS, " (bare socket with ids)"),
    (
        f"`publish_atomic`, batches of {publish.ATOMIC:,}",
        publish.PUBLISH_ATOMIC,
        publish.BARE_ATOMIC,
        " (bare socket with the same batches)",
    ),
    ("bare socket, joined frames", publish.BARE, publish.BARE, ""),
)
READ = (
    ("`js.get_msg(direct=True)`", publish.GET_MSG, publish.BARE_READ, ""),
    ("a batched get by hand over nats-py", publish.BY_HAND, publish.BARE_READ, ""),
    ("`DirectGet.scan`", publish.SCAN, publish.BARE_READ, ""),
    ("bare socket, frames counted", publish.BARE_READ, publish.BARE_READ, ""),
)
OURS = {publish.ADD, publish.ADD_MANY, publish.ADD_MANY_IDS, publish.INGEST, publish.PUBLISH_ATOMIC, publish.SCAN}


def figure(record: Record, group: str, case: str, measure: str) -> dict[str, Any]:
    """Return the summary of one figure."""
    found: dict[str, Any] = record["groups"][group]["figures"][case][measure]
    return found


def median(record: Record, group: str, case: str, measure: str = RATE) -> float:
    return float(figure(record, group, case, measure)["median"])


def share(record: Record, group: str, case: str, limit: str) -> float:
    """Return the median of the rounds' ratios: a slow round is slow for both."""
    one, other = (figure(record, group, name, RATE)["runs"] for name in (case, limit))
    return statistics.median(mine / theirs for mine, theirs in zip(one, other, strict=True))


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, left: int = 1) -> str:
    """Return a Markdown table; the first `left` columns are text."""
    titles = list(head)
    rule = ["---" if number < left else "---:" for number in range(len(titles))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, rule, *rows))


def spread(found: dict[str, Any], form: str = ",.0f") -> str:
    # No-break spaces, so that the figure stays on one line.
    return f"{found['min']:{form}}\N{NO-BREAK SPACE}…\N{NO-BREAK SPACE}{found['max']:{form}}"


# -- the blocks


def conditions(record: Record) -> str:
    machine, versions, group = record["machine"], record["versions"], record["groups"]["publish"]["conditions"]
    day = datetime.fromisoformat(record["taken"])
    return (
        f"nats-server {versions['nats_server']}, nats-py {versions['nats_py']}, Python {versions['python']}, all on one "
        f"machine ({machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_gib']:g} GiB, {machine['os']}), "
        f"{day.day} {day:%B %Y}. {group['messages']:,} messages of {group['size']:,} bytes, file storage, "
        f"{group['flow']} messages per acknowledgement; medians of {group['rounds']} rounds; a share is the "
        "median of the ratios within each round. Absolute figures depend on the machine; compare the ratios."
    )


def _rates(record: Record, group: str, rows: Any, base: tuple[str, str]) -> str:
    def cells(title: str, case: str, limit: str, note: str) -> list[str]:
        found = figure(record, group, case, RATE)
        times = found["median"] / median(record, group, base[1])
        return [
            title,
            f"{found['median']:,.0f}",
            spread(found),
            f"{times:.1f}",
            f"{share(record, group, case, limit):.2f}{note}",
        ]

    head = [
        group,
        "messages/s",
        "min … max",
        f"\N{MULTIPLICATION SIGN} {base[0]}",
        "share of the bare socket",
    ]
    return table(head, [cells(*row) for row in rows])


def publish_table(record: Record) -> str:
    return _rates(record, "publish", PUBLISHED, ("`publish_async`", publish.PUBLISH_ASYNC))


def read_table(record: Record) -> str:
    return _rates(record, "read", READ, ("the get by hand", publish.BY_HAND))


def pictures(record: Record) -> str:
    return (
        "![Messages published per second](images/bench-publish.svg)\n\n"
        "![Messages read per second](images/bench-read.svg)"
    )


def cpu_table(record: Record) -> str:
    rows = (
        ("bare socket, joined frames", publish.BARE),
        ("`add_many`", publish.ADD_MANY),
        ("`add`", publish.ADD),
        ("bare socket with ids", publish.BARE_IDS),
        ("`add_many`, `Nats-Msg-Id`", publish.ADD_MANY_IDS),
        ("`ingest`", publish.INGEST),
        ("bare socket with atomic batches", publish.BARE_ATOMIC),
        ("`publish_atomic`", publish.PUBLISH_ATOMIC),
    )
    flows = [(group, record["groups"][group]["conditions"]["flow"]) for group in ("publish", "publish_500")]
    head = ["case", *(f"{who}, µs, flow {flow}" for _, flow in flows for who in ("client", "server"))]
    return table(
        head,
        (
            [title, *(f"{median(record, group, case, who):.2f}" for group, _ in flows for who in (CLIENT, SERVER))]
            for title, case in rows
        ),
    )


def shares_table(record: Record) -> str:
    groups = ("publish", "publish_500")
    rows = (
        ("`add_many`", publish.ADD_MANY, publish.BARE),
        ("`add`", publish.ADD, publish.BARE),
        ("`add_many`, `Nats-Msg-Id`, of a bare socket with ids", publish.ADD_MANY_IDS, publish.BARE_IDS),
        ("`ingest`, of a bare socket with ids", publish.INGEST, publish.BARE_IDS),
        ("`publish_atomic`, of a bare socket with the same batches", publish.PUBLISH_ATOMIC, publish.BARE_ATOMIC),
    )
    times = [
        f"{median(record, group, publish.ADD_MANY) / median(record, group, publish.PUBLISH_ASYNC):.1f}"
        for group in groups
    ]
    return table(
        ["case", *(f"flow {record['groups'][group]['conditions']['flow']}" for group in groups)],
        [
            *(
                [title, *(f"{share(record, group, case, limit):.2f}" for group in groups)]
                for title, case, limit in rows
            ),
            [
                f"slowest of {publish.PUBLISHERS} publishers on one connection, of their mean",
                *(f"{median(record, group, publish.EIGHT, publish.SHARE):.2f}" for group in groups),
            ],
            ["`add_many`, \N{MULTIPLICATION SIGN} `publish_async`", *times],
        ],
    )


def sharing_table(record: Record) -> str:
    def rates(what: str, *, shared: bool) -> list[str]:
        cases = (sharing.case_name(what, count, shared=shared or count == 1) for count in sharing.COUNTS)
        return [f"{median(record, 'sharing', case):,.0f}" for case in cases]

    return table(
        ["messages/s together", *(f"{count}" for count in sharing.COUNTS)],
        (
            [f"`{what}`, {where}", *rates(what, shared=shared)]
            for what in (sharing.PUBLISH, sharing.SCAN)
            for shared, where in ((True, "on one connection"), (False, "on one connection each"))
        ),
    )


def memory_table(record: Record) -> str:
    def cells(case: str, measure: str, form: str) -> list[str]:
        return [f"{median(record, f'memory-{case}-{count}', case, measure):{form}}" for count in LONG]

    return table(
        ["", *(f"{count:,} messages" for count in LONG)],
        (
            row
            for case in memory.CASES
            for row in (
                [f"`{case}`: peak resident memory of the process, MB", *cells(case, RESIDENT, ".0f")],
                [f"`{case}`: CPU of the client, µs a message", *cells(case, CLIENT, ".2f")],
            )
        ),
    )


def direct_get_table(record: Record) -> str:
    rows = []

    def add(title: str, case: str, counts: str | None = None, cuts: str | None = None) -> None:
        rows.append(
            [
                title,
                f"{median(record, 'direct_get', case):,.0f}",
                f"{median(record, 'direct_get', case, CLIENT):.2f}",
                *(
                    "" if limit is None else f"{share(record, 'direct_get', case, limit):.2f}"
                    for limit in (counts, cuts)
                ),
            ]
        )

    for what in (direct_get.NO_HEADERS, direct_get.TWO_HEADERS):
        for batch in direct_get.BATCHES:
            counts, cuts = direct_get.bare_name(what, batch), direct_get.cut_name(what, batch)
            add(f"`scan`, {what}, requests of {batch:,}", direct_get.scan_name(what, batch), counts, cuts)
            add(f"bare socket that cuts frames, {what}, requests of {batch:,}", cuts, counts)
    add("`scan`, no headers, with default options", direct_get.AS_IT_COMES)
    add("the same, with `seq` and `data` of each message", direct_get.USED)
    add("`to_arrow`, no headers, all columns", direct_get.TO_ARROW)
    add("`to_arrow`, no headers, `seq` and `data`", direct_get.TO_ARROW_TWO)
    add("`to_arrow`, two headers, all columns", direct_get.TO_ARROW_HEADERS)
    add("a batched get by hand over nats-py", direct_get.BY_HAND)
    add("nats-py's ordered consumer", direct_get.ORDERED)
    add("`get`, one after the other", direct_get.GET)
    add("nats-py's request for the same", direct_get.REQUEST)
    head = ["case", "messages/s", "CPU of the client, µs", "share of a bare socket that counts", "… that cuts frames"]
    return table(head, rows)


def kv_tables(record: Record) -> str:
    found = record["groups"]["kv"]["conditions"]

    def cost(case: str) -> float:
        return median(record, "kv", case, kv.COST)

    def compared(theirs: str, ours: str, keys: int) -> list[list[str]]:
        return [
            [f"{keys:,} keys by `{theirs}`", f"{cost(theirs):.1f}", ""],
            [f"{keys:,} keys by `{ours}`", f"{cost(ours):.1f}", f"{cost(theirs) / cost(ours):.1f} times as fast"],
        ]

    first = table(
        ["case", "µs per key", ""],
        [*compared(kv.GATHER, kv.GET_MANY, found["by_name"]), *compared(kv.WATCHALL, kv.SNAPSHOT, found["whole"])],
    )
    second = table(
        ["µs per key, by the keys in the bucket", *(f"{keys:,}" for keys in found["sizes"])],
        (
            [f"`{what}`", *(f"{cost(kv.sized(what, keys)):.1f}" for keys in found["sizes"])]
            for what in (kv.SNAPSHOT, kv.GET_MANY)
        ),
    )
    return f"{first}\n\n{second}"


def live_tables(record: Record) -> str:
    group = record["groups"]["tables"]
    found, figures = group["conditions"], group["figures"]

    def cell(case: str, measure: str, form: str) -> str:
        return f"{figures[case][measure]['median']:{form}}" if measure in figures.get(case, {}) else ""

    small, large = found["sizes"]
    return table(
        ["", *(f"`{what}`" for what in (tables.WATCHALL, tables.TABLE, tables.SCAN))],
        (
            [title, *(cell(name(what), measure, form) for what in (tables.WATCHALL, tables.TABLE, tables.SCAN))]
            for title, measure, form, name in (
                (f"load {small:,} keys, µs per key", tables.LOAD, ".1f", partial(tables.case, keys=small)),
                (f"load {large:,} keys, µs per key", tables.LOAD, ".1f", partial(tables.case, keys=large)),
                ("follow, changes/s", tables.FOLLOW, ",.0f", str),
                ("follow, CPU of the client per change, µs", CLIENT, ".1f", str),
                ("from the acknowledgement of a write until it is seen, ms", tables.SEEN, ".2f", str),
                ("the same, 99th percentile, ms", tables.SLOWEST, ".2f", str),
            )
        ),
    )


def group_tables(record: Record) -> str:
    figures = record["groups"]["groups"]["figures"]
    names = [*groups.CASES]
    lines = [
        [
            f"{members} {'process' if members == 1 else 'processes'}, messages/s",
            *(f"{figures[groups.case(what, members)][RATE]['median']:,.0f}" for what in names),
        ]
        for members in groups.MEMBERS
    ]
    lines.append(
        [
            "empty handler, CPU per message, µs",
            *(f"{figures[groups.empty(what)][CLIENT]['median']:.1f}" for what in names),
        ]
    )
    return table(["", *(f"`{what}`" if what != groups.CONSUMER else what for what in names)], lines)


def spark_tables(record: Record) -> str:
    parts = [
        "## Spark",
        f"pyspark {record['versions']['pyspark']}, `local[2]`, after a warm-up, with the server on the same cores.",
    ]
    for group, title in (("spark_read", "read"), ("spark_write", "write")):
        found = record["groups"][group]["conditions"]
        parts.append(f"{found['messages']:,} messages of {found['size']} bytes, medians of {found['rounds']} runs:")
        figures = record["groups"][group]["figures"]
        rates = {case: measures for case, measures in figures.items() if "rows/s" in measures}
        parts.append(
            table(
                [title, "rows/s", "min … max", WORKERS],
                (
                    [
                        case,
                        f"{measures['rows/s']['median']:,.0f}",
                        spread(measures["rows/s"]),
                        f"{measures[WORKERS]['median']:.2f}" if WORKERS in measures else "",
                    ]
                    for case, measures in rates.items()
                ),
            )
        )
        loads = {case: measures["of one core"] for case, measures in figures.items() if "of one core" in measures}
        parts += [f"CPU of {case}: {each['median']:.1%} of one core." for case, each in loads.items()]
    return "\n\n".join(parts)


PAGES: dict[str, dict[str, Callable[[Record], str]]] = {
    "docs/performance.md": {
        "conditions": conditions,
        "publish": publish_table,
        "read": read_table,
        "pictures": pictures,
        "cpu": cpu_table,
        "shares": shares_table,
        "memory": memory_table,
        "direct-get": direct_get_table,
        "sharing": sharing_table,
        "spark": spark_tables,
    },
    "docs/key-value.md": {"kv": kv_tables},
    "docs/tables.md": {"tables": live_tables},
    "docs/groups.md": {"groups": group_tables},
}


def update(text: str, blocks: dict[str, Callable[[Record], str]], record: Record) -> str:
    """Return the text of a page with the figures of a record in its blocks.

    Raises:
        ValueError: A comment of a block is missing or occurs twice.
        KeyError: The record lacks a figure.
    """
    for name, render in blocks.items():
        begin, end = f"<!-- figures: {name} -->\n", f"<!-- end of figures: {name} -->\n"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended or begin in rest or end in after:
            raise ValueError(f"there must be one {begin.strip()} and one {end.strip()} after it")
        text = f"{before}{begin}\n{render(record)}\n\n{end}{after}"
    return text


def drawings(record: Record) -> dict[str, str]:
    """Return the charts as SVG texts, by path."""

    def chart(title: str, group: str, rows: Any) -> str:
        found = []
        for name, case, limit, _ in rows:
            each = figure(record, group, case, RATE)
            colour = svg.OURS if case in OURS else svg.LIMIT if case == limit else svg.THEIRS
            found.append(svg.Bar(name.replace("`", ""), each["median"], each["min"], each["max"], colour))
        return svg.bars(title, found)

    return {
        "docs/images/bench-publish.svg": chart("published, messages/s", "publish", PUBLISHED),
        "docs/images/bench-read.svg": chart("read, messages/s", "read", READ),
    }


def rendered(record: Record, root: Path = ROOT) -> dict[Path, str]:
    """Return the text of every file that shows figures, by its path.

    Raises:
        ValueError: The record is of a quick run, whose figures mean nothing.
    """
    if record["quick"]:
        raise ValueError("the record is of a quick run, whose figures mean nothing; run the benchmarks without --quick")
    pages = {
        root / name: update((root / name).read_text(encoding="utf-8"), blocks, record) for name, blocks in PAGES.items()
    }
    return pages | {root / name: text for name, text in drawings(record).items()}


def write(record: Record, root: Path = ROOT) -> list[Path]:
    """Write every file that shows figures, and return their paths."""
    files = rendered(record, root)
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def stale(record: Record, root: Path = ROOT) -> list[Path]:
    """Return the files that disagree with the record."""
    return [
        path
        for path, text in rendered(record, root).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


if __name__ == "__main__":
    committed = json.loads(RECORD.read_text(encoding="utf-8"))
    if "--check" in sys.argv[1:]:
        wrong = stale(committed)
        sys.exit(
            ", ".join(map(str, wrong)) + " disagree with docs/bench.json; run this without --check" if wrong else 0
        )
    write(committed)
