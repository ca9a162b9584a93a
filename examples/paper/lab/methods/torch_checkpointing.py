"""Meta's ``torch_checkpointing``, DCP's successor: staged into shared memory by a thread, written by a process."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.paper.lab.methods.base import Background, Handle, Method, State
from examples.paper.lab.methods.files import fill, missing, newest, remove_older, target

__all__ = ["TorchCheckpointing"]


class TorchCheckpointing(Method):
    """``CheckpointManager`` with asynchronous staging, as its manual says for machines without CUDA.

    Its direct I/O is off: where a filesystem takes only aligned transfers (ext4, XFS), version 0.1.1 fails with EINVAL
    when it closes a file of any other length.
    """

    name = "torch_checkpointing"
    durable = False
    atomic = resumable = overlaps = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        cuda = torch.cuda.is_available()
        staging = CheckpointStagerConfig(use_pinned_memory=cuda, use_non_blocking_copy=cuda)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether it is installed."""
        return missing("torch_checkpointing")

    def save(self, state: State, step: int) -> Handle:
        """Stage, and write in the background; a save that is still on its way is waited for."""
        saved = self._manager.save(str(target(self.folder, step)), {"state": state})
        assert saved is not None
        return Background(saved, self._manager._staging_future)

    def load(self, into: State) -> int:
        """Read into the tensors of ``into``."""
        step, place = newest(self.folder)
        loaded = self._manager.load(str(place), {"state": into})
        fill(into, loaded["state"])
        return step

    def tidy(self) -> None:
        """Delete older checkpoints."""
        remove_older(self.folder)

    def close(self) -> None:
        """Wait for the last save and end the process."""
        self._manager.close()
