"""What contexts around training steps make of a policy."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pccheck_async import CheckpointEngine, Keep, StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.engine import Decision, Guard, SaveReport, StepReport, flight_of
from pccheck_async.errors import DamagedError, UnsupportedStateError, WriteError
from pccheck_async.testing import CrashDisk, CrashWriter, StuckWriter
from pccheck_async.testing.probe import probe
from pccheck_async.training import TrainingStep
from pccheck_async.training import run as run_module
from pccheck_async.training.policy import (
    EverySteps,
    PCcheckInterval,
)
from tests.engine.test_inline_capture_engine import FOLDER, small
from tests.support.devices import Device
from tests.support.training_simulator import Machine, Simulator

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Model:
    """A model whose optimizer steps at the end of windows of so many contexts."""

    def __init__(self, window: int) -> None:
        self.window = window
        module = nn.Linear(4, 4)
        module(torch.ones(1, 4)).sum().backward()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": module, "optimizer": self.optimizer}

    def train(self, engine: SyncCheckpointEngine, steps: int, seconds: float = 0.0) -> list[int]:
        """Return the steps that were saved; each is durable before the next one."""
        saved = []
        for step in range(steps):
            with engine.step(self.state, step) as this:
                time.sleep(seconds)
                if (step + 1) % self.window == 0:
                    self.optimizer.step()
            if this.pending is not None:
                saved.append(this.pending.result().step)
        return saved


class Told(EverySteps):
    """Notes what it is told."""

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self.skips: list[int] = []

    def skipped(self, report: StepReport) -> None:
        super().skipped(report)
        self.skips.append(report.step)


def test_a_policy_hears_that_a_checkpoint_waits_for_the_end_of_a_window(tmp_path: Path) -> None:
    policy, model = Told(5), Model(window=4)
    with SyncCheckpointEngine(tmp_path, interval=policy) as engine:
        engine.attach(model.optimizer)
        assert model.train(engine, 20) == [7, 11, 15, 19]
    assert policy.skips == [4, 5, 6, 9, 10, 14]


class Deaf:
    """A policy that makes up for nothing."""

    def due(self, report: StepReport) -> bool:
        return report.step == 1

    def skipped(self, report: StepReport) -> None: ...

    def saved(self, report: SaveReport) -> None: ...

    def decision(self) -> Decision:
        return Decision(None, None, "once")


def test_what_was_due_in_a_window_is_saved_at_its_end_whatever_the_policy_makes_of_that(tmp_path: Path) -> None:
    model = Model(window=4)
    with SyncCheckpointEngine(tmp_path, interval=Deaf()) as engine:
        engine.attach(model.optimizer)
        assert model.train(engine, 20) == [3]


@pytest.mark.slow
def test_windows_do_not_make_the_checkpoints_of_bursts_ever_rarer(tmp_path: Path) -> None:
    model = Model(window=16)
    with SyncCheckpointEngine(tmp_path, interval=PCcheckInterval()) as engine:
        engine.attach(model.optimizer)
        saved = model.train(engine, 640, seconds=0.002)  # long beside a save, even on a busy machine
        assert engine.statistics().interval.interval is not None
    assert max(later - earlier for earlier, later in pairwise(saved)) <= 64


@pytest.mark.parametrize("window", [8, 32])
def test_in_windows_an_interval_is_measured_as_it_is_without(window: int) -> None:
    def settled(window: int) -> int:
        sim = Simulator(PCcheckInterval(), Machine(save_seconds=200.0, noise=0.02), window=window)
        sim.run(4000)
        interval = sim.policy.decision().interval
        assert interval is not None
        return interval

    assert settled(window) == pytest.approx(settled(1), rel=0.2)


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if record.event == event]  # type: ignore[attr-defined]


def test_whatever_is_taken_for_a_window_a_run_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a checkpoint is marked, and warned of when it is saved, once, and when it is restored."""
    model = Model(window=1000)  # or its steps are made by code that no hook sees
    with SyncCheckpointEngine(tmp_path, interval=10, keep_last=9) as engine:
        engine.attach(model.optimizer)
        with held_captures() as overlapped:
            saved = model.train(engine, 300)
    assert saved == [9 + 63, 79 + 63, 149 + 63, 219 + 63]
    assert overlapped == []
    (line,) = said(caplog, "inside_window")
    assert (line.levelname, line.step, line.store) == ("WARNING", 9 + 63, str(tmp_path))
    assert "after waiting 64 contexts of engine.step" in line.getMessage()
    assert "attach the optimizers that make the steps" in line.getMessage()
    assert all(info.inside_window for info in list_checkpoints(tmp_path))
    caplog.clear()
    with SyncCheckpointEngine(tmp_path) as engine:
        restored = engine.restore(model.state)
        assert restored is not None
        assert restored.inside_window
        (line,) = said(caplog, "lost_gradients")
        assert (line.levelname, line.step) == ("WARNING", 9 + 63 + 210)
        caplog.clear()
        engine.checkpoint(model.state, step=300).result()
        restored = engine.restore(model.state)
        assert restored is not None
        assert not restored.inside_window
        assert not said(caplog, "lost_gradients")


