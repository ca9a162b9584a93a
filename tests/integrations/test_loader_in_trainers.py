"""ResumableLoader in the loops of Lightning, Accelerate and Hugging Face's Trainer, as they are installed."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pccheck_async import ResumableLoader, RNGState
from pccheck_async.integrations import versions
from tests.support.datasets import Numbers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*(torch.jit|LeafSpec|num_workers|pin_memory|_register_pytree|swig|The dirpath has changed).*"
    ),
]


class Samples(Numbers):
    """A number, and a draw from the global generator: what a dataset that augments gives."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.rand(4), "index": index, "labels": torch.rand(1)}


def values(batches: Iterable[Any]) -> list[Any]:
    return [(batch["index"].tolist(), batch["x"].tolist()) for batch in batches]


# Lightning


def fit(loader: ResumableLoader, folder: Path, ckpt_path: Path | None = None) -> list[Any]:
    """Train three epochs, saving after each and after every third step; return epoch and batch of every step."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen: list[Any] = []

    class Model(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            seen.append((self.current_epoch, batch["index"].tolist(), batch["x"].tolist()))
            return self.layer(batch["x"]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-2)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callbacks = [
        ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1),
        ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=3),
    ]
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Model(), loader, ckpt_path=ckpt_path)
    return seen


def test_lightning_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    def make() -> ResumableLoader:
        return ResumableLoader(Samples(18), batch_size=4, seed=3)

    whole = fit(make(), tmp_path / "whole")
    assert [epoch for epoch, *_ in whole] == [0] * 5 + [1] * 5 + [2] * 5
    for name, left in (("epoch=0", 10), ("step=3", 12)):
        assert fit(make(), tmp_path / name, tmp_path / "whole" / f"{name}.ckpt") == whole[-left:]


# Accelerate


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    forget()  # a Trainer that stopped inside an epoch leaves its loader there
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    forget()


def accelerated(accelerator: Any, **arguments: Any) -> Any:
    from pccheck_async.integrations.accelerate_loader import AcceleratedLoader

    return AcceleratedLoader(ResumableLoader(Samples(18), batch_size=3, seed=3, **arguments), accelerator)


def test_accelerate_sees_the_end_of_the_data(accelerator: Any) -> None:
    """Six batches in windows of four: the step of the window that is left is made at the end of the epoch."""
    loader = accelerated(accelerator)
    model, optimizer = nn.Linear(4, 1), None
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    model, optimizer, same = accelerator.prepare(model, optimizer, loader)
    assert same is loader
    synced = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
                assert len(accelerator.gather_for_metrics(batch["index"])) == 3
        assert not accelerator.gradient_state.in_dataloader
    assert synced == [False, False, False, True, False, True] * 2
    for _ in loader:
        break
    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_is_that_of_the_loop(accelerator: Any, workers: int) -> None:
    """One batch ahead, as Accelerate's own loaders are, would lose one."""
    expected = values(accelerated(accelerator).loader)
    loader = accelerated(accelerator, num_workers=workers)
    got = values(islice(loader, 2))
    resumed = accelerated(accelerator)
    resumed.load_state_dict(loader.state_dict())
    assert got + values(resumed) == expected


@pytest.mark.parametrize("habit", ["whole", "cut", "second pass"])
@pytest.mark.parametrize("kind", ["resumable", "prepared", "seedable"])
def test_epochs_resume_wherever_they_are_killed(accelerator: Any, kind: str, habit: str) -> None:
    """Six batches per epoch in windows of four, three epochs; killed after each step."""
    from accelerate.utils import DataLoaderConfiguration

    from pccheck_async.integrations.accelerate import TrackedLoader

    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=kind == "seedable")
    synced: list[bool] = []

    def live(saved: dict[str, Any], kill: int | None) -> list[Any]:
        if kind == "resumable":
            loader = accelerated(accelerator)
        else:
            loader = TrackedLoader(accelerator.prepare(DataLoader(Numbers(18), 3, shuffle=True)))
        rng = RNGState()
        if saved:
            loader.load_state_dict(saved["loader"])
            rng.load_state_dict(saved["rng"])
        steps: list[Any] = saved.setdefault("steps", [])
        for epoch in loader.epochs(3, steps=5 if habit == "cut" else None):
            assert len(epoch) == (5 if habit == "cut" else 6)
            for batch in epoch:
                steps.append((batch["index"] if kind == "resumable" else batch).tolist())
                synced.append(accelerator.gradient_state.end_of_dataloader)
                saved |= copy.deepcopy({"loader": loader.state_dict(), "rng": rng.state_dict()})
                if len(steps) == kill:
                    return steps
            if habit == "second pass":
                assert len([*loader]) == 6
        assert not accelerator.gradient_state.in_dataloader
        return steps

    torch.manual_seed(1)
    whole = live({}, None)
    per_epoch = 5 if habit == "cut" else 6
    assert synced == ([False] * (per_epoch - 1) + [True]) * 3
    assert len(whole) == 3 * per_epoch
    assert len({*map(tuple, whole)}) > 2 * per_epoch
    for kill in range(1, len(whole)):
        torch.manual_seed(1)
        saved: dict[str, Any] = {}
        live(saved, kill)
        torch.manual_seed(kill)
        assert live(saved, None) == whole, kill


