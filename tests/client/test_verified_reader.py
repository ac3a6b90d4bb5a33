"""Which answers a verified read accepts: it refuses late, partial and incomplete ones."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from client_cells import each

from jetstream_ext.client import api
from jetstream_ext.client import verified_read as module
from jetstream_ext.client.verified_read import Answer, AskLeaderError, VerifiedReader
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.range_read import MAX_MIRROR_ANSWERS
from jetstream_ext.protocol.reads import Link

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Log:
    """A leader's messages: sequence to key."""

    def __init__(self, **keys: str) -> None:
        self.messages = {int(seq[1:]): f"$KV.B.{key}" for seq, key in keys.items()}
        self.last = max(self.messages, default=0)
        self.asked: list[Mapping[str, Any]] = []

    def find(self, request: Mapping[str, Any]) -> StoredMsg | None:
        self.asked.append(request)
        seqs = sorted(self.messages)
        if "last_by_subj" in request:
            subject = request["last_by_subj"]
            found = [seq for seq in seqs if subject in ("$KV.B.>", self.messages[seq])][-1:]
        elif "next_by_subj" in request:
            subject = request["next_by_subj"]
            found = [seq for seq in seqs if seq >= request["seq"] and subject in (">", self.messages[seq])][:1]
        else:
            found = [seq for seq in seqs if seq == request["seq"]]
        return StoredMsg(stream="KV_B", subject=self.messages[found[0]], seq=found[0]) if found else None


def answer(*seqs: int, stream: str = "KV_B", up_to: int = 0, pending: int = 0, key: str = "a") -> Answer:
    block = Block(stream if seqs else "")
    for seq in seqs:
        time = (NOW + timedelta(seconds=seq)).isoformat().replace("+00:00", "Z")
        head = f"NATS/1.0\r\nNats-Stream: {stream}\r\nNats-Subject: $KV.B.{key}\r\nNats-Sequence: {seq}\r\n"
        head += f"Nats-Time-Stamp: {time}\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n"
        block.extend(Block(stream, [seq], [head.encode()], [len(head)]))
    return Answer(block, pending=pending, up_to_seq=up_to)


class Scripted(VerifiedReader):
    """Gets the next answer of a list to any request, and the last one from then on. None is an incomplete reply."""

    def __init__(self, log: Log, need: int, *answers: Answer | None, timeout: float = 2.0) -> None:
        super().__init__(log, "KV_B", timeout, need=need)  # type: ignore[arg-type]  # the patched functions below take the log
        self.answers = list(answers)
        self.requests: list[Any] = []

    async def _ask(self, request: Any) -> Answer:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise module._UnverifiedError("a reply was incomplete")
        return answer


class Counts:
    """Answers how many messages each subject has."""

    def __init__(self, log: Log, _: float) -> None:
        self.log = log

    async def stream(self, _: str, request: Mapping[str, str]) -> dict[str, Any]:
        subject = request["subjects_filter"]
        return {"state": {"subjects": {subject: list(self.log.messages.values()).count(subject)}}}


