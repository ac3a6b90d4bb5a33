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
    "MirrorAnswersError": (JetStreamExtError,),
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


def test_every_class_has_the_bases_of_the_contract() -> None:
    assert {cls.__name__ for cls in CLASSES} == set(TREE) | set(CODES)
    missing = [(name, base) for name in TREE for base in TREE[name] if not issubclass(getattr(errors, name), base)]
    assert not missing


def test_every_error_that_a_package_exports_is_in_the_tree() -> None:
    for module in ("jetstream_ext", *(f"jetstream_ext.{area}" for area in ("arrow", "kv", "log", "spark"))):
        package = importlib.import_module(module)
        for name in package.__all__:
            if inspect.isclass(found := getattr(package, name)) and issubclass(found, BaseException):
                assert getattr(errors, name, None) is found, f"{module}.{name}"


def test_every_class_names_its_public_module_and_says_what_it_means() -> None:
    for cls in CLASSES:
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert f"{cls.__module__}.{cls.__qualname__}" == f"jetstream_ext.errors.{cls.__name__}"
        assert cls.__doc__, cls
        get_type_hints(cls)  # whose names are looked up in the module that the class says it is of


def test_each_server_code_has_its_class() -> None:
    for name, codes in CODES.items():
        cls = getattr(errors, name)
        assert {code for code, known in errors.SERVER_ERRORS.items() if known is cls} == codes, name
        assert issubclass(cls, ServerError), name
        assert issubclass(cls, BatchError) is (name != "ConsumerInvalidResetError"), name
        for code in codes:
            error = errors.server_error(code=400, err_code=code, description="why")
            assert type(error) is cls, code
            assert error.retryable is (name in RETRYABLE), code
            assert (error.code, error.err_code, error.description) == (400, code, "why")
            assert str(code) in (cls.__doc__ or ""), f"the docstring names {code}"
            assert str(error) == f"why (error {code})"


def test_an_unknown_code_is_a_plain_server_error() -> None:
    # 10203 is a code of the drafts of fast ingest, which servers use for something else.
    for code in (None, 0, 10003, 10203, 99999):
        error = errors.server_error(code=500, err_code=code, description="a new reason")
        assert type(error) is ServerError, code
        assert not error.retryable, code
        assert "a new reason" in str(error)


def test_a_refusal_that_ends_by_itself_is_retryable() -> None:
    for code in (10008, 10009, 10023, 10118, 10158):  # no leader, no resources, offline, a duplicate in process
        assert errors.server_error(code=503, err_code=code).retryable, code
    for code in (10039, 10059, 10077, None):
        assert not errors.server_error(code=503, err_code=code).retryable, code


def test_every_class_needs_no_arguments() -> None:
    for cls in CLASSES:
        error = cls()
        assert str(error) == cls.__name__
        assert isinstance(error, nats.errors.Error)
        assert state(pickle.loads(pickle.dumps(error))) == state(error), cls


def test_every_class_keeps_its_arguments() -> None:
    for cls in CLASSES:
        given = arguments(cls)
        error = cls(**given)
        assert {name: getattr(error, name) for name in given} == given, cls
        assert "it broke" in str(error)
        assert "it broke" in repr(error)
        assert cls.__name__ in repr(error)


def test_every_class_refuses_an_unknown_argument() -> None:
    for cls in CLASSES:
        with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
            cls("it broke", unknown=1)


def test_pickling_and_copying_keep_the_fields() -> None:
    for cls in CLASSES:
        error = cls(**arguments(cls))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert state(pickle.loads(pickle.dumps(error, protocol))) == state(error), (cls, protocol)
        again = copy.copy(error)
        assert again is not error
        assert state(again) == state(error), cls


def test_pickling_keeps_the_cause_and_adds_none() -> None:
    for cls in CLASSES:
        with pytest.raises(cls) as caught:
            raise cls(**arguments(cls)) from errors.ResponseError("below", frame=b"x")
        again = pickle.loads(pickle.dumps(caught.value))
        assert state(again) == state(caught.value), cls
        assert type(again.__cause__) is errors.ResponseError, cls
        assert (str(again.__cause__), again.__cause__.frame, again.__suppress_context__) == ("below", b"x", True)
        again = pickle.loads(pickle.dumps(cls("x")))
        assert (again.__cause__, again.__suppress_context__) == (None, False), cls


def test_an_error_is_hashable_and_equal_only_to_itself() -> None:
    for cls in CLASSES:
        one, other = cls("same"), cls("same")
        assert len({one, other}) == 2, cls
        assert one == one
        assert one != other, cls


def test_the_refusal_of_a_batch_has_the_class_of_its_code_and_is_a_batch_error() -> None:
    for code in sorted(errors.SERVER_ERRORS):
        error = errors.server_error(code=429, err_code=code, description="no")
        error.stream = "S"
        refusal = errors.batch_refusal(error, "batch b1: no", **BATCH)
        assert isinstance(refusal, BatchError)
        # A reset of a consumer is no refusal of a batch.
        assert type(refusal) is (BatchServerError if code == 10204 else type(error)), code
        assert {name: getattr(refusal, name) for name in BATCH} == BATCH
        assert (refusal.code, refusal.err_code, refusal.description, refusal.stream) == (429, code, "no", "S")
        assert refusal.retryable is error.retryable
        assert state(pickle.loads(pickle.dumps(refusal))) == state(refusal)
    refusal = errors.batch_refusal(errors.server_error(code=500, err_code=10052, description="?"), "no", **BATCH)
    assert type(refusal) is BatchServerError


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
    assert (errors.MessageNotFoundError().code, errors.BadRequestError().code) == (404, 408)
    assert (errors.KeyConflictError().code, errors.KeyConflictError().err_code) == (400, 10071)
    assert errors.KeyConflictError("not at 3").outcome == "not_stored"
    assert str(errors.KeyConflictError("not at 3")) == "not at 3", "without the server's code"
