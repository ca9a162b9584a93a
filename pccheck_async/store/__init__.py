"""What is durable: which checkpoints exist, where the next one goes, and the commit (:mod:`.commit`).

It may import medium and what is below; it knows no engine, no loop and no trainer. Only here it is decided what a
commit record names, and only here anything is flushed. :class:`Store` is a store opened for writing,
:class:`StoreReader` one that is read, also beside a running writer of another process.
"""

from pccheck_async.store.reading import VerifiedChunks
from pccheck_async.store.retention import Best, KeepAll, Retention, SpaceNeeded
from pccheck_async.store.slots import SlotLease
from pccheck_async.store.store import Store, StoreStatistics, open_store
from pccheck_async.store.store_reader import StoreReader

__all__ = [
    "Best",
    "KeepAll",
    "Retention",
    "SlotLease",
    "SpaceNeeded",
    "Store",
    "StoreReader",
    "StoreStatistics",
    "VerifiedChunks",
    "open_store",
]