@contextmanager
def held_captures() -> Iterator[list[int]]:
    """Note the steps whose captures overlap with training."""
    steps: list[int] = []
    watch = Guard.watch

    def noting(guard: Guard, pending: Any, lazy: Any) -> Any:
        steps.append(pending.step)
        return watch(guard, pending, lazy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "watch", noting)
        yield steps


def test_a_checkpoint_waits_for_a_window_of_minutes_only_ten_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter))
    model, found = Model(window=9), list[int]()
    with SyncCheckpointEngine(tmp_path, interval=3) as engine:
        engine.attach(model.optimizer)
        for step in range(9):
            with engine.step(model.state, step) as this:
                now += 200.0
                if step == 8:
                    model.optimizer.step()
            if this.pending is not None:
                found.append(step)
                assert (this.whole, this.inside_window) == (step == 8, step != 8)
    assert found == [5, 8]


def test_warned_of_once_until_a_window_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(window=200)
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(model.optimizer)
        assert model.train(engine, 300) == [63, 127, 191, 199, 263]
    assert [line.step for line in said(caplog, "inside_window")] == [63, 263]


@pytest.mark.parametrize("nbytes", [480, 481, 500])
def test_the_mark_is_there_whatever_else_is_in_the_metadata(tmp_path: Path, nbytes: int) -> None:
    """Metadata that leave no room for it are dropped: they are a help, and what was lost has to be known."""
    model = Model(window=100)
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(model.optimizer)
        for step in range(64):
            with engine.step(model.state, step, metadata={"text": "x" * nbytes}):
                pass
    (info,) = list_checkpoints(tmp_path)
    assert info.inside_window
    assert ("text" in info.metadata) is (nbytes == 480)


