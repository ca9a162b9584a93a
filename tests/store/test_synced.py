"""What no double sees: which files and folders the kernel is told to flush, when, and how much is in them by then."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import NoCheckpointError, Shelf, SyncCheckpointEngine, load_sync
from pccheck_async.format import Record
from pccheck_async.format.record import GROUP_NAME
from pccheck_async.group import folder as group_folder
from pccheck_async.group.folder import domain_of
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.medium.mapped import MappedFiles
from pccheck_async.medium.open_medium import open_medium
from pccheck_async.medium.windows import WindowedFile
from pccheck_async.store import StoreReader, rank_folders, rank_name
from pccheck_async.transfer import PAGE_BYTES, aligned_buffer
from tests.fixtures import BACKENDS
from tests.training.test_tuner import tuning_of

Inode = tuple[int, int]


def inode(path: Path | int) -> Inode:
    found = os.fstat(path) if isinstance(path, int) else path.stat()
    return found.st_dev, found.st_ino


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Inode, int, int]]:
    """Of every fsync: the file, its size and how many names it has by then."""
    noted: list[tuple[Inode, int, int]] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        found = os.fstat(fd)
        noted.append((inode(fd), found.st_size, found.st_nlink))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    return noted


def refuse(*_: object, **__: object) -> None:
    raise OSError(95, "Operation not supported")


# -- a group


@pytest.mark.parametrize("links", [True, False])
def test_the_id_of_a_group_is_durable_with_its_folder(
    tmp_path: Path, synced: list[tuple[Inode, int, int]], monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    folder = tmp_path / "new" / "group"
    domain_of(folder)
    path = folder / GROUP_NAME
    order = [found for found, *_ in synced]
    assert order[:2] == [inode(tmp_path), inode(folder.parent)]  # the names of both folders
    assert (inode(path), path.stat().st_size) in [(found, nbytes) for found, nbytes, _ in synced]
    assert order[-1] == inode(folder)  # its name comes last


def test_the_folder_of_a_rank_is_gone_by_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash: half of a store that is removed in place is a damaged store."""
    (tmp_path / rank_name(3)).mkdir()
    (tmp_path / rank_name(3) / "commit").touch()
    removed, rmtree = [], shutil.rmtree

    def noted(path: Path, **options: Any) -> None:
        assert not (tmp_path / rank_name(3)).exists()
        assert not rank_folders(tmp_path)
        removed.append(path)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    group_folder.remove_store(tmp_path, 3)
    assert len(removed) == 1
    assert not os.listdir(tmp_path)


# -- mapped files


def test_a_mapped_file_is_flushed_before_anything_is_stored_in_it(tmp_path: Path, io: str) -> None:
    """Crash: a new file has no size yet, or what a dead predecessor stored was in caches only (I12)."""

    async def main() -> None:
        operations = BACKENDS[io](io_threads=1, copy_threads=1)
        flush, noted = operations.flush, list[tuple[Inode, bytes]]()

        async def note(fd: int) -> Any:
            noted.append((inode(fd), os.pread(fd, 4, 0)))
            return await flush(fd)

        operations.flush = note  # type: ignore[method-assign]
        medium = MappedFiles(tmp_path / "store", operations)
        data = aligned_buffer(PAGE_BYTES)
        try:
            await medium.prepare(create=True)
            file = await medium.reserve("slot-000", PAGE_BYTES)
            for new, before in ((b"new!", b"\0\0\0\0"), (b"more", b"new!")):
                data[:4] = new
                await medium.make_durable([(file, [(0, data)])])
                assert noted == [(inode(tmp_path / "store" / "slot-000"), before)]
                noted.clear()
                await medium.close(file)
                file = await medium.open("slot-000", writable=True)
            await medium.make_durable([(file, ())])
            assert len(noted) == 1  # also where nothing is stored
        finally:
            await medium.close()
            await operations.close()

    asyncio.run(main())


# -- a shelf


