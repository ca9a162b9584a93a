"""Recovering stores whose records or store.json are lost."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from pccheck_async import NoCheckpointError, StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.cli import app
from pccheck_async.errors import CorruptStoreError, StoreLockedError
from pccheck_async.format import Entry
from pccheck_async.format import record as layout
from pccheck_async.format.record import COMMIT_NBYTES, REGION_NBYTES
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import (
    CrashDisk,
    CrashWriter,
    Image,
    ImageWriter,
    StuckWriter,
    WrappingWriter,
    power_loss_images,
)
from pccheck_async.transfer.operations import Operations
from pccheck_async.upkeep import recover
from pccheck_async.upkeep.salvage import FoundCheckpoint, record_entries
from tests.support.damage import BadBlocks
from tests.support.state_strategies import difference

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "machine_asked_once")
CHUNK = 4096


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "frozen": torch.arange(4000.0),
        "weights": torch.rand(3000 + 700 * (step % 3), generator=generator),
        "step": step,
    }


def save(path: Path, *steps: int, keep_last: int = 8) -> None:
    with SyncCheckpointEngine(
        path, keep_last=keep_last, max_in_flight=1, storage=StorageOptions(chunk_bytes=CHUNK)
    ) as engine:
        for step in steps:
            engine.checkpoint(state_of(step), step=step, metadata={"loss": step / 2}).result(60)


def slots_of(path: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.glob("slot-*")}


def check(path: Path, *steps: int) -> None:
    """The store is whole, holds these steps, and a trainer goes on with it."""
    assert [info.step for info in list_checkpoints(path)] == list(steps)
    found = stores.verify(path, every=True)
    assert found.whole
    assert [copy.state for copy in found.records] == ["valid"] * 4
    for step in steps:
        assert not difference(load_sync(path, step=step), state_of(step))
    with SyncCheckpointEngine(path, keep_last=8, storage=StorageOptions(chunk_bytes=CHUNK)) as engine:
        live = state_of(0) | {"weights": torch.zeros(3000 + 700 * (steps[0] % 3))}
        restored = engine.restore(live)
        assert restored is not None
        assert live["step"] == restored.step == steps[0]
        done = engine.checkpoint(state_of(90), step=90).result(60)
        assert done.counter == restored.counter + 1
    assert [info.step for info in list_checkpoints(path)] == [90, *steps]
    assert stores.verify(path, every=True).whole


def test_names_are_in_the_manifests_too(tmp_path: Path) -> None:
    """A name that was given again is that of the newer one."""
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        for step in (1, 2):
            name = "best" if step == 1 else "last"
            engine.checkpoint(state_of(step), step=step, name=name, metadata={"loss": step / 2}).result(60)
        engine.checkpoint(state_of(3), step=3, name="best", replace=True).result(60)
    (tmp_path / "commit").unlink()
    stores.recover(tmp_path, write=True)
    found = [(info.step, info.name, info.metadata) for info in list_checkpoints(tmp_path)]
    assert found == [(3, "best", {}), (2, "last", {"loss": 1.0}), (1, None, {"loss": 0.5})]


def test_records_that_are_older_than_the_slots_are_told_of(tmp_path: Path) -> None:
    """As after a live copy, or a backup of which only a part was put back; the slots hold newer checkpoints."""
    save(tmp_path, 1, 2, keep_last=2)
    assert not stores.recover(tmp_path).problems
    older = (tmp_path / "commit").read_bytes()
    with SyncCheckpointEngine(
        tmp_path, keep_last=2, max_in_flight=1, storage=StorageOptions(chunk_bytes=CHUNK)
    ) as engine:
        engine.restore(state_of(0) | {"weights": torch.zeros(3000 + 700 * 2)})
        for step in range(3, 9):
            engine.checkpoint(state_of(step), step=step).result(60)
    assert not stores.recover(tmp_path).problems
    (tmp_path / "commit").write_bytes(older)
    (problem,) = stores.recover(tmp_path).problems
    assert re.fullmatch(
        r"slot-00\d, slot-00\d: not what the newest record names there \(step 2, 1\)\. Damaged, or commit is older "
        r"than the slots, .* --search finds .*",
        problem,
    )
    with pytest.raises(CorruptStoreError, match="not what the newest record names"):
        stores.recover(tmp_path, write=True)
    stores.recover(tmp_path, write=True, search=True)
    assert [info.step for info in list_checkpoints(tmp_path)][:2] == [8, 7]
    assert stores.verify(tmp_path, every=True).whole


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["random", "zeros", "gone", "empty"])
@pytest.mark.parametrize("identity", ["kept", "gone", "damaged"])
def test_lost_records(tmp_path: Path, damage: str, identity: str) -> None:
    save(tmp_path, 1, 2, 3)
    infos = list_checkpoints(tmp_path)
    commit, store = tmp_path / "commit", tmp_path / "store.json"
    match damage:
        case "random":
            commit.write_bytes(os.urandom(COMMIT_NBYTES))
        case "zeros":
            commit.write_bytes(bytes(COMMIT_NBYTES))
        case "empty":
            commit.write_bytes(b"")
        case _:
            commit.unlink()
    match identity:
        case "gone":
            store.unlink()
        case "damaged":
            store.write_bytes(b"{" + store.read_bytes())
    before, slots = {file.name: file.read_bytes() for file in tmp_path.iterdir()}, slots_of(tmp_path)

    dry = stores.recover(tmp_path)
    assert dry.needed
    assert dry.named == tuple(infos)
    assert (dry.identity == "valid") is (identity == "kept")
    assert dry.record == ("missing" if damage == "gone" else "damaged")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

    done = stores.recover(tmp_path, write=True)
    assert done.written == (("commit",) if identity == "kept" else ("commit", "store.json"))
    assert slots_of(tmp_path) == slots
    for name in done.kept:
        assert (tmp_path / name).read_bytes() == before[name.removesuffix(".damaged-0")]
    assert len(done.kept) == (damage != "gone") + (identity == "damaged")
    assert list_checkpoints(tmp_path) == infos
    assert not stores.recover(tmp_path).needed
    check(tmp_path, 3, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("identity", ["gone", "damaged"])
def test_a_valid_record_decides_where_the_identity_is_lost(tmp_path: Path, identity: str) -> None:
    save(tmp_path, 1, 2, 3, 4, keep_last=2)  # the slots hold more than the record names
    infos, record = list_checkpoints(tmp_path), (tmp_path / "commit").read_bytes()
    if identity == "gone":
        (tmp_path / "store.json").unlink()
    else:
        (tmp_path / "store.json").write_bytes(bytes(100))
    dry = stores.recover(tmp_path)
    assert (dry.identity, dry.record, dry.found) == ("missing" if identity == "gone" else "damaged", "valid", ())
    assert dry.named == tuple(infos)
    stores.recover(tmp_path, write=True)
    assert (tmp_path / "commit").read_bytes() == record
    check(tmp_path, 4, 3)


def test_a_store_in_order_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    found = stores.recover(tmp_path)
    assert not found.needed
    assert found.named == tuple(list_checkpoints(tmp_path))
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert stores.recover(tmp_path, write=True).written == ()
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("records", ["valid", "of another format"])
def test_a_store_of_a_newer_format_is_left_alone(tmp_path: Path, records: str) -> None:
    save(tmp_path, 1, 2)
    store = tmp_path / "store.json"
    store.write_text(store.read_text().replace('"format": 1', '"format": 3'))
    if records != "valid":
        (tmp_path / "commit").write_bytes(os.urandom(COMMIT_NBYTES))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for write in (False, True):
        with pytest.raises(CorruptStoreError, match=r"says format 3.* recover it with the version that made it"):
            stores.recover(tmp_path, write=write)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_a_trainer_that_runs_is_not_disturbed(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=CHUNK)) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()} on .* has {re.escape(str(tmp_path))} open"):
            stores.recover(tmp_path, write=True, search=True)
        assert [info.step for info in stores.recover(tmp_path, search=True).named] == [1]
        engine.checkpoint(state_of(2), step=2).result(60)
    check(tmp_path, 2, 1)


class Waiting(WrappingWriter):
    """Tells when it was refused a lock."""

    def __init__(self, inner: Medium, refused: threading.Event) -> None:
        super().__init__(inner)
        self.refused = refused

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        locked = await super().lock(file, shared=shared)
        if not locked:
            self.refused.set()
        return locked


@pytest.mark.slow
def test_a_trainer_that_waits_for_a_recovery_goes_on_with_its_records(tmp_path: Path) -> None:
    """It waits for the file that is moved aside, and its records belong into the new one."""
    save(tmp_path, 1, 2, keep_last=1)
    recoverer: Queue[StuckWriter] = Queue()
    refused = threading.Event()

    def stuck(path: str, operations: Operations) -> Medium:
        recoverer.put(writer := StuckWriter(Files(path, operations), kinds=("replace",)))
        return writer

    def waiting(path: str, operations: Operations) -> Medium:
        return Waiting(Files(path, operations), refused)

    with ThreadPoolExecutor(2) as threads:
        recovering = threads.submit(stores.recover, tmp_path, write=True, search=True, io=stuck)
        writer = recoverer.get(timeout=60)
        writer.wait_stuck()
        engine = SyncCheckpointEngine(
            tmp_path, keep_last=8, storage=StorageOptions(chunk_bytes=CHUNK, io=waiting, lock_timeout=60)
        )
        opening = threads.submit(engine.open)
        assert refused.wait(60)
        writer.release()
        assert [info.step for info in recovering.result(60).named] == [2, 1]
        opening.result(60).checkpoint(state_of(3), step=3).result(60)
        engine.close()
    check(tmp_path, 3, 2, 1)


@pytest.mark.slow
def test_what_a_trainer_saved_until_it_let_go_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "LOCK_SECONDS", 60.0)
    refused = threading.Event()

    def waiting(path: str, operations: Operations) -> Medium:
        return Waiting(Files(path, operations), refused)

    with ThreadPoolExecutor(1) as threads:
        with SyncCheckpointEngine(tmp_path, keep_last=8, storage=StorageOptions(chunk_bytes=CHUNK)) as engine:
            recovering = threads.submit(stores.recover, tmp_path, write=True, search=True, io=waiting)
            assert refused.wait(60)
            engine.checkpoint(state_of(1), step=1).result(60)  # makes the first slots
        assert [info.step for info in recovering.result(60).named] == [1]
    check(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("identity", "commit"), [*product(["kept", "gone"], ["gone", "empty", "zeros"]), ("gone", "kept")]
)
def test_no_engine_makes_a_new_store_over_what_is_left(tmp_path: Path, commit: str, identity: str) -> None:
    save(tmp_path, 1, 2)
    if identity == "gone":
        (tmp_path / "store.json").unlink()
    if commit == "gone":
        (tmp_path / "commit").unlink()
    elif commit != "kept":
        (tmp_path / "commit").write_bytes(bytes(COMMIT_NBYTES if commit == "zeros" else 0))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CorruptStoreError, match="pccheck recover"):
        save(tmp_path, 3)
    if identity == "kept":
        with pytest.raises(CorruptStoreError, match="pccheck recover"):
            list_checkpoints(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    stores.recover(tmp_path, write=True)
    check(tmp_path, 2, 1)


@pytest.mark.slow
def test_one_recovery_at_a_time_where_there_is_no_commit_file_to_lock(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "commit").unlink()
    recoverer: Queue[StuckWriter] = Queue()

    def stuck(path: str, operations: Operations) -> Medium:
        recoverer.put(writer := StuckWriter(Files(path, operations), kinds=("replace",)))
        return writer

    with ThreadPoolExecutor(1) as threads:
        recovering = threads.submit(stores.recover, tmp_path, write=True, io=stuck)
        writer = recoverer.get(timeout=60)
        writer.wait_stuck()
        with pytest.raises(StoreLockedError, match="another process writes to a slot"):
            stores.recover(tmp_path, write=True)
        writer.release()
        assert [info.step for info in recovering.result(60).named] == [2, 1]
    check(tmp_path, 2, 1)


@pytest.mark.slow
def test_a_recovery_does_not_undo_the_one_before(tmp_path: Path) -> None:
    """And with it what a trainer committed since."""
    save(tmp_path, 1, 2)
    (tmp_path / "commit").unlink()

    class Late(WrappingWriter):
        async def lock(self, file: File, *, shared: bool = False) -> bool:
            if not (tmp_path / "commit").exists():
                await asyncio.to_thread(stores.recover, tmp_path, write=True)
                await asyncio.to_thread(save, tmp_path, 3)
            return await super().lock(file, shared=shared)

    with pytest.raises(StoreLockedError, match=r"another process recovered .* meanwhile: nothing was written"):
        stores.recover(tmp_path, write=True, io=lambda path, operations: Late(Files(path, operations)))
    check(tmp_path, 3, 2, 1)


@pytest.mark.parametrize("lacking", [errno.EMFILE, errno.EACCES])
def test_a_slot_that_this_process_cannot_open_is_not_left_out(tmp_path: Path, lacking: int) -> None:
    """It may be whole: with more descriptors, or as the user whose it is, the same command names it."""

    class Lacking(WrappingWriter):
        async def open(self, name: str, *, writable: bool) -> File:
            if name == "slot-000":
                raise OSError(lacking, os.strerror(lacking), name)
            return await super().open(name, writable=writable)

    save(tmp_path, 1, 2)
    (tmp_path / "commit").unlink()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match=os.strerror(lacking)):
        stores.recover(tmp_path, write=True, io=lambda path, operations: Lacking(Files(path, operations)))
    assert sorted(os.listdir(tmp_path)) == before
    stores.recover(tmp_path, write=True)
    check(tmp_path, 2, 1)


@pytest.mark.slow
def test_dropped_checkpoints_come_back_on_request(tmp_path: Path) -> None:
    """A slot that was freed, and not used again, still holds what it held."""
    save(tmp_path, 1, 2, keep_last=1)
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]
    assert [info.step for info in stores.recover(tmp_path, search=True).named] == [2, 1]
    stores.recover(tmp_path, write=True, search=True)
    check(tmp_path, 2, 1)


@pytest.mark.slow
def test_what_a_valid_record_pins_stays_pinned(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    stores.pin(tmp_path, step=2)
    stores.recover(tmp_path, write=True, search=True)
    assert [info.step for info in list_checkpoints(tmp_path) if info.pinned] == [2]


@pytest.mark.parametrize("what", ["lr", "counter", "time"])
def test_a_manifest_that_is_not_the_recorded_one_is_damaged(tmp_path: Path, what: str) -> None:
    """A manifest has no checksum of its own: a search alone takes a flipped plain value for the saved one."""
    values = {"lr": 0.001}
    for step in (1, 2):
        with SyncCheckpointEngine(tmp_path, keep_last=8) as engine:
            engine.restore(dict(values))
            engine.checkpoint(values, step=step).result(60)
    described = stores.describe(tmp_path, step=2)
    slot = tmp_path / described.slot
    image = bytearray(slot.read_bytes())
    entry = newest_in(tmp_path).entries[0]
    start, end = entry.manifest_offset, entry.manifest_offset + entry.manifest_nbytes
    old = {
        "lr": struct.pack(">d", 0.001),
        "counter": b"\xa7counter" + bytes([entry.counter]),
        "time": struct.pack(">d", entry.time),
    }
    at = image.index(old[what], start, end) + len(old[what]) - 1
    image[at] ^= 1
    slot.write_bytes(image)
    found = stores.recover(tmp_path, search=True)
    number = int(described.slot[-3:])
    assert [info.step for info in found.named] == [1]
    assert [one.note.partition(":")[0] for one in found.found if one.slot == number] == [
        "its manifest is not the one that the record names"
    ]
    assert f"DAMAGED: step 2, in {described.slot}." in found.problems
    said = CliRunner().invoke(app, ["recover", str(tmp_path), "--search"])
    assert said.exit_code == 4
    stores.recover(tmp_path, search=True, write=True)
    assert load_sync(tmp_path) == values
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    chosen = stores.recover(tmp_path, search=True, slots=[number])
    assert [info.counter for info in chosen.named] == [entry.counter ^ (what == "counter")]


def test_checkpoints_that_were_moved_are_said_to_be_elsewhere(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    slots = {step: tmp_path / stores.describe(tmp_path, step=step).slot for step in (2, 3)}
    contents = {step: slot.read_bytes() for step, slot in slots.items()}
    slots[2].write_bytes(contents[3])
    slots[3].write_bytes(contents[2])
    found = stores.recover(tmp_path, search=True)
    assert set(found.problems) == {
        f"Step {step} is in {slots[5 - step].name}, and not in {slots[step].name}, as the record says."
        for step in (2, 3)
    }
    assert not found.dropped
    stores.pin(tmp_path, step=2)
    stores.reject(tmp_path, step=3)
    assert not stores.recover(tmp_path, search=True, write=True).dropped
    assert [(info.step, info.pinned, info.rejected) for info in list_checkpoints(tmp_path)] == [
        (3, False, True),
        (2, True, False),
        (1, False, False),
    ]
    for step in (1, 2, 3):
        assert not difference(load_sync(tmp_path, step=step), state_of(step))


@pytest.mark.slow
def test_chosen_slots(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    described = stores.describe(tmp_path, step=2)
    (tmp_path / "commit").unlink()
    found = stores.recover(tmp_path, write=True, slots=[int(described.slot[-3:])])
    assert [info.step for info in found.named] == [2]
    assert [one.note for one in found.found if one.file != described.slot if one.info] == ["not asked for"] * 2
    check(tmp_path, 2)


def test_nothing_to_salvage(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="nor parts of one"):
        stores.recover(tmp_path)
    (tmp_path / "slot-000").write_bytes(os.urandom(10000))
    (tmp_path / "slot-001").write_bytes(b"")
    found = stores.recover(tmp_path)
    assert (found.named, [one.note for one in found.found]) == ((), ["no manifest"] * 2)
    with pytest.raises(NoCheckpointError, match=r"no slot holds a whole checkpoint; nothing was written"):
        stores.recover(tmp_path, write=True)
    assert sorted(os.listdir(tmp_path)) == ["slot-000", "slot-001"]


@pytest.mark.slow
def test_every_byte_of_a_slot_counts(tmp_path: Path) -> None:
    save(tmp_path, 1)
    described = stores.describe(tmp_path)
    (tmp_path / "commit").unlink()
    slot = tmp_path / described.slot
    whole = slot.read_bytes()
    end = described.manifest_offset + described.manifest_nbytes
    for offset in [*range(0, end, 997), described.manifest_offset, end - 1]:
        data = bytearray(whole)
        data[offset] ^= 4
        slot.write_bytes(data)
        found = stores.recover(tmp_path)
        if found.named:  # only what the manifest itself says can have changed unseen, as no record vouches for it
            assert offset >= described.manifest_offset
            continue
        if offset < described.manifest_offset:
            (one,) = (one for one in found.found if one.file == described.slot)
            assert [damage.offset for damage in one.damage] == [offset // CHUNK * CHUNK]
            assert one.info is not None
            assert one.info.step == 1
    slot.write_bytes(whole)
    assert [info.step for info in stores.recover(tmp_path).named] == [1]


@pytest.mark.parametrize(("bad", "whole"), [(9000, [1]), (200_000, [1, 0])])
def test_sectors_that_cannot_be_read(tmp_path: Path, bad: int, whole: list[int]) -> None:
    save(tmp_path, 0, 1)
    (tmp_path / "commit").unlink()
    with (tmp_path / "slot-000").open("ab") as file:
        file.write(bytes(300_000))  # behind the manifest, as a larger checkpoint leaves it

    def io(path: str, operations: Operations) -> Medium:
        return BadBlocks(Files(path, operations), {"slot-000": {bad // CHUNK}})

    found = stores.recover(tmp_path, io=io)
    assert [info.step for info in found.named] == whole
    if whole == [1]:
        assert [damage.offset for damage in found.found[0].damage] == [8192]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(7))
def test_a_newer_checkpoint_half_written_over_an_older_one(tmp_path: Path, chunk: int) -> None:
    """Whichever chunk was overwritten, and with or without the newer manifest."""
    save(tmp_path / "a", 3)
    save(tmp_path / "b", 6)  # of the same size
    older, newer = stores.describe(tmp_path / "a"), stores.describe(tmp_path / "b")
    assert older.manifest_offset == newer.manifest_offset
    assert older.slot == newer.slot
    old, new = ((tmp_path / name / older.slot).read_bytes() for name in "ab")
    at = older.chunks[chunk]
    assert len(older.chunks) == 7
    (tmp_path / "a" / "commit").unlink()
    for data in (
        old[: at.offset] + new[at.offset : at.offset + at.nbytes] + old[at.offset + at.nbytes :],
        new[: at.offset] + old[at.offset : at.offset + at.nbytes] + new[at.offset + at.nbytes :],
    ):
        (tmp_path / "a" / older.slot).write_bytes(data)
        named = stores.recover(tmp_path / "a").named
        changed = old[at.offset : at.offset + at.nbytes] != new[at.offset : at.offset + at.nbytes]
        assert changed is (chunk > 2)  # "frozen" fills the first chunks: the same bytes are the same checkpoint
        assert len(named) == (0 if changed else 1)


@pytest.mark.slow
def test_leftovers_of_a_larger_checkpoint(tmp_path: Path) -> None:
    """A slot used again by a smaller one still has the larger one's manifest behind it."""
    save(tmp_path / "a", 2)  # the largest
    save(tmp_path / "b", 3)  # the smallest
    large, small = stores.describe(tmp_path / "a"), stores.describe(tmp_path / "b")
    assert small.manifest_offset + small.manifest_nbytes < large.manifest_offset
    slot = tmp_path / "a" / large.slot
    data = (tmp_path / "b" / small.slot).read_bytes()[: small.manifest_offset + CHUNK]
    slot.write_bytes(data + slot.read_bytes()[len(data) :])
    (tmp_path / "a" / "commit").unlink()
    assert [info.step for info in stores.recover(tmp_path / "a").named] == [3]
    stores.recover(tmp_path / "a", write=True)
    check(tmp_path / "a", 3)


