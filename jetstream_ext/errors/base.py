"""The root of the errors, and those that any call may raise."""

from __future__ import annotations

from typing import Any

import nats.errors
import nats.js.errors
from typing_extensions import override


class JetStreamExtError(nats.errors.Error):
    """Root of every error this library raises on its own account."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        # nats-py's constructors do not pass the text on; without it a repr, and so a log line, would be empty.
        self.args: tuple[Any, ...] = (message,) if message else ()
        self.message = message

    @override
    def __str__(self) -> str:
        return self.message or type(self).__name__

    # By identity, as every exception; nats-py's API errors compare fields, and have no hash.
    @override
    def __eq__(self, other: object) -> bool:
        return object.__eq__(self, other)

    @override
    def __hash__(self) -> int:
        return BaseException.__hash__(self)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's own pickling forgets the cause.
        state = dict(self.__dict__)
        if self.__cause__ is not None:
            state["__cause__"] = self.__cause__
        return type(self), self.args, state


class UnsupportedFeatureError(JetStreamExtError):
    """The connected server does not know the feature.

    Attributes:
        feature: What was asked for, in the words of the documentation.
        required_api_level: The JetStream API level that has it (`None`: it predates levels).
        server_version: The version of the connected server, where known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        feature: str = "",
        required_api_level: int | None = None,
        server_version: str | None = None,
    ) -> None:
        super().__init__(message)
        self.feature = feature
        self.required_api_level = required_api_level
        self.server_version = server_version


class RequestTimeoutError(JetStreamExtError, nats.errors.TimeoutError):
    """No answer came in time."""


class StreamConfigMismatchError(JetStreamExtError):
    """A stream exists with another configuration. ``diff`` maps each field to (wanted, found)."""

    def __init__(self, message: str = "", *, diff: dict[str, tuple[Any, Any]] | None = None) -> None:
        super().__init__(message)
        self.diff: dict[str, tuple[Any, Any]] = dict(diff or {})


def fill_api_error(
    error: nats.js.errors.APIError,
    *,
    code: int | None,
    err_code: int | None,
    description: str,
    stream: str | None,
) -> None:
    """Set the fields that a handler of nats-py's API errors reads; its constructor would replace the exception's args."""
    error.code = code
    error.err_code = err_code
    error.description = description
    error.stream = stream
    error.seq = None
