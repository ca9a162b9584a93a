"""The app state as a tree of plain nodes plus a table of arrays, and back. No I/O, no pickle, nothing converted."""

from pccheck_async.state.flatten import Stateful
from pccheck_async.state.rng import RNGState

__all__ = ["RNGState", "Stateful"]
