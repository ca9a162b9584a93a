"""Asyncio-native checkpoint engine for PyTorch.

Saves the state of a training job every few steps while training goes on, and always leaves one whole, verified
checkpoint. Nothing is imported before it is used.

Saving: :class:`CheckpointEngine` (``async with``) and :class:`SyncCheckpointEngine` (``with``) have the same verbs.
``checkpoint`` returns a :class:`PendingCheckpoint` when the state is captured and may change; awaited, that gives the
:class:`CheckpointInfo` of a durable checkpoint. ``step`` brackets a training step and saves when a :class:`Policy`
decides so, ``attach`` makes captures overlap with training, ``restore`` fills a live state.

Reading, without an engine and beside a running one: :func:`list_checkpoints`, :func:`load`, :func:`load_sync`,
:func:`open_checkpoint` for single tensors.

In place, without an engine: :class:`Shelf`, named variables in a mapped file, with transactions.

Looking after stores, as ``pccheck`` does on the command line: :func:`describe_checkpoint`,
:func:`verify_checkpoints`, :func:`compare_checkpoints`, :func:`copy_checkpoint`, :func:`remove_checkpoints`,
:func:`pin_checkpoint`, :func:`reject_checkpoints`, :func:`recover_store`, :func:`export_checkpoint`,
:func:`import_checkpoint`, :func:`read_tuning`.

Every failure of a checkpoint, a store or a state is a :class:`CheckpointError`; wrong arguments are TypeError or
ValueError. Events and the log are described in ``telemetry.events`` and
``telemetry.logs``, metrics and statistics in ``engine.metrics`` and ``engine.statistics``, the bytes on storage in
``format.record`` and ``format.manifest``, signals in ``training.preemption``, I/O backends in ``transfer.operations``,
devices in ``transfer.copying.cuda``, media that fail, crash and hang in ``testing``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pccheck_async.api import (
        CheckpointEngine,
        OpenCheckpoint,
        StoredState,
        StoredTensor,
        SyncCheckpointEngine,
        list_checkpoints,
        load,
        load_sync,
        open_checkpoint,
    )
    from pccheck_async.convert import Exported, Imported, export_checkpoint, import_checkpoint
    from pccheck_async.engine import CheckpointProgress, Decisions, Distribution, EngineStatistics, PendingCheckpoint
    from pccheck_async.errors import (
        CheckpointError,
        ClosedError,
        CorruptStoreError,
        DamagedError,
        GroupError,
        IncompleteCheckpointError,
        InfeasibleError,
        InvalidTuningError,
        NoCheckpointError,
        ReadError,
        ReplicasDifferError,
        StateMismatchError,
        StoreError,
        StoreFailedError,
        StoreFullError,
        StoreLockedError,
        TornCaptureError,
        UnsupportedStateError,
        WriteError,
    )
    from pccheck_async.format import CheckpointInfo, Restored
    from pccheck_async.group import Group
    from pccheck_async.shelf import Shelf
    from pccheck_async.state import FlatShard, RNGState, Stateful
    from pccheck_async.store import SpaceNeeded
    from pccheck_async.telemetry import Stage
    from pccheck_async.training import TrainingStep
    from pccheck_async.training.data import ResumableLoader, ResumableSampler
    from pccheck_async.training.policy import (
        Adaptive,
        CheckFreqInterval,
        EverySeconds,
        EverySteps,
        PCcheckInterval,
        Policy,
        YoungDaly,
    )
    from pccheck_async.tuning import Measurement, Point, TunedSettings, Tuning, read_tuning
    from pccheck_async.upkeep import (
        CheckedCheckpoint,
        Comparison,
        Damage,
        Description,
        LeafDifference,
        Recovery,
        Removal,
        Verification,
        compare_checkpoints,
        copy_checkpoint,
        describe_checkpoint,
        pin_checkpoint,
        recover_store,
        reject_checkpoints,
        remove_checkpoints,
        verify_checkpoints,
    )

__all__ = [
    "Adaptive", "CheckFreqInterval", "CheckedCheckpoint", "CheckpointEngine", "CheckpointError", "CheckpointInfo",
    "CheckpointProgress", "ClosedError", "Comparison", "CorruptStoreError", "Damage", "DamagedError", "Decisions",
    "Description", "Distribution", "EngineStatistics", "EverySeconds", "EverySteps", "Exported", "FlatShard", "Group",
    "GroupError", "Imported", "IncompleteCheckpointError", "InfeasibleError", "InvalidTuningError", "LeafDifference",
    "Measurement", "NoCheckpointError", "OpenCheckpoint", "PCcheckInterval", "PendingCheckpoint", "Point", "Policy",
    "RNGState", "ReadError", "Recovery", "Removal", "ReplicasDifferError", "Restored", "ResumableLoader",
    "ResumableSampler", "Shelf", "SpaceNeeded", "Stage", "StateMismatchError", "Stateful", "StoreError",
    "StoreFailedError", "StoreFullError", "StoreLockedError", "StoredState", "StoredTensor", "SyncCheckpointEngine",
    "TornCaptureError", "TrainingStep", "TunedSettings", "Tuning", "UnsupportedStateError", "Verification",
    "WriteError", "YoungDaly", "compare_checkpoints", "copy_checkpoint", "describe_checkpoint", "export_checkpoint",
    "import_checkpoint", "list_checkpoints", "load", "load_sync", "open_checkpoint", "pin_checkpoint", "read_tuning",
    "recover_store", "reject_checkpoints", "remove_checkpoints", "verify_checkpoints",
]  # fmt: skip

__version__ = "0.1.0"

_HOMES = {
    "api": (
        "CheckpointEngine", "OpenCheckpoint", "StoredState", "StoredTensor", "SyncCheckpointEngine", "list_checkpoints",
        "load", "load_sync", "open_checkpoint",
    ),
    "convert": ("Exported", "Imported", "export_checkpoint", "import_checkpoint"),
    "engine": ("CheckpointProgress", "Decisions", "Distribution", "EngineStatistics", "PendingCheckpoint"),
    "format": ("CheckpointInfo", "Restored"),
    "group": ("Group",),
    "state": ("FlatShard", "RNGState", "Stateful"),
    "shelf": ("Shelf",),
    "store": ("SpaceNeeded",),
    "telemetry": ("Stage",),
    "training": ("TrainingStep",),
    "training.data": ("ResumableLoader", "ResumableSampler"),
    "training.policy": (
        "Adaptive", "CheckFreqInterval", "EverySeconds", "EverySteps", "PCcheckInterval", "Policy", "YoungDaly",
    ),
    "tuning": ("Measurement", "Point", "TunedSettings", "Tuning", "read_tuning"),
    "upkeep": (
        "CheckedCheckpoint", "Comparison", "Damage", "Description", "LeafDifference", "Recovery", "Removal",
        "Verification", "compare_checkpoints", "copy_checkpoint", "describe_checkpoint", "pin_checkpoint",
        "recover_store", "reject_checkpoints", "remove_checkpoints", "verify_checkpoints",
    ),
}  # fmt: skip
"""Where the public names come from; the others are errors."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes a second that ``pccheck --help`` need not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((room for room, names in _HOMES.items() if name in names), "errors")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