@pytest.mark.parametrize("left", ["the step", "gradients"])
def test_what_kept_the_last_step_from_being_saved_is_said_as_far_as_it_is_known(
    tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A scaler leaves steps out, and the loss of a generator leaves gradients in the discriminator."""
    model, other = Model(1), Model(1)
    with SyncCheckpointEngine(tmp_path, interval=100) as engine:
        engine.attach(model.optimizer)
        state = {"generator": model.state, "discriminator": other.state}
        with engine.step(state, 0):
            model.optimizer.step()
            other.optimizer.step()
        with engine.step(state, 1):
            if left == "gradients":
                other.state["model"](torch.ones(1, 4)).sum().backward()
                model.optimizer.step()
    (line,) = said(caplog, "inside_window")
    known = {
        "the step": "no attached optimizer made a step in it: a window of gradient accumulation is open, or the step "
        "was left out (by a gradient scaler), or",
        "gradients": "there are gradients that no step of the SGD has used: a window of gradient accumulation is open, "
        "or they are left over from another loss",
    }
    assert known[left] in line.getMessage()


@pytest.mark.parametrize(("every", "kept"), [(10, [39, 29, 19, 9]), (12, [39, 24, 14])])
def test_what_is_kept_is_on_the_grid_of_what_is_saved(tmp_path: Path, every: int, kept: list[int]) -> None:
    with SyncCheckpointEngine(tmp_path, interval=5, keep=Keep(every=every)) as engine:
        for step in range(40):
            with engine.step({"step": step}, step) as this:
                pass
            if this.pending is not None:
                this.pending.result()
    assert [info.step for info in list_checkpoints(tmp_path)] == kept


class Measuring(EverySteps):
    """Measures another time at every step, and goes from 3 steps to 4 on the way."""

    _now, _steps = 0.0, 3

    def due(self, report: StepReport) -> bool:
        self._now = report.now
        self._steps = 3 if report.step < 10 else 4
        return super().due(report)

    def decision(self) -> Decision:
        return Decision(self._steps, self._now, f"every {self._steps} steps")


def test_an_interval_is_said_when_it_is_decided_on_and_not_at_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        SyncCheckpointEngine(tmp_path, interval=Measuring(100)) as engine,
        caplog.at_level(logging.INFO, "pccheck_async"),
    ):
        for step in range(30):
            with engine.step({"step": step}, step):
                pass
    lines = [record for record in caplog.records if record.event == "interval"]  # type: ignore[attr-defined]
    assert [line.interval for line in lines] == [3, 4]  # type: ignore[attr-defined]
    assert {line.store for line in lines} == {str(tmp_path)}  # type: ignore[attr-defined]


class Broken(EverySteps):
    def decision(self) -> Decision:
        raise LookupError("no decision")


def test_a_policy_that_raises_leaves_no_store_locked(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no decision"):
        SyncCheckpointEngine(tmp_path, interval=Broken(1)).open()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0)) as engine:
        assert engine.checkpoints() == []


def test_a_state_that_cannot_be_saved_is_told_after_the_first_step(tmp_path: Path) -> None:
    """And not when the first save is due. Later ones may change as they like."""
    state = {"model": nn.Linear(2, 2), "seen": {"last": deque[int](maxlen=3)}}
    with SyncCheckpointEngine(tmp_path, interval=100, save_last=False) as engine:
        told = pytest.raises(UnsupportedStateError, match=r"seen\.last: a collections\.deque cannot be saved")
        with told, engine.step(state, 0):
            pass
        for step in range(1, 3):
            with engine.step(state, step):
                pass
        assert engine.statistics().admitted == 0


def test_a_checkpoint_that_was_skipped_is_made_up_for(tmp_path: Path) -> None:
    writer = StuckWriter(CrashWriter(CrashDisk()), kinds=())
    with SyncCheckpointEngine(
        FOLDER, storage=StorageOptions(io=writer), max_in_flight=1, on_busy="skip", interval=2
    ) as engine:
        engine.checkpoint(small(), step=0).result(30)
        writer.hold("flush")
        saved = []
        for step in range(1, 7):
            with engine.step(small(), step) as this:
                if step >= 4:
                    writer.release()
                    engine.drain()
            if this.pending is not None and not this.pending.skipped:
                saved.append(step)
        assert saved == [1, 4, 5]


# -- the last step


def last_saved(folder: Path, model: Model) -> int | None:
    """The step of the newest checkpoint, which holds the parameters that there are."""
    infos = list_checkpoints(folder)
    if not infos:
        return None
    saved = load_sync(folder)["model"]
    assert all(torch.equal(saved[name], value) for name, value in model.state["model"].state_dict().items())
    return infos[0].step


def step_once(engine: SyncCheckpointEngine, model: Model, step: int) -> TrainingStep:
    with engine.step(model.state, step) as this:
        model.optimizer.step()
    return this


@pytest.mark.parametrize(("interval", "steps", "admitted"), [(100, 3, 1), (3, 3, 1), (2, 3, 2), (100, 0, 0)])
@pytest.mark.parametrize("attach", [False, True])
def test_leaving_saves_the_last_step_once(
    tmp_path: Path, interval: int, steps: int, admitted: int, attach: bool
) -> None:
    model = Model(1)
    with SyncCheckpointEngine(tmp_path / "sync", interval=interval) as engine:
        if attach:
            engine.attach(model.optimizer)
        for step in range(steps):
            step_once(engine, model, step)
    assert engine.statistics().admitted == admitted
    assert last_saved(tmp_path / "sync", model) == (steps - 1 if steps else None)

    async def train() -> CheckpointEngine:
        async with CheckpointEngine(tmp_path / "async", interval=interval) as engine:
            for step in range(steps):
                async with engine.step(model.state, step, metadata={"step": step}):
                    model.optimizer.step()
        return engine

    assert asyncio.run(train()).statistics().admitted == admitted
    assert last_saved(tmp_path / "async", model) == (steps - 1 if steps else None)
    assert [info.metadata for info in list_checkpoints(tmp_path / "async")] == [{"step": steps - 1}] * bool(steps)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_error_saves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    model = Model(1)
    engine = SyncCheckpointEngine(tmp_path, interval=100)
    with suppress(error), engine:
        step_once(engine, model, 0)
        raise error

    async def train() -> None:
        async with CheckpointEngine(tmp_path, interval=100) as engine:
            async with engine.step(model.state, 0):
                model.optimizer.step()
            raise error

    with suppress(error):
        asyncio.run(train())
    assert engine.statistics().admitted == 0
    assert not list_checkpoints(tmp_path)


def fail_in_a_step(engine: SyncCheckpointEngine, model: Model) -> None:
    with suppress(RuntimeError), engine.step(model.state, 2):
        model.optimizer.step()
        raise RuntimeError("in the middle of it")


def leave_a_window_open(engine: SyncCheckpointEngine, model: Model) -> None:
    with engine.step(model.state, 2):
        model.state["model"](torch.ones(1, 4)).sum().backward()


def load_the_best(engine: SyncCheckpointEngine, model: Model) -> None:
    model.state["model"].load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)})


def swap(model: Model) -> None:
    for parameter in model.state["model"].parameters():
        parameter.data = torch.zeros_like(parameter)


def move(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.state["model"].parameters():
            parameter.set_(torch.zeros_like(parameter))


AFTER: dict[str, tuple[Callable[[SyncCheckpointEngine, Model], Any], int | None]] = {
    "nothing": (lambda engine, model: None, 1),
    "an evaluation": (lambda engine, model: model.state["model"].eval()(torch.rand(9, 4)), 1),
    "a file": (lambda engine, model: torch.save(model.state["model"].state_dict(), io.BytesIO()), 1),
    "other weights": (lambda engine, model: swap(model), None),
    "other memory": (lambda engine, model: move(model), None),
    "weights changed past torch": (
        lambda engine, model: [each.data.zero_() for each in model.state["model"].parameters()],
        None,
    ),
    "a step that failed": (fail_in_a_step, None),
    "an open window": (leave_a_window_open, 2),
    "the best weights": (load_the_best, None),
    "half precision": (lambda engine, model: model.state["model"].half(), None),
    "a step on its own": (lambda engine, model: model.optimizer.step(), None),
    "an older checkpoint": (lambda engine, model: engine.restore(model.state, step=7), 7),
    "closing": (lambda engine, model: engine.close(), None),
}


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("attach", [False, True])
def test_what_comes_after_the_last_step(
    tmp_path: Path, after: str, attach: bool, caplog: pytest.LogCaptureFixture
) -> None:
    act, saved = AFTER[after]
    if not attach and after == "weights changed past torch":
        saved = 1  # nothing of torch's is patched with nothing attached, and a line of the log says so
    model = Model(1)
    caplog.set_level(logging.INFO, "pccheck_async")
    with SyncCheckpointEngine(tmp_path, interval=100) as engine:
        if saved == 7:
            engine.checkpoint(model.state, step=7).result()
        if attach:
            engine.attach(model.optimizer)
        for step in range(2):
            step_once(engine, model, step)
        act(engine, model)
    assert last_saved(tmp_path, model) == saved
    said = [record.getMessage() for record in caplog.records if record.event == "last_not_saved"]  # type: ignore[attr-defined]
    assert len(said) == (saved not in (1, 2) and after not in ("a step that failed", "closing"))
    there = "nothing is saved" if saved is None else f"newest saved: step {saved}"
    text = f"the last step, 1, is not saved on leaving ({there}): "
    assert all(each.startswith(text) for each in said)
    unseen = [record.getMessage() for record in caplog.records if record.event == "last_unseen"]  # type: ignore[attr-defined]
    assert len(unseen) == (saved in (1, 2) and not attach)
    assert all("param.data" in each and "attach" in each for each in unseen)


class Strict(nn.Parameter):
    """Knows no function by which it is asked where it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", ["lazy", "strict"])
def test_a_step_ends_well_whatever_its_parameters_refuse(tmp_path: Path, kind: str) -> None:
    parameter = nn.LazyLinear(3).weight if kind == "lazy" else Strict(torch.ones(3))
    state = {"optimizer": torch.optim.SGD([parameter], lr=0.1)}
    with SyncCheckpointEngine(tmp_path, interval=100) as engine, engine.step(state, 0):
        pass
    assert [info.step for info in list_checkpoints(tmp_path)] == [0]


@pytest.mark.parametrize(("by_hand", "saved"), [(0, [1, 0]), (1, [1]), (5, [5]), (None, [2])])
def test_a_checkpoint_by_hand_of_that_step_or_a_later_one_holds_it(
    tmp_path: Path, by_hand: int | None, saved: list[int]
) -> None:
    model = Model(1)
    with SyncCheckpointEngine(tmp_path, interval=100, keep_last=5) as engine:
        if by_hand is None:  # before a rollback: the numbers say nothing
            engine.checkpoint(model.state, step=9).result()
        for step in range(3 if by_hand is None else 2):
            step_once(engine, model, step)
        if by_hand is not None:
            engine.checkpoint(model.state, step=by_hand)
    assert [info.step for info in list_checkpoints(tmp_path)] == (saved if by_hand is not None else [2, 9])


@pytest.mark.parametrize("attach", [False, True])
def test_what_a_restore_that_failed_has_filled_is_not_saved_as_the_last_step(tmp_path: Path, attach: bool) -> None:
    weight = nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = {"weight": weight, "optimizer": optimizer}
    storage = StorageOptions(chunk_bytes=1 << 18)
    with SyncCheckpointEngine(tmp_path, interval=100, storage=storage) as engine:
        if attach:
            engine.attach(optimizer)
        engine.checkpoint(state, step=7).result()
        for step in range(2):
            with engine.step(state, step):
                weight.grad = torch.ones_like(weight)
                optimizer.step()
        for slot in tmp_path.glob("slot-*"):
            with slot.open("r+b") as file:
                file.seek(15 << 18)
                file.write(b"damage")
        with pytest.raises(DamagedError):
            engine.restore(state, step=7)
    assert [info.step for info in list_checkpoints(tmp_path)] == [7]


@pytest.mark.parametrize("told", [False, True])
def test_a_last_step_whose_checkpoint_failed_is_saved_again(tmp_path: Path, told: bool) -> None:
    model, device = Model(1), Device()
    expected = nullcontext() if told else pytest.raises(WriteError, match="broken")
    with expected, SyncCheckpointEngine(tmp_path, interval=1, storage=StorageOptions(io=device)) as engine:
        device.breaking.broken = ("write",)
        pending = step_once(engine, model, 0).pending
        assert pending is not None
        with pytest.raises(WriteError) if told else nullcontext():
            if told:
                pending.result()
        if not told:
            while not pending.done():
                flight_of(pending).wait_out_of_reach()
        device.breaking.broken = ()
    assert last_saved(tmp_path, model) == 0
    assert (engine.statistics().failed, engine.statistics().durable) == (1, 1)


def test_what_fails_in_saving_the_last_step_is_raised_on_leaving(tmp_path: Path) -> None:
    model, device = Model(1), Device()
    engine = SyncCheckpointEngine(tmp_path, interval=9, storage=StorageOptions(io=device)).__enter__()
    step_once(engine, model, 0)
    device.breaking.broken = ("write",)
    with pytest.raises(WriteError, match="broken"):
        engine.__exit__(None, None, None)
    engine = SyncCheckpointEngine(tmp_path, interval=9).__enter__()
    step_once(engine, model, 0)
    model.state["odd"] = deque[int](maxlen=1)
    with pytest.raises(UnsupportedStateError, match="odd"):
        engine.__exit__(None, None, None)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0)) as engine:  # both let go of the store
        assert engine.checkpoints() == []


