"""Restoring and loading beside damage, odd metadata, and a busy writer."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import math
import os
import re
import sys
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from pccheck_async import (
    NoCheckpointError,
    StateMismatchError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    open_checkpoint,
    stores,
)
from pccheck_async.engine import peers
from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError
from pccheck_async.format import Entry, Record, crc32
from pccheck_async.format.record import decode_identity, encode_record, newest_record, region_offsets, slot_name
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.state import Allocation
from pccheck_async.store import choose
from pccheck_async.store.slots import open_slots
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter, Image, ImageWriter, StuckWriter, WrappingWriter
from pccheck_async.testing.probe import probe
from pccheck_async.transfer.operations import Operations
from tests.engine.test_inline_capture_engine import FOLDER, small
from tests.support.damage import BadBlocks
from tests.support.saving import saving

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "machine_asked_once")


def state_of(step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(3000) + step, "step": step}


def test_nan_in_the_metadata(tmp_path: Path) -> None:
    """A loss that is NaN is when people load."""
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(1), step=1, metadata={"loss": math.nan})
        engine.drain()
        assert math.isnan(float(engine.checkpoints()[0].metadata["loss"]))  # type: ignore[arg-type]
        assert load_sync(tmp_path)["step"] == 1
        assert engine.restore(state_of(0)) is not None
    assert math.isnan(float(list_checkpoints(tmp_path)[0].metadata["loss"]))  # type: ignore[arg-type]


class Logarithm(torch.nn.Module):
    """Keeps logarithms from version 2 on, and takes what has no version for older."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scales"] = state[f"{prefix}scales"].log()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("made", ["dict", "OrderedDict"])
def test_a_state_dict_that_is_the_whole_state_keeps_the_versions_of_its_modules(tmp_path: Path, made: str) -> None:
    model = Logarithm()
    with torch.no_grad():
        model.scales.copy_(torch.tensor([1.0, 2.0, 3.0]))
    state = model.state_dict()
    with SyncCheckpointEngine(tmp_path / "run") as engine:
        engine.checkpoint(dict(state) if made == "dict" else state, step=1).result(60)
    state["scales"] += 1
    torch.save(model.state_dict(), tmp_path / "t.pt")
    imported = stores.import_(tmp_path / "t.pt", tmp_path / "imported")
    stores.copy(tmp_path / "imported", tmp_path / "copy")
    assert stores.verify(tmp_path / "copy").whole
    assert not stores.compare(tmp_path / "imported", tmp_path / "copy").differences
    with open_checkpoint(tmp_path / "copy") as opened:
        lazily = opened.load()
    for place, loaded, values in (
        ("run", load_sync(tmp_path / "run"), [1.0, 2.0, 3.0]),
        ("imported", load_sync(tmp_path / "imported"), [2.0, 3.0, 4.0]),
        ("copy", lazily, [2.0, 3.0, 4.0]),
    ):
        assert type(loaded) is (dict if (place, made) == ("run", "dict") else OrderedDict)
        if type(loaded) is OrderedDict:
            fresh = Logarithm()
            fresh.load_state_dict(loaded)
            assert fresh.scales.tolist() == values
        with SyncCheckpointEngine(tmp_path / place) as engine:
            for other in (dict, OrderedDict):  # a restore fills either, as the outermost mapping is the caller's
                live = other(Logarithm().state_dict())
                info = engine.restore(live)
                assert info is not None
                assert live["scales"].tolist() == values
    assert imported.source == "torch"
    assert stores.recover(tmp_path / "copy", search=True).found[0].whole


@pytest.mark.parametrize("io", ["python", "auto"])
def test_an_unreadable_manifest_falls_back(tmp_path: Path, io: str) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step), step=step).result(60)

    def failing(path: str, operations: Operations) -> Medium:
        return FailingWriter(Files(path, operations), fail_at=4, kinds=("read",))

    with pytest.warns(RuntimeWarning, match="falling back to step 0"):
        assert load_sync(tmp_path, io=failing)["step"] == 0


