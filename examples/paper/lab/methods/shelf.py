"""A shelf: every array is a variable in a mapped file, all the rest is one more, and a save is one transaction."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch

from examples.paper.lab.methods.base import Done, Handle, Method, State, UnsupportedError
from examples.paper.lab.methods.files import fill
from pccheck_async import Shelf
from pccheck_async.state import arrange, flatten

__all__ = ["ShelfInPlace", "ShelfReassigned"]

_REST = "rest"
_COPIES, _MORE_BYTES = 3, 1 << 20
"""Space: what is in force, what replaces it, and as much again, since free space is not always in one piece."""


class ShelfReassigned(Method):
    """All variables are assigned anew, in one transaction."""

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
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray | torch.Tensor)}
        if _REST in arrays:
            raise UnsupportedError(f"an array is called {_REST!r}")
        rest = {name: value for name, value in state.items() if name not in arrays}
        self._put(self._shelf, arrays, [step, rest])
        return Done()

    def _put(self, shelf: Shelf, arrays: State, rest: object) -> None:
        shelf.load_state_dict({**arrays, _REST: rest})

    def load(self, into: State) -> int:
        """Copy from the shelf: what is loaded is changed outside of transactions."""
        if self._shelf is None and self.file.exists():
            self._shelf = Shelf(self.file)
        if self._shelf is None or _REST not in self._shelf:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        step, rest = self._shelf[_REST]
        for name in into:
            into[name] = fill(into[name], copy.deepcopy(rest[name] if name in rest else self._shelf[name]))
        return int(step)

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

    def _put(self, shelf: Shelf, arrays: State, rest: object) -> None:
        with shelf.transaction(*(name for name in arrays if name in shelf)):
            for name, value in arrays.items():
                if name not in shelf or fill(shelf[name], value) is not shelf[name]:  # the first time, another shape
                    shelf[name] = value
            shelf[_REST] = rest
