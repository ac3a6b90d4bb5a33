"""The errors of the connector."""

from __future__ import annotations

from jetstream_ext.errors import JetStreamExtError


class OptionError(ValueError):
    """An option is missing, unknown, malformed or in conflict with another; the text names it and the fix."""


class SchemaError(ValueError):
    """The schema given with ``.schema(...)`` has columns that the format does not have."""


class OffsetError(ValueError):
    """The checkpoint holds no offset of this source, or one of a later version."""


class ConnectError(JetStreamExtError):
    """None of the servers accepted a connection; the text has the last server's reason."""


class RefusedError(JetStreamExtError):
    """A request got no reply because the credentials have no permission for it."""


class PlanningError(JetStreamExtError):
    """The query cannot work; the text says what to change."""


class DataLossError(JetStreamExtError):
    """Messages that should be read are gone (with ``failOnDataLoss``)."""


class RowError(JetStreamExtError):
    """A row cannot become a message; the text names its partition, its index and the reason."""


class SinkError(JetStreamExtError):
    """Rows could not be stored. Spark tries the task again."""


class ReplayError(JetStreamExtError):
    """A micro-batch was replayed with other rows, or in another number of partitions; no row was stored twice."""
