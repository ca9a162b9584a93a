"""Ctrl-C, anywhere: a shelf is what it was before a change or after it, and memory says what the file says."""

from __future__ import annotations

import dis
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from pccheck_async import Shelf
from pccheck_async.errors import StoreFailedError
from pccheck_async.medium.windows import WindowedFile
from tests.support.interrupts import interrupter

# Python swallows what is raised inside a finalizer, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

COUNT = 4096
LOOKS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME")
"""Byte codes after which Python looks for signals."""


def start(path: Path) -> Shelf:
    shelf = Shelf(path, 1 << 20)
    with shelf.transaction():
        shelf["a"] = np.zeros(COUNT)
        shelf["b"] = np.zeros(COUNT)
        shelf["list"] = [0, np.zeros(8)]
    return shelf


def look(shelf: Shelf) -> tuple[Any, ...]:
    """Return all that a shelf holds, having found each variable in one piece."""
    a, b, values = shelf["a"], shelf["b"], shelf["list"]
    assert (a == a[0]).all()
    assert (b == b[0]).all()
    assert (values[1] == values[1][0]).all()
    more = {name: float(shelf[name][0]) for name in sorted(shelf) if name not in ("a", "b", "list")}
    return float(a[0]), float(b[0]), values[0], float(values[1][0]), more, shelf.nbytes


def assign(shelf: Shelf, number: int) -> None:
    shelf["a"] = np.full(COUNT, float(number))


def in_place(shelf: Shelf, number: int) -> None:
    a, b = shelf["a"], shelf["b"]
    with shelf.transaction("a", "b"):
        a[:] = number
        b[:] = -number


def both(shelf: Shelf, number: int) -> None:
    with shelf.transaction("b", "list"):
        shelf["a"] = np.full(COUNT, float(number))
        shelf["b"][:] = number
        shelf["list"][0] = number
        shelf["list"][1][:] = number


def nested(shelf: Shelf, number: int) -> None:
    with shelf.transaction("a"):
        shelf["a"][:] = number
        with shelf.transaction("b"):
            shelf["b"][:] = number
        shelf["more"] = np.full(16, float(number))


def new_and_gone(shelf: Shelf, number: int) -> None:
    if "more" in shelf:
        del shelf["more"]
    else:
        shelf["more"] = np.full(16, float(number))


def grow(shelf: Shelf, number: int) -> None:
    shelf.grow(shelf.nbytes + 8192)


