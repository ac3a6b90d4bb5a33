"""Index entries for the error numbers in headings: Sphinx's search leaves out words of digits, but searches the index."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def error_numbers(heading: str) -> list[str]:
    """Return the numbers of the server's errors that a heading names."""
    return re.findall(r"\b1\d{4}\b", heading)


def setup(app: Sphinx) -> dict[str, Any]:
    from docutils import nodes
    from sphinx.addnodes import index
    from sphinx.transforms import SphinxTransform

    class ErrorNumbers(SphinxTransform):
        default_priority = 800  # Sphinx collects the entries at 850

        def apply(self, **_: Any) -> None:
            for section in list(self.document.findall(nodes.section)):
                title, *_ = section
                # The main entry of a word is the first result of a search for it.
                for number in error_numbers(title.astext()):
                    section.insert(1, index(entries=[("single", number, section["ids"][0], "main", None)]))

    app.add_transform(ErrorNumbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
