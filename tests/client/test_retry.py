"""Which errors are transient, and how retries pause and end."""

import asyncio

import nats.errors
import nats.js.errors
import pytest
from client_cells import each

from jetstream_ext import errors
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read


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


async def test_pauses_grow_to_the_longest_and_jitter_shortens_them(pauses: list[float]) -> None:
    retry = Retry(60, first_pause=0.1, longest_pause=0.5)
    for _ in range(4):
        await retry.pause_if_transient(errors.RequestTimeoutError())
    assert pauses == [0.1, 0.2, 0.4, 0.5]
    pauses.clear()
    jittered = Retry(60, first_pause=0.1, longest_pause=0.5, jitter=True)
    for _ in range(20):
        await jittered.pause_if_transient(errors.RequestTimeoutError())
    assert all(0 <= pause <= 0.5 for pause in pauses)
    assert len(set(pauses)) > 1


async def test_the_last_pause_ends_at_the_deadline() -> None:
    retry, loop = Retry(0.1, first_pause=60), asyncio.get_running_loop()
    begun = loop.time()
    async with asyncio.timeout(30):
        with pytest.raises(errors.RequestTimeoutError):  # no time is left for another attempt
            await retry.pause_if_transient(errors.RequestTimeoutError())
    assert loop.time() - begun >= 0.098


async def test_an_attempt_ends_with_the_time_of_all() -> None:
    attempts = 0

    async def fails_then_hangs() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise errors.BatchAbandonedError("the first failure")
        await asyncio.Event().wait()

    with pytest.raises(errors.BatchAbandonedError, match="the first failure"):
        await Retry(0.1).call(fails_then_hangs)
    with pytest.raises(errors.RequestTimeoutError, match=r"timed out after 0\.1 s"):
        await Retry(0.1).call(asyncio.Event().wait)


async def test_an_attempt_after_the_first_error_ends_with_the_deadline() -> None:
    retry = Retry(0.1)
    assert retry.within(5) == 5
    await retry.attempt(lambda: asyncio.sleep(0.3))  # nothing has failed: no limit
    await retry.pause_if_transient(errors.BatchAbandonedError("the first failure"))
    assert retry.within(5) <= 0.1
    with pytest.raises(errors.BatchAbandonedError, match="the first failure"):
        await retry.attempt(asyncio.Event().wait)
    retry.reset()
    assert retry.within(5) == 5