def expected(change: Callable[[Shelf, int], None], number: int, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a look finds after a change."""
    a, b, first, second, more, nbytes = before
    value = float(number)
    if change is assign:
        return value, b, first, second, more, nbytes
    if change is in_place:
        return value, -value, first, second, more, nbytes
    if change is both:
        return value, value, number, value, more, nbytes
    if change is nested:
        return value, value, first, second, {"more": value}, nbytes
    if change is new_and_gone:
        return a, b, first, second, {} if more else {"more": value}, nbytes
    return a, b, first, second, more, nbytes + 8192


CHANGES: tuple[Callable[[Shelf, int], None], ...] = (assign, in_place, both, nested, new_and_gone, grow)


def reopened(shelf: Shelf) -> Shelf:
    """Compare memory with the file, its free space included, and open it again."""
    found, free, path = look(shelf), shelf.free_bytes, shelf.path
    shelf.close()
    again = Shelf(path)
    assert again.verify() == ()
    assert look(again) == found
    assert again.free_bytes == free
    return again


def interrupted_at(point: int, work: Callable[[], None]) -> bool:
    """Send this process a SIGINT at a point of ``work``, counted in byte codes and calls; False where it has fewer."""
    count, before = 0, dict[FrameType, int]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        last, before[frame] = before.get(frame), frame.f_lasti
        # In the code of a user at the points alone where Python looks for signals: between the end of a block and the
        # call of __exit__ it does not, and no context manager could hold an interrupt back there.
        looks = last is not None and dis.opname[frame.f_code.co_code[last]] in LOOKS
        if event == "call" or (event == "opcode" and (looks or frame.f_code.co_filename != __file__)):
            count += 1
            if count == point:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    handler, tracer = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    try:
        sys.settrace(trace)
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(tracer)
        assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler
    return count >= point


def sweep(path: Path, change: Callable[[Shelf, int], None], stride: int) -> dict[str, int]:
    """Interrupt a change at every point of it, or at every so many."""
    shelf, number, point, seen = start(path), 0, 1, {"before": 0, "after": 0}
    look(shelf)
    while True:
        number += 1
        before = look(shelf)
        after = expected(change, number, before)
        if not interrupted_at(point, partial(change, shelf, number)):
            break
        found = look(shelf)
        assert found in (before, after), (point, found, before, after)
        seen["before" if found == before else "after"] += 1
        shelf = reopened(shelf)
        other = threading.Thread(target=look, args=(shelf,))  # no lock is left behind
        other.start()
        other.join(30)
        assert not other.is_alive()
        point += stride
    shelf.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_interrupt_at_some_byte_codes(change: Callable[[Shelf, int], None], shared_memory: Path) -> None:
    seen = sweep(shared_memory / "shelf", change, 67)
    assert seen["before"] > 0
    assert seen["after"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_interrupt_at_every_byte_code(change: Callable[[Shelf, int], None], shared_memory: Path) -> None:
    sweep(shared_memory / "shelf", change, 1)


def storm(path: Path, seed: int, rounds: int) -> dict[str, int]:
    """Interrupt so many changes from outside; each look is compared with what was there before, and is to be after.

    Once a commit has begun, all of it is "after", and how long that takes depends on the machine and its load: the
    interrupts come earlier after each that came too late for "before", and later after others.
    """
    choose, seen, number = random.Random(seed), {"before": 0, "after": 0}, 0
    shelf, within = start(path), dict.fromkeys(CHANGES, 0.001)
    with interrupter(seed) as source:
        for _ in range(rounds):
            number += 1
            change, before = choose.choice(CHANGES), look(shelf)
            try:
                source.ask(within[change])
                change(shelf, number)
                source.wait()
            except KeyboardInterrupt:
                pass
            found = look(shelf)
            assert found in (before, expected(change, number, before)), change.__name__
            seen["before" if found == before else "after"] += 1
            within[change] *= 1.1 if found == before else 0.95
            if number % 10 == 0:
                shelf = reopened(shelf)
    shelf.close()
    return seen


@pytest.mark.slow
def test_a_storm_of_interrupts(shared_memory: Path) -> None:
    seen = storm(shared_memory / "shelf", 1, 60)
    assert sum(seen.values()) == 60


@pytest.mark.campaign
def test_a_storm_of_2000_interrupts(path: Path, record_property: Callable[[str, object], None]) -> None:
    seen = storm(path, 2, 2000)
    record_property("seen", seen)
    assert min(seen.values()) > 100


@pytest.mark.parametrize("change", [assign, grow])
def test_what_else_ends_a_commit_before_memory_follows_latches_the_shelf(
    change: Callable[[Shelf, int], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all that comes out of the blue is a KeyboardInterrupt."""
    shelf, flushes = start(path), []
    before = look(shelf)
    flush = WindowedFile.flush

    def flush_and_end(self: WindowedFile) -> None:
        flush(self)
        flushes.append(1)
        if len(flushes) == 2:  # that of the root
            raise GeneratorExit

    monkeypatch.setattr(WindowedFile, "flush", flush_and_end)
    with pytest.raises(GeneratorExit):
        change(shelf, 1)
    monkeypatch.undo()
    with pytest.raises(StoreFailedError, match=r"a commit was interrupted.*reopen it"):
        assign(shelf, 2)
    shelf.close()
    with Shelf(path) as again:
        assert look(again) == expected(change, 1, before)


def test_the_handler_of_the_user_is_called_and_stays(path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: told.append(1))
    mine = signal.getsignal(signal.SIGINT)
    try:
        with start(path) as shelf:
            with shelf.transaction("a"):
                signal.raise_signal(signal.SIGINT)
                assert told == [1]
            assert signal.getsignal(signal.SIGINT) is mine
            with shelf.transaction("a"):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_transaction_that_never_ends_leaves_no_handler(tmp_path: Path) -> None:
    with Shelf(tmp_path / "shelf", 1 << 20) as shelf:
        begun = shelf.transaction()
        begun.__enter__()
        shelf["x"] = 1
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        del begun
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert "x" not in shelf
