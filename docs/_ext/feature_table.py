"""The directive `feature-table`: the features by server version, from `jetstream_ext.protocol.feature_table`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jetstream_ext.protocol import feature_table as features

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def since_within(since: str, release: str) -> str:
    """Return "yes" or "no" for a line of servers, or the release `since` if that is one of this line."""
    first, line = (tuple(map(int, version.split("."))) for version in (since, release))
    return since if first[:2] == line else "yes" if line > first else "no"


def markdown_table() -> str:
    """Return the table in Markdown."""
    head = ["feature", "calls", *features.RELEASES, "API level", "stream option", "behaviour of older servers"]
    lines = [head, ["---", "---", *[":-:"] * (len(features.RELEASES) + 1), "---", "---"]]
    lines += (
        [
            feature.title,
            feature.calls,
            *("yes" if feature.on(release) else "no" for release in features.RELEASES),
            str(feature.api_level or ""),
            f"`{feature.field}`" if feature.field else "",
            feature.older,
        ]
        for feature in features.FEATURES
    )
    lines += (
        [
            quirk.title,
            quirk.calls,
            *(since_within(quirk.since, release) for release in features.RELEASES),
            str(quirk.feature.api_level),
            f"`{quirk.feature.field}`",
            f"before {quirk.since}: {quirk.wrong}",
        ]
        for quirk in features.QUIRKS
    )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive (called by Sphinx)."""
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class FeatureTable(SphinxDirective):
        def run(self) -> list[Any]:
            (found,) = self.parse_content_to_nodes()
            found["classes"].append("wide")  # see _static/pages.css
            return [found]

        def parse_content_to_nodes(self, allow_section_headings: bool = False) -> list[Any]:
            self.content = StringList(markdown_table().splitlines(), source=__file__)
            return super().parse_content_to_nodes(allow_section_headings)

    app.add_directive("feature-table", FeatureTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
