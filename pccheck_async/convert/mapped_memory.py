# SPDX-License-Identifier: Apache-2.0
"""Memory that files back, so that states larger than memory can be imported: used pages go back to the kernel."""

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
"""From Linux 5.4 on. Nothing is lost by it: pages that are needed again are read again."""
_SECONDS: Final = 0.05
_ALIGNMENT: Final = 64


def tensors_in_a_file(folder: Path, wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Return tensors of these shapes and dtypes, of any content, in a file without a name.

    Raises OSError if ``folder``, or the nearest one above that is there, has no space for them.
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
    """Give the pages of mapped tensors back to the kernel; the contents stay."""
    for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes > 0:
            libc.madvise(start, nbytes, _MADV_PAGEOUT)


@contextmanager
def given_back(values: Iterable[Any]) -> Iterator[None]:
    """Give back the pages of the tensors among ``values`` again and again, while the body reads them."""
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
