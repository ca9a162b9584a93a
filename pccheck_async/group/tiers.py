# SPDX-License-Identifier: Apache-2.0
"""The two tiers of one rank: the protocol of :mod:`.member` runs twice, in one log, for the disk and for memory.

Each tier has its own votes, decisions, keep-list and records, so a checkpoint that fails in one goes on in the other.
The parts that both tiers share are here, and on rank 0 in :class:`.coordinator.Coordinator`:

- one sequence of counters, and one run: a checkpoint has one key in both;
- one restore, over the checkpoints that have each of their parts in either tier, or in a bucket;
- the *line*. Before its first checkpoint in any tier a run writes durably, on every rank's disk, which run it is and
  what it goes on from. A part in memory is valid only if that line accepts its key: counters repeat, and memory may be
  older than the disk, or of a branch that the disk has left behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pccheck_async.group.actions import Action
from pccheck_async.group.member import Member
from pccheck_async.group.messages import Metadata
from pccheck_async.group.parts import run_id
from pccheck_async.group.view import View, line_of_run

__all__ = ["Tiers", "set_line"]


def set_line(disk: Member, found: View, *, unrestored: bool = False) -> None:
    """Set the line with which a rank joins the run on disk, which is the same on all ranks, unless it has joined.

    Args:
        disk: The member of the disk.
        found: The agreement over all tiers.
        unrestored: Whether this is for a change, not a checkpoint. If nothing was restored, the run then goes on from
            the newest checkpoint that is not rejected, so that those in other tiers stay valid.
    """
    view, came_from = disk.view, disk.restore.restored
    if disk.joined or view is None:
        return
    if came_from is None and unrestored:
        came_from = next((one.key for one in found.restorable if not one.entry.rejected), None)
    disk.came_from = came_from
    disk.line = line_of_run(view, disk.bucket, run_id(view.number, disk.nonce), found.base, came_from)


class Tiers:
    """The two members of one rank, for disk and memory. The group is opened with both, first with the disk's."""

    def __init__(self, disk: Member, memory: Member) -> None:
        self.disk = disk
        self.memory = memory
        disk.restore = memory.restore

    def request(
        self, step: int, metadata: Metadata, sums: Mapping[str, int], differing: Collection[int], *, on_disk: bool
    ) -> tuple[list[Action], list[Action]]:
        """Request a checkpoint in memory, and also ``on_disk``; return the actions for the disk, and those for memory.

        The checkpoint's counter is then ``memory.counter``.
        """
        counter = max(self.disk.counter, self.memory.counter) + 1
        actions = self.join()
        if on_disk:
            actions += self.disk.request(step, metadata, sums, differing, counter)
        return actions, self.memory.request(step, metadata, sums, differing, counter)

    def join(self, *, unrestored: bool = False) -> list[Action]:
        """Join the run on disk, with its line, unless that was done. Called before the first checkpoint in any tier.

        ``unrestored`` is as for :func:`set_line`.
        """
        both = self.memory.view
        assert both is not None
        set_line(self.disk, both, unrestored=unrestored)
        return self.disk.join()