def test_damage_that_took_long_to_find_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in range(2):
            engine.checkpoint({"x": torch.full((3000,), float(step))}, step=step).result(60)
    slot = next(path for path in tmp_path.glob("slot-*") if path.read_bytes().startswith(b"\x00\x00\x80?"))
    data = bytearray(slot.read_bytes())
    data[9000] ^= 1
    slot.write_bytes(data)
    monkeypatch.setattr("pccheck_async.group.place.LOCK_SECONDS", 0.0)  # of waiting for checkpoints that are replaced
    with pytest.warns(RuntimeWarning, match="falling back to step 0"):
        assert load_sync(tmp_path)["x"][0] == 0


def test_memory_that_runs_out_does_not_fall_back(tmp_path: Path) -> None:
    """The next commit would drop the newest checkpoint, which is whole."""
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step), step=step).result(60)
    newest = next(
        p for p in tmp_path.glob("slot-*") if p.read_bytes().startswith((torch.arange(3000) + 1).numpy().tobytes()[:64])
    ).name

    def scarce(path: str, operations: Operations) -> Medium:
        return BadBlocks(Files(path, operations), {newest: {0}}, error=errno.ENOMEM)

    with pytest.raises(ReadError, match=os.strerror(errno.ENOMEM)):
        load_sync(tmp_path, io=scarce)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=scarce), keep_last=2) as engine:
        with pytest.raises(ReadError, match=os.strerror(errno.ENOMEM)):
            engine.restore(state_of(9))
        assert [info.step for info in engine.checkpoints()] == [1, 0]


@pytest.mark.filterwarnings("error")
def test_a_device_that_fails_once_does_not_cost_the_only_checkpoint_that_is_kept(tmp_path: Path) -> None:
    """What it superseded takes its place only where it cannot be read again, either: the next commit would drop it."""
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step in range(3):
            engine.checkpoint(state_of(step), step=step).result(60)

    class Once(WrappingWriter):
        failed = False

        async def read(self, file: File, offset: int, into: memoryview) -> int:
            if offset == 4096 and file.name.startswith("slot") and not self.failed:
                self.failed = True
                raise ReadError(errno.EIO, os.strerror(errno.EIO), file.name)
            return await super().read(file, offset, into)

    def once(path: str, operations: Operations) -> Medium:
        return Once(Files(path, operations))

    assert load_sync(tmp_path, io=once)["step"] == 2
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=once)) as engine:
        live = state_of(9)
        assert engine.restore(live) is not None
        assert live["step"] == 2
        assert torch.equal(live["tensor"], torch.arange(3000) + 2)


@pytest.mark.slow
def test_restore_beside_commits(tmp_path: Path) -> None:
    """What was newest when a restore began may be gone when it looks: then a newer one is taken."""
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=4096)) as engine, saving(engine, state_of):
        for _ in range(50):
            live = state_of(-1)
            info = engine.restore(live)
            assert info is not None
            assert info.step == live["step"]
            assert torch.equal(live["tensor"], torch.arange(3000) + info.step)


