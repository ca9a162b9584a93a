"""A promise: something that happens once, with a result or an error, and that any thread may set or wait for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter
from typing import Any, Generic, TypeVar

__all__ = ["Promise", "wait_for_any"]

T = TypeVar("T")
_is_over = attrgetter("over")


class Promise(Generic[T]):
    """Something that happens once, with a result or an error; any thread may set, read or await it.

    Most promises are over when they are read, or are never read. So a future, which takes longer to make than all
    else here, is made only for coroutines that have to wait; a thread waits at a lock of its own. The promise itself
    has no lock, so a signal handler that uses it cannot deadlock: the first caller of ``dict.setdefault`` wins.
    """

    __slots__ = ("_facts",)

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}  # "outcome": result and error; "future", "threads": of waiting callers

    @property
    def over(self) -> bool:
        """Whether it has happened."""
        return "outcome" in self._facts

    @property
    def outcome(self) -> tuple[T, BaseException | None] | None:
        """Its result and its error, None without one; None if it has not happened yet."""
        return self._facts.get("outcome")

    @property
    def error(self) -> BaseException | None:
        """Its error; None if there is none, or it has not happened yet."""
        outcome = self.outcome
        return None if outcome is None else outcome[1]

    def set_error(self, error: BaseException) -> None:
        """Set the error; only the first call of this or of :meth:`set_result` has an effect."""
        self.set_result(None, error)

    def set_result(self, result: T | None, error: BaseException | None = None) -> None:
        """Set the result, or else the error; only the first call of this or of :meth:`set_error` has an effect."""
        outcome = result, error
        if self._facts.setdefault("outcome", outcome) is not outcome:
            return
        for thread in [*self._facts.get("threads", ())]:
            with suppress(RuntimeError):  # another promise that it waits for was first
                thread.release()
        future = self._facts.get("future")
        if future is not None:
            _tell(future, outcome)

    def result(self, timeout: float | None = None) -> T:
        """Block until it has happened. Raises its error, or TimeoutError."""
        if "outcome" not in self._facts and not wait_for_any((self,), timeout):
            raise TimeoutError
        outcome: tuple[T, BaseException | None] = self._facts["outcome"]
        result, error = outcome
        if error is not None:
            raise error
        return result

    def future(self) -> Future[T]:
        """Return a future of it, which cannot be cancelled."""
        if not self.over:
            future: Future[T] = self._facts.setdefault("future", _running())
            if not self.over:
                return future  # it was there before the outcome, so that set_result finds it
        over: Future[T] = _running()
        _tell(over, self._facts["outcome"])
        return over

    def _threads(self) -> list[threading.Lock]:
        threads: list[threading.Lock] = self._facts.setdefault("threads", [])
        return threads


def wait_for_any(promises: Sequence[Promise[Any]], timeout: float | None = None) -> bool:
    """Block until one of them has happened; False if that takes longer than ``timeout`` seconds.

    If it is interrupted, it leaves no lock held. An interrupted wait for a future can leave one, and the thread that
    sets the result would then block.
    """
    mine = threading.Lock()
    mine.acquire()
    try:
        for promise in promises:
            promise._threads().append(mine)
        if not any(map(_is_over, promises)):  # else it may have been decided before this lock was added
            mine.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX))
    finally:
        for promise in promises:
            if not promise.over and mine in (threads := promise._threads()):  # not if it was interrupted before
                threads.remove(mine)
    return any(map(_is_over, promises))


def _running() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _tell(future: Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    result, error = outcome
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
