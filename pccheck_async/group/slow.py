"""A rank that is slow, or hangs, aborts no checkpoint: the others wait for it, and the log names it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pccheck_async.telemetry import write

__all__ = ["name_slow_ranks"]


async def name_slow_ranks(
    awaited: Callable[[], Mapping[str, Sequence[int]]], folder: Path, seconds: float = 60.0
) -> None:
    """Warn in the log, once, of each operation that waits for ranks longer than so many seconds; runs until cancelled.

    Args:
        awaited: Returns the ranks that each open checkpoint or restore waits for.
        folder: The group's.
        seconds: Between two looks.
    """
    seen, named = set[str](), set[str]()
    while True:
        await asyncio.sleep(seconds)
        now = awaited()
        for what in now.keys() & seen - named:
            ranks = ", ".join(map(str, now[what]))
            text = "%s has waited for ranks %s longer than %g s"
            write("slow_ranks", text, what, ranks, seconds, store=os.fspath(folder))
        named = now.keys() & seen
        seen = set(now)
