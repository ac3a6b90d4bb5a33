"""Where a new consumer starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .consumer_config import ConsumerConfig
    from .stream import Stream

__all__ = ["start_position"]


def start_position(stream: Stream, config: ConsumerConfig, filters: list[str]) -> tuple[int, list[int], int]:
    """Return the first sequence to look at, and for `last_per_subject` the sequences to deliver before all else.

    Returns:
        The first sequence; the sequences to deliver first; the one after which it goes on normally.
    """
    store = stream.store
    state = store.state()
    policy = config["deliver_policy"]
    if config["opt_start_seq"]:
        first = max(int(config["opt_start_seq"]), state.first_seq)
        return (first if stream.profile.metadata else min(first, state.last_seq + 1)), [], 0
    first_of_each: list[int] = []
    if policy == "all" or (policy == "last_per_subject" and stream.config["max_msgs_per_subject"] == 1):
        first = state.first_seq
    elif policy == "last":
        newest = [store.last_for(each, store.last) for each in filters]
        first = max((message.seq for message in newest if message), default=0) if filters else state.last_seq
    elif policy == "last_per_subject":
        newest = [store.last_for(subject) for each in filters for subject in store.totals(each)]
        first_of_each = sorted({message.seq for message in newest if message})
        first = first_of_each[0] if first_of_each else state.last_seq
    elif config["opt_start_time"] is not None:
        first = store.seq_from_time(config["opt_start_time"])
    else:
        first = state.last_seq + 1
    first = 1 if state.first_seq == 0 else max(min(first, state.last_seq + 1), state.first_seq)
    return first, first_of_each, state.last_seq
