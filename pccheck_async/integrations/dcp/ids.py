# SPDX-License-Identifier: Apache-2.0
"""Conversion of DCP's ``checkpoint_id`` to the name and step of a checkpoint: one root folder has many checkpoints."""

from __future__ import annotations

import os
import re
from typing import Final, TypeAlias

__all__ = ["ID_KEY", "CheckpointID", "is_id", "name_of", "step_of"]

CheckpointID: TypeAlias = "str | os.PathLike[str]"
ID_KEY: Final = "checkpoint_id"
"""Key in a checkpoint's metadata of the name that it was saved under."""
_STEP = re.compile(r"[0-9]+\Z")


def is_id(checkpoint_id: CheckpointID) -> bool:
    """Return whether this can be a checkpoint id: a path, and no URL."""
    return "://" not in os.fspath(checkpoint_id)


def name_of(checkpoint_id: CheckpointID | None, root: str) -> str | None:
    """Return the name of a checkpoint: its id relative to the root, or the id itself if it has no folder.

    None without an id, or if it is the root. Raises ValueError if the id is a path outside the root.
    """
    if not checkpoint_id:
        return None
    text = os.fspath(checkpoint_id)
    inside = os.path.relpath(text, root)
    if not inside.startswith(os.pardir):
        return None if inside == os.curdir else inside
    if os.path.basename(text) == text:
        return text
    raise ValueError(f"checkpoint_id {text!r} is outside the root {root!r}; give {root}/NAME, NAME, or no id")


def step_of(name: str | None) -> int | None:
    """Return the number at the end of a name, as a step; None if there is none."""
    found = None if name is None else _STEP.search(name)
    return None if found is None else int(found[0])