def test_a_tracked_loader_reads_positions_of_older_versions(accelerator: Any) -> None:
    from pccheck_async.integrations.accelerate import TrackedLoader

    def make() -> Any:
        return TrackedLoader(accelerator.prepare(DataLoader(Numbers(18), 3, shuffle=True)))

    torch.manual_seed(1)
    whole = [[batch.tolist() for batch in epoch] for epoch in make().epochs(2)]
    torch.manual_seed(1)
    first = make()
    batches = (batch for epoch in first.epochs(2) for batch in epoch)
    got = [next(batches).tolist() for _ in range(8)]
    state = first.state_dict()
    assert (state.pop("outer"), state.pop("earlier")) == (1, [])
    second = make()
    second.load_state_dict(state)
    rest = [[batch.tolist() for batch in epoch] for epoch in second.epochs(2)]
    assert (got, rest) == (whole[0] + whole[1][:2], [whole[1][2:]])


@pytest.mark.parametrize("restored", [False, True])
def test_skipping_goes_to_a_batch(accelerator: Any, restored: bool) -> None:
    expected = values(islice(accelerated(accelerator).loader.forever(), 12))
    loader = accelerated(accelerator)
    step = {"epoch": 1, "position": 6}
    if restored:
        loader.load_state_dict(loader.state_dict() | step)
    loader.set_epoch(1)
    before = torch.get_rng_state()
    skipped = accelerator.skip_first_batches(loader, 2)
    assert len(skipped) == 4
    ends = []
    got = []
    for batch in skipped:
        got.append(batch)
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert values(got) == expected[8:]
    assert torch.equal(torch.get_rng_state(), before)
    assert ends == [False, False, False, True]
    assert not accelerator.gradient_state.in_dataloader
    assert loader.state_dict()["epoch"] == 2


def test_skipping_elsewhere_than_the_restored_position_is_refused(accelerator: Any) -> None:
    loader = accelerated(accelerator)
    values(islice(loader, 2))
    with pytest.raises(ValueError, match="continue at batch 3 of epoch 0"):
        next(iter(accelerator.skip_first_batches(loader, 3)))
    assert loader.state_dict()["position"] == 6


def test_without_accelerate_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(versions, "version", missing)
    monkeypatch.delitem(sys.modules, "pccheck_async.integrations.accelerate_loader", raising=False)
    with pytest.raises(ImportError, match=r'pip install "pccheck-async\[accelerate\]"'):
        importlib.import_module("pccheck_async.integrations.accelerate_loader")


# Hugging Face


class Model(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 1), seen

    def forward(self, x: torch.Tensor, index: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append((index.tolist(), x.tolist()))
        return {"loss": (self.layer(x) - labels).square().mean()}


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_skips_to_the_step(tmp_path: Path) -> None:
    """Two epochs of five batches in windows of two, resumed from its own checkpoints, which hold no position."""
    transformers = pytest.importorskip("transformers")
    from pccheck_async.integrations.accelerate_loader import AcceleratedLoader

    class Trainer(transformers.Trainer):  # type: ignore[name-defined]
        def get_train_dataloader(self) -> Any:
            loader = ResumableLoader(Samples(18), batch_size=4, seed=3)
            return AcceleratedLoader(loader, self.accelerator)

    def train(folder: Path, resume: Path | None = None) -> list[Any]:
        seen: list[Any] = []
        arguments = transformers.TrainingArguments(
            str(folder), num_train_epochs=2, gradient_accumulation_steps=2, save_steps=1, use_cpu=True, report_to=[],
            disable_tqdm=True, remove_unused_columns=False, logging_steps=100,
        )  # fmt: skip
        Trainer(model=Model(seen), args=arguments, train_dataset=Samples(18)).train(resume_from_checkpoint=resume)
        return seen

    whole = train(tmp_path / "whole")
    assert len(whole) == 10
    for step, left in ((3, 5), (5, 1)):
        assert train(tmp_path / f"from{step}", tmp_path / "whole" / f"checkpoint-{step}") == whole[-left:]
