"""Work that waits through its caller: the same in a blocking call, in a coroutine, and in one that is thrown away."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_async.engine import Caller, EngineLoop, block_on, run

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def engine() -> Iterator[Any]:
    with EngineLoop() as loop:
        yield SimpleNamespace(loop=loop)


async def _double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def _work(caller: Caller, number: int, *, fails: bool = False) -> tuple[int, bool]:
    if fails:
        raise KeyError(number)
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    in_time = await caller.wait(future, 0.001)
    future.set_exception(ValueError("not raised where it is only waited for"))
    await caller.outlast(future)
    return await caller.run(_double(number)), in_time or not await caller.wait(future)


def test_the_same_blocking_and_awaited(engine: Any) -> None:
    assert block_on(engine, _work, 3) == asyncio.run(run(engine, _work, 3)) == (6, False)
    with pytest.raises(KeyError):
        block_on(engine, _work, 3, fails=True)
    with pytest.raises(KeyError):
        asyncio.run(run(engine, _work, 3, fails=True))


def test_what_would_suspend_a_blocking_call_is_refused(engine: Any) -> None:
    async def work(caller: Caller) -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="awaited something else"):
        block_on(engine, work)


@pytest.mark.parametrize("returns", [True, False])
def test_thrown_away_it_ends_what_it_began(engine: Any, *, returns: bool) -> None:
    begun, ended = concurrent.futures.Future[None](), list[str]()

    async def forever() -> None:
        begun.set_result(None)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("on the loop")

    async def work(caller: Caller) -> None:
        try:
            await caller.run(forever())
        except asyncio.CancelledError:
            ended.append(f"doubled: {await caller.run(_double(1))}")
            if not returns:
                raise

    async def main() -> None:
        coroutine = run(engine, work)
        coroutine.send(None)
        begun.result()
        coroutine.close()  # as when it is collected

    asyncio.run(main())
    assert ended == ["on the loop", "doubled: 2"]


@pytest.mark.parametrize("waits", ["for a coroutine", "for a future"])
def test_thrown_away_on_the_engines_thread_it_waits_for_nothing_there(engine: Any, waits: str) -> None:
    """The garbage collector runs there, too: waiting for the thread on itself would never end."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    async def work(caller: Caller) -> None:
        if waits == "for a coroutine":
            await caller.run(asyncio.sleep(3600))
        else:
            await caller.outlast(future)

    async def main() -> None:
        coroutine = run(engine, work)
        coroutine.send(None)
        closed: concurrent.futures.Future[None] = concurrent.futures.Future()

        def collect() -> None:
            coroutine.close()
            closed.set_result(None)

        engine.loop.post(collect)
        try:
            closed.result(10)
        finally:
            future.set_result(None)

    asyncio.run(main())
