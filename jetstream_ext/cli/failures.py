"""What a user is told of a failure."""

from __future__ import annotations

import re
from typing import Final

import nats.errors
import nats.js.errors

from jetstream_ext.errors import IngestError, JetStreamExtError, RequestTimeoutError
from jetstream_ext.testing.errors import NatsServerStartError

_NOT_ENABLED: Final = frozenset({10039, 10076})  # for the account; at all
_LOG_STAMP: Final = re.compile(r"^\[\d+\] \S+ \S+ \[\w+\] ")
_NATS_PY: Final = re.compile(r"^nats: (?:JetStream\.\w+ )?(?=.)")


def one_line(error: BaseException) -> str:
    """Return it in one line."""
    if isinstance(error, nats.js.errors.APIError) and not isinstance(error, IngestError):
        described = error.description or type(error).__name__
        if error.err_code in _NOT_ENABLED:
            return f"JetStream is off for this account, or on this server ({described})"
        if isinstance(error, nats.js.errors.ServiceUnavailableError):
            asked = described if "nobody answers on" in described else "nobody answers"  # nats-py's own has no text
            if error.err_code is None:
                return f"{asked}: the server runs without JetStream, or its domain is another"
        if error.description and not isinstance(error, JetStreamExtError):  # nats-py's own texts are full of names
            return f"the server says: {error.description}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, NatsServerStartError):
        first, *_, last = str(error).splitlines()  # between them is the rest of the server's log
        return f"{first.removesuffix('. The end of its log:')}: {_LOG_STAMP.sub('', last.strip())}"
    text = " ".join(_NATS_PY.sub("", str(error)).split()) or type(error).__name__
    if isinstance(error, RequestTimeoutError | nats.errors.TimeoutError) and "connection" not in text:
        text += " (the user may lack the permission; servers do not answer then)"
    return text
