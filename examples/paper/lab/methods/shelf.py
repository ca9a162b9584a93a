"""A shelf: the state's parts are variables in a mapped file, and a save is one transaction."""

from __future__ import annotations

import copy
from pathlib import Path

from examples.paper.lab.methods.base import Done, Handle, Method, State
from examples.paper.lab.methods.files import fill
from pccheck_async import Shelf
from pccheck_async.state import arrange, flatten

__all__ = ["ShelfInPlace", "ShelfReassigned"]

_STEP = "step of the checkpoint"
_COPIES, _MORE_BYTES = 3, 1 << 20
"""Space: what is in force, what replaces it, and as much again, since free space is not always in one piece."""


class ShelfReassigned(Method):
    """Every variable is assigned anew, all in one transaction."""

    name = "shelf reassigned"
    durable = atomic = resumable = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._shelf: Shelf | None = None

    @property
    def file(self) -> Path:
        """The shelf."""
        return self.folder / "checkpoint.shelf"

    def save(self, state: State, step: int) -> Handle:
        """Commit a transaction; the first one makes the file."""
        if self._shelf is None:
            self._shelf = Shelf(self.file, _COPIES * sum(arrange(flatten(state).leaves).storage_nbytes) + _MORE_BYTES)
        self._put(self._shelf, {**state, _STEP: step})
        return Done()

    def _put(self, shelf: Shelf, state: State) -> None:
        shelf.load_state_dict(state)

    def load(self, into: State) -> int:
        """Copy from the shelf: what is loaded is changed outside of transactions."""
        if self._shelf is None and self.file.exists():
            self._shelf = Shelf(self.file)
        if self._shelf is None or _STEP not in self._shelf:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        for name in into:
            into[name] = fill(into[name], copy.deepcopy(self._shelf[name]))
        step: int = self._shelf[_STEP]
        return step

    def close(self) -> None:
        """Close the file."""
        if self._shelf is not None:
            self._shelf.close()


class ShelfInPlace(ShelfReassigned):
    """The arrays on the shelf are written over, inside one transaction.

    An iteration here makes new arrays, so writing them over the old ones is part of the save. A program that computes
    in the shelf's own arrays is spared that copy.
    """

    name = "shelf in place"

    def _put(self, shelf: Shelf, state: State) -> None:
        with shelf.transaction(*(name for name in state if name in shelf)):
            for name, value in state.items():
                shelf[name] = fill(shelf[name], value) if name in shelf else value
