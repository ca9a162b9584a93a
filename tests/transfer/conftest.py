"""What the tests of operations share."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import mmap
import os
import resource
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]

CHUNK = 1 << 20


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the runner's loop, where its operations live."""

    @functools.wraps(test)
    def run(runner: asyncio.Runner, **arguments: Any) -> None:
        runner.run(test(runner=runner, **arguments))

    return run


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture
def room_for_threads() -> Iterator[Callable[[int], None]]:
    """Limit how many more threads find room for their stacks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    stack = threading.stack_size(1 << 30)

    def limit(count: int) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (count << 30) + (1 << 29), hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    threading.stack_size(stack)


class Owner:
    """Something a weak reference can watch."""


def address_of(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def table(*segments: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("=QQQ", *segment) for segment in segments)


def threads_now() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_fall_to(count: int) -> bool:
    """Wait until no more threads are left: a joined one stays in ``/proc`` until the kernel has freed it."""
    for _ in range(100_000):
        if threads_now() <= count:
            return True
        os.sched_yield()
    return False


def fds_now() -> int:
    return len(os.listdir("/proc/self/fd"))
