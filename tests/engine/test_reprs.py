"""What a debugger shows: folder, step and state; no repr waits, or raises."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointInfo,
    Group,
    ResumableLoader,
    ResumableSampler,
    RNGState,
    Shelf,
    StorageOptions,
    SyncCheckpointEngine,
    TrainingStep,
    list_checkpoints,
    open_checkpoint,
    policies,
    stores,
)
from pccheck_async.errors import StoreFailedError
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter
from pccheck_async.testing.probe import probe
from tests.engine.test_inline_capture_engine import FOLDER, stuck_engine
from tests.support.processes import passes_in_a_forked_child

STATE = {"w": torch.zeros(3), "n": 1}


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """Hold a lock in another thread."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()


def test_of_an_engine(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path)
    assert repr(engine) == f"<SyncCheckpointEngine '{tmp_path}' not open yet>"
    with engine:
        assert repr(engine) == f"<SyncCheckpointEngine '{tmp_path}' open, no checkpoint>"
        engine.checkpoint(STATE, step=40).result()
        with held(probe(engine).core.in_flight.lock):
            assert repr(engine) == f"<SyncCheckpointEngine '{tmp_path}' open, newest step 40>"
        assert passes_in_a_forked_child(
            lambda: _is(engine, f"<SyncCheckpointEngine '{tmp_path}' of the parent process>")
        )
    assert repr(engine) == f"<SyncCheckpointEngine '{tmp_path}' closed>"


def _is(thing: object, text: str) -> None:
    assert repr(thing) == text


def test_of_an_async_engine(tmp_path: Path) -> None:
    async def train() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            await (await engine.checkpoint(STATE, step=7))
            assert repr(engine) == f"<CheckpointEngine '{tmp_path}' open, newest step 7>"

    asyncio.run(train())


def test_of_an_engine_with_checkpoints_in_flight() -> None:
    engine, stuck, _ = stuck_engine()
    try:
        engine.checkpoint(STATE, step=1).result()
        stuck.hold("flush")
        engine.checkpoint(STATE, step=2)
        assert repr(engine) == f"<SyncCheckpointEngine '{FOLDER}' open, newest step 1, 1 in flight>"
        stuck.release()
    finally:
        engine.close()


def test_of_an_engine_that_cannot_be_made_or_opened(tmp_path: Path) -> None:
    assert repr(SyncCheckpointEngine.__new__(SyncCheckpointEngine)) == "<SyncCheckpointEngine>"
    (tmp_path / "file").touch()
    engine = SyncCheckpointEngine(tmp_path / "file")
    with pytest.raises(OSError, match="folder"):
        engine.open()
    assert repr(engine) == f"<SyncCheckpointEngine '{tmp_path / 'file'}' closed>"


def test_of_an_engine_that_takes_no_more_commits() -> None:
    failing = FailingWriter(CrashWriter(CrashDisk()), fail_at=None, kinds=("flush",), stays=True)
    engine = SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=failing)).open()
    engine.checkpoint(STATE, step=1).result()
    failing.fail_at = failing.operations + 1
    with pytest.raises(StoreFailedError):
        engine.checkpoint(STATE, step=2).result()
    assert repr(engine) == f"<SyncCheckpointEngine '{FOLDER}' open, newest step 1, takes no more commits>"
    engine.close()


def test_of_an_open_checkpoint(tmp_path: Path) -> None:
    state = {"model": {"0.weight": torch.zeros(2, 3), "bias": 1}}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state, step=40).result()
    with open_checkpoint(tmp_path) as checkpoint:
        part, stored = checkpoint["model"], checkpoint.tensor("model.0.weight")
        where = f"step 40 in '{tmp_path}'"
        assert repr(checkpoint) == f"<OpenCheckpoint {where}: 2 leaves, 1 of them tensors>"
        assert repr(part) == f"<StoredState 'model' of {where}: 2 leaves, 1 of them tensors>"
        assert repr(stored) == f"<StoredTensor 'model.0.weight' float32 (2, 3), 24 bytes, of {where}>"
        assert passes_in_a_forked_child(
            lambda: _is(checkpoint, f"<OpenCheckpoint {where} of the parent process: 2 leaves, 1 of them tensors>")
        )
    assert repr(checkpoint) == f"<OpenCheckpoint {where}, closed: 2 leaves, 1 of them tensors>"
    assert repr(stored).endswith(f"of {where}, closed>")


