"""Sphinx configuration. `python -m nox -s docs` builds; every warning is an error."""

import re
import sys
from importlib.metadata import version as _version
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "_ext"))

project = "nats-jetstream-ext"
author = "the jetstream-ext authors"
copyright = "2026, the jetstream-ext authors"
release = version = _version("nats-jetstream-ext")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "error_numbers",
    "feature_table",
    "state_tables",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "nats-jetstream-ext"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
# What the reader types has a button; what a program prints has none.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
nitpicky = True
# Other projects' names; there is no network while the documentation is built, so nothing to link them to.
nitpick_ignore_regex = [
    (r"py:.*", r"(nats|asyncio|opentelemetry|pyspark|pyarrow|collections|typing|datetime|enum|types|os|pathlib)\..*"),
    (
        r"py:.*",
        r"(JetStreamContext|KeyValue|SparkSession|DataFrame|TracebackType|StreamInfo|datetime|timedelta|Mapping|Iterable|AsyncIterable)",
    ),
    (
        r"py:class",
        r"(Outcome|Entry|BatchState|GapHandler|ErrorHandler|FlowHandler|Self|Unpack|PublishOptions|StreamOptions|BucketOptions|ScanOptions|TTL|T|_Never|_Result)",
    ),
    (
        r"py:class",
        r"jetstream_ext\..*\.(Entry|Plan|Block|PositionedReader|GapHandler|ErrorHandler|FlowHandler|BatchState|PublishOptions|StreamOptions|BucketOptions|ScanOptions|_Builder|_Never|_Config|Bucket|GroupMembership|Job|_Result|_AnyEntry|Live|Change|T|_C|_E)",
    ),
    (r"py:class", r"(pa\.)?(Schema|Table|RecordBatch)"),
    (r"py:class", r"jetstream_ext\.testing\.reference\.(router\.Message|wire\..*)"),
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # the fields of a value as one list
napoleon_custom_sections = [("Requires", "notes_style"), ("Cancellation", "notes_style")]

# Sphinx replaces the names of type aliases by what they stand for.
_ENTRY = re.compile(r"tuple\[str, bytes\] \| tuple\[str, bytes, [~.\w]*Mapping\[str, str\]\] \| [~.\w]*BatchMessage")


def _one_name(app, what, name, obj, options, signature, returned):  # type: ignore[no-untyped-def]
    return signature and _ENTRY.sub("~jetstream_ext.Entry", signature), returned


def setup(app):  # type: ignore[no-untyped-def]
    app.connect("autodoc-process-signature", _one_name)
