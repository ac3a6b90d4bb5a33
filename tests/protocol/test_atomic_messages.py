"""The messages of an atomic batch: what is refused before it takes a sequence, bulks, and disconnections."""

from operator import length_hint
from typing import Any

import pytest
from atomic_batches import Command, add, batch, commands, commit, message, refusal, visible
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.atomic import State
from jetstream_ext.types import BatchMessage

LEVELS = walk("level", [3, 4])  # without the end-of-batch marker, and with it
# -- what is refused
BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"subject": "a b"}, errors.BadSubjectError),
    ({"subject": "a.*"}, errors.BadSubjectError),
    ({"subject": ""}, errors.BadSubjectError),
    ({"payload": "text"}, TypeError),
    ({"payload": bytes(1000)}, errors.MaxPayloadError),
    ({"payload": bytes(930)}, errors.MaxPayloadError),  # the batch's own headers count too
    ({"headers": {"K": "a\r\nb"}}, errors.BadHeaderError),
    ({"headers": {"K": None}}, TypeError),
    ({"headers": {5: "v"}}, TypeError),
    ({"headers": [("K", "v")]}, TypeError),
    ({"headers": "K"}, TypeError),
    ({"msg_id": 5}, TypeError),
    ({"stream": 5}, TypeError),
    ({"subject": "a.7", "expected_last_subject_seq": 1.0}, TypeError),
    ({"subject": "a.7", "expected_last_subject_seq": 0, "expected_last_subject": 5}, TypeError),
    *(
        ({"subject": "a.7", "expected_last_subject_seq": 0, "expected_last_subject": bad}, errors.BadSubjectError)
        for bad in ("", "a b", "a..b", "a\r\nb")
    ),
    ({"msg_ttl": 0.5}, ValueError),
    ({"headers": {"Nats-TTL": "5"}, "msg_ttl": 5}, errors.BadHeaderError),
    ({"expected_last_subject": "a"}, ValueError),
    *(
        ({"headers": {name: "1"}}, errors.BadHeaderError)
        for name in ("Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit", "Nats-Expected-Last-Msg-Id")
    ),
]


@LEVELS
@walk("bad, error", BAD)
@walk("operation", ["add first", "add", "commit"])
def test_a_refused_message_changes_nothing(
    operation: str, bad: dict[str, Any], error: type[Exception], level: int
) -> None:
    machine, other = (batch(level, max_payload=1000) for _ in range(2))
    if operation != "add first":
        add(machine, message())
        add(other, message())
    before = visible(machine)
    with pytest.raises(error):
        commit(machine, message(**bad)) if operation == "commit" else add(machine, message(**bad))
    assert visible(machine) == before
    assert commit(machine, message("a.9")) == commit(other, message("a.9"))


@LEVELS
def test_a_message_that_just_fits_is_sent_whatever_its_sequence(level: int) -> None:
    machine = batch(level, max_payload=1000)
    room = 1000 - len(
        h.encode([("Nats-Batch-Id", "b1"), ("Nats-Batch-Sequence", str(1 << 32)), ("Nats-Batch-Commit", "1")])
    )
    for _ in range(3):
        add(machine, message(payload=bytes(room)))
    assert commit(machine)
    with pytest.raises(errors.MaxPayloadError):
        add(batch(level, max_payload=1000), message(payload=bytes(room + 1)))


class TestExpectations:
    @LEVELS
    def test_expected_last_seq_is_allowed_on_the_first_message_only(self, level: int) -> None:
        machine = batch(level)
        add(machine, message(expected_last_seq=0))
        for bad in ({"expected_last_seq": 1}, {"headers": {"Nats-Expected-Last-Sequence": "1"}}):
            with pytest.raises(ValueError, match="first message"):
                add(machine, message("a.2", **bad))
            with pytest.raises(ValueError, match="first message"):
                commit(machine, message("a.2", **bad))
        assert machine.size == 1

    @LEVELS
    def test_expected_last_subject_seq_is_refused_after_a_write_to_the_subject(self, level: int) -> None:
        machine = batch(level)
        add(machine, message("a.1", expected_last_subject_seq=0))
        add(machine, message("a.2", expected_last_subject_seq=7))
        for bad in (
            message("a.1", expected_last_subject_seq=1),
            message("a.3", expected_last_subject_seq=1, expected_last_subject="a.2"),
            message("a.1", headers={"Nats-Expected-Last-Subject-Sequence": "1"}),
            message("a.3", expected_last_subject_seq=1, headers={"Nats-Expected-Last-Subject-Sequence-Subject": "a.1"}),
        ):
            with pytest.raises(ValueError, match="earlier message"):
                add(machine, bad)
        add(machine, message("a.1", expected_last_subject_seq=0, expected_last_subject="a.9"))
        add(machine, message("a.1"))
        assert machine.size == 4

    @LEVELS
    def test_names_in_another_case_expect_nothing(self, level: int) -> None:
        """Servers compare names case-sensitively: these are headers like any other."""
        machine = batch(level)
        add(machine, message("a.1"))
        for name in (h.EXPECTED_LAST_SEQ, h.EXPECTED_LAST_SUBJECT_SEQ, h.EXPECTED_LAST_MSG_ID, h.BATCH_ID):
            add(machine, message("a.1", headers={name.lower(): "1", name.upper(): "2"}))
        add(machine, message("a.3", expected_last_subject_seq=1, headers={h.EXPECTED_LAST_SUBJECT.lower(): "a.1"}))
        assert machine.size == 6

    @LEVELS
    @walk("version", ["2.12.0", "2.12.0-RC.6", "2.12.1", "2.15.1", "older", ""])
    def test_expectations_on_subjects_are_refused_for_2_12_0(self, level: int, version: str) -> None:
        refused = version.startswith("2.12.0")
        for expecting in (
            message("a.2", expected_last_subject_seq=0),
            message("a.2", headers={"Nats-Expected-Last-Subject-Sequence": "0"}),
            message("a.2", expected_last_subject_seq=0, expected_last_subject="a.3"),
        ):
            machine = batch(level, version=version)
            add(machine, message("a.1", expected_last_seq=0))
            if refused:
                with pytest.raises(errors.UnsupportedFeatureError, match=r"needs nats-server 2\.12\.1") as caught:
                    add(machine, expecting)
                assert caught.value.server_version == version
                assert (machine.size, machine.state.value) == (1, "open")
            else:
                add(machine, expecting)
                assert machine.size == 2


