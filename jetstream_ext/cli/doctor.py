"""``jetstream-ext doctor``: what works here, and what would make the rest work."""

from __future__ import annotations

import asyncio

import click
from rich.text import Text

from jetstream_ext.cli.connection import Target, check_stream, connected, connection_options, target
from jetstream_ext.cli.diagnosis import Report, StreamReport, examine
from jetstream_ext.cli.output import console, count, printable, table, write_json
from jetstream_ext.protocol import feature_table


@click.command("doctor", short_help="Say what a server can do, and its streams lack.")
@click.argument("url", envvar="NATS_URL", default="")
@click.option("--stream", metavar="NAME", help="Look at this stream only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@connection_options(server=False)
@click.pass_context
def command(ctx: click.Context, url: str, stream: str | None, as_json: bool, timeout: float) -> None:
    """Say what the server at URL can do, and what its streams lack.

    Without URL that is NATS_URL, or the server of the selected context, or the one on this machine. For each stream
    the call is shown that turns on what it lacks. An option that is not turned on is no fault: the
    exit status is 0 whenever the server could be asked.
    """
    if stream is not None:
        check_stream(stream)
    report = asyncio.run(_ask(target(ctx, timeout, url), stream))
    if as_json:
        write_json(report.as_json())
    else:
        _show(report)


async def _ask(where: Target, stream: str | None) -> Report:
    async with connected(where) as js:
        return await examine(js, stream)


def _show(report: Report) -> None:
    screen = console()
    screen.print(f"nats-server {report.version}, JetStream API level {report.api_level}")
    features = table("feature", "here", "calls")
    for feature in feature_table.FEATURES:
        here = Text("yes") if feature in report.works else Text(f"from {feature.since} on", "bold")
        features.add_row(feature.title, here, feature.calls.replace("`", ""))
    screen.print(features)
    if not report.streams:
        screen.print("There are no streams.")
    for stream in report.streams:
        _show_stream(stream)


def _show_stream(stream: StreamReport) -> None:
    screen = console()
    screen.print(Text.assemble("\n", (printable(stream.name), "bold"), f"  {count(stream.messages, 'message')}"))
    if stream.has:
        screen.print(f"  allows {', '.join(stream.has)}", markup=False)
    for reason in stream.never:
        screen.print(f"  never {reason}", markup=False)
    if stream.lacks:
        screen.print(Text(f"  lacks {', '.join(stream.lacks)}", "bold"))
        screen.print("  turn on what you need with")
        click.echo(f"    {stream.fix}")  # never wrapped: it is there to be copied
    for trouble in stream.sources:
        screen.print(Text(f"  {printable(trouble)}", "bold red"))
