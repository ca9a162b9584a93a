from __future__ import annotations

import asyncio

import pytest

from pccheck_async.transfer import Limiter


def test_first_come_first_served() -> None:
    async def main() -> list[int]:
        limiter, order = Limiter(1), []
        first = await limiter.acquire()

        async def use(number: int) -> None:
            permit = await limiter.acquire()
            order.append(number)
            permit.release()

        tasks = [asyncio.create_task(use(n)) for n in range(5)]
        await asyncio.sleep(0)
        assert limiter.waited == 5
        first.release()
        await asyncio.gather(*tasks)
        assert limiter.in_use == 0
        assert limiter.peak == 1
        return order

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_a_late_comer_does_not_overtake() -> None:
    async def main() -> None:
        limiter = Limiter(1)
        first = await limiter.acquire()
        waiting = asyncio.create_task(limiter.acquire())
        await asyncio.sleep(0)
        first.release()  # the permit belongs to the waiting task now
        late = asyncio.create_task(limiter.acquire())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done()
        assert not late.done()
        (await waiting).release()
        (await late).release()

    asyncio.run(main())


def test_cancelled_while_waiting() -> None:
    async def main() -> None:
        limiter = Limiter(1)
        first = await limiter.acquire()
        waiting = asyncio.create_task(limiter.acquire())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        first.release()
        assert limiter.in_use == 0
        (await limiter.acquire()).release()

    asyncio.run(main())


def test_granted_and_cancelled_at_once_gives_the_permit_on() -> None:
    async def main() -> None:
        limiter = Limiter(1)
        first = await limiter.acquire()
        one, two = (asyncio.create_task(limiter.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        first.release()
        one.cancel()
        await asyncio.wait([one])
        assert one.cancelled()
        (await two).release()
        assert limiter.in_use == 0

    asyncio.run(main())


def test_released_twice() -> None:
    async def main() -> None:
        permit = await Limiter(1).acquire()
        permit.release()
        with pytest.raises(RuntimeError, match="before"):
            permit.release()

    asyncio.run(main())


def test_no_permits() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Limiter(0)
