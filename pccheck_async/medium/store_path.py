"""Where a store is."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["store_path"]


def store_path(path: str | os.PathLike[str]) -> str:
    """Return where a store is, wherever the process goes. Raises ValueError for what means another place."""
    text = str(os.fspath(path))
    if not text:
        raise ValueError("the path of the store is empty; the current folder is '.'")
    if text.startswith("~"):
        raise ValueError(f"{text!r} begins with '~', which only shells replace; use os.path.expanduser({text!r})")
    if "://" in text:
        raise ValueError(f"{text!r} is a URL; a store is a folder on a disk, or on a network filesystem mounted here")
    return os.fspath(Path(path).absolute())
