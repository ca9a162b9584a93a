# SPDX-License-Identifier: Apache-2.0
"""The public interface: the asynchronous and the blocking engine, loading, and lazy reads.

It may import: tuning and the rooms below.
"""

from pccheck_async.api.engine import CheckpointEngine
from pccheck_async.api.engine_base import EngineBase, engine_settings
from pccheck_async.api.lazy_load import Connection, OpenCheckpoint, StoredState, StoredTensor, open_checkpoint, rows
from pccheck_async.api.loading import list_checkpoints, load, load_sync
from pccheck_async.api.old_keywords import renamed, renamed_path
from pccheck_async.api.sync import SyncCheckpointEngine

__all__ = [
    "CheckpointEngine", "Connection", "EngineBase", "OpenCheckpoint", "StoredState", "StoredTensor",
    "SyncCheckpointEngine", "engine_settings", "list_checkpoints", "load", "load_sync", "open_checkpoint", "renamed",
    "renamed_path", "rows",
]  # fmt: skip
