# SPDX-License-Identifier: Apache-2.0
"""Asyncio-native checkpoint engine for PyTorch.

Saves the state of a training job every few steps while training goes on, and always leaves one whole, verified
checkpoint. Its modules are imported at their first use.

Saving: :class:`CheckpointEngine` (``async with``) and :class:`SyncCheckpointEngine` (``with``) have the same verbs.
``checkpoint`` returns a :class:`PendingCheckpoint` when the state is captured and may change; awaited, that gives the
:class:`CheckpointInfo` of a durable checkpoint. ``step`` brackets a training step and saves when a :class:`Policy`
decides so, ``attach`` makes captures overlap with training, ``restore`` fills a live state. :class:`Keep` has the
rules by which checkpoints are kept, :class:`StorageOptions` has the settings of I/O, :class:`MemoryTier` also keeps the
newest checkpoints in memory, :class:`Drain` copies them to object storage, :class:`Group` has the ranks that save.

Reading, without an engine and beside a running one: :func:`list_checkpoints`, :func:`load`, :func:`load_sync`,
:func:`open_checkpoint` for single tensors.

In place, without an engine: :class:`Shelf`, named variables in a mapped file, with transactions.

Looking after stores, as ``pccheck`` does on the command line: :mod:`pccheck_async.stores`. When a step saves:
:mod:`pccheck_async.policies`. Statistics and events: :mod:`pccheck_async.statistics`.

Every failure of a checkpoint, a store or a state is a :class:`CheckpointError`; :mod:`pccheck_async.errors` has all of
them. Wrong arguments are TypeError or ValueError. Events and the log are described in ``telemetry.events`` and
``telemetry.logs``, metrics and statistics in ``engine.metrics`` and ``engine.statistics``, the bytes on storage in
``format.record`` and ``format.manifest``, signals in ``training.preemption``, I/O backends in ``transfer.operations``,
devices in ``transfer.copying.cuda``, media that fail, crash and hang in ``testing``.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pccheck_async.lazy_names import importer

if TYPE_CHECKING:
    from pccheck_async.api import (
        CheckpointEngine,
        SyncCheckpointEngine,
        list_checkpoints,
        load,
        load_sync,
        open_checkpoint,
    )
    from pccheck_async.engine import Drain, MemoryTier, PendingCheckpoint, StorageOptions
    from pccheck_async.errors import (
        CheckpointError,
        GroupError,
        NoCheckpointError,
        StateMismatchError,
        TornCaptureError,
    )
    from pccheck_async.format import CheckpointInfo, Restored
    from pccheck_async.group import Group
    from pccheck_async.shelf import Shelf
    from pccheck_async.state import FlatShard, RNGState, Stateful
    from pccheck_async.store import Keep
    from pccheck_async.training import TrainingStep
    from pccheck_async.training.data import ResumableLoader, ResumableSampler
    from pccheck_async.training.policy import Adaptive, Policy

__all__ = [
    "Adaptive", "CheckpointEngine", "CheckpointError", "CheckpointInfo", "Drain", "FlatShard", "Group", "GroupError",
    "Keep", "MemoryTier", "NoCheckpointError", "PendingCheckpoint", "Policy", "RNGState", "Restored", "ResumableLoader",
    "ResumableSampler", "Shelf", "StateMismatchError", "Stateful", "StorageOptions", "SyncCheckpointEngine",
    "TornCaptureError", "TrainingStep", "list_checkpoints", "load", "load_sync", "open_checkpoint",
]  # fmt: skip

__version__ = "1.0.0"

_import = importer(
    __name__,
    globals(),
    {
        "api": {
            "CheckpointEngine": "CheckpointEngine",
            "SyncCheckpointEngine": "SyncCheckpointEngine",
            "list_checkpoints": "list_checkpoints",
            "load": "load",
            "load_sync": "load_sync",
            "open_checkpoint": "open_checkpoint",
        },
        "engine": {
            "Drain": "Drain",
            "MemoryTier": "MemoryTier",
            "PendingCheckpoint": "PendingCheckpoint",
            "StorageOptions": "StorageOptions",
        },
        "errors": {
            "CheckpointError": "CheckpointError",
            "GroupError": "GroupError",
            "NoCheckpointError": "NoCheckpointError",
            "StateMismatchError": "StateMismatchError",
            "TornCaptureError": "TornCaptureError",
        },
        "format": {"CheckpointInfo": "CheckpointInfo", "Restored": "Restored"},
        "group": {"Group": "Group"},
        "shelf": {"Shelf": "Shelf"},
        "state": {"FlatShard": "FlatShard", "RNGState": "RNGState", "Stateful": "Stateful"},
        "store": {"Keep": "Keep"},
        "training": {"TrainingStep": "TrainingStep"},
        "training.data": {"ResumableLoader": "ResumableLoader", "ResumableSampler": "ResumableSampler"},
        "training.policy": {"Adaptive": "Adaptive", "Policy": "Policy"},
    },
)

_MODULES = ("errors", "policies", "statistics", "stores")
_MOVED = {
    "ClosedError": "errors.ClosedError",
    "CorruptStoreError": "errors.CorruptStoreError",
    "DamagedError": "errors.DamagedError",
    "IncompleteCheckpointError": "errors.IncompleteCheckpointError",
    "InfeasibleError": "errors.InfeasibleError",
    "InvalidTuningError": "errors.InvalidTuningError",
    "ReadError": "errors.ReadError",
    "ReplicasDifferError": "errors.ReplicasDifferError",
    "StoreError": "errors.StoreError",
    "StoreFailedError": "errors.StoreFailedError",
    "StoreFullError": "errors.StoreFullError",
    "StoreLockedError": "errors.StoreLockedError",
    "UnsupportedStateError": "errors.UnsupportedStateError",
    "WriteError": "errors.WriteError",
    "EverySteps": "policies.EverySteps",
    "EverySeconds": "policies.EverySeconds",
    "CheckFreqInterval": "policies.CheckFreqInterval",
    "PCcheckInterval": "policies.PCcheckInterval",
    "YoungDaly": "policies.YoungDaly",
    "CheckpointProgress": "statistics.CheckpointProgress",
    "Decisions": "statistics.Decisions",
    "Distribution": "statistics.Distribution",
    "EngineStatistics": "statistics.EngineStatistics",
    "Stage": "statistics.Stage",
    "CheckedCheckpoint": "stores.CheckedCheckpoint",
    "Comparison": "stores.Comparison",
    "Damage": "stores.Damage",
    "Description": "stores.Description",
    "LeafDifference": "stores.LeafDifference",
    "Recovery": "stores.Recovery",
    "Removal": "stores.Removal",
    "Verification": "stores.Verification",
    "Exported": "stores.Exported",
    "Imported": "stores.Imported",
    "OpenCheckpoint": "stores.OpenCheckpoint",
    "StoredState": "stores.StoredState",
    "StoredTensor": "stores.StoredTensor",
    "SpaceNeeded": "stores.SpaceNeeded",
    "Tuning": "stores.Tuning",
    "TunedSettings": "stores.TunedSettings",
    "Measurement": "stores.Measurement",
    "Point": "stores.Point",
    "verify_checkpoints": "stores.verify",
    "compare_checkpoints": "stores.compare",
    "copy_checkpoint": "stores.copy",
    "describe_checkpoint": "stores.describe",
    "remove_checkpoints": "stores.remove",
    "pin_checkpoint": "stores.pin",
    "reject_checkpoints": "stores.reject",
    "recover_store": "stores.recover",
    "export_checkpoint": "stores.export",
    "import_checkpoint": "stores.import_",
    "read_tuning": "stores.read_tuning",
}
"""Public names of version 0.1 that moved: each with its present module and name."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MOVED:
        return _import(name)
    module, _, new = _MOVED[name].partition(".")
    text = f"pccheck_async.{name} is pccheck_async.{module}.{new} now; the old name goes with version 1.1"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return getattr(import_module(f"{__name__}.{module}"), new)


def __dir__() -> list[str]:
    return sorted(__all__)
