"""What can go wrong while stored messages are read."""

from __future__ import annotations

import nats.js.errors

from jetstream_ext.errors.base import JetStreamExtError, fill_api_error


class DirectGetDisabledError(JetStreamExtError):
    """Nobody answers direct gets for the stream: it lacks ``allow_direct``, or it does not exist."""

    def __init__(self, message: str = "", *, stream: str = "") -> None:
        super().__init__(message)
        self.stream = stream


class MessageNotFoundError(JetStreamExtError, nats.js.errors.NotFoundError):
    """A single get found no message. A replica may lag: ask with ``min_seq`` when that matters."""

    def __init__(self, message: str = "", *, stream: str = "", code: int = 404) -> None:
        JetStreamExtError.__init__(self, message)
        fill_api_error(self, code=code, err_code=None, description=message, stream=stream)


class BadRequestError(JetStreamExtError, nats.js.errors.BadRequestError):
    """The server refused a direct-get request (status 408) and said why in ``description``."""

    def __init__(self, message: str = "", *, description: str = "", stream: str = "", code: int = 408) -> None:
        JetStreamExtError.__init__(self, message or description)
        fill_api_error(self, code=code, err_code=None, description=description or message, stream=stream)


class TooManySubjectsError(JetStreamExtError):
    """A ``multi_last`` matched more subjects than the server answers at once (status 413; 1024 by default)."""


class ResponseError(JetStreamExtError):
    """A reply broke the protocol. ``frame`` holds (a bounded part of) its bytes."""

    def __init__(self, message: str = "", *, frame: bytes = b"") -> None:
        super().__init__(message)
        self.frame: bytes = frame[:1024]


class MessagesLostError(JetStreamExtError):
    """A direct-get reply had a hole: messages were dropped between the server and here.

    Attributes:
        expected: The stream sequence the reply should have continued from.
        got: The stream sequence it named instead.
    """

    def __init__(self, message: str = "", *, expected: int | None = None, got: int | None = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got


class PositionLostError(MessagesLostError):
    """What a log reader should read next is no longer stored: purged, expired, or lost with the stream's end.

    ``expected`` is the reader's position. ``got`` is where the stream begins now (or one more than its last sequence,
    where that is before the position): `LogReader.seek` there to go on without what is gone.

    Attributes:
        stream: The stream.
    """

    def __init__(
        self, message: str = "", *, stream: str = "", expected: int | None = None, got: int | None = None
    ) -> None:
        super().__init__(message, expected=expected, got=got)
        self.stream = stream


class StreamRecreatedError(JetStreamExtError):
    """A stream is not the one that a position belongs to: it was deleted and made again, and sequences began anew.

    Attributes:
        stream: The stream.
        expected: When the position's stream was created, in the server's words.
        found: When the stream of that name was created that there is now.
    """

    def __init__(self, message: str = "", *, stream: str = "", expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.stream = stream
        self.expected = expected
        self.found = found


class FencedError(JetStreamExtError):
    """Another reader, worker or Spark query of the same name has gone on; this one must stop, and can store nothing more.

    Attributes:
        name: The name that both have.
        seq: The position that the other one has stored, where there is one.
    """

    def __init__(self, message: str = "", *, name: str = "", seq: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.seq = seq


class HistoryUnavailableError(JetStreamExtError):
    """The past that was asked for is no longer held. ``keys`` names what cannot be known."""

    def __init__(self, message: str = "", *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys: tuple[str, ...] = tuple(keys)
