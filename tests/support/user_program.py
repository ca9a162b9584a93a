"""A user's program with every public name: it is type-checked strictly, and run (``tests/unit/test_typing.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import torch

import pccheck_async as p
from pccheck_async import errors, policies, statistics, stores

Errors = (
    errors.DurabilityUnknownError,
    errors.ReadError,
    errors.NewerFormatError,
    errors.WriteError,
    errors.StoreFullError,
)
Refused = (errors.ClosedError, errors.InvalidTuningError, errors.UnsupportedStateError, errors.InfeasibleError)
Lost = (errors.CorruptStoreError, errors.DamagedError, errors.IncompleteCheckpointError, errors.ReplicasDifferError)
Stores = (errors.StoreError, errors.StoreFailedError, errors.StoreLockedError, errors.GroupError)
Root = (errors.CheckpointError, errors.NoCheckpointError, errors.StateMismatchError, errors.TornCaptureError)


class EveryTenth:
    """A policy of one's own."""

    def due(self, report: policies.StepReport) -> bool:
        return report.step % 10 == 0

    def skipped(self, report: policies.StepReport) -> None: ...

    def saved(self, report: policies.SaveReport) -> None:
        print(f"step {report.step}: {report.nbytes / report.seconds:.0f} B/s")

    def decision(self) -> policies.Decision:
        return policies.Decision(10, None, "every tenth")


