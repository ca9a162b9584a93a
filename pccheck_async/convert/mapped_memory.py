# SPDX-License-Identifier: Apache-2.0
"""Tensors in mapped files, whose pages are given back to the kernel: so states larger than memory can be imported."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from pccheck_async.medium.folder import reserve
from pccheck_async.medium.mapping import libc, map_file

__all__ = ["give_back", "given_back", "tensors_in_a_file"]

_MADV_PAGEOUT: Final = 21
"""``MADV_PAGEOUT``, from Linux 5.4 on: writes pages back and frees them; they are read again when needed."""
_SECONDS: Final = 0.05
_ALIGNMENT: Final = 64


def tensors_in_a_file(folder: Path, wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Return uninitialised tensors of these shapes and dtypes, in a mapped file without a name.

    The file is in ``folder``, or the nearest folder above that exists. Raises OSError if there is no space for it.
    """
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted]
    whole = sum(size + -size % _ALIGNMENT for size in sizes)
    if not whole:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]
    there = next(above for above in (folder, *folder.absolute().parents) if above.is_dir())
    with tempfile.TemporaryFile(dir=there) as file:
        reserve(file.fileno(), whole)  # else a full disk would be a SIGBUS
        memory = map_file(file.fileno(), whole, sync=False)
    tensors, start = [], 0
    for size, (shape, dtype) in zip(sizes, wanted, strict=True):
        flat = torch.frombuffer(memory[start : start + size], dtype=torch.uint8) if size else torch.empty(0)
        tensors.append(flat.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype))
        start += size + -size % _ALIGNMENT
    return tensors


def give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of mapped tensors' pages; their contents stay in the file."""
    for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes > 0:
            libc.madvise(start, nbytes, _MADV_PAGEOUT)


@contextmanager
def given_back(values: Iterable[Any]) -> Iterator[None]:
    """Free the memory of the tensors among ``values`` every 0.05 s, in a thread, until the context is left."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(_SECONDS):
            give_back(tensors)

    thread = threading.Thread(target=work, name="pccheck-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