def test_a_new_shelf_is_durable_before_it_has_a_name_and_its_name_when_it_is_made(
    tmp_path: Path, synced: list[tuple[Inode, int, int]]
) -> None:
    path = tmp_path / "shelf"
    WindowedFile.create(path, 4 * PAGE_BYTES, b"head")
    assert synced == [(inode(path), 4 * PAGE_BYTES, 0), (inode(tmp_path), *synced[1][1:])]


def test_a_shelf_is_flushed_before_it_is_mapped(tmp_path: Path, synced: list[tuple[Inode, int, int]]) -> None:
    """Crash: what builds on what a dead predecessor stored becomes durable, and that does not."""
    path = tmp_path / "shelf"
    with Shelf(path) as shelf:
        shelf["x"] = torch.ones(3)
    synced.clear()
    with Shelf(path) as shelf:
        assert synced[0][0] == inode(path)
        assert shelf["x"].tolist() == [1, 1, 1]


# -- settings of a tuning


def test_settings_are_durable_before_they_have_their_name_and_their_name_when_they_are_written(
    tmp_path: Path, synced: list[tuple[Inode, int, int]]
) -> None:
    tuning_of().write(tmp_path)
    synced.clear()
    path = tuning_of(nbytes=5).write(tmp_path)
    assert synced == [(inode(path), path.stat().st_size, 1), (inode(tmp_path), *synced[1][1:])]


# -- readers


def test_a_load_reads_the_records_once_before_the_slot_is_locked_and_once_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": torch.arange(9)}, step=1).result(60)
    read, lock, seen = StoreReader.record, Files.lock, list[str]()

    async def noting_record(self: StoreReader) -> Record:
        seen.append("record")
        return await read(self)

    async def noting_lock(self: Files, file: File, **options: bool) -> bool:
        seen.append("lock")
        return await lock(self, file, **options)

    monkeypatch.setattr(StoreReader, "record", noting_record)
    monkeypatch.setattr(Files, "lock", noting_lock)
    assert load_sync(tmp_path)["x"].tolist() == [*range(9)]
    assert seen == ["record", "lock", "record"]


def test_a_slot_that_the_newest_record_names_no_more_is_not_handed_out(tmp_path: Path) -> None:
    """However whole its bytes look: a writer may have begun to write over them before it was locked."""

    async def look(stale: Record | None) -> tuple[Record, object]:
        async with await open_medium(tmp_path, "auto", writers=1, copiers=1) as opened:
            reader = await StoreReader.open(opened)
            assert reader is not None
            found = await reader.lock(lambda record: next((it for it in record.entries if it.step == 1), None), stale)
            return await reader.record(), found

    with SyncCheckpointEngine(tmp_path, max_in_flight=1) as engine:
        engine.checkpoint({"x": torch.arange(9)}, step=1).result(60)
        record, found = asyncio.run(look(None))
        assert found is not None
        engine.checkpoint({"x": torch.arange(9)}, step=2).result(60)
    _, found = asyncio.run(look(record))
    assert found is None


@pytest.mark.slow
def test_a_reader_looks_again_once_the_slot_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot that the first look named is another checkpoint's by then."""
    store, newer = tmp_path / "store", tmp_path / "newer"

    def save(path: Path, steps: range) -> None:
        with SyncCheckpointEngine(path, max_in_flight=1) as engine:
            engine.restore({"x": torch.zeros(9)})
            for step in steps:
                engine.checkpoint({"x": torch.full((9,), float(step))}, step=step).result(60)

    save(store, range(1, 2))
    shutil.copytree(store, newer)
    save(newer, range(2, 5))
    lock: Callable[..., Any] = Files.lock
    locked: list[str] = []

    async def lock_late(self: Files, file: File, **options: bool) -> bool:
        if not locked:
            shutil.copytree(newer, store, dirs_exist_ok=True)
        locked.append(file.name)
        return bool(await lock(self, file, **options))

    monkeypatch.setattr(Files, "lock", lock_late)
    # It is not kept any more, and that is what the error says: nothing is damaged.
    with pytest.raises(NoCheckpointError, match="step 1"):
        load_sync(store, step=1)
    assert load_sync(store)["x"].tolist() == [4.0] * 9
