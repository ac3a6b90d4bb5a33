"""Where the messages of a range are, for partitions with about as many each.

Sequences say little about that where a filter matches here and there, or where most of the range was deleted. Asked for
one message from a sequence on, a server also says how many follow: with some such questions, each where most is still
unknown, the cuts fall right.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Final

from nats.js import JetStreamContext

from jetstream_ext.client.direct import DirectGet
from jetstream_ext.spark.ranges import SequenceRange

# Below this share of its sequences a range is worth the questions.
_DENSE: Final = 0.9
_QUESTIONS_PER_PARTITION: Final = 4
_QUESTIONS_AT_MOST: Final = 256


async def measure(context: JetStreamContext, found: SequenceRange, parts: int) -> SequenceRange:
    """Return the range with its `points`, if cutting it by sequences alone could be uneven.

    Replicas may answer that lag: the points are good for balance and for nothing else.
    """
    if parts < 2 or len(found) <= parts or (found.gapless and found.subject is None):
        return found
    direct = DirectGet(context, found.stream)

    async def following(seq: int) -> int:
        one = direct.batch(1, subject=found.subject, seq=seq)
        return len(await one.to_list()) + (one.num_pending or 0)

    points = {found.first: await following(found.first), found.last + 1: await following(found.last + 1)}
    total = points[found.first] - points[found.last + 1]
    if total <= parts or (found.subject is None and total > _DENSE * len(found)):
        return found
    questions = min(_QUESTIONS_AT_MOST, max(16, _QUESTIONS_PER_PARTITION * parts))
    spans = [(-total, found.first, found.last + 1)]
    for _ in range(questions):
        most, first, stop = heapq.heappop(spans)
        middle = (first + stop) // 2
        if middle == first or -most * 2 * _QUESTIONS_PER_PARTITION * parts < total:
            break
        points[middle] = await following(middle)
        for start, end in ((first, middle), (middle, stop)):
            heapq.heappush(spans, (points[end] - points[start], start, end))
    return replace(found, points=tuple(sorted(points.items())))