def test_a_slot_inside_a_tensor_is_somebodys_tensor(tmp_path: Path) -> None:
    """Bytes of a whole checkpoint, manifest and all, at the very beginning of another one's payload."""
    save(tmp_path / "inner", 1)
    described = stores.describe(tmp_path / "inner")
    data = (tmp_path / "inner" / described.slot).read_bytes()
    with SyncCheckpointEngine(tmp_path / "outer", storage=StorageOptions(chunk_bytes=1 << 20)) as engine:
        state = {"file": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
        engine.checkpoint(state, step=77).result(60)
    (tmp_path / "outer" / "commit").unlink()
    assert [info.step for info in stores.recover(tmp_path / "outer").named] == [77]


def found(slot: int, counter: int, time: float) -> FoundCheckpoint:
    entry = Entry(counter, counter * 10, time, 4096, slot, 4096, 100, 7, False, {})
    return FoundCheckpoint(slot, entry.info, 1, (), entry)


def test_the_order_of_what_was_found() -> None:
    entries, notes, strange = record_entries([found(0, 5, 50.0), found(1, 7, 70.0), found(2, 6, 60.0)])
    assert [entry.counter for entry in entries] == [7, 6, 5]
    assert (notes, strange) == ({}, set())
    two = [found(0, 5, 50.0), found(1, 6, 55.0), found(2, 6, 60.0)]
    entries, notes, strange = record_entries(two)
    assert [entry.slot for entry in entries] == [2, 0]
    assert ([*notes], strange) == ([1], {2})
    entries, notes, strange = record_entries(two, [one.entry for one in two[:2] if one.entry])
    assert [entry.slot for entry in entries] == [1, 0]
    assert ([*notes], strange) == ([2], set())
    late = [found(0, 9, 50.0), found(1, 6, 60.0)]  # of a run that went back, or another clock
    entries, notes, strange = record_entries(late)
    assert [entry.counter for entry in entries] == [9, 6]
    assert ([*notes], strange) == ([0], {0})
    assert record_entries(late, [one.entry for one in late if one.entry])[2] == set()
    entries, notes, _ = record_entries([found(n, n, float(n)) for n in range(70)])
    assert [entry.counter for entry in entries] == list(range(69, 5, -1))
    assert set(notes) == set(range(6))
    broken = msgspec.structs.replace(found(0, 1, 1.0).entry or entries[0], time=float("nan"))
    assert len(record_entries([FoundCheckpoint(0, broken.info, 1, (), broken), found(1, 2, 2.0)])[0]) == 2


@pytest.mark.slow
def test_whatever_is_offered_loads_to_the_bit() -> None:
    """A process that dies anywhere in a run, its last writes torn, and all of its records lost."""
    disk = CrashDisk()
    history: list[Any] = []
    disk.observer = history.append
    with SyncCheckpointEngine(
        "x", storage=StorageOptions(io=CrashWriter(disk), chunk_bytes=CHUNK), keep_last=1, max_in_flight=2
    ) as engine:
        for step in range(1, 7):
            engine.checkpoint(state_of(step), step=step)
    rng = random.Random(1)
    offered = partly = 0
    for snapshot in rng.sample(history, min(25, len(history))):
        dead = CrashDisk.after_process_death(snapshot, rng=rng)
        committed = list_checkpoints("x", io=ImageWriter(Image.of(dead.contents())))
        files = {name: data for name, data in dead.contents().items() if name != "commit"}
        if not any(name.startswith("slot") for name in files):
            continue
        left = CrashDisk.from_image(Image.of(files))
        result = stores.recover("x", io=CrashWriter(left, turns=0, read_only=True))
        partly += any(one.info and not one.whole for one in result.found)
        assert {info.counter for info in committed} <= {info.counter for info in result.named}
        if result.named:
            stores.recover("x", write=True, io=CrashWriter(left, turns=0))
            for info in list_checkpoints("x", io=CrashWriter(left, turns=0, read_only=True)):
                state = load_sync("x", step=info.step, io=CrashWriter(left, turns=0, read_only=True))
                assert not difference(state, state_of(info.step))
                offered += 1
    assert offered > 20
    assert partly > 0  # some slots were caught half written


def without_records(identity: str) -> CrashDisk:
    """A disk with a store of two checkpoints that lost its records, and maybe its identity."""
    disk = CrashDisk()
    with SyncCheckpointEngine(
        "x", storage=StorageOptions(io=CrashWriter(disk), chunk_bytes=CHUNK), keep_last=2
    ) as engine:
        for step in (1, 2):
            engine.checkpoint(state_of(step), step=step).result(60)
    files = dict(disk.contents()) | {"commit": bytes(COMMIT_NBYTES)}
    if identity == "gone":
        del files["store.json"]
    return CrashDisk.from_image(Image.of(files))


@pytest.mark.slow
@pytest.mark.parametrize("identity", ["kept", "gone"])
def test_a_recovery_that_loses_power_can_be_repeated(identity: str) -> None:
    disk = without_records(identity)
    files = disk.contents()
    history: list[Any] = [disk.snapshot()]
    disk.observer = history.append
    stores.recover("x", write=True, io=CrashWriter(disk))
    again = 0
    for snapshot in history:
        for image in power_loss_images(snapshot, sector=REGION_NBYTES, limit=8):
            left = CrashDisk.from_image(image)
            if stores.recover("x", io=CrashWriter(left, turns=0, read_only=True)).needed:
                stores.recover("x", write=True, io=CrashWriter(left, turns=0))
                again += 1
            steps = [info.step for info in list_checkpoints("x", io=CrashWriter(left, turns=0, read_only=True))]
            assert steps == [2, 1]
            assert {name: data for name, data in left.contents().items() if name.startswith("slot")} == {
                name: data for name, data in files.items() if name.startswith("slot")
            }
    assert again > 3


@pytest.mark.slow
@pytest.mark.parametrize("first", ["posix", "python"])
def test_without_store_json_the_block_size_fits(tmp_path: Path, first: str) -> None:
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io="python" if first == "python" else "auto")) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
    block = stores.describe(tmp_path).block_bytes
    (tmp_path / "store.json").unlink()
    (tmp_path / "commit").unlink()
    stores.recover(tmp_path, write=True)
    assert stores.describe(tmp_path).manifest_offset % stores.describe(tmp_path).block_bytes == 0
    assert stores.describe(tmp_path).block_bytes <= block
    check(tmp_path, 1)


