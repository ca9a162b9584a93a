# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a user gets before it is durable: a view of the engine's :class:`.flight.Flight`."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from pccheck_async.engine.flight import CheckpointProgress, Flight
from pccheck_async.format import CheckpointInfo, Reach, check_reach

__all__ = ["PendingCheckpoint", "flight_of"]


class PendingCheckpoint:
    """The result of ``checkpoint()``. Usable from any thread and any event loop; ``await pending`` waits for durable.

    With ``on_busy="skip"`` and ``max_in_flight`` checkpoints in flight nothing is captured, and this object stands for
    the newest checkpoint in flight (:attr:`skipped`): it counts as captured, and is durable when that one is.
    """

    __slots__ = ("_flight", "_skipped")

    def __init__(self, flight: Flight, *, skipped: int | None = None) -> None:
        self._flight = flight
        self._skipped = skipped  # the step that is not saved

    @property
    def step(self) -> int:
        """The user's number of the step."""
        return self._flight.step if self._skipped is None else self._skipped

    @property
    def counter(self) -> int:
        """The engine's number; checkpoints are admitted in the order of their counters."""
        return self._flight.counter

    @property
    def name(self) -> str | None:
        """The user's name for the checkpoint; None if it has none, or was skipped."""
        return None if self.skipped else self._flight.name

    @property
    def nbytes(self) -> int | None:
        """Bytes of the checkpoint's tensors; None until its turn has come, and if it was skipped."""
        return None if self.skipped else self._flight.nbytes

    @property
    def skipped(self) -> bool:
        """Whether nothing was captured, as others were in flight."""
        return self._skipped is not None

    @property
    def superseded(self) -> bool:
        """Whether newer checkpoints became durable first and made this one pointless; it was dropped on purpose."""
        return not self.skipped and self._flight.superseded

    @property
    def progress(self) -> CheckpointProgress:
        """How far the checkpoint is, or, if it was skipped, how far the one is that it stands for. Never blocks."""
        progress = self._flight.progress
        return replace(progress, phase="skipped") if self.skipped else progress

    async def captured(self) -> None:
        """Wait until the capture is complete: the state may be changed from then on.

        Cancellation: only stops the waiting.

        Raises:
            CheckpointError: the checkpoint failed before its capture was complete.
        """
        await (asyncio.sleep(0) if self.skipped else self._flight.captured())

    def wait_captured(self, timeout: float | None = None) -> None:
        """Block until the capture is complete, for code that is not async (see :meth:`captured`).

        Raises TimeoutError.
        """
        if not self.skipped:
            self._flight.wait_captured(timeout)

    async def durable(self) -> CheckpointInfo:
        """Wait until the checkpoint is committed on disk.

        For a checkpoint that is for memory alone this waits until a newer one is on disk, or the engine has saved it as
        it closes (see :meth:`reached`).

        Durability: the returned checkpoint survives power loss. For a superseded or skipped one it is a newer one, for
            one that was rejected in flight the newest that is not.

        Cancellation: only stops the waiting; the checkpoint goes on.

        Raises:
            NoCheckpointError: it was rejected in flight, and all others were removed meanwhile.
            CheckpointError: it failed; older checkpoints are untouched, and nothing of it was committed, unless
                ``close`` gave up at its deadline: then the next opening may find it.
            StoreFailedError: a flush or a commit record failed: no later checkpoint of this engine succeeds either, and
                the next opening may find this one.
        """
        self._warn_if_in_memory_alone()
        return await self._flight.durable()

    def __await__(self) -> Generator[Any, None, CheckpointInfo]:
        return self.durable().__await__()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Block until the checkpoint is durable, for code that is not async (see :meth:`durable`).

        Raises TimeoutError.
        """
        if timeout is None and not self._flight.on_disk:  # else TimeoutError says where it is
            self._warn_if_in_memory_alone()
        return self._flight.result(timeout)

    def _warn_if_in_memory_alone(self) -> None:
        flight = self._flight
        if not flight.on_disk and not flight.over:  # a loop that waits for it before it saves on waits for ever
            text = (
                f"the checkpoint of step {flight.step} is for memory alone: this waits until a newer one is on disk, "
                "or the engine is closed; reached('memory') and wait_reached('memory') wait until it is in memory"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    async def reached(self, tier: Reach) -> None:
        """Wait until the checkpoint is committed in a tier: "memory" survives the process, "disk" a loss of power.

        In "replicas" the checkpoint, or a newer one, is in the memory of other hosts, too: it survives the loss of as
        many hosts as ``MemoryTier.replicas``. In "remote" it, or a newer one, is in the bucket of the engine's drain.

        A checkpoint that is for memory alone reaches the disk when a newer one does, or when the engine's context is
        left.

        Cancellation: only stops the waiting.

        Raises:
            CheckpointError: it failed; or the engine has no such tier; or it is on disk, and was not saved in memory;
                or another host has no copy; or the drain stopped, or was closed, before it was copied.
        """
        await (self._flight.durable() if check_reach(tier) == "disk" else self._flight.reached(tier))

    def wait_reached(self, tier: Reach, timeout: float | None = None) -> None:
        """Block until the checkpoint is committed in a tier, for code that is not async (see :meth:`reached`).

        Raises TimeoutError.
        """
        if check_reach(tier) == "disk":
            self._flight.result(timeout)
        else:
            self._flight.wait_reached(tier, timeout)

    def done(self) -> bool:
        """Return whether the checkpoint is durable, superseded or failed."""
        return self._flight.over

    def __repr__(self) -> str:
        return f"<PendingCheckpoint step={self.step} counter={self.counter} {self.progress.phase}>"


def flight_of(pending: PendingCheckpoint) -> Flight:
    """Return the flight of a checkpoint; if it was skipped, the flight of the checkpoint that it stands for."""
    return pending._flight
