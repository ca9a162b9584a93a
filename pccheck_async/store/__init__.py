"""What is durable: which checkpoints exist, where the next one goes, and the commit (:mod:`.commit`).

It may import medium and what is below; it knows no engine, no loop and no trainer. Only here it is decided what a
commit record names, and only here anything is flushed. :class:`Store` is a store opened for writing,
:class:`StoreReader` one that is read, also beside a running writer of another process.
"""

from pccheck_async.store.commit_file import lock_commit, read_commit, stored_identity, unread_record
from pccheck_async.store.reading import (
    Fallback,
    VerifiedChunks,
    choose,
    pool_for,
    read_manifest,
    read_payload,
    verify_payload,
    warn_damaged,
)
from pccheck_async.store.retention import Best, KeepAll, Retention, SpaceNeeded, make_best
from pccheck_async.store.slots import SlotLease
from pccheck_async.store.store import DroppedMeanwhileError, Store, StoreStatistics, open_store
from pccheck_async.store.store_reader import StoreReader, no_store, why_no_store

__all__ = [
    "Best",
    "DroppedMeanwhileError",
    "Fallback",
    "KeepAll",
    "Retention",
    "SlotLease",
    "SpaceNeeded",
    "Store",
    "StoreReader",
    "StoreStatistics",
    "VerifiedChunks",
    "choose",
    "lock_commit",
    "make_best",
    "no_store",
    "open_store",
    "pool_for",
    "read_commit",
    "read_manifest",
    "read_payload",
    "stored_identity",
    "unread_record",
    "verify_payload",
    "warn_damaged",
    "why_no_store",
]
