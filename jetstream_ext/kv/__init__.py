"""Key-value buckets: many keys at once, points in time, transactions."""

from jetstream_ext.kv.creation import enable, ensure_bucket
from jetstream_ext.kv.entries import KeyValueEntry, KeyValueSnapshot
from jetstream_ext.kv.reads import get_many, snapshot
from jetstream_ext.kv.table import Changes, KeyValueChange, Table
from jetstream_ext.kv.transaction import Committed, Transaction, retry_transaction, touch, transaction

__all__ = [
    "Changes",
    "Committed",
    "KeyValueChange",
    "KeyValueEntry",
    "KeyValueSnapshot",
    "Table",
    "Transaction",
    "enable",
    "ensure_bucket",
    "get_many",
    "retry_transaction",
    "snapshot",
    "touch",
    "transaction",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
