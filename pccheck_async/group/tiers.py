# SPDX-License-Identifier: Apache-2.0
"""The two tiers of one rank: the protocol of :mod:`.member` runs twice, in one log, for the disk and for memory.

Each tier has its own votes, decisions, keep-list and records, so a checkpoint that fails in one goes on in the other.
The parts that both tiers share are here, and on rank 0 in :class:`.coordinator.Coordinator`:

- one sequence of counters, and one run: a checkpoint has one key in both;
- one restore, over the checkpoints that have each of their parts in either tier;
- the *line*. Before its first checkpoint in any tier a run writes durably, on every rank's disk, which run it is and
  what it goes on from. A part in memory is valid only if that line accepts its key: counters repeat, and memory may be
  older than the disk, or of a branch that the disk has left behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pccheck_async.format import Key, Line
from pccheck_async.group.actions import Action
from pccheck_async.group.member import Member
from pccheck_async.group.messages import Metadata
from pccheck_async.group.parts import link_to, run_id

__all__ = ["Tiers"]


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

        ``unrestored``: called for a change, not a checkpoint. If nothing was restored, the run then goes on from the
        newest checkpoint that is not rejected, so that those in memory stay valid.
        """
        disk, view = self.disk, self.memory.view
        assert view is not None
        if not disk.joined:
            disk.came_from = self.memory.restore.restored
            if disk.came_from is None and unrestored:
                disk.came_from = next((one.key for one in view.complete if not one.entry.rejected), None)
            disk.line = self._line(disk.came_from)
        return disk.join()

    def _line(self, came_from: Key | None) -> Line:
        """Return the line of this run, which is the same on all ranks."""
        view, both = self.disk.view, self.memory.view
        assert view is not None
        assert both is not None
        run = run_id(view.number, self.disk.nonce)
        return Line.begin(view.line, run, both.base, None if came_from is None else link_to(came_from))
