"""Ranks of a group that are threads of this process, so that they share an object store of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from pccheck_async import Group

T = TypeVar("T")


def on_ranks(world: int, function: Callable[[Group], T], seconds: float = 100) -> list[T]:
    """Run ``function`` on every rank, each on a thread; return what each returned, by rank.

    Raises the error of the lowest rank that raised one, or TimeoutError.
    """
    store, results, errors = HashStore(), dict[int, T](), dict[int, BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = function(Group(rank, world, store, timeout=20))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    for rank in sorted(errors):
        raise errors[rank]
    if len(results) < world:
        raise TimeoutError(f"ranks {[rank for rank in range(world) if rank not in results]} did not end")
    return [results[rank] for rank in range(world)]
