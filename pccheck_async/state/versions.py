"""What tells that tensors changed: torch's version counters, and where their memory is.

It is no proof that they did not: fused optimizers and batch normalisation do not count, writes through ``.data``,
numpy or DLPack neither, and torch counts an operation after it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch

__all__ = ["Versions"]

_version: Final = attrgetter("_version")
_storage: Final = torch.Tensor.untyped_storage
_address: Final = torch.UntypedStorage.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes


class Versions:
    """Tensors as they are now.

    Args:
        paths: How they are called.
        tensors: The tensors; held, and with them their memory.
    """

    def __init__(self, paths: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._paths = paths
        self._tensors = tensors
        self._then = self._now()

    def changed(self) -> str | None:
        """Return the path of one that changed since, None where none is known to have."""
        now = self._now()
        if now == self._then:
            return None
        then_each, now_each = zip(*self._then, strict=True), zip(*now, strict=True)
        pairs = zip(self._paths, then_each, now_each, strict=True)
        return next(path for path, before, after in pairs if before != after)

    def path_of(self, others: Iterable[torch.Tensor]) -> str | None:
        """Return the path of the first tensor that lies in the memory of one of ``others``, None where none does."""
        storages = {*map(_memory_of, others)} - {0}
        pairs = zip(self._paths, self._then[1], strict=True)
        return next((path for path, address in pairs if address in storages), None)

    def _now(self) -> tuple[list[int], list[int], list[int]]:
        storages: list[Any] = [*map(_storage, self._tensors)]
        return self._counts(), [*map(_address, storages)], [*map(_nbytes, storages)]

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
