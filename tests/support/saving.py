"""An engine that saves one checkpoint after the other while a test looks at its store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from pccheck_async import SyncCheckpointEngine


@contextmanager
def saving(engine: SyncCheckpointEngine, state_of: Callable[[int], dict[str, Any]]) -> Iterator[None]:
    """Save the states of the steps 0, 1, ... in a thread, at least the first before the body runs."""
    stop, first = threading.Event(), engine.checkpoint(state_of(0), step=0)

    def save() -> None:
        for step in count(1):
            if stop.is_set():
                return
            engine.checkpoint(state_of(step), step=step).result(60)

    first.result(60)
    thread = threading.Thread(target=save)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
