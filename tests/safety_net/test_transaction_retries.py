"""A transaction's function runs again only after an error of the transaction itself."""

from collections.abc import Callable

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import NoStreamError

ISSUE = "Key-value and log: no guess, no hole"


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=f"{ISSUE}: retry_transaction retries errors of the function's own calls"
)
async def test_error_of_the_functions_own_publish_ends_the_transaction(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=stream_name()))
    runs = 0

    async def fn(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        assert runs == 1
        tx.put("k", b"1")
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"{stream_name()}.no.stream", b"1")])

    with pytest.raises(NoStreamError):
        await kvx.retry_transaction(kv, fn, give_up_after=60)
