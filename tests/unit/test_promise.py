"""Promises: only the first outcome counts, and all who wait are told."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pccheck_async.engine.flight import Promise, wait_for_any


def test_it_is_not_over_before_it_happened() -> None:
    promise: Promise[int] = Promise()
    assert (promise.over, promise.outcome, promise.error) == (False, None, None)
    with pytest.raises(TimeoutError):
        promise.result(0)
    promise.set_result(3)
    assert (promise.over, promise.outcome, promise.error, promise.result()) == (True, (3, None), None, 3)


@pytest.mark.parametrize("waits_first", [True, False])
def test_whoever_was_first_decided(waits_first: bool) -> None:
    error = ValueError("no")
    for first in ("result", "error"):
        promise: Promise[int] = Promise()
        future = promise.future() if waits_first else None
        for kind in (first, "result", "error"):
            if kind == "result":
                promise.set_result(1)
            else:
                promise.set_error(error)
        if future is not None:
            assert future.done()
        if first == "result":
            assert (promise.result(), promise.future().result(0)) == (1, 1)
        else:
            assert promise.error is promise.future().exception(0) is error
            with pytest.raises(ValueError, match="no"):
                promise.result()


def test_its_future_cannot_be_cancelled() -> None:
    promise: Promise[int] = Promise()
    assert not promise.future().cancel()

    async def wait() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(promise.future()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(wait())
    promise.set_result(2)
    assert promise.future().result(0) == 2


@pytest.mark.slow
def test_those_who_come_to_wait_while_it_happens_are_told() -> None:
    for number in range(300):
        promise: Promise[int] = Promise()
        start = threading.Barrier(4)
        found: list[int] = []

        def wait(promise: Promise[int] = promise, start: threading.Barrier = start, found: list[int] = found) -> None:
            start.wait()
            found.append(promise.result(30))

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        promise.set_result(number)
        for thread in threads:
            thread.join()
        assert found == [number] * 3


def test_waiting_for_a_while_leaves_nothing_behind() -> None:
    promise: Promise[int] = Promise()
    for timeout in (0, 0.001, -1):
        with pytest.raises(TimeoutError):
            promise.result(timeout)
    assert promise._facts == {"threads": []}
    promise.set_error(OSError("gone"))
    for patience in (0, None, 1e30):
        with pytest.raises(OSError, match="gone"):
            promise.result(patience)


@pytest.mark.parametrize("first", [0, 1])
def test_a_thread_that_waits_for_either_goes_on_with_the_first_and_the_other_may_follow(first: int) -> None:
    promises: list[Promise[int]] = [Promise(), Promise()]
    assert not wait_for_any(promises, 0)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(wait_for_any(promises)))
    thread.start()
    for promise in (promises[first], promises[1 - first]):
        promise.set_result(1)
    thread.join()
    assert found == [True]
    assert wait_for_any(promises)
