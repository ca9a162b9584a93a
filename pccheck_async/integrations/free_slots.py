# SPDX-License-Identifier: Apache-2.0
"""For stores with one checkpoint each, in place of files that a framework would have written."""

from __future__ import annotations

import os
from pathlib import Path

from pccheck_async.format.record import slot_name
from pccheck_async.store import StoreReader, at_once

__all__ = ["remove_free_slots"]


def remove_free_slots(path: str | os.PathLike[str]) -> None:
    """Delete the slot files of a closed store that its record does not name, reserved for a next checkpoint."""
    found = at_once(path, StoreReader.newest)
    named = {slot_name(entry.slot) for entry in found[1].entries} if found else set()
    for slot in Path(path).glob("slot-*"):
        if slot.name not in named:
            slot.unlink()
