"""Asking a stream's leader: what is not answered is asked again, and every question ends."""

import asyncio
from typing import Any

import pytest

from jetstream_ext.client import api


class Questions:
    """Answers only the question of the given number; the others wait for ever."""

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


async def nothing_left(questions: Questions, unanswered: int) -> None:
    async with asyncio.timeout(10):
        while questions.cancelled < unanswered:
            await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_an_answer_to_any_question_counts() -> None:
    questions = Questions("yes", at=3)
    assert await api._first_answer(questions) == "yes"
    await nothing_left(questions, 2)


async def test_so_does_a_refusal() -> None:
    questions = Questions(ZeroDivisionError(), at=2)
    with pytest.raises(ZeroDivisionError):
        await api._first_answer(questions)
    await nothing_left(questions, 1)


async def test_a_cancelled_wait_leaves_no_question() -> None:
    questions = Questions(None, at=0)
    waiting = asyncio.create_task(api._first_answer(questions))
    async with asyncio.timeout(10):
        while questions.asked < 3:
            await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await nothing_left(questions, questions.asked)


async def test_two_answers_at_once() -> None:
    """The one that nobody takes is seen all the same: the loop would complain."""
    gate, asked = asyncio.Event(), []

    async def question() -> None:
        asked.append(1)
        await gate.wait()
        raise ZeroDivisionError

    waiting = asyncio.create_task(api._first_answer(question))
    async with asyncio.timeout(10):
        while len(asked) < 2:
            await asyncio.sleep(0.001)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        await waiting
