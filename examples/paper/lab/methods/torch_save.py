"""``torch.save`` in its three strengths; training waits for all of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from examples.paper.lab.methods.base import Done, Handle, Method, State
from examples.paper.lab.methods.files import fill, sync_folder

__all__ = ["TorchSave", "TorchSaveFsync", "TorchSaveRename", "load_file", "write_safely"]


class TorchSave(Method):
    """Over the only file, nothing flushed: a kill inside leaves a torn file."""

    name = "torch.save"
    durable = atomic = False
    resumable = True

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint.pt"

    def save(self, state: State, step: int) -> Handle:
        """Write over the file."""
        torch.save({"step": step, "state": state}, self.file)
        return Done()

    def load(self, into: State) -> int:
        """Read the file."""
        return load_file(self.file, into)


class TorchSaveFsync(TorchSave):
    """Over the only file, and flushed: safe between two saves, not inside one."""

    name = "torch.save + fsync"
    durable = True

    def save(self, state: State, step: int) -> Handle:
        """Write over the file and flush it."""
        with self.file.open("wb") as file:
            torch.save({"step": step, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        return Done()


class TorchSaveRename(TorchSave):
    """Into a new file that takes the old one's name once it is flushed, the folder flushed too: always safe."""

    name = "torch.save + fsync + rename"
    durable = atomic = True

    def save(self, state: State, step: int) -> Handle:
        """Replace the file."""
        write_safely({"step": step, "state": state}, self.file)
        return Done()


def write_safely(saved: State, file: Path) -> None:
    """Replace a file such that a crash at any moment leaves the old or the new one, whole."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as output:
        torch.save(saved, output)
        output.flush()
        os.fsync(output.fileno())  # or the name could come to stand for bytes that were never written
    temporary.rename(file)
    sync_folder(file.parent)  # or the old name could come back


def load_file(file: Path, into: State) -> int:
    """Fill a state from a file that a benchmark wrote itself: the arrays among random numbers need the unpickler."""
    saved = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    fill(into, saved["state"])
    step: int = saved["step"]
    return step
