"""A server's refusal of a batch, in the words of keys and buckets. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from jetstream_ext.errors import (
    AtomicPublishDisabledError,
    AtomicPublishIncompleteError,
    AtomicPublishTooLargeError,
    BatchServerError,
    MessageTooLargeError,
    MessageTTLDisabledError,
)
from jetstream_ext.kv.staging import Staged


def explained(
    refusal: BatchServerError, bucket: str, writes: Mapping[str, Staged], max_value_size: int
) -> BatchServerError:
    """Return a refusal of a transaction, with the key it is about and what the caller can do.

    Args:
        refusal: What the server said.
        bucket: The bucket's name.
        writes: What was to be written.
        max_value_size: The bucket's limit in bytes, where it matters; -1: none.
    """
    if isinstance(refusal, AtomicPublishDisabledError):
        return _again(
            refusal,
            f"bucket {bucket!r} does not allow atomic batches, which transactions are made of; turn them on once, "
            "with `await jetstream_ext.kv.enable(kv, atomic=True)`",
        )
    if isinstance(refusal, MessageTTLDisabledError):
        keys = ", ".join(repr(key) for key, staged in writes.items() if staged.ttl is not None)
        return _again(
            refusal,
            f"bucket {bucket!r} does not allow times to live (key {keys}); turn them on once, "
            "with `await jetstream_ext.kv.enable(kv, ttl=True)`",
        )
    if isinstance(refusal, AtomicPublishTooLargeError):
        return _again(
            refusal, f"bucket {bucket!r}: {len(writes)} keys are more than the server takes at once: {refusal}"
        )
    if isinstance(refusal, AtomicPublishIncompleteError):
        # The refusal of a message that is too large comes to nobody, and then the batch has a hole.
        for key, staged in writes.items():
            if 0 <= max_value_size < len(staged.value):
                return MessageTooLargeError(
                    f"key {key!r}: {len(staged.value)} bytes are over the {max_value_size} that bucket {bucket!r} allows",
                    code=400,
                    err_code=10054,
                    description="message size exceeds maximum allowed",
                    batch_id=refusal.batch_id,
                    outcome="not_stored",
                )
    return refusal


def _again(refusal: BatchServerError, message: str) -> BatchServerError:
    return type(refusal)(
        message,
        code=refusal.code,
        err_code=refusal.err_code,
        description=refusal.description or "",
        batch_id=refusal.batch_id,
        outcome="not_stored",
    )
