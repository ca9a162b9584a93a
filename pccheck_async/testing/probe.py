# SPDX-License-Identifier: Apache-2.0
"""A look inside an engine, for tests: its parts, by names that stay when the parts move."""

from __future__ import annotations

import asyncio

from pccheck_async.api import EngineBase
from pccheck_async.engine import EngineCore, EngineLoop, InlineCaptures, Scheduler
from pccheck_async.store import Store
from pccheck_async.training import TrainingRun

__all__ = ["Probe", "probe"]


class Probe:
    """The parts of one engine; those of an open engine raise ClosedError if it was never opened.

    Attributes:
        core: The engine without its facade: state, counts, guard, checkpoints in flight, loop.
        training: Its policy, step contexts and preemption.
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
        """Where checkpoints go."""
        return self.core.assembly.store

    @property
    def scheduler(self) -> Scheduler:
        """Runs checkpoints."""
        return self.core.assembly.scheduler

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Those of the checkpoints in flight, on the engine's loop."""
        return list(self.scheduler.tasks.values())

    @property
    def inline_captures(self) -> InlineCaptures:
        """Captures small states inside ``checkpoint()``."""
        return self.core.assembly.inline_captures

    def end_what_was_left_behind(self) -> None:
        """Close the parts that ``close(deadline=)`` left open, once nothing is stuck any more, and end the loop."""
        self.loop.call(self.core.assembly.close())
        self.loop.stop()


probe = Probe
