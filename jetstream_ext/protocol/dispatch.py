"""How one reader of a stream serves several partitions, with bounded memory. No I/O.

Each partition has a queue of messages that were given to it, and a sequence from which it still has to get messages.
While all partitions keep up, these sequences are equal, and each message is read once. A partition whose queue is full
stays behind; once it has room, the reader goes back for it, and then returns to the others. So a message may be read
more than once, and it is given once.

The shell's loop::

    while (read := dispatcher.next_read()) is None:
        ...  # wait for `wake`
    if reader.position != read.start:
        reader.seek(read.start)
    rows = await reader.read_for(seconds if read.may_wait else 0.001, read.max_messages)
    dispatcher.feed(rows, read.start, reader.position)

`wake` may end a read that waits: another partition has room, or is owned now.

Where a reader can be filtered by the partition (`filtered`), one that is behind is *alone*: it is read for by a reader of its
own, which leaves out the messages of the others, until it has reached the end of the stream and joins the others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from jetstream_ext.protocol.direct import StoredMsg, size_of

TURN_MESSAGES: Final = 4096
TURN_READS: Final = 32
"""After so many messages or reads from one place, partitions elsewhere in the stream have their turn."""

_MAX_READ: Final = 512
_MIN_READ: Final = 16


class Read(NamedTuple):
    """What the reader should read next.

    Attributes:
        start: The sequence to start at.
        max_messages: How many messages to read. More would only be read again, once the queues have room for them.
        may_wait: No partition needs messages from before `start`, so that the read may wait for new ones. Otherwise
            it must return at once if there are none, because others wait for their turn.
    """

    start: int
    max_messages: int
    may_wait: bool


class _Partition:
    __slots__ = ("alone", "is_full", "next", "queue", "served", "size")

    def __init__(self, position: int, turn: int, *, alone: bool) -> None:
        self.alone: bool = alone
        self.next: int = position  # it has got its messages below
        self.queue: deque[StoredMsg] = deque()
        self.size: int = 0  # bytes of the messages in `queue`
        self.is_full: bool = False  # until it is half empty, so that the reader does not go back for single messages
        self.served: int = turn  # the last turn in which its messages were read

    @property
    def position(self) -> int:
        return self.queue[0].seq if self.queue else self.next


class Dispatcher:
    """Gives the messages of a stream to the queues of the owned partitions.

    Each partition takes exactly its messages, from the position at which it was added, in their order and each once.
    The queue of one holds at most `buffer` messages, and at most `buffer_bytes` and one message more.

    Turns are fair. With k places of the stream at which partitions need messages, each place is read in one of about k
    turns, and a turn has at most `TURN_MESSAGES` messages and one read more. Hence neither a partition that is millions
    of messages behind nor those at the end stop the others.

    Args:
        partitions_of: Returns the partition of each message, such as `Partitioner.of`.
        buffer: The most messages in a partition's queue.
        buffer_bytes: The most bytes in a partition's queue, as servers count messages; a single message may be larger.
        filtered: Partitions begin alone, and are alone again once their queue was full.
        wake: Called when a partition was added or removed, has room again or few messages left, so that the next read can have
            changed; the argument says whether it is the one of a partition that is alone.
    """

    def __init__(
        self,
        partitions_of: Callable[[Sequence[StoredMsg]], Sequence[int]],
        *,
        buffer: int = 1000,
        buffer_bytes: int = 8 << 20,
        filtered: bool = False,
        wake: Callable[[bool], None] = lambda _: None,
    ) -> None:
        if buffer < 1 or buffer_bytes < 1:
            raise ValueError(f"buffer and buffer_bytes must be at least 1, not {buffer} and {buffer_bytes}")
        self._partitions_of = partitions_of
        self._buffer = buffer
        self._buffer_bytes = buffer_bytes
        self._low = buffer // 4
        self._filtered = filtered
        self._wake = wake
        self._owned: dict[int, _Partition] = {}
        self._with_messages: OrderedDict[int, None] = OrderedDict()  # the next one to take from first
        self._at = 0  # where the last read ended
        self._turn = 0
        self._messages_left = self._reads_left = 0  # of this turn

    def __contains__(self, partition: int) -> bool:
        return partition in self._owned

    def add(self, partition: int, position: int) -> None:
        """Own a partition, whose next message is at the sequence `position` or after it."""
        if partition in self._owned:
            raise ValueError(f"partition {partition} is owned already")
        self._owned[partition] = _Partition(position, self._turn, alone=self._filtered)
        self._wake(self._filtered)

    def remove(self, partition: int) -> None:
        """Stop owning a partition and drop the messages in its queue; nothing if it is not owned."""
        removed = self._owned.pop(partition, None)
        self._with_messages.pop(partition, None)
        if removed is not None and (removed.is_full or removed.alone):
            self._wake(removed.alone)

    @property
    def owned(self) -> int:
        """How many partitions are owned."""
        return len(self._owned)

    @property
    def alone(self) -> list[int]:
        """The partitions that are alone."""
        return [number for number, it in self._owned.items() if it.alone]

    def part(self) -> None:
        """If readers can be filtered, let every partition be alone: there is more to read than one should read for all."""
        if self._filtered:
            for it in self._owned.values():
                it.alone = True
            self._wake(True)

    def join(self, partition: int) -> None:
        """Let a partition that is alone be read for with the others, if it is owned."""
        if partition in self._owned:
            self._owned[partition].alone = False
            self._wake(False)

    def next_read_of(self, partition: int) -> Read | None:
        """Return what to read for a partition that is alone, or None if it is not, or does not need messages yet."""
        it = self._owned.get(partition)
        if it is None or not it.alone or it.is_full or len(it.queue) > self._low:
            return None
        return Read(it.next, min(_MAX_READ, max(_MIN_READ, self._buffer - len(it.queue))), may_wait=False)

    def next_read(self) -> Read | None:
        """Return what to read for those that are not alone, or None if none has room, or those that have need none yet.

        The reader stays where it is until the turn ends. Then it goes to the partition that has waited for the longest,
        or a little further back, if this serves others too: they are read for together from then on.
        """
        owned = [it for it in self._owned.values() if not it.alone]
        waiting = [it for it in owned if not it.is_full]
        if len(waiting) < len(owned):
            # What is read now has to be read again for those that are full: wait until the others need it.
            waiting = [it for it in waiting if len(it.queue) <= self._low]
        if not waiting:
            return None
        nexts = [it.next for it in waiting]
        in_turn = self._messages_left > 0 and self._reads_left > 0
        if in_turn and self._at in nexts:
            start = self._at
        else:
            first = min(waiting, key=lambda it: (it.served, it.next))
            start = first.next
            if self._turn - first.served <= len(self._owned):  # else those further back have filled their queues
                start = min(at for at in nexts if start - TURN_MESSAGES < at <= start)
        room = sum(self._buffer - len(it.queue) for it in waiting if it.next == start)
        return Read(start, min(_MAX_READ, max(_MIN_READ, room)), start == min(nexts))

    def feed(self, messages: Sequence[StoredMsg], begin: int, end: int, *, alone: int | None = None) -> set[int]:
        """Take what was read, give it to the partitions that need it, and return which got messages.

        Args:
            messages: The messages in the order of their sequences, at least all of the partitions that are not alone in the
                range that were not removed from the stream, or those of the partition `alone`.
            begin: The sequence at which the read started.
            end: The sequence at which the next one would start.
            alone: The partition that the messages were read for alone. Nothing changes if it is not owned, or not alone.

        Raises:
            BadSubjectError: The partition of a message is not defined; nothing has changed.
            ValueError: `messages` are not between `begin` and `end`; nothing has changed.
        """
        if end < begin or (messages and not begin <= messages[0].seq <= messages[-1].seq < end):
            raise ValueError(f"the messages were not read from the sequences {begin} to {end - 1}")
        if alone is not None:
            partitions: Sequence[int] = [alone] * len(messages)
        else:
            partitions = self._partitions_of(messages)
            if begin != self._at or self._messages_left <= 0 or self._reads_left <= 0:
                self._turn += 1
                self._messages_left, self._reads_left = TURN_MESSAGES, TURN_READS
            self._at = end
            self._messages_left -= len(messages)
            self._reads_left = self._reads_left - 1 if end > begin else 0  # nothing is there: others may have more
        reached = {
            number: it
            for number, it in self._owned.items()
            if begin <= it.next <= end and (number == alone if it.alone else alone is None)
        }
        for it in reached.values():
            it.served = self._turn
        took = reached.copy()
        given = self._give(messages, partitions, reached)
        for it in reached.values():
            it.next = end
        for it in took.values():
            it.is_full = it.is_full or len(it.queue) >= self._buffer or it.size >= self._buffer_bytes
            it.alone = it.alone or (self._filtered and it.is_full)
        self._with_messages.update(dict.fromkeys(given))
        return given

    def _give(
        self, messages: Sequence[StoredMsg], partitions: Sequence[int], reached: dict[int, _Partition]
    ) -> set[int]:
        """Put messages into queues; leave those partitions in `reached` that could take all of theirs."""
        given = set[int]()
        buffer, buffer_bytes, get, note = self._buffer, self._buffer_bytes, reached.get, given.add
        for message, number in zip(messages, partitions, strict=True):
            it = get(number)
            if it is None or (seq := message.seq) < it.next:
                continue
            queue = it.queue
            if len(queue) >= buffer or it.size >= buffer_bytes:
                it.next, it.is_full = seq, True
                del reached[number]
                continue
            queue.append(message)
            it.size += size_of(message)
            note(number)
        return given

    def take(self, partition: int, max_messages: int = 1) -> list[StoredMsg]:
        """Return the next messages of a partition, at most `max_messages`; none if it has none or is not owned."""
        it = self._owned.get(partition)
        if it is None:
            return []
        queue = it.queue
        many = len(queue) > self._low
        if max_messages >= len(queue):
            taken = list(queue)
            queue.clear()
            it.size = 0
            self._with_messages.pop(partition, None)
        else:
            taken = [queue.popleft() for _ in range(max_messages)]
            it.size -= sum([size_of(message) for message in taken])
        if it.is_full and 2 * len(queue) <= self._buffer and 2 * it.size <= self._buffer_bytes:
            it.is_full = False
            self._wake(it.alone)
        elif many and len(queue) <= self._low:
            self._wake(it.alone)
        return taken

    def take_any(self) -> tuple[int, StoredMsg] | None:
        """Return one message and its partition, of each partition in turn; None if no partition has any."""
        if not self._with_messages:
            return None
        partition = next(iter(self._with_messages))
        [message] = self.take(partition)
        if partition in self._with_messages:
            self._with_messages.move_to_end(partition)
        return partition, message

    def position(self, partition: int) -> int:
        """Return the sequence of a partition's next message, or below which it has none left to take.

        Raises:
            KeyError: The partition is not owned.
        """
        return self._owned[partition].position
