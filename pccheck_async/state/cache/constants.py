"""Large leaves that no optimizer owns, and that stay the same from checkpoint to checkpoint: frozen weights, tables.

Nothing holds up whoever changes such a leaf: a teacher that follows by hand (MoCo, BYOL), a target network, a replay
buffer. So it is captured before the call returns. But the frozen base of an adapter (LoRA) is larger than all that is
trained, and has to cost no more than that. Each chunk has a checksum anyway: a leaf whose chunks were the same in two
checkpoints running is left to the capture beside training, and what was captured is right only if the chunks are the
same once more. Equal bytes cannot be torn. Storages of such leaves begin and end with chunks of their own. Most targets
follow through ``.data``, every so many steps: after code got at the memory of a leaf, the next capture looks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.errors import TornCaptureError
from pccheck_async.state.storages import Layout
from pccheck_async.state.tensor_access import storage_address

__all__ = ["Choice", "Constants"]

_Which: TypeAlias = npt.NDArray[np.bool_]
_Numbers: TypeAlias = npt.NDArray[np.int64]
_Mark: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What is left to one capture.

    Attributes:
        breaks: Storages that begin a new chunk, so that candidates lie in chunks of their own.
        extents: Where the state's bytes lie,
        storage_nbytes: in storages of these sizes.
        candidates: The sources that may be constant.
        left: Those that are left to the capture.
        paths: Their leaves.
        expected: The checksums of their chunks, by number.
        marks: Of the leaves of all candidates: what tells that torch changed them, where they are, and whether code
            reached for their memory.
    """

    breaks: tuple[int, ...]
    extents: _Numbers
    storage_nbytes: tuple[int, ...]
    candidates: _Which
    left: _Which
    paths: Mapping[int, str]
    expected: Mapping[int, int]
    marks: Mapping[int, _Mark | None]

    def check(self, chunk: int, table: Any, checksum: int) -> None:
        """Raise TornCaptureError where a chunk of what is left to the capture is not what it was before."""
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
    """What the newest capture told.

    Attributes:
        choice: What was looked at.
        sources: A row for each piece of a candidate in a chunk: its source,
        chunks: and the chunk.
        checksums: Of these chunks.
        changed: Those of them that were not the same in the capture before.
    """

    choice: Choice
    sources: _Numbers
    chunks: _Numbers
    checksums: Mapping[int, int]
    changed: Sequence[int]


class Constants:
    """Remembers the checksums of one capture. May be used from several threads. Holds no tensor."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._numbers = count()
        self._reached: dict[int, int] = {}  # of storages of candidates: a number that is another one after each time

    def note_access(self, owner: Any) -> None:
        """Note that code reaches for the memory of a tensor or storage, where torch does not count what it changes."""
        if self._reached and (address := storage_address(owner)) in self._reached:
            self._reached[address] = next(self._numbers)  # where it is: another thread may be choosing

    def choose(self, layout: Layout, candidates: _Which, values: Sequence[Any], paths: Sequence[str]) -> Choice | None:
        """Say which of the ``candidates`` are left to a capture; None where none of them could ever be.

        Args:
            layout: Of the state.
            candidates: Sources that no optimizer owns, and that are too large to be copied at once.
            values: The leaves.
            paths: How they are called.
        """
        storage_of = layout.extents[:, 0]
        sources = enumerate(layout.source_of)
        marks = {leaf: self._mark(values[leaf]) for leaf, source in sources if source >= 0 and candidates[source]}
        for address in self._reached.keys() - {mark[1] for mark in marks.values() if mark is not None}:
            self._reached.pop(address, None)
        candidates = candidates.copy()
        candidates[[layout.source_of[leaf] for leaf, mark in marks.items() if mark is None]] = False
        apart = np.ones(len(layout.storage_nbytes), np.bool_)
        apart[storage_of[~candidates]] = False
        candidates = candidates & apart[storage_of]
        if not candidates.any():
            return None
        breaks = tuple((np.flatnonzero(apart[1:] != apart[:-1]) + 1).tolist())
        left, expected = np.zeros_like(candidates), dict[int, int]()
        known = self._known
        if known is not None and _same_place(known.choice, layout.extents, layout.storage_nbytes, candidates):
            changed = [layout.source_of[leaf] for leaf, mark in marks.items() if known.choice.marks.get(leaf) != mark]
            unsure = np.union1d(known.changed, known.chunks[np.isin(known.sources, changed)])
            left = candidates.copy()
            left[known.sources[np.isin(known.chunks, unsure)]] = False
            expected = {chunk: known.checksums[chunk] for chunk in known.chunks[left[known.sources]].tolist()}
        names = {layout.source_of[leaf]: paths[leaf] for leaf in reversed(marks) if left[layout.source_of[leaf]]}
        return Choice(breaks, layout.extents, layout.storage_nbytes, candidates, left, names, expected, marks)

    def learn(self, choice: Choice, tables: Iterable[Any], checksums: Sequence[int]) -> None:
        """Note what a capture found.

        Args:
            choice: What it was given.
            tables: Of each chunk a table whose first column has the sources in it.
            checksums: Of each chunk.
        """
        rows = [(number, table[:, 0].astype(np.int64)) for number, table in enumerate(tables)]
        rows = [(number, sources) for number, sources in rows if choice.candidates[sources].any()]
        found = {number: checksums[number] for number, _ in rows}
        sources = np.concatenate([sources for _, sources in rows])
        chunks = np.repeat(np.array([*found], np.int64), [len(sources) for _, sources in rows])
        last, changed = self._known, [*found]
        if last is not None and _same_place(last.choice, choice.extents, choice.storage_nbytes, choice.candidates):
            changed = [chunk for chunk, checksum in found.items() if last.checksums[chunk] != checksum]
        self._known = _Known(choice, sources, chunks, found, changed)

    def _mark(self, value: Any) -> _Mark | None:
        """Return what :attr:`Choice.marks` has; None for arrays and others of which nobody counts any change."""
        if not isinstance(value, torch.Tensor) or value.is_inference():
            return None
        address = storage_address(value)
        return value._version, address, self._reached.setdefault(address, next(self._numbers))


def _same_place(then: Choice, extents: _Numbers, storage_nbytes: tuple[int, ...], candidates: _Which) -> bool:
    """Whether the same candidates lie in the same chunks: then a chunk of now is comparable to one of then."""
    return (
        (then.extents is extents or np.array_equal(then.extents, extents))
        and then.storage_nbytes == storage_nbytes
        and np.array_equal(then.candidates, candidates)
    )
