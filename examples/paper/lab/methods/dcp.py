"""PyTorch's ``torch.distributed.checkpoint``: a folder for each checkpoint, whose ``.metadata`` is written last."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from examples.paper.lab.methods.base import Background, Done, Handle, Method, State
from examples.paper.lab.methods.files import newest, remove_older, target

__all__ = ["DcpAsyncProcess", "DcpAsyncThread", "DcpSave"]

_MARKER = ".metadata"


class _Group:
    """The process group that ``async_save`` wants, of this process alone, while a method is open."""

    def __init__(self) -> None:
        self._users, self._own = 0, False

    def enter(self) -> None:
        if not self._users and not dist.is_initialized():
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
            self._own = True
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if not self._users and self._own:
            dist.destroy_process_group()
            self._own = False


_group = _Group()


class _Dcp(Method):
    """The files are flushed, their folders are not: a power failure takes back the rename of ``.metadata``."""

    durable = False
    atomic = resumable = True

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether this torch saves from one process beside a process group."""
        if "no_dist" not in inspect.signature(save).parameters:
            return f"torch {torch.__version__} has no dcp.save(no_dist=True) (2.7 or newer has)"
        return None

    def load(self, into: State) -> int:
        """Read into the tensors of ``into``."""
        step, place = newest(self.folder, _MARKER)
        load({"state": into}, storage_reader=FileSystemReader(place), no_dist=True)
        return step

    def tidy(self) -> None:
        """Delete older checkpoints."""
        remove_older(self.folder, _MARKER)


class DcpSave(_Dcp):
    """``dcp.save`` with two writer threads, which is its fastest here; training waits."""

    name = "dcp.save"

    def save(self, state: State, step: int) -> Handle:
        """Write a new folder."""
        writer = FileSystemWriter(target(self.folder, step), thread_count=2)
        save({"state": state}, storage_writer=writer, no_dist=True)
        return Done()


class _Async(_Dcp):
    kind: ClassVar[str]
    shared: ClassVar[bool]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        _group.enter()
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=self.shared,
                use_async_staging=self.overlaps,
                use_non_blocking_copy=cuda,
            )
        )
        self._last: Handle | None = None

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether this torch has stagers."""
        try:
            from torch.distributed.checkpoint.staging import DefaultStager  # noqa: F401
        except ImportError:
            return f"torch {torch.__version__} has no DefaultStager (2.9 or newer has)"
        return None if dist.is_available() else "this build of torch has no torch.distributed"

    def save(self, state: State, step: int) -> Handle:
        """Stage, and write in the background; a save that is still on its way is waited for: they share the memory."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self._last is not None:
            self._last.wait()
        response: Any = async_save(
            {"state": state},
            storage_writer=FileSystemWriter(target(self.folder, step), thread_count=2),
            async_checkpointer_type=AsyncCheckpointerType(self.kind),
            async_stager=self._stager,
        )
        staged, saved = getattr(response, "staging_completion", None), getattr(response, "upload_completion", response)
        self._last = Background(saved, staged)
        return self._last

    def close(self) -> None:
        """Wait for the last save, and let the staging memory go."""
        try:
            if self._last is not None:
                self._last.wait()
        finally:
            self._last = None
            self._stager.close()
            _group.leave()


class DcpAsyncThread(_Async):
    """Staged beside the next step by a thread, written by another."""

    name = "dcp.async_save thread"
    overlaps = True
    kind = "thread"
    shared = False


class DcpAsyncProcess(_Async):
    """Staged into shared memory, written by a process of its own."""

    name = "dcp.async_save process"
    kind = "process"
    shared = True
