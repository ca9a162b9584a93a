"""Who may use which slot, and when: plain decisions, no I/O.

A slot is *leased* to the checkpoint that is being written into it, *committed* while the newest durable record names
it,
*read* while a restore of this engine reads it, and free otherwise. Only a free slot may be written (I1); a committed
slot becomes free only through :meth:`SlotTable.committed`, which the store calls once the record without it is durable
(I3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, count, islice

import msgspec

from pccheck_async.format.record import MOST_SLOT

__all__ = ["Create", "Replace", "Reuse", "SlotTable", "Wait"]


class Reuse(msgspec.Struct, frozen=True):
    """Write into the free slot ``slot``."""

    slot: int


class Create(msgspec.Struct, frozen=True):
    """Create slot ``slot``."""

    slot: int


class Replace(msgspec.Struct, frozen=True):
    """Remove the free slot ``old``, which is too small, and create ``slot``."""

    old: int
    slot: int


class Wait(msgspec.Struct, frozen=True):
    """Every slot is in use and no more may be made; ``readers`` of them are held by other processes' readers."""

    readers: int


Decision = Reuse | Create | Replace | Wait


class SlotTable:
    """The slots of one store.

    Args:
        sizes: Slots found on storage: number to bytes.
        committed: Slots that the newest durable record names.
        unusable: Slots whose files cannot be opened: their numbers are taken.
        in_flight: Most checkpoints that are written at a time.
        kept: Checkpoints for which there is always room; pinned ones and the like come on top (I10).
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        committed: Collection[int],
        unusable: Collection[int] = (),
        *,
        in_flight: int,
        kept: int,
    ) -> None:
        self._in_flight = in_flight
        self._kept = kept
        self._sizes = dict(sizes)
        self._committed = set(committed)
        self._before: set[int] = set()
        self._leased: set[int] = set()
        self._read: Counter[int] = Counter()
        self._unusable = frozenset(unusable)
        self._next = max([*self._sizes, *self._committed, *self._unusable], default=-1) + 1

    @property
    def most(self) -> int:
        """Slots that may exist while nobody else reads: checkpoints in flight plus checkpoints kept."""
        return self._in_flight + max(self._kept, len(self._committed))

    @property
    def count(self) -> int:
        """Slots that exist."""
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together."""
        return sum(self._sizes.values())

    @property
    def leased(self) -> frozenset[int]:
        """Slots being written."""
        return frozenset(self._leased)

    def size(self, slot: int) -> int:
        """Bytes of a slot."""
        return self._sizes[slot]

    def free(self) -> list[int]:
        """Slots that nothing uses, smallest number first."""
        return sorted(self._sizes.keys() - self._committed - self._leased - self._read.keys())

    def is_free(self, slot: int) -> bool:
        """Whether nothing uses it."""
        return slot in self._sizes and not (slot in self._committed or slot in self._leased or slot in self._read)

    def decide(self, nbytes: int, passed_over: Collection[int] = ()) -> Decision:
        """Choose a slot for a checkpoint of ``nbytes``, without the free slots ``passed_over`` (readers hold them).

        Readers of other processes cost at most one slot beyond ``most``; with more of them the caller waits. A restore
        of this engine that reads a slot which is committed no more costs that slot.
        """
        free = [slot for slot in self.free() if slot not in passed_over]
        fitting = [slot for slot in free if self._sizes[slot] >= nbytes]
        if fitting:
            return Reuse(min(fitting, key=self._rank))
        if free and self.count >= self.most:
            return Replace(min(free, key=self._rank), self._fresh()[0])
        # A restore of this engine may need the buffers that a waiting checkpoint holds: never wait for one.
        extra = len(self._read.keys() - self._committed) + (1 if passed_over else 0)
        if self.count < self.most + extra:
            return Create(self._fresh()[0])
        return Wait(readers=len(passed_over))

    def _rank(self, slot: int) -> tuple[bool, int, int]:
        """Return what is smaller for a slot to give up first: what was superseded may be needed once more."""
        return slot in self._before, self._sizes[slot], slot

    def missing(self) -> list[int]:
        """Numbers of the slots to create so that every checkpoint in flight finds one."""
        return self._fresh(max(0, self.most - self.count))

    def _fresh(self, number: int = 1) -> list[int]:
        """Numbers that no slot has; none is given twice as long as there are any that never were."""
        beyond = range(self._next, MOST_SLOT + 1)
        taken = self._sizes.keys() | self._committed | self._unusable
        gaps = (slot for slot in count() if slot not in taken)
        return list(islice(chain(beyond, gaps), number))

    def created(self, slot: int, nbytes: int) -> None:
        """Note a new slot of ``nbytes``; it is free."""
        if slot in self._sizes:
            raise ValueError(f"slot {slot} exists")
        self._sizes[slot] = nbytes
        self._next = max(self._next, slot + 1)

    def removed(self, slot: int) -> None:
        """Note that a free slot's file is gone."""
        if slot in self._committed or slot in self._leased or slot in self._read:
            raise ValueError(f"slot {slot} is in use")
        del self._sizes[slot]

    def lease(self, slot: int) -> None:
        """Give a free slot to a checkpoint."""
        if slot not in self._sizes or slot in self._committed or slot in self._leased or slot in self._read:
            raise ValueError(f"slot {slot} is not free")
        self._leased.add(slot)

    def release(self, slot: int) -> None:
        """Take a slot back from a checkpoint that will not commit; nothing writes to it any more."""
        self._leased.remove(slot)

    def committed(self, slots: Iterable[int]) -> None:
        """Note the slots that the record which just became durable names; all others it freed.

        Of the free ones, those that the record before it names are written last.
        """
        self._before, self._committed = self._committed, set(slots)
        self._leased -= self._committed

    def start_reading(self, slot: int) -> None:
        """Keep a slot from being reused until :meth:`stop_reading`, whatever is committed meanwhile."""
        if slot not in self._sizes or slot in self._leased:
            raise ValueError(f"slot {slot} is being written, or gone")
        self._read[slot] += 1

    def stop_reading(self, slot: int) -> None:
        """End :meth:`start_reading`."""
        self._read[slot] -= 1
        if self._read[slot] <= 0:
            del self._read[slot]

    def surplus(self) -> list[int]:
        """Free slots beyond ``most`` (after a reader's extra slot, or when fewer are kept), to be removed."""
        extra = self.count - self.most
        if extra <= 0:
            return []
        return sorted(self.free(), key=self._rank)[:extra]
