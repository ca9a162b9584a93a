# SPDX-License-Identifier: Apache-2.0
"""The durable state: which checkpoints exist, the slot of the next one, and the commit (:meth:`.Store.commit`).

It may import medium and lower layers, but no engine, loop or trainer. While an engine runs, only this package decides
which checkpoints a commit record names, and flushes through the store's medium; ``upkeep.recover`` rewrites a store
that is not open. :class:`Store` writes, :class:`CheckpointReader` reads, also beside a writer in another process.

Invariants, as comments name them:

- I1: a slot that the newest durable record names is never written.
- I2: a record is written only after all that it names is durable.
- I3: a slot becomes free only after a record that no longer names it is durable.
- I4: once ``durable()`` returned, every later recovery yields that checkpoint or a newer one.
- I5: opening an existing store, listing and restoring write nothing.
- I6: a checkpoint commits if it is among the ``keep_last`` newest at that moment, or kept by a rule.
- I7: a commit holds one state, of one step.
- I8: the bytes committed are the bytes captured.
- I9: buffers, slots and permits go back only after every operation that used them ended.
- I10: slots are at most ``max_in_flight + keep_last``, those kept by a rule, and one for readers.
- I11: a failed write fails its checkpoint; a failed flush or record write ends all commits of this engine.
- I12: a new writer makes the record that it builds on durable before it writes to any slot.
"""

from pccheck_async.store.checkpoint_reader import CheckpointReader, check_descriptors
from pccheck_async.store.chunks import ChunkRun, Staging, check_chunks
from pccheck_async.store.commit_file import (
    held_by_other,
    lock_commit,
    may_lack_the_newest,
    of_another_store,
    read_commit,
    stored_identity,
    unread_record,
)
from pccheck_async.store.differing import ranks_in_words, warn_of_others
from pccheck_async.store.fallback import (
    DroppedMeanwhileError,
    Fallback,
    UnreadableError,
    choose,
    only_rejected,
    unreadable_errors,
)
from pccheck_async.store.known_bytes import KnownBytes, SlotLease, can_hash
from pccheck_async.store.newer_slots import NewerSlot, newer_in_words, newer_slots, warn_of_newer
from pccheck_async.store.part_reader import PartReader, Source, read_encoded_manifest, read_manifest
from pccheck_async.store.rank_folders import is_group_folder, rank_folders, rank_name, rank_of
from pccheck_async.store.retention import Best, Keep, KeepAll, MetricWatch, Retention, SpaceNeeded
from pccheck_async.store.slot_writer import ChunkPlace, SlotWriter
from pccheck_async.store.sources import FolderPart, OwnSlot
from pccheck_async.store.store import Store, StoreStatistics, Written, open_store
from pccheck_async.store.store_reader import LOCK_SECONDS, StoreReader, at_once, no_store, others_in, others_in_words

__all__ = [
    "LOCK_SECONDS",
    "Best",
    "CheckpointReader",
    "ChunkPlace",
    "ChunkRun",
    "DroppedMeanwhileError",
    "Fallback",
    "FolderPart",
    "Keep",
    "KeepAll",
    "KnownBytes",
    "MetricWatch",
    "NewerSlot",
    "OwnSlot",
    "PartReader",
    "Retention",
    "SlotLease",
    "SlotWriter",
    "Source",
    "SpaceNeeded",
    "Staging",
    "Store",
    "StoreReader",
    "StoreStatistics",
    "UnreadableError",
    "Written",
    "at_once",
    "can_hash",
    "check_chunks",
    "check_descriptors",
    "choose",
    "held_by_other",
    "is_group_folder",
    "lock_commit",
    "may_lack_the_newest",
    "newer_in_words",
    "newer_slots",
    "no_store",
    "of_another_store",
    "only_rejected",
    "open_store",
    "others_in",
    "others_in_words",
    "rank_folders",
    "rank_name",
    "rank_of",
    "ranks_in_words",
    "read_commit",
    "read_encoded_manifest",
    "read_manifest",
    "stored_identity",
    "unread_record",
    "unreadable_errors",
    "warn_of_newer",
    "warn_of_others",
]  # fmt: skip
