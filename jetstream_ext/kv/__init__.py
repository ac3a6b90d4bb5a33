"""Key-value buckets: many keys at once, points in time, transactions."""

from typing import TYPE_CHECKING

from jetstream_ext.kv.creation import enable, ensure_bucket
from jetstream_ext.kv.entries import KeyValueEntry, KeyValueSnapshot
from jetstream_ext.kv.reads import get_many, snapshot
from jetstream_ext.kv.transaction import Committed, Transaction, retry_transaction, touch, transaction

if TYPE_CHECKING:
    from jetstream_ext.kv.table import Changes, KeyValueChange, Table
else:

    def __getattr__(name):
        # Imported when it is used: the processes of a Spark query import this package, and none of them has a table.
        if name in ("Changes", "KeyValueChange", "Table"):
            from jetstream_ext.kv import table

            return getattr(table, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


del TYPE_CHECKING  # not a name of this package

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
