"""What tells that tensors changed: torch's version counters, and where their memory is.

It is no proof that they did not: fused optimizers and batch normalisation do not count, writes through ``.data``,
numpy or DLPack neither, and torch counts an operation after it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch

__all__ = ["StorageMemory", "Versions"]

StorageMemory: TypeAlias = tuple[list[int], list[int]]
"""Addresses and sizes of storages."""

_version: Final = attrgetter("_version")
_storage: Final = torch.Tensor.untyped_storage
_address: Final = torch.UntypedStorage.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes


class Versions:
    """Tensors as they are now.

    Args:
        paths: How they are called.
        tensors: The tensors; held, and with them their memory.
        memory: Where their storages are and how large, where that is known.
    """

    def __init__(
        self, paths: Sequence[str], tensors: Sequence[torch.Tensor], memory: StorageMemory | None = None
    ) -> None:
        self._paths = paths
        self._tensors = tensors
        self._counts_then = self._counts()
        self.memory: Final = self._memory() if memory is None else memory

    def changed(self) -> str | None:
        """Return the path of one that changed since, None where none is known to have."""
        counts, memory = self._counts(), self._memory()
        if counts == self._counts_then and memory == self.memory:
            return None
        then_each = zip(self._counts_then, *self.memory, strict=True)
        pairs = zip(self._paths, then_each, zip(counts, *memory, strict=True), strict=True)
        return next(path for path, before, after in pairs if before != after)

    def path_of(self, others: Iterable[torch.Tensor]) -> str | None:
        """Return the path of the first tensor that lies in the memory of one of ``others``, None where none does."""
        storages = {*map(_memory_of, others)} - {0}
        pairs = zip(self._paths, self.memory[0], strict=True)
        return next((path for path, address in pairs if address in storages), None)

    def _memory(self) -> StorageMemory:
        storages: list[Any] = [*map(_storage, self._tensors)]
        return [*map(_address, storages)], [*map(_nbytes, storages)]

    def _counts(self) -> list[int]:
        try:
            return [*map(_version, self._tensors)]
        except RuntimeError:  # tensors made in inference mode have no counter
            return [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]


def _memory_of(tensor: torch.Tensor) -> int:
    """Where the storage of any optimizer's parameter begins, 0 where it has none: sparse, or a wrapper of others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
