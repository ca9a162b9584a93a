"""SIGKILL at random moments: every restart finds the last acknowledged checkpoint or a newer one, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync
from tests.fixtures import need
from tests.support.kill_harness import PHASES, Campaign
from tests.support.warm import start_warm

pytestmark = pytest.mark.usefixtures("machine_asked_once")


@pytest.mark.slow
def test_killed_in_every_phase(tmp_path: Path, io: str) -> None:
    outcome = Campaign(tmp_path, io=io, elements=50_000, seed=1).run(len(PHASES))
    assert {*outcome.kills, "recovery"} == {*PHASES}
    assert outcome.acknowledged >= 0


@pytest.mark.slow
def test_killed_while_a_state_is_written_in_one_piece(tmp_path: Path, io: str) -> None:
    campaign = Campaign(tmp_path, io=io, elements=5_000, seed=4)
    campaign.live("acknowledged")
    for phase in ("flush", "record", "between") * 2:
        campaign.live(phase)
    campaign.live(None)
    assert campaign.outcome.restored[-1] >= campaign.outcome.acknowledged >= 0


@pytest.mark.slow
def test_killed_in_every_phase_of_a_mapped_store(shared_memory: Path, io: str) -> None:
    outcome = Campaign(shared_memory, io=io, elements=50_000, seed=5, medium="mapped").run(len(PHASES))
    assert {*outcome.kills, "recovery"} == {*PHASES}
    assert outcome.acknowledged >= 0


@pytest.mark.slow
def test_killed_in_every_phase_with_a_tier_in_memory(tmp_path: Path, shared_memory: Path, io: str) -> None:
    outcome = Campaign(tmp_path, io=io, elements=50_000, seed=6, memory=shared_memory).run(2 * len(PHASES))
    assert {*outcome.kills, "recovery"} == {*PHASES}
    assert outcome.acknowledged >= 0


@pytest.mark.slow
def test_killed_while_a_small_state_is_saved_in_memory(tmp_path: Path, shared_memory: Path, io: str) -> None:
    campaign = Campaign(tmp_path, io=io, elements=500, seed=7, memory=shared_memory)
    campaign.live("acknowledged")
    for phase in ("flush", "record", "between") * 3:
        campaign.live(phase)
    campaign.live(None)
    assert campaign.outcome.restored[-1] >= campaign.outcome.acknowledged >= 0


@pytest.mark.campaign
def test_a_thousand_kills_with_a_tier_in_memory(tmp_path: Path, shared_memory: Path, io: str) -> None:
    outcome = Campaign(tmp_path, io=io, elements=60_000, seed=300, memory=shared_memory).run(1002)
    print(f"\n{io}: kills by phase {dict(outcome.kills)}, {outcome.restarts} restarts, last {outcome.acknowledged}")
    assert sum(outcome.kills.values()) == 1002


@pytest.mark.campaign
@pytest.mark.parametrize("where", ["on disk", "in memory"])
def test_five_hundred_kills_of_a_mapped_store(tmp_path: Path, shared_memory: Path, where: str, io: str) -> None:
    folder = tmp_path if where == "on disk" else shared_memory
    outcome = Campaign(folder, io=io, elements=60_000, seed=200, medium="mapped").run(252)
    print(f"\n{io}, {where}: kills by phase {dict(outcome.kills)}, {outcome.restarts} restarts verified")
    assert sum(outcome.kills.values()) == 252


@pytest.mark.campaign
def test_two_hundred_kills(tmp_path: Path, io: str) -> None:
    outcome = Campaign(tmp_path, io=io, elements=500_000, seed=2).run(210)
    print(f"\n{io}: kills by phase {dict(outcome.kills)}, {outcome.restarts} restarts, last {outcome.acknowledged}")
    assert min(outcome.kills.values()) >= 30


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_two_thousand_kills(tmp_path: Path, seed: int) -> None:
    name = ("threads", "python")[seed % 2]
    need(name)
    start = time.perf_counter()
    outcome = Campaign(tmp_path, io=name, elements=60_000, seed=100 + seed, in_flight=1 + seed % 3).run(504)
    seconds = time.perf_counter() - start
    print(f"\n{name}: kills {dict(outcome.kills)}, {outcome.restarts} restarts verified, {504 / seconds:.1f} a second")
    assert sum(outcome.kills.values()) == 504


@pytest.mark.slow
def test_killed_twice_without_a_commit_in_between(tmp_path: Path, io: str) -> None:
    campaign = Campaign(tmp_path, io=io, elements=50_000, seed=3)
    campaign.live("record")
    for _ in range(3):
        campaign.live("recovery")
    acknowledged = campaign.outcome.acknowledged
    campaign.live(None)  # which may go on saving until it is killed
    assert campaign.outcome.restored[-1] >= acknowledged


TRAINER = """
import os, sys, torch
from pccheck_async import StorageOptions, SyncCheckpointEngine
from pccheck_async.testing import StuckWriter
from pccheck_async.medium.files import Files

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        return torch.full((10,), float(index))

