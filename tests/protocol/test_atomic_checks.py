"""The atomic batch refuses a message before it takes a sequence if the server would refuse it only at commit."""

from typing import Any

import pytest
from atomic_batches import add, batch, commit, message, refusal, visible

from jetstream_ext import errors
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.atomic import AtomicBatchMachine

LEVELS = pytest.mark.parametrize("level", [2, 3, 4, 5])

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
@pytest.mark.parametrize(("bad", "error"), BAD)
@pytest.mark.parametrize("operation", ["add first", "add", "commit"])
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


@LEVELS
class TestExpectations:
    def test_expected_last_seq_is_allowed_on_the_first_message_only(self, level: int) -> None:
        machine = batch(level)
        add(machine, message(expected_last_seq=0))
        for bad in ({"expected_last_seq": 1}, {"headers": {"Nats-Expected-Last-Sequence": "1"}}):
            with pytest.raises(ValueError, match="first message"):
                add(machine, message("a.2", **bad))
            with pytest.raises(ValueError, match="first message"):
                commit(machine, message("a.2", **bad))
        assert machine.size == 1

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

    def test_names_in_another_case_expect_nothing(self, level: int) -> None:
        """Servers compare names case-sensitively: these are headers like any other."""
        machine = batch(level)
        add(machine, message("a.1"))
        for name in (h.EXPECTED_LAST_SEQ, h.EXPECTED_LAST_SUBJECT_SEQ, h.EXPECTED_LAST_MSG_ID, h.BATCH_ID):
            add(machine, message("a.1", headers={name.lower(): "1", name.upper(): "2"}))
        add(machine, message("a.3", expected_last_subject_seq=1, headers={h.EXPECTED_LAST_SUBJECT.lower(): "a.1"}))
        assert machine.size == 6

    @pytest.mark.parametrize("version", ["2.12.0", "2.12.0-RC.6", "2.12.1", "2.12.8", "2.14.6", "2.15.1", "older", ""])
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

    def test_a_refused_message_does_not_count_as_a_write(self, level: int) -> None:
        machine = batch(level)
        add(machine, message("a.1"))
        with pytest.raises(TypeError):
            add(machine, message("a.2", payload="text"))  # type: ignore[arg-type]
        add(machine, message("a.2", expected_last_subject_seq=0))


def test_a_message_that_the_server_refused_does_not_count_as_a_write() -> None:
    machine = batch()
    add(machine, message("a.1"))
    add(machine, message("a.2"))
    machine.receive(2, *refusal(10054))
    add(machine, message("a.2", expected_last_subject_seq=0))
    with pytest.raises(ValueError, match="earlier message"):
        add(machine, message("a.1", expected_last_subject_seq=0))
    machine.receive(2, *refusal(10054))
    add(machine, message("a.1"))
    machine.receive(2, *refusal(10054))
    with pytest.raises(ValueError, match="earlier message"):
        add(machine, message("a.1", expected_last_subject_seq=0))


@LEVELS
def test_headers_of_the_caller_are_not_changed(level: int) -> None:
    headers = {"K": "v"}
    machine = batch(level)
    add(machine, message(headers=headers, msg_id="m"))
    commit(machine)
    assert headers == {"K": "v"}


@pytest.mark.parametrize("batch_id", ["", "a.b", "a b", "x" * 65, "a\x01"])
def test_the_id_is_checked(batch_id: str) -> None:
    with pytest.raises(ValueError, match="batch id"):
        AtomicBatchMachine(batch_id)


@pytest.mark.parametrize("batch_id", [5, b"a", ["a"], ("a", "b")])
def test_the_type_of_the_id_is_checked(batch_id: Any) -> None:
    with pytest.raises(TypeError, match="batch id"):
        AtomicBatchMachine(batch_id)
