# SPDX-License-Identifier: Apache-2.0
"""The line of a run (:class:`pccheck_async.format.Line`) of a process that saves alone.

The tiers beside the disk, memory and bucket, hold checkpoints of several runs; the line on disk decides which of them
are valid. A run writes its line before its first checkpoint in any tier. (A group writes its lines when its ranks join
the run, :mod:`pccheck_async.group.tiers`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from pccheck_async.format import Line
from pccheck_async.store import Store

__all__ = ["LineFollower", "RunLine"]


class LineFollower(Protocol):
    """A tier whose checkpoints the line makes valid."""

    async def follow_line(self, line: Line) -> None:
        """Called when the line of this run is durable on disk, before the run's first checkpoint."""


class RunLine:
    """The line of an open engine's run. Coroutines run on its loop.

    Args:
        disk: The store on disk; until the run begins, its line is that of the run before.
        run: The id of this run.
        base: The largest counter in any tier; counters of this run are larger.
        followers: The tiers beside the disk.

    Attributes:
        begun: Whether the line of this run is durable on disk.
        restored: The counter of the checkpoint that was restored last; None: none was.
    """

    def __init__(self, disk: Store, run: bytes, base: int, followers: Sequence[LineFollower]) -> None:
        self.begun = False
        self.restored: int | None = None
        self._disk, self._run, self._base, self._followers = disk, run, base, followers
        self._turn = asyncio.Lock()
        disk.committed.line = self._found = self._before = disk.committed.record.line

    def note_restored(self, counter: int, line: Line | None = None) -> None:
        """Called when a checkpoint was restored: this run descends from it, if it has saved none yet.

        ``line``: the line of the checkpoint, if it was not restored from disk or memory: that of the disk has no part
        in this run then.
        """
        self.restored, self._before = counter, line or self._found

    async def begin(self) -> None:
        """Make the line durable on disk, once. Raises StoreFailedError: the disk takes no more commits."""
        if self.begun:
            return
        async with self._turn:
            if self.begun:  # by another checkpoint meanwhile
                return
            if self._before is None:
                line = Line(self._run, self._base)
            else:
                line = self._before.descend(self._run, self._base, self.restored)
            await self._disk.begin_line(line)
            for follower in self._followers:  # a cancellation here: all of this is done again
                await follower.follow_line(line)
            self.begun = True
