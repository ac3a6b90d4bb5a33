"""Which errors are transient."""

import nats.errors
import nats.js.errors
from client_cells import each

from jetstream_ext import errors
from jetstream_ext.client.retry import is_transient, is_transient_read


@each(
    "error",
    [
        errors.RequestTimeoutError(),
        errors.MessagesLostError(),
        errors.BatchOutcomeUnknownError(),
        errors.BatchAbandonedError(),
        errors.NoStreamError(),
        errors.server_error(code=503, err_code=10210),
        errors.server_error(code=503, err_code=10008),
        nats.js.errors.APIError(code=500, err_code=10009),
        nats.js.errors.APIError(code=429, err_code=10167),
        nats.js.errors.APIError(code=409, err_code=10158),  # a copy of the message is being stored
        nats.js.errors.ServiceUnavailableError(code=503),
        nats.js.errors.ServiceUnavailableError(),
        errors.server_error(code=503),
        nats.errors.NoRespondersError(),
        nats.errors.ConnectionReconnectingError(),
    ],
)
def test_transient_errors(error: Exception) -> None:
    assert is_transient(error)


@each(
    "error",
    [
        errors.PositionLostError(),
        errors.DirectGetDisabledError(),
        errors.StreamRecreatedError(),
        errors.FencedError(),
        errors.WrongLastSequenceError(),
        errors.MessageTooLargeError(),
        errors.server_error(code=503, err_code=10077),  # the stream is full
        nats.js.errors.ServiceUnavailableError(code=503, err_code=10077),
        nats.js.errors.NotFoundError(code=404),
        nats.errors.ConnectionClosedError(),
        ValueError(),
    ],
)
def test_permanent_errors(error: Exception) -> None:
    assert not is_transient(error)


def test_a_read_that_the_stream_allows_may_find_a_responder_later() -> None:
    assert is_transient_read(errors.DirectGetDisabledError())
    assert is_transient_read(errors.RequestTimeoutError())
    assert not is_transient_read(errors.ResponseError())