# -- bulks


def reply_of(command: Command | None) -> str:
    assert command is not None
    return command[1]


messages = st.builds(
    BatchMessage,
    st.sampled_from(["a.1", "a.2", "a.3"]),
    st.binary(max_size=40),
    headers=st.sampled_from([None, None, {"K": "v"}, {}, {"Nats-Expected-Last-Subject-Sequence": "4"}]),
    msg_id=st.sampled_from([None, None, "m"]),
    stream=st.sampled_from([None, None, "S"]),
    expected_last_seq=st.sampled_from([None, None, None, 7]),
    expected_last_subject_seq=st.sampled_from([None, None, None, 7]),
)
bad = st.sampled_from(
    [
        message("a b"),
        message(payload=bytes(2000)),
        message(headers={"K": "\n"}),
        message(msg_id=""),
        message(payload="x"),
    ]  # type: ignore[arg-type]
)


@LEVELS
@given(st.lists(messages | bad, max_size=25), st.integers(1, 200), st.data())
def test_add_many_and_add_send_the_same_bytes(
    level: int, given: list[BatchMessage], limit: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"in_one_go": data.draw(st.booleans()), "max_payload": 1000}
    one, many = batch(level, **options), batch(level, **options)
    single, refused = b"", []
    for each in given:
        try:
            single += one.add(one.prepare(each)).data
        except (ValueError, TypeError) as error:
            refused.append(type(error))
            continue
    holds_back = level < 4 or options["in_one_go"]
    source, bulk, stopped = iter(given), b"", []
    while True:
        block = many.add_many(source, limit)
        asked = [int(reply.rpartition(".")[2]) for _, reply, _, _ in commands(block) if reply]
        assert block.last_asked == max(asked, default=0)
        assert block.awaited == 0
        bulk += block.data
        if isinstance(block.stopped, StopIteration):
            break
        if block.stopped is not None:
            stopped.append(type(block.stopped))
        else:
            newest = many.prepare(given[len(given) - length_hint(source) - 1])  # the last one that was taken
            held_back = len(newest[2]) + len(newest[3]) if holds_back else 0
            assert len(block.data) + held_back >= limit
    assert (bulk, stopped) == (single, refused)
    assert (one.size, one.sent, one.last_subject) == (many.size, many.sent, many.last_subject)
    if one.size:
        assert commit(one) == commit(many)


@LEVELS
def test_add_many_waits_for_a_server_that_is_far_behind(level: int) -> None:
    machine = batch(level)
    source, asked = iter([message()] * 3500), []
    while True:
        block = machine.add_many(source, 1 << 30)
        if not block.awaited:
            break
        asked.append(block.awaited)
        assert machine.sent == block.awaited == block.last_asked
        machine.receive(block.awaited, b"", b"")
    assert asked == [1000, 2000, 3000]
    assert machine.size == 3500


class TestDisconnection:
    """The server keeps the batch by its id. The next reply tells whether the server has all of it."""

    def test_the_next_message_must_be_acknowledged(self) -> None:
        machine = batch()
        assert [reply_of(add(machine, message())) for _ in range(3)] == ["_INBOX.r.1", "", ""]
        machine.disconnected(reply_awaited=False)
        assert machine.state is State.OPEN
        assert reply_of(add(machine, message())) == "_INBOX.r.4"
        machine.receive(4, b"", b"")
        assert reply_of(add(machine, message())) == ""

    def test_add_many_waits_for_the_reply_to_its_next_message(self) -> None:
        machine = batch()
        add(machine, message())
        machine.disconnected(reply_awaited=False)
        source = iter([message()] * 5)
        block = machine.add_many(source, 1 << 20)
        assert (block.messages, block.awaited, block.last_asked, block.stopped) == (1, 2, 2, None)
        machine.receive(2, b"", b"")
        block = machine.add_many(source, 1 << 20)
        assert (block.messages, block.awaited) == (4, 0)

    @LEVELS
    @walk("at_commit", [True, False])
    def test_a_batch_that_the_server_lost_is_abandoned(self, level: int, at_commit: bool) -> None:
        machine = batch(level)
        add(machine, message())
        add(machine, message())
        machine.disconnected(reply_awaited=False)
        if at_commit:
            commit(machine)
        else:
            add(machine, message())
        machine.receive(machine.sent, *refusal(10176))
        assert machine.state is State.FAILED
        with pytest.raises(errors.BatchAbandonedError, match="connection was lost") as caught:
            add(machine, message())
        assert caught.value.outcome == "not_stored"
        assert isinstance(caught.value.__cause__, errors.AtomicPublishIncompleteError)


def test_a_batch_that_was_not_found_has_failed() -> None:
    machine = batch()
    add(machine, message())
    commit(machine)
    machine.lost("silence")
    machine.resolved(None)
    with pytest.raises(errors.BatchAbandonedError) as caught:
        add(machine, message())
    assert caught.value.outcome == "not_stored"
    assert isinstance(caught.value.__cause__, errors.BatchOutcomeUnknownError)
