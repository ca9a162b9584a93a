"""This package: captured before ``save`` returns, or beside the next forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from examples.paper.lab.methods.base import Handle, Method, State
from pccheck_async import PendingCheckpoint, StorageOptions, SyncCheckpointEngine
from pccheck_async.engine import Auto
from pccheck_async.medium.open_medium import IO, MediumName

__all__ = ["PCcheck", "PCcheckMapped", "PCcheckOverlapped"]


class _Pending(Handle):
    def __init__(self, pending: PendingCheckpoint, engine: SyncCheckpointEngine) -> None:
        self._pending, self._engine = pending, engine

    def captured(self) -> None:
        self._engine.wait_captured()

    def wait(self) -> None:
        self._pending.result()


class _Kept:
    """A dict that is wanted for itself, whatever object made it; the engine would ask for that object."""

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self) -> State:
        return self._state

    def load_state_dict(self, state_dict: State, /) -> None:
        self._state.clear()
        self._state.update(state_dict)


class PCcheck(Method):
    """``engine.checkpoint(state)`` as it comes: every default, nothing tuned for the benchmark.

    Args:
        folder: Of the store.
        max_in_flight: As the engine's (N), and so are the others.
        chunk_bytes: b.
        host_memory: Bytes.
        writers: p.
        io: What moves the bytes.
    """

    name = "pccheck"
    durable = atomic = resumable = True
    medium: ClassVar[MediumName] = "auto"

    def __init__(
        self,
        folder: Path,
        *,
        max_in_flight: int = 2,
        chunk_bytes: int | Auto = "auto",
        host_memory: int | Auto = "auto",
        writers: int | Auto = "auto",
        io: IO = "auto",
    ) -> None:
        super().__init__(folder)
        self.engine = SyncCheckpointEngine(
            folder,
            max_in_flight=max_in_flight,
            storage=StorageOptions(
                chunk_bytes=chunk_bytes, host_memory=host_memory, writers=writers, io=io, medium=self.medium
            ),
        ).open()

    def save(self, state: State, step: int) -> Handle:
        """Start a checkpoint."""
        return _Pending(self.engine.checkpoint(state, step=step, overlap=self.overlaps), self.engine)

    def load(self, into: State) -> int:
        """Restore in place."""
        state = {name: _Kept(value) if isinstance(value, dict) else value for name, value in into.items()}
        info = self.engine.restore(state)
        if info is None:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        into.update({name: value for name, value in state.items() if not isinstance(value, _Kept)})
        return info.step

    def close(self) -> None:
        """Drain and close the engine."""
        self.engine.close()


class PCcheckOverlapped(PCcheck):
    """With an optimizer attached: parameters and their optimizer state are captured beside the next step."""

    name = "pccheck overlapped"
    overlaps = True

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's steps wait for captures."""
        self.engine.attach(optimizer)


class PCcheckMapped(PCcheck):
    """Written through mapped files, whatever the filesystem: on tmpfs persistent memory is emulated so."""

    name = "pccheck mapped"
    medium = "mapped"
