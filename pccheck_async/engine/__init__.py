"""The order of one checkpoint: admit, capture, write, commit, end; and restore.

The engine knows a policy as a protocol, and of training steps what :class:`TrainingHooks` asks.
It may import: store and what is below.
"""

from pccheck_async.engine.config import Auto, Decisions, EngineConfig, decide
from pccheck_async.engine.core import EngineCore
from pccheck_async.engine.handoff import Handoff, block_on, run
from pccheck_async.engine.loop import EngineLoop
from pccheck_async.engine.overlap import Guard
from pccheck_async.engine.pending import CheckpointProgress, PendingCheckpoint
from pccheck_async.engine.policy import Decision, Policy, SaveReport, StepReport, TrainingHooks
from pccheck_async.engine.statistics import Distribution, EngineStatistics

__all__ = [
    "Auto",
    "CheckpointProgress",
    "Decision",
    "Decisions",
    "Distribution",
    "EngineConfig",
    "EngineCore",
    "EngineLoop",
    "EngineStatistics",
    "Guard",
    "Handoff",
    "PendingCheckpoint",
    "Policy",
    "SaveReport",
    "StepReport",
    "TrainingHooks",
    "block_on",
    "decide",
    "run",
]