@pytest.mark.parametrize("identity", ["kept", "gone"])
def test_what_a_recovery_wrote_survives_the_loss_of_power(identity: str) -> None:
    disk = without_records(identity)
    stores.recover("x", write=True, io=CrashWriter(disk))
    for image in power_loss_images(disk.snapshot(), sector=512, limit=64):
        assert [info.step for info in list_checkpoints("x", io=ImageWriter(image))] == [2, 1]


def test_a_search_that_finds_nothing_leaves_the_record_that_names_what_is_lost(tmp_path: Path) -> None:
    """With an empty one a trainer would begin anew, without a word."""
    save(tmp_path, 1, 2)
    for slot in tmp_path.glob("slot-*"):
        slot.unlink()
    before = (tmp_path / "commit").read_bytes()
    assert stores.recover(tmp_path, search=True).missing
    with pytest.raises(NoCheckpointError, match="no slot holds a whole checkpoint; nothing was written"):
        stores.recover(tmp_path, search=True, write=True)
    assert (tmp_path / "commit").read_bytes() == before


def test_nothing_but_an_identity_is_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in tmp_path.iterdir():
        if path.name != "store.json":
            path.unlink()
    with pytest.raises(NoCheckpointError, match="holds no store, nor parts of one"):
        stores.recover(tmp_path)