stuck = []
def make(path, operations):
    stuck.append(StuckWriter(Files(path, operations), kinds=()))
    return stuck[0]

if __name__ == "__main__":
    hold, workers, io = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    options = StorageOptions(io=make if hold != "nothing" else io)
    with SyncCheckpointEngine(sys.argv[1], storage=options) as engine:
        state = {"tensor": torch.arange(100_000), "step": 1}
        engine.checkpoint(state, step=1).result()
        loader = torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=workers)
        batches = iter(loader)  # the workers are forked while the engine is open
        next(batches)
        if hold != "nothing":
            stuck[0].hold(*hold.split("+"))
        state["step"] = 2
        state["tensor"] += 1
        pending = engine.checkpoint(state, step=2)
        if hold == "nothing":
            pending.result()
        else:
            stuck[0].wait_stuck()
        pids = [worker.pid for worker in batches._workers] if workers else []
        print("ready", *pids, flush=True)
        sys.stdin.read()
"""


def _start(folder: Path, hold: str, workers: int, io: str = "auto") -> tuple[subprocess.Popen[str], list[int]]:
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    command = [script, folder / "store", hold, workers, io]
    files: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    if workers:
        path = {"PYTHONPATH": str(Path(__file__).parents[2])}
        trainer = subprocess.Popen([sys.executable, *map(str, command)], env=os.environ | path, **files)
    else:
        trainer = start_warm(*command, **files)
    assert trainer.stdout is not None
    word, *pids = trainer.stdout.readline().split()
    assert word == "ready"
    return trainer, [int(pid) for pid in pids]


def _kill(trainer: subprocess.Popen[str]) -> None:
    trainer.kill()
    trainer.wait()
    for pipe in (trainer.stdin, trainer.stdout):
        assert pipe is not None
        pipe.close()


@pytest.mark.slow
def test_a_trainer_killed_while_its_data_loader_workers_live_restarts_at_once(tmp_path: Path) -> None:
    need("threads")
    trainer, workers = _start(tmp_path, "nothing", 2, "threads")
    try:
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # else they would notice, and be gone before the restart
        _kill(trainer)
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
        with SyncCheckpointEngine(tmp_path / "store", storage=StorageOptions(lock_timeout=0)) as engine:
            state: dict[str, Any] = {"tensor": torch.zeros(100_000, dtype=torch.int64), "step": 0}
            info = engine.restore(state)
            assert info is not None
            assert (info.step, state["step"]) == (2, 2)
            assert torch.equal(state["tensor"], torch.arange(100_000) + 1)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["write", "flush", "write+flush"])
def test_killed_while_the_device_is_stuck(tmp_path: Path, hold: str) -> None:
    trainer, _ = _start(tmp_path, hold, 0)
    _kill(trainer)
    state = load_sync(tmp_path / "store")
    assert state["step"] == 1
    assert torch.equal(state["tensor"], torch.arange(100_000))
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        assert engine.checkpoint(state, step=5).result(60).counter == 1
