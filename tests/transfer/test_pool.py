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
        assert pool.available == 2
        assert pool.statistics().in_use == 0

    asyncio.run(main())
