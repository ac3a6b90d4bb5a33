"""Blocks that are joined and cut into blocks of similar sizes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.client.pieces import pieces_of
from jetstream_ext.protocol.direct import Block, StoredMsg


@given(st.lists(st.tuples(st.sampled_from("ABBB"), st.integers(0, 12)), max_size=12), st.integers(1, 7))
async def test_pieces_keep_every_message_in_order(lengths: list[tuple[str, int]], rows: int) -> None:
    made, seq = [], 0
    for name, length in lengths:
        messages = [StoredMsg(stream=name, subject="s", seq=seq + n, time_ns=1) for n in range(1, length + 1)]
        seq += length
        if messages:
            made.append(Block.of(messages, 0))

    async def blocks() -> Any:
        for block in made:
            yield block

    pieces = [piece async for piece in pieces_of(blocks(), rows, 8 << 20)]
    assert [one for piece in pieces for one in piece.seqs] == list(range(1, seq + 1))
    assert all(1 <= len(piece) <= rows for piece in pieces)
    assert [(piece.stream, one) for piece in pieces for one in piece.seqs] == [
        (block.stream, one) for block in made for one in block.seqs
    ]


@pytest.mark.parametrize(
    ("rows", "most_bytes", "sizes"), [(30, 1000, [22]), (10, 1000, [10, 10, 2]), (30, 20, [4, 4, 4, 1, 9])]
)
async def test_blocks_are_joined_and_cut(rows: int, most_bytes: int, sizes: list[int]) -> None:
    async def arrive(*counts: int) -> AsyncGenerator[Block, None]:
        for count in counts:
            yield Block("S", [1] * count, [b"12345"] * count, [0] * count)

    assert [len(piece) async for piece in pieces_of(arrive(4, 4, 4, 1, 9), rows, most_bytes)] == sizes
