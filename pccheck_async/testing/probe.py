# SPDX-License-Identifier: Apache-2.0
"""Access to the parts of an engine, for tests, by names that stay the same when the parts move."""

from __future__ import annotations

import asyncio

from pccheck_async.api import EngineBase
from pccheck_async.engine import EngineCore, EngineLoop, InlineCaptures, Scheduler
from pccheck_async.store import Store
from pccheck_async.training import TrainingRun

__all__ = ["Probe", "probe"]


class Probe:
    """The parts of one engine. Parts that exist only once it is open raise ClosedError if it was never opened.

    Attributes:
        core: The engine without its facade: state, counts, guard, checkpoints in flight, loop.
        training: The engine's policy, step contexts and preemption.
    """

    def __init__(self, engine: EngineBase) -> None:
        self.core: EngineCore = engine._core
        self.training: TrainingRun = engine._training

    @property
    def loop(self) -> EngineLoop:
        """The engine's own loop."""
        return self.core.loop

    @property
    def store(self) -> Store:
        """The engine's store."""
        return self.core.assembly.store

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which runs checkpoints."""
        return self.core.assembly.scheduler

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the checkpoints in flight, on the engine's loop."""
        return list(self.scheduler.tasks.values())

    @property
    def inline_captures(self) -> InlineCaptures:
        """The object that captures small states inside ``checkpoint()``."""
        return self.core.assembly.inline_captures

    def end_what_was_left_behind(self) -> None:
        """Close the parts that ``close(deadline=)`` left open, and stop the loop; no operation may hang any more."""
        self.loop.call(self.core.assembly.close())
        self.loop.stop()


probe = Probe
