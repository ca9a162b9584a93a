"""Moments: whoever is first decides, and whoever waits is told."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pccheck_async.engine.pending import Promise, wait_for_any


def test_it_is_not_over_before_it_happened() -> None:
    moment: Promise[int] = Promise()
    assert (moment.over, moment.outcome, moment.error) == (False, None, None)
    with pytest.raises(TimeoutError):
        moment.result(0)
    moment.set_result(3)
    assert (moment.over, moment.outcome, moment.error, moment.result()) == (True, (3, None), None, 3)


@pytest.mark.parametrize("waits_first", [True, False])
def test_whoever_was_first_decided(waits_first: bool) -> None:
    error = ValueError("no")
    for first in ("result", "error"):
        moment: Promise[int] = Promise()
        future = moment.future() if waits_first else None
        for kind in (first, "result", "error"):
            if kind == "result":
                moment.set_result(1)
            else:
                moment.set_error(error)
        if future is not None:
            assert future.done()
        if first == "result":
            assert (moment.result(), moment.future().result(0)) == (1, 1)
        else:
            assert moment.error is moment.future().exception(0) is error
            with pytest.raises(ValueError, match="no"):
                moment.result()


def test_its_future_cannot_be_cancelled() -> None:
    moment: Promise[int] = Promise()
    assert not moment.future().cancel()

    async def wait() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(moment.future()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(wait())
    moment.set_result(2)
    assert moment.future().result(0) == 2


@pytest.mark.slow
def test_those_who_come_to_wait_while_it_happens_are_told() -> None:
    for number in range(300):
        moment: Promise[int] = Promise()
        start = threading.Barrier(4)
        found: list[int] = []

        def wait(moment: Promise[int] = moment, start: threading.Barrier = start, found: list[int] = found) -> None:
            start.wait()
            found.append(moment.result(30))

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        moment.set_result(number)
        for thread in threads:
            thread.join()
        assert found == [number] * 3


def test_waiting_for_a_while_leaves_nothing_behind() -> None:
    moment: Promise[int] = Promise()
    for timeout in (0, 0.001, -1):
        with pytest.raises(TimeoutError):
            moment.result(timeout)
    assert moment._facts == {"threads": []}
    moment.set_error(OSError("gone"))
    for patience in (0, None, 1e30):
        with pytest.raises(OSError, match="gone"):
            moment.result(patience)


@pytest.mark.parametrize("first", [0, 1])
def test_a_thread_that_waits_for_either_goes_on_with_the_first_and_the_other_may_follow(first: int) -> None:
    moments: list[Promise[int]] = [Promise(), Promise()]
    assert not wait_for_any(moments, 0)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(wait_for_any(moments)))
    thread.start()
    for moment in (moments[first], moments[1 - first]):
        moment.set_result(1)
    thread.join()
    assert found == [True]
    assert wait_for_any(moments)
