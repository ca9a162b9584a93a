"""How the elements of two arrays of one dtype and shape differ, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.format import dtypes
from pccheck_async.format.manifest import TensorEntry

__all__ = ["Difference", "compare_elements"]

_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(slots=True)
class Difference:
    """Counts over all elements compared so far.

    Attributes:
        total: Elements.
        bits: Elements of which a bit differs.
        values: Those among them that differ as numbers: NaN equals NaN here, and 0.0 equals -0.0. None where the
            elements are no numbers, or torch cannot compute with their dtype.
        nans: Those among them of which exactly one is NaN.
        most_absolute: The largest absolute difference, infinite against finite included; None without numbers.
        most_relative: The largest absolute difference divided by the larger of the two magnitudes.
    """

    total: int = 0
    bits: int = 0
    values: int | None = 0
    nans: int = 0
    most_absolute: float | int | None = None
    most_relative: float | None = None

    def _add_numbers(self, one: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
        """Of elements that differ in their bits."""
        exact: npt.NDArray[Any] | None = None
        if one.dtype.kind in "iu":
            # As unsigned numbers of 64 bits a difference of two of 64 bits is exact.
            exact = np.maximum(one, other).astype(np.uint64) - np.minimum(one, other).astype(np.uint64)
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        with np.errstate(all="ignore"):
            a, b = one.astype(wide), other.astype(wide)
            nan_a, nan_b = np.isnan(a), np.isnan(b)
            differ = (a != b) & ~(nan_a & nan_b) if exact is None else exact > 0
            lone = nan_a ^ nan_b
            if self.values is not None:
                self.values += int(np.count_nonzero(differ))
            self.nans += int(np.count_nonzero(lone))
            numbers = differ & ~nan_a & ~nan_b
            if not numbers.any():
                return
            absolute = np.abs(a - b)[numbers] if exact is None else exact[numbers]
            largest = np.maximum(np.abs(a), np.abs(b))[numbers]
            relative = absolute / largest
            relative = relative[~np.isnan(relative)]  # infinite against another infinity or a number
            if exact is None:
                absolute = absolute[~np.isnan(absolute)]  # complex, where both have the same infinite part
        if len(absolute):
            self.most_absolute = max(self.most_absolute or 0, absolute.max().item())
        if len(relative):
            self.most_relative = max(self.most_relative or 0.0, float(relative.max()))


def compare_elements(entry: TensorEntry, one: memoryview, other: memoryview, into: Difference) -> None:
    """Compare elements of ``entry``'s dtype that lie back to back, and add what is found to ``into``."""
    size = entry.itemsize
    into.total += len(one) // size
    width = _WIDTHS.get(size)
    if width is not None:
        where = np.flatnonzero(np.frombuffer(one, width) != np.frombuffer(other, width))
    else:
        rows = np.frombuffer(one, np.uint8).reshape(-1, size) != np.frombuffer(other, np.uint8).reshape(-1, size)
        where = np.flatnonzero(rows.any(axis=1))
    if not len(where):
        return
    into.bits += len(where)
    a, b = _numbers(entry, one, where), _numbers(entry, other, where)
    if a is None or b is None:
        into.values = None
    else:
        into._add_numbers(a, b)


def _numbers(entry: TensorEntry, data: memoryview, where: npt.NDArray[np.intp]) -> npt.NDArray[Any] | None:
    """Elements as numbers that numpy computes with; None where they are none."""
    size = entry.itemsize
    picked = np.ascontiguousarray(np.frombuffer(data, np.dtype((np.void, size)))[where])
    if entry.kind == "ndarray":
        dtype = dtypes.numpy_dtype(entry.dtype)
        if dtype.kind == "b":
            return picked.view(np.uint8)
        return picked.view(dtype).astype(dtype.newbyteorder("=")) if dtype.kind in "iufc" else None
    torch_dtype = dtypes.torch_dtype(entry.dtype)
    if torch_dtype is torch.bool:
        return picked.view(np.uint8)
    if torch_dtype is torch.complex32:  # torch itself warns of it
        return picked.view(np.float16).astype(np.float32).view(np.complex64)
    # Floats that numpy lacks: all their values are values of float32.
    wide = torch_dtype is torch.bfloat16 or (torch_dtype.is_floating_point and size == 1)
    try:
        bits = torch.from_numpy(picked.view(np.uint8)).view(torch_dtype)
        found: npt.NDArray[Any] = (bits.to(torch.float32) if wide else bits).numpy()
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # torch has dtypes that it can only store
    return found if found.dtype.kind in "iufc" else None
