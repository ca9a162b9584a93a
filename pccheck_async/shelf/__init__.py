"""Named variables that live in a mapped file and are used in place (PyMM's programming model).

``shelf.shelf`` has the verbs and says why it works with shadow copies, ``shelf.format`` the bytes and why a crash
cannot tear them. It may import medium, transfer, format, state, telemetry and errors; it knows no engine and no store.
"""

from pccheck_async.shelf.file import ShelfFile
from pccheck_async.shelf.shelf import Shelf

__all__ = ["Shelf", "ShelfFile"]
