"""Files of a checkpoint: made durable, and the newest of several folders."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["fill", "missing", "newest", "remove_older", "sync_folder", "target"]

_PREFIX = "step-"


def missing(*packages: str) -> str | None:
    """Return which of these packages are not installed, as a sentence; None where all are."""
    absent = [package for package in packages if find_spec(package) is None]
    return f"{' and '.join(absent)}: not installed (pip install 'pccheck-async[bench]')" if absent else None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def target(folder: Path, step: int) -> Path:
    """Return the place of a checkpoint among others."""
    return folder / f"{_PREFIX}{step}"


def newest(folder: Path, marker: str = "") -> tuple[int, Path]:
    """Return the newest checkpoint: its step and its place.

    Args:
        folder: Where the checkpoints are.
        marker: A file that is in a folder once the checkpoint is complete.
    """
    found = [
        (int(path.name.removeprefix(_PREFIX)), path)
        for path in folder.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit() and (path / marker if marker else path).exists()
    ]
    if not found:
        raise FileNotFoundError(f"no complete checkpoint in {folder}")
    return max(found)


def remove_older(folder: Path, marker: str = "") -> None:
    """Delete every checkpoint but the newest complete one."""
    keep = newest(folder, marker)[1]
    for path in folder.glob(f"{_PREFIX}*"):
        if path != keep:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def fill(into: Any, saved: Any) -> Any:
    """Return ``saved`` with the tensors, arrays, dicts and lists of ``into`` that fit, which it fills in place."""
    if isinstance(into, torch.Tensor) and isinstance(saved, torch.Tensor):
        if into.shape == saved.shape and into.dtype == saved.dtype:
            into.detach().copy_(saved)
            return into
        return saved.clone()  # what was read may be mapped memory that is about to go
    if isinstance(into, np.ndarray) and isinstance(saved, np.ndarray):
        if into.shape == saved.shape and into.dtype == saved.dtype:
            np.copyto(into, saved)
            return into
        return saved.copy()
    if isinstance(into, dict) and isinstance(saved, dict):
        for key in [key for key in into if key not in saved]:
            del into[key]
        for key, value in saved.items():
            into[key] = fill(into.get(key), value)
        return into
    if type(into) is list and type(saved) is list and len(into) == len(saved):
        into[:] = [fill(one, other) for one, other in zip(into, saved, strict=True)]
        return into
    return saved.clone() if isinstance(saved, torch.Tensor) else saved
