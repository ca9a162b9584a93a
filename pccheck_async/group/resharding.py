"""Restoring tensors that lie on other ranks, or in other boxes, than when they were saved, from several parts."""

from __future__ import annotations

from collections.abc import Mapping

from pccheck_async.engine import Assembly, Lease, Reading
from pccheck_async.engine.loop import Handoff
from pccheck_async.errors import StateMismatchError
from pccheck_async.state import Resharding, Restoration, reshard, stored_boxes

__all__ = ["PartsReading"]


class PartsReading:
    """All parts of a checkpoint that this rank can reach, beside its own.

    Args:
        assembly: The engine.
        leases: What reads each part, by rank.
        own: The rank whose part is restored, and what reads that.
    """

    def __init__(self, assembly: Assembly, leases: Mapping[int, Lease], own: tuple[int, Reading]) -> None:
        self._assembly = assembly
        self._own, reading = own
        self._parts = {rank: Reading(assembly, lease) for rank, lease in leases.items() if rank != self._own}
        self._parts[self._own] = reading
        self._plan = Resharding()

    def match(self, restoration: Restoration) -> Handoff:
        """Work out what is read. Raises UnreadableError; StateMismatchError: the parts do not make these tensors."""
        wanted = restoration.resharded
        if any(not one.private for one in wanted):
            for rank, part in self._parts.items():
                if rank != self._own:
                    yield part.hold()
        held = (self._own,) if all(one.private for one in wanted) else tuple(self._parts)
        stored = {rank: stored_boxes(self._parts[rank].manifest, rank) for rank in held}
        self._plan = reshard(wanted, stored, self._own, by_address=self._assembly.backend.by_address)
        if self._plan.troubles:
            raise StateMismatchError(
                f"the tensors here cannot be made of those in the checkpoint: {', '.join(self._plan.troubles)}",
                mismatched=self._plan.troubles,
            )

    def verify(self) -> Handoff:
        """Read what is needed, and fill nothing. Raises UnreadableError."""
        for rank, targets in self._plan.targets.items():
            if rank != self._own:  # all of that is verified anyway
                yield self._parts[rank].read(targets, fill=False)

    def fill(self) -> Handoff:
        """Fill the tensors. Raises UnreadableError; some are filled then."""
        for rank, targets in self._plan.targets.items():
            yield self._parts[rank].read(targets, fill=True)
        self._plan.finish()

    def release(self) -> None:
        """Let all parts go but this rank's own. Idempotent."""
        for rank, part in self._parts.items():
            if rank != self._own:
                part.release()
