# SPDX-License-Identifier: Apache-2.0
"""``pccheck bench``: compares ways of saving a checkpoint, and the disk's own speed, on the user's disk.

May import every other room but the command line. The papers' figures are no part of it: ``examples/paper``.
"""

from pccheck_async.bench.methods import METHODS, UnknownMethodError, find_methods
from pccheck_async.bench.report import as_json, draw, table
from pccheck_async.bench.rounds import LEAST_BYTES, NoRoomError, compare

__all__ = ["LEAST_BYTES", "METHODS", "NoRoomError", "UnknownMethodError"]
__all__ += ["as_json", "compare", "draw", "find_methods", "table"]
