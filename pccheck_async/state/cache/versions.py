"""What tells that tensors changed: torch's version counters, and where their memory is.

It is no proof that they did not: fused optimizers and batch normalisation do not count, writes through ``.data``,
numpy or DLPack neither, and torch counts an operation after it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch

from pccheck_async.state.tensor_access import storage_address, untyped_storage

__all__ = ["StorageMemory", "Versions"]

StorageMemory: TypeAlias = tuple[list[int], list[int]]
"""Addresses and sizes of storages."""

_version: Final = attrgetter("_version")
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

    def changed(self) -> list[str]:
        """Return the paths of those that are known to have changed since."""
        counts, memory = self._counts(), self._memory()
        if counts == self._counts_then and memory == self.memory:
            return []
        then_each = zip(self._counts_then, *self.memory, strict=True)
        pairs = zip(self._paths, then_each, zip(counts, *memory, strict=True), strict=True)
        return [path for path, before, after in pairs if before != after]

    def paths_of(self, others: Iterable[torch.Tensor]) -> list[str]:
        """Return the paths of the tensors that lie in the memory of one of ``others``."""
        storages = {*map(storage_address, others)} - {0}
        return [path for path, address in zip(self._paths, self.memory[0], strict=True) if address in storages]

    def _memory(self) -> StorageMemory:
        storages: list[Any] = [*map(untyped_storage, self._tensors)]
        return [*map(_address, storages)], [*map(_nbytes, storages)]

    def _counts(self) -> list[int]:
        try:
            return [*map(_version, self._tensors)]
        except RuntimeError:  # tensors made in inference mode have no counter
            return [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]
