"""Small parts of a state, copied at once on the caller's thread."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.state.sources import PackedSource, Sources, device_bytes

__all__ = ["set_aside"]

_LARGEST: Final = 1 << 20
_MOST: Final = 16 << 20
_ALIGNMENT: Final = 16


def set_aside(sources: Sources, wanted: npt.NDArray[np.bool_]) -> tuple[Sources, npt.NDArray[np.bool_]]:
    """Copy what of ``wanted`` is small, into memory of its own, and what of it is on a device on that device.

    Args:
        sources: Where the bytes are.
        wanted: Which of them may change from now on.

    Returns:
        The sources to capture instead, and which of ``wanted`` are too large for that (over 1 MiB each, or over 16 MiB
        in all).
    """
    lengths = sources.lengths
    small = wanted & (lengths <= _LARGEST)
    small[small] = np.cumsum(lengths[small]) <= _MOST
    if not small.any():
        return sources, wanted
    placed = sources.device_of
    on_host = small if placed is None else small & (placed < 0)
    if on_host.any():
        sources = _copied(sources, np.flatnonzero(on_host))
    for device in sorted(sources.devices):
        if placed is not None and (here := small & (placed == device)).any():
            sources = _copied_there(sources, np.flatnonzero(here))
    return sources, wanted & ~small


def _copied(sources: Sources, index: npt.NDArray[np.intp]) -> Sources:
    lengths = sources.lengths[index]
    ends = np.cumsum(-(-lengths // _ALIGNMENT) * _ALIGNMENT)
    memory: Any = np.empty(int(ends[-1]), np.uint8)
    addresses = memory.ctypes.data + np.concatenate(([0], ends[:-1]))
    view = memoryview(memory)
    plain = zip(index.tolist(), addresses.tolist(), sources.addresses[index].tolist(), lengths.tolist(), strict=True)
    for number, address, source, nbytes in plain:
        if source:
            ctypes.memmove(address, source, nbytes)
        else:
            packed = sources[number]
            assert isinstance(packed, PackedSource)
            start = address - memory.ctypes.data
            packed.copy(0, nbytes, view[start : start + nbytes])
    return sources.moved(index, addresses.astype(np.uint64), memory)


def _copied_there(sources: Sources, index: npt.NDArray[np.intp]) -> Sources:
    """In one piece, on the device's current stream: later work on it comes after."""
    parts, originals = [], []
    padding: torch.Tensor | None = None
    for number in index.tolist():
        source = sources[number]
        assert not isinstance(source, PackedSource)
        originals.append(source.owner)
        parts.append(device_bytes(*source))
        if padding is None:
            padding = parts[-1].new_zeros(_ALIGNMENT)
        parts.append(padding[: -source.nbytes % _ALIGNMENT])
    memory = torch.cat(parts)
    ends = np.cumsum(-(-sources.lengths[index] // _ALIGNMENT) * _ALIGNMENT)
    addresses = memory.data_ptr() + np.concatenate(([0], ends[:-1]))
    # The originals, too: torch knows which stream memory was made on, and not that this one may still read it.
    return sources.moved(index, addresses.astype(np.uint64), (memory.untyped_storage(), originals))