@pytest.fixture(autouse=True)
def leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the log answer what the leader is asked."""

    async def get_at_leader(log: Log, _: str, request: Mapping[str, Any], __: float) -> StoredMsg | None:
        return log.find(request)

    async def stream_state(log: Log, stream: str, _: float) -> StreamState:
        return StreamState(stream, "", {}, last_seq=log.last, messages=len(log.messages))

    monkeypatch.setattr(module, "link_of", lambda _: Link(1e12))
    monkeypatch.setattr(module, "Api", Counts)
    for place in (module, api):
        monkeypatch.setattr(place, "get_at_leader", get_at_leader)
        monkeypatch.setattr(place, "stream_state", stream_state)


class TestLastOf:
    @each("bad", [answer(5, up_to=8), answer(), None, answer(5, 9, up_to=9, stream="STRANGER")])
    async def test_a_refused_answer_is_requested_again(self, bad: Answer | None) -> None:
        good = answer(5, 9, up_to=9)
        source = Scripted(Log(s5="a", s9="b"), 9, bad, bad, good)
        assert await source.last_of(["$KV.B.a"]) is good
        assert len(source.requests) == 3

    @each("bad, why", [(answer(5, up_to=8), "no replica with sequence 9"), (None, "was incomplete")])
    async def test_refused_answers_end_in_a_timeout(self, bad: Answer | None, why: str) -> None:
        source = Scripted(Log(s9="b"), 9, bad, timeout=0.3)
        with pytest.raises(RequestTimeoutError, match=why):
            await source.last_of(["$KV.B.a"])

    async def test_a_removed_witness_is_replaced(self) -> None:
        log = Log(s5="a", s9="b")
        source = Scripted(log, 9, answer(5, 9, up_to=9), answer(), answer(5, up_to=9))
        await source.last_of(["$KV.B.a"])
        del log.messages[5]
        await source.last_of(["$KV.B.a"])
        assert [request.multi_last[-1] for request in source.requests] == ["$KV.B.a", "$KV.B.a", "$KV.B.b"]

    async def test_up_to_a_message_the_responder_must_have_it(self) -> None:
        source = Scripted(Log(s5="a", s9="b"), 9, answer(3), answer(), answer(3, 5))
        up_to = answer(5).block.message(0)
        assert (await source.last_of(["$KV.B.x"], up_to=up_to)).block.seqs[-1] == 5
        assert {request.up_to_seq for request in source.requests} == {5}


def seqs_of(found: Block | list[StoredMsg]) -> list[int]:
    return [message.seq for message in found] if isinstance(found, list) else found.seqs


class TestOnlyMirrorsAnswer:
    ANSWER = answer(5, up_to=9, stream="M")

    async def test_last_of_leaves_it_to_the_caller_to_ask_the_leader(self) -> None:
        source = Scripted(Log(s5="a", s7="b", s9="a"), 9, self.ANSWER)
        for _ in range(2):
            with pytest.raises(AskLeaderError):
                await source.last_of(["$KV.B.a"])
        assert len(source.requests) == MAX_MIRROR_ANSWERS + 2
        found = await source.last_at_leader(["$KV.B.a", "$KV.B.b", "$KV.B.c"])
        assert [message.seq for message in found] == [9, 7]
        found = await source.last_at_leader(["$KV.B.a", "$KV.B.b", "$KV.B.c"], up_to=6)
        assert [message.seq for message in found] == [5]

    async def test_the_oldest_message_is_the_leaders(self) -> None:
        found = await Scripted(Log(s8="a", s9="a"), 9, self.ANSWER).oldest_of("$KV.B.a", after=7)
        assert found is not None
        assert (found[0].seq, found[1]) == (8, 2)

    async def test_catching_up_ends_where_the_leader_has_nothing_more(self) -> None:
        keys = {f"s{seq}": "k" for seq in (*range(10, 200), 300, 301)}
        taken: list[int] = []
        newest = await Scripted(Log(**keys), 9, self.ANSWER).catch_up(9, lambda found: taken.extend(seqs_of(found)))
        assert newest is not None
        assert (newest.seq, taken) == (301, [*range(10, 200), 300, 301])


class TestNewestUpTo:
    @each(
        "held, revision, newest",
        [
            ([1, 2, 3], 3, 3),
            ([1, 2, 3], 2, 2),
            ([1, 2, 9], 8, 2),
            ([9], 8, None),
            ([], 8, None),
            ([1], 1_000_000, 1),
            ([4], 4, 4),
            (list(range(1, 100, 7)), 60, 57),
        ],
    )
    async def test_the_newest_message_is_found_in_few_requests(
        self, held: list[int], revision: int, newest: int | None
    ) -> None:
        log = Log(**{f"s{seq}": "k" for seq in held})
        found = await Scripted(log, 0, None).newest_up_to(revision, 1)
        assert (found.seq if found else None) == newest
        assert len(log.asked) < 25


class TestOldestOf:
    @each("bad", [answer(5), answer(), None, answer(9, stream="STRANGER")])
    async def test_a_refused_answer_is_requested_again_until_the_timeout(self, bad: Answer | None) -> None:
        source = Scripted(Log(s9="a"), 9, bad, answer(9))
        assert (await source.oldest_of("$KV.B.a", after=7)) == (answer(9).block.message(0), 1)
        if bad is None or bad.block.stream == "KV_B":
            with pytest.raises(RequestTimeoutError):
                await Scripted(Log(s9="a"), 9, bad, timeout=0.3).oldest_of("$KV.B.a", after=7)


class TestCatchUp:
    @pytest.fixture(autouse=True)
    def from_replicas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_FEW", 0)

    async def test_it_does_not_wait_for_removed_messages(self) -> None:
        log = Log(s9="a")
        log.last = 12
        assert await Scripted(log, 9, answer()).catch_up(9, lambda _: None) is None

    async def test_it_reads_page_after_page_to_the_end(self) -> None:
        taken: list[int] = []
        source = Scripted(
            Log(s12="a"), 9, answer(10, pending=2), None, answer(11, 12, stream="STRANGER"), answer(11, 12)
        )
        newest = await source.catch_up(9, lambda found: taken.extend(seqs_of(found)))
        assert newest is not None
        assert (newest.seq, taken) == (12, [10, 11, 12])
        assert [request.seq for request in source.requests] == [10, 11, 11, 11]

    async def test_a_writer_that_stays_ahead_ends_it(self) -> None:
        log = Log(s20="a")

        class Behind(Scripted):
            async def _ask(self, request: Any) -> Answer:
                log.last += 2  # two are stored while one is read
                await asyncio.sleep(0.01)
                return answer(request.seq, pending=9)

        with pytest.raises(RequestTimeoutError, match="stored faster than this read returns them"):
            await Behind(log, 9, None).catch_up(9, lambda _: None)

    async def test_a_writer_that_is_slower_does_not(self) -> None:
        log = Log(s60="a")
        taken: list[int] = []

        class Nearer(Scripted):
            async def _ask(self, request: Any) -> Answer:
                log.last += 1
                await asyncio.sleep(0.05)  # some timeouts in all
                seqs = range(request.seq, min(request.seq + 3, log.last + 1))
                return answer(*seqs, pending=log.last - seqs[-1])

        newest = await Nearer(log, 9, None).catch_up(9, lambda found: taken.extend(seqs_of(found)))
        assert newest is not None
        assert taken == list(range(10, newest.seq + 1))
