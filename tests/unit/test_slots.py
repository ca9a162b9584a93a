from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pccheck_async.errors import DamagedError
from pccheck_async.format import Entry, Record
from pccheck_async.format.record import MOST_SLOT, slot_name
from pccheck_async.medium import File
from pccheck_async.store.slots import SlotDecision, Slots, SlotTable, open_slots
from pccheck_async.testing import CrashDisk, CrashWriter, WrappingWriter


def test_first_slots_are_created() -> None:
    table = SlotTable({}, (), in_flight=2, kept=1)
    assert table.missing() == [0, 1, 2]
    assert table.decide(100) == SlotDecision(0, create=True)


def test_the_smallest_fitting_slot_is_reused() -> None:
    table = SlotTable({0: 500, 1: 100, 2: 200}, (), in_flight=2, kept=1)
    assert table.decide(150) == SlotDecision(2)


def test_what_was_superseded_last_is_written_over_last() -> None:
    """It takes the newest one's place where that is damaged."""
    table = SlotTable({0: 100, 1: 100, 2: 200}, (), in_flight=2, kept=1)
    table.note_committed([0], before=[1])
    assert table.decide(100) == SlotDecision(2)
    assert table.decide(100, passed_over=[2]) == SlotDecision(1)
    assert table.decide(300) == SlotDecision(3, create=True, remove=2)
    table.note_committed([2], before=[0])
    assert table.decide(100) == SlotDecision(1)


def test_what_was_superseded_last_is_removed_last() -> None:
    """A slot beyond those needed is left where a reader held one."""
    table = SlotTable({0: 100, 1: 100, 2: 100}, (), in_flight=1, kept=1)
    table.note_committed([1], before=[0])
    assert table.surplus() == [2]
    table.note_committed([1], before=[2])
    assert table.surplus() == [0]


def test_a_small_slot_is_replaced_under_a_new_number() -> None:
    table = SlotTable({0: 100, 1: 100}, (1,), in_flight=1, kept=1)
    assert table.decide(150) == SlotDecision(2, create=True, remove=0)


def test_committed_leased_and_read_slots_are_never_chosen() -> None:
    table = SlotTable({0: 100, 1: 100, 2: 100}, (0,), in_flight=2, kept=1)
    table.start_reading(0)
    table.lease(1)
    assert table.decide(100) == SlotDecision(2)
    table.lease(2)
    table.note_committed([2], before=[0])
    assert table.free() == []  # 0 is read, 1 leased, 2 committed
    table.stop_reading(0)
    assert table.free() == [0]


def test_readers_cost_one_slot_and_then_waiting() -> None:
    table = SlotTable({0: 100, 1: 100, 2: 100}, (0,), in_flight=2, kept=1)
    table.lease(1)
    assert table.decide(100, passed_over=[2]) == SlotDecision(3, create=True)
    table.created(3, 100)
    table.lease(3)
    table.release(1)
    assert table.decide(100, passed_over=[2, 1]) == SlotDecision(None)


def test_the_extra_slot_goes_when_the_reader_left() -> None:
    table = SlotTable({0: 100, 1: 100, 2: 100, 3: 100}, (0,), in_flight=2, kept=1)
    assert table.surplus() == [1]


def test_fewer_kept_than_found() -> None:
    table = SlotTable(dict.fromkeys(range(5), 100), (0, 1, 2, 3, 4), in_flight=1, kept=1)
    assert table.decide(100) == SlotDecision(5, create=True)


@pytest.mark.parametrize("slot", [0, 1, 2, 9])
def test_only_free_slots_are_leased(slot: int) -> None:
    table = SlotTable({0: 100, 1: 100, 2: 100}, (0,), in_flight=2, kept=1)
    table.lease(1)
    table.start_reading(0)
    if slot == 2:
        table.lease(2)
    with pytest.raises(ValueError, match="not free"):
        table.lease(slot)


