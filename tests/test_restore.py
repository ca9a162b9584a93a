"""Restoring and loading beside damage, odd metadata, and a busy writer."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    StateMismatchError,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    open_checkpoint,
    restorer,
)
from pccheck_async.operations.base import Operations
from pccheck_async.reading import choose
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter
from pccheck_async.writer import File, Writer
from pccheck_async.writer.posix import PosixWriter
from tests.test_at_once import FOLDER, small

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


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


@pytest.mark.parametrize("io", ["python", "auto"])
def test_an_unreadable_manifest_falls_back(tmp_path: Path, io: str) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step), step=step).result(60)

    def failing(path: str, operations: Operations) -> Writer:
        return FailingWriter(PosixWriter(path, operations), fail_at=3, kinds=("read",))

    with pytest.warns(RuntimeWarning, match="falling back to step 0"):
        assert load_sync(tmp_path, io=failing)["step"] == 0


def test_restore_beside_commits(tmp_path: Path) -> None:
    """What was newest when a restore began may be gone when it looks: then a newer one is taken."""
    with SyncCheckpointEngine(tmp_path, chunk_bytes=4096) as engine:
        engine.checkpoint(state_of(0), step=0).result(60)
        stop = threading.Event()

        def commit() -> None:
            step = 1
            while not stop.is_set():
                engine.checkpoint(state_of(step), step=step).result(60)
                step += 1

        committing = threading.Thread(target=commit)
        committing.start()
        try:
            for _ in range(50):
                live = state_of(-1)
                info = engine.restore(live)
                assert info is not None
                assert info.step == live["step"]
                assert torch.equal(live["tensor"], torch.arange(3000) + info.step)
        finally:
            stop.set()
            committing.join()


def test_a_mismatch_after_a_damaged_newer_one_says_what_may_have_happened(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2, chunk_bytes=4096) as engine:
        engine.checkpoint({"other": torch.zeros(3000)}, step=0).result(60)
        engine.checkpoint(state_of(1), step=1).result(60)
    wanted = (torch.arange(3000) + 1).numpy().tobytes()[:64]
    slot = next(path for path in tmp_path.glob("slot-*") if path.read_bytes().startswith(wanted))
    data = bytearray(slot.read_bytes())
    data[9000] ^= 1
    slot.write_bytes(data)
    with SyncCheckpointEngine(tmp_path, keep_last=2, chunk_bytes=4096) as engine:
        with pytest.warns(RuntimeWarning, match="falling back"), pytest.raises(StateMismatchError) as mismatch:
            engine.restore(state_of(9))
        assert any("may hold parts" in note for note in mismatch.value.__notes__)


def test_what_a_damaged_one_began_to_fill_is_not_left_as_it_is(tmp_path: Path) -> None:
    """Where the older one lacks it: it is neither what it was nor what was saved."""
    with SyncCheckpointEngine(tmp_path, keep_last=2, chunk_bytes=4096) as engine:
        engine.checkpoint({"a": torch.zeros(9), "none": None}, step=0).result(60)
        engine.checkpoint({"a": torch.ones(9), "b": {"t": torch.ones(3000)}, "none": None}, step=1).result(60)
    slot = next(path for path in tmp_path.glob("slot-*") if path.read_bytes().startswith(b"\x00\x00\x80?"))
    data = bytearray(slot.read_bytes())
    data[9000] ^= 1
    slot.write_bytes(data)

    def live() -> dict[str, Any]:
        return {"a": torch.full((9,), 5.0), "b": {"t": torch.full((3000,), 5.0)}}

    with SyncCheckpointEngine(tmp_path, keep_last=2, chunk_bytes=4096) as engine:
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
    with SyncCheckpointEngine(tmp_path, chunk_bytes=chunk_bytes) as engine:
        engine.checkpoint(state, step=1).result()
    state["tensor"].zero_()
    with SyncCheckpointEngine(tmp_path, chunk_bytes=chunk_bytes) as engine:
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
    several = re.escape(r"'a.e.f' is the name of several leaves: a.e\.f, a\.e.f; write it with its escapes")
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

        monkeypatch.setattr(restorer, "choose", choose_and_commit)
        live = state_of(9)
        info = engine.restore(live)
        assert info is not None
        assert (info.step, live["step"], len(chosen)) == (1, 1, 2)


class Interrupted(CrashWriter):
    """Calls something once, before a slot is opened or locked."""

    def __init__(self, disk: CrashDisk, before: str, call: Any) -> None:
        super().__init__(disk, read_only=True)
        self._before, self._call = before, call

    async def _interrupt(self, kind: str) -> None:
        if kind == self._before:
            self._before = ""
            await asyncio.to_thread(self._call)

    async def open(self, name: str, *, writable: bool) -> File:
        if name.startswith("slot-"):
            await self._interrupt("open")
        return await super().open(name, writable=writable)

    async def try_lock(self, file: File, *, shared: bool = False) -> bool:
        await self._interrupt("try_lock")
        return await super().try_lock(file, shared=shared)


@pytest.mark.parametrize("before", ["open", "try_lock"])
@pytest.mark.parametrize("grown", [False, True])
def test_a_checkpoint_that_goes_while_a_reader_comes_is_no_damage(before: str, grown: bool) -> None:
    """Its slot has another's bytes, or is removed: the reader looks at the record again."""
    disk = CrashDisk()
    with SyncCheckpointEngine(FOLDER, io=CrashWriter(disk), max_in_flight=1) as engine:

        def more() -> None:
            for step in range(1, 4):
                engine.checkpoint({"x": torch.full((90_000 if grown else 9,), step)}, step=step).result(30)
            engine.drain()

        engine.checkpoint({"x": torch.zeros(9)}, step=0).result(30)
        reader = Interrupted(disk, before, more)
        assert load_sync(FOLDER, io=reader)["x"].unique().tolist() == [3]


def test_a_reader_that_started_over_holds_one_slot() -> None:
    disk = CrashDisk()
    with SyncCheckpointEngine(FOLDER, io=CrashWriter(disk)) as engine:

        def more() -> None:
            for step in range(1, 4):
                engine.checkpoint(small(), step=step).result(30)

        engine.checkpoint(small(), step=0).result(30)
        reader = Interrupted(disk, "try_lock", more)
        with open_checkpoint(FOLDER, io=reader) as opened:
            assert opened.info.step == 3
            assert len([file for file in reader._inodes if file.name.startswith("slot-")]) == 1
