"""DDP training that is killed and started again has the bits of a run that was never interrupted."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from pccheck_async import Adaptive, Group, ResumableLoader, RNGState, SyncCheckpointEngine, list_checkpoints, stores
from pccheck_async.cli.demo_trainer import make_deterministic
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
STEP_SECONDS = 2.0
"""Most that a step may take on a busy machine, before the ranks count as hanging."""
SLEEP_SECONDS = 0.002
"""Least that a step takes, so that there are checkpoints before the last step but one."""


class Noisy(Dataset[Tensor]):
    """Samples that are drawn anew in each epoch; the loader seeds each of them."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16) + index / len(self)


@dataclass
class Training:
    """One training run, which may take several lives; what its ranks computed is in text files."""

    folder: Path
    world: int
    steps: int
    random: random.Random
    lives: int = 0
    restored: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def file(self, rank: int) -> Path:
        """Lines of step and bits of its loss, in the order in which the rank computed them."""
        return self.folder / f"rank{rank}"

    def losses(self, rank: int) -> list[tuple[int, str]]:
        rows = (line.split() for line in self.file(rank).read_text().splitlines()) if self.file(rank).exists() else ()
        return [(int(step), bits) for step, bits in rows]

    def live(self, kill_at: int | None = None, durable: bool = False) -> None:
        """Let all ranks train: to the end, or until after a step one of them, or all, are killed.

        Where it is said, not before there is a ``durable`` checkpoint. They restore the newest one there is.
        """
        self.lives += 1
        statuses: list[int] | None = None if kill_at is None else []
        before = len(self.losses(0))
        kept = list_checkpoints(self.store) if self.store.exists() else []

        def watch(pids: list[int]) -> None:
            target = self.steps - 1 if kill_at is None else kill_at
            self._wait(lambda: any(step >= target for step, _ in self.losses(0)[before:]))
            if kill_at is None:
                return
            self._wait(lambda: not durable or bool(list_checkpoints(self.store)))
            time.sleep(self.random.uniform(0, 0.03))  # into the next step, or a save
            victims = self.random.choice([pids, [self.random.choice(pids)]])
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            time.sleep(self.random.uniform(0, 0.05))  # until the launcher ends the others
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        run_ranks(self.world, self._be, meanwhile=watch, statuses=statuses)
        assert statuses in (None, [-signal.SIGKILL] * self.world)
        first = self.losses(0)[before][0]
        assert first == (kept[0].step + 1 if kept else 0)
        if first > 0:
            self.restored.append(first - 1)

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30 + STEP_SECONDS * self.steps
        while not ready():
            assert time.monotonic() < deadline, f"the ranks hang in life {self.lives}"
            time.sleep(0.005)

    def _be(self, launched: Group) -> None:
        rank = launched.rank
        rendezvous = f"file://{self.folder}/rendezvous{self.lives}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=self.world)
        make_deterministic(seed=rank, threads=1)  # every rank drops other units
        layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
        # Else a process moves gradients to other places in their buckets after its first step, which changes rounding.
        model = DistributedDataParallel(layers, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = ResumableLoader(Noisy(), batch_size=4, seed=7, num_workers=1)
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNGState()}
        with (
            SyncCheckpointEngine(self.store, group=dist.group.WORLD, interval=Adaptive(overhead=0.5)) as engine,
            self.file(rank).open("a", buffering=1) as file,
        ):
            engine.attach(optimizer)
            restored = engine.restore(state)
            first = 0 if restored is None else restored.step + 1
            for step, batch in zip(range(first, self.steps), loader.forever(), strict=False):
                with engine.step(state, step):
                    loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    time.sleep(SLEEP_SECONDS)
                file.write(f"{step} {struct.pack('>f', loss.item()).hex()}\n")
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "steps", "kills"), [(2, 36, 2), pytest.param(4, 200, 10, marks=pytest.mark.campaign)]
)
def test_killed_at_random_is_uninterrupted(tmp_path: Path, world: int, steps: int, kills: int) -> None:
    draw = random.Random(kills)
    uninterrupted = Training(tmp_path / "uninterrupted", world, steps, draw)
    uninterrupted.live()
    killed = Training(tmp_path / "killed", world, steps, draw)
    begun = time.monotonic()
    share = steps // (kills + 1)
    for kill in range(1, kills + 1):
        step = draw.randrange(kill * share - share // 2, kill * share)  # long before its end
        killed.live(step, durable=kill == kills)
    killed.live()

    leaves = computed = 0
    for rank in range(world):
        expected = dict(uninterrupted.losses(rank))
        rows = killed.losses(rank)
        assert sorted(expected) == sorted(dict(rows)) == list(range(steps))
        assert [(step, bits) for step, bits in rows if bits != expected[step]] == []
        computed += len(rows)
        found = stores.compare(uninterrupted.store, killed.store, rank=rank, other_rank=rank)
        assert found.differences == ()
        leaves += found.leaves
    assert list_checkpoints(killed.store)[0].step == steps - 1
    assert killed.restored == sorted(killed.restored)
    assert killed.restored[-1] > 0
    print(
        f"\n{world} ranks, {kills} kills: {computed} losses of {world * steps} steps and {leaves} leaves are equal in"
    )
    print(f"every bit; resumed from steps {killed.restored}; {time.monotonic() - begun:.0f} s")


def two_pipelines(folder: Path, group: Group) -> list[int]:
    """Two stages on two ranks each, whose replicas are under DDP: return how much this rank saved."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=group.rank, world_size=4)
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = group.rank % 2
    torch.manual_seed(stage)
    model = DistributedDataParallel(nn.Linear(30, 40 + stage), process_group=stages[stage])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    expected = [each.clone() for each in model.parameters()]
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        saved = engine.checkpoint(state, step=1).result()
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        assert engine.restore(state) is not None
        assert all(map(torch.equal, model.parameters(), expected))
    return [saved.nbytes]


@pytest.mark.slow
def test_replicas_of_a_pipeline_stage_are_shared_out_among_its_ranks(tmp_path: Path) -> None:
    saved = run_ranks(4, lambda group: two_pipelines(tmp_path, group))
    assert sum(nbytes for (nbytes,) in saved) < 2 * 3 * 4 * 41 * 31 + 4 * 8192, "each stage once"