class AnyOrder(RuleBasedStateMachine):
    """Any order of leases, releases, commits and readers keeps I1, I3 and I10."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.in_flight, self.keep_last = 3, 2
        self.table = SlotTable({}, (), in_flight=self.in_flight, kept=self.keep_last)
        self.sizes: dict[int, int] = {}
        self.committed: list[int] = []
        self.leased: set[int] = set()
        self.read: set[int] = set()

    @precondition(lambda self: len(self.leased) < self.in_flight)
    @rule(target=leases, nbytes=st.integers(1, 500))
    def reserve(self, nbytes: int) -> int:
        decision = self.table.decide(nbytes)
        assert decision.slot is not None
        if decision.remove is not None:
            assert decision.remove not in self.committed
            self.table.removed(decision.remove)
        if decision.create:
            self.table.created(decision.slot, nbytes)
            self.sizes[decision.slot] = nbytes
        assert self.sizes[decision.slot] >= nbytes
        self.table.lease(decision.slot)
        assert decision.slot not in self.leased
        self.leased.add(decision.slot)
        return decision.slot

    @rule(slot=consumes(leases))
    def release(self, slot: int) -> None:
        self.leased.discard(slot)
        self.table.release(slot)

    @rule(slot=consumes(leases))
    def commit(self, slot: int) -> None:
        self.leased.discard(slot)
        before, self.committed = self.committed, [slot, *self.committed][: self.keep_last]
        self.table.note_committed(self.committed, before)
        for surplus in self.table.surplus():
            assert surplus not in {*self.committed, *self.leased, *self.read}
            self.table.removed(surplus)

    @precondition(lambda self: self.committed and not self.read)
    @rule()
    def start_reading(self) -> None:
        self.read.add(self.committed[-1])
        self.table.start_reading(self.committed[-1])

    @precondition(lambda self: self.read)
    @rule()
    def stop_reading(self) -> None:
        self.table.stop_reading(self.read.pop())

    @invariant()
    def nothing_in_use_is_free(self) -> None:
        assert not set(self.table.free()) & {*self.committed, *self.leased, *self.read}

    @invariant()
    def slots_are_bounded(self) -> None:
        assert self.table.count <= self.in_flight + self.keep_last + 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_slot_that_is_read_and_committed_costs_no_further_one() -> None:
    table = SlotTable({0: 8, 1: 8}, [0], in_flight=1, kept=1)
    table.lease(1)
    table.start_reading(0)
    assert table.decide(8) == SlotDecision(None)


@pytest.mark.parametrize(("sizes", "lost"), [({0: 8}, 1), ({MOST_SLOT: 8}, 0)])
def test_a_slot_that_a_record_names_and_nobody_has_is_not_made_anew(sizes: dict[int, int], lost: int) -> None:
    table = SlotTable(sizes, [lost, *sizes], in_flight=2, kept=2)
    missing = table.missing()
    assert len(missing) == 3
    assert lost not in missing


class LateLock(WrappingWriter):
    """A medium that locks only after a turn of the loop, in which ``meanwhile`` is called."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        locked = await super().lock(file, shared=shared)
        self.meanwhile()
        return locked


async def slots_of_two(medium: LateLock | CrashWriter) -> Slots:
    """Return slots 0 and 1: the newest record names 1, the one before it 0."""
    await medium.prepare(create=True)
    for number in (0, 1):
        await medium.reserve(slot_name(number), 4096)
    newest, before = (Entry(n, n, 0.0, 0, n, 0, 1, 0, False, {}) for n in (1, 0))
    return await open_slots(medium, Record(1, (newest,), (before,)), medium.sync_names, in_flight=1, kept=1)


def test_a_slot_that_a_restore_began_to_read_while_it_was_being_locked_is_not_written() -> None:
    """A restore may fall back to a superseded checkpoint at any moment, and no lock keeps out its own process."""

    async def main() -> None:
        disk = CrashDisk()
        medium = LateLock(CrashWriter(disk, turns=0))
        slots = await slots_of_two(medium)
        to_read = [0]
        medium.meanwhile = lambda: to_read and slots.start_reading(to_read.pop())
        async with slots.lock:
            lease = await slots.lease(4096)
        assert lease.slot == 2
        beside = CrashWriter(disk, turns=0)  # another process, which may read slot 0, too
        assert await beside.lock(await beside.open(slot_name(0), writable=False), shared=True)
        await beside.close()
        await medium.close()

    asyncio.run(main())


def test_a_superseded_slot_to_which_a_killed_predecessor_still_writes_is_not_read() -> None:
    async def main() -> None:
        disk = CrashDisk()
        medium, predecessor = CrashWriter(disk, turns=0), CrashWriter(disk, turns=0)
        slots = await slots_of_two(medium)
        file = await predecessor.open(slot_name(0), writable=True)
        assert await predecessor.lock(file)
        with pytest.raises(DamagedError, match="is being written over"):
            await slots.start_reading_free(0)
        assert slots.table.is_free(0)
        await predecessor.close()
        assert (await slots.start_reading_free(0)).name == slot_name(0)
        assert not slots.table.is_free(0)
        await medium.close()

    asyncio.run(main())
