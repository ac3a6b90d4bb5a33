"""The plan of a reply that counts as a whole."""

import pytest

from jetstream_ext.protocol.direct import Block, EndOfBatch, Request
from jetstream_ext.protocol.plans import OneAnswer

LOG = Request(seq=7, batch=10)
LASTS = Request(multi_last=("a.>",))


def block(*seqs: int) -> Block:
    return Block("S", list(seqs), [b""] * len(seqs), [0] * len(seqs))


@pytest.mark.parametrize("request_", [LOG, LASTS])
def test_one_request_and_all_of_its_rows(request_: Request) -> None:
    plan = OneAnswer(request_)
    ask = plan.next_request()
    assert ask is not None
    assert ask.request is request_
    assert plan.next_request() is None
    assert plan.oldest is ask
    assert plan.accept(ask, block(7, 9), 0, pending=1).seqs == [7, 9]
    assert plan.accept(ask, block(11), 0, pending=0).seqs == [11]
    assert plan.finish(ask, EndOfBatch(0, 11, 12)) == []
    assert plan.done
    assert plan.end == EndOfBatch(0, 11, 12)
    assert plan.next_request() is None


def test_the_end_of_a_cut_multi_last_is_what_its_last_message_says() -> None:
    plan = OneAnswer(LASTS)
    ask = plan.next_request()
    assert ask is not None
    plan.accept(ask, block(7), 0, pending=1)
    plan.finish(ask, EndOfBatch(0, 7, 12))  # as 2.11 ends it
    assert plan.end == EndOfBatch(1, 7, 12)


def test_the_end_of_a_cut_batch_is_what_the_end_says() -> None:
    plan = OneAnswer(LOG)
    ask = plan.next_request()
    assert ask is not None
    plan.accept(ask, block(7), 0, pending=1)
    plan.finish(ask, EndOfBatch(0, 7))  # on 2.11 a message of a batch counts itself
    assert plan.end == EndOfBatch(0, 7)


def test_nothing_found() -> None:
    plan = OneAnswer(LASTS)
    ask = plan.next_request()
    assert ask is not None
    missing = EndOfBatch(0, 0, found=False)
    plan.finish(ask, missing)
    assert plan.end == missing


def test_lost_without_a_message_is_asked_again() -> None:
    plan = OneAnswer(LOG)
    ask = plan.next_request()
    assert plan.retry() == [ask]
    again = plan.next_request()
    assert again is not None
    assert again.request is LOG


def test_lost_after_a_message_is_lost() -> None:
    plan = OneAnswer(LOG)
    ask = plan.next_request()
    assert ask is not None
    plan.accept(ask, block(7), 0, pending=1)
    assert plan.retry() is None
