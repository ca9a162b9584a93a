# SPDX-License-Identifier: Apache-2.0
"""Constant leaves: large ones that no optimizer owns and that stay the same from checkpoint to checkpoint.

Code that changes such a leaf (MoCo's teacher, a target network, a replay buffer) is never made to wait for a capture,
so the leaf is captured before the call returns (eager). But the frozen base of an adapter (LoRA) should cost no more
than the trained part. So a leaf that had the same checksums in two checkpoints running is captured while training goes
on (lazy) in the next one, and that capture fails unless the checksums are the same again: equal bytes cannot be torn.
The chunks of such leaves hold no other leaves. Target networks are mostly updated through ``.data``, every so many
steps: after code accessed the memory of a leaf, the next capture of it is eager again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.errors import TornCaptureError
from pccheck_async.state.leaves import Leaves
from pccheck_async.state.storages import Layout
from pccheck_async.state.tensor_access import begin_period, last_access, storage_address

_Which: TypeAlias = npt.NDArray[np.bool_]
_Numbers: TypeAlias = npt.NDArray[np.int64]
_Mark: TypeAlias = tuple[int, int, int]
"""Version counter and address of a leaf, and the period in which code last accessed its memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Which sources count as constant in one capture, and the checksums that their chunks must have."""

    breaks: tuple[int, ...]  # storages that begin a new chunk, so that candidates lie in chunks of their own
    extents: _Numbers  # of the layout
    storage_nbytes: tuple[int, ...]  # of the layout
    candidates: _Which  # the sources that may be constant
    constant: _Which  # those of them that were so far, and are lazy in this capture
    paths: Mapping[int, str]  # of their leaves, by source
    expected: Mapping[int, int]  # checksums of their chunks, by number
    marks: Mapping[int, _Mark | None]  # of the leaves of the candidates

    def check(self, chunk: int, table: Any, checksum: int) -> None:
        """Raise TornCaptureError if a chunk of constant sources has another checksum than before."""
        if self.expected.get(chunk, checksum) != checksum:
            paths = [self.paths[source] for source in table[:, 0].tolist() if source in self.paths]
            raise TornCaptureError(
                f"{paths[0]} changed while it was captured, or before that through an array or storage that code has "
                "of its memory, which nothing counts; nothing of that checkpoint is committed. No attached optimizer "
                "owns it, and it was the same in the checkpoints before; from now on it is captured before the call "
                "returns",
                paths=paths,
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The checksums of the newest capture's chunks that hold candidates."""

    choice: Choice
    sources: _Numbers  # for each piece of a candidate in a chunk the number of the source,
    chunks: _Numbers  # and of the chunk
    checksums: Mapping[int, int]  # of these chunks
    changed: Sequence[int]  # those of the chunks that had another checksum in the capture before


class Constants:
    """Remembers the checksums of the newest capture, and no tensor. May be used from several threads."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def choose(self, layout: Layout, candidates: _Which, leaves: Leaves) -> Choice | None:
        """Return which of the ``candidates`` have been constant so far; None if none of them ever can be.

        Candidates are sources that no optimizer owns and that are too large to be copied on the caller's thread.
        Begins a new period of accesses (see :func:`.tensor_access.begin_period`).
        """
        storage_of = layout.extents[:, 0]
        sources = enumerate(layout.source_of)
        values, paths, wrappers = leaves.values, leaves.paths, leaves.wrappers
        wanted = [leaf for leaf, source in sources if source >= 0 and candidates[source]]
        marks = {leaf: _mark(values[leaf], wrappers.get(leaf)) for leaf in wanted}
        begin_period()  # accesses from now on differ from those in the marks
        candidates = candidates.copy()
        candidates[[layout.source_of[leaf] for leaf, mark in marks.items() if mark is None]] = False
        apart = np.ones(len(layout.storage_nbytes), np.bool_)
        apart[storage_of[~candidates]] = False
        candidates = candidates & apart[storage_of]
        if not candidates.any():
            return None
        breaks = tuple((np.flatnonzero(apart[1:] != apart[:-1]) + 1).tolist())
        constant, expected = np.zeros_like(candidates), dict[int, int]()
        known = self._known
        if known is not None and _same_place(known.choice, layout.extents, layout.storage_nbytes, candidates):
            changed = [layout.source_of[leaf] for leaf, mark in marks.items() if known.choice.marks.get(leaf) != mark]
            unsure = np.union1d(known.changed, known.chunks[np.isin(known.sources, changed)])
            constant = candidates.copy()
            constant[known.sources[np.isin(known.chunks, unsure)]] = False
            expected = {chunk: known.checksums[chunk] for chunk in known.chunks[constant[known.sources]].tolist()}
        names = {layout.source_of[leaf]: paths[leaf] for leaf in reversed(marks) if constant[layout.source_of[leaf]]}
        return Choice(breaks, layout.extents, layout.storage_nbytes, candidates, constant, names, expected, marks)

    def learn(self, choice: Choice, tables: Iterable[Any], checksums: Sequence[int]) -> None:
        """Remember the checksums of a capture's chunks; column 0 of a chunk's table has the numbers of its sources."""
        rows = [(number, table[:, 0].astype(np.int64)) for number, table in enumerate(tables)]
        rows = [(number, sources) for number, sources in rows if choice.candidates[sources].any()]
        new = {number: checksums[number] for number, _ in rows}
        sources = np.concatenate([sources for _, sources in rows])
        chunks = np.repeat(np.array([*new], np.int64), [len(sources) for _, sources in rows])
        last, changed = self._known, [*new]
        if last is not None and _same_place(last.choice, choice.extents, choice.storage_nbytes, choice.candidates):
            changed = [chunk for chunk, checksum in new.items() if last.checksums[chunk] != checksum]
        self._known = _Known(choice, sources, chunks, new, changed)


def _mark(value: Any, wrapper: torch.Tensor | None) -> _Mark | None:
    """Return the mark of a leaf; None for arrays and tensors without a version counter."""
    if not isinstance(value, torch.Tensor) or value.is_inference() or (wrapper is not None and wrapper.is_inference()):
        return None
    version = value._version + (0 if wrapper is None else wrapper._version)
    return version, storage_address(value), last_access(value)


def _same_place(then: Choice, extents: _Numbers, storage_nbytes: tuple[int, ...], candidates: _Which) -> bool:
    """Return whether the same candidates lie in the same chunks as then, so that checksums can be compared."""
    return (
        (then.extents is extents or np.array_equal(then.extents, extents))
        and then.storage_nbytes == storage_nbytes
        and np.array_equal(then.candidates, candidates)
    )
