# SPDX-License-Identifier: Apache-2.0
"""Named variables that live in a mapped file and are used in place (PyMM's programming model).

``shelf.shelf`` has the class and the reason for shadow copies, ``shelf.format`` the file format and why a crash cannot
tear it. This package may import medium, transfer, format, state, telemetry and errors, but neither engine nor store.
"""

from pccheck_async.shelf.file import ShelfFile
from pccheck_async.shelf.shelf import Shelf

__all__ = ["Shelf", "ShelfFile"]