def test_a_last_step_that_was_skipped_or_is_in_flight(tmp_path: Path) -> None:
    model, device = Model(1), Device()
    with SyncCheckpointEngine(
        tmp_path, interval=1, storage=StorageOptions(io=device), max_in_flight=1, on_busy="skip"
    ) as engine:
        device.medium.hold("write")
        step_once(engine, model, 0)
        pending = step_once(engine, model, 1).pending
        assert pending is not None
        assert pending.skipped
        device.medium.release()
    assert (last_saved(tmp_path, model), engine.statistics().admitted) == (1, 2)
    with SyncCheckpointEngine(tmp_path, interval=1, storage=StorageOptions(io=device)) as engine:
        device.medium.hold("write")
        step_once(engine, model, 2)
        threading.Timer(0.05, device.medium.release).start()
    assert (last_saved(tmp_path, model), engine.statistics().admitted) == (2, 1)


def test_leaving_that_is_cancelled_aborts_what_is_in_flight(tmp_path: Path) -> None:
    model, device = Model(1), Device()

    async def main() -> CheckpointEngine:
        engine = await CheckpointEngine(tmp_path, interval=1, storage=StorageOptions(io=device)).open()
        device.medium.hold("write")
        async with engine.step(model.state, 0):
            model.optimizer.step()
        leaving = asyncio.create_task(engine.__aexit__(None, None, None))
        await asyncio.to_thread(device.medium.wait_stuck)
        leaving.cancel()
        (saving,) = probe(engine).tasks
        while not saving.cancelling():  # noqa: ASYNC110 - of the engine's loop
            await asyncio.sleep(0)
        device.medium.release()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        return engine

    counts = asyncio.run(main()).statistics()
    assert (counts.admitted, counts.failed) == (1, 1)
    assert not list_checkpoints(tmp_path)


