"""The tuner on a real disk: what it leaves behind, and what it finds. Nothing here depends on how fast the disk is."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointEngine, NoCheckpointError, StorageOptions, SyncCheckpointEngine, load_sync, stores
from pccheck_async.engine import EngineConfig, EngineLoop
from pccheck_async.errors import (
    ClosedError,
    InfeasibleError,
    InvalidTuningError,
    StoreFailedError,
    StoreLockedError,
    WriteError,
)
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.medium.filesystem import free_bytes
from pccheck_async.medium.open_medium import IO
from pccheck_async.stores import TunedSettings, Tuning
from pccheck_async.telemetry import Stream
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter, ThrottledWriter
from pccheck_async.transfer import available_cores
from pccheck_async.transfer.operations import Operations
from pccheck_async.tuning import tune
from pccheck_async.tuning.choice import FittedTimes, Point, fit_rounds
from pccheck_async.tuning.trials import Trial, TrialSample, run_trial
from tests.support.settings import engine_settings
from tests.support.warm import run_warm

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20
SHORT = 0.1
"""Seconds: as little as the tuner does."""


def tune_blocking(path: Path, **options: Any) -> Tuning:
    """Measures without an engine."""
    with EngineLoop("pccheck-read") as loop:
        return loop.call(tune(path, **options))


def on(io: IO) -> EngineConfig:
    return EngineConfig(storage=StorageOptions(io=io))


def fails_in(number: int) -> Callable[[str, Operations], Medium]:
    """Makes writers, of which the one with this number fails: its second write, and all after it."""
    made = 0

    def make(folder: str, operations: Operations) -> Medium:
        nonlocal made
        made += 1
        fail_at = 2 if made == number else None
        return FailingWriter(Files(folder, operations), fail_at=fail_at, kinds={"write"}, stays=True)

    return make


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "status"  # what an open engine tells of itself
    }


def assert_consistent(tuning: Tuning) -> None:
    """What must hold on every machine."""
    settings = tuning.numbers
    measured = {(m.point.max_in_flight, m.point.writers, m.point.chunk_bytes): m for m in tuning.measurements}
    chosen = measured[settings["max_in_flight"], settings["writers"], settings["chunk_bytes"]]
    assert tuning.checkpoint_seconds == chosen.seconds / settings["max_in_flight"]
    best = min(m.seconds / m.point.max_in_flight for m in tuning.measurements)
    assert tuning.checkpoint_seconds <= best * 1.1
    assert settings["host_memory"] >= 2 * settings["chunk_bytes"]
    assert {1, 2} <= {m.point.max_in_flight for m in tuning.measurements}
    assert len({m.point.writers for m in tuning.measurements}) >= 2
    for m in tuning.measurements:
        assert m.repetitions >= 3
        assert m.bandwidth == pytest.approx(tuning.nbytes * m.point.max_in_flight / m.seconds)
        assert m.bandwidth <= tuning.bandwidth
        assert m.capture_bandwidth > 0
    assert tuning.reasons.keys() == settings.keys()
    assert tuning.cores == available_cores()
    assert 0 < tuning.stream_cpu <= 1
    assert tuning.noise > 0


@pytest.mark.slow
@pytest.mark.parametrize("io", ["threads", pytest.param("python", marks=pytest.mark.campaign)])
def test_tuned_settings_run_an_engine(tmp_path: Path, io: IO) -> None:
    store = tmp_path / "new" / "store"
    state = {"x": torch.rand(MIB)}
    seen: list[float] = []
    tuning = tune_blocking(
        store,
        nbytes=4 * MIB,
        config=on(io),
        step_seconds=1e-3,
        budget_seconds=SHORT,
        progress=lambda done, what: seen.append(done),
    )
    assert os.listdir(tmp_path) == []
    assert_consistent(tuning)
    assert tuning.sample_nbytes == tuning.nbytes == 4 * MIB
    assert tuning.interval is not None
    assert tuning.interval_floor is not None
    assert tuning.interval >= tuning.interval_floor >= 1
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    with SyncCheckpointEngine(
        store, **tuning.settings | {"storage": dataclasses.replace(tuning.settings["storage"], io=io)}
    ) as engine:
        engine.checkpoint(state, step=1).result(60)
        decisions = engine.statistics().decisions
        assert (decisions.writers, decisions.chunk_bytes, decisions.host_memory) == (
            tuning.numbers["writers"],
            tuning.numbers["chunk_bytes"],
            tuning.numbers["host_memory"],
        )
    assert torch.equal(load_sync(store)["x"], state["x"])


@pytest.mark.slow
def test_a_store_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        state = {"x": torch.rand(300_000)}
        async with CheckpointEngine(tmp_path, keep_last=2) as engine:
            for step in range(3):
                await (await engine.checkpoint(state, step=step)).durable()
            before, infos, decisions = files(tmp_path), engine.checkpoints(), engine.statistics().decisions
            by_checkpoint = await engine.tune(budget_seconds=SHORT)
            assert by_checkpoint.nbytes == infos[0].nbytes
            assert_consistent(by_checkpoint)
            assert by_checkpoint.interval is by_checkpoint.interval_floor is None
            by_state = await engine.tune({"x": torch.rand(600_000), "n": 1}, budget_seconds=SHORT)
            assert 2_400_000 <= by_state.nbytes <= 2_400_000 + 4096
            assert files(tmp_path) == before
            assert engine.checkpoints() == infos
            assert engine.statistics().decisions == decisions
            await (await engine.checkpoint(state, step=3)).durable()
        assert torch.equal(load_sync(tmp_path)["x"], state["x"])

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_trials_do_not_warn_of_what_they_supersede(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def of_ends(self: Any, event: Any) -> Any:
        self._last.extend([True] * 16)  # as on slow storage
        return ended(self, event)

    ended = Stream._of_ends
    monkeypatch.setattr(Stream, "_of_ends", of_ends)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.tune({"x": torch.rand(300_000)}, budget_seconds=SHORT)
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
        engine.checkpoint({"x": torch.rand(9)}).result()
    assert "were superseded" in caplog.text


@pytest.mark.slow
def test_only_a_sample_of_a_large_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 512 * MIB
    ends: list[int] = []  # of writes in slots, in bytes
    scaled: list[tuple[Point, Trial]] = []  # the trials, as long as checkpoints of all bytes would take
    fitted: list[Sequence[Mapping[Point, float]]] = []

    class Ends(ThrottledWriter):
        async def write(self, file: File, offset: int, data: memoryview) -> None:
            if file.name != "disk":  # which the raw speed is measured with
                ends.append(offset + len(data))
            await super().write(file, offset, data)

    async def recorded_trial(folder: Path, io: IO, point: Point, sample: TrialSample, host_memory: int) -> Trial:
        trial = await run_trial(folder, io, point, sample, host_memory)
        factor = nbytes / sample.nbytes
        scaled.append((point, Trial(trial.durable * factor, trial.captured * factor)))
        return trial

    def recorded_fit(rounds: Sequence[Mapping[Point, float]]) -> FittedTimes:
        fitted.append(rounds)
        return fit_rounds(rounds)

    monkeypatch.setattr("pccheck_async.tuning.tuner.run_trial", recorded_trial)
    monkeypatch.setattr("pccheck_async.tuning.tuner.fit_rounds", recorded_fit)
    with SyncCheckpointEngine(
        tmp_path,
        storage=StorageOptions(
            io=lambda folder, operations: Ends(Files(folder, operations), total=800e6), host_memory=MIB
        ),
    ) as engine:
        tuning = engine.tune(nbytes=nbytes, budget_seconds=SHORT)
    assert tuning.sample_nbytes <= 16 * MIB
    assert 2 * MIB <= max(ends) <= tuning.sample_nbytes + MIB  # with the manifest
    assert [item for measured in fitted[-1] for item in measured.items()] == [(p, t.durable) for p, t in scaled]
    assert {m.point: m.seconds for m in tuning.measurements} == fit_rounds(fitted[-1]).seconds
    for m in tuning.measurements:
        captured = median(trial.captured for point, trial in scaled if point == m.point)
        assert m.capture_bandwidth == nbytes / captured
    assert_consistent(tuning)
    assert tuning.numbers["host_memory"] <= MIB
    assert "does not fit" in tuning.reasons["host_memory"]


def capped(folder: str, operations: Operations) -> Medium:
    """A disk that gives each file a quarter of what it has."""
    return ThrottledWriter(Files(folder, operations), per_stream=100e6, total=400e6)


@pytest.mark.slow
def test_a_device_that_caps_each_stream_gets_several(tmp_path: Path) -> None:
    tuning = tune_blocking(tmp_path, nbytes=4 * MIB, config=on(capped), budget_seconds=SHORT)
    assert tuning.settings["max_in_flight"] >= 2
    assert_consistent(tuning)


@pytest.mark.campaign
def test_on_a_device_that_caps_each_stream_the_tuned_engine_is_twice_as_fast(tmp_path: Path) -> None:
    state = {"x": torch.rand(MIB)}

    def seconds(settings: dict[str, int]) -> float:
        with SyncCheckpointEngine(tmp_path, **engine_settings(io=capped, **settings)) as engine:
            engine.checkpoint(state).result(60)
            began = time.perf_counter()
            for _ in range(8):
                engine.checkpoint(state)
            engine.drain()
            return time.perf_counter() - began

    tuning = tune_blocking(tmp_path, nbytes=4 * MIB, config=on(capped), budget_seconds=SHORT)
    assert tuning.settings["max_in_flight"] >= 3
    ratio = seconds({"max_in_flight": 1, "writers": 1}) / seconds(tuning.numbers)
    print(f"tuned to {tuning.settings}: {ratio:.2f} times as fast as one stream")
    assert ratio >= 2


@pytest.mark.campaign  # more is tried where a busy machine slows one stream down
def test_a_device_that_one_stream_saturates_gets_few(tmp_path: Path) -> None:
    def io(folder: str, operations: Operations) -> Medium:
        return ThrottledWriter(Files(folder, operations), total=100e6)

    tuning = tune_blocking(tmp_path, nbytes=4 * MIB, config=on(io), budget_seconds=SHORT)
    assert tuning.settings["max_in_flight"] <= 2
    assert max(m.point.max_in_flight for m in tuning.measurements) <= 4  # there was no reason to look further


@pytest.mark.slow
def test_no_more_in_flight_than_the_storage_has_slots_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: facts)  # others use the disk, too
    nbytes = int(free_bytes(tmp_path) * 0.4)  # two slots fit, three do not
    tuning = tune_blocking(
        tmp_path, nbytes=nbytes, config=EngineConfig(storage=StorageOptions(host_memory=MIB)), budget_seconds=SHORT
    )
    assert {m.point.max_in_flight for m in tuning.measurements} == {1}
    assert "; 2 would not fit: 3 slots (2 in flight, 1 kept)" in tuning.reasons["max_in_flight"]


def test_the_slots_that_a_store_has_are_space_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({"x": torch.zeros(MIB)}).result(60)
    facts = os.statvfs(tmp_path)
    few = os.statvfs_result((*facts[:4], MIB * 3 // 2 // facts.f_frsize, *facts[5:]))  # free blocks
    monkeypatch.setattr(os, "statvfs", lambda _: few)

    def progress(done: float, what: str) -> None:
        raise LookupError(what)

    with pytest.raises(LookupError, match="the storage"):
        tune_blocking(tmp_path / "store", nbytes=MIB // 64, progress=progress)
    with pytest.raises(InfeasibleError, match="storage: 2 slots"):
        tune_blocking(tmp_path / "new", nbytes=MIB // 64, progress=progress)


def test_what_does_not_fit_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        with pytest.raises(InfeasibleError, match=r"storage: 2 slots .* free space") as infeasible:
            engine.tune(nbytes=1 << 60)
        assert infeasible.value.constraints == ("storage",)
    with pytest.raises(InfeasibleError, match=r"storage: 4 slots .* free space or lower keep_last"):
        tune_blocking(tmp_path / "new", nbytes=1 << 60, config=EngineConfig(keep_last=3))
    with pytest.raises(InfeasibleError, match="memory: 2 chunks of 4096 bytes"):
        tune_blocking(tmp_path / "new", nbytes=MIB, config=EngineConfig(storage=StorageOptions(host_memory=5000)))
    assert os.listdir(tmp_path) == ["store"]


def test_wrong_arguments(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        with pytest.raises(NoCheckpointError, match="give state or nbytes"):
            engine.tune()
        with pytest.raises(ValueError, match="not both"):
            engine.tune({"x": 1}, nbytes=5)
        for arguments in ({"nbytes": -1}, {"nbytes": 1.5}, {"budget_seconds": 0}, {"step_seconds": -1.0}):
            with pytest.raises(ValueError, match=r"nbytes|seconds"):
                engine.tune(**({"nbytes": 5} | arguments))
    with pytest.raises(ClosedError):
        engine.tune(nbytes=5)
    with (
        SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=CrashWriter(CrashDisk()))) as engine,
        pytest.raises(ValueError, match="a function of folder and operations"),
    ):
        engine.tune(nbytes=5)
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 9], ids=["storage", "first engine", "later engine"])
def test_a_failing_device_fails_the_tuning_and_nothing_is_left(tmp_path: Path, number: int) -> None:
    with pytest.raises((WriteError, StoreFailedError), match="Input/output error"):
        tune_blocking(tmp_path / "store", nbytes=4 * MIB, config=on(fails_in(number)), budget_seconds=SHORT)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_cancelling_leaves_nothing_and_the_engine_runs_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            before = files(tmp_path)
            for part in (0.0, 0.5):
                tuning = asyncio.create_task(cancelled_at(engine, part))
                with pytest.raises(asyncio.CancelledError):
                    await tuning
                assert files(tmp_path) == before
            await (await engine.checkpoint({"x": torch.ones(5)})).durable()

    async def cancelled_at(engine: CheckpointEngine, part: float) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def progress(done: float, what: str) -> None:
            if done >= part:
                loop.call_soon_threadsafe(task.cancel)

        await engine.tune(nbytes=4 * MIB, budget_seconds=1, progress=progress)

    asyncio.run(main())


def test_an_error_of_the_callback_ends_the_tuning(tmp_path: Path) -> None:
    def progress(done: float, what: str) -> None:
        raise LookupError(what)

    with pytest.raises(LookupError):
        tune_blocking(tmp_path / "store", nbytes=MIB, progress=progress)
    assert os.listdir(tmp_path) == []


INTERRUPTED = """
import os, signal, sys
from pccheck_async import SyncCheckpointEngine
def progress(done, what):
    if done >= 0.1:
        os.kill(os.getpid(), signal.{signal})
