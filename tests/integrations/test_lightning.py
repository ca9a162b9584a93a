"""Lightning as it is installed: trainings that are killed and started again, wrong uses, and its own checkpoints."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.utils.data import DataLoader

from pccheck_async import (
    Group,
    Keep,
    MemoryTier,
    ResumableLoader,
    StateMismatchError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
)
from pccheck_async.errors import StoreLockedError, UnsupportedStateError
from pccheck_async.medium.files import Files
from pccheck_async.testing import Access, WrappingWriter
from pccheck_async.transfer.operations import Operations
from tests.support.killed_training import Life, agree, bits, live, read
from tests.support.lazily import Lazily, need_framework
from tests.support.ranks import meeting_place, run_ranks

need_framework("lightning")
pl, kit = Lazily("lightning.pytorch"), Lazily("tests.support.lightning_run")
adapter = Lazily("pccheck_async.integrations.lightning")

pytestmark = [
    pytest.mark.slow,
    # Lightning's own:
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Saving a checkpoint .*:UserWarning"),
]

T = TypeVar("T")

MOMENTS = (
    "train 2", "train 5", "captured 1", "admitted 1", "validation 2 1", "epoch ends 0", "epoch starts 1", "train 11",
    "validation 11 0", "admitted 4", "train 17",
)  # fmt: skip
"""Six batches an epoch, in windows of four and two; validations after the third and the sixth."""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    assert kit.Model  # before a test forks


@pytest.fixture(autouse=True)
def _quiet(nothing_left_behind: None) -> None: ...


def killed_at(moments: list[str], tmp_path: Path, kind: str, workers: int, in_flight: int = 2) -> None:
    whole = live(kit.train(tmp_path / "whole", kind, workers), tmp_path / "journal")
    assert len(whole.keys) == 18 + 6 * 2 + 3 + 2
    for moment in moments:
        place = tmp_path / moment.replace(" ", "-")
        lives = [live(kit.train(place, kind, workers, in_flight=in_flight), tmp_path / "journal", moment)]
        assert in_flight == 2 or list_checkpoints(place)[0].step == 2  # inside the second epoch
        saved = list_checkpoints(place)
        lives.append(live(kit.train(place, kind, workers), tmp_path / "journal"))
        agree(whole, lives)
        if saved:
            assert "train 0" not in lives[1].keys


@pytest.mark.parametrize("moment", ["captured 1", "validation 11 0", "epoch ends 0"])
def test_it_goes_on_with_the_same_bits(tmp_path: Path, moment: str) -> None:
    killed_at([moment], tmp_path, "resumable", 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_draws_its_order_goes_on_with_the_same_bits(tmp_path: Path, workers: int) -> None:
    killed_at(["admitted 3"], tmp_path, "shuffled", workers, in_flight=1)


def test_it_goes_on_from_memory(tmp_path: Path, shared_memory: Path) -> None:
    whole = live(kit.train(tmp_path / "whole"), tmp_path / "journal")
    tier = MemoryTier(interval=1, path=str(shared_memory))
    training = kit.train(tmp_path / "cut", interval=100, memory=tier)
    lives = [live(training, tmp_path / "journal", "in_memory 3")]
    assert list_checkpoints(tmp_path / "cut") == []
    lives.append(live(training, tmp_path / "journal"))
    assert "train 0" not in lives[1].keys
    agree(whole, lives)
    assert list_checkpoints(tmp_path / "cut")[0].step == 5


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["resumable", "plain", "shuffled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_wherever_it_was_killed(tmp_path: Path, kind: str, workers: int) -> None:
    killed_at([*MOMENTS], tmp_path, kind, workers)


def of_ranks(kind: str, folder: Path, tmp_path: Path, die_at: str | None = None) -> list[Life]:
    """Train on two ranks, of which the second dies there; return what each computed."""
    place, statuses = meeting_place(), list[int]()
    journals = [tmp_path / f"journal-{rank}" for rank in range(2)]
    for journal in journals:
        journal.unlink(missing_ok=True)

    def train_one(group: Group) -> None:
        kit.train_rank(group, place, folder, journals[group.rank], kind, die_at if group.rank == 1 else None)

    run_ranks(2, train_one, statuses=statuses if die_at else None)
    assert not die_at or statuses[1] == -signal.SIGKILL
    return [Life(bool(die_at), read(journal)) for journal in journals]


def one_rank_killed_at(moments: list[str], tmp_path: Path, kind: str) -> None:
    whole = of_ranks(kind, tmp_path / "whole", tmp_path)
    assert [len(life.keys) for life in whole] == [9 + 9 + 3 + 2] * 2
    local = [[line for line in life.lines if line[0].startswith(("train", "validation"))] for life in whole]
    assert all(one != other for (_, one), (_, other) in zip(*local, strict=True))
    for moment in moments:
        folder = tmp_path / moment.replace(" ", "-")
        lives = [of_ranks(kind, folder, tmp_path, moment), of_ranks(kind, folder, tmp_path)]
        assert lives[1][0].keys == lives[1][1].keys
        for rank in range(2):
            agree(whole[rank], [life[rank] for life in lives])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_of_which_one_is_killed_go_on_together(tmp_path: Path, kind: str) -> None:
    one_rank_killed_at(["captured 1"], tmp_path, kind)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_go_on_wherever_one_was_killed(tmp_path: Path, kind: str) -> None:
    moments = [
        "train 1",
        "train 2",
        "admitted 1",
        "captured 2",
        "captured 1",
        "train 5",
        "validation 2 0",
        "epoch ends 0",
    ]
    one_rank_killed_at([*moments, "epoch starts 1", "train 7"], tmp_path, kind)


def fit(*callbacks: Any, model: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    """Train on five batches an epoch; return the trainer."""
    torch.manual_seed(0)
    trainer = kit.make_trainer(Path("."), *callbacks, **{"max_epochs": 1} | options)
    loaders = ResumableLoader(kit.Samples(20, random=True), batch_size=4), DataLoader(kit.Samples(8, random=False), 4)
    trainer.fit(model or kit.Model(), *loaders, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    return trainer


def steps(folder: Path) -> list[int]:
    return [info.step for info in list_checkpoints(folder)]


def test_private_attributes_are_there(tmp_path: Path) -> None:
    trainer = kit.make_trainer(tmp_path)
    for owner, names in adapter.callback.PRIVATE.items():
        found: Any = trainer
        for name in owner.split(".")[1:]:
            found = getattr(found, name)
        assert [name for name in names if not hasattr(found, name)] == []


def test_more_epochs_and_steps(tmp_path: Path) -> None:
    """What ended goes on where it ended, with the bits of a run that did not end: in mid-epoch, too."""
    whole = fit(adapter.PCcheckCallback(tmp_path / "whole"), max_epochs=3)
    for number, options in enumerate([{"max_epochs": 1}, {"max_steps": 7}, {"max_epochs": 2}, {"max_epochs": 3}]):
        saver = adapter.PCcheckCallback(tmp_path / "parts", keep_last=9)
        part = fit(saver, **{"max_epochs": 3} | options)
        assert (saver.restored is None) == (number == 0)
    assert steps(tmp_path / "parts") == [14, 9, 6, 4]
    assert bits(part.lightning_module.state_dict()) == bits(whole.lightning_module.state_dict())


def test_other_batches_inside_an_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(batch: int, **options: Any) -> None:
        trainer = kit.make_trainer(tmp_path, adapter.PCcheckCallback(tmp_path / "s"), max_epochs=4, **options)
        trainer.fit(
            kit.Model(), DataLoader(kit.Samples(24, random=False), batch), DataLoader(kit.Samples(8, random=False), 4)
        )

    train(4, max_steps=2)
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    with pytest.raises(StateMismatchError, match="made after 2 of 6 batches of an epoch, which has 3 now"):
        train(8, max_steps=6)
    assert "goes on" not in caplog.text
    with pytest.warns(UserWarning, match="accumulate_grad_batches is 2 and was 1 in the checkpoint"):
        train(4, max_steps=4, accumulate_grad_batches=2)  # ends the epoch
    train(8, max_steps=7)
    assert steps(tmp_path / "s") == [6]


@pytest.mark.parametrize("own_first", [False, True])
def test_loaders_of_the_other_kind_inside_an_epoch(tmp_path: Path, own_first: bool) -> None:
    def train(steps: int, *, own: bool) -> Any:
        samples = kit.Samples(24, random=False)
        loader = ResumableLoader(samples, batch_size=4) if own else DataLoader(samples, 4, shuffle=True)
        trainer = kit.make_trainer(tmp_path, adapter.PCcheckCallback(tmp_path / "s"), max_epochs=9, max_steps=steps)
        trainer.fit(kit.Model(), loader, DataLoader(kit.Samples(8, random=False), 4))
        return trainer

    train(2, own=own_first)
    assert train(2, own=not own_first).global_step == 2  # nothing is left to train
    with pytest.raises(StateMismatchError, match=r"inside an epoch whose loaders had .* until the epoch has ended"):
        train(8, own=not own_first)
    assert steps(tmp_path / "s") == [1]
    train(6, own=own_first)  # ends the epoch
    assert train(8, own=not own_first).global_step == 8
    assert steps(tmp_path / "s") == [7]


class FirstOf(kit.Model):  # type: ignore[name-defined]
    """Trains on the first of its loaders."""

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        return super().training_step(batch["first"] if isinstance(batch, dict) else batch, *arguments)


@pytest.mark.parametrize(("count", "then"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", [DataLoader, ResumableLoader])
def test_another_number_of_loaders_inside_an_epoch(tmp_path: Path, kind: Any, count: int, then: int) -> None:
    def train(steps: int, count: int) -> Any:
        torch.manual_seed(0)
        first, second = (kind(kit.Samples(24, random=False), batch_size=4, shuffle=True) for _ in range(2))
        loaders = {"first": first, "second": second} if count == 2 else first
        trainer = kit.make_trainer(tmp_path, adapter.PCcheckCallback(tmp_path / "s"), max_epochs=9, max_steps=steps)
        trainer.fit(FirstOf(), loaders, DataLoader(kit.Samples(8, random=False), 4))
        return trainer

    train(2, count)
    with pytest.raises(StateMismatchError, match=rf"an epoch of {count} training loader.* this program has {then}: "):
        train(8, then)
    assert steps(tmp_path / "s") == [1]
    train(6, count)  # ends the epoch
    assert train(8, then).global_step == 8


def test_a_validation_leaves_its_metrics_in_the_metadata_and_the_best_is_kept(tmp_path: Path) -> None:
    keep = Keep(best=("validation", 1, "min"))
    fit(callback := adapter.PCcheckCallback(tmp_path, interval=1, keep_last=20, keep=keep), max_epochs=3)
    assert callback.restored is None
    found = {info.step: info.metadata for info in list_checkpoints(tmp_path)}
    assert sorted(step for step, metadata in found.items() if "validation" in metadata) == [4, 9, 14]
    assert {"epoch", "validation"} == found[14].keys()
    shutil.rmtree(tmp_path)
    fit(adapter.PCcheckCallback(tmp_path, interval=100, keep=keep), max_epochs=3)  # such a step is saved
    best = min(float(str(metadata["validation"])) for metadata in found.values() if "validation" in metadata)
    assert best in [info.metadata.get("validation") for info in list_checkpoints(tmp_path)]


def test_of_more_metrics_than_fit_the_best_is_first(tmp_path: Path) -> None:
    class Measures(pl.Callback):  # type: ignore[name-defined]
        def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
            for number in range(40):
                self.log(f"a_metric_with_a_long_name_{number:02}", float(number))
            self.log("the_best", 1.5)

    saver = adapter.PCcheckCallback(tmp_path / "s", keep=Keep(best=("the_best", 1, "min")))
    fit(saver, Measures())
    metadata = list_checkpoints(tmp_path / "s")[0].metadata
    assert metadata["the_best"] == 1.5
    assert 5 < len(metadata) < 40


def test_a_fit_that_trains_nothing_shows_the_metrics_of_its_checkpoint(tmp_path: Path) -> None:
    class Sees(pl.Callback):  # type: ignore[name-defined]
        def on_fit_end(self, trainer: Any, *_: Any) -> None:
            seen.append({name: float(each) for name, each in trainer.callback_metrics.items()})

    seen: list[dict[str, float]] = []
    for _ in range(2):
        fit(adapter.PCcheckCallback(tmp_path / "s"), Sees())
    assert seen[0].keys() == {"loss", "mean", "validation"}
    assert seen[0] == seen[1]


def test_a_fit_that_goes_on_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    said: list[str] = []
    for epochs in (1, 2, 2, 1):
        fit(adapter.PCcheckCallback(tmp_path / "s"), max_epochs=epochs)
        said += [record.message for record in caplog.records if "PCcheckCallback" in record.message] or ["-"]
        caplog.clear()
    assert said == [
        "-",
        f"PCcheckCallback: training goes on after step 4, from {tmp_path / 's'}",
        *[f"PCcheckCallback: nothing is left to train after step 9, from {tmp_path / 's'}"] * 2,
    ]


class Gathers(pl.Callback):  # type: ignore[name-defined]
    """Notes what an epoch has gathered, and the learning rate, at the end of each."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.seen[f"lr {trainer.current_epoch}"] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        self.on_train_epoch_start(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.seen |= {f"{name} {trainer.current_epoch}": v.item() for name, v in trainer.callback_metrics.items()}


