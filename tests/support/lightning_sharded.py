"""Trainings with Lightning under FSDP2, whose own checkpoints are saved as shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from pccheck_async import Group, ResumableLoader, StateMismatchError
from pccheck_async.integrations.lightning import PCcheckModelParallelStrategy
from tests.support.lightning_run import Ranks, Samples, make_trainer
from tests.support.ranks import meet

__all__ = ["evaluated", "saved_and_resumed"]


class Sharded(LightningModule):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("validation", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def trainer_of(folder: Path, group: Group, **options: Any) -> Any:
    strategy = PCcheckModelParallelStrategy(group.world_size, 1, process_group_backend="gloo")
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    more = {"devices": group.world_size, "num_sanity_val_steps": 0, "enable_checkpointing": True, "max_epochs": 2}
    plugins = [Ranks(group.rank, group.world_size)]
    return make_trainer(folder, saver, strategy=strategy, plugins=plugins, **more | options)


def in_full(trainer: Any) -> list[torch.Tensor]:
    tensors = [*trainer.lightning_module.state_dict().values()]
    for optimizer in trainer.optimizers:
        tensors += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]


def fit(folder: Path, group: Group, ckpt_path: Any = None, width: int = 9) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(group.rank)
    trainer, model = trainer_of(folder, group), Sharded(width)
    loaders = ResumableLoader(Samples(36, random=False), batch_size=3, seed=5), DataLoader(Samples(8, random=False), 4)
    trainer.fit(model, *loaders, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    return model.losses, in_full(trainer)


def saved_and_resumed(folder: Path, place: Any, group: Group) -> tuple[list[float], list[torch.Tensor]]:
    dist.init_process_group("gloo", store=meet(place), rank=group.rank, world_size=group.world_size)
    losses, final = fit(folder, group)
    names = [*(f"step={step}.ckpt" for step in range(2, 13, 2)), "last.ckpt"]
    assert sorted(os.listdir(folder)) == sorted(names)
    assert max(folder.iterdir(), key=os.path.getmtime).name == "last.ckpt"  # what "last" goes by
    for path, steps in ((folder / "step=4.ckpt", 4), ("last", 12), (folder / "step=6.ckpt", 6)):
        again, ended = fit(folder, group, path)  # in mid-epoch, at the end of all, and at that of one
        assert again == losses[steps:]
        assert all(map(torch.equal, ended, final))
    with pytest.raises(StateMismatchError, match="nothing was restored"):
        fit(folder, group, folder / "step=4.ckpt", width=10)
    return losses, final


def evaluated(folder: Path, place: Any, group: Group) -> list[torch.Tensor]:
    dist.init_process_group("gloo", store=meet(place), rank=group.rank, world_size=group.world_size)
    trainer = trainer_of(folder, group)
    loader = DataLoader(Samples(8, random=False), 4)
    found = trainer.validate(Sharded(), loader, ckpt_path=folder / "last.ckpt", verbose=False)
    assert found[0]["validation"] > 0
    return in_full(trainer)
