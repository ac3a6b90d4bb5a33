"""Requests to a stream's leader: an unanswered request is repeated, and every request ends."""

import asyncio
from typing import Any

import pytest

from jetstream_ext.client import api


class Requests:
    """Answers only the request with number `at`; the others wait until they are cancelled."""

    def __init__(self, answer: object, at: int) -> None:
        self.answer = answer
        self.at = at
        self.asked = self.cancelled = 0

    async def __call__(self) -> Any:
        self.asked += 1
        if self.asked == self.at:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_REPEAT_AFTER", 0.01)


async def nothing_left(requests: Requests, unanswered: int) -> None:
    async with asyncio.timeout(10):
        while requests.cancelled < unanswered:
            await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_the_answer_to_any_repetition_is_returned() -> None:
    requests = Requests("yes", at=3)
    assert await api._first_answer(requests) == "yes"
    await nothing_left(requests, 2)


async def test_a_refusal_of_any_repetition_is_raised() -> None:
    requests = Requests(ZeroDivisionError(), at=2)
    with pytest.raises(ZeroDivisionError):
        await api._first_answer(requests)
    await nothing_left(requests, 1)


async def test_a_cancelled_wait_leaves_no_request() -> None:
    requests = Requests(None, at=0)
    waiting = asyncio.create_task(api._first_answer(requests))
    async with asyncio.timeout(10):
        while requests.asked < 3:
            await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await nothing_left(requests, requests.asked)


async def test_a_second_failure_at_the_same_time_is_not_logged() -> None:
    gate, asked = asyncio.Event(), []

    async def request() -> None:
        asked.append(1)
        await gate.wait()
        raise ZeroDivisionError

    waiting = asyncio.create_task(api._first_answer(request))
    async with asyncio.timeout(10):
        while len(asked) < 2:
            await asyncio.sleep(0.001)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        await waiting
