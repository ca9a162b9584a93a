"""One rank's store: it writes like any other, and the group decides which parts its records name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pccheck_async.format import Applied, Entry, Metadata, Record, Which
from pccheck_async.format.record import GROUP_VERSION
from pccheck_async.group.folder import record_of
from pccheck_async.group.parts import Part
from pccheck_async.group.run import GroupRun
from pccheck_async.medium import Piece
from pccheck_async.state import Sample
from pccheck_async.store import SlotLease, Store
from pccheck_async.transfer import uninterrupted

__all__ = ["GroupStore"]


@dataclass(slots=True, eq=False)
class GroupStore(Store):
    """The writing side of the store of one rank.

    A commit is split at its record: the data becomes durable here, then the rank's record names it as prepared, the
    group decides, and a later record applies that and frees slots (see :mod:`pccheck_async.group.member`).
    """

    version: ClassVar[int] = GROUP_VERSION
    run: GroupRun | None = None
    """This opening of the group; there from the beginning of the join on."""

    @property
    def _run(self) -> GroupRun:
        assert self.run is not None
        return self.run

    @property
    def entries(self) -> Sequence[Entry]:
        return self._run.complete() if self.run is not None else ()

    @property
    def newest(self) -> Entry | None:
        there = self._run.complete()
        return next((entry for entry in there if not entry.rejected), there[0] if there else None)

    def request(
        self, counter: int, step: int, metadata: Metadata, sums: Mapping[str, int], differing: Collection[int]
    ) -> None:
        self._run.request(counter, step, metadata, sums, differing)

    async def admit(self, counter: int) -> None:
        await self._run.admitted(counter)

    async def commit(
        self,
        lease: SlotLease,
        entry: Entry,
        rest: Sequence[Piece] = (),
        written: Callable[[], None] = lambda: None,
        check: Callable[[], None] | None = None,
        sample: Sample | None = None,
    ) -> bool:
        """Prepare a checkpoint, and wait for the group's decision; False if it is superseded.

        The arguments and errors are those of :meth:`Store.commit`. Besides it raises GroupError: another rank's part
        failed, or rank 0 is gone; ReplicasDifferError: tensors that ranks are believed to have
        alike differ.

        Durability: on True all ranks' parts survive power loss.
        """
        try:
            await self.make_data_durable(lease, rest)
            written()
            if check is not None:
                check()
            digests = ({}, {}) if sample is None else await self._run.call(sample.digest)
            await self.medium.unlock(lease.file)  # all writes ended: readers of the next record may lock the slot
        except BaseException:
            await self.release(lease, entry.manifest_offset)
            raise
        try:
            return await self._run.decided(entry, *digests)
        finally:
            if self._run.is_cancelled(entry.counter):  # else a record names it, or is about to
                await self.release(lease, entry.manifest_offset)

    async def write_parts(self, parts: tuple[Part, ...], applied: Applied) -> None:
        """Write the record that names these parts, newest first, and flush; slots that it does not name are free.

        Raises StoreFailedError: no further records.
        """

        async def replace_record(record: Record) -> None:
            await self.write_record(record)
            self.publish(record)

        async with self.lock:
            self.latch.check()
            await uninterrupted(replace_record(record_of(parts, applied, self.committed.record)))

    async def leave(self, seconds: float | None) -> None:
        if self.run is not None:
            await self.run.leave(seconds)

    async def pin(self, step: int, pinned: bool) -> Entry:
        """Pin the newest checkpoint of ``step`` on all ranks, which call this alike, or leave it to the rules again."""
        await self._run.pin(step, pinned)
        return next(entry for entry in self.entries if entry.step == step)

    async def reject(self, step: int, in_flight: Mapping[int, int], until: int) -> list[Entry]:
        """Reject checkpoints on all ranks, which call this alike; rank 0 knows the checkpoints in flight."""
        before = [entry for entry in self.entries if not entry.rejected]
        await self._run.reject(step, until)
        rejected = {key.counter for key in self._run.member.rejected}  # the next save may have dropped them by now
        return [entry.as_rejected() for entry in before if entry.counter in rejected]

    async def remove(self, which: Which, *, force: bool) -> list[Entry]:
        """Drop checkpoints on all ranks, which call this alike."""
        assert which is not None
        before = self.entries
        await self._run.remove(which, force=force)
        await self.slots.remove_surplus()
        return [entry for entry in before if entry.matches(which)]
