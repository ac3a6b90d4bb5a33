"""Blocks of the messages that a read returns, joined and cut into blocks of similar sizes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jetstream_ext.protocol.direct import Block


async def pieces_of(blocks: AsyncGenerator[Block, None], rows: int, most_bytes: int) -> AsyncGenerator[Block, None]:
    """Join and cut blocks into blocks of at most `rows` messages and about `most_bytes`."""
    async with aclosing(blocks):
        piece, size = Block(), 0
        async for block in blocks:
            start = 0
            while start < len(block):
                part = block.part(start, start + rows - len(piece))
                if len(piece) and (size + part.size > most_bytes or piece.stream != part.stream):
                    yield piece
                    piece, size = Block(), 0
                    continue
                start += len(part)
                size += part.size
                if len(piece):
                    piece.extend(part)
                else:
                    piece = part
                if len(piece) >= rows or size >= most_bytes:
                    yield piece
                    piece, size = Block(), 0
        if len(piece):
            yield piece
