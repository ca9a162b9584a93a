"""What all tests share: settings of pytest, and fixtures."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from pccheck_async.engine import EngineLoop
from pccheck_async.transfer import machine
from pccheck_async.transfer.operations import NativeOperations, Operations, PythonOperations

BACKENDS: dict[str, Callable[..., Operations]] = {
    "threads": NativeOperations,
    "python": PythonOperations,
}
"""Every I/O backend by its name."""

_set_aside_at = 0


def pytest_configure() -> None:
    gc.disable()  # until all is imported and collected: a million objects, none of them garbage
    # On a busy machine anything may take long; and states are drawn from strategies that filter much now and then.
    ignored = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much]
    hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=ignored)
    hypothesis.settings.load_profile("busy")
    # Tests run in two processes: threads that wait for each other's part of a sum would take the other one's core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # those that use two all the same spin for a core else
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # A job in the background ignores it, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "campaign" not in (config.option.markexpr or ""):  # also with `-m "not slow"`, which would replace a default
        campaigns = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=campaigns)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]
    # Those that take longest come first, so that no process ends with one of them alone.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at modules and collected tests again: there are a million objects of them.

    And fewer look at what tests make: with Python's own thresholds they are a fifteenth of the suite.
    """
    gc.enable()
    gc.set_threshold(20_000, 20, 10)
    _set_aside()


def pytest_runtest_logfinish() -> None:
    """Nor at those of the modules that a test imported: a Trainer collects all garbage whenever it begins to train."""
    if len(sys.modules) > _set_aside_at + 30:
        _set_aside()


def _set_aside() -> None:
    global _set_aside_at  # noqa: PLW0603 - how many modules there were
    gc.collect()
    gc.freeze()
    _set_aside_at = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def _first_loop() -> None:
    """The first uvloop of a process opens a pipe that stays; it is no leak."""
    EngineLoop().stop()


def need(backend: str) -> None:
    """Skip a test if the I/O backend does not work here."""
    if backend == "threads" and not NativeOperations.available():
        pytest.skip("the C extension was not built here")


@pytest.fixture(params=BACKENDS)
def io(request: pytest.FixtureRequest) -> str:
    """Every I/O backend in turn."""
    name: str = request.param
    need(name)
    return name


@pytest.fixture(scope="module")
def machine_asked_once() -> Iterator[None]:
    """Ask the kernel once what this process may use: of opening a store in memory that is half the time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("available_cores", "available_memory"):
            patch.setattr(machine, name, functools.cache(getattr(machine, name)))
        yield


@pytest.fixture(scope="session")
def dynamo() -> None:
    """Import what children would each import by themselves as soon as they shard or optimize, for two seconds each."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, such as where a forked child, which has no other, is to get the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder of a filesystem in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pccheck-test-") as folder:
        yield Path(folder)


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves threads or descriptors behind."""

    def threads() -> list[str]:
        # torch.compile leaves the monitor of tqdm behind, where that is installed.
        return [thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor"]

    fds, before = len(os.listdir("/proc/self/fd")), threads()
    yield
    deadline = time.monotonic() + 10
    while len(threads()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.01)  # told to end; on a busy machine that takes a moment
    assert len(threads()) <= len(before), threads()
    assert len(os.listdir("/proc/self/fd")) <= fds  # fewer: what an earlier test forgot was collected
