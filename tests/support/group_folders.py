"""Groups of ranks, each a forked process with an engine of its own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pccheck_async import SyncCheckpointEngine
from pccheck_async.format.record import slot_name
from pccheck_async.group import Group, read_place
from tests.support.ranks import meet, meeting_place

__all__ = ["end_ranks", "save_in_group", "spoil", "start_ranks", "state_of_rank"]


def state_of_rank(rank: int, step: int) -> dict[str, Any]:
    """Return a state that tells its rank and its step; a higher rank has more of it."""
    return {"weights": torch.arange(1000.0 * (rank + 1)) + step, "rank": rank, "step": step}


def start_ranks(world: int, work: Callable[[Group], object]) -> list[int]:
    """Fork the ranks of a group, and return their processes; each ends with status 0 where ``work`` returned."""
    place = meeting_place()
    children = []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            work(Group(rank, world, meet(place), timeout=60))
            status = 0
        except BaseException:  # noqa: BLE001 - told, and then the child ends
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return children


def end_ranks(children: Sequence[int]) -> list[int]:
    """Wait for ranks, and return what they ended with."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def save_in_group(folder: Path, world: int, *steps: int, keep_last: int = 3, pinned: Sequence[int] = ()) -> None:
    """Save checkpoints of these steps by a group of ranks."""

    def save(group: Group) -> None:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        with SyncCheckpointEngine(folder, group=group, keep_last=keep_last, max_in_flight=1) as engine:
            for step in steps:
                metadata = {"loss": 1.0 / step}
                engine.checkpoint(state_of_rank(group.rank, step), step=step, metadata=metadata).result(60)
            for step in pinned:
                engine.pin(step=step)

    assert end_ranks(start_ranks(world, save)) == [0] * world


def spoil(folder: Path, rank: int, *, manifest: bool = False) -> None:
    """Flip a byte in the middle of a rank's part of the newest checkpoint, or in its manifest.

    What one process saved is the part of rank 0.
    """
    found = read_place(folder)
    entry = found.stores[rank][1].entries[0]
    slot = folder / found.folder(rank) / slot_name(entry.slot)
    place = entry.manifest_offset + 10 if manifest else 1000
    with slot.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
