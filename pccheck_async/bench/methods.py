# SPDX-License-Identifier: Apache-2.0
"""The methods of saving that ``pccheck bench`` compares, each used as documented: save, load, close.

A save ends when it would survive a power failure. Files that a method does not flush itself (:func:`flush_dcp`) are
flushed here, and that time is counted as the method's.
"""

from __future__ import annotations

import abc
import difflib
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from pccheck_async.api import SyncCheckpointEngine
from pccheck_async.bench.raw_disk import slot_file
from pccheck_async.medium.folder import sync

__all__ = ["METHODS", "Method", "PCcheck", "Tensors", "UnknownMethodError", "find_methods", "flush_dcp"]

Tensors = dict[str, torch.Tensor]
"""The state that is saved: CPU tensors by name."""


class UnknownMethodError(ValueError):
    """There is no method of this name, or a package that it needs is not installed."""


class Method(abc.ABC):
    """A method of saving that keeps its newest checkpoint in ``folder``, which must not exist and is created."""

    name: ClassVar[str]
    package: ClassVar[str] = ""
    """Package that must be installed in addition to torch; "" for none."""
    least_torch: ClassVar[tuple[int, int]] = (2, 4)
    copies: ClassVar[int] = 2
    """Most checkpoints that the method has on the disk at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    @classmethod
    def why_not(cls) -> str | None:
        """Return why the method cannot run here; None if it can."""
        if cls.package and find_spec(cls.package) is None:
            return f"{cls.package} is not installed: pip install {cls.package}"
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < cls.least_torch:
            return "it needs torch {}.{} or newer".format(*cls.least_torch)
        return None

    @abc.abstractmethod
    def save(self, tensors: Tensors, step: int) -> Callable[[], object]:
        """Start to save; on return the tensors may be changed. Calling the result blocks until the save is durable."""

    @abc.abstractmethod
    def load(self, into: Tensors) -> int:
        """Fill tensors of the same names and shapes from the newest checkpoint, in place; return the step of that."""

    def remove_older(self) -> None:
        """Delete all folders of checkpoints but the newest one's; not timed."""
        for path in self._folders()[:-1]:
            shutil.rmtree(path)

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), key=_step)

    def close(self) -> None:
        """Wait for saves in progress, and free the method's resources."""
        return


class PCcheck(Method):
    """``engine.checkpoint(state)`` with every default: the call returns when the state is captured."""

    name = "pccheck"
    copies = 3

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._engine = SyncCheckpointEngine(folder).open()

    def save(self, tensors: Tensors, step: int) -> Callable[[], object]:
        return self._engine.checkpoint(dict(tensors), step=step).result

    def load(self, into: Tensors) -> int:
        info = self._engine.restore(dict(into))
        if info is None:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        return info.step

    def free_slot(self) -> Path:
        """Return a slot file that no durable checkpoint uses, and that a later one will be written into."""
        return slot_file(self.folder, committed=False)

    def close(self) -> None:
        self._engine.close()


class _OneFile(Method):
    """Writes a new file, fsync, renames it over the old one, fsync of the folder; training waits for all of that."""

    @property
    def file(self) -> Path:
        """The file of the checkpoint; it is loaded by mapping it and copying out of it."""
        return self.folder / "checkpoint.pt"

    def save(self, tensors: Tensors, step: int) -> Callable[[], object]:
        temporary = self.file.with_suffix(".tmp")
        self._write(temporary, tensors, step)
        sync(temporary)  # or the name could come to stand for bytes that were never written
        temporary.rename(self.file)
        sync(self.folder)  # or the old name could come back
        return lambda: None  # the save was durable when it returned

    @abc.abstractmethod
    def _write(self, file: Path, tensors: Tensors, step: int) -> None: ...


class TorchSave(_OneFile):
    """``torch.save``."""

    name = "torch"

    def _write(self, file: Path, tensors: Tensors, step: int) -> None:
        torch.save({"step": step, "tensors": tensors}, file)

    def load(self, into: Tensors) -> int:
        saved = torch.load(self.file, weights_only=True, mmap=True)
        for name, tensor in into.items():
            tensor.copy_(saved["tensors"][name])
        return int(saved["step"])


class Safetensors(_OneFile):
    """``safetensors.torch.save_file``."""

    name = package = "safetensors"

    def _write(self, file: Path, tensors: Tensors, step: int) -> None:
        from safetensors.torch import save_file

        save_file(tensors, file, {"step": str(step)})

    def load(self, into: Tensors) -> int:
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            for name, tensor in into.items():
                tensor.copy_(file.get_tensor(name))
            return int(file.metadata()["step"])


class Dcp(Method):
    """``torch.distributed.checkpoint.save`` with two writer threads; training waits until the save is durable."""

    name = "dcp"
    least_torch = (2, 7)  # dcp.save(no_dist=True)

    def save(self, tensors: Tensors, step: int) -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import save

        target = self.folder / f"step-{step}"
        save({"tensors": tensors}, storage_writer=self._writer(target), no_dist=True)
        flush_dcp(target)
        return lambda: None

    def load(self, into: Tensors) -> int:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        newest = self._folders()[-1]
        load({"tensors": into}, storage_reader=FileSystemReader(newest), no_dist=True)
        return _step(newest)

    def _writer(self, target: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(target, thread_count=2)


class DcpAsync(Dcp):
    """``dcp.async_save`` with a stager that reuses its memory: the call returns when the state is staged."""

    name = "dcp-async"
    least_torch = (2, 9)  # DefaultStager

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._owns_group = not dist.is_initialized()
        if self._owns_group:  # async_save insists on one; this one has this process alone
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        names = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")
        self._stager = DefaultStager(StagingOptions(**dict.fromkeys(names, False)))
        self._last: Any = None

    def save(self, tensors: Tensors, step: int) -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        target = self.folder / f"step-{step}"
        saving: Any = async_save({"tensors": tensors}, storage_writer=self._writer(target), async_stager=self._stager)
        self._last = saving

        def wait() -> None:
            saving.result()
            flush_dcp(target)

        return wait

    def close(self) -> None:
        with suppress(Exception):  # its waiter got the error
            if self._last is not None:
                self._last.result()
        self._stager.close()
        if self._owns_group:
            torch.distributed.destroy_process_group()


METHODS: dict[str, type[Method]] = {kind.name: kind for kind in (PCcheck, TorchSave, Safetensors, Dcp, DcpAsync)}
"""All methods by name, also those that cannot run here."""


def find_methods(names: Sequence[str]) -> list[type[Method]]:
    """Return the methods of these names, each once, and ``pccheck`` first; without names all that can run here.

    Raises:
        UnknownMethodError: a name is unknown (the message suggests the nearest), or the method cannot run here.
    """
    if not names:
        return [kind for kind in METHODS.values() if kind.why_not() is None]
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownMethodError(f"there is no method {name!r}{hint} There are: {', '.join(METHODS)}")
        if reason := METHODS[name].why_not():
            raise UnknownMethodError(f"{name} cannot run here: {reason}")
    return [METHODS[name] for name in dict.fromkeys((PCcheck.name, *names))]


def flush_dcp(checkpoint: Path) -> None:
    """Flush the files that DCP's ``FileSystemWriter`` does not (in torch 2.13 even with ``sync_files=True``).

    Otherwise a power failure could destroy any of them, and so the checkpoint.
    """
    sync(checkpoint / ".metadata")  # DCP calls fsync before Python's buffer is written: at times all of it
    sync(checkpoint)  # the names of the ranks' files, and the rename to `.metadata`
    sync(checkpoint.parent)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