def test_a_mismatch_after_a_damaged_newer_one_says_what_may_have_happened(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        engine.checkpoint({"other": torch.zeros(3000)}, step=0).result(60)
        engine.checkpoint(state_of(1), step=1).result(60)
    wanted = (torch.arange(3000) + 1).numpy().tobytes()[:64]
    slot = next(path for path in tmp_path.glob("slot-*") if path.read_bytes().startswith(wanted))
    data = bytearray(slot.read_bytes())
    data[9000] ^= 1
    slot.write_bytes(data)
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        with pytest.warns(RuntimeWarning, match="falling back"), pytest.raises(StateMismatchError) as mismatch:
            engine.restore(state_of(9))
        assert any("may hold parts" in note for note in mismatch.value.__notes__)


def test_a_failure_while_arrays_are_filled_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No damage, and so no fall-back: but some arrays are new, and others are not."""
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=4096)) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
        read, reads = Files.read, itertools.count()

        async def fail(files: Files, file: File, offset: int, into: memoryview) -> int:
            if next(reads) == 2:
                raise ReadError(errno.ENOMEM, "no memory", file.name)
            return await read(files, file, offset, into)

        monkeypatch.setattr(Files, "read", fail)
        with pytest.raises(ReadError) as failed:
            engine.restore(state_of(9))
        assert any("may hold parts" in note for note in failed.value.__notes__)
        error: BaseException | None = failed.value
        while error is not None:
            assert error.__cause__ is not error
            error = error.__cause__


def test_an_object_is_asked_for_its_state_once_for_all_candidates(tmp_path: Path) -> None:
    class Asked:
        calls = 0

        def __init__(self, value: float) -> None:
            self.tensor = torch.full((3000,), value)

        def state_dict(self) -> dict[str, Any]:
            self.calls += 1
            return {"tensor": self.tensor}

        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            assert state_dict["tensor"] is self.tensor

    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step in range(2):
            engine.checkpoint({"x": Asked(float(step))}, step=step).result(60)
    slot = next(path for path in tmp_path.glob("slot-*") if path.read_bytes().startswith(b"\x00\x00\x80?"))
    data = bytearray(slot.read_bytes())
    data[9000] ^= 1
    slot.write_bytes(data)
    live = Asked(5.0)
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        with pytest.warns(RuntimeWarning, match="falling back"):
            restored = engine.restore({"x": live})
        assert restored is not None
        assert restored.step == 0
    assert live.calls == 1
    assert not live.tensor.any()


def test_what_a_damaged_one_began_to_fill_is_not_left_as_it_is(tmp_path: Path) -> None:
    """Where the older one lacks it: it is neither what it was nor what was saved."""
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        engine.checkpoint({"a": torch.zeros(9), "none": None}, step=0).result(60)
        engine.checkpoint({"a": torch.ones(9), "b": {"t": torch.ones(3000)}, "none": None}, step=1).result(60)
    slot = next(path for path in tmp_path.glob("slot-*") if path.read_bytes().startswith(b"\x00\x00\x80?"))
    data = bytearray(slot.read_bytes())
    data[9000] ^= 1
    slot.write_bytes(data)

    def live() -> dict[str, Any]:
        return {"a": torch.full((9,), 5.0), "b": {"t": torch.full((3000,), 5.0)}}

    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        with pytest.warns(RuntimeWarning, match="falling back"), pytest.raises(StateMismatchError) as mismatch:
            engine.restore(live(), strict=False)
        assert "step 0 lacks what a damaged one had begun to fill: b.t; make" in str(mismatch.value)
        assert any("may hold parts" in note for note in mismatch.value.__notes__)
        state = live()
        restored = engine.restore(state, step=0, strict=False)
        assert restored is not None
        assert restored.missing == ("b",)
        assert state["b"]["t"].tolist() == [5] * 3000


def test_a_restore_touches_a_few_buffers(tmp_path: Path) -> None:
    """After a restart staging memory is new, and every page of it has to be zeroed by the kernel first."""
    chunks, chunk_bytes = 40, 8192
    state = {"tensor": torch.arange(chunks * chunk_bytes // 8)}
    saved = state["tensor"].clone()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=chunk_bytes)) as engine:
        engine.checkpoint(state, step=1).result()
    state["tensor"].zero_()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=chunk_bytes)) as engine:
        assert engine.restore(state) is not None
        assert torch.equal(state["tensor"], saved)
        assert engine.statistics().decisions.host_memory >= chunks * chunk_bytes
        assert 1 < engine.statistics().pool_peak <= 8


def test_keys_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(1), step=1)
    with pytest.raises(StateMismatchError, match="nothing"):
        load_sync(tmp_path, keys=["nothing.*"])


LOOK_ALIKES = {
    "a": {"b": {"c": 1, "d": 2}, "e.f": 3},
    "a.b": {"c": 4},
    "a.e": {"f": 5},
    "w": {"0.weight": 6, "1.bias": 7},
}


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        ("a.b.c", {"a": {"b": {"c": 1}}}),
        ("a.b", {"a": {"b": {"c": 1, "d": 2}}}),
        ("a.b.*", {"a": {"b": {"c": 1, "d": 2}}}),
        (r"a\.b.c", {"a.b": {"c": 4}}),
        (r"a\.b", {"a.b": {"c": 4}}),
        (["a.b.c", r"a\.b.c"], {"a": {"b": {"c": 1}}, "a.b": {"c": 4}}),
        ("a.*", {"a": LOOK_ALIKES["a"]}),
        ("a*", {key: value for key, value in LOOK_ALIKES.items() if key != "w"}),
        (r"w.0\.weight", {"w": {"0.weight": 6}}),
        ("w.0.weight", {"w": {"0.weight": 6}}),  # as modules name it: nothing is written like that, so it is clear
        ("*.0.weight", {"w": {"0.weight": 6}}),
        (["w.0.*", "a.b.c"], {"w": {"0.weight": 6}, "a": {"b": {"c": 1}}}),
    ],
)
def test_keys_name_what_is_written_like_them(tmp_path: Path, keys: Any, selected: Any) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(LOOK_ALIKES, step=1)
    assert load_sync(tmp_path, keys=keys) == selected


def test_keys_without_escapes_that_name_several(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(LOOK_ALIKES, step=1)
    several = re.escape(r"'a.e.f' is ambiguous, the name of several leaves: a.e\.f, a\.e.f; write it with its escapes")
    with pytest.raises(StateMismatchError, match=several):
        load_sync(tmp_path, keys=["a.e.f", "w"])


def test_a_checkpoint_dropped_before_its_restore_could_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(0), step=0).result(60)
        chosen = []

        def choose_and_commit(*arguments: Any) -> Any:
            chosen.append(choose(*arguments))
            if len(chosen) == 1:
                engine.checkpoint(state_of(1), step=1).result(60)
            return chosen[-1]

        monkeypatch.setattr(peers, "choose", choose_and_commit)
        live = state_of(9)
        info = engine.restore(live)
        assert info is not None
        assert (info.step, live["step"], len(chosen)) == (1, 1, 2)


class Interrupted(CrashWriter):
    """Calls something once, before a slot is opened or locked; counts the slots that are open."""

    def __init__(self, disk: CrashDisk, before: str, call: Any) -> None:
        super().__init__(disk, read_only=True)
        self._before, self._call = before, call
        self.open_slots = 0

    async def _interrupt(self, kind: str) -> None:
        if kind == self._before:
            self._before = ""
            await asyncio.to_thread(self._call)

    async def open(self, name: str, *, writable: bool) -> File:
        if name.startswith("slot-"):
            await self._interrupt("open")
        file = await super().open(name, writable=writable)
        self.open_slots += file.name.startswith("slot-")
        return file

    async def close(self, file: File | None = None) -> None:
        self.open_slots -= file is not None and file.name.startswith("slot-")
        await super().close(file)

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        await self._interrupt("lock")
        return await super().lock(file, shared=shared)


@pytest.mark.parametrize("before", ["open", "lock"])
@pytest.mark.parametrize("grown", [False, True])
def test_a_checkpoint_that_goes_while_a_reader_comes_is_no_damage(before: str, grown: bool) -> None:
    """Its slot has another's bytes, or is removed: the reader looks at the record again."""
    disk = CrashDisk()
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=CrashWriter(disk)), max_in_flight=1) as engine:

        def more() -> None:
            for step in range(1, 4):
                engine.checkpoint({"x": torch.full((90_000 if grown else 9,), step)}, step=step).result(30)
            engine.drain()

        engine.checkpoint({"x": torch.zeros(9)}, step=0).result(30)
        reader = Interrupted(disk, before, more)
        assert load_sync(FOLDER, io=reader)["x"].unique().tolist() == [3]


