# SPDX-License-Identifier: Apache-2.0
"""Maintenance of stores: describe, verify and compare checkpoints; copy, drop, pin, recover.

The functions block; call them from asyncio code with ``asyncio.to_thread``. Those that only read open everything
read-only, write nothing, and work while a trainer writes to the store. This may import ``store`` and lower layers.
"""

from pccheck_async.upkeep.change import (
    Removal,
    pin_checkpoint,
    reject_checkpoints,
    removable,
    remove_checkpoints,
    to_remove,
    unpin_checkpoint,
)
from pccheck_async.upkeep.compare import Comparison, LeafDifference, compare_checkpoints
from pccheck_async.upkeep.copying import copy_checkpoint
from pccheck_async.upkeep.listing import ShardBox, ShardedLeaf, StoredLeaf, list_leaves
from pccheck_async.upkeep.memory import MemoryFolder, clear_memory, list_memory, memory_of
from pccheck_async.upkeep.reading import (
    Description,
    describe_checkpoint,
    forbidden_files,
    lost_parts,
    lost_records,
    lost_slots,
    newer_in_slots,
    overwritten,
    replaced_slots,
)
from pccheck_async.upkeep.recover import Recovery, recover_store
from pccheck_async.upkeep.verify import CheckedCheckpoint, Damage, RecordCopy, Verification, verify_checkpoints

__all__ = ["CheckedCheckpoint", "Comparison", "Damage", "Description", "LeafDifference", "Recovery", "Removal"]
__all__ += ["MemoryFolder", "clear_memory", "list_memory", "memory_of"]
__all__ += [
    "RecordCopy",
    "ShardBox",
    "ShardedLeaf",
    "StoredLeaf",
    "Verification",
    "compare_checkpoints",
    "copy_checkpoint",
]
__all__ += [
    "describe_checkpoint",
    "forbidden_files",
    "list_leaves",
    "lost_parts",
    "lost_records",
    "lost_slots",
    "newer_in_slots",
    "overwritten",
    "pin_checkpoint",
    "recover_store",
    "reject_checkpoints",
    "removable",
    "replaced_slots",
    "to_remove",
    "unpin_checkpoint",
]
__all__ += ["remove_checkpoints", "verify_checkpoints"]
