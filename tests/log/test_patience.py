"""What passes by itself, and what does not."""

import asyncio

import nats.errors
import nats.js.errors
import pytest

from jetstream_ext import errors
from jetstream_ext.client.retry import Patience, passes


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestTimeoutError(),
        errors.MessagesLostError(),
        errors.DirectGetDisabledError(),
        errors.BatchOutcomeUnknownError(),
        errors.BatchAbandonedError(),
        errors.NoStreamError(),
        errors.AtomicPublishTooManyInflightError(),
        errors.server_error(code=503, err_code=10008),
        nats.js.errors.APIError(code=500, err_code=10009),
        nats.js.errors.ServiceUnavailableError(code=503),
        nats.errors.NoRespondersError(),
        nats.errors.ConnectionReconnectingError(),
    ],
    ids=repr,
)
def test_what_passes(error: Exception) -> None:
    assert passes(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.PositionLostError(),
        errors.StreamRecreatedError(),
        errors.FencedError(),
        errors.WrongLastSequenceError(),
        errors.MessageTooLargeError(),
        errors.server_error(code=503, err_code=10077),  # the stream is full
        nats.js.errors.NotFoundError(code=404),
        nats.errors.ConnectionClosedError(),
        ValueError(),
    ],
    ids=repr,
)
def test_what_does_not(error: Exception) -> None:
    assert not passes(error)


async def test_it_ends() -> None:
    patience = Patience(0.3)
    begun = asyncio.get_running_loop().time()

    async def wait_and_wait() -> None:
        while True:
            await patience.after(errors.RequestTimeoutError())

    with pytest.raises(errors.RequestTimeoutError):
        await wait_and_wait()
    assert asyncio.get_running_loop().time() - begun >= 0.3
    with pytest.raises(ZeroDivisionError):
        await Patience(60).after(ZeroDivisionError())


async def test_it_begins_again_when_something_gets_through() -> None:
    patience = Patience(1e-9)
    for _ in range(3):
        await patience.after(errors.RequestTimeoutError())
        patience.reset()
