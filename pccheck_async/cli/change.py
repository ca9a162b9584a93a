"""``pccheck rm``, ``pccheck pin`` and ``pccheck unpin``."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.text import Text

from pccheck_async import CheckpointError, NoCheckpointError, list_checkpoints, pin_checkpoint, remove_checkpoints
from pccheck_async.cli.output import FAILED, as_json, console, dump, nothing_in, refuse
from pccheck_async.cli.show import complain, size

__all__ = ["run_pin", "run_rm"]


def run_rm(path: Path, steps: list[int], *, yes: bool, force: bool, json: bool) -> int:
    """Drop checkpoints and return the exit status."""
    try:
        if not (infos := list_checkpoints(path)):
            raise NoCheckpointError(nothing_in(path))
        missing = sorted(set(steps) - {info.step for info in infos})
        if missing:
            raise NoCheckpointError(f"{path} holds no checkpoint of step {', '.join(map(str, missing))}")
        doomed = [info for info in infos if info.step in steps]
        what = ", ".join(f"{info.step}{' (pinned)' if info.pinned else ''}" for info in doomed)
        nbytes = size(sum(info.nbytes for info in doomed))
        if not yes and not typer.confirm(f"Remove step {what} ({nbytes}) from {path}?", err=True):
            complain("nothing was removed")
            return FAILED
        removal = remove_checkpoints(path, steps, force=force)
    except (CheckpointError, OSError, ValueError) as error:
        return refuse(error)
    if json:
        dump({"removed": [as_json(info) for info in removal.removed], "freed_nbytes": removal.freed_nbytes})
        return 0
    gone = ", ".join(str(info.step) for info in removal.removed)
    console().print(Text(f"Removed step {gone}; {size(removal.freed_nbytes)} freed."), soft_wrap=True)
    return 0


def run_pin(path: Path, step: int, *, pinned: bool, json: bool) -> int:
    """Pin or unpin a checkpoint and return the exit status."""
    try:
        info = pin_checkpoint(path, step, pinned=pinned)
    except (CheckpointError, OSError, ValueError) as error:
        return refuse(error)
    if json:
        dump(as_json(info))
        return 0
    fate = (
        "is kept whatever a trainer's rules say"
        if pinned
        else "goes with a trainer's next commit unless a rule keeps it"
    )
    console().print(Text(f"Step {info.step} (counter {info.counter}) {fate}."), soft_wrap=True)
    return 0
