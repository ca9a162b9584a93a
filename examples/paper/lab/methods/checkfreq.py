"""CheckFreq's two phases (FAST '21): a snapshot in memory beside the next step, persisted in the background."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from examples.paper.lab.methods.base import Background, Handle, Method, State
from examples.paper.lab.methods.torch_save import load_file, write_safely

__all__ = ["CheckFreq"]


class CheckFreq(Method):
    """One checkpoint on its way at a time; the snapshot's memory is kept for the next one.

    What an attached optimizer changes is copied beside forward and backward; all else (BatchNorm's statistics change in
    forward) before ``save`` returns, which CheckFreq's own code misses. It also writes over the final name without a
    flush; here the file is replaced as it should be.
    """

    name = "CheckFreq"
    durable = atomic = resumable = overlaps = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._threads = ThreadPoolExecutor(1, "checkfreq")
        self._persisting: Future[None] | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint.pt"

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what this optimizer changes late."""
        self._optimizers.append(optimizer)

    def save(self, state: State, step: int) -> Handle:
        """Copy what must not wait; the rest, and writing, goes to the thread."""
        if self._persisting is not None:
            self._persisting.result()
        late = {tensor.data_ptr() for tensor in self._changed()}
        snapshot = self._copied(state, (), late)
        captured: Future[None] = self._threads.submit(self._copy_late, snapshot)
        self._persisting = self._threads.submit(self._persist, captured, snapshot, step)
        return Background(self._persisting, captured)

    def load(self, into: State) -> int:
        """Read the file."""
        return load_file(self.file, into)

    def close(self) -> None:
        """Wait for the thread."""
        self._threads.shutdown()
        self._kept.clear()

    def _changed(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for values in optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))

    def _copied(self, value: Any, path: tuple[Any, ...], late: set[int]) -> Any:
        if isinstance(value, torch.Tensor):
            return _Late(path, value) if value.data_ptr() in late else value.detach().clone()
        if isinstance(value, dict):
            copied = copy.copy(value)
            copied.update((key, self._copied(each, (*path, key), late)) for key, each in value.items())
            return copied
        if type(value) is list:
            return [self._copied(each, (*path, at), late) for at, each in enumerate(value)]
        if type(value) is tuple:
            return tuple(self._copied(each, path, set()) for each in value)
        return value

    def _copy_late(self, snapshot: Any) -> None:
        """Replace what was left for later, in place."""
        items = snapshot.items() if isinstance(snapshot, dict) else enumerate(snapshot)
        for key, value in list(items):
            if isinstance(value, _Late):
                snapshot[key] = self._keep(value)
            elif isinstance(value, dict | list):
                self._copy_late(value)

    def _keep(self, late: _Late) -> torch.Tensor:
        kept = self._kept.get(late.path)
        if kept is None or kept.shape != late.tensor.shape or kept.dtype != late.tensor.dtype:
            kept = self._kept[late.path] = torch.empty_like(late.tensor, device="cpu", requires_grad=False)
        return kept.copy_(late.tensor.detach())

    def _persist(self, captured: Future[None], snapshot: State, step: int) -> None:
        captured.result()
        write_safely({"step": step, "state": snapshot}, self.file)


class _Late:
    """A tensor that is copied beside the next forward and backward, and where in the state it is."""

    def __init__(self, path: tuple[Any, ...], tensor: torch.Tensor) -> None:
        self.path, self.tensor = path, tensor
