"""Lightning's ``AsyncCheckpointIO``: the state is cloned, and a thread writes it as Lightning always does."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from examples.paper.lab.methods.base import Handle, Method, State
from examples.paper.lab.methods.files import missing
from examples.paper.lab.methods.torch_save import load_file

__all__ = ["LightningAsync"]


class LightningAsync(Method):
    """Nothing but ``teardown()`` tells when a save is over; here an empty job behind it does.

    The file is moved from the system's temporary folder, nothing flushed: atomic where both are on one filesystem.
    """

    name = "Lightning AsyncCheckpointIO"
    durable = False
    atomic = resumable = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether it is installed."""
        return missing("lightning")

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint.ckpt"

    def save(self, state: State, step: int) -> Handle:
        """Clone the state and queue it."""
        self._io.save_checkpoint({"step": step, "state": state}, self.file)
        executor = self._io._executor
        assert executor is not None  # saving makes it
        return _Queued(self._io, executor.submit(lambda: None))

    def load(self, into: State) -> int:
        """Read the file."""
        return load_file(self.file, into)

    def close(self) -> None:
        """Wait for what is queued."""
        self._io.teardown()


class _Queued(Handle):
    def __init__(self, io: Any, behind: Future[None]) -> None:
        self._io, self._behind = io, behind

    def captured(self) -> None:
        pass

    def wait(self) -> None:
        self._behind.result()
        if self._io._error is not None:
            raise self._io._error
