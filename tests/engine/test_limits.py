"""What the machine lacks, threads, descriptors, locks, is an error of this package that says what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.errors import StoreLockedError, read_error, write_error
from tests.support.children import in_child
from tests.support.limits import limit_threads, limited_descriptors

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    return tmp_path / "store"


def said(look: Callable[[], object]) -> str:
    """Return what an error of this package says, "" without one; any other error is raised."""
    try:
        look()
    except CheckpointError as error:
        return str(error)
    return ""


def looks(store: Path, io: str) -> list[str]:
    return [
        said(lambda: load_sync(store, io=io)),  # type: ignore[arg-type]
        said(lambda: SyncCheckpointEngine(store, storage=StorageOptions(io=io)).open().close()),  # type: ignore[arg-type]
    ]


def test_too_few_descriptors(store: Path, io: str) -> None:
    def work() -> list[list[str]]:
        found = []
        for free in range(14):
            with limited_descriptors(free):
                found.append(looks(store, io))
        return found

    found: list[list[str]] = in_child(work)
    assert found[-1] == ["", ""]  # and some are enough
    told = [text for both in found for text in both if text]
    assert len(told) >= 8
    assert all("ulimit -n" in text for text in told), told


def test_no_threads(store: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    for left in range(2):
        for look in (load_sync, lambda path, io: SyncCheckpointEngine(path, storage=StorageOptions(io=io)).open()):
            with monkeypatch.context() as patch:
                limit_threads(patch, left)
                assert "pids.max" in said(lambda look=look: look(store, io=io))  # type: ignore[misc]
    assert threading.active_count() <= before + 1


def test_a_filesystem_without_locks_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int, __: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refused)  # as a client of Lustre without -o flock
        for text in looks(store, "auto"):
            assert "flock: No locks available" in text
            assert "-o flock" in text
    assert looks(store, "auto") == ["", ""]


def test_a_stale_handle_says_what_to_do() -> None:
    stale = OSError(errno.ESTALE, "Stale file handle")
    for mapped in (read_error(stale, "x"), write_error(stale, "x")):
        assert mapped.errno == errno.ESTALE
        assert "mount its filesystem again" in str(mapped)


@pytest.mark.parametrize(("world", "told"), [("4", True), ("1", False), ("", False)])
def test_a_group_that_was_forgotten(store: Path, monkeypatch: pytest.MonkeyPatch, world: str, told: bool) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    fd = os.open(store / "commit", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError) as raised:
            SyncCheckpointEngine(store, storage=StorageOptions(lock_timeout=0.0)).open()
    finally:
        os.close(fd)
    assert ("group=dist.group.WORLD" in str(raised.value)) == told
