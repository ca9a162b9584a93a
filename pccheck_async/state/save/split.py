# SPDX-License-Identifier: Apache-2.0
"""When each source of a state is captured: before the call returns (eager), or while training goes on (lazy).

Sources are lazy if only the step of an attached optimizer changes their memory, or if they are large, no optimizer owns
them, and they were the same in the last two checkpoints (:mod:`.state.cache.constants`). All others are eager. Small
eager sources are copied here, on the caller's thread; the caller waits for the capture of the large ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.errors import TornCaptureError
from pccheck_async.format.manifest import span
from pccheck_async.state.boxes import local_tensors
from pccheck_async.state.cache.constants import Choice
from pccheck_async.state.cache.memo import Memo
from pccheck_async.state.cache.patterns import same_objects
from pccheck_async.state.leaves import PackedSource, RawSource, Sources, device_bytes
from pccheck_async.state.save.flatten import FlatState
from pccheck_async.state.save.torn import ByteCheck, StorageMemory, Versions
from pccheck_async.state.storages import Layout, is_dense
from pccheck_async.state.tensor_access import storage_address

_Which: TypeAlias = npt.NDArray[np.bool_]
"""One boolean per source."""

_address: Final = torch.Tensor.data_ptr
_is_contiguous: Final = torch.Tensor.is_contiguous
_nbytes: Final = attrgetter("nbytes")
_requires_grad: Final = attrgetter("requires_grad")

LARGEST_COPY: Final = 1 << 20
"""Most bytes of a source that is copied on the caller's thread."""
_MOST_COPIED: Final = 16 << 20
"""Most bytes that are copied on the caller's thread in all."""
_ALIGNMENT: Final = 16


class LazyPart:
    """The lazy part of a state, captured while training goes on, and the checks for changes meanwhile."""

    def __init__(
        self,
        eager: _Which | None,
        versions: Versions,
        byte_check: ByteCheck | None,
        constants: Choice | None,
        memo: Memo,
    ) -> None:
        # Sources that are not part of it and were not copied: the caller waits for their capture. None for none.
        self.eager = eager
        self.versions = versions  # of the lazy tensors, as they were at the call
        # Called with the error that made the checkpoint fail, None if it did not; holds none of the state.
        self.note_end = partial(_note_end, memo, constants)
        self._byte_check = byte_check
        self._constants = constants
        self._learn = memo.constants.learn

    def check_chunk(self, number: int, table: npt.NDArray[np.uint64], captured: memoryview, checksum: int) -> None:
        """Raise TornCaptureError if the bytes or the checksum of a captured chunk show that a lazy leaf changed.

        ``table`` has a row per part of the chunk: source, offset in the source, offset in the chunk, length.
        """
        if self._byte_check is not None:
            self._byte_check.compare(table, captured)
        if self._constants is not None:
            self._constants.check(number, table, checksum)

    def note_captured(self, tables: Iterable[npt.NDArray[np.uint64]], checksums: Sequence[int]) -> None:
        """Remember the checksums of all chunks: leaves whose checksums do not change are lazy in later captures."""
        if self._constants is not None:
            self._learn(self._constants, tables, checksums)


def split(
    flat: FlatState,
    layout: Layout,
    optimizers: Sequence[torch.optim.Optimizer],
    memo: Memo,
    *,
    check_bytes: bool = False,
    fenced: bool = False,
) -> LazyPart:
    """Decide for every source when it is captured, copy the small eager ones, and return the lazy part.

    Args:
        flat: The flattened state.
        layout: Layout of the state; modified: sources that are copied are replaced by the copies, ``breaks`` is set.
        optimizers: The attached optimizers, whose steps wait for the capture.
        memo: Memo of the state.
        check_bytes: Whether to keep a copy of the lazy sources, to compare it with the captured bytes.
        fenced: Whether devices may wait for the capture in place of the training thread. If so, small lazy sources on
            the host are copied, too: a step changes them at once (step counts), and no stream delays that.
    """
    values, paths = flat.leaves.values, flat.leaves.paths
    sources = layout.sources
    lazy = lazy_sources(layout, optimizers, values, flat.objects)
    if torn := memo.torn.sources(paths, layout.source_of):
        lazy = lazy.copy()
        lazy[torn] = False
    eager, constants = None, None
    if not lazy.all():
        sources, eager = copy_small(sources, ~lazy)
        candidates = eager.copy()
        candidates[torn] = False
        if candidates.any():
            constants = memo.constants.choose(layout, candidates, flat.leaves)
        if constants is not None:
            layout.breaks = constants.breaks
            lazy, eager = lazy | constants.constant, eager & ~constants.constant
        if not eager.any():
            eager = None
    if fenced:
        sources, _ = copy_small(sources, lazy & sources.on_host())
        if sources.owned is not None:
            lazy = lazy & ~sources.owned
    byte_check = ByteCheck(sources, lazy, dict(zip(layout.source_of, paths, strict=True))) if check_bytes else None
    of = layout.sources.addresses, lazy.tobytes()
    members = layout.known.get("lazy tensors", of) or layout.known.set(
        "lazy tensors", of, _LazyTensors(lazy, layout, values)
    )
    tensors: list[Any] = values
    wrappers = flat.leaves.wrappers
    if members.numbers is not None:
        tensors, paths = [values[n] for n in members.numbers], [paths[n] for n in members.numbers]
        if wrappers:
            wrappers = {at: wrappers[n] for at, n in enumerate(members.numbers) if n in wrappers}
    versions = Versions(paths, tensors, members.memory, wrappers)
    members.memory = versions.memory  # for as long as these are the lazy tensors, nothing moved
    layout.sources = sources
    return LazyPart(eager, versions, byte_check, constants, memo)