def test_a_reader_that_started_over_holds_one_slot() -> None:
    disk = CrashDisk()
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=CrashWriter(disk))) as engine:

        def more() -> None:
            for step in range(1, 4):
                engine.checkpoint(small(), step=step).result(30)

        engine.checkpoint(small(), step=0).result(30)
        reader = Interrupted(disk, "lock", more)
        with open_checkpoint(FOLDER, io=reader) as opened:
            assert opened.info.step == 3
            assert reader.open_slots == 1


@pytest.mark.parametrize("unknown", ["dtype", "format", "node"])
def test_what_this_version_does_not_understand_raises_and_stays(tmp_path: Path, unknown: str) -> None:
    """Its bytes are what was written: another version, or another torch, reads it."""
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step), step=step).result(60)
        engine.pin(step=1)
    replace_manifest(tmp_path, unknown)
    before = list_checkpoints(tmp_path)
    for read in (load_sync, open_checkpoint, stores.verify, stores.describe):
        with pytest.raises(
            CorruptStoreError, match=r"of checkpoint 1 .* is what was written, and not understood"
        ) as told:
            read(tmp_path)
        assert not isinstance(told.value, DamagedError)
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match="not understood"):
                engine.restore(state_of(9))
        restored = engine.restore(state_of(9), step=0)
        assert restored is not None
        engine.checkpoint(state_of(2), step=2).result(60)
    after = list_checkpoints(tmp_path)
    assert [info.step for info in after] == [2, 1]
    assert after[1] == before[0]


