"""Stores on machines with pages of 4 and of 64 KiB, carried from one to the other, and on devices of large blocks.

The pages are only said to be larger, so what is checked here is every size and offset; the addresses of real pages of
64 KiB are the business of an emulator (test_ext_c.py).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.format.record import IDENTITY_NAME, REGION_NBYTES
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import CrashDisk, CrashWriter, WrappingWriter
from pccheck_async.transfer import map_memory, memory
from pccheck_async.transfer.operations import Operations

SMALL, LARGE = 4096, 65536
Machine = Callable[[int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this a machine with pages of so many bytes, as far as the package knows."""

    def use(page_bytes: int) -> None:
        changed = 0
        for name, module in list(sys.modules.items()):
            if name.startswith("pccheck_async") and hasattr(module, "PAGE_BYTES"):
                monkeypatch.setattr(module, "PAGE_BYTES", page_bytes)
                changed += 1
        assert changed > 1

    return use


class InBlocks(WrappingWriter):
    """A device that moves whole blocks only."""

    def __init__(self, inner: Medium, block_bytes: int) -> None:
        super().__init__(inner)
        self._block = block_bytes

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        self._check(offset, data)
        await super().write(file, offset, data)

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        self._check(offset, into)
        return await super().read(file, offset, into)

    def _check(self, offset: int, data: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        assert (offset % self._block, len(data) % self._block, address % SMALL) == (0, 0, 0)


def in_blocks(block_bytes: int) -> Callable[[str, Operations], Medium]:
    return lambda path, operations: InBlocks(Files(path, operations), block_bytes)


def state_of(step: int) -> dict[str, Any]:
    """The third one outgrows the slots of the others."""
    generator = torch.Generator().manual_seed(step)
    sizes = (5000, 300_000, 3) if step < 2 else (5000, 700_000, 300_000)
    return {"step": step, "tensors": [torch.rand(size, generator=generator) for size in sizes]}


def is_state_of(found: dict[str, Any], step: int) -> bool:
    return found["step"] == step and all(
        torch.equal(one, other) for one, other in zip(found["tensors"], state_of(step)["tensors"], strict=True)
    )


def save(folder: Path, step: int, block_bytes: int, **sizes: Any) -> None:
    storage = StorageOptions(io=in_blocks(block_bytes), **sizes)
    with SyncCheckpointEngine(folder, keep_last=2, storage=storage) as engine:
        if step:
            found = state_of(step - 1) | {"step": -1}
            for tensor in found["tensors"]:
                tensor.zero_()
            restored = engine.restore(found)
            assert restored is not None
            assert restored.step == step - 1
            assert is_state_of(found, step - 1)
        engine.checkpoint(state_of(step), step=step).result(60)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", ["auto", 5 * SMALL])
@pytest.mark.parametrize(("made_on", "moved_to"), [(SMALL, LARGE), (LARGE, SMALL), (LARGE, LARGE)])
def test_a_store_is_used_on_machines_with_other_pages(
    tmp_path: Path, machine: Machine, made_on: int, moved_to: int, chunk_bytes: Any
) -> None:
    """Saved, listed, loaded, restored, grown, and taken back."""
    for step, page_bytes in enumerate((made_on, moved_to, moved_to, made_on)):
        machine(page_bytes)
        save(tmp_path, step, made_on, chunk_bytes=chunk_bytes)
        for reader in (SMALL, LARGE):
            machine(reader)
            assert [info.step for info in list_checkpoints(tmp_path, io=in_blocks(made_on))] == [step, step - 1][
                : step + 1
            ]
            assert is_state_of(load_sync(tmp_path, io=in_blocks(made_on)), step)
    assert msgspec.json.decode((tmp_path / IDENTITY_NAME).read_bytes())["block_bytes"] == made_on


@pytest.mark.slow
def test_small_blocks_need_little_memory_on_large_pages_too(tmp_path: Path, machine: Machine) -> None:
    """And large blocks say what they need on small pages."""
    machine(SMALL)
    save(tmp_path / "small", 0, SMALL)
    machine(LARGE)
    save(tmp_path / "small", 1, SMALL, chunk_bytes=SMALL, host_memory=2 * SMALL)
    assert is_state_of(load_sync(tmp_path / "small", host_memory=1 << 20), 1)
    save(tmp_path / "large", 0, LARGE)
    machine(SMALL)
    with pytest.raises(ValueError, match=f"{2 * SMALL} bytes is less than one chunk of {LARGE} bytes"):
        save(tmp_path / "large", 1, LARGE, host_memory=2 * SMALL)


def test_a_device_of_large_blocks_under_small_pages(machine: Machine) -> None:
    machine(SMALL)
    disk = CrashDisk(block_bytes=LARGE)
    for step in range(3):
        with SyncCheckpointEngine("memory", storage=StorageOptions(io=CrashWriter(disk)), keep_last=2) as engine:
            engine.checkpoint(state_of(step), step=step).result(60)
        assert is_state_of(load_sync("memory", io=CrashWriter(disk, read_only=True)), step)
    assert msgspec.json.decode(disk.contents()[IDENTITY_NAME])["block_bytes"] == LARGE


@pytest.mark.parametrize("asked", [2 * REGION_NBYTES, 6 * SMALL])
def test_blocks_that_no_store_has_mean_buffered_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int) -> None:
    with SyncCheckpointEngine(tmp_path / "usual") as engine:
        if ", direct:" not in engine.statistics().io:
            pytest.skip("no direct I/O on this filesystem")
    monkeypatch.setattr("pccheck_async.medium.filesystem.direct_alignment", lambda fd: (512, asked))
    with SyncCheckpointEngine(tmp_path / "odd") as engine:
        assert f"buffered: O_DIRECT takes blocks of {asked} bytes" in engine.statistics().io
        engine.checkpoint(state_of(0), step=0).result(60)
    assert is_state_of(load_sync(tmp_path / "odd"), 0)


def test_huge_pages_only_where_they_are_small(machine: Machine) -> None:
    """With pages of 64 KiB a huge one has 512 MiB: touching one buffer of a large pool would take all of that."""
    assert memory.PAGE_BYTES != SMALL or "hg" in advice_of(map_memory(32 << 20)) or not thp()
    machine(LARGE)
    assert "hg" not in advice_of(map_memory(32 << 20))


def thp() -> bool:
    return Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def advice_of(mapped: Any) -> list[str]:
    """The kernel's flags of a mapping, as smaps has them."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the memory is not mapped")
