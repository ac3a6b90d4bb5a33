"""The table of features in the documentation and in the README, both from `jetstream_ext.protocol.feature_table`.

In a page, the directive `feature-table` is the table. For the README, ``python docs/_ext/feature_table.py README.md``
replaces the text between ``<!-- feature table -->`` and ``<!-- end of feature table -->``; with ``--check`` it changes
nothing, and its exit status shows whether the table is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetstream_ext.protocol import feature_table as features

if TYPE_CHECKING:
    from sphinx.application import Sphinx

BEGIN, END = "<!-- feature table -->\n", "<!-- end of feature table -->\n"


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
            f"`{feature.option}`" if feature.option else "",
            feature.older,
        ]
        for feature in features.FEATURES
    )
    lines += (
        [
            quirk.title,
            quirk.calls,
            *(
                quirk.since if quirk.release.startswith(f"{release}.") else "yes" if quirk.feature.on(release) else "no"
                for release in features.RELEASES
            ),
            str(quirk.feature.api_level),
            f"`{quirk.feature.option}`",
            f"{quirk.release}: {quirk.wrong}",
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


def update(text: str) -> str:
    """Return a Markdown text with the current table between its two marks.

    Raises:
        ValueError: A mark is missing or occurs twice.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"there must be one {BEGIN.strip()} and one {END.strip()} after it")
    return f"{before}{BEGIN}\n{markdown_table()}\n{END}{after}"


if __name__ == "__main__":
    *options, file = sys.argv[1:]
    old = Path(file).read_text(encoding="utf-8")
    new = update(old)
    if "--check" in options:
        sys.exit(old != new and f"{file}: the table of features is out of date; run {sys.argv[0]} {file}")
    Path(file).write_text(new, encoding="utf-8")
