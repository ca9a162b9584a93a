# SPDX-License-Identifier: Apache-2.0
"""The engine: takes a checkpoint through admission, capture, write, commit and end; and restores.

The engine sees a policy as a protocol, and training steps through :class:`TrainingHooks`.
It may import: store and the rooms below.
"""

from pccheck_async.engine.assembly import EngineParts
from pccheck_async.engine.caller import Caller, block_on, run
from pccheck_async.engine.capture import InlineCaptures
from pccheck_async.engine.config import (
    Auto,
    Decisions,
    Drain,
    EngineConfig,
    MemoryTier,
    StorageOptions,
    check_flag,
    decide,
)
from pccheck_async.engine.core import EngineCore, note_closing_failure_on
from pccheck_async.engine.drain import Draining
from pccheck_async.engine.drain_owner import UploadedParts
from pccheck_async.engine.flight import CheckpointProgress, Flight
from pccheck_async.engine.loop import EngineLoop, call_once
from pccheck_async.engine.memory import (
    MEMORY_ROOT,
    ORIGIN_NAME,
    Memory,
    check_own_folder,
    memory_folder,
    memory_prefix,
    memory_root,
    note_ignored,
    on_the_line,
)
from pccheck_async.engine.metrics import openmetrics, scalars
from pccheck_async.engine.overlap import Guard, StepHooks, hooks_of, hooks_of_all, unwrapped
from pccheck_async.engine.peers import Alone, Connected, Peers, Private, RestoreCandidate, RestoreCandidates, StepEnd
from pccheck_async.engine.pending import PendingCheckpoint, flight_of
from pccheck_async.engine.policy import Decision, Policy, SaveReport, StepReport, TrainingHooks
from pccheck_async.engine.scheduler import Scheduler
from pccheck_async.engine.statistics import Distribution, EngineStatistics

__all__ = [
    "MEMORY_ROOT",
    "ORIGIN_NAME",
    "Alone",
    "Auto",
    "Caller",
    "CheckpointProgress",
    "Connected",
    "Decision",
    "Decisions",
    "Distribution",
    "Drain",
    "Draining",
    "EngineConfig",
    "EngineCore",
    "EngineLoop",
    "EngineParts",
    "EngineStatistics",
    "Flight",
    "Guard",
    "InlineCaptures",
    "Memory",
    "MemoryTier",
    "Peers",
    "PendingCheckpoint",
    "Policy",
    "Private",
    "RestoreCandidate",
    "RestoreCandidates",
    "SaveReport",
    "Scheduler",
    "StepEnd",
    "StepHooks",
    "StepReport",
    "StorageOptions",
    "TrainingHooks",
    "UploadedParts",
    "block_on",
    "call_once",
    "check_flag",
    "check_own_folder",
    "decide",
    "flight_of",
    "hooks_of",
    "hooks_of_all",
    "memory_folder",
    "memory_prefix",
    "memory_root",
    "note_closing_failure_on",
    "note_ignored",
    "on_the_line",
    "openmetrics",
    "run",
    "scalars",
    "unwrapped",
]  # fmt: skip