def _note_end(memo: Memo, constants: Choice | None, error: Exception | None) -> None:
    """Record which leaves a capture found torn (none if ``error`` is None): repeatedly torn ones become eager.

    Does nothing if the checkpoint failed for another reason.
    """
    if error is None or isinstance(error, TornCaptureError):
        paths = () if constants is None else constants.paths.values()
        memo.torn.note(() if error is None else error.paths, paths)


class _LazyTensors:
    """The leaves that are tensors in lazy sources; reused while the same sources, at the same addresses, are lazy."""

    def __init__(self, lazy: _Which, layout: Layout, values: Sequence[Any]) -> None:
        is_lazy = [*lazy.tolist(), False]  # the last one stands for leaves without a source
        numbers = [number for number, source in enumerate(layout.source_of) if is_lazy[source]]
        numbers = [number for number in numbers if isinstance(values[number], torch.Tensor)]  # arrays count no changes
        self.numbers = numbers if len(numbers) < len(values) else None  # None for all leaves
        self.memory: StorageMemory | None = None  # of their storages


# -- eager sources that are copied


def copy_small(sources: Sources, wanted: _Which) -> tuple[Sources, _Which]:
    """Copy the small sources among ``wanted``, those on a device into memory of that device.

    Returns the sources with the copies in place, and which of ``wanted`` were not copied: a source of more than 1 MiB,
    or small ones beyond 16 MiB in all.
    """
    lengths = sources.lengths
    small = wanted & (lengths <= LARGEST_COPY)
    small[small] = np.cumsum(lengths[small]) <= _MOST_COPIED
    if not small.any():
        return sources, wanted
    placed = sources.device_of
    on_host = small & sources.on_host()
    if on_host.any():
        sources = _copied_on_host(sources, np.flatnonzero(on_host))
    for device in sorted(sources.devices):
        if placed is not None and (here := small & (placed == device)).any():
            sources = _copied_on_device(sources, np.flatnonzero(here))
    return sources, wanted & ~small


def _copied_on_host(sources: Sources, index: npt.NDArray[np.intp]) -> Sources:
    ends = _ends(sources, index)
    memory: Any = np.empty(int(ends[-1]), np.uint8)
    addresses = memory.ctypes.data + np.concatenate(([0], ends[:-1]))
    view = memoryview(memory)
    for number, address, source in zip(
        index.tolist(), addresses.tolist(), sources.addresses[index].tolist(), strict=True
    ):
        nbytes = sources.nbytes[number]
        if source:
            ctypes.memmove(address, source, nbytes)
        else:
            packed = sources[number]
            assert isinstance(packed, PackedSource)
            start = address - memory.ctypes.data
            packed.copy(0, nbytes, view[start : start + nbytes])
    return sources.moved(index, addresses.astype(np.uint64), memory)


def _copied_on_device(sources: Sources, index: npt.NDArray[np.intp]) -> Sources:
    """Copy sources of one device into one piece of its memory, on the current stream, before later work on that."""
    originals = [source for source in map(sources.__getitem__, index.tolist()) if isinstance(source, RawSource)]
    parts = [device_bytes(*source) for source in originals]
    padding = parts[0].new_zeros(_ALIGNMENT)
    memory = torch.cat([piece for part in parts for piece in (part, padding[: -len(part) % _ALIGNMENT])])
    addresses = memory.data_ptr() + np.concatenate(([0], _ends(sources, index)[:-1]))
    # The originals, too: torch tracks the stream that memory was made on, not that this one may still read it.
    return sources.moved(index, addresses.astype(np.uint64), (memory.untyped_storage(), originals))


