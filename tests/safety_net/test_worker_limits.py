"""A worker ends at the end of its input, and at an output that can never be stored."""

import time
from collections.abc import Callable

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.errors import AtomicPublishIncompleteError, MessageTooLargeError
from jetstream_ext.log import LogReader, exactly_once

ISSUE = "Key-value and log: no guess, no hole"


class EndlessError(Exception):
    """The handler was called more often than there are inputs."""


@pytest.mark.xfail(
    strict=True, raises=EndlessError, reason=f"{ISSUE}: a worker on its own input handles its own positions without end"
)
async def test_worker_whose_output_is_its_input_never_handles_its_own_positions(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True)
    for n in range(3):
        await js.publish(f"{name}.in", b"%d" % n)
    handled: list[str] = []

    def handle(message: jsx.StoredMsg) -> None:
        handled.append(message.subject)
        if len(handled) > 20:
            raise EndlessError

    try:
        await exactly_once(LogReader(js, name), name, handle, name="w", prefix=f"{name}.at")
    except ValueError:
        assert handled == [], "a refusal comes before the first message"
    else:
        assert handled == [f"{name}.in"] * 3


@pytest.mark.xfail(
    strict=True,
    raises=AtomicPublishIncompleteError,
    reason=f"{ISSUE}: an output over max_msg_size is retried, and then reported as an incomplete batch",
)
async def test_output_larger_than_the_stream_takes_is_refused_at_once_and_named(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, output = stream_name(), stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.add_stream(name=output, subjects=[f"{output}.>"], allow_direct=True, allow_atomic=True, max_msg_size=1000)
    await js.publish(name, b"1")
    before = time.monotonic()
    with pytest.raises(MessageTooLargeError, match=f"{output}.large"):
        await exactly_once(
            LogReader(js, name),
            output,
            lambda _: [jsx.BatchMessage(f"{output}.small", b"1"), jsx.BatchMessage(f"{output}.large", bytes(5000))],
            name="w",
            prefix=f"{output}.at",
            patience=1.5,
        )
    assert time.monotonic() - before < 1.5