def replace_manifest(folder: Path, unknown: str) -> None:
    """Let the newest checkpoint say something of another version, with all checksums right."""
    identity = decode_identity((folder / "store.json").read_bytes())
    commit = bytearray((folder / "commit").read_bytes())
    record = newest_record(commit, identity.id_bytes)
    assert record is not None
    entry = record.entries[0]
    slot = folder / slot_name(entry.slot)
    content = bytearray(slot.read_bytes())
    tree = msgspec.msgpack.decode(content[entry.manifest_offset : entry.manifest_offset + entry.manifest_nbytes])
    match unknown:
        case "dtype":
            tree["tensors"][0][1] = "float1"
        case "format":
            tree["version"] = 2
            tree["more"] = None
        case _:
            tree["skeleton"] = ["sparse", tree["skeleton"]]
    data = msgspec.msgpack.encode(tree)
    content[entry.manifest_offset :] = data.ljust(len(content) - entry.manifest_offset, b"\0")
    slot.write_bytes(content)
    changed = structs.replace(entry, manifest_nbytes=len(data), manifest_checksum=crc32(data))
    named = Record(record.generation, (changed, *record.entries[1:]))
    copy = encode_record(named, identity.id_bytes, identity.block_bytes)
    for start in region_offsets(record.generation):
        commit[start : start + len(copy)] = copy
    (folder / "commit").write_bytes(commit)


# -- what the newest one superseded


def damage(folder: Path, step: int, how: str) -> None:
    slot = folder / stores.describe(folder, step=step).slot
    data = bytearray(slot.read_bytes())
    match how:
        case "chunk":
            data[9000] ^= 1
        case "manifest":
            data[stores.describe(folder, step=step).manifest_offset + 30] ^= 1
        case "gone":
            slot.unlink()
            return
    slot.write_bytes(data)


def saved_twice(folder: Path, how: str, **settings: Any) -> None:
    with SyncCheckpointEngine(folder, max_in_flight=1, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step), step=step).result(60)
    damage(folder, 1, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["chunk", "manifest", "gone"])