def gathering(
    folder: Path, monitor: str, make_metric: Callable[[], Any], moments: tuple[int, ...]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Stop and go on at moments; return what was warned of means, and what a whole run and the last one have seen."""

    class Logging(kit.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.metric, self.several = make_metric(), make_collection()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            for kind in ("mean", "max", "min", "sum"):
                self.log(f"the_{kind}", loss, on_step=kind == "sum", on_epoch=True, reduce_fx=kind)
            self.log("wide", loss.double(), on_step=False, on_epoch=True)
            if index % 2 == 0:
                self.log("seldom", loss, on_step=False, on_epoch=True)
            self.metric(loss.detach())
            self.log("metric", self.metric, on_step=False, on_epoch=True)
            self.several(loss.detach().repeat(2), loss.detach().repeat(2) ** 2)
            self.log_dict(self.several, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            self.log("after", float(self.counted), on_step=False, on_epoch=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": monitor}}

    def make_collection() -> Any:
        torchmetrics = pytest.importorskip("torchmetrics")
        mse = torchmetrics.MeanSquaredError
        return torchmetrics.MetricCollection(
            {"mse": mse(), "rmse": mse(squared=False), "mae": torchmetrics.MeanAbsoluteError()}
        )

    told, seen = [], []
    for name, limits in (("whole", (-1,)), ("parts", (*moments, -1))):
        noted = Gathers()
        for limit in limits:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                saver = adapter.PCcheckCallback(folder / name)
                torch.manual_seed(0)
                fit(saver, noted, model=Logging(), max_epochs=4, max_steps=limit)
            told += [found[0] for each in caught if (found := re.findall(".* of this epoch .* on:", str(each.message)))]
        seen.append(noted.seen)
    return told, seen


def test_means_over_an_epoch_are_those_of_a_run_that_was_not_interrupted(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    told, (whole, parts) = gathering(tmp_path, "the_mean", torchmetrics.MeanMetric, (1, 2, 9, 10, 18))
    assert told == []
    assert {f"{name} 3" for name in ("the_mean", "wide", "seldom", "metric", "rmse", "after")} <= {*whole}
    assert len({value for name, value in whole.items() if name.startswith("lr")}) > 1
    assert parts == whole


def test_a_checkpoint_of_an_older_version_has_no_means_and_that_is_told_of(tmp_path: Path) -> None:
    fit(adapter.PCcheckCallback(tmp_path), model=kit.Model(), max_steps=3)
    held = load_sync(tmp_path)
    held.pop("results")
    with SyncCheckpointEngine(tmp_path, overwrite=True) as engine:
        engine.checkpoint(held, step=2).result()
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "files", monitor="mean")
    with pytest.warns(UserWarning, match="mean of this epoch counts from batch 3 on: what self.log"):
        fit(adapter.PCcheckCallback(tmp_path), saver, enable_checkpointing=True, model=kit.Model(), max_epochs=2)


@pytest.mark.parametrize("monitor", ["metric", "validation"])
def test_what_an_epoch_gathered_in_lists_is_not_saved_and_told_of(tmp_path: Path, monitor: str) -> None:
    cat = pytest.importorskip("torchmetrics").CatMetric

    class Median(cat):  # type: ignore[misc, valid-type]
        def compute(self) -> Any:
            return torch.cat([each.flatten() for each in self.value]).median()

    told, _ = gathering(tmp_path, monitor, Median, (3,))
    assert told == ["metric of this epoch counts from batch 3 on:"] * (monitor == "metric")


def test_validate_test_and_predict_take_the_weights_in_memory_and_leave_the_store_alone(tmp_path: Path) -> None:
    class Tested(kit.Model):  # type: ignore[name-defined]
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.net(batch).square().mean())

        test_step = validation_step

        def predict_step(self, batch: Any, _: int) -> Any:
            return self.net(batch)

    def measured(model: Any) -> list[Any]:
        trainer = kit.make_trainer(tmp_path, adapter.PCcheckCallback(tmp_path / "s"))
        loader = DataLoader(kit.Samples(8, random=False), 4)
        found = [trainer.validate(model, loader, verbose=False), trainer.test(model, loader, verbose=False)]
        with pytest.raises(ValueError, match=r"ckpt_path is .*, a store of this package: leave ckpt_path out"):
            trainer.validate(model, loader, ckpt_path=str(tmp_path / "s"), verbose=False)
        return [*found, bits(trainer.predict(model, loader))]

    trained, fresh = Tested(), Tested()
    fit(adapter.PCcheckCallback(tmp_path / "s"), model=trained)
    before = {each: each.read_bytes() for each in (tmp_path / "s").rglob("*") if each.is_file()}
    assert measured(fresh) != measured(trained)
    fresh.load_state_dict(load_sync(tmp_path / "s", keys=["model"])["model"])
    assert measured(fresh) == measured(trained)
    assert before == {each: each.read_bytes() for each in (tmp_path / "s").rglob("*") if each.is_file()}


def test_fit_twice_with_a_validation_between(tmp_path: Path) -> None:
    whole = fit(adapter.PCcheckCallback(tmp_path / "whole"), max_epochs=2)
    trainer = fit(saver := adapter.PCcheckCallback(tmp_path / "twice"))
    assert saver.engine is None
    trainer.fit_loop.max_epochs = 2
    model, loader = trainer.lightning_module, DataLoader(kit.Samples(8, random=False), 4)
    generators = torch.get_rng_state()
    trainer.validate(model, loader, verbose=False)
    torch.set_rng_state(generators)
    again = ResumableLoader(kit.Samples(20, random=True), batch_size=4)
    trainer.fit(model, again, DataLoader(kit.Samples(8, random=False), 4))
    assert trainer.global_step == whole.global_step == 10
    assert steps(tmp_path / "twice") == [9]


def test_fit_again_after_a_stop_inside_a_window(tmp_path: Path) -> None:
    """Its last, partial window was saved as the step that the second ``fit`` makes whole."""

    class Stop(pl.Callback):  # type: ignore[name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= trainer.current_epoch == 0 and trainer.fit_loop.total_batch_idx == 2

    trainer = fit(adapter.PCcheckCallback(tmp_path / "s", interval=1), Stop(), accumulate_grad_batches=2)
    trainer.fit_loop.max_epochs, trainer.should_stop = 2, False
    loader = ResumableLoader(kit.Samples(20, random=True), batch_size=4)
    trainer.fit(trainer.lightning_module, loader, DataLoader(kit.Samples(8, random=False), 4))
    assert steps(tmp_path / "s")[0] == trainer.global_step - 1


def resumed_at(
    folder: Path,
    loader: Callable[[int], Any],
    moments: tuple[int, ...],
    model: Any = None,
    callbacks: Callable[[Any], list[Any]] = lambda saver: [saver],
    **options: Any,
) -> list[str]:
    """Compare runs that fail in a step, and are started again, with one that does not; return what was trained."""

    def start(name: str, die_at: int = -1, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        saver = adapter.PCcheckCallback(folder / name, interval=1, max_in_flight=1)
        trainer = kit.make_trainer(folder, *callbacks(saver), **{"max_epochs": 4} | options)
        fitted = (model or kit.Reloading)(loader, die_at)
        if die_at < 0:
            trainer.fit(fitted)
        else:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(fitted)
        return fitted

    whole = start("whole")
    for die_at in moments:
        start(f"at {die_at}", die_at)
        rest = start(f"at {die_at}", seed=1)
        assert f"train {die_at - 1}" not in rest.seen
        assert f"train {die_at}" in rest.seen
        assert rest.seen == {key: whole.seen[key] for key in rest.seen}
        assert bits(rest.state_dict()) == bits(whole.state_dict())
    gc.collect()  # worker processes of loaders that a failed fit refers to
    return [key for key in whole.seen if key.startswith("train")]


def shuffled(epoch: int) -> Any:
    return DataLoader(kit.Samples(14, random=True), 4, shuffle=True)


def growing(epoch: int) -> Any:
    return DataLoader(kit.Samples(14 + 4 * epoch, random=False), 4, shuffle=True)


def seeded(epoch: int) -> Any:
    """A loader that has a generator of its own, as PyTorch's notes on reproducibility advise."""
    return DataLoader(kit.Samples(14, random=False), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def sampled(epoch: int) -> Any:
    samples, generator = kit.Samples(14, random=True), torch.Generator().manual_seed(3)
    return DataLoader(samples, 4, sampler=torch.utils.data.RandomSampler(samples, True, generator=generator))


def drawn(epoch: int) -> Any:
    return DataLoader(torch.utils.data.Subset(kit.Samples(30, random=False), torch.randperm(30)[:14].tolist()), 4)


def resumable(epoch: int) -> Any:
    return ResumableLoader(kit.Samples(14 + 4 * epoch, random=True), batch_size=4, seed=epoch)


@pytest.mark.parametrize(
    "every", [pytest.param(0, marks=pytest.mark.campaign), 1, pytest.param(2, marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize(
    "kind",
    [
        shuffled,
        growing,
        resumable,
        *(pytest.param(kind, marks=pytest.mark.campaign) for kind in (drawn, seeded, sampled)),
    ],
)
def test_loaders_that_are_made_again_are_those_of_a_run_that_never_stopped(
    tmp_path: Path, kind: Callable[[int], Any], every: int
) -> None:
    """Loaders depend on the epoch that they were made in, and on the generators at that moment."""

    whole = resumed_at(tmp_path, kind, (2, 4, 5, 8, 9, 14), reload_dataloaders_every_n_epochs=every)
    assert len(whole) == ([16, 16 + 1 + 2 + 3, 16 + 2 + 2][every] if kind in (growing, resumable) else 16)


@pytest.mark.parametrize(
    "mode",
    [
        "max_size_cycle",
        pytest.param("max_size", marks=pytest.mark.campaign),
        pytest.param("min_size", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        "resumable",
        "shuffled",
        "seeded",
        pytest.param("workers", marks=pytest.mark.campaign),
        pytest.param("unsized", marks=pytest.mark.campaign),
    ],
)
def test_several_loaders_go_on_where_each_of_them_was(tmp_path: Path, kind: str, mode: str) -> None:
    def loader(size: int, batch: int) -> Any:
        samples = kit.Samples(size, random=kind != "shuffled")
        if kind == "resumable":
            return ResumableLoader(samples, batch_size=batch, seed=size)
        if kind == "unsized":
            return DataLoader(kit.Unsized(size), batch)
        workers = int(kind == "workers")
        return DataLoader(
            samples,
            batch,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator().manual_seed(size) if kind == "seeded" else None,
        )

    def loaders(_: int) -> Any:
        return pl.utilities.CombinedLoader({"a": loader(6, 3), "b": [loader(9, 3), loader(10, 2)]}, mode)

    steps, epochs = (2 if mode == "min_size" else 5), 4
    moments: tuple[int, ...] = (1, 3, 4, 5, 6 if mode == "min_size" else 9)
    if kind == "workers":  # processes, which take long to start: inside the first epoch, and inside the second
        moments, epochs = ((steps + 1) // 2, steps + 1), 2
    assert len(resumed_at(tmp_path, loaders, moments, max_epochs=epochs)) == epochs * steps


def test_several_loaders_of_which_some_have_a_position_are_refused_before_the_first_step(tmp_path: Path) -> None:
    samples = kit.Samples(20, random=False)
    model = kit.Counting()
    trainer = kit.make_trainer(tmp_path, adapter.PCcheckCallback(tmp_path / "s"))
    with pytest.raises(ValueError, match="its loaders are ResumableLoader, DataLoader; of several loaders all are"):
        trainer.fit(model, {"a": ResumableLoader(samples, batch_size=4), "b": DataLoader(samples, 4)})
    assert model.trained == []
    assert list_checkpoints(tmp_path / "s") == []


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist within another group")
def test_a_backbone_that_was_unfrozen_is_trained_on(tmp_path: Path, first: bool, whole: bool) -> None:
    """The callback adds parameters to the optimizer in the second epoch, and changes their learning rate after it."""

    def callbacks(saver: Any) -> list[Any]:
        tuning = pl.callbacks.BackboneFinetuning(1, lambda_func=lambda epoch: 1.3)
        return [tuning, saver] if first else [saver, tuning]

    resumed_at(tmp_path, resumable, (2, 4, 5, 8, 9, 13), model=partial(kit.Finetuned, whole=whole), callbacks=callbacks)


@pytest.mark.filterwarnings("ignore:You are using the .dataloader_iter. step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_a_training_step_that_takes_the_iterator_goes_on_where_it_was(tmp_path: Path) -> None:
    resumed_at(tmp_path, shuffled, (2, 4, 5, 7), model=kit.Iterating)


def test_another_model_is_named(tmp_path: Path) -> None:
    fit(adapter.PCcheckCallback(tmp_path / "s"))
    model = kit.Model(width=9)
    before = bits(model.state_dict())
    with pytest.raises(
        StateMismatchError, match=r"nothing was restored. .*weight \(float32 \(9, 4\) here, float32 \(8, 4\)"
    ) as caught:
        fit(adapter.PCcheckCallback(tmp_path / "s"), model=model)
    assert "strict" not in str(caught.value)
    assert "; go on with what was saved, or give PCcheckCallback another folder" in str(caught.value)
    assert load_sync(tmp_path / "s", keys=["model"])["model"].keys() == model.state_dict().keys()
    assert bits(model.state_dict()) == before
    assert steps(tmp_path / "s") == [4]


def test_wrong_and_idle_uses(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no argument 'intervall'; did you mean interval"):
        adapter.PCcheckCallback(tmp_path / "s", intervall=2)
    with pytest.raises(ValueError, match="a Trainer takes one PCcheckCallback"):
        fit(adapter.PCcheckCallback(tmp_path / "s"), adapter.PCcheckCallback(tmp_path / "t"))
    fit(adapter.PCcheckCallback(tmp_path / "s"), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []
    fit(adapter.PCcheckCallback(tmp_path / "s")).save_checkpoint(tmp_path / "file.ckpt")
    with pytest.raises(ValueError, match="holds step 4: leave ckpt_path out to resume"):
        fit(adapter.PCcheckCallback(tmp_path / "s"), ckpt_path=tmp_path / "file.ckpt", max_epochs=2)
    trainer = fit(
        adapter.PCcheckCallback(tmp_path / "new", save_last=False, interval=8),
        ckpt_path=tmp_path / "file.ckpt",
        max_epochs=2,
    )
    assert trainer.global_step == 10
    assert steps(tmp_path / "new") == [7]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_errors_close_the_store(tmp_path: Path, error: BaseException) -> None:
    class Fails(pl.Callback):  # type: ignore[name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise error

    saver = adapter.PCcheckCallback(tmp_path / "s", interval=1)
    with pytest.raises((SystemExit, ZeroDivisionError)):
        fit(saver, Fails())
    assert saver.engine is None
    assert steps(tmp_path / "s") == [1]
    assert fit(adapter.PCcheckCallback(tmp_path / "s", interval=1)).global_step == 5


def test_fit_again_after_an_error_does_not_go_on_with_half_of_a_batch(tmp_path: Path) -> None:
    class FailsOnce(pl.Callback):  # type: ignore[name-defined]
        trainer: Any = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3 and self.trainer is None:
                self.trainer = trainer
                raise ZeroDivisionError

    saver, fails = adapter.PCcheckCallback(tmp_path / "s", interval=1), FailsOnce()
    with pytest.raises(ZeroDivisionError):
        fit(saver, fails)
    assert saver.restored is None
    loader = ResumableLoader(kit.Samples(20, random=True), batch_size=4)
    fails.trainer.fit(fails.trainer.lightning_module, loader, DataLoader(kit.Samples(8, random=False), 4))
    assert saver.restored is not None
    assert (saver.restored.step, fails.trainer.global_step) == (1, 5)


EARLY: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], int, str]] = {
    "epoch": (lambda: [pl.callbacks.EarlyStopping("metric", patience=2)], {}, 15, "EarlyStopping: .* did not improve"),
    "validation": (
        lambda: [pl.callbacks.EarlyStopping("metric", patience=2)],
        {"val_check_interval": 2},
        7,  # the third validation; the second one is that of the fourth step
        "EarlyStopping: .* did not improve",
    ),
    "callback": (lambda: [kit.StopAt(3)], {}, 3, "trainer.should_stop was set"),
    "time": (list, {"max_time": {"microseconds": 1}}, 1, "max_time"),
}


@pytest.mark.parametrize("kind", EARLY)
def test_a_training_that_was_told_to_stop_trains_no_more(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks, options, end, why = EARLY[kind]

    def start(resume_stopped: bool = False, **more: Any) -> Any:
        caplog.clear()
        saver = adapter.PCcheckCallback(tmp_path / "s", resume_stopped=resume_stopped)
        return fit(saver, *callbacks(), model=kit.Worsening(), **{"max_epochs": 9} | options | more)

    first = start()
    assert first.global_step == end
    assert not caplog.records
    for _ in range(2):
        again = start()
        assert (again.global_step, again.lightning_module.trained) == (end, [])
        assert bits(again.lightning_module.state_dict()) == bits(first.lightning_module.state_dict())
        assert re.search(rf"told to stop after step {end - 1} \({why}", caplog.text)
    assert start(max_epochs=1).global_step == end  # less is no more
    longer = {"max_time": {"days": 1}} if kind == "time" else {"max_epochs": 10}
    assert start(**longer).global_step > end
    assert not caplog.records
    assert start(resume_stopped=True, **longer).global_step > end


def test_a_stop_that_waits_for_min_epochs_is_still_waited_for_after_a_restart(tmp_path: Path) -> None:
    class Fails(pl.Callback):  # type: ignore[name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                raise ZeroDivisionError

    def start(*callbacks: Any) -> Any:
        return fit(
            adapter.PCcheckCallback(tmp_path / "s", interval=3), *callbacks, model=kit.Worsening(),
            min_epochs=2, max_epochs=9,
        )  # fmt: skip

    with pytest.raises(ZeroDivisionError):
        start(kit.StopAt(2), Fails())
    assert steps(tmp_path / "s") == [5]  # none more because the training might end
    assert start(kit.StopAt(2)).global_step == 10
    assert start(kit.StopAt(2)).global_step == 10


def test_time_that_is_up(tmp_path: Path) -> None:
    assert fit(adapter.PCcheckCallback(tmp_path / "s"), max_time={"seconds": 0}).global_step < 5


# Lightning's own checkpoints


@pytest.mark.parametrize("link", [True, "link"])
def test_model_checkpoint(tmp_path: Path, link: Any) -> None:
    def run(io: list[Any], folder: Path, epochs: int, path: Any = None) -> Any:
        saver = pl.callbacks.ModelCheckpoint(
            folder, monitor="validation", save_top_k=2, save_last=link, every_n_train_steps=2
        )
        return fit(saver, enable_checkpointing=True, plugins=io, max_epochs=epochs, ckpt_path=path)

    theirs = run([], tmp_path / "theirs", 3)
    ours = run([adapter.PCcheckIO()], tmp_path / "ours", 3)
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    for name in names:
        held = adapter.PCcheckIO().load_checkpoint(tmp_path / "ours" / name)
        expected = torch.load(tmp_path / "theirs" / name, weights_only=False)
        assert [*held] == [*expected]
        assert bits(held["state_dict"]) == bits(expected["state_dict"])
        assert bits(held["optimizer_states"]) == bits(expected["optimizer_states"])
    best = ours.checkpoint_callback.best_model_path
    found = ours.validate(kit.Model(), DataLoader(kit.Samples(8, random=False), 4), ckpt_path=best, verbose=False)
    assert found[0]["validation"] > 0
    ends = [
        run([adapter.PCcheckIO()], tmp_path / folder, 4, "last") for folder in ("theirs", "ours")
    ]  # a file, and a folder
    assert [trainer.global_step for trainer in ends] == [20, 20]
    assert bits(ends[0].lightning_module.state_dict()) == bits(ends[1].lightning_module.state_dict())
    assert theirs.global_step == ours.global_step


def in_the_way(path: Any, operations: Operations) -> Files:
    """Somebody makes a folder with the name that the checkpoint is to get."""
    if os.path.basename(path) == ".c.ckpt.saving":
        os.makedirs(os.path.join(os.path.dirname(path), "c.ckpt", "mine"))
    return Files(path, operations)


def test_a_save_that_fails_is_told_and_removes_nothing(tmp_path: Path) -> None:
    io = adapter.PCcheckIO(storage=StorageOptions(io=in_the_way))
    io.save_checkpoint({"weight": torch.ones(3)}, tmp_path / "a.ckpt")
    io.save_checkpoint({"weight": torch.ones(3) * 2}, tmp_path / "a.ckpt")  # in place
    with pytest.raises(UnsupportedStateError, match="model"):
        io.save_checkpoint({"model": object()}, tmp_path / "b.ckpt")
    io.save_checkpoint({"weight": torch.ones(3)}, tmp_path / "c.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(OSError, match=r"c\.ckpt"):
        io.teardown()
    assert torch.equal(io.load_checkpoint(tmp_path / "a.ckpt")["weight"], torch.ones(3) * 2)
    with pytest.raises(TypeError, match="no storage options"):
        io.save_checkpoint({}, tmp_path / "d.ckpt", storage_options={})
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.teardown()
    assert not (tmp_path / "a.ckpt").exists()


class Killed(WrappingWriter):
    """Kills the process instead of an operation of this number."""

    def __init__(self, number: int, path: str, operations: Operations) -> None:
        super().__init__(Files(path, operations))
        self._left = number

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return await call()


def save_once(io: Any, path: Path, value: float) -> None:
    plugin = adapter.PCcheckIO(storage=StorageOptions(io=io))
    plugin.save_checkpoint({"weight": torch.full((3000,), value), "global_step": int(value)}, path)
    plugin.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "before", ["a checkpoint", *(pytest.param(each, marks=pytest.mark.campaign) for each in ("nothing", "a file"))]
)
def test_a_save_killed_at_any_operation_leaves_what_was_there(tmp_path: Path, before: str, apart: int) -> None:
    path, ended, operation = tmp_path / "a.ckpt", False, 0
    while not ended:
        operation += apart
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        if before == "a file":
            torch.save({"weight": torch.full((3000,), 1.0)}, path)
        elif before == "a checkpoint":
            save_once("auto", path, 1)
        if (pid := os.fork()) == 0:
            save_once(partial(Killed, operation), path, 2)
            os._exit(0)
        ended = os.waitpid(pid, 0)[1] == 0
        if before == "nothing" and not path.exists():
            assert not ended
        else:
            value = adapter.PCcheckIO().load_checkpoint(path)["weight"].unique().item()
            assert value == 2 if ended or before == "nothing" else value in {1, 2}
        save_once("auto", path, 3)
        assert adapter.PCcheckIO().load_checkpoint(path)["weight"].unique().item() == 3
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    assert operation > 10


def test_two_that_save_to_one_path(tmp_path: Path) -> None:
    """The second one waits for the first, or is refused; the first one's checkpoint is whole."""
    one, other = adapter.PCcheckIO(), adapter.PCcheckIO(storage=StorageOptions(lock_timeout=0.1))
    with SyncCheckpointEngine(tmp_path / ".a.ckpt.saving"), pytest.raises(StoreLockedError):
        other.save_checkpoint({"weight": torch.ones(3)}, tmp_path / "a.ckpt")
    one.save_checkpoint({"weight": torch.ones(3)}, tmp_path / "a.ckpt")
    one.teardown()
    assert one.load_checkpoint(tmp_path / "a.ckpt")["weight"].sum() == 3


def test_what_only_pickle_holds_and_where_tensors_go(tmp_path: Path) -> None:
    saved = {"state_dict": {"weight": torch.ones(3)}, "hyper_parameters": {"activation": torch.nn.functional.relu}}
    io = adapter.PCcheckIO(allow_pickle=True)
    io.save_checkpoint(saved, tmp_path / "a.ckpt")
    found = io.load_checkpoint(tmp_path / "a.ckpt", map_location={"cpu": "meta"})
    assert found["hyper_parameters"]["activation"] is torch.nn.functional.relu
    assert found["state_dict"]["weight"].device.type == "meta"
    with pytest.raises(UnsupportedStateError, match="allow_pickle"):
        adapter.PCcheckIO().load_checkpoint(tmp_path / "a.ckpt")
    assert len([*(tmp_path / "a.ckpt").glob("slot-*")]) == 1


def test_links_and_removal(tmp_path: Path) -> None:
    io = adapter.PCcheckIO()
    io.save_checkpoint({"weight": torch.ones(3)}, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["weight"].sum() == 3
    io.save_checkpoint({"weight": torch.zeros(3)}, tmp_path / "last.ckpt")  # replaces the link, not what it names
    assert io.load_checkpoint(tmp_path / "a.ckpt")["weight"].sum() == 3
    assert io.load_checkpoint(tmp_path / "last.ckpt")["weight"].sum() == 0
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    io.remove_checkpoint(tmp_path / "link.ckpt")
    io.teardown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "last.ckpt"]
