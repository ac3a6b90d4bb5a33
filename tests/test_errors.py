"""The error tree of the contract: the bases and fields of every class, and pickling."""

import copy
import importlib
import inspect
import pickle
from typing import Any, get_type_hints

import nats.errors
import nats.js.errors
import pytest

from jetstream_ext import errors
from jetstream_ext.errors import BatchError, BatchServerError, JetStreamExtError, ServerError
from jetstream_ext.types import BatchAck

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, JetStreamExtError)]

# Every name of the contract, with the classes that an ``except`` may name to catch it.
TREE: dict[str, tuple[type[BaseException], ...]] = {
    "JetStreamExtError": (nats.errors.Error,),
    "UnsupportedFeatureError": (JetStreamExtError,),
    "DirectGetDisabledError": (JetStreamExtError,),
    "MessageNotFoundError": (JetStreamExtError, nats.js.errors.NotFoundError, nats.js.errors.APIError),
    "BadRequestError": (JetStreamExtError, nats.js.errors.BadRequestError),
    "TooManySubjectsError": (JetStreamExtError,),
    "ResponseError": (JetStreamExtError,),
    "MessagesLostError": (JetStreamExtError,),
    "RequestTimeoutError": (JetStreamExtError, nats.errors.TimeoutError, TimeoutError),
    "PositionLostError": (errors.MessagesLostError,),
    "StreamRecreatedError": (JetStreamExtError,),
    "FencedError": (JetStreamExtError,),
    "GroupActiveError": (JetStreamExtError,),
    "StreamConfigMismatchError": (JetStreamExtError,),
    "HistoryUnavailableError": (JetStreamExtError,),
    "ConversionError": (JetStreamExtError, ValueError),
    "BadSubjectError": (JetStreamExtError, nats.errors.BadSubjectError, ValueError),
    "BadHeaderError": (JetStreamExtError, nats.errors.BadHeaderError, ValueError),
    "MaxPayloadError": (JetStreamExtError, nats.errors.MaxPayloadError, ValueError),
    "IngestError": (JetStreamExtError,),
    "BatchError": (JetStreamExtError,),
    "BatchClosedError": (BatchError,),
    "EmptyBatchError": (BatchError,),
    "BatchAbandonedError": (BatchError,),
    "BatchGapError": (BatchError,),
    "BatchOutcomeUnknownError": (BatchError,),
    "NoStreamError": (BatchError, nats.js.errors.NoStreamResponseError),
    "ServerError": (JetStreamExtError, nats.js.errors.APIError),
    "BatchServerError": (ServerError, BatchError),
    "ConsumerInvalidResetError": (ServerError, nats.js.errors.ConsumerInvalidResetError),
    "KeyConflictError": (errors.WrongLastSequenceError, BatchError, nats.js.errors.KeyWrongLastSequenceError),
}

CODES = {
    "MessageTooLargeError": {10054},
    "StreamMismatchError": {10060},
    "WrongLastSequenceError": {10071, 10164},
    "MessageTTLInvalidError": {10165},
    "MessageTTLDisabledError": {10166},
    "TooManyRequestsError": {10167},
    "AtomicPublishDisabledError": {10174},
    "AtomicPublishMissingSequenceError": {10175},
    "AtomicPublishIncompleteError": {10176},
    "AtomicPublishUnsupportedHeaderError": {10177},
    "AtomicPublishInvalidBatchIDError": {10179},
    "RequiredApiLevelError": {10185},
    "AtomicPublishMirrorError": {10198},
    "AtomicPublishTooLargeError": {10199},
    "AtomicPublishInvalidCommitError": {10200},
    "AtomicPublishDuplicateMessageIDError": {10201},
    "ConsumerInvalidResetError": {10204},
    "FastPublishDisabledError": {10205},
    "FastPublishInvalidPatternError": {10206},
    "FastPublishInvalidBatchIDError": {10207},
    "FastPublishUnknownBatchError": {10208},
    "FastPublishMirrorError": {10209},
    "AtomicPublishTooManyInflightError": {10210},
    "FastPublishTooManyInflightError": {10211},
}
RETRYABLE = {"TooManyRequestsError", "AtomicPublishTooManyInflightError", "FastPublishTooManyInflightError"}