def test_whoever_wants_it_saves_no_last_step(tmp_path: Path) -> None:
    model = Model(1)
    with SyncCheckpointEngine(tmp_path, interval=100, save_last=False) as engine:
        step_once(engine, model, 0)
    assert not list_checkpoints(tmp_path)
    with pytest.raises(ValueError, match="save_last is True or False, not 'no'"):
        SyncCheckpointEngine(tmp_path, save_last="no")  # type: ignore[arg-type]


def test_a_step_that_asks_for_it_or_sets_the_metric_is_saved(tmp_path: Path) -> None:
    """An interval hardly meets the step after which a validation loss is known."""
    model, saved = Model(1), []
    settings: Any = {"keep": Keep(best=("val_loss", 2, "min")), "interval": 1000}
    with SyncCheckpointEngine(tmp_path, **settings, save_last=False) as engine:
        for step in range(40):
            with engine.step(model.state, step) as this:
                model.optimizer.step()
                if step % 10 == 9:
                    this.metadata["val_loss"] = {9: 3.0, 19: 1.0, 29: 2.0, 39: 4.0}[step]
                elif step == 3:
                    this.save()
                elif step == 4:
                    this.metadata["val_loss"] = None
                    this.metadata["loss"] = 1.0
            if this.pending is not None:
                saved.append(this.pending.result().step)
        assert saved == [3, 9, 19, 29, 39]
        assert [info.step for info in engine.checkpoints()] == [39, 29, 19]