def test_the_one_that_the_newest_superseded_takes_its_place_while_it_is_whole(tmp_path: Path, how: str) -> None:
    saved_twice(tmp_path, how)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("[sc][lo]*")}
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"step 1 cannot be read .*; falling back to step 0") as warned:
            assert load_sync(tmp_path)["step"] == 0
        assert len(warned) == 1
    if how != "chunk":  # of a chunk that is not read nobody hears
        with pytest.warns(RuntimeWarning, match="falling back to step 0"), open_checkpoint(tmp_path) as opened:
            assert opened.info.step == 0
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    for step, error in ((1, DamagedError), (0, NoCheckpointError)):
        with pytest.raises(error):
            load_sync(tmp_path, step=step)
    with SyncCheckpointEngine(tmp_path, max_in_flight=1, storage=StorageOptions(chunk_bytes=4096)) as engine:
        live = state_of(9)
        with pytest.warns(RuntimeWarning, match="falling back to step 0"):
            restored = engine.restore(live)
        assert restored is not None
        assert torch.equal(live["tensor"], state_of(0)["tensor"])
        assert [info.step for info in engine.checkpoints()] == [0]
        again = engine.restore(state_of(9))  # it is the newest now: nothing is left to warn of
        assert again is not None
        assert again.step == 0
        assert {path.name: path.read_bytes() for path in tmp_path.glob("[sc][lo]*")} == before
        engine.checkpoint(state_of(2), step=2).result(60)
        assert [info.step for info in engine.checkpoints()] == [2]
        assert len(list(tmp_path.glob("slot-*"))) == 2  # no more than there were
        engine.checkpoint(state_of(3), step=3).result(60)
    assert [info.step for info in list_checkpoints(tmp_path)] == [3]
    assert load_sync(tmp_path)["step"] == 3
    assert len(list(tmp_path.glob("slot-*"))) == 2


def test_what_was_written_over_takes_no_place(tmp_path: Path) -> None:
    """And the error is that of the newest; each time, not only once."""
    saved_twice(tmp_path, "chunk")
    newest = tmp_path / stores.describe(tmp_path).slot
    other = next(path for path in tmp_path.glob("slot-*") if path != newest)
    content = bytearray(other.read_bytes())
    content[4096:8192] = bytes(4096)
    other.write_bytes(content)
    with pytest.raises(DamagedError, match=newest.name):
        load_sync(tmp_path)
    with SyncCheckpointEngine(tmp_path, max_in_flight=1) as engine:
        for _ in range(3):
            with pytest.raises(DamagedError, match=newest.name):
                engine.restore(state_of(9))
        engine.checkpoint(state_of(2), step=2).result(60)
    assert load_sync(tmp_path)["step"] == 2


