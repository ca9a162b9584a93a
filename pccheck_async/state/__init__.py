"""The app state as a tree of plain nodes plus a table of arrays, and back. No I/O, no pickle, nothing converted."""

from pccheck_async.state.rng import RNGState
from pccheck_async.state.save.flatten import Stateful

__all__ = ["RNGState", "Stateful"]
