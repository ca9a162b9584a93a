"""The way of one checkpoint into a slot: what is written when, and what is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from pccheck_async.store import Retention, SlotWriter, Store, open_store
from pccheck_async.testing import CrashDisk, CrashWriter, StuckWriter
from pccheck_async.transfer import BufferPool, Tasks, aligned_buffer
from pccheck_async.transfer.plan import Chunk, Plan

BLOCK = 4096
Body = Callable[[Store, BufferPool, StuckWriter], Awaitable[None]]


def plan_of(count: int) -> Plan:
    table = np.empty((0, 4), np.uint64)
    return Plan((), tuple(Chunk(number * BLOCK, BLOCK, table) for number in range(count)), count * BLOCK)


def run(test: Body, *, buffers: int) -> None:
    async def main() -> None:
        medium = StuckWriter(CrashWriter(CrashDisk()), kinds=())
        store = await open_store(medium, path="x", retention=Retention(keep_last=1), max_in_flight=2, lock_timeout=0)
        pool = BufferPool(buffers * 2 * BLOCK, 2 * BLOCK)
        await test(store, pool, medium)
        assert pool.statistics().in_use == 0
        assert store.slots.table.free() == sorted(store.slots.table.sizes)
        await medium.close()

    asyncio.run(main())


@asynccontextmanager
async def writing(store: Store, pool: BufferPool, plan: Plan) -> AsyncIterator[tuple[SlotWriter, Tasks]]:
    async with SlotWriter(store, pool, plan) as writer, Tasks() as tasks:
        await writer.reserve(tasks, lambda: 100)
        yield writer, tasks


def test_the_only_chunk_and_the_manifest_are_one_piece() -> None:
    async def test(store: Store, pool: BufferPool, medium: StuckWriter) -> None:
        plan = plan_of(1)
        async with SlotWriter(store, pool, plan) as writer:
            async with Tasks() as tasks:
                await writer.reserve(tasks, lambda: 100)
                place = await writer.place(plan.chunks[0])
                place.view[:5] = b"chunk"
                await writer.put(place)
            assert not store.slots.table.sizes, "its length is not known yet"
            slot, ((offset, data),) = await writer.finish(b"manifest")
            assert (offset, len(data)) == (0, 2 * BLOCK)
            assert bytes(data[:5]) + bytes(data[BLOCK:]).rstrip(b"\0") == b"chunkmanifest"
            assert pool.statistics().in_use == 1, "the request needs it"
        await store.release(slot)

    run(test, buffers=2)


def test_a_chunk_that_was_captured_before_has_the_manifest_beside_it_without_room_for_both() -> None:
    async def test(store: Store, pool: BufferPool, medium: StuckWriter) -> None:
        first = aligned_buffer(BLOCK)
        async with SlotWriter(store, pool, plan_of(1), first) as writer:
            slot, pieces = await writer.finish(b"manifest")
            assert [(offset, len(data)) for offset, data in pieces] == [(0, BLOCK), (BLOCK, BLOCK)]
        await store.release(slot)

    run(test, buffers=1)


def test_several_chunks_are_written_and_their_buffers_given_back_before_the_manifest_is_there() -> None:
    async def test(store: Store, pool: BufferPool, medium: StuckWriter) -> None:
        plan = plan_of(3)
        async with SlotWriter(store, pool, plan) as writer:
            async with Tasks() as tasks:
                await writer.reserve(tasks, lambda: 100)
                for chunk in plan.chunks:
                    place = await writer.place(chunk)
                    tasks.create_task(writer.put(place))
            assert (writer.written, pool.statistics().in_use) == (3 * BLOCK, 0)
            slot, pieces = await writer.finish(b"manifest")
            assert [(offset, len(data)) for offset, data in pieces] == [(3 * BLOCK, BLOCK)]
        await store.release(slot)

    run(test, buffers=2)


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_buffer_is_for_one_that_has_its_slot(count: int) -> None:
    async def test(store: Store, pool: BufferPool, medium: StuckWriter) -> None:
        medium.hold("reserve")
        plan = plan_of(count)

        async def save() -> None:
            async with writing(store, pool, plan) as (writer, _):
                await writer.place(plan.chunks[0])
                raise RuntimeError("enough")

        saving = asyncio.create_task(save())
        await asyncio.to_thread(medium.wait_stuck)
        await asyncio.sleep(0)
        assert pool.statistics().in_use == 0
        medium.release()
        with pytest.raises(RuntimeError, match="enough"):
            await saving

    run(test, buffers=1)


def test_what_is_cancelled_before_it_began_or_in_a_write_is_given_back_when_all_ended() -> None:
    async def test(store: Store, pool: BufferPool, medium: StuckWriter) -> None:
        medium.hold("write")
        plan, began = plan_of(3), asyncio.Event()

        async def save() -> None:
            async with writing(store, pool, plan) as (writer, tasks):
                tasks.create_task(writer.put(await writer.place(plan.chunks[0])))
                await asyncio.to_thread(medium.wait_stuck)
                tasks.create_task(writer.put(await writer.place(plan.chunks[1])))
                asyncio.get_running_loop().call_soon(began.set)
                raise RuntimeError("enough")

        saving = asyncio.create_task(save())
        await began.wait()
        assert pool.statistics().in_use == 2, "one of them is being read"
        assert len(store.slots.table.leased) == 1
        medium.release()
        with pytest.raises(RuntimeError, match="enough"):
            await saving

    run(test, buffers=4)


def test_the_only_chunk_is_not_kept_in_the_last_buffer() -> None:
    """A group's commit waits for other ranks, and theirs may wait for this rank's next checkpoint."""

    async def test(store: Store, pool: BufferPool, medium: StuckWriter) -> None:
        plan = plan_of(1)
        async with SlotWriter(store, pool, plan) as writer:
            async with Tasks() as tasks:
                await writer.reserve(tasks, lambda: 100)
                place = await writer.place(plan.chunks[0])
                place.view[:5] = b"chunk"
                await writer.put(place)
            assert pool.statistics().in_use == 0
            slot, ((offset, data),) = await writer.finish(b"manifest")
            assert (offset, bytes(data).rstrip(b"\0")) == (BLOCK, b"manifest")
        await store.release(slot)

    run(test, buffers=1)