@pytest.mark.slow
def test_a_pinned_one_that_is_older_comes_after_the_one_that_was_superseded(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, max_in_flight=1, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step in range(3):
            engine.checkpoint(state_of(step), step=step).result(60)
            if step == 0:
                engine.pin(step=0)
    damage(tmp_path, 2, "chunk")
    with pytest.warns(RuntimeWarning, match="falling back to step 1"):
        assert load_sync(tmp_path)["step"] == 1
    with SyncCheckpointEngine(tmp_path, max_in_flight=1, storage=StorageOptions(chunk_bytes=4096)) as engine:
        with pytest.warns(RuntimeWarning, match="falling back to step 1"):
            engine.restore(state_of(9))
        engine.unpin(step=0)
        engine.pin(step=1)
    assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == [(1, True), (0, False)]
    slot = next(path for path in tmp_path.glob("slot-*") if path.read_bytes()[:8] == b"\1" + bytes(7))
    slot.write_bytes(bytes(4096) + slot.read_bytes()[4096:])
    with pytest.warns(RuntimeWarning, match="falling back to step 0"):
        assert load_sync(tmp_path)["step"] == 0


@pytest.mark.parametrize("most", [1, 2])
def test_a_superseded_one_counts_again_only_where_a_record_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Else no record could be written any more."""
    settings: dict[str, Any] = {"max_in_flight": 1, "storage": StorageOptions(chunk_bytes=4096), "save_last": False}
    with SyncCheckpointEngine(tmp_path, **settings) as engine:
        for step in range(3):
            engine.checkpoint(state_of(step), step=step).result(60)
            if step == 0:
                engine.pin(step=0)
    damage(tmp_path, 2, "chunk")
    monkeypatch.setattr("pccheck_async.store.store.MOST_ENTRIES", most)
    with SyncCheckpointEngine(tmp_path, **settings) as engine:
        with pytest.warns(RuntimeWarning, match="falling back to step 1"):
            restored = engine.restore(state_of(9))
        assert restored is not None
        assert restored.step == 1
        assert [info.step for info in engine.checkpoints()] == [1, 0][2 - most :]
        engine.checkpoint(state_of(3), step=3).result(60)
        assert [info.step for info in engine.checkpoints()] == [3, 0]


def test_a_removed_one_does_not_come_back(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step), step=step).result(60)
    stores.remove(tmp_path, step=[1])
    damage(tmp_path, 0, "chunk")
    with pytest.raises(DamagedError):
        load_sync(tmp_path)


def test_a_superseded_one_that_is_being_written_over_is_not_waited_for() -> None:
    disk = CrashDisk()
    stuck = StuckWriter(CrashWriter(disk, turns=0), kinds=())
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=stuck, chunk_bytes=4096), max_in_flight=1) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step), step=step).result(30)
        bad = {slot_name(probe(engine).store.committed.record.entries[0].slot): {0}}
        stuck.hold("write", after=1)
        pending = engine.checkpoint(state_of(2), step=2)
        stuck.wait_stuck()
        with pytest.raises(ReadError):
            load_sync(FOLDER, io=BadBlocks(CrashWriter(disk, turns=0, read_only=True), bad))
        damaged = dict(disk.contents()) | {next(iter(bad)): bytes(8192)}
        with pytest.raises(DamagedError):
            load_sync(FOLDER, io=ImageWriter(Image.of(damaged)))
        stuck.release()
        pending.result(30)


@pytest.mark.parametrize("surplus", [False, True])
def test_a_free_slot_is_removed_or_read_and_never_both(surplus: bool) -> None:
    """A restore may fall back to what a slot that nobody needs holds, at any moment."""

    async def main(turns: int) -> None:
        writer = CrashWriter(CrashDisk(), turns=0)
        await writer.prepare(create=True)
        for number in range(2 + surplus):
            await writer.reserve(slot_name(number), 4096)
        newest, before = (Entry(n, n, 0.0, 0, 1 - n, 0, 1, 0, False, {}) for n in (1, 0))
        slots = await open_slots(writer, Record(1, (newest,), (before,)), writer.sync_names, in_flight=1, kept=1)

        async def read() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            with suppress(DamagedError):
                for number in range(1, 2 + surplus):
                    await slots.start_reading_free(number)
                for _ in range(10):
                    await asyncio.sleep(0)

        async def write() -> None:
            if surplus:
                await slots.remove_surplus()
            else:
                async with slots.lock:
                    await slots.lease(8192)

        await asyncio.gather(read(), write())
        await writer.close()

    for turns in range(8):
        asyncio.run(main(turns))


class Refusing:
    """An object whose own methods raise errors of this package: it reads a store of its own."""

    def __init__(self, *raising: str, error: Exception) -> None:
        self.raising, self.error = raising, error

    def state_dict(self) -> dict[str, Any]:
        if "state_dict" in self.raising:
            raise self.error
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "load_state_dict" in self.raising:
            raise self.error


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("kind", [DamagedError, ReadError])
def test_an_error_of_an_object_is_not_damage_of_the_store(tmp_path: Path, method: str, kind: Any) -> None:
    error = kind("of another store")
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(state_of(step) | {"teacher": Refusing(error=error)}, step=step).result()
        with pytest.raises(kind, match="of another store") as raised:  # and no warning that it falls back
            engine.restore(state_of(0) | {"teacher": Refusing(method, error=error)})
        assert raised.value is error
        assert [info.step for info in engine.checkpoints()] == [2, 1]
        engine.checkpoint(state_of(3) | {"teacher": Refusing(error=error)}, step=3).result()
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 2]


def test_what_was_loaded_is_freed_with_the_last_name_of_it(tmp_path: Path) -> None:
    """Without the garbage collector, which may not run for long: there are few objects, and gigabytes in them."""
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"nested": [{"tensor": torch.arange(3000)}]}, step=1).result()
    gc.collect()
    gc.disable()
    try:
        loaded = load_sync(tmp_path)
        storage = weakref.ref(loaded["nested"][0]["tensor"].untyped_storage())
        kept = [each for each in gc.get_objects() if isinstance(each, Allocation)]
        del loaded
        assert not kept
        assert storage() is None
    finally:
        gc.enable()


def test_many_ties_are_restored_in_one_walk(tmp_path: Path) -> None:
    base, calls = torch.arange(16.0), 0
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"ties": [base.view(16) for _ in range(300)]}, step=1).result()
        live = torch.zeros(16)

        def count(frame: Any, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            engine.restore({"ties": [live.view(16) for _ in range(300)]})
        finally:
            sys.setprofile(None)
    assert torch.equal(live, base)
    assert calls < 300 * 150  # 300 ties squared are 90,000


class _App:
    """A model and its optimizer in one object, as in PyTorch's tutorial of ``torch.distributed.checkpoint``."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, beside: torch.nn.Module) -> None:
        self.model, self.optimizer, self.beside = model, optimizer, beside

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["objects", "tensors", "one object", "hooks"])
def test_the_gradients_of_an_interrupted_step_are_no_part_of_the_next_one(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A cell of a notebook is stopped between ``backward`` and ``zero_grad``, and run again with the same objects."""

    def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if kind == "hooks":
            model.register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
        if kind == "tensors":
            return {"weights": {"layers": [model.weight, model.bias]}, "optimizer": optimizer}
        if kind == "one object":
            return {"app": _App(model, optimizer, beside)}
        return {"model": model, "optimizer": optimizer}

    beside = torch.nn.Linear(3, 2)  # nothing of it is restored
    model, optimizer = _trained()
    live = state(model, optimizer)
    with SyncCheckpointEngine(tmp_path) as engine:
        _step(model, optimizer)
        engine.checkpoint(live, step=0)
    _step(model, optimizer)
    want = [each.detach().clone() for each in model.parameters()]
    for one in (model, beside):
        one(torch.ones(1, 3)).sum().backward()
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.restore(live) is not None
        assert all(each.grad is None for each in model.parameters())
        assert all(each.grad is not None for each in beside.parameters())
        _step(model, optimizer)
        assert all(map(torch.equal, want, model.parameters()))
        engine.restore(live)
    (line,) = [each for each in caplog.records if each.event == "cleared_gradients"]  # type: ignore[attr-defined]
    assert (line.levelname, line.step) == ("WARNING", 0)  # type: ignore[attr-defined]
    assert line.getMessage().startswith("restore cleared the gradients of 2 tensors: ")


def test_gradients_of_what_is_not_restored_stay(tmp_path: Path) -> None:
    """A restore that is refused clears none, and one of a part those of the part."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"model": model[:1]}, step=0).result(60)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(StateMismatchError):
            engine.restore({"model": model})
        assert all(each.grad is not None for each in model.parameters())
        engine.restore({"model": model}, strict=False)
    assert [each.grad is None for each in model.parameters()] == [True, True, False, False]