class Counter:
    """An object that is saved."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self.count = state_dict["count"]


def choose() -> list[policies.Policy]:
    own: p.Policy = EveryTenth()
    formulas: list[p.Policy] = [
        policies.Adaptive(),
        policies.YoungDaly(3600.0),
        policies.PCcheckInterval(),
        policies.CheckFreqInterval(),
    ]
    return [own, policies.EverySteps(10), policies.EverySeconds(60.0), p.Adaptive(0.03), *formulas]


def note(event: statistics.Event) -> None:
    print(type(event).__name__)


def read(path: Path) -> None:
    with p.open_checkpoint(path) as opened:
        assert_type(opened, stores.OpenCheckpoint)
        assert_type(opened.tensors(), dict[str, stores.StoredTensor])
        assert_type(opened.info, p.CheckpointInfo)
        assert_type(list(opened), list[str])
        part: stores.StoredState = opened["model"]
        print(opened, part, opened.tensor("model.weight").shape)
    assert_type(p.load_sync(path, keys=["model.*"]), dict[str, Any])
    assert_type(p.list_checkpoints(path), list[p.CheckpointInfo])


def look_after(path: Path, other: Path) -> None:
    assert_type(stores.pin(path, step=30), p.CheckpointInfo)
    assert_type(stores.unpin(path, name="last"), p.CheckpointInfo)
    assert_type(stores.copy(path, other, step=20), p.CheckpointInfo)
    comparison = assert_type(stores.compare(path, other, step=20), stores.Comparison)
    assert_type(comparison.differences, tuple[stores.LeafDifference, ...])
    verification = assert_type(stores.verify(path, every=True), stores.Verification)
    checked: tuple[stores.CheckedCheckpoint, ...] = verification.checkpoints
    damage: list[stores.Damage] = [each for one in checked for each in one.damage]
    assert verification.whole == (not damage)
    description = assert_type(stores.describe(path, name="last"), stores.Description)
    print([leaf.path for leaf in description.leaves])
    assert_type(stores.recover(path), stores.Recovery)
    exported = assert_type(stores.export(path, other / "out.pt", to="torch"), stores.Exported)
    assert_type(stores.import_(exported.path, other, step=40), stores.Imported)
    assert_type(stores.reject(path, step=30), list[p.CheckpointInfo])
    removal = assert_type(stores.remove(path, step=[20], name="last"), stores.Removal)
    assert_type(removal.removed, tuple[p.CheckpointInfo, ...])


def train(path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = p.ResumableLoader(list(range(40)), batch_size=1)
    counter: p.Stateful = Counter()
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": p.RNGState(), "counter": counter}
    with p.SyncCheckpointEngine(path, max_in_flight=2, keep_last=9, interval=EveryTenth()) as engine:
        assert_type(engine, p.SyncCheckpointEngine)
        remove_hook = engine.on_event(note)
        restored = assert_type(engine.restore(state), p.Restored | None)
        for epoch in loader.epochs(1):
            for step, _ in enumerate(epoch, 0 if restored is None else restored.step + 1):
                with engine.step(state, step) as this_step:
                    assert_type(this_step, p.TrainingStep)
                    this_step.metadata["loss"] = 0.5
        engine.drain()
        pending = assert_type(engine.checkpoint(state, step=50, name="last"), p.PendingCheckpoint)
        progress: statistics.CheckpointProgress = pending.progress
        print(assert_type(pending.result(), p.CheckpointInfo), progress)
        assert_type(engine.pin(step=10), p.CheckpointInfo)
        assert_type(engine.unpin(step=10), p.CheckpointInfo)
        assert_type(engine.remove(step=0), list[p.CheckpointInfo])
        found = assert_type(engine.statistics(), statistics.EngineStatistics)
        stage: statistics.Stage = found.stages["write"]
        decisions: statistics.Decisions = found.decisions
        saves: statistics.Distribution = found.save_seconds
        needed: stores.SpaceNeeded = engine.space_needed(nbytes=1000)
        print(stage, decisions, saves, needed, assert_type(engine.latest, p.CheckpointInfo | None))
        remove_hook()


async def train_async(path: Path) -> None:
    sampler = p.ResumableSampler(20, batch_size=2)
    state = {"weights": torch.zeros(4), "sampler": sampler}
    keep = p.Keep(every=100, best=("loss", 2, "min"), spaced=[(timedelta(hours=1), timedelta(days=1))])
    storage = p.StorageOptions(writers=2, host_memory=1 << 24)
    memory = p.MemoryTier(interval=1)
    drain = p.Drain(f"file://{path}-bucket", keep_last=2)
    async with p.CheckpointEngine(f"{path}-drained", drain=drain) as engine:
        await (await engine.checkpoint({"weights": torch.zeros(4)}, step=1)).reached("remote")
    async with p.CheckpointEngine(
        path, keep_last=4, interval=timedelta(minutes=5), keep=keep, storage=storage, memory=memory
    ) as engine:
        assert_type(await engine.restore(state), p.Restored | None)
        pending = assert_type(await engine.checkpoint(state, step=1), p.PendingCheckpoint)
        await pending.reached("memory")
        assert_type(await pending, p.CheckpointInfo)
        async with engine.step(state, 2) as this_step:
            assert_type(this_step, p.TrainingStep)
            this_step.save()
        await engine.drain()
        assert_type(await engine.pin(step=1), p.CheckpointInfo)
        assert_type(await engine.unpin(step=1), p.CheckpointInfo)
        assert_type(await engine.reject(step=2), list[p.CheckpointInfo])
        assert_type(await engine.remove(step=2), list[p.CheckpointInfo])
        print(engine.metrics(), engine.scalars(), engine.checkpoints())
    assert_type(await p.load(path), dict[str, Any])


def tune(path: Path) -> stores.TunedSettings:
    with p.SyncCheckpointEngine(path, keep_last=2) as engine:
        tuning = assert_type(engine.tune(nbytes=1 << 20, budget_seconds=0.1), stores.Tuning)
    measured: tuple[stores.Measurement, ...] = tuning.measurements
    points: list[stores.Point] = [each.point for each in measured]
    print(points)
    tuning.write(path)
    return assert_type(stores.read_tuning(path), stores.TunedSettings)


def ranks(rank: int, store: object) -> p.Group:
    print(p.FlatShard(torch.zeros(2), (4,), 2 * rank))
    return p.Group(rank, 2, store)


def keep(path: Path) -> None:
    with p.Shelf(path, 1 << 20) as shelf:
        shelf["centres"] = torch.zeros(3)
        with shelf.transaction("centres"):
            shelf["centres"] += 1


def main(folder: Path) -> None:
    print(choose(), Errors, Refused, Lost, Stores, Root, ranks(0, None))
    try:
        train(folder / "run")
        read(folder / "run")
        look_after(folder / "run", folder / "other")
        asyncio.run(train_async(folder / "async"))
        keep(folder / "shelf")
        print(tune(folder / "tuned"))
    except (p.TornCaptureError, p.StateMismatchError) as error:
        print(error.paths if isinstance(error, p.TornCaptureError) else error.missing)
    except (p.NoCheckpointError, p.GroupError, p.CheckpointError) as error:
        print(error)
        raise
