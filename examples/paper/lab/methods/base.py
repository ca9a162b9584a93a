"""What every way of saving looks like to a benchmark."""

from __future__ import annotations

import abc
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch

__all__ = ["Background", "Done", "Handle", "Method", "State", "UnsupportedError"]

State = dict[str, Any]
"""Nested dicts and lists of tensors and plain values, as ``state_dict()`` gives them; the tensors are the live ones."""


class UnsupportedError(Exception):
    """A method cannot save such a state, or not on such a device; the message is the reason."""


class Handle(abc.ABC):
    """A save that was started."""

    @abc.abstractmethod
    def captured(self) -> None:
        """Block until training may change the state; raises what made the capture fail."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the method calls the checkpoint saved; raises what made it fail."""


class Done(Handle):
    """A save that was over when it returned."""

    def captured(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""


class Background(Handle):
    """A save of which futures tell.

    Args:
        saved: Done when the checkpoint is saved.
        captured: Done when training may go on; None where it may already.
    """

    def __init__(self, saved: Future[Any], captured: Future[Any] | None = None) -> None:
        self._saved, self._captured = saved, captured

    def captured(self) -> None:
        """Wait for the capture."""
        if self._captured is not None:
            self._captured.result()

    def wait(self) -> None:
        """Wait for the save."""
        self._saved.result()


class Method(abc.ABC):
    """A way of saving, which keeps its newest checkpoint in a folder of its own.

    The flags say what the tests found, on ext4 and with the newest version of each peer; see
    ``tests/tools/test_paper_methods.py``.

    Args:
        folder: Where the checkpoints go; made where it does not exist.
    """

    name: ClassVar[str]
    """What rows and command lines call it."""
    durable: ClassVar[bool]
    """Once ``wait()`` returned, what the device holds is enough to load the checkpoint: a power failure spares it."""
    atomic: ClassVar[bool]
    """A process that is killed while it saves leaves a whole checkpoint, this one or the one before."""
    resumable: ClassVar[bool]
    """All of a training state comes back: optimizer, random numbers, plain values, each with its type."""
    overlaps: ClassVar[bool] = False
    """The capture runs beside the next forward and backward; ``captured()`` waits for what is left of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    @classmethod
    def why_not(cls) -> str | None:
        """Return why the method cannot run here, None where it can."""
        return None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the method what changes the state, before the first save; only those that overlap want to know."""
        del optimizer

    @abc.abstractmethod
    def save(self, state: State, step: int) -> Handle:
        """Start to save; training may run forward and backward when this returned.

        Raises:
            UnsupportedError: the method cannot save such a state.
        """

    @abc.abstractmethod
    def load(self, into: State) -> int:
        """Fill a state of the same structure with the newest checkpoint, tensors in place, and return its step."""

    def tidy(self) -> None:  # noqa: B027 - most have nothing to delete
        """Delete older checkpoints; not timed, so methods that write over theirs have no advantage by that."""

    def close(self) -> None:  # noqa: B027 - nor anything to let go
        """Wait for what is still being saved, and let everything go."""

    def __enter__(self) -> Method:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
