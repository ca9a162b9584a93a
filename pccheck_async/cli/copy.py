"""``pccheck copy``: a checkpoint into another store."""

from __future__ import annotations

import time
from pathlib import Path

from rich.text import Text

from pccheck_async import CheckpointError, copy_checkpoint, list_checkpoints
from pccheck_async.cli.output import as_json, console, dump, progress_bar, refuse
from pccheck_async.cli.show import size

__all__ = ["run"]


def run(source: Path, target: Path, *, step: int | None, pinned: bool | None, json: bool) -> int:
    """Copy and return the exit status."""
    try:
        start = time.perf_counter()
        with progress_bar("copying") as progress:
            info = copy_checkpoint(source, target, step=step, pinned=pinned, progress=progress)
        seconds = time.perf_counter() - start
        later = [other.step for other in list_checkpoints(target)[1:] if other.step > info.step]
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        return refuse(error)
    if json:
        dump(as_json(info))
        return 0
    lines = [
        f"Step {info.step} ({size(info.nbytes)}) copied and verified in {seconds:.2f} s; it is the newest checkpoint "
        f"in {target}, counter {info.counter}{', pinned' if info.pinned else ''}."
    ]
    if later:
        lines.append(f"Older there now: step {', '.join(map(str, later))}. A trainer resumes from step {info.step}.")
    screen = console()
    for line in lines:
        screen.print(Text(line), soft_wrap=True)
    return 0
