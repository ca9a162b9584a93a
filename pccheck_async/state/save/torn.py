# SPDX-License-Identifier: Apache-2.0
"""Detection of torn captures, in which leaves changed while they were captured.

Code that changes a leaf outside the steps of attached optimizers tears it. :mod:`pccheck_async.engine.overlap` makes
these steps wait.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.errors import TornCaptureError, plain
from pccheck_async.state.leaves import HOST, PackedSource, Sources, device_bytes
from pccheck_async.state.tensor_access import storage_address, untyped_storage
from pccheck_async.telemetry import write

StorageMemory: TypeAlias = tuple[list[int], list[int]]
"""Addresses and sizes (bytes) of storages."""

_version: Final = attrgetter("_version")
_address: Final = torch.UntypedStorage.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes
_RECENT: Final = 8
"""Number of recent captures among which a leaf torn twice becomes eager: evaluations tear every second or third."""
_EAGER: Final = 100
"""Number of captures for which a repeatedly torn leaf is eager, before lazy capture is tried again."""
_NAMED: Final = 3
"""Most leaves that the warning names."""


class Versions:
    """Version counters and storages of tensors at the time of construction. Keeps the tensors and their memory alive.

    A difference proves a change; equality proves nothing. Fused optimizers, batch normalisation and writes through
    ``.data``, numpy or DLPack are not counted, and torch counts an operation only after it ended. ``memory`` has the
    addresses and sizes of the storages, if they are known already.
    Changes of a DTensor or a composed tensor raise the counter of the outer tensor only: ``wrappers`` maps the index
    of a local or inner tensor to the outer one.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tensors: Sequence[torch.Tensor],
        memory: StorageMemory | None = None,
        wrappers: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._paths = paths
        self._tensors = tensors
        self._storages: list[Any] = [*map(untyped_storage, tensors)]
        self._wrappers = wrappers
        self._counts_then = self._counts()
        self.memory: Final = self._memory() if memory is None else memory

    def changed(self) -> list[str]:
        """Return the paths of the tensors that are known to have changed since construction."""
        counts, memory = self._counts(), self._memory()
        if counts == self._counts_then and memory == self.memory:
            return []
        then_each = zip(self._counts_then, *self.memory, strict=True)
        pairs = zip(self._paths, then_each, zip(counts, *memory, strict=True), strict=True)
        return [path for path, before, after in pairs if before != after]

    def paths_of(self, others: Iterable[torch.Tensor]) -> list[str]:
        """Return the paths of the tensors that share a storage with one of ``others``."""
        storages = {*map(storage_address, others)} - {0}
        return [path for path, address in zip(self._paths, self.memory[0], strict=True) if address in storages]

    def _memory(self) -> StorageMemory:
        return [*map(_address, self._storages)], [*map(_nbytes, self._storages)]

    def _counts(self) -> list[int]:
        try:
            counts = [*map(_version, self._tensors)]
        except RuntimeError:  # tensors made in inference mode have no counter
            counts = [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]
        for number, wrapper in self._wrappers.items():
            counts[number] += 0 if wrapper.is_inference() else wrapper._version
        return counts


class ByteCheck:
    """A copy of the ``wanted`` sources in host memory, compared with their later capture.

    ``paths``: path of a leaf of each source, for messages.
    """

    def __init__(self, sources: Sources, wanted: npt.NDArray[np.bool_], paths: Mapping[int, str]) -> None:
        self._paths = paths
        self._bytes = {int(number): _copy(sources, int(number)) for number in np.flatnonzero(wanted)}

    def compare(self, table: npt.NDArray[np.uint64], captured: memoryview) -> None:
        """Raise TornCaptureError, naming the leaf, if a captured chunk with the parts of ``table`` differs."""
        for number, source_offset, offset, length in table.tolist():
            then = self._bytes.get(number)
            if then is None:
                continue
            now = np.frombuffer(captured, np.uint8, length, offset)
            if not np.array_equal(then[source_offset : source_offset + length], now):
                path = self._paths.get(number, "a tensor")
                raise TornCaptureError(
                    f"{path} changed while it was captured; nothing of that checkpoint is committed: "
                    f"{TornCaptureError.ADVICE}",
                    paths=[path],
                )


def _copy(sources: Sources, number: int) -> npt.NDArray[np.uint8]:
    source = sources[number]
    copy: npt.NDArray[np.uint8] = np.empty(source.nbytes, np.uint8)
    if isinstance(source, PackedSource):
        source.copy(0, source.nbytes, memoryview(copy))  # type: ignore[arg-type]
    elif source.device == HOST:
        ctypes.memmove(copy.ctypes.data, source.address, source.nbytes)
    else:
        copy = device_bytes(*source).cpu().numpy()
    return copy


class TornLeaves:
    """Leaves that changed in the middle of recent captures. May be used from several threads.

    A leaf that was torn in the last capture is eager in the next one, so that this succeeds. If two captures in a row
    have torn leaves, all of these, and any leaf torn twice among eight captures, are eager for longer: a loop that
    changes weights by hand (sharpness-aware minimisation) would lose every other checkpoint. Such code may stop, so
    after 100 captures lazy capture is tried again; a leaf that is torn then is eager at once for another 100.

    Leaves are told apart by their paths without escapes, as a TornCaptureError names them.
    """

    def __init__(self) -> None:
        # How many captures had ended when a leaf was made eager, by path; replaced and never changed.
        self._eager_since: Mapping[str, int] = {}
        self._ended = 0
        self._recent: deque[frozenset[str]] = deque([frozenset()], maxlen=_RECENT)

    def note(self, torn: Collection[str], constants: Iterable[str]) -> None:
        """Record the paths of the leaves that changed in the middle of a capture, none if it succeeded.

        Leaves in ``constants`` were lazy only because they had not changed so far: one change makes them eager.
        Warns in the log about leaves that become eager for longer.
        """
        self._ended += 1
        now, last = frozenset(map(plain, torn)), self._recent[-1]
        again = now.intersection(chain(map(plain, constants), self._eager_since, *self._recent))
        if now and last:
            again = now | last
        self._recent.append(now)
        if more := again.difference(self._eager()):
            self._eager_since = {**self._eager_since, **dict.fromkeys(more, self._ended)}
            names = ", ".join(sorted(more)[:_NAMED]) + (f" and {len(more) - _NAMED} more" if len(more) > _NAMED else "")
            text = (
                "code outside the steps of attached optimizers changes %s while checkpoints are captured beside "
                "training; the next %d checkpoints begun from now on capture that before engine.step ends, which takes "
                "longer: call engine.wait_captured() before that code instead, inside the engine.step block"
            )
            with suppress(Exception):  # of a handler of the log: the checkpoint ends all the same
                write("captured_eagerly", text, names, _EAGER)

    def sources(self, paths: Sequence[str], source_of: Sequence[int]) -> list[int]:
        """Return the sources of the leaves that have to be captured eagerly now.

        ``source_of`` has the source of each leaf, negative for none.
        """
        eager = self._eager() | self._recent[-1]
        if not eager:
            return []
        return [source for path, source in zip(paths, source_of, strict=True) if source >= 0 and plain(path) in eager]

    def _eager(self) -> set[str]:
        """Return the paths of the leaves that are eager for longer: those torn repeatedly."""
        if not self._eager_since:
            return set()
        return {path for path, since in self._eager_since.items() if self._ended < since + _EAGER}