with SyncCheckpointEngine(sys.argv[1]) as engine:
    engine.tune(nbytes=16 << 20, progress=progress)
"""


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    script = INTERRUPTED.format(signal="SIGINT")
    done = run_warm("-c", script, tmp_path)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["commit", "store.json"]


@pytest.mark.slow
def test_what_a_killed_tuning_left_goes_with_the_next(tmp_path: Path) -> None:
    script = INTERRUPTED.format(signal="SIGKILL")
    done = run_warm("-c", script, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(tmp_path.glob(".tune-*"))) == 1

    def progress(done: float, what: str) -> None:
        raise LookupError(what)

    with pytest.raises(LookupError):
        tune_blocking(tmp_path, nbytes=MIB, progress=progress)
    assert sorted(os.listdir(tmp_path)) == ["commit", "store.json"]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match=r"folder cannot be made or opened \(it is a file\)"):
        tune_blocking(tmp_path / "file", nbytes=MIB)


def test_one_tuning_at_a_time(tmp_path: Path) -> None:
    class SeenError(Exception):
        pass

    def progress(done: float, what: str) -> None:
        before = list(tmp_path.iterdir())
        with pytest.raises(StoreLockedError, match="another tuning runs"):
            tune_blocking(tmp_path, nbytes=MIB)
        assert list(tmp_path.iterdir()) == before != []
        raise SeenError

    with pytest.raises(SeenError):
        tune_blocking(tmp_path, nbytes=MIB, progress=progress)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_callers_loop_is_not_held_up(tmp_path: Path) -> None:
    threads = set()

    async def main() -> None:
        ticks = 0
        async with CheckpointEngine(tmp_path) as engine:
            tuning = asyncio.create_task(
                engine.tune(
                    nbytes=MIB,
                    budget_seconds=SHORT,
                    progress=lambda done, what: threads.add(threading.current_thread()),
                )
            )
            while not tuning.done():
                await asyncio.sleep(0.001)
                ticks += 1
            await tuning
        assert ticks > 10
        assert threading.current_thread() not in threads

    asyncio.run(main())


# -- the file


def tuning_of(**changes: Any) -> Tuning:
    arguments: dict[str, Any] = {
        "settings": {"max_in_flight": 2, "storage": StorageOptions(writers=4, chunk_bytes=8192, host_memory=16384)},
        "reasons": {"writers": "because"},
        "measurements": (),
        "nbytes": 100,
        "sample_nbytes": 100,
        "noise": 0.05,
        "bandwidth": 1e9,
        "stream_cpu": 0.1,
        "cores": available_cores(),
        "seconds": 1.0,
        "checkpoint_seconds": 0.5,
    }
    return Tuning(**arguments | changes)


def test_write_and_read(tmp_path: Path) -> None:
    tuning = tuning_of()
    assert tuning.write(tmp_path) == tmp_path / "tuning.json"
    assert tuning.write(tmp_path / "other.json") == tmp_path / "other.json"
    assert tuning.write(tmp_path / "not" / "there") == tmp_path / "not" / "there" / "tuning.json"
    assert sorted(os.listdir(tmp_path)) == ["not", "other.json", "tuning.json"]
    for path in (tmp_path, tmp_path / "tuning.json", str(tmp_path / "other.json"), tmp_path / "not" / "there"):
        assert stores.read_tuning(path) == tuning.settings
    with SyncCheckpointEngine(tmp_path / "store", **stores.read_tuning(tmp_path)) as engine:
        assert engine.statistics().decisions.chunk_bytes == 8192


def test_a_later_tuning_replaces_the_file(tmp_path: Path) -> None:
    tuning_of().write(tmp_path)
    storage = StorageOptions(writers=1, chunk_bytes=4096, host_memory=8192)
    settings: TunedSettings = {"max_in_flight": 1, "storage": storage}
    tuning_of(settings=settings).write(tmp_path)
    assert stores.read_tuning(tmp_path) == settings
    assert os.listdir(tmp_path) == ["tuning.json"]


def test_settings_of_another_machine_are_taken_with_a_warning(tmp_path: Path) -> None:
    tuning = tuning_of(cores=available_cores() + 1)
    tuning.write(tmp_path)
    with pytest.warns(RuntimeWarning, match=f"{tuning.cores} cores and this process may use {available_cores()}"):
        assert stores.read_tuning(tmp_path) == tuning.settings


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"cores": 0},
        {"cores": "2"},
        {"settings": {"max_in_flight": 1}},
        {"settings": {"max_in_flight": 0, "writers": 4, "chunk_bytes": 8192, "host_memory": 16384}},
        {"settings": {"max_in_flight": 1.5, "writers": 4, "chunk_bytes": 8192, "host_memory": 16384}},
        {"settings": {"max_in_flight": 1, "writers": 4, "chunk_bytes": 8192, "host_memory": 8191}},
        {"settings": {"max_in_flight": 1, "writers": 4, "chunk_bytes": 8192, "host_memory": 16384, "path": 1}},
    ],
)
def test_a_file_with_other_contents_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tuning_of().write(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidTuningError, match="tune again"):
        stores.read_tuning(tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"null", b"{}", b'{"version": 1}'])
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tuning.json").write_bytes(data)
    with pytest.raises(InvalidTuningError, match=r"tuning\.json"):
        stores.read_tuning(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stores.read_tuning(tmp_path)
    with pytest.raises(FileNotFoundError):
        stores.read_tuning(tmp_path / "missing.json")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_of().write(tmp_path)
    before = files(tmp_path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(WriteError) as failure:
        tuning_of(nbytes=5).write(tmp_path)
    assert failure.value.errno == errno.ENOSPC
    assert files(tmp_path) == before
    with pytest.raises(WriteError):
        tuning_of().write(tmp_path / "tuning.json" / "below a file")
