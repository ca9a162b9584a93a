"""Accelerate, real: training that is killed at named moments and resumed by the same command computes the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pccheck_async import ResumableLoader, SyncCheckpointEngine
from tests.support.killed_training import Journal, agree, live

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

from pccheck_async.integrations.accelerate import PRIVATE, TrackedLoader, training_state
from pccheck_async.integrations.accelerate_loader import AcceleratedLoader

EPOCHS, LENGTH = 3, 10  # windows of 4, 4 and 2 batches
DATA = TensorDataset(torch.arange(80.0).reshape(40, 2) / 40)


def accelerator_of(kind: str = "default") -> Accelerator:
    configuration = DataLoaderConfiguration(
        use_seedable_sampler=kind == "seedable", use_stateful_dataloader=kind == "stateful"
    )
    return Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4, dataloader_config=configuration)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def train(folder: Path, kind: str, workers: int, journal: Journal) -> None:
    torch.set_num_threads(1)
    set_seed(3)
    accelerator = accelerator_of(kind)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader: Any
    if kind == "resumable":
        loader = AcceleratedLoader(ResumableLoader(DATA, batch_size=4, num_workers=workers), accelerator)
    else:
        loader = accelerator.prepare(DataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers))
    validation = accelerator.prepare(DataLoader(DATA, batch_size=20))
    state = training_state(accelerator, loader)
    loader = state["loader"]
    with SyncCheckpointEngine(folder, interval=1) as engine:
        engine.on_event(lambda event: journal.reach(f"{event.name} {getattr(event, 'step', '')}"))
        engine.attach(optimizer)
        restored = engine.restore(state)
        step = restored.step + 1 if restored else 0
        for epoch in range(loader.epoch, EPOCHS):
            for (batch,) in loader:
                with engine.step(state, step), accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    journal.note(f"train {step}", [batch, loss])
                step += 1
                journal.reach(f"after {step - 1}")
            model.eval()
            with torch.no_grad():
                for number, (batch,) in enumerate(validation):
                    journal.note(f"validation {epoch} {number}", model(batch).sum())
            model.train()
    kept = {name: state[name].state_dict() for name in ("model", "optimizer", "scheduler", "accelerator", "rng")}
    journal.note("final", [kept, loader.epoch])


MOMENTS = [
    "train 0",
    "train 5",
    "after 7",
    "train 8",
    "train 9",
    "after 9",
    "validation 0 1",
    "train 10",
    "validation 1 0",
    "train 25",
]


def check(folder: Path, kind: str, workers: int, moments: list[str]) -> None:
    whole = live(partial(train, folder / "whole", kind, workers), folder / "whole.journal")
    for number, moment in enumerate(moments):
        work = partial(train, folder / str(number), kind, workers)
        lives = [live(work, folder / f"{number}-{moment}", moment), live(work, folder / f"{number}-again")]
        agree(whole, lives)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers"), [("resumable", 0), ("resumable", 2), ("default", 0), ("default", 2), ("seedable", 0)]
)
def test_killed_training_resumes_with_the_same_bits(tmp_path: Path, kind: str, workers: int) -> None:
    check(tmp_path, kind, workers, ["train 5", "after 9", "train 25"])


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["resumable", "default", "seedable", "stateful"])
def test_killed_at_ten_moments(tmp_path: Path, kind: str, workers: int) -> None:
    check(tmp_path, kind, workers, MOMENTS)


def test_accelerate_has_what_is_read() -> None:
    accelerator = accelerator_of()
    assert all(hasattr(accelerator, name) for name in PRIVATE)


def test_wrong_uses_are_told() -> None:
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(DATA, batch_size=4))
    with pytest.raises(ValueError, match="has no models"):
        training_state(accelerator, loader)
    model = network()
    accelerator.prepare(model)
    with pytest.raises(ValueError, match="is no loader that"):
        training_state(accelerator, DataLoader(DATA))
    assert isinstance(training_state(accelerator, loader)["loader"], TrackedLoader)
    accelerator.free_memory()
    with pytest.raises(ValueError, match="has no models"):
        training_state(accelerator, loader)
