"""Accelerate, real: training that is killed at named moments and resumed by the same command computes the same bits."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pccheck_async import Group, ResumableLoader, StateMismatchError, SyncCheckpointEngine, stores
from tests.support.killed_ranks import RankJournal, on_ranks
from tests.support.killed_training import Journal, agree, bits, live
from tests.support.lazily import Lazily, need_framework

need_framework("accelerate")
accelerate, adapter = Lazily("accelerate"), Lazily("pccheck_async.integrations.accelerate")
EPOCHS = 2  # of 10 batches in windows of 4, 4 and 2
REPLICATED = ["model.*.weight", "model.*.bias", "optimizer.state.*"]
DATA = TensorDataset(torch.arange(80.0).reshape(40, 2) / 40)


def accelerator_of(kind: str = "default", window: int = 4) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # what a Trainer in this process left
    configuration = accelerate.utils.DataLoaderConfiguration(
        use_seedable_sampler=kind == "seedable", use_stateful_dataloader=kind == "stateful"
    )
    return accelerate.Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=window, dataloader_config=configuration
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def train(folder: Path, kind: str, workers: int, journal: Journal | RankJournal) -> None:
    torch.set_num_threads(1)
    accelerate.utils.set_seed(3)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:  # as a launcher says; else each rank would train by itself
        names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"}
    accelerator = accelerator_of(kind)
    assert accelerator.num_processes == world
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader: Any
    if kind == "resumable":
        loader = adapter.AcceleratedLoader(ResumableLoader(DATA, batch_size=4, num_workers=workers), accelerator)
    else:
        loader = accelerator.prepare(DataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers))
    validation = accelerator.prepare(DataLoader(DATA, batch_size=20))
    state = adapter.training_state(accelerator, loader)
    loader = state["loader"]
    group = Group.of(dist.group.WORLD, replicated=REPLICATED) if dist.is_initialized() else None
    with SyncCheckpointEngine(folder, interval=1, group=group) as engine:
        engine.on_event(lambda event: journal.reach(f"{event.name} {getattr(event, 'step', '')}"))
        engine.attach(optimizer)
        restored = engine.restore(state)
        step = restored.step + 1 if restored else 0
        for epoch in loader.epochs(EPOCHS):
            for (batch,) in epoch:
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


def check(folder: Path, kind: str, workers: int, moments: list[str]) -> None:
    """Train whole, and killed at one moment after the other, each life going on where the last one died."""
    whole = live(partial(train, folder / "whole", kind, workers), folder / "whole.journal")
    work = partial(train, folder / "killed", kind, workers)
    agree(whole, [live(work, folder / f"life {moment}", moment) for moment in [*moments, None]])


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    ("kind", "workers", "moments"),
    [
        ("resumable", 2, ["train 5", "after 9", "captured 13"]),
        ("default", 0, ["train 6", "train 9", "validation 0 1"]),
        pytest.param("seedable", 0, ["train 9", "captured 9", "train 17"], marks=pytest.mark.campaign),
    ],
)
def test_killed_training_resumes_with_the_same_bits(
    tmp_path: Path, kind: str, workers: int, moments: list[str]
) -> None:
    check(tmp_path, kind, workers, moments)


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["resumable", "default", "seedable"])
def test_killed_at_ten_moments(tmp_path: Path, kind: str, workers: int) -> None:
    moments = ["train 0", "train 3", "captured 7", "train 8", "train 9", "after 9", "validation 0 1", "train 10"]
    check(tmp_path, kind, workers, [*moments, "captured 13", "train 19"])


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["resumable", "default"])
def test_killed_ranks_resume_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    """Two of DistributedDataParallel, in windows of 4 and 1 batches, whose checkpoint one has one part of each."""
    whole = live(on_ranks(2, partial(train, tmp_path / "whole", kind, 0)), tmp_path / "whole.journal")
    work = on_ranks(2, partial(train, tmp_path / "killed", kind, 0))
    moments = ["1 train 2", "0 captured 3", "0 after 4", "1 train 7", None]
    agree(whole, [live(work, tmp_path / f"life {moment}", moment) for moment in moments])


def test_ranks_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """The sampler of several ranks draws its orders from a generator of its own."""
    whole = live(on_ranks(2, partial(train, tmp_path / "whole", "default", 0)), tmp_path / "whole.journal")
    work = on_ranks(2, partial(train, tmp_path / "killed", "default", 0))
    agree(whole, [live(work, tmp_path / f"life {moment}", moment) for moment in ("0 durable 4", None)])


def test_accelerate_has_what_is_read() -> None:
    accelerator = accelerator_of()
    assert all(hasattr(accelerator, name) for name in adapter.PRIVATE)


def test_a_folder_of_save_state_is_gone_on_from_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def run(store: str, until: int = 100) -> tuple[Any, str]:
        accelerator = accelerator_of(window=1)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        loader = adapter.AcceleratedLoader(ResumableLoader(DATA, batch_size=4), accelerator)
        state = adapter.training_state(accelerator, loader)
        with SyncCheckpointEngine(tmp_path / store, interval=1) as engine:
            engine.attach(optimizer)
            restored = engine.restore(state)
            if restored is None and folder.exists():
                accelerator.load_state(folder)
            step = restored.step + 1 if restored else 10
            for epoch in loader.epochs(1):
                for (batch,) in epoch:
                    with engine.step(state, step):
                        accelerator.backward(model(batch).square().mean())
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                    step += 1
                    if step == until:
                        break
                break
        return accelerator, bits([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])

    run("before")[0].save_state(folder)
    _, whole = run("whole")
    assert run("parts", until=13)[1] != whole
    assert run("parts")[1] == whole
    info = stores.import_(folder, tmp_path / "imported", root="model", step=1)
    assert info.source == "safetensors"
    assert [each.split()[0] for each in info.missing] == ["optimizer.bin", "random_states_0.pkl", "scheduler.bin"]


def test_wrong_uses_are_told() -> None:
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(DATA, batch_size=4))
    with pytest.raises(ValueError, match="has no models"):
        adapter.training_state(accelerator, loader)
    model = network()
    accelerator.prepare(model)
    with pytest.raises(ValueError, match="is no loader that"):
        adapter.training_state(accelerator, DataLoader(DATA))
    assert isinstance(adapter.training_state(accelerator, loader)["loader"], adapter.TrackedLoader)
    accelerator.prepare(network())
    assert {"model", "model_1"} < adapter.training_state(accelerator, loader).keys()
    accelerator.free_memory()
    optimizer = torch.optim.SGD(model.parameters())
    accelerator.prepare(model, optimizer)
    accelerator.prepare(optimizer)
    with pytest.raises(ValueError, match="prepared twice"):
        adapter.training_state(accelerator, loader)


def test_another_model_is_told(tmp_path: Path) -> None:
    accelerator = accelerator_of()
    _, loader = accelerator.prepare(network(), DataLoader(DATA, batch_size=4))
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(adapter.training_state(accelerator, loader), step=0).result()
    accelerator = accelerator_of()
    _, loader = accelerator.prepare(nn.Linear(3, 1), DataLoader(DATA, batch_size=4))
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(StateMismatchError, match="model"):
        engine.restore(adapter.training_state(accelerator, loader))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
def test_a_stateful_loader_is_told() -> None:
    pytest.importorskip("torchdata")
    with pytest.raises(ValueError, match="cannot be replayed"):
        adapter.TrackedLoader(accelerator_of("stateful").prepare(DataLoader(DATA)))


def test_another_kind_of_sampler_is_told() -> None:
    def loader_of(kind: str) -> Any:
        return adapter.TrackedLoader(accelerator_of(kind).prepare(DataLoader(DATA, batch_size=4, shuffle=True)))

    with pytest.raises(ValueError, match="use_seedable_sampler differs"):
        loader_of("default").load_state_dict(loader_of("seedable").state_dict())


def saved_after(batches: int, folder: Path, *, size: int = 4, window: int = 4, samples: int = 40) -> Any:
    """Restore and loop over one batch or more of an epoch, save, and return where it had begun."""
    accelerator = accelerator_of(window=window)
    data = torch.utils.data.Subset(DATA, range(samples))
    model, loader = accelerator.prepare(nn.Linear(2, 1), DataLoader(data, batch_size=size))
    state = adapter.training_state(accelerator, loader)
    with SyncCheckpointEngine(folder) as engine:
        restored = engine.restore(state)
        epochs = state["loader"].epochs(5)
        epoch = next(epochs)
        begun = epoch.number, state["loader"].state_dict()["delivered"]
        for number, _ in epoch.enumerate(1):
            with accelerator.accumulate(model):
                pass
            if number == begun[1] + batches:
                engine.checkpoint(state, step=restored.step + 1 if restored else 0).result()
    return begun


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 5}, "saved after 4 batches of epoch 0 with 4 samples in a batch of all ranks, and there are 5 now"),
        ({"window": 2}, "saved after 4 batches of an epoch with gradient_accumulation_steps=4, which is 2 now"),
        ({"samples": 36}, "saved after 4 batches of epoch 0 with 40 samples in the dataset, and there are 36 now"),
    ],
)
def test_other_sizes_are_refused_inside_an_epoch_and_taken_at_its_end(
    change: dict[str, int], words: str, tmp_path: Path
) -> None:
    assert saved_after(4, tmp_path / "inside") == (0, 0)
    with pytest.raises(StateMismatchError) as caught:
        saved_after(1, tmp_path / "inside", **change)
    assert f"{words}: give the same again until the epoch has ended" in str(caught.value)
    assert saved_after(1, tmp_path / "inside") == (0, 4)
    assert saved_after(10, tmp_path / "whole") == (0, 0)
    assert saved_after(1, tmp_path / "whole", **change)[0] == 0  # what the loop does at the epoch's end is done again


def test_a_pass_beside_the_epoch_leaves_its_position_alone() -> None:
    def loader_of() -> Any:
        accelerator = accelerator_of()
        _, loader = accelerator.prepare(network(), DataLoader(DATA, batch_size=4, shuffle=True))
        return adapter.training_state(accelerator, loader)["loader"]

    loader, saved, rest = loader_of(), None, list[torch.Tensor]()
    for epoch in loader.epochs(1):
        for number, (batch,) in enumerate(epoch):
            if saved is not None:
                rest.append(batch)
            elif number == 2:
                assert sum(len(each) for (each,) in loader) == len(DATA)
                saved = loader.state_dict()
    resumed = loader_of()
    resumed.load_state_dict(saved)
    found = [batch for epoch in resumed.epochs(1) for (batch,) in epoch]
    assert torch.equal(torch.cat(found), torch.cat(rest))


def without(state_dict: Callable[[Any], dict[str, Any]], new: str) -> Callable[[Any], dict[str, Any]]:
    """Return it as it was before it had that field."""
    return lambda self: {name: value for name, value in state_dict(self).items() if name != new}


def test_a_checkpoint_without_the_sizes_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, new in {"TrackedLoader": "sizes", "_Count": "window"}.items():
        name = f"pccheck_async.integrations.accelerate.{kind}.state_dict"
        monkeypatch.setattr(name, without(pkgutil.resolve_name(name), new))
    saved_after(4, tmp_path)
    monkeypatch.undo()
    assert saved_after(1, tmp_path, size=5, window=2) == (0, 4)


def loop_over(loader: Any, engine: SyncCheckpointEngine, state: Any) -> None:
    for step, _ in enumerate(loader, start=3):
        with engine.step(state, step):
            pass


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_loop_over_the_loader_itself_is_refused_where_it_saves(dispatched: bool, tmp_path: Path) -> None:
    accelerator = accelerator_of()
    accelerator.dataloader_config.dispatch_batches = dispatched
    _, loader = accelerator.prepare(network(), DataLoader(DATA, batch_size=4))
    assert type(loader).__name__ == f"DataLoader{'Dispatcher' if dispatched else 'Shard'}"
    state = adapter.training_state(accelerator, loader)
    for _ in loader:
        pass  # measures the data
    look = iter(loader)
    next(look)
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.restore(state)
        for step, _ in enumerate(state["loader"]):
            with engine.step(state, step):
                pass
            if step == 2:
                break
        with pytest.raises(RuntimeError, match=r'loop over this, `for epoch in state\["loader"\]\.epochs\(n\)'):
            loop_over(loader, engine, state)
        assert engine.latest is not None
        assert engine.latest.step <= 3
        engine.checkpoint(state, step=9).result()
