"""GPM's scheme (ASPLOS '22) on a disk: the live state is stored into a mapped shadow copy while training waits."""

from __future__ import annotations

import io
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from examples.paper.lab.methods.base import Done, Handle, Method, State
from examples.paper.lab.methods.files import fill, sync_folder

__all__ = ["GPM"]

_HEADER = struct.Struct("<QqQQL")  # save number, step, bytes of the tensors, bytes of the rest, checksum of these four
_PAGE = mmap.PAGESIZE


class GPM(Method):
    """Two halves of one mapped file in turn: store, drain, and only then the index that names the half.

    The port of GPM to SSDs flips the index before it drains. What is no tensor (GPM saves none of it) stands behind the
    tensors of a half.
    """

    name = "GPM"
    durable = atomic = resumable = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._halves: list[mmap.mmap] = []
        self._number = 0
        self._index = os.open(folder / "index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(self._index).st_size == 0:
            os.pwrite(self._index, bytes(2 * _PAGE), 0)
        sync_folder(folder)
        found = self._newest()
        if found is not None:
            self._number = found[0]

    def save(self, state: State, step: int) -> Handle:
        """Store the whole state; training waits."""
        leaves, structure = pytree.tree_flatten(state)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = io.BytesIO()
        others = [
            (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else _Plain(leaf) for leaf in leaves
        ]
        torch.save(pytree.tree_unflatten(others, structure), rest)
        nbytes, extra = sum(_aligned(tensor.nbytes) for tensor in tensors), rest.getvalue()
        number = self._number + 1
        half = self._half(number % 2, nbytes + len(extra))
        view = np.frombuffer(half, np.uint8)
        offset = 0
        for tensor in tensors:
            if tensor.nbytes:
                into = torch.from_numpy(view[offset : offset + tensor.nbytes])
                into.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
            offset += _aligned(tensor.nbytes)
        view[nbytes : nbytes + len(extra)] = np.frombuffer(extra, np.uint8)
        del view
        half.flush()  # drain before the index names it
        head = _HEADER.pack(number, step, nbytes, len(extra), 0)[:-4]
        os.pwrite(self._index, head + struct.pack("<L", zlib.crc32(head)), number % 2 * _PAGE)
        os.fdatasync(self._index)
        self._number = number
        return Done()

    def load(self, into: State) -> int:
        """Copy out of the half that the index names."""
        found = self._newest()
        if found is None:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        number, step, nbytes, length = found
        path = self.folder / f"half-{number % 2}"
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as half:
            half.madvise(mmap.MADV_SEQUENTIAL)
            shape = torch.load(io.BytesIO(half[nbytes : nbytes + length]), weights_only=False)
            view = np.frombuffer(half, np.uint8)
            fill(into, _Reader(torch.from_numpy(view)).read(shape))
            del view
        return step

    def close(self) -> None:
        """Unmap the halves."""
        for half in self._halves:
            half.close()
        self._halves.clear()
        os.close(self._index)

    def _half(self, which: int, nbytes: int) -> mmap.mmap:
        """Map a half, with room for so many bytes, its blocks reserved."""
        if not self._halves:
            for number in range(2):
                fd = os.open(self.folder / f"half-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    if os.fstat(fd).st_size < nbytes:
                        os.posix_fallocate(fd, 0, nbytes + nbytes // 8 + _PAGE)
                    os.fsync(fd)
                    self._halves.append(mmap.mmap(fd, 0))
                finally:
                    os.close(fd)
            sync_folder(self.folder)
        half = self._halves[which]
        if len(half) < nbytes:
            raise ValueError(f"the state grew to {nbytes} bytes; its shadow copy has {len(half)}")
        return half

    def _newest(self) -> tuple[int, int, int, int] | None:
        found = []
        for at in (0, _PAGE):
            *fields, checksum = _HEADER.unpack(data := os.pread(self._index, _HEADER.size, at))
            if fields[0] and zlib.crc32(data[:-4]) == checksum:
                found.append(tuple(fields))
        return max(found) if found else None


class _Plain:
    """A leaf that is no tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Reader:
    """Puts the tensors of a half back into the structure, in the order in which they were stored."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._offset = data, 0

    def read(self, shape: Any) -> Any:
        def leaf(value: Any) -> Any:
            if isinstance(value, _Plain):
                return value.value
            dtype, size = value
            tensor = torch.empty(size, dtype=dtype, device="meta")
            data = self._data[self._offset : self._offset + tensor.nbytes]
            self._offset += _aligned(tensor.nbytes)
            return data.view(dtype).reshape(size)

        return pytree.tree_map(leaf, shape, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _Plain) or (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.dtype)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