def test_the_default_interval_keeps_the_best_of_rare_evaluations(tmp_path: Path) -> None:
    model = Model(1)
    with SyncCheckpointEngine(tmp_path, keep=Keep(best=("val_loss", 1, "min"))) as engine:
        for step in range(30):
            with engine.step(model.state, step) as this:
                model.optimizer.step()
                if step in (9, 19):
                    this.metadata["val_loss"] = float(step)
    assert [info.step for info in list_checkpoints(tmp_path)][-1] == 9


def test_it_waits_for_the_end_of_a_window(tmp_path: Path) -> None:
    model, saved = Model(4), []
    with SyncCheckpointEngine(tmp_path, interval=1000, save_last=False) as engine:
        engine.attach(model.optimizer)
        for step in range(12):
            with engine.step(model.state, step) as this:
                if step == 5:
                    this.save()
                if (step + 1) % 4 == 0:
                    model.optimizer.step()
            if this.pending is not None:
                saved.append(this.pending.result().step)
    assert saved == [7]


def test_a_metric_that_every_step_sets_does_not_say_when_to_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a loss noted in each step would have each step saved, at the speed of the disk."""
    caplog.set_level(logging.INFO)
    model, saved = Model(1), []
    with SyncCheckpointEngine(tmp_path, interval=30, keep=Keep(best=("loss", 1, "min")), save_last=False) as engine:
        for step in range(70):
            with engine.step(model.state, step) as this:
                model.optimizer.step()
                if step != 63:
                    this.metadata["loss"] = float(step)
            if this.pending is not None:
                saved.append(this.pending.result().step)
    assert saved == [*range(16), 29, 59, *range(64, 70)]
    assert sum("16 steps in a row set 'loss'" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("restores", [False, True])
def test_a_step_that_rejects_is_not_saved_and_nor_is_the_last_one_before(tmp_path: Path, restores: bool) -> None:
    model = Model(1)
    with SyncCheckpointEngine(tmp_path, interval=1, keep_last=3) as engine:
        for step in range(4):
            with engine.step(model.state, step) as this:
                model.optimizer.step()
                if step == 3:
                    engine.drain()
                    engine.reject(step=1)
                    this.save()
                    if restores:
                        engine.restore(model.state)
            assert (this.pending is None) == (step == 3)
    assert [(info.step, info.rejected) for info in list_checkpoints(tmp_path)] == [(2, True), (1, True), (0, False)]
    with SyncCheckpointEngine(tmp_path, interval=100, keep_last=3) as engine:
        engine.restore(model.state)
        with engine.step(model.state, 1):
            model.optimizer.step()
    with SyncCheckpointEngine(tmp_path, interval=100, keep_last=3) as engine:
        engine.restore(model.state)
        with engine.step(model.state, 2):
            model.optimizer.step()
        engine.reject(step=1)  # what step 2 made of it is not saved on leaving
    assert [info.step for info in list_checkpoints(tmp_path) if not info.rejected] == [0]


def test_a_step_inside_another_one_is_refused(tmp_path: Path) -> None:
    """The inner one would save the state of an outer step that has not ended."""
    state = {"x": torch.zeros(1)}
    with SyncCheckpointEngine(tmp_path, interval=1) as engine, SyncCheckpointEngine(tmp_path / "other") as other:
        with engine.step(state, 0):
            with (
                pytest.raises(RuntimeError, match="of step 1 inside that of step 0"),
                engine.step(state, 1),
            ):
                pass
            with other.step(state, 7):  # of another engine
                pass
            beside = threading.Thread(target=lambda: engine.step(state, 2).__enter__())
            beside.start()
            beside.join()
        with pytest.raises(ValueError, match="failed"), engine.step(state, 3):
            raise ValueError("failed")
        engine.step(state, 4).__enter__()  # given up
        with engine.step(state, 5):
            pass
    assert [info.step for info in list_checkpoints(tmp_path)] == [5]


def test_steps_of_tasks_side_by_side_are_none_inside_another(tmp_path: Path) -> None:
    async def train() -> None:
        async with CheckpointEngine(tmp_path, interval=1, max_in_flight=3) as engine:

            async def step(number: int) -> None:
                async with engine.step({"x": torch.zeros(1)}, number):
                    await asyncio.sleep(0)

            await asyncio.gather(*(step(number) for number in range(3)))
            async with engine.step({"x": torch.zeros(1)}, 3):
                with pytest.raises(RuntimeError, match="inside that of step 3"):
                    await step(4)
                await asyncio.create_task(step(5))

    asyncio.run(train())


def test_training_that_awaits_nothing_else_lets_others_run_and_is_cancelled_at_its_next_step(tmp_path: Path) -> None:
    async def train() -> None:
        async with CheckpointEngine(tmp_path, interval=10**6) as engine:
            for step in range(10_000):
                async with engine.step({"x": torch.full((1,), float(step))}, step):
                    steps.append(step)
                if step == 20:
                    asyncio.get_running_loop().call_soon(tasks[0].cancel)  # as the stop button of a notebook does

    steps: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        tasks.append(asyncio.create_task(train()))
        turns = 0
        while not tasks[0].done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 20
        assert tasks[0].cancelled()

    asyncio.run(main())
    assert steps[-1] in (20, 21)
