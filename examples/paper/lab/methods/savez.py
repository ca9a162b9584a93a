"""``numpy.savez``, for states that are some arrays and a few plain values; not for those of torch's optimizers."""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch

from examples.paper.lab.methods.base import Done, Handle, Method, State, UnsupportedError
from examples.paper.lab.methods.files import fill, sync_folder

__all__ = ["Savez", "SavezCompressed", "SavezCompressedDurable", "SavezDurable"]

_REST = "rest"


class Savez(Method):
    """Over the last file, nothing flushed; what is no array goes along as a literal of Python's."""

    name = "savez without fsync"
    durable = atomic = False
    resumable = True
    write: ClassVar[Callable[..., None]] = staticmethod(np.savez)

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint.npz"

    def save(self, state: State, step: int) -> Handle:
        """Write over the file."""
        with self.file.open("wb") as file:
            self._write(file, state, step)
        return Done()

    def load(self, into: State) -> int:
        """Read the file. Raises ValueError where a save was killed that wrote over it."""
        try:
            archive = np.load(self.file, allow_pickle=False)
        except (EOFError, zipfile.BadZipFile) as error:  # its directory is written last
            raise ValueError(f"{self.file} is torn: a save was killed that wrote over the only checkpoint") from error
        with archive as found:
            step, rest = ast.literal_eval(str(found[_REST]))
            for name in into:
                array = None if name in rest else found[name]
                if array is None:
                    into[name] = rest[name]
                else:
                    into[name] = fill(into[name], torch.from_numpy(array)) if _is_tensor(into[name]) else array
        return int(step)

    def _write(self, file: BinaryIO, state: State, step: int) -> None:
        arrays = {name: np.asarray(value) for name, value in state.items() if _is_array(value)}
        rest = repr((step, {name: value for name, value in state.items() if name not in arrays}))
        if _REST in arrays:
            raise UnsupportedError(f"an array is called {_REST!r}")
        self.write(file, **arrays, **{_REST: rest})


class SavezDurable(Savez):
    """Into a new file that takes the old one's name once it is flushed, the folder flushed too."""

    name = "savez + fsync + rename"
    durable = atomic = True

    def save(self, state: State, step: int) -> Handle:
        """Replace the file."""
        temporary = self.file.with_suffix(".tmp")
        with temporary.open("wb") as file:
            self._write(file, state, step)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.file)
        sync_folder(self.folder)
        return Done()


class SavezCompressed(Savez):
    """Compressed, over the last file."""

    name = "savez_compressed without fsync"
    write = staticmethod(np.savez_compressed)


class SavezCompressedDurable(SavezDurable):
    """Compressed, and durable."""

    name = "savez_compressed + fsync + rename"
    write = staticmethod(np.savez_compressed)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)
