"""Which partition a subject belongs to, and which member of a group owns which partitions. No I/O.

Every member of a group computes both for itself, whatever release of this library it runs. The functions are therefore
part of the protocol between members: their results do not change.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Final

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.text import counted, plural

_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193

_CACHED_SUBJECTS: Final = 65_536
_LONGEST_CACHED: Final = 256  # bytes of a subject; with the number of subjects, this bounds the memory of a cache

_REPLACED: Final = re.compile("\ufffd+")


def _fnv1a(data: bytes) -> int:
    value = _FNV_OFFSET
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def _canonical(subject: bytes) -> bytes:
    """Return the same bytes for a subject whether a replica or the leader sent it.

    The leader sends U+FFFD for invalid UTF-8: in Go one for each byte, where Python has one for each invalid sequence,
    so that only runs can be compared.
    """
    if subject.isascii():
        return subject
    text = subject.decode("utf-8", "replace")
    return _REPLACED.sub("\ufffd", text).encode() if "\ufffd" in text else subject


def partition_of(subject: str | bytes, partitions: int, key: Sequence[int] | None = None) -> int:
    """Return the partition of a subject in a `Group`, as the server's subject transform ``partition()`` computes it.

    ::

        partition_of("orders.ann.paid", 16, key=[1])    # that of every subject orders.ann.*

    It is the 32-bit FNV-1a hash, modulo `partitions`, of the chosen tokens without a separator, as in
    ``{{partition(n,1,2)}}``, or of the whole subject with its dots, as in ``{{partition(n)}}``. The server numbers the
    wildcards of the transform's source from 1, and `key` the tokens of the subject from 0.

    A subject that is not valid UTF-8 counts as if it had one U+FFFD for each run of invalid bytes, because servers send
    it so in some answers. Only for such subjects, and those with several U+FFFD in a row, the server's result can be
    another one.

    Args:
        subject: The subject; as a str, bytes that are not UTF-8 are U+FFFD or lone surrogates (``surrogateescape``).
        partitions: The number of partitions, from 1.
        key: Zero-based positions of tokens; None is the whole subject.

    Returns:
        A number from 0 to ``partitions - 1``.

    Raises:
        BadSubjectError: The subject is too short for `key`. No partition would be right: another client could read the
            key in another way, and the order of its messages would be lost.
        ValueError: There is no partition, or `key` is empty or has a negative position.
    """
    _check_key(partitions, key)
    return _partition_of(
        subject if isinstance(subject, bytes) else subject.encode("utf-8", "surrogateescape"), partitions, key
    )


def _check_key(partitions: int, key: Sequence[int] | None) -> None:
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, not {partitions}")
    if key is not None and (not key or min(key) < 0):
        raise ValueError(f"key must be zero-based positions of subject tokens, or None, not {key!r}")


def _partition_of(subject: bytes, partitions: int, key: Sequence[int] | None) -> int:
    raw = _canonical(subject)
    return _fnv1a(raw if key is None else _key_of(raw, key)) % partitions


def _key_of(subject: bytes, key: Sequence[int]) -> bytes:
    tokens = subject.split(b".")
    try:
        return b"".join([tokens[position] for position in key])
    except IndexError:
        raise _too_short(subject.decode("utf-8", "replace"), len(tokens), key) from None


def _too_short(subject: str, tokens: int, key: Sequence[int]) -> BadSubjectError:
    return BadSubjectError(
        f"subject {subject!r} has {counted(tokens, 'token')}, but the partition key is the {plural(len(key), 'token', 'tokens')} "
        f"{', '.join(map(str, key))}, counted from 0; read only subjects that have them, with a filter such as "
        f"{'.'.join(['*'] * max(key) + ['>'])!r}, or take another key"
    )


_raw_subject = attrgetter("raw_subject")


class Partitioner(dict[bytes, int]):
    """The partitions of subjects: `partition_of` with a cache, because the subjects of a stream repeat.

    Raises:
        ValueError: There is no partition, or `key` is empty or has a negative position.
    """

    def __init__(self, partitions: int, key: Sequence[int] | None = None) -> None:
        super().__init__()
        _check_key(partitions, key)
        self._partitions = partitions
        self._key = None if key is None else tuple(key)

    def __missing__(self, subject: bytes) -> int:
        found = _partition_of(subject, self._partitions, self._key)
        if len(subject) <= _LONGEST_CACHED:
            if len(self) >= _CACHED_SUBJECTS:
                self.clear()
            self[subject] = found
        return found

    def of(self, messages: Sequence[StoredMsg]) -> list[int]:
        """Return the partition of each message.

        Raises:
            BadSubjectError: A message's subject is too short for the key.
        """
        found = list[int]()
        try:
            found.extend(map(self.__getitem__, map(_raw_subject, messages)))
        except BadSubjectError as error:
            bad = messages[len(found)]
            raise BadSubjectError(f"stream {bad.stream!r}, sequence {bad.seq}: {error}") from None
        return found

    def check_filter(self, subject_filter: str) -> None:
        """Raise BadSubjectError if the filter matches subjects that are too short for the key."""
        tokens = subject_filter.split(".")  # a `>` at the end stands for one token or more
        if self._key is not None and len(tokens) <= max(self._key):
            raise _too_short(subject_filter, len(tokens), self._key)


@lru_cache(maxsize=256)  # 40 kB each with 4,096 partitions; when a member joins or leaves, the others are known
def _preferences(member: str, partitions: int) -> tuple[array[int], array[int]]:
    """Return how much a member prefers each partition, 64 random bits that depend on nothing else, and its order of them."""
    member_hash = blake2b(key=blake2b(member.encode("utf-8", "surrogateescape")).digest())
    scores = list[int]()
    for block in range(0, partitions, 8):
        one = member_hash.copy()
        one.update(block.to_bytes(8, "big"))
        digest = one.digest()
        scores += [int.from_bytes(digest[at : at + 8], "big") for at in range(0, 64, 8)]
    order = sorted(range(partitions), key=scores.__getitem__, reverse=True)
    return array("Q", scores[:partitions]), array("H", order)


def assign(members: Iterable[str], partitions: int) -> dict[str, list[int]]:
    """Return the partitions of each member: a function of the set of members and the number of partitions alone.

    Every partition has one member. No member has more than one partition more than another, so that with more members
    than partitions some have none. When a member joins or leaves, its own share moves, and few others: on average 2 besides
    its 13 of 64 partitions with the fifth member, 4 besides 6 with the eleventh.

    Each member ranks the partitions by a hash. In the order of the ranks, each takes what it prefers if no other has
    taken it, up to its share: rendezvous hashing with shares.

    Args:
        members: The members' names, in any order; a repeated name counts once.
        partitions: The number of partitions, from 1.

    Returns:
        The partitions of each member in ascending order. Without members it is empty.
    """
    owned: dict[str, list[int]] = {name: [] for name in sorted(set(members))}
    if not owned:
        return owned
    share, larger_shares = divmod(partitions, len(owned))
    free, rank = set(range(partitions)), 0
    choosing = []
    for name, own in owned.items():
        choosing.append((name, own, *_preferences(name, partitions)))
    while free:
        claims = [(scores[order[rank]], name, own, order[rank]) for name, own, scores, order in choosing]
        claims.sort(key=lambda claim: claim[:2], reverse=True)
        for _, _, own, partition in claims:
            if partition not in free or len(own) > share or (len(own) == share and not larger_shares):
                continue
            larger_shares -= len(own) == share
            own.append(partition)
            free.discard(partition)
        choosing = [each for each in choosing if len(each[1]) < share + bool(larger_shares)]
        rank += 1
    for own in owned.values():
        own.sort()
    return owned