def _ends(sources: Sources, index: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Return the end of each of these sources, padding included, when laid end to end."""
    return np.cumsum(-(-sources.lengths[index] // _ALIGNMENT) * _ALIGNMENT)


# -- lazy memory: only the step of an attached optimizer changes it


def optimized(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters that ``optimizers`` change, and the tensors in their state (moments, step counts).

    Frozen parameters are not included: other code may change them (MoCo's key encoder is updated by hand).
    """
    parameters, kept = _held(optimizers)
    return local_tensors([*filter(_requires_grad, parameters), *kept])


def _held(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all parameters of ``optimizers``, and the tensors in their state."""
    parameters: list[torch.Tensor] = []
    states: list[dict[Any, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
        states += [each for each in optimizer.state.values() if isinstance(each, dict)]
    kept = [*chain.from_iterable(map(dict.values, states))]
    if not {torch.Tensor}.issuperset(map(type, kept)):
        kept = [value for value in kept if isinstance(value, torch.Tensor)]
    return parameters, kept


def sharing_nothing(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the ``tensors`` that share no storage with ``others``; tied parameters have the same memory."""
    shared = {*map(storage_address, others)} - {0}
    return [tensor for tensor in tensors if storage_address(tensor) not in shared]


def changed_by_forward(objects: Iterable[Any]) -> list[torch.Tensor]:
    """Return the weights of embeddings with ``max_norm`` in the modules among ``objects``: a forward changes them."""
    level = [each for each in objects if isinstance(each, torch.nn.Module)]
    modules: set[torch.nn.Module] = set()
    while level:
        modules.update(level)
        children = [child for module in level for child in module._modules.values()]
        level = [child for child in children if child is not None and child not in modules]
    tables = [module for module in modules if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    return local_tensors([table.weight for table in tables if table.max_norm is not None])


def lazy_sources(
    layout: Layout, optimizers: Sequence[torch.optim.Optimizer], leaves: Sequence[Any], objects: Sequence[Any] = ()
) -> _Which:
    """Return which sources lie in memory that only steps of ``optimizers`` change. Do not modify the returned array.

    Parameters that the forward of modules among ``objects`` changes are excluded. The result is remembered if all
    tensors of the optimizers are ``leaves`` themselves, and reused for the same tensors while no source moves.
    """
    changing = changed_by_forward(objects) if objects else []
    held = [*chain.from_iterable(_held(optimizers))]
    of = (layout.sources.addresses,)
    numbers, found = layout.known.get("lazy sources", of) or ((), None)
    same = len(numbers) == len(held) and same_objects(held, map(leaves.__getitem__, numbers))
    if found is not None and same and not changing:
        return found  # type: ignore[no-any-return]
    tensors = optimized(optimizers)
    which = covered(layout.sources, sharing_nothing(tensors, changing) if changing else tensors)
    number_of = {id(leaf): number for number, leaf in enumerate(leaves)}
    if not changing and number_of.keys() >= {*map(id, held)}:
        layout.known.set("lazy sources", of, ([number_of[id(each)] for each in held], which))
    return which


def covered(sources: Sources, tensors: Sequence[torch.Tensor]) -> _Which:
    """Return which ``sources`` lie entirely in the memory of ``tensors``; packed sources do not.

    Tensors with holes between their elements, and tensors without plain memory, are left out.
    """
    lows, highs = _ranges(tensors)
    if not len(lows):
        return np.zeros(len(sources), np.bool_)
    order = np.argsort(lows, kind="stable")
    lows, highs = lows[order], np.maximum.accumulate(highs[order])
    apart = lows[1:] > highs[:-1]  # ranges that touch are one: leaves that touch are one extent
    lows, highs = lows[np.append(True, apart)], highs[np.append(apart, True)]
    addresses = sources.addresses.astype(np.int64)
    at = np.searchsorted(lows, addresses, side="right") - 1
    inside: _Which = (at >= 0) & (addresses + sources.lengths <= highs[at]) & ~sources.packed
    return inside


def _ranges(tensors: Sequence[torch.Tensor]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    try:
        dense = [*map(_is_contiguous, tensors)]  # no Python per tensor: there may be ten thousands
        lows = np.fromiter(map(_address, tensors), np.int64, len(tensors))
    except RuntimeError:  # a tensor without plain memory: sparse, or of a class that wraps others
        return _ranges([tensor for tensor in tensors if _has_memory(tensor)])
    if not all(dense):
        dense = [flag or _is_run(each) for flag, each in zip(dense, tensors, strict=True)]
    highs = lows + np.fromiter(map(_nbytes, tensors), np.int64, len(tensors))
    known = (lows > 0) & (lows < highs) & np.array(dense, np.bool_)
    return lows[known], highs[known]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.is_contiguous()
        return tensor.data_ptr() > 0
    except RuntimeError:
        return False


def _is_run(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill one range of memory without holes, in any order."""
    shape, stride = tensor.shape, tensor.stride()
    return is_dense(shape, stride, 1) and span(shape, stride)[1] + 1 == tensor.numel()
