"""A group whose world changes at each restart: every restart has the bits of a training that nothing interrupts."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from pccheck_async import FlatShard, Group, GroupError, SyncCheckpointEngine
from pccheck_async.group import seen_stores
from tests.group.test_sharded import full_state, mesh_of
from tests.support.killed_ranks import RankJournal
from tests.support.killed_training import Journal, read
from tests.support.ranks import PATIENCE, run_ranks

RESTARTS = 50
LAYOUTS: dict[int, list[tuple[int, ...]]] = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)]}
SAMPLES, FEATURES = 12, 13


class Linears(nn.Module):
    """Its gradients are sums of whole numbers: exact, whichever ranks add up which of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 5)
        self.outer = nn.Linear(6, 3, bias=False)

    def forward(self, samples: Tensor) -> Tensor:
        inner, outer = self.inner(samples[:, :7]), self.outer(samples[:, 7:])
        total: Tensor = (inner * torch.arange(1.0, 6.0)).sum() + outer.sum()
        return total


class Training:
    """FSDP2 with AdamW, elements dealt out in flat ranges, a table that all ranks have, and what is each rank's own.

    Factors that a sum is multiplied by are powers of two: with or without a fused multiplication, the bits are equal.
    """

    def __init__(self, rank: int = 0, world: int = 1, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(7)
        self.rank, self.world = rank, world
        self.model = Linears()
        if mesh is not None:
            fully_shard(self.model.inner, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.125, betas=(0.5, 0.75))
        self.share = slice(*(SAMPLES * FEATURES * number // world for number in (rank, rank + 1)))
        local = torch.zeros(self.share.stop - self.share.start)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "master": FlatShard(local, (SAMPLES, FEATURES), self.share.start),
            "table": torch.zeros(FEATURES),
            "steps": 0,
            "own": torch.tensor([rank, world, 0]),
        }

    def step(self, number: int) -> None:
        samples = 12.0 * torch.randint(-9, 10, (SAMPLES, FEATURES), generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        (self.world * self.model(samples[self.rank :: self.world])).backward()
        self.optimizer.step()  # waits until the last checkpoint is captured
        self.state["master"].local.mul_(0.75).add_(samples.flatten()[self.share])
        self.state["table"].mul_(0.75).add_(samples.sum(0))
        self.state["steps"] += 1
        self.state["own"].copy_(torch.tensor([self.rank, self.world, number]))

    def note(self, journal: Journal | RankJournal, step: int) -> None:
        """Write the bits of every tensor in full."""
        found = full_state(self.model, self.optimizer) | {name: self.state[name] for name in ("table", "steps")}
        parts: list[Any] = [self.state["master"].local]
        if self.world > 1:
            dist.all_gather_object(parts := [None] * self.world, self.state["master"].local)
        for name, value in (found | {"master": torch.cat(parts)}).items():
            journal.note(f"state {step} {name}", value)


def live(folder: Path, shape: tuple[int, ...], steps: int, doomed: bool, group: Group) -> None:
    """Restore, and train: for so many steps, until it is preempted, or until it is killed."""
    try:
        train(folder, shape, steps, group)
    except (GroupError, RuntimeError):  # the latter from gloo
        if not doomed:  # else a rank that is gone
            raise


def train(folder: Path, shape: tuple[int, ...], steps: int, group: Group) -> None:
    journal = RankJournal(Journal(folder / "journal"), group.rank)
    training = Training(group.rank, group.world_size, mesh_of(folder, group, *shape))
    state, waiting = training.state, list[Any]()
    journal.note("begun 0", None)
    with SyncCheckpointEngine(
        folder / "run", group=Group.of(group, replicated=["table"]), interval=2, keep_last=2
    ) as engine:
        engine.attach(training.optimizer)
        engine.on_preemption(deadline=20)
        restored = engine.restore(state, private="modulo")
        last = -1 if restored is None else restored.step
        if restored is not None:
            rank, world, step = state["own"].tolist()
            assert (rank, step) == (group.rank % world, last)
            training.note(journal, last)
        journal.note(f"restored {last}", None)
        for step in range(last + 1, last + 1 + steps):
            with engine.step(state, step) as this:
                training.step(step)
                journal.note(f"trained {step}", None)
            waiting += [this.pending] * (this.pending is not None)
            if len(waiting) == 2:
                journal.note(f"durable {waiting.pop(0).result().step}", None)


class Lives:
    """The lives of one group, each of another world than the one before, and how they ended."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.restored: list[int] = []
        self.states: set[tuple[str, str]] = set()
        self.world, self.oldest, self.newest = 0, -1, -1
        """The last life's world, and the steps that the next one may find."""

    def live(self, how: str = "", steps: int = 0) -> None:
        """Begin, and end as chance chooses, unless it is given."""
        for name in ("rendezvous", "journal"):
            (self.folder / name).unlink(missing_ok=True)
        self.world = self.random.choice([world for world in LAYOUTS if world != self.world])
        how = how or self.random.choice(["killed early", "killed", "killed", "preempted", "ended"])
        steps = steps or (self.random.randrange(1, 8) if how == "ended" else 1_000_000)
        doomed = how.startswith("killed")
        run = partial(live, self.folder, self.random.choice(LAYOUTS[self.world]), steps, doomed)
        statuses: list[int] = []
        run_ranks(self.world, run, meanwhile=partial(self.strike, how), statuses=statuses)
        expected = {"preempted": {128 + signal.SIGTERM}, "ended": {0}}.get(how, {0, -signal.SIGKILL})
        assert {*statuses} <= expected, f"{how}: {statuses}"
        found = {*self.said("restored")}
        assert len(found) <= 1, f"ranks restored different steps: {found}"
        assert all(self.oldest <= step <= self.newest for step in found), (found, self.oldest, self.newest)
        trained = self.said("trained")
        self.newest = max([self.newest, *trained])
        self.oldest = max([self.oldest, *self.said("durable")]) if doomed else self.newest
        self.restored += found
        self.states |= {(key.split(" ", 1)[1], value) for key, value in self.journal() if " state " in key}
        self.ends[how] += 1

    def strike(self, how: str, pids: list[int]) -> None:
        """End ranks; what is left of those that are killed a moment later, as a launcher does."""
        deadline = time.monotonic() + PATIENCE
        while len(self.said("begun" if how == "killed early" else "restored")) < len(pids):
            assert time.monotonic() < deadline, f"the ranks hang: {self.journal()[-5:]}"
            time.sleep(0.002)
        if how == "ended":
            return
        time.sleep(self.random.uniform(0, 0.6))
        victims = self.random.choice([pids, pids[:1], [self.random.choice(pids)]])
        for pid in victims:
            os.kill(pid, signal.SIGTERM if how == "preempted" else signal.SIGKILL)  # none is reaped yet
        if how != "preempted":
            time.sleep(self.random.uniform(0, 0.05))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def journal(self) -> list[tuple[str, str]]:
        return read(self.folder / "journal")

    def said(self, word: str) -> list[int]:
        """Return the numbers behind this word, of all ranks."""
        return [int(line[2]) for line in (key.split() for key, _ in self.journal()) if line[1] == word]


def uninterrupted(path: Path, steps: set[int]) -> dict[str, str]:
    """Return what one process has after these steps of a training that nothing interrupts."""
    journal, training = Journal(path), Training()
    for step in range(max(steps) + 1):
        training.step(step)
        if step in steps:
            training.note(journal, step)
    return dict(read(path))


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:FSDP2-wrapped module")
def test_each_restart_of_another_world_has_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    lives, start = Lives(tmp_path, seed=11), time.perf_counter()
    for _ in range(RESTARTS):
        lives.live()
    lives.live("ended", steps=6)  # so that no checkpoint of another world is kept
    seconds = time.perf_counter() - start
    restored = {step for step in lives.restored if step >= 0}
    expected = uninterrupted(tmp_path / "uninterrupted", restored)
    assert lives.states == {*expected.items()}
    print(f"\n{dict(lives.ends)}; {len(lives.restored)} restarts compared, {lives.newest} steps, {seconds:.0f} s")
    # What the other worlds left is gone, but for folders of ranks that died before their store was whole.
    assert {store.rank for store in seen_stores(tmp_path / "run")} == {*range(lives.world)}
