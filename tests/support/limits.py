"""A process that may start few more threads, or open few more files."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def limit_threads(patch: pytest.MonkeyPatch, left: int) -> None:
    """Let so many more threads be started, as under ``ulimit -u``."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if left <= 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    patch.setattr(threading.Thread, "start", limited)


@contextmanager
def limited_descriptors(free: int) -> Iterator[None]:
    """Let this process open so many more files, as under ``ulimit -n``."""
    gc.collect()  # loops that could not be made hold descriptors until then, and would give them back inside
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(used - len(os.listdir("/proc/self/fd")))]  # no gaps
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in held:
            os.close(fd)
