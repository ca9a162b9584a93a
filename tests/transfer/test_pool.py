from __future__ import annotations

import asyncio
import ctypes

import pytest

from pccheck_async.transfer import PAGE_BYTES, BufferPool


def test_buffers_are_page_aligned_and_disjoint() -> None:
    async def main() -> None:
        pool = BufferPool(4 * PAGE_BYTES, PAGE_BYTES)
        leases = [await pool.lease() for _ in range(4)]
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(lease.view)) for lease in leases]
        assert all(address % PAGE_BYTES == 0 for address in addresses)
        assert len(set(addresses)) == 4
        for lease in leases:
            lease.release()

    asyncio.run(main())


def test_a_small_state_touches_little() -> None:
    async def main() -> None:
        pool = BufferPool(1 << 28, 4 << 20)
        for _ in range(10):
            lease = await pool.lease()
            lease.view[:] = bytes(len(lease.view))
            lease.release()
        assert pool.statistics().touched == 1

    asyncio.run(main())


def test_waits_for_a_buffer() -> None:
    async def main() -> None:
        pool = BufferPool(PAGE_BYTES, PAGE_BYTES)
        lease = await pool.lease()
        waiting = asyncio.create_task(pool.lease())
        await asyncio.sleep(0)
        assert not waiting.done()
        lease.release()
        (await waiting).release()
        assert pool.statistics().waited == 1

    asyncio.run(main())


def test_first_come_first_served() -> None:
    async def main() -> list[int]:
        pool, order = BufferPool(PAGE_BYTES, PAGE_BYTES), []
        first = await pool.lease()

        async def use(number: int) -> None:
            lease = await pool.lease()
            order.append(number)
            lease.release()

        tasks = [asyncio.create_task(use(n)) for n in range(5)]
        await asyncio.sleep(0)
        assert pool.statistics().waited == 5
        first.release()
        await asyncio.gather(*tasks)
        assert (pool.statistics().in_use, pool.statistics().peak) == (0, 1)
        return order

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_a_late_comer_does_not_overtake() -> None:
    async def main() -> None:
        pool = BufferPool(PAGE_BYTES, PAGE_BYTES)
        first = await pool.lease()
        waiting = asyncio.create_task(pool.lease())
        await asyncio.sleep(0)
        first.release()  # the buffer belongs to the waiting task now
        assert len(pool.free) == 0
        late = asyncio.create_task(pool.lease())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done()
        assert not late.done()
        (await waiting).release()
        (await late).release()

    asyncio.run(main())


def test_cancelled_while_waiting() -> None:
    async def main() -> None:
        pool = BufferPool(PAGE_BYTES, PAGE_BYTES)
        first = await pool.lease()
        waiting = asyncio.create_task(pool.lease())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        first.release()
        assert pool.statistics().in_use == 0
        (await pool.lease()).release()

    asyncio.run(main())


def test_given_and_cancelled_at_once_it_goes_to_the_next() -> None:
    async def main() -> None:
        pool = BufferPool(PAGE_BYTES, PAGE_BYTES)
        first = await pool.lease()
        one, two = (asyncio.create_task(pool.lease()) for _ in range(2))
        await asyncio.sleep(0)
        first.release()
        one.cancel()
        await asyncio.wait([one])
        assert one.cancelled()
        (await two).release()
        assert pool.statistics().in_use == 0

    asyncio.run(main())


def test_returned_twice() -> None:
    async def main() -> None:
        lease = await BufferPool(PAGE_BYTES, PAGE_BYTES).lease()
        lease.release()
        with pytest.raises(RuntimeError, match="before"):
            lease.release()

    asyncio.run(main())


def test_too_small() -> None:
    with pytest.raises(ValueError, match="holds no buffer"):
        BufferPool(100, PAGE_BYTES)


def test_a_buffer_that_could_not_be_pinned_comes_back() -> None:
    class Refusing:
        active = True

        async def pin(self, view: memoryview) -> None:
            raise MemoryError

        def unpin_all(self) -> None: ...

    async def main() -> None:
        pool = BufferPool(8192, 4096, Refusing())
        with pytest.raises(MemoryError):
            await pool.lease()
        assert len(pool.free) == 2
        assert pool.statistics().in_use == 0

    asyncio.run(main())