BATCH = {
    "batch_id": "b1",
    "sent": 7,
    "acked": 5,
    "outcome": "partial",
    "ack": BatchAck("S", 12, "b1", 5, "hub", "3"),
}
SERVER = {"code": 400, "err_code": 10071, "description": "wrong last sequence: 9"}


def arguments(cls: type[JetStreamExtError]) -> dict[str, Any]:
    """A distinct value for every argument of a class."""
    known: dict[str, Any] = {
        "feature": "atomic batch",
        "required_api_level": 2,
        "server_version": "2.11.0",
        "stream": "S",
        "frame": b"NATS/1.0 999\r\n\r\n",
        "expected": 4,
        "got": 6,
        "diff": {"max_msgs": (1, 2)},
        "keys": ("a", "b"),
        "first_lost": 3,
        "last_lost": 4,
        **SERVER,
        **BATCH,
    }
    wanted: set[str] = set()
    for base in cls.__mro__:
        if base.__module__ == errors.__name__ and "__init__" in vars(base):
            wanted |= set(inspect.signature(base.__init__).parameters)
    return {"message": "it broke", **{name: value for name, value in known.items() if name in wanted}}


def state(error: JetStreamExtError) -> dict[str, Any]:
    return {**vars(error), "str": str(error), "type": type(error), "args": error.args}


@pytest.mark.parametrize("name", sorted(TREE))
def test_every_class_has_the_bases_of_the_contract(name: str) -> None:
    for base in TREE[name]:
        assert issubclass(getattr(errors, name), base)


def test_the_tree_has_these_classes_and_no_others() -> None:
    assert {cls.__name__ for cls in CLASSES} == set(TREE) | set(CODES)


@pytest.mark.parametrize("module", ["", ".arrow", ".kv", ".log", ".spark"])
def test_every_error_that_a_package_exports_is_among_them(module: str) -> None:
    package = importlib.import_module(f"jetstream_ext{module}")
    for name in package.__all__:
        if inspect.isclass(found := getattr(package, name)) and issubclass(found, BaseException):
            assert getattr(errors, name, None) is found


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_names_its_public_module(cls: type[JetStreamExtError]) -> None:
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert f"{cls.__module__}.{cls.__qualname__}" == f"jetstream_ext.errors.{cls.__name__}"
    get_type_hints(cls)  # whose names are looked up in the module that the class says it is of


@pytest.mark.parametrize("name", sorted(CODES))
def test_each_server_code_has_its_class(name: str) -> None:
    cls = getattr(errors, name)
    assert {code for code, known in errors.SERVER_ERRORS.items() if known is cls} == CODES[name]
    assert issubclass(cls, ServerError)
    assert issubclass(cls, BatchError) is (name != "ConsumerInvalidResetError")
    for code in CODES[name]:
        error = errors.server_error(code=400, err_code=code, description="why")
        assert type(error) is cls
        assert error.retryable is (name in RETRYABLE)
        assert (error.code, error.err_code, error.description) == (400, code, "why")
        assert str(code) in (cls.__doc__ or ""), "the docstring names the code"


@pytest.mark.parametrize("code", [None, 0, 10003, 10203, 99999])
def test_an_unknown_code_is_a_plain_server_error(code: int | None) -> None:
    error = errors.server_error(code=500, err_code=code, description="a new reason")
    assert type(error) is ServerError
    assert not error.retryable
    assert "a new reason" in str(error)


