"""The state of a worker that another one takes over from while it starts."""

from typing import Any

import pytest
from workers import MakePair

from jetstream_ext import StoredMsg, errors, log


def count(_: StoredMsg, state: log.State) -> None:
    state["n"] = b"%d" % (int(state.get("n", b"0")) + 1)


async def test_a_worker_that_is_fenced_while_it_reads_its_state_reports_no_loss(make_pair: MakePair, wire: Any) -> None:
    """What it reads then is the state of the other one's position."""
    pair = await make_pair(5)
    state = f"{pair.target}.state"
    wire.before("DIRECT.GET", 1, lambda: pair.work(count, state=state))
    with pytest.raises(errors.FencedError, match="another worker of this name has taken over and is at sequence 6"):
        await pair.work(count, pair.reader(js=wire.js), state=state)
    assert [msg.data for msg in await pair.stored("state.w.n")][-1:] == [b"5"]