@pytest.mark.parametrize("foreign", ["store.json", "commit"])
def test_a_file_of_another_store_is_named(tmp_path: Path, foreign: str) -> None:
    for name in ("one", "other"):
        save(tmp_path / name, 1, 2, 3)
    stores.pin(tmp_path / "one", step=1)
    (tmp_path / "one" / foreign).write_bytes((tmp_path / "other" / foreign).read_bytes())
    found = stores.recover(tmp_path / "one")
    (problem,) = found.problems
    assert "one of the two was copied from elsewhere" in problem
    for read in (stores.verify, list_checkpoints, load_sync):  # they name it as well, and do not call `commit` damaged
        with pytest.raises(CorruptStoreError, match=r"store.json is of store .*one of the two was copied"):
            read(tmp_path / "one")
    written = stores.recover(tmp_path / "one", write=True)
    if foreign == "store.json":
        assert "--write makes store.json anew, and keeps the records" in problem
        assert written.written == ("store.json",)
        assert [info.step for info in list_checkpoints(tmp_path / "one") if info.pinned] == [1]
    else:
        assert "--write makes the records anew, from the slots" in problem
        assert written.written == ("commit",)
    check(tmp_path / "one", 3, 2, 1)


def test_a_newest_record_that_may_be_lost_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2, 3, keep_last=1)
    commit = bytearray((tmp_path / "commit").read_bytes())
    newest = generation_in(tmp_path) % 2
    for copy, byte in ((0, 80), (1, 90)):
        commit[(2 * newest + copy) * (1 << 16) + byte] ^= 1
    (tmp_path / "commit").write_bytes(commit)
    said = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert said.exit_code == 4
    assert "LOST?: both copies of a commit record are damaged" in said.stdout
    assert "pccheck recover" in said.stdout
    with SyncCheckpointEngine(tmp_path):
        pass
    assert "it may have named a newer checkpoint than step 2" in caplog.text
    assert "end the process before it saves" in caplog.text  # "before the next save" cannot be followed beside it
    stores.recover(tmp_path, search=True, write=True)
    assert list_checkpoints(tmp_path)[0].step == 3


