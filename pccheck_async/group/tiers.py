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

from collections.abc import Collection, Mapping, Sequence

from pccheck_async.format import Key, Line
from pccheck_async.group.actions import Action
from pccheck_async.group.member import Member
from pccheck_async.group.messages import Metadata
from pccheck_async.group.parts import link_to, run_id
from pccheck_async.group.view import Complete

__all__ = ["Tiers", "set_line"]


def set_line(
    disk: Member,
    complete: Sequence[Complete],
    base: int,
    restored: Key | None,
    lines: Mapping[Key, Line],
    *,
    unrestored: bool = False,
) -> None:
    """Set the line with which a rank joins the run on disk, which is the same on all ranks.

    Args:
        disk: The member of the disk, which has not joined yet.
        complete: The complete checkpoints in all tiers, newest first.
        base: The largest counter in any tier.
        restored: The checkpoint that was restored; None: none was.
        lines: The lines of checkpoints in a bucket, which go on where the disk's line ends.
        unrestored: Whether this is for a change, not a checkpoint. If nothing was restored, the run then goes on from
            the newest checkpoint that is not rejected, so that those in other tiers stay valid.
    """
    view, came_from = disk.view, restored
    assert view is not None
    if came_from is None and unrestored:
        came_from = next((one.key for one in complete if not one.entry.rejected), None)
    before = view.line
    if came_from is not None and not (before is not None and before.accepts(*link_to(came_from))):
        before = lines.get(came_from, before)
    disk.came_from = came_from
    link = None if came_from is None else link_to(came_from)
    disk.line = Line.begin(before, run_id(view.number, disk.nonce), base, link)


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
        if not self.disk.joined:
            set_line(self.disk, both.complete, both.base, self.memory.restore.restored, {}, unrestored=unrestored)
        return self.disk.join()