def test_of_what_is_restored(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(STATE, step=40, name="epoch=4", metadata={"loss": 0.5}).result()
        engine.pin(step=40)
        restored = engine.restore({"w": torch.zeros(3), "m": 0}, strict=False)
        planned = engine.restore({"w": torch.zeros(3), "n": 0}, dry_run=True)
    (info,) = list_checkpoints(tmp_path)
    text = f"step 40 'epoch=4', counter 0, {info.nbytes} bytes, {info.created:%Y-%m-%d %H:%M:%S} UTC, pinned, loss=0.5"
    assert repr(info) == f"<CheckpointInfo {text}>"
    assert repr(restored) == f"<Restored {text}, 1 filled, 1 missing, 1 unexpected>"
    assert repr(planned) == f"<Restored {text}, 2 filled, would fill 1, would replace 1>"
    assert "bytes, rejected>" in repr(CheckpointInfo(step=1, counter=1, nbytes=1, time=1e300, rejected=True))
    assert repr(CheckpointInfo(1, 2, 3, 0.0, name="\x1b[2J")).startswith(r"<CheckpointInfo step 1 '\x1b[2J', counter 2")


def test_of_a_group() -> None:
    assert repr(Group(1, 4, None)) == "<Group rank 1 of 4>"


def test_of_a_shelf(tmp_path: Path) -> None:
    path = tmp_path / "shelf"
    with Shelf(path, 1 << 20) as shelf:
        shelf["a"] = 1
        with held(shelf._lock):
            assert repr(shelf) == f"<Shelf '{path}' open, 1 variables, transaction 2>"
        assert passes_in_a_forked_child(lambda: _is(shelf, f"<Shelf '{path}' closed>"))
    assert repr(shelf) == f"<Shelf '{path}' closed>"
    assert repr(Shelf.__new__(Shelf)) == "<Shelf not open>"


def test_of_training_data() -> None:
    sampler = ResumableSampler(10, 4, rank=1, world_size=2)
    assert repr(sampler) == "<ResumableSampler epoch 0, 0 of 10 samples, batches of 4, rank 1 of 2>"
    loader = ResumableLoader(range(10), 4)
    assert repr(loader) == "<ResumableLoader epoch 0, 0 of 10 samples, batches of 4>"
    for epoch in loader.epochs(2):
        for _ in epoch:
            assert repr(loader).startswith(f"<ResumableLoader epoch {int(epoch)}, ")
            break
        break
    assert repr(loader) == "<ResumableLoader epoch 0, 4 of 10 samples, batches of 4, rank 0 of 1>"
    for kind in (ResumableLoader, ResumableSampler):
        assert repr(kind.__new__(kind)) == f"<{kind.__name__}>"


def test_to_look_at_a_loader_decides_nothing() -> None:
    """Reading ``epoch`` before the first pass would make each further loop count epochs by that."""
    loader, looked = (ResumableLoader(range(4), 2, shuffle=False) for _ in range(2))
    for _ in range(2):
        repr(looked)
        assert [batch.tolist() for batch in looked] == [batch.tolist() for batch in loader]
    assert looked.state_dict() == loader.state_dict()


def test_of_policies_and_generators() -> None:
    assert repr(RNGState()) == "RNGState()"
    assert repr(policies.EverySteps(4)) == "<EverySteps: every 4 steps, as given>"
    assert repr(policies.Adaptive()).startswith("<Adaptive: measuring the first ")
    assert repr(policies.Adaptive.__new__(policies.Adaptive)) == "<Adaptive>"


def test_of_what_upkeep_returns(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in (3, 4):
            engine.checkpoint(STATE | {"n": step}, step=step).result()
    assert repr(stores.describe(tmp_path)).startswith("<Description of step 4: 2 leaves, ")
    assert (
        repr(stores.compare(tmp_path, step=3, other_step=4))
        == "<Comparison of step 3 with step 4: 1 of 2 leaves differ>"
    )
    assert repr(stores.compare(tmp_path, step=4, other_step=4)).endswith("step 4: equal in every bit>")
    assert repr(stores.verify(tmp_path, every=True)).startswith("<Verification: 2 checked, ")
    for slot in tmp_path.glob("slot-*"):
        slot.write_bytes(bytes(slot.stat().st_size))
    assert repr(stores.verify(tmp_path, every=True)).endswith(" bytes, damaged: step 4, 3>")


def test_of_a_training_step(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, interval=100) as engine:
        context = engine.step(STATE, 40)
        assert repr(context) == "<StepContext of step 40>"
        with context as this_step:
            assert repr(this_step) == "<TrainingStep 40>"
            this_step.save()
            assert repr(this_step) == "<TrainingStep 40, to be saved>"
        assert repr(this_step) == "<TrainingStep 40, checkpoint 0>"
    assert repr(TrainingStep.__new__(TrainingStep)) == "<TrainingStep of no state>"
