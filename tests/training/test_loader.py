"""The loader with and without workers, saved and restored by an engine, and training that depends on it."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from pccheck_async import ResumableLoader, ResumableSampler, RNGState, StateMismatchError, SyncCheckpointEngine
from tests.support.datasets import SHUFFLES, Augmented, AugmentedInBatches, Digits, Numbers, Stream, values


def generators() -> list[Any]:
    saved = RNGState().state_dict()
    return [saved["python"]["words"].tolist(), saved["numpy"]["state"]["key"].tolist(), saved["torch"].tolist()]


def test_nothing_is_replayed() -> None:
    dataset = Numbers(1000)
    loader = ResumableLoader(dataset, batch_size=10)
    expected = values(loader)
    fresh = Numbers(1000)
    resumed = ResumableLoader(fresh, batch_size=10)
    resumed.load_state_dict(loader.state_dict() | {"epoch": 0, "position": 970})
    assert fresh.asked == 0
    assert values(resumed) == expected[97:]
    assert fresh.asked == 30


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
def test_the_position_is_what_was_delivered_not_what_was_fetched(persistent: bool) -> None:
    def make() -> ResumableLoader:
        return ResumableLoader(
            Numbers(40), batch_size=3, num_workers=2, prefetch_factor=4, persistent_workers=persistent
        )

    whole = make()
    expected = values(islice(whole.forever(), 40))
    loader = make()
    got: list[Any] = []
    for count in (2, 5, 1, 14, 3, 15):  # in one process, with a break each time
        got += values(islice(loader.forever(), count))
    assert got == expected
    loader = make()
    assert values(islice(loader, 4)) == expected[:4]
    assert loader.state_dict()["position"] == 12


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loading_leaves_the_global_generators_alone(workers: int) -> None:
    loader = ResumableLoader(Augmented(), batch_size=4, num_workers=workers)
    before = generators()
    values(islice(loader, 1))
    values(loader)
    assert generators() == before


def test_a_failing_sample_leaves_the_generators_and_the_position_alone() -> None:
    class Failing(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 5 and not self.asked:
                self.asked = 1
                raise OSError("the disk is away")
            return index

    loader = ResumableLoader(Failing(9), batch_size=3, shuffle=False)
    before = generators()
    with pytest.raises(OSError, match="the disk is away"):
        values(loader)
    assert generators() == before
    loader.load_state_dict(loader.state_dict())
    assert values(loader) == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "persistent"),
    [
        (Augmented(), False),
        (AugmentedInBatches(), True),
        pytest.param(Augmented(), True, marks=pytest.mark.campaign),
        pytest.param(AugmentedInBatches(), False, marks=pytest.mark.campaign),
    ],
    ids=["samples", "batches, persistent", "samples, persistent", "batches"],
)
def test_augmentations_are_the_same_after_a_resume(dataset: Dataset[Any], persistent: bool) -> None:
    def make(workers: int) -> ResumableLoader:
        return ResumableLoader(
            dataset, batch_size=4, seed=9, num_workers=workers, persistent_workers=persistent and workers > 0
        )

    expected = values(islice(make(0).forever(), 18))
    for before, after in ((0, 0), (2, 2), (2, 1)):
        for stop in (4, 9) if before == after else (4,):
            first = make(before)
            got = values(islice(first.forever(), stop))
            random.seed(), np.random.seed(stop), torch.manual_seed(stop)
            second = make(after)
            second.load_state_dict(first.state_dict())
            assert got + values(islice(second.forever(), 18 - stop)) == expected


def mixed_up(samples: list[torch.Tensor]) -> torch.Tensor:
    """What a batch is made of draws from every generator, too."""
    batch: torch.Tensor = default_collate(samples)
    share = random.random() * np.random.rand() * torch.rand(())
    return share * batch + (1 - share) * batch[torch.randperm(len(batch))]


@pytest.mark.slow
def test_batches_that_are_mixed_at_random_are_the_same_wherever_they_are_loaded() -> None:
    def make(workers: int) -> ResumableLoader:
        return ResumableLoader(Augmented(), batch_size=4, seed=9, num_workers=workers, collate_fn=mixed_up)

    expected = values(islice(make(0).forever(), 9))
    for workers in (0, 2):
        random.seed(), np.random.seed(workers), torch.manual_seed(workers)
        before = generators()
        resumed = make(workers)
        resumed.load_state_dict(make(0).state_dict() | {"epoch": 0, "position": 8})
        assert values(islice(resumed.forever(), 7)) == expected[2:]
        assert generators() == before


def test_augmentations_differ_by_sample_epoch_seed_and_generator() -> None:
    def draws(seed: int) -> list[float]:
        return [draw for batch in islice(ResumableLoader(Augmented(), batch_size=4, seed=seed).forever(), 12)
                for sample in batch.tolist() for draw in sample[1:]]  # fmt: skip

    found = draws(0) + draws(1)
    assert len(set(found)) == len(found) == 2 * 2 * 23 * 5


class Words(Numbers):
    """What numpy's and torch's generators make of one word of theirs."""

    def __getitem__(self, index: int) -> Any:
        word = int(np.random.randint(0, 2**32, dtype=np.uint32)) % 2**31
        return torch.tensor([word, int(torch.empty(1, dtype=torch.int32).random_())])


def test_generators_of_one_kind_draw_different_words() -> None:
    np.random.seed(5), torch.manual_seed(5)
    same = Words(1)[0]
    assert same[0] == same[1]
    assert all(word != other for batch in values(ResumableLoader(Words(20), batch_size=4)) for word, other in batch)


def test_without_seeding_samples_draw_from_the_global_generators() -> None:
    """Then RNGState makes the augmentations of a loader without workers resume."""
    loader = ResumableLoader(Augmented(), batch_size=4, seed_samples=False)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    batches = iter(loader)
    values(islice(batches, 2))
    state, drawn = loader.state_dict(), RNGState().state_dict()
    expected = values(batches)
    resumed = ResumableLoader(Augmented(), batch_size=4, seed_samples=False)
    resumed.load_state_dict(state)
    assert values(islice(resumed, 4)) != expected
    resumed.load_state_dict(state)
    RNGState().load_state_dict(drawn)
    assert values(resumed) == expected


@pytest.mark.slow
def test_without_seeding_workers_are_seeded_by_the_epoch() -> None:
    def epochs() -> list[Any]:
        loader = ResumableLoader(Augmented(), batch_size=4, shuffle=False, num_workers=2, seed_samples=False)
        return [values(loader), values(loader)]

    first = epochs()
    torch.manual_seed(1)
    assert epochs() == first
    one, two = ([sample for batch in epoch for sample in batch] for epoch in first)
    assert all(a[0] == b[0] and a[1:] != b[1:] for a, b in zip(one, two, strict=True))


def _remember(worker: int) -> None:
    info = get_worker_info()
    assert isinstance(info.dataset, Numbers)  # type: ignore[union-attr]
    info.dataset.size = -worker  # type: ignore[union-attr]


class _Remembering(Numbers):
    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return self.size


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.campaign)])
def test_workers_know_the_dataset_of_the_user(start: str) -> None:
    loader = ResumableLoader(
        _Remembering(4), batch_size=2, num_workers=2, worker_init_fn=_remember, multiprocessing_context=start
    )
    assert values(loader) == [[0, 0], [-1, -1]]


def test_a_batch_has_one_sample_where_no_size_is_given_as_in_a_dataloader() -> None:
    assert values(ResumableLoader(Numbers(3), shuffle=False)) == values(iter(DataLoader(Numbers(3)))) == [[0], [1], [2]]


def test_forever_crosses_epochs() -> None:
    loader = ResumableLoader(Numbers(10), batch_size=4, seed=1)
    sampler = ResumableSampler(10, batch_size=4, seed=1)
    assert values(islice(loader.forever(), 7)) == [*sampler, *sampler, next(iter(sampler))]
    assert (loader.epoch, loader.state_dict()["position"], len(loader)) == (2, 4, 3)


def test_loading_a_position_ends_a_live_iterator_loudly() -> None:
    loader = ResumableLoader(Numbers(10), batch_size=4, shuffle=False)
    batches = loader.forever()
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="start a new for loop"):
        next(batches)
    loader.set_epoch(4)
    assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loader.epoch == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampler": [1]}, TypeError, "sampler: the loader decides"),
        ({"generator": None, "batch_sampler": None}, TypeError, "batch_sampler, generator: the loader decides"),
        ({"in_order": False}, ValueError, "in_order=False"),
        ({"dataset": Stream()}, TypeError, "StatefulDataLoader"),
        ({"dataset": DataLoader(Numbers(9))}, TypeError, r"not a DataLoader: ResumableLoader\(dataset, batch_size="),
        ({"dataset": Dataset[int]()}, TypeError, "has no length"),
        (
            {"dataset": iter([1, 2])},
            TypeError,
            r"a list_iterator has neither .* give a dataset, or list\(\.\.\.\) of it",
        ),
    ],
)
def test_arguments_that_the_loader_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    defaults: dict[str, Any] = {"dataset": Numbers(9), "batch_size": 2}
    with pytest.raises(error, match=message):
        ResumableLoader(**defaults | arguments)


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [3, pytest.param(50, marks=pytest.mark.campaign)])
def test_crashes_with_workers(crashes: int) -> None:
    draw = random.Random(crashes)
    for _ in range(crashes):
        size, batch_size, world = draw.randint(8, 60), draw.randint(1, 6), draw.randint(1, 3)
        arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": draw.randrange(100),
            "shuffle": draw.choice(SHUFFLES),
            "drop_last": size >= batch_size * world and draw.random() < 0.5,
            "rank": draw.randrange(world),
            "world_size": world,
        }
        sampler = ResumableSampler(size, **arguments)
        expected = [*sampler, *sampler, *sampler]
        stop = draw.randrange(len(expected))

        def make(size: int = size, arguments: dict[str, Any] = arguments) -> ResumableLoader:
            return ResumableLoader(Numbers(size), num_workers=draw.randint(1, 2), **arguments)

        first, second = make(), make()
        got = values(islice(first.forever(), stop))
        second.load_state_dict(first.state_dict())
        got += values(islice(second.forever(), len(expected) - stop))
        assert got == expected


# With an engine


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_in_mid_epoch_brings_the_loader_back(tmp_path: Path, workers: int) -> None:
    def make() -> dict[str, Any]:
        sampler = ResumableSampler(50, batch_size=6, shuffle="keyed", rank=1, world_size=2)
        return {"loader": ResumableLoader(Augmented(), batch_size=4, num_workers=workers), "sampler": sampler}

    def go_on(state: dict[str, Any], count: int) -> list[Any]:
        return [values(islice(state["loader"].forever(), count)), list(state["sampler"])[:1]]

    state = make()
    go_on(state, 8)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state, step=8).result(60)
    expected = go_on(state, 9)
    resumed = make()
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.restore(resumed) is not None
    assert resumed["loader"].epoch == 1
    assert go_on(resumed, 9) == expected


@pytest.mark.slow
def test_a_loop_over_the_epochs_of_the_loader_ends_alike_wherever_it_was_killed(tmp_path: Path) -> None:
    """The loop of the README. A run that has ended trains nothing more."""

    def run(folder: Path, kill_after: int = -1) -> tuple[list[Any], int]:
        loader = ResumableLoader(Numbers(10), batch_size=4, seed=3)
        got: dict[str, list[Any]] = {"batches": []}
        state = {"loader": loader, "got": got}
        with SyncCheckpointEngine(folder, interval=1) as engine:
            restored = engine.restore(state)
            first = step = restored.step + 1 if restored else 0
            for epoch in loader.epochs(3):
                for batch in epoch:
                    with engine.step(state, step):
                        got["batches"] += [batch.tolist()]
                    if step == kill_after:
                        raise KeyboardInterrupt
                    step += 1
        return got["batches"], step - first

    whole, steps = run(tmp_path / "whole")
    assert (len(whole), steps) == (9, 9)
    assert run(tmp_path / "whole") == (whole, 0)
    for killed in (2, 3, 8):  # at the end of an epoch, inside one, and at the end
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(killed), killed)
        assert run(tmp_path / str(killed)) == (whole, 8 - killed)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"batch_size": 4}, r"loader \(.*batch_size=2 on 1 ranks \(now 4 on 1; the product must stay 2\)"),
        ({"dataset": Numbers(11)}, r"loader \(.*size=10 \(now 11\)"),
        ({"seed": 1, "shuffle": False}, r"loader \(.*seed=0 \(now 1\), shuffle=True \(now False\)"),
    ],
)
def test_a_position_from_other_arguments_leaves_the_whole_state_as_it_was(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    def make(**other: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {"dataset": Numbers(10), "batch_size": 2}
        loader = ResumableLoader(**arguments | other)
        return {"model": nn.Linear(4, 4), "progress": {"best": 0.0}, "loader": loader, "rng": RNGState()}

    saved = make()
    next(iter(saved["loader"]))
    resumed = make(**other)
    weight, position = resumed["model"].weight.clone(), resumed["loader"].state_dict()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(saved | {"progress": {"best": 1.0}}, step=3).result(60)
        torch.rand(1)
        drawn = generators()
        for strict in (True, False):
            with pytest.raises(StateMismatchError, match=f"nothing was restored.*{message}") as caught:
                engine.restore(resumed, strict=strict)
            assert "to restore all but loader: take it out of the state" in str(caught.value)
            assert torch.equal(resumed["model"].weight, weight)
            assert (resumed["loader"].state_dict(), generators()) == (position, drawn)
            assert resumed["progress"] == {"best": 0.0}
        assert engine.restore({name: resumed[name] for name in ("model", "progress", "rng")}, strict=False)
    assert torch.equal(resumed["model"].weight, saved["model"].weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_torchdata_needs_no_glue(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return stateful.StatefulDataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)

    loader = make()
    batches = iter(loader)
    first = [next(batches)[:, 0].tolist() for _ in range(3)]
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"loader": loader}, step=3).result(60)
    rest = [batch[:, 0].tolist() for batch in batches]
    assert len(first + rest) == 6
    torch.manual_seed(99)
    resumed = make()
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.restore({"loader": resumed}) is not None
    assert [batch[:, 0].tolist() for batch in resumed] == rest


def train(
    dataset: Digits, folder: Path, *, total: int, lives: int, resume_data: bool = True, workers: int = 0
) -> tuple[list[float], float]:
    """Train, dying every ``lives`` steps; return the loss of every step and the accuracy on what was not trained on."""
    losses: list[float] = []
    while len(losses) < total:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        loader = ResumableLoader(dataset, batch_size=32, num_workers=workers)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": RNGState()}
        if resume_data:
            state["loader"] = loader
        with SyncCheckpointEngine(folder) as engine:
            engine.restore(state)
            for images, labels in islice(loader.forever(), min(lives, total - len(losses))):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
            engine.checkpoint(state, step=len(losses))
    model.eval()
    with torch.no_grad():
        hits = model(dataset.images[1440:]).argmax(1) == torch.tensor(dataset.labels[1440:])
    return losses, hits.float().mean().item()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # steps this small take longest where threads wait for each other
@pytest.mark.parametrize("workers", [0, 2])
def test_training_that_resumes_its_data_is_training_that_never_stopped(tmp_path: Path, workers: int) -> None:
    """CheckFreq, figure 6, on a small data set: a loader that starts over sees the start of an epoch ever again."""
    dataset = Digits()
    whole = train(dataset, tmp_path / "whole", total=60, lives=60)
    assert train(dataset, tmp_path / "resumed", total=60, lives=25, workers=workers) == whole
    restarted = train(dataset, tmp_path / "restarted", total=60, lives=25, resume_data=False, workers=workers)
    assert restarted[0][:25] == whole[0][:25]
    assert restarted[0][25:] != whole[0][25:]
