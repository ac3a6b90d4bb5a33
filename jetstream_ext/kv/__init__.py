"""Key-value buckets: many keys at once, points in time, transactions."""

from jetstream_ext.kv.admin import enable, touch
from jetstream_ext.kv.reading import get_many, snapshot
from jetstream_ext.kv.retrying import retry_transaction
from jetstream_ext.kv.transaction import Transaction, transaction
from jetstream_ext.kv.values import KeyValueEntry, KeyValueSnapshot

__all__ = [
    "KeyValueEntry",
    "KeyValueSnapshot",
    "Transaction",
    "enable",
    "get_many",
    "retry_transaction",
    "snapshot",
    "touch",
    "transaction",
]
