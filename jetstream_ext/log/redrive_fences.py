"""The fences of a redrive: which sequence a letter expects to be the last one on its subject when it is stored."""

from __future__ import annotations

from jetstream_ext.log.redrive_note import Key, NotedLetter


class SubjectFences:
    """The fences of letters of one call.

    A letter's fence was read before it was known that the target does not have the letter. So of several attempts to send
    it, wherever they are held up, the server stores the first one that arrives and refuses the others.
    """

    def __init__(self) -> None:
        self._fences: dict[Key, int] = {}
        # What this call has stored behind a fence, by target, subject and fence. Nothing else is stored between the two, so
        # the fences of other letters move along.
        self._followers: dict[tuple[str, str, int], int] = {}

    def __getitem__(self, letter: NotedLetter) -> int | None:
        fence = self._fences.get(letter.key)
        while fence is not None:
            follower = self._followers.get((letter.target, letter.subject, fence))
            if follower is None:
                break
            fence = follower
        return fence

    def set(self, letter: NotedLetter, fence: int | None) -> None:
        """Set the fence of a letter; without one, only the message id keeps the server from storing it twice."""
        if fence is None:
            self._fences.pop(letter.key, None)
        else:
            self._fences[letter.key] = fence

    def stored(self, letter: NotedLetter, seq: int) -> None:
        """Record that a letter was stored at a sequence."""
        fence = self[letter]
        if fence is not None:
            self._followers[letter.target, letter.subject, fence] = seq

    def clear(self) -> None:
        self._fences.clear()
        self._followers.clear()
