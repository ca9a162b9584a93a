"""The engine as its users see it, on a real filesystem."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import pickle
import shutil
import signal
import threading
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    NoCheckpointError,
    StateMismatchError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load,
    load_sync,
)
from pccheck_async.api import EngineBase
from pccheck_async.errors import ClosedError, UnsupportedStateError
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    IDENTITY_NAME,
    REGION_NBYTES,
    decode_identity,
    newest_record,
    region_offsets,
)
from pccheck_async.medium.open_medium import IO
from pccheck_async.testing import CrashWriter
from pccheck_async.testing.probe import probe
from pccheck_async.transfer import PAGE_BYTES
from tests.engine.test_inline_capture_engine import FOLDER, stuck_engine
from tests.fixtures import BACKENDS, need
from tests.support.processes import open_files, passes_in_a_forked_child
from tests.support.settings import engine_settings

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def state_of(step: int, size: int = 5000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": torch.rand(size, generator=generator),
        "halves": torch.rand(33, 7, generator=generator).to(torch.bfloat16).t(),
        "step": step,
        "nested": {"array": np.arange(step + 3), "list": [1.5, None, "x"], 3: (step,)},
    }


def assert_same(found: dict[str, Any], step: int, size: int = 5000) -> None:
    expected = state_of(step, size)
    assert torch.equal(found["weights"], expected["weights"])
    assert torch.equal(found["halves"], expected["halves"])
    assert found["step"] == step
    assert np.array_equal(found["nested"]["array"], expected["nested"]["array"])
    assert found["nested"]["list"] == [1.5, None, "x"]
    assert found["nested"][3] == (step,)


def test_save_and_load(tmp_path: Path, io: str) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path / "s", storage=StorageOptions(io=io)) as engine:  # type: ignore[arg-type]
            assert await engine.restore({}) is None
            assert engine.latest is None
            pending = await engine.checkpoint(state_of(7), step=7, metadata={"loss": 0.1})
            info = await pending.durable()
            assert (info.step, info.counter, dict(info.metadata)) == (7, 0, {"loss": 0.1})
            assert engine.latest == info
            assert engine.checkpoints() == [info]
            assert not pending.superseded
        assert list_checkpoints(tmp_path / "s") == [info]
        assert_same(await load(tmp_path / "s", io=io), 7)

    asyncio.run(main())


def test_sync_save_and_load(tmp_path: Path, io: str) -> None:
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io)) as engine:  # type: ignore[arg-type]
        pending = engine.checkpoint(state_of(3), step=3)
        assert pending.result(60).step == 3
        engine.drain()
    assert_same(load_sync(tmp_path), 3)


@pytest.mark.slow
def test_the_state_may_be_mutated_when_checkpoint_returns(tmp_path: Path, io: str) -> None:
    async def main() -> None:
        tensor = torch.zeros(3_000_000)
        async with CheckpointEngine(tmp_path, storage=StorageOptions(io=io), keep_last=5, max_in_flight=3) as engine:  # type: ignore[arg-type]
            for step in range(5):
                tensor.fill_(step)
                await engine.checkpoint({"t": tensor}, step=step)
                tensor.fill_(-1.0)
        for step in range(5):
            assert torch.equal(load_sync(tmp_path, step=step)["t"], torch.full((3_000_000,), float(step)))

    asyncio.run(main())


def test_a_state_larger_than_host_memory_streams_through(tmp_path: Path, io: IO) -> None:
    with SyncCheckpointEngine(
        tmp_path, storage=StorageOptions(io=io, chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES)
    ) as engine:
        engine.checkpoint(state_of(1, 100_000), step=1).result(60)
        statistics = engine.statistics()
        assert statistics.pool_peak <= 2
        assert statistics.pool_bytes <= 2 * PAGE_BYTES
        found = state_of(0, 100_000) | {"nested": {"array": np.arange(4), "list": [0.0], 3: (0,)}}
        engine.restore(found)
        assert_same(found, 1, 100_000)
    assert_same(load_sync(tmp_path, host_memory=1 << 20), 1, 100_000)


def test_restore_in_place(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    def train(parts: tuple[torch.nn.Module, torch.optim.Optimizer, Any], steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = parts[0](torch.randn(4, 8)).square().mean()
            parts[1].zero_grad()
            loss.backward()
            parts[1].step()
            parts[2].step()
            losses.append(loss.item())
        return losses

    from pccheck_async import RNGState

    with SyncCheckpointEngine(tmp_path) as engine:
        one = build()
        train(one, 3)
        names = ("model", "optimizer", "scheduler", "rng")
        engine.checkpoint(dict(zip(names, (*one, RNGState()), strict=True)), step=3)
        expected = train(one, 3)
        two = build()
        weight = two[0][0].weight  # type: ignore[index]
        info = engine.restore(dict(zip(names, (*two, RNGState()), strict=True)))
        assert info is None or info.step == 3
        engine.drain()
        info = engine.restore(dict(zip(names, (*two, RNGState()), strict=True)))
        assert info is not None
        assert two[0][0].weight is weight  # type: ignore[index]
        assert train(two, 3) == expected


@pytest.mark.slow
def test_growing_and_shrinking_state(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step, size in enumerate([10, 100_000, 1, 0, 250_000, 5]):
            engine.checkpoint(state_of(step, size), step=step).result(60)
            assert_same(load_sync(tmp_path), step, size)
        assert engine.statistics().slots <= 4
        assert [info.step for info in engine.checkpoints()] == [5, 4]


def test_counters_go_on_after_a_restart_and_equal_steps_mean_the_newest(tmp_path: Path) -> None:
    for run in range(3):
        with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
            engine.restore({"run": None})
            info = engine.checkpoint({"run": run}, step=1).result(60)
            assert info.counter == run
    assert load_sync(tmp_path, step=1) == {"run": 2}


def test_step_defaults_to_the_counter(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"a": 1}).result(60)
        assert engine.checkpoint({"a": 1}).result(60).step == 1


def test_nothing_to_load(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    assert list_checkpoints(tmp_path / "none") == []
    with pytest.raises(NoCheckpointError):
        load_sync(tmp_path / "none")
    with SyncCheckpointEngine(tmp_path / "new") as engine:
        with pytest.raises(NoCheckpointError):
            load_sync(tmp_path / "new")
        with pytest.raises(NoCheckpointError):
            engine.restore({}, step=4)
        assert list_checkpoints(tmp_path / "new") == []


def test_keys_select_what_is_read(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(2), step=2)
    assert set(load_sync(tmp_path, keys=["weights"])) == {"weights"}
    assert torch.equal(load_sync(tmp_path, keys=["w*"])["weights"], state_of(2)["weights"])


def test_opening_and_reading_write_nothing(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(2), step=2)

    def contents() -> dict[str, tuple[bytes, int]]:
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(tmp_path.iterdir())}

    before = contents()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.restore(state_of(0) | {"nested": {"array": np.arange(5), "list": [], 3: ()}})
        list_checkpoints(tmp_path)
        load_sync(tmp_path)
    assert contents() == before


def test_mismatch_restores_nothing(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"a": torch.ones(3), "b": torch.ones(2)}, step=1).result(60)
        live = {"a": torch.zeros(4), "c": torch.zeros(2)}
        with pytest.raises(StateMismatchError) as mismatch:
            engine.restore(live)
        assert mismatch.value.missing == ("c",)
        assert mismatch.value.unexpected == ("b",)
        assert [text for text in mismatch.value.mismatched if text.startswith("a")]
        assert not live["a"].any()


def test_unsupported_state_names_its_path_and_harms_nothing(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(UnsupportedStateError, match=r"model\.hook"):
            engine.checkpoint({"model": {"hook": lambda: None}}, step=1)
        with pytest.raises(UnsupportedStateError, match="metadata"):
            engine.checkpoint({"a": 1}, step=1, metadata={"a": [1]})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="step"):
            engine.checkpoint({"a": 1}, step=1.5)  # type: ignore[arg-type]
        assert engine.checkpoint({"a": 1}, step=2).result(60).counter == 0


@pytest.mark.parametrize("kind", [CheckpointEngine, SyncCheckpointEngine])
def test_an_argument_that_there_is_not(kind: type[EngineBase]) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__} has no argument 'keep_first'; did you mean keep_last"):
        kind("nowhere", keep_first=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=rf"^{kind.__name__} has no argument 'colour'; it has path, max_in_flight, "):
        kind("nowhere", colour="red")  # type: ignore[call-arg]


def test_closed_engine(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path)
    with pytest.raises(ClosedError, match="not open yet"):
        engine.checkpoint({"a": 1})
    with engine:
        pass
    with pytest.raises(ClosedError, match="closed"):
        engine.checkpoint({"a": 1})
    with pytest.raises(ClosedError):
        engine.open()
    engine.close()


def test_an_engine_that_closes_while_a_state_is_read_admits_nothing(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path).open()

    class Closes:
        def state_dict(self) -> dict[str, Any]:
            closing = threading.Thread(target=engine.close)
            closing.start()
            closing.join(60)
            return {"x": torch.zeros(10)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(ClosedError):
        engine.checkpoint({"closes": Closes()})
    assert list_checkpoints(tmp_path) == []


def test_leaving_drains(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path, keep_last=3, max_in_flight=3) as engine:
            pendings = [await engine.checkpoint(state_of(n, 500_000), step=n) for n in range(3)]
        assert all(pending.done() for pending in pendings)

    asyncio.run(main())
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1, 0]


def test_many_threads_and_loops(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, max_in_flight=4, keep_last=40) as engine:
        counters: list[int] = []

        def work(thread: int) -> None:
            for n in range(5):
                counters.append(engine.checkpoint({"t": torch.full((1000,), thread * 10 + n)}).result(60).counter)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(counters) == list(range(20))
        assert len(engine.checkpoints()) == 20


def test_an_engine_serves_several_loops(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path)
    asyncio.run(engine.open())

    async def save(step: int) -> int:
        return (await (await engine.checkpoint({"step": step}, step=step))).step

    assert [asyncio.run(save(n)) for n in range(3)] == [0, 1, 2]
    asyncio.run(engine.close())


def test_cancelled_waiting_does_not_stop_the_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            pending = await engine.checkpoint(state_of(1, 1_000_000), step=1)
            waiting = asyncio.create_task(pending.durable())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            assert (await pending).step == 1

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 10, 50])
def test_cancelled_checkpoint_leaves_nothing_running(tmp_path: Path, turns: int) -> None:
    async def main() -> None:
        async with CheckpointEngine(
            tmp_path, storage=StorageOptions(chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES)
        ) as engine:
            await (await engine.checkpoint(state_of(1), step=1))
            saving = asyncio.create_task(engine.checkpoint(state_of(2, 200_000), step=2))
            for _ in range(turns):
                await asyncio.sleep(0)
            saving.cancel()
            await asyncio.wait([saving])
            statistics = engine.statistics()
            if saving.cancelled():
                assert statistics.in_flight == 0
            assert (await (await engine.checkpoint(state_of(3), step=3))).step == 3
        assert_same(load_sync(tmp_path), 3)

    asyncio.run(main())


def test_statistics(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(3):
            engine.checkpoint(state_of(7), step=step).result(60)
        found = engine.statistics()
        assert (found.admitted, found.durable, found.superseded, found.failed, found.in_flight) == (3, 3, 0, 0, 0)
        assert (found.plan_hits, found.plan_misses) == (2, 1)
        # Beside the payload: the commit file at creation, and a manifest and two copies of a record each.
        beside = COMMIT_NBYTES + 9 * PAGE_BYTES
        assert found.stages["capture"].nbytes == found.stages["write"].nbytes - beside > 0
        assert found.stall_seconds >= found.last_stall_seconds > 0
        assert set(found.decisions.reasons) == {"chunk_bytes", "host_memory", "writers", "copiers", "io", "gpu_capture"}
        assert found.io
        assert found.slots == 3


def test_what_an_engine_tells_can_be_copied_sent_and_written_down(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        info = engine.checkpoint(state_of(7), step=7, metadata={"loss": 0.5}).result(60)
        restored = engine.restore(state_of(7))
        for fact in (info, restored, engine.latest, engine.statistics()):
            assert copy.deepcopy(fact) == pickle.loads(pickle.dumps(fact)) == fact
        assert {info, restored} == {info}
        found = json.loads(json.dumps(dataclasses.asdict(engine.statistics())))
        assert found["latest"]["metadata"] == {"loss": 0.5}
        info.metadata.clear()  # type: ignore[attr-defined]
        assert engine.checkpoints()[0].metadata == {"loss": 0.5}


@pytest.mark.parametrize(
    "setting",
    [
        {"max_in_flight": 0},
        {"keep_last": 0},
        {"keep_last": 65},
        {"chunk_bytes": -1},
        {"host_memory": "much"},
        {"on_busy": "maybe"},
        {"on_error": "ignore"},
        {"io": "magic"},
        {"lock_timeout": -1},
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        CheckpointEngine(tmp_path / "s", **engine_settings(**setting))
    assert not (tmp_path / "s").exists()


def test_host_memory_below_one_chunk_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="less than one chunk"),
        SyncCheckpointEngine(tmp_path, storage=StorageOptions(host_memory=4096, chunk_bytes=8192)),
    ):
        pass


def test_a_process_that_changes_its_folder_stays_with_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        monkeypatch.chdir(folder)
        with SyncCheckpointEngine("store", keep_last=3) as engine:
            for step in range(3):
                engine.checkpoint(state_of(step), step=step).result(60)
    monkeypatch.chdir(one)
    with SyncCheckpointEngine("store", max_in_flight=1) as engine:
        monkeypatch.chdir(other)
        for step in range(3, 8):  # slots are removed, and larger ones made
            engine.checkpoint(state_of(step, 5000 * step), step=step).result(60)
        assert engine.space_needed().available_bytes > 0
        assert engine.path == str(one / "store")
    assert_same(load_sync(one / "store"), 7, 35_000)
    for step in range(3):
        assert_same(load_sync(other / "store", step=step), step)


def test_forked_child(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"a": torch.ones(10)}, step=1).result(60)

        def in_the_child() -> None:
            with pytest.raises(ClosedError, match="parent process"):
                engine.checkpoint({"a": 1})
            assert open_files(tmp_path) == []
            engine.close()

        assert passes_in_a_forked_child(in_the_child)
        assert engine.checkpoint({"a": torch.ones(10)}, step=2).result(60).step == 2


def test_a_child_forked_while_another_thread_holds_the_engines_lock_waits_for_nothing(tmp_path: Path) -> None:
    """That thread does not exist there. The one that writes the status file takes the lock twice a second."""
    with SyncCheckpointEngine(tmp_path) as engine:

        def in_the_child() -> None:
            signal.alarm(30)
            for ask in (engine.statistics, engine.metrics, engine.scalars, lambda: engine.on_event(print)):
                with pytest.raises(ClosedError, match="parent process"):
                    ask()
            assert engine.checkpoints() == []
            assert engine.latest is None
            engine.close()

        forked: list[bool] = []
        with probe(engine).core.in_flight.lock:
            forking = threading.Thread(target=lambda: forked.append(passes_in_a_forked_child(in_the_child)))
            forking.start()
            forking.join()
        assert forked == [True]


@pytest.mark.parametrize(("writing", "reading"), list(permutations(BACKENDS, 2)))
def test_a_store_written_by_one_engine_is_read_by_the_other(tmp_path: Path, writing: str, reading: str) -> None:
    need(writing)
    need(reading)
    for step, io in enumerate((writing, reading, writing)):
        with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io), keep_last=3) as engine:  # type: ignore[arg-type]
            engine.checkpoint(state_of(step), step=step)
    for step in range(3):
        assert_same(load_sync(tmp_path, step=step, io=writing), step)  # type: ignore[arg-type]
        assert_same(load_sync(tmp_path, step=step, io=reading), step)  # type: ignore[arg-type]


def test_a_store_can_be_moved(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "here") as engine:
        engine.checkpoint(state_of(4), step=4)
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "copy")
    assert_same(load_sync(tmp_path / "there" / "copy"), 4)
    with SyncCheckpointEngine(tmp_path / "there" / "copy") as engine:
        assert engine.checkpoint(state_of(5), step=5).result(60).counter == 1


@pytest.mark.parametrize("copy", [0, 1])
def test_either_copy_of_a_record_is_enough(tmp_path: Path, copy: int) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(2):
            engine.checkpoint({"x": step}, step=step).result()
    identity = decode_identity((tmp_path / IDENTITY_NAME).read_bytes())
    commit = bytearray((tmp_path / COMMIT_NAME).read_bytes())
    record = newest_record(commit, identity.id_bytes)
    assert record is not None
    offset = region_offsets(record.generation)[copy]
    commit[offset : offset + REGION_NBYTES] = bytes(REGION_NBYTES)
    (tmp_path / COMMIT_NAME).write_bytes(commit)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_a_manifest_larger_than_a_staging_buffer(tmp_path: Path) -> None:
    state = state_of(1) | {"names": [f"value {number}" for number in range(2000)]}
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=4096)) as engine:
        engine.checkpoint(state, step=1).result(60)
    assert load_sync(tmp_path)["names"] == state["names"]


@pytest.mark.slow
def test_waiting_for_captures_waits_for_those_of_other_threads() -> None:
    engine, writer, _ = stuck_engine(chunk_bytes=4096, host_memory=8192)
    writer.hold("write")
    state = {"x": torch.zeros(50_000)}
    pendings: list[Any] = []
    saving = threading.Thread(target=lambda: pendings.append(engine.checkpoint(state, step=1)))
    saving.start()
    writer.wait_stuck()
    over = threading.Event()

    def wait() -> None:
        engine.wait_captured()
        over.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not over.wait(0.3)
    writer.release()
    assert over.wait(30)
    saving.join(30)
    waiting.join(30)
    pendings[0].result(30)
    engine.close()


@pytest.mark.slow
def test_a_restore_waits_for_captures_of_other_threads() -> None:
    """What it restores would tear them."""
    state = {"x": torch.zeros(50_000)}
    engine, writer, disk = stuck_engine(chunk_bytes=4096, host_memory=8192, keep_last=2)
    with closing(engine):
        engine.checkpoint(state, step=0).result(30)
        state["x"].fill_(1.0)
        writer.hold("write")
        saving = threading.Thread(target=engine.checkpoint, args=(state,), kwargs={"step": 1})
        saving.start()
        writer.wait_stuck()
        restoring = threading.Thread(target=engine.restore, args=(state,), kwargs={"step": 0})
        restoring.start()
        restoring.join(0.3)
        meanwhile = set(state["x"].tolist())
        writer.release()
        saving.join(30)
        restoring.join(30)
        assert meanwhile == {1.0}
        assert set(state["x"].tolist()) == {0.0}
    assert set(load_sync(FOLDER, io=CrashWriter(disk, read_only=True), step=1)["x"].tolist()) == {1.0}