def test_a_commit_file_that_was_cut_may_lack_the_newest_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, 3, keep_last=1)
    while generation_in(tmp_path) % 2 == 0:  # the newest record is in the half that is cut off
        save_one_more(tmp_path)
    last = list_checkpoints(tmp_path)[0].step
    os.truncate(tmp_path / "commit", 100_000)
    said = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert said.exit_code == 4
    assert "LOST?" in said.stdout
    with SyncCheckpointEngine(tmp_path):
        pass
    assert "it may have named a newer checkpoint than step" in caplog.text
    stores.recover(tmp_path, search=True, write=True)
    assert list_checkpoints(tmp_path)[0].step == last


def test_an_older_record_that_is_lost_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2, 3)
    commit = bytearray((tmp_path / "commit").read_bytes())
    older = 1 - generation_in(tmp_path) % 2
    for copy in (0, 1):
        commit[(2 * older + copy) * (1 << 16) + 80] ^= 1
    (tmp_path / "commit").write_bytes(commit)
    assert CliRunner().invoke(app, ["ls", str(tmp_path)]).exit_code == 0
    with SyncCheckpointEngine(tmp_path, keep_last=8):
        pass
    assert "newer checkpoint" not in caplog.text


def newest_in(store: Path) -> layout.Record:
    identity = layout.decode_identity((store / "store.json").read_bytes())
    record = layout.newest_record((store / "commit").read_bytes(), identity.id_bytes)
    assert record is not None
    return record


def generation_in(store: Path) -> int:
    return newest_in(store).generation


def save_one_more(store: Path) -> None:
    with SyncCheckpointEngine(store, keep_last=1, overwrite=True) as engine:
        engine.checkpoint(state_of(9), step=list_checkpoints(store)[0].step + 1).result(60)
