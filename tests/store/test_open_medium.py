"""Which I/O backend is chosen, and what is said about it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync, open_checkpoint
from pccheck_async.medium.open_medium import IO, open_medium
from pccheck_async.transfer.operations import NativeOperations
from tests.fixtures import BACKENDS
from tests.support.elsewhere import without_extension
from tests.support.processes import open_files


def save_and_load(folder: Path, io: str) -> tuple[str, str]:
    """Save one checkpoint and check it; return what the statistics say of the backend, and the reason for it."""
    with SyncCheckpointEngine(folder, storage=StorageOptions(io=io)) as engine:  # type: ignore[arg-type]
        engine.checkpoint({"tensor": torch.arange(5000)}, step=1).result(60)
        found = engine.statistics()
    assert torch.equal(load_sync(folder)["tensor"], torch.arange(5000))
    return found.io, found.decisions.reasons["io"]


def test_the_backend_asked_for_is_used(tmp_path: Path, io: str) -> None:
    said, reason = save_and_load(tmp_path, io)
    assert said.startswith(f"{io}, ")
    assert reason == f"{io}: asked for"
    assert said.endswith(reason)


def test_auto_says_what_it_found(tmp_path: Path) -> None:
    said, reason = save_and_load(tmp_path, "auto")
    if not NativeOperations.available():
        assert reason == "python: the C extension was not built here"
    else:
        assert reason == "threads: the C extension was built here"
    assert said.startswith(reason.partition(":")[0])
    assert said.endswith(reason)


def engine(path: Path, io: IO) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(path, storage=StorageOptions(io=io))


@pytest.mark.parametrize("use", [engine, load_sync, list_checkpoints, open_checkpoint])
def test_io_uring_was_removed(tmp_path: Path, use: Callable[..., object]) -> None:
    with pytest.raises(
        ValueError, match=r"'io_uring' was removed.* io='threads' \(or 'auto'\) reads and writes the same"
    ):
        use(tmp_path / "store", io="io_uring")
    assert not (tmp_path / "store").exists()


def test_without_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_extension(monkeypatch)
    with pytest.raises(ValueError, match="io='threads' needs the C extension"):
        save_and_load(tmp_path, "threads")
    assert save_and_load(tmp_path, "auto")[1] == "python: the C extension was not built here"


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=", ".join(["auto", *BACKENDS])):
        save_and_load(tmp_path, "magic")


def test_a_function_that_makes_no_writer_leaves_nothing_behind(
    tmp_path: Path, nothing_left_behind: Callable[..., None]
) -> None:
    def fails(path: str, operations: object) -> None:
        raise RuntimeError("no writer")

    with (
        pytest.raises(RuntimeError, match="no writer"),
        SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=fails)),  # type: ignore[arg-type]
    ):
        pass


def test_a_cancelled_close_closes_the_files(tmp_path: Path) -> None:
    """Else they would stay locked, with nobody left to close them."""
    gate = threading.Event()

    async def main() -> None:
        opened = await open_medium(tmp_path, "python", writers=1, copiers=1)
        file = await opened.medium.reserve("file", 4096)
        assert await opened.medium.lock(file)
        running = asyncio.create_task(opened.operations.call(gate.wait, 60))
        await asyncio.sleep(0)
        closing = asyncio.create_task(opened.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await running
        assert not open_files(tmp_path)

    asyncio.run(main())
