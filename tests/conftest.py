from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from pccheck_async.loop import EngineLoop
from pccheck_async.operations import native


@pytest.fixture(scope="session", autouse=True)
def _first_loop() -> None:
    """The first uvloop of a process opens a pipe that stays; it is no leak."""
    EngineLoop().stop()


def engines() -> list[str]:
    """Names of the I/O engines that can run here."""
    return ["threads", "python"] if native.available() else ["python"]


@pytest.fixture(params=["threads", "python"])
def io(request: pytest.FixtureRequest) -> str:
    """Every I/O engine in turn."""
    name: str = request.param
    if name not in engines():
        pytest.skip("the C extension was not built here")
    return name


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves threads or descriptors behind."""
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # told to end; on a busy machine that takes a moment
    assert threading.active_count() == threads, [thread.name for thread in threading.enumerate()]
    assert len(os.listdir("/proc/self/fd")) == fds