def test_the_codes_of_the_drafts_are_not_fast_ingest_errors() -> None:
    assert 10203 not in errors.SERVER_ERRORS
    assert errors.SERVER_ERRORS[10204] is errors.ConsumerInvalidResetError


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
class TestEveryClass:
    def test_needs_no_arguments(self, cls: type[JetStreamExtError]) -> None:
        error = cls()
        assert str(error) == cls.__name__
        assert state(pickle.loads(pickle.dumps(error))) == state(error)

    def test_keeps_its_arguments(self, cls: type[JetStreamExtError]) -> None:
        given = arguments(cls)
        error = cls(**given)
        for name, value in given.items():
            assert getattr(error, name) == value

    def test_pickling_keeps_its_fields(self, cls: type[JetStreamExtError]) -> None:
        error = cls(**arguments(cls))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert state(pickle.loads(pickle.dumps(error, protocol))) == state(error)

    def test_pickling_keeps_its_cause(self, cls: type[JetStreamExtError]) -> None:
        with pytest.raises(cls) as caught:
            raise cls(**arguments(cls)) from errors.ResponseError("below", frame=b"x")
        again = pickle.loads(pickle.dumps(caught.value))
        assert state(again) == state(caught.value)
        assert type(again.__cause__) is errors.ResponseError
        assert (str(again.__cause__), again.__cause__.frame) == ("below", b"x")
        assert again.__suppress_context__

    def test_pickling_adds_no_cause(self, cls: type[JetStreamExtError]) -> None:
        again = pickle.loads(pickle.dumps(cls("x")))
        assert again.__cause__ is None
        assert not again.__suppress_context__

    def test_is_hashable_and_equal_only_to_itself(self, cls: type[JetStreamExtError]) -> None:
        one, other = cls("same"), cls("same")
        assert len({one, other}) == 2
        assert one == one
        assert one != other

    def test_can_be_copied(self, cls: type[JetStreamExtError]) -> None:
        error = cls(**arguments(cls))
        again = copy.copy(error)
        assert again is not error
        assert state(again) == state(error)

    def test_its_text_and_its_repr_have_the_message(self, cls: type[JetStreamExtError]) -> None:
        error = cls(**arguments(cls))
        assert "it broke" in str(error)
        assert "it broke" in repr(error)
        assert cls.__name__ in repr(error)
        assert cls.__doc__

    def test_is_a_nats_py_error(self, cls: type[JetStreamExtError]) -> None:
        with pytest.raises(nats.errors.Error):
            raise cls


def test_the_text_of_a_server_error_has_its_code() -> None:
    assert str(ServerError(description="wrong", err_code=10071)) == "wrong (error 10071)"
    assert "wrong" in repr(ServerError(description="wrong", err_code=10071))


@pytest.mark.parametrize("code", sorted(errors.SERVER_ERRORS))
def test_the_refusal_of_a_batch_has_the_class_of_its_code_and_is_a_batch_error(code: int) -> None:
    error = errors.server_error(code=429, err_code=code, description="no")
    refusal = errors.batch_refusal(error, "batch b1: no", **BATCH)
    assert isinstance(refusal, BatchError)
    assert isinstance(refusal, ServerError)
    if code != 10204:
        assert type(refusal) is type(error)
    for name, value in BATCH.items():
        assert getattr(refusal, name) == value
    assert (refusal.code, refusal.err_code, refusal.description) == (429, code, "no")
    assert refusal.retryable is error.retryable or code == 10204
    assert state(pickle.loads(pickle.dumps(refusal))) == state(refusal)


def test_the_refusal_of_a_batch_with_an_unknown_code_is_a_batch_server_error() -> None:
    refusal = errors.batch_refusal(errors.server_error(code=500, err_code=10052, description="?"), "no", **BATCH)
    assert type(refusal) is BatchServerError
    assert refusal.outcome == "partial"


def test_a_response_error_keeps_1024_bytes_of_the_frame() -> None:
    assert len(errors.ResponseError("x", frame=bytes(5000)).frame) == 1024


def test_collections_are_copied() -> None:
    diff: dict[str, tuple[Any, Any]] = {"a": (1, 2)}
    error = errors.StreamConfigMismatchError("x", diff=diff)
    diff.clear()
    assert error.diff == {"a": (1, 2)}
    assert errors.HistoryUnavailableError(keys=["a"]).keys == ("a",)  # type: ignore[arg-type]


def test_the_fields_of_nats_py_s_errors_are_set() -> None:
    assert errors.BadHeaderError("header 'a b' is invalid").key == "header 'a b' is invalid"
    assert errors.NoStreamError("no stream stores 'a'").description == "no stream stores 'a'"
    for error in (errors.MessageNotFoundError("none"), errors.BadRequestError("none"), ServerError("none")):
        assert (error.err_code, error.seq, error.description) == (None, None, "none")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_unknown_argument_is_refused(cls: type[JetStreamExtError]) -> None:
    with pytest.raises(TypeError):
        cls("it broke", unknown=1)
