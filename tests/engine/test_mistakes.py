"""Mistakes that users make with the public API: each gets an error, at once, that says what is wrong."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pccheck_async import (
    CheckpointEngine,
    NoCheckpointError,
    ResumableLoader,
    ResumableSampler,
    RNGState,
    StateMismatchError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load,
    load_sync,
    stores,
)
from pccheck_async.engine import core
from pccheck_async.errors import CheckpointError, ClosedError, DamagedError, StoreLockedError, UnsupportedStateError
from pccheck_async.format import whole_step
from pccheck_async.tuning import tune
from tests.support.devices import Device
from tests.support.settings import engine_settings

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

STATE = {"x": torch.ones(3)}


@pytest.mark.parametrize("kind", [CheckpointEngine, SyncCheckpointEngine])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "is empty"),
        ("~/run", r"os\.path\.expanduser"),
        ("s3://bucket/run", r"is a URL.*drain=Drain"),
        (Path("~"), "expanduser"),
    ],
)
def test_a_path_that_means_another_place(kind: Callable[..., Any], path: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(path)


@pytest.mark.parametrize("made", [partial(stores.copy, "here"), lambda path: asyncio.run(tune(path, nbytes=1))])
def test_another_place_to_copy_to_or_to_measure(made: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expanduser"):
        made("~/copies")
    assert not os.listdir(tmp_path)


def test_a_bucket_has_no_disk_to_measure(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is a URL"):
        asyncio.run(tune("s3://bucket/copies", nbytes=1))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_stall", "1"),
        ("max_stall", float("nan")),
        ("lock_timeout", None),
        ("exit_timeout", "60"),
        ("lock_timeout", True),
        ("check_captures", "no"),
    ],
)
def test_a_setting_of_another_type(tmp_path: Path, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{setting} is .*, not {value!r}$"):
        SyncCheckpointEngine(tmp_path, **engine_settings(**{setting: value}))


@pytest.mark.parametrize(
    ("arguments", "metadata", "error", "says"),
    [
        ((STATE, None), None, TypeError, "step must be an integer, not None"),
        ((STATE, "7"), None, TypeError, "step must be an integer, not '7'"),
        ((STATE, True), None, TypeError, "step must be an integer, not True"),
        ((STATE, -1), None, ValueError, "step is -1; the first step is 0"),
        ((7, STATE), None, UnsupportedStateError, r"an int; .* objects and values \(write step\(state, step\)\)$"),
        ((7, 8), None, UnsupportedStateError, r"the state is an int; give a mapping .* values \(state = \{.m"),
        ((nn.Linear(1, 1), 7), None, UnsupportedStateError, "the state is a Linear; give a mapping"),
        ((STATE, 7), 0.5, UnsupportedStateError, r"metadata maps str to .*\(not float\)"),
        ((STATE, 7), ["loss"], UnsupportedStateError, r"metadata maps str to .*\(not list\)"),
        ((STATE, 7), {"loss": torch.ones(())}, UnsupportedStateError, r"x\.item\(\)"),
    ],
)
def test_a_step_with_wrong_arguments_is_refused_although_nothing_is_due(
    tmp_path: Path, arguments: Any, metadata: Any, error: type[Exception], says: str
) -> None:
    with SyncCheckpointEngine(tmp_path, interval=1000) as engine:
        with pytest.raises(error, match=says):
            engine.step(*arguments, metadata=metadata)
        with engine.step(STATE, 8, metadata={"loss": 1.0}) as this:
            assert (this.step, this.metadata) == (8, {"loss": 1.0})

    async def main() -> None:
        async with CheckpointEngine(tmp_path, interval=1000) as engine:
            with pytest.raises(error, match=says):
                engine.step(*arguments, metadata=metadata)

    asyncio.run(main())


@pytest.mark.parametrize("state", [nn.Linear(1, 1), [torch.ones(1)], None], ids=["module", "list", "none"])
def test_a_state_that_is_no_mapping(tmp_path: Path, state: Any) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for call in (partial(engine.checkpoint, step=1), engine.restore, partial(engine.step, step=1)):
            with pytest.raises(UnsupportedStateError, match=r"the state is an? (Linear|list|NoneType); give a mapping"):
                call(state)


def test_a_step_before_the_first_is_refused_and_one_of_an_old_store_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(tmp_path / "old", keep_last=2) as engine:
        engine.checkpoint({"x": 1}, step=0)
        wrong: Any
        for wrong in (-1, np.int64(-7)):
            with pytest.raises(ValueError, match=rf"^step is {wrong}; the first step is 0$"):
                engine.checkpoint({"x": 1}, step=wrong)
        monkeypatch.setattr(core, "new_step", whole_step)
        engine.checkpoint({"x": 2}, step=-1)
    monkeypatch.undo()
    assert [info.step for info in list_checkpoints(tmp_path / "old")] == [-1, 0]
    assert load_sync(tmp_path / "old", step=-1) == {"x": 2}
    assert stores.copy(tmp_path / "old", tmp_path / "new", step=-1).step == -1
    with SyncCheckpointEngine(tmp_path / "new") as engine:
        assert engine.pin(step=-1).pinned
        assert engine.restore({"x": None}, step=-1) is not None


def test_opening_twice(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(ClosedError, match="is open already"):
            engine.open()
        engine.checkpoint(STATE, step=1).result()
    with pytest.raises(ClosedError, match="is closed; make a new one"):
        engine.open()


def test_an_engine_that_did_not_open_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = SyncCheckpointEngine(tmp_path / "file")
    with pytest.raises(CheckpointError) as failed:
        engine.open()
    why = rf"could not be opened \({type(failed.value).__name__}\)"
    with pytest.raises(ClosedError, match=f"{why}; make a new one"):
        engine.open()
    with pytest.raises(ClosedError, match=why):
        engine.checkpoint(STATE, step=1)
    with pytest.raises(ClosedError, match=why):
        engine.statistics()


@pytest.mark.parametrize("kind", [SyncCheckpointEngine, CheckpointEngine])
def test_a_step_without_its_name_is_not_removed(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="; by name: step, name, force"):
        kind(tmp_path).remove(3)


def test_a_pin_of_no_step(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(STATE, step=3).result()
        for step, said in ((None, "give step= or name="), ("3", "step must be an integer, not '3'")):
            with pytest.raises(TypeError, match=said):
                engine.pin(step=step)  # type: ignore[arg-type]
        assert engine.pin(step=3).pinned


def test_waiting_in_vain_says_for_what(tmp_path: Path) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device)) as engine:
        device.medium.hold("write", "flush")
        pending = engine.checkpoint(STATE, step=5)
        with pytest.raises(TimeoutError, match=r"the checkpoint of step 5 is \w+ after 0.01 s; it goes on"):
            pending.result(0.01)
        device.medium.release()
        assert pending.result().step == 5


def test_what_cannot_be_called(tmp_path: Path) -> None:
    state = {"x": torch.zeros(3)}
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(TypeError, match="a hook is called"):
            engine.on_event("print")  # type: ignore[arg-type]
        engine.checkpoint(STATE).result()
        with pytest.raises(TypeError, match="progress is called"):
            engine.restore(state, progress=True)  # type: ignore[arg-type]
        assert not state["x"].any()


@pytest.mark.parametrize("signal", ["SIGTERM", 25.0])
def test_what_is_no_signal(tmp_path: Path, signal: Any) -> None:
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(TypeError, match=r"such as signal\.SIGTERM"):
        engine.on_preemption(signal)


def test_a_folder_near_stores_names_them(tmp_path: Path) -> None:
    """Of those below it, the one that was saved to last comes first."""
    runs = tmp_path / "runs"
    for seconds, name in enumerate(("two", "one")):
        with SyncCheckpointEngine(runs / name):
            pass
        os.utime(runs / name / "commit", (seconds, seconds))
    (runs / "other").mkdir()
    (runs / "model.pt").touch()
    with pytest.raises(NoCheckpointError, match=r"holds no store; there are stores in it: one, two; there is model.pt"):
        load_sync(runs)
    with pytest.raises(NoCheckpointError, match="holds no store; there are stores in it: runs/one, "):
        load_sync(tmp_path)
    with pytest.raises(NoCheckpointError, match=r"other holds no store$"):
        load_sync(runs / "other")
    for below in ("missing", "commit", "inside"):
        (runs / "one" / "inside").mkdir(exist_ok=True)
        with pytest.raises(NoCheckpointError, match=rf"; {runs}/one is a store$"):
            load_sync(runs / "one" / below)
    for number in range(5):
        os.symlink(runs / "one", runs / f"three-{number}")
    with pytest.raises(NoCheckpointError, match=r"in it: one, three-0, .*three-3, \.\.\.; there is"):
        load_sync(runs)


def test_values_that_have_a_better_way(tmp_path: Path) -> None:
    async def later() -> None: ...

    coroutine = later()
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(
            UnsupportedStateError, match=r"loader: .*DataLoader cannot be saved; use .*ResumableLoader\(.* of it$"
        ):
            engine.checkpoint({"loader": DataLoader([1, 2])})  # type: ignore[arg-type]
        with pytest.raises(UnsupportedStateError, match=r"later: .*; await it"):
            engine.checkpoint({"later": coroutine})
    coroutine.close()


def test_an_engine_is_neither_copied_nor_pickled(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for use in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a SyncCheckpointEngine cannot be copied or pickled"):
                use(engine)


def test_a_generator_as_the_advice_says(tmp_path: Path) -> None:
    generator, random = torch.Generator(), np.random.default_rng(1)
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(UnsupportedStateError, match="save an object whose"):
            engine.checkpoint({"own": generator}, step=1)

        class Own:
            def state_dict(self) -> Any:
                return {"torch": generator.get_state(), "numpy": random.bit_generator.state}

            def load_state_dict(self, state: Any, /) -> None:
                generator.set_state(state["torch"])
                random.bit_generator.state = state["numpy"]

        state = {"own": Own()}
        torch.rand(3, generator=generator)
        engine.checkpoint(state, step=1).result()
        drawn = torch.rand(3, generator=generator).tolist(), random.random()
        engine.restore(state)
        assert (torch.rand(3, generator=generator).tolist(), random.random()) == drawn
        with pytest.raises(UnsupportedStateError, match=r"give an instance: RNGState\(\)$"):
            engine.checkpoint({"rng": RNGState}, step=2)


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (nn.DataParallel, r"model\.module"),
        pytest.param(partial(torch.compile, backend="eager"), r"model\._orig_mod", marks=pytest.mark.slow),
    ],
)
def test_a_wrapped_model_and_a_plain_one(tmp_path: Path, wrap: Callable[[nn.Module], Any], inside: str) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    for saved, live, where in ((plain(), wrap(plain()), "here"), (wrap(plain()), plain(), "in the checkpoint")):
        folder = tmp_path / where[:4]
        with SyncCheckpointEngine(folder) as engine:
            engine.checkpoint({"net": saved}).result()
            with pytest.raises(
                StateMismatchError, match=rf"a model {where} is wrapped by .*\({inside}\)\. missing"
            ) as raised:
                engine.restore({"net": live})
            assert "strict" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:coroutine 'CheckpointEngine:RuntimeWarning")
@pytest.mark.parametrize("ends", ["closed", "left by an error"])
def test_calls_that_nobody_awaited_are_told_when_the_engine_closes(
    tmp_path: Path, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            engine.restore(STATE)  # type: ignore[unused-coroutine]
            for step in range(3):
                engine.checkpoint(STATE, step=step)  # type: ignore[unused-coroutine]
            begun = asyncio.create_task(engine.checkpoint(STATE, step=3))
            await engine.checkpoint(STATE, step=4)
            await begun
            with pytest.raises(TypeError):
                engine.checkpoint()  # type: ignore[call-arg,unused-coroutine]
            if ends != "closed":
                raise ZeroDivisionError

    with nullcontext() if ends == "closed" else pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    (said,) = [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "unawaited"]
    assert said == (
        "calls that nobody awaited did nothing: 1 of restore(), 3 of checkpoint(); write 'await engine.restore(...)'"
    )
    assert [info.step for info in list_checkpoints(tmp_path)] == [3]  # the task began last


def test_a_call_that_nobody_awaited_has_the_name_of_its_method(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"coroutine 'CheckpointEngine\.checkpoint' was never awaited"):
        CheckpointEngine(tmp_path).checkpoint(STATE)  # type: ignore[unused-coroutine]


@pytest.mark.parametrize(("kind", "statement"), [(SyncCheckpointEngine, "with"), (CheckpointEngine, "async with")])
def test_a_training_step_that_nobody_entered(kind: Callable[..., Any], statement: str, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=rf"was never entered.*: write '{statement} engine\.step\(") as warned:
        kind(tmp_path).step(STATE, 0)
    assert [Path(each.filename).name for each in warned] == ["test_mistakes.py"]


# -- a state_dict() in the place of its object


def state_dicts() -> dict[str, dict[str, Any]]:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = ResumableLoader([1, 2], batch_size=1)
    made = {"optimizer": optimizer, "scheduler": scheduler, "RNGState": RNGState(), "ResumableLoader": loader}
    return {name: made[name].state_dict() for name in made} | {"objects": made}  # type: ignore[attr-defined]


@pytest.mark.parametrize("owner", ["optimizer", "scheduler", "RNGState", "ResumableLoader"])
def test_a_state_dict_is_refused_before_there_is_anything_to_restore(owner: str, tmp_path: Path) -> None:
    state = state_dicts()
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(UnsupportedStateError, match=rf"^x: this is the state_dict\(\) of a live {owner}"):
            engine.restore({"x": state[owner]})
        assert engine.restore({"x": state["objects"][owner]}) is None


def test_a_state_dict_in_training_steps_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_dicts()
    objects = state.pop("objects")
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        for step in range(2):
            with engine.step({**state, "objects": objects}, step):
                pass
    told = [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "state_dict"]
    assert [text.partition(":")[0] for text in told] == [*state]
    assert load_sync(tmp_path)["scheduler"].keys() == state["scheduler"].keys()


# -- a run that begins anew over another


def run_until(path: Path, *steps: int) -> None:
    with SyncCheckpointEngine(path, keep_last=len(steps)) as engine:
        for step in steps:
            engine.checkpoint({"x": torch.full((3,), float(step))}, step=step).result()


@pytest.mark.parametrize("step", [0, 299])
def test_a_checkpoint_over_a_run_that_was_not_restored(step: int, tmp_path: Path) -> None:
    run_until(tmp_path, 299)
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(ValueError, match=rf"holds step 299, .* to save step {step}: call restore\("):
            engine.checkpoint(STATE, step=step)
        assert engine.statistics().admitted == 0
    assert [info.step for info in list_checkpoints(tmp_path)] == [299]


def test_a_training_step_over_a_run_that_was_not_restored(tmp_path: Path) -> None:
    run_until(tmp_path, 299)
    with SyncCheckpointEngine(tmp_path, interval=1000) as engine:
        for step in range(2):
            with pytest.raises(ValueError, match="holds step 299"):
                engine.step(STATE, step).__enter__()
    assert [info.step for info in list_checkpoints(tmp_path)] == [299]


def test_an_async_run_over_one_that_was_not_restored(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            with pytest.raises(ValueError, match="holds step 299"):
                await engine.step(STATE, 0).__aenter__()
            with pytest.raises(ValueError, match="holds step 299"):
                await engine.checkpoint(STATE, step=0)
            await engine.restore({"x": torch.ones(3)})
            async with engine.step(STATE, 0):
                pass

    run_until(tmp_path, 299)
    asyncio.run(main())
    assert [info.step for info in list_checkpoints(tmp_path)] == [0]


@pytest.mark.parametrize(
    "settle",
    [
        lambda engine: engine.restore({"x": torch.ones(3)}, step=100),
        lambda engine: engine.checkpoint(STATE, step=300),
        lambda engine: engine.checkpoint(STATE),
        lambda engine: engine.remove(step=299),
    ],
    ids=["going back", "a later step", "by counter", "removed"],
)
def test_whoever_knows_of_the_run_may_save_earlier_steps(settle: Callable[[Any], Any], tmp_path: Path) -> None:
    run_until(tmp_path, 100, 299)
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        settle(engine)
        assert engine.checkpoint(STATE, step=101).result().step == 101


def test_a_save_that_counts_on_after_a_checkpoint_that_nobody_restored_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(tmp_path, 299)
    with SyncCheckpointEngine(tmp_path) as engine:
        for _ in range(2):
            engine.checkpoint(STATE).result()
    (told,) = [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "unrestored"]
    assert "step 299" in told
    caplog.clear()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.restore({"x": torch.ones(3)})
        engine.checkpoint(STATE).result()
    with SyncCheckpointEngine(tmp_path, overwrite=True) as engine:
        engine.checkpoint(STATE).result()
    assert "unrestored" not in [record.__dict__.get("event") for record in caplog.records]


@pytest.mark.parametrize("attached", [False, True])
def test_an_object_that_cannot_be_saved_is_named_at_the_first_step(tmp_path: Path, attached: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    state = {"model": model, "optimizer": optimizer, "args": SimpleNamespace(lr=1)}
    with SyncCheckpointEngine(tmp_path, interval=100, save_last=False) as engine:
        if attached:
            engine.attach(optimizer)
        with pytest.raises(UnsupportedStateError, match="args"), engine.step(state, 0):
            pass


def test_a_larger_step_than_that_of_a_checkpoint_that_nobody_restored_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(tmp_path, 299)
    with SyncCheckpointEngine(tmp_path, interval=2) as engine:
        for step in range(301, 305):
            with engine.step(STATE, step):
                pass
    (told,) = [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "unrestored"]
    assert "step 299" in told
    assert "step 301" in told


def test_a_restore_that_failed_does_not_count(tmp_path: Path) -> None:
    run_until(tmp_path, 299)
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(StateMismatchError):
            engine.restore({"x": torch.ones(4)})
        with pytest.raises(NoCheckpointError):
            engine.restore({"x": torch.ones(3)}, step=5)
        with pytest.raises(ValueError, match="holds step 299"):
            engine.checkpoint(STATE, step=0)


def test_a_run_begins_anew_over_another_that_is_damaged_only_where_it_is_told_to(tmp_path: Path) -> None:
    run_until(tmp_path, 299)
    (tmp_path / "slot-000").write_bytes(b"damaged")
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(DamagedError):
            engine.restore({"x": torch.ones(3)})
        with pytest.raises(ValueError, match=r"holds step 299, .* use another folder, or .* with overwrite=True"):
            engine.checkpoint(STATE, step=0)
    with SyncCheckpointEngine(tmp_path, overwrite=True) as engine:
        assert engine.checkpoint(STATE, step=0).result().step == 0


def test_after_going_back_the_newest_step_is_what_counts(tmp_path: Path) -> None:
    run_until(tmp_path, 100)
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        engine.restore({"x": torch.ones(3)})
        engine.checkpoint(STATE, step=60).result()
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        with pytest.raises(ValueError, match="holds step 60"):
            engine.checkpoint(STATE, step=60)
        assert engine.checkpoint(STATE, step=61).result().step == 61


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.__dict__.get("event") == event]


def test_what_training_uses_and_does_not_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loader = nn.Linear(1, 1), ResumableLoader(range(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    with SyncCheckpointEngine(tmp_path / "less", interval=1) as engine:
        engine.attach(optimizer)
        for step, _ in enumerate(loader):
            with engine.step({"model": model, "rng": RNGState()}, step):
                pass
    one, other = told(caplog, "not_in_state")
    assert one.startswith("an AdamW is attached, and is not in the state")
    assert other.startswith("a ResumableLoader was iterated over, and is not in the state")
    assert other.endswith('save {..., "loader": loader}')
    caplog.clear()
    states: list[dict[str, Any]] = [
        {"model": model, "optimizer": optimizer, "loader": loader},
        {"model": model, "all": [optimizer, {"loader": loader}]},
        {"model": model, "optimizer": optimizer.state_dict(), "loader": loader.state_dict()},
        {"mine": Mine()},
    ]
    for number, state in enumerate(states):
        with SyncCheckpointEngine(tmp_path / str(number)) as engine:
            engine.attach(optimizer)
            engine.checkpoint(state, step=0).result()
    assert not told(caplog, "not_in_state")


def test_an_optimizer_without_what_it_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    states: list[dict[str, Any]] = [
        {"optimizer": optimizer, "rng": RNGState()},
        {"all": [optimizer, {"step": 3}]},
        {"model": model, "optimizer": optimizer},
        {"model": model.state_dict(), "optimizer": optimizer},
        {"weights": [*model.parameters()], "optimizer": optimizer},
        {"mine": Mine(), "optimizer": optimizer},
        {"weights": model.weight.detach().numpy(), "optimizer": optimizer},
        {"odd": Combined(), "none": torch.optim.SGD([{"params": []}], 0.1)},
    ]
    said = []
    for number, state in enumerate(states):
        caplog.clear()
        with SyncCheckpointEngine(tmp_path / str(number), interval=1) as engine, engine.step(state, 0):
            pass
        said.append([line for line in told(caplog, "not_in_state") if "what it trains is not" in line])
    assert list(map(len, said)) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert said[0][0].startswith("the AdamW is in the state, and what it trains is not: a resumed run begins with")
    assert said[0][0].endswith('save {..., "model": model}')


class Ten(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


def test_a_plain_loader_in_the_middle_of_a_pass_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(loader: Any, state: dict[str, Any] | None = None, beside: Callable[[], Any] = lambda: None) -> list[str]:
        caplog.clear()
        kept = []
        with SyncCheckpointEngine(tmp_path / uuid.uuid4().hex) as engine:
            for step, _ in enumerate(loader):
                with engine.step({"x": torch.ones(1)} if state is None else state, step):
                    kept.append(beside())
        return told(caplog, "not_in_state")

    def epochs(loader: Any) -> None:
        for _ in loader:
            pass

    plain = DataLoader(Ten())
    (line,) = said(plain)
    assert line.startswith("a DataLoader is in the middle of a pass, and its position is not in the state: a resumed")
    assert line.endswith('save {..., "loader": loader}')
    assert len(said(DataLoader(Ten(), num_workers=1))) == 1
    assert len(said(DataLoader(Ten(), batch_sampler=ResumableSampler(10, batch_size=2)))) == 1
    assert len(said(plain, {"args": {"batch_size": 1}, "weights": {"bn.num_batches_tracked": torch.ones(1)}})) == 1
    resumable = ResumableLoader(Ten())
    (line,) = said(resumable)
    assert line.startswith("a ResumableLoader was iterated over")
    for state in (
        {"data": resumable},
        {"s": resumable.sampler},
        {"mine": Mine()},
        {"train_loader": {"seen": 3}},
        {"progress": {"epoch": 0, "batch": 3}},
        {"sampler_seed": 3},
    ):
        assert not said(plain, state)
    assert not said(range(4))
    assert not said(range(4), beside=lambda: epochs(plain))
    assert not said(range(4), beside=lambda: next(iter(plain)))
    early = iter(plain)
    next(early)
    assert not said(range(4))
    del early

    def look() -> Any:
        begun = iter(plain)
        next(begun)
        return begun

    assert not said(range(4), beside=look)


def test_validation_that_is_left_by_persistent_workers_is_no_pass_of_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(Ten(), num_workers=1, persistent_workers=True)
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(4):
            with engine.step({"x": 1}, step):
                for batch, _ in enumerate(loader):
                    if batch > step:
                        break
    assert not told(caplog, "not_in_state")


def test_an_optimizer_that_trains_nothing_in_the_state_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, extra = nn.Linear(1, 1), nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    optimizer, fresh = torch.optim.AdamW(old.parameters()), torch.optim.AdamW(new.parameters())
    own = torch.optim.AdamW([extra])

    def said(name: str, state: dict[str, Any], *attached: torch.optim.Optimizer) -> list[str]:
        caplog.clear()
        with SyncCheckpointEngine(tmp_path / name) as engine:
            engine.attach(*attached)
            with engine.step(state, 0):
                pass
        return told(caplog, "not_in_state")

    (line,) = said("new model", {"model": new, "optimizer": optimizer}, optimizer)
    assert line.startswith("the AdamW in the state trains none of the parameters in it")
    (line,) = said("old state", {"model": old, "optimizer": optimizer}, fresh)
    assert line.startswith("an AdamW is attached, and trains another model than the state holds, and is not in the")
    assert not said("right", {"model": new, "optimizer": fresh}, fresh)
    assert not said(
        "beside", {"model": new, "optimizer": fresh, "extra": {"of": [extra], "optimizer": own}}, fresh, own
    )
    assert not said("no model", {"optimizer": fresh, "weights": [torch.ones(1)]}, fresh)
    assert not said("unseen", {"model": old, "optimizer": fresh, "mine": Mine()}, fresh)


def test_an_optimizer_with_some_parameters_that_are_not_in_the_state_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3)), nn.Linear(5, 5)
    extra = nn.Parameter(torch.ones(7))
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": other.parameters()}])

    def said(state: dict[str, Any], used: torch.optim.Optimizer = optimizer) -> list[str]:
        caplog.clear()
        with SyncCheckpointEngine(tmp_path / uuid.uuid4().hex) as engine:
            engine.attach(used)
            with engine.step(state | {"optimizer": used}, 0):
                pass
        return told(caplog, "not_in_state")

    (line,) = said({"model": model})
    assert line.startswith("2 parameter(s) of the AdamW in the state are in none of its modules, and are not saved")
    assert not said({"model": model, "other": other})
    assert not said({"models": [model, {"of": other}]})
    assert not said({"model": torch.nn.DataParallel(nn.ModuleList([model, other]))})
    assert not said({"model": model, "other": other.state_dict()})
    assert not said({"model": model, "other": Mine()})
    with_extra = torch.optim.AdamW([*model.parameters(), extra])
    assert len(said({"model": model}, with_extra)) == 1
    assert not said({"model": model, "temperature": extra}, with_extra)
    other.requires_grad_(False)
    assert not said({"model": model})
    model[1].requires_grad_(False)
    assert not said({"model": model, "other": other})
    model[1] = nn.Linear(2, 3)  # after the optimizer was made
    model[0] = nn.Linear(1, 2)
    model.append(nn.Linear(3, 1))
    whole = torch.optim.AdamW(model.parameters())
    model[2] = nn.Linear(3, 1)
    (line,) = said({"model": model}, whole)
    assert line.startswith("2 parameter(s) of the AdamW")


def test_an_attached_optimizer_that_is_not_beside_a_loader_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, loader, validation = nn.Linear(1, 1), ResumableLoader(range(4)), ResumableLoader(range(4))
    optimizer = torch.optim.AdamW(model.parameters())
    kept = loader, loader.sampler, {"mine": Mine()}
    for number, one in enumerate(kept):
        with SyncCheckpointEngine(tmp_path / str(number)) as engine:
            engine.attach(optimizer)
            list(validation)
            engine.checkpoint({"model": model, "loader": one, "rng": RNGState()}, step=0).result()
    lines = told(caplog, "not_in_state")
    assert [line.partition(", and")[0] for line in lines] == ["an AdamW is attached"] * 2


class Combined(torch.optim.Optimizer):
    """Makes the steps of others, and has no parameters of its own."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self.inner)}


@pytest.mark.parametrize("attach", [False, True])
def test_an_optimizer_that_trains_the_model_and_is_forgotten_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, attach: bool
) -> None:
    model, other = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1)
    first, second = (torch.optim.AdamW(part.parameters()) for part in model)
    third, plain = torch.optim.AdamW(other.parameters()), torch.optim.SGD(model[1].parameters(), 0.1)

    def saved(
        name: str, state: dict[str, Any], *steps: Any, inside: bool = True, late: torch.optim.Optimizer | None = None
    ) -> list[str]:
        caplog.clear()
        with SyncCheckpointEngine(tmp_path / name, interval=1) as engine:
            if attach:
                engine.attach(first)
            for step in range(4):
                with engine.step(state, step):
                    (model(torch.ones(1, 1)) + other(torch.ones(1, 1))).sum().backward()
                    first.step()
                    for each in steps if inside else ():
                        (each() if callable(each) else each).step()
                    if late is not None:
                        state["late"] = late
                for each in () if inside else steps:
                    each.step()
        return told(caplog, "not_in_state")

    both = {"model": model, "first": first, "loader": ResumableLoader(range(4))}
    (line,) = saved("forgotten", both, second)
    assert line.startswith("an AdamW trains a model in the state, and is not in the state: what it holds is not saved")
    assert line.endswith('save {..., "optimizer": optimizer}')
    if not attach:
        (line,) = saved("none in the state", {"model": model})
        assert line.startswith("an AdamW trains a model in the state, and is not in the state")
    assert not saved("of other parameters", both, third)
    assert not saved("holds nothing", both, plain)
    assert not saved("outside of steps", both, second, inside=False)
    assert not saved("made anew", both, lambda: torch.optim.AdamW(model[1].parameters()))
    assert not saved("put there late", dict(both), second, late=second)
    assert not saved("there", both | {"all": [{"of": second}]}, second)
    assert not saved("as a dict", both | {"second": second.state_dict()}, second)
    assert not saved("in an object", both | {"mine": Mine()}, second)
    assert not saved("in a wrapper", both | {"second": Combined(second)}, second)
    assert not saved("for each parameter", both | {"many": [second, *[nn.Linear(1, 1)] * 70]}, second)


def test_all_attached_optimizers_that_are_not_in_the_state_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizers = [kind(model.parameters()) for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad)]
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(TypeError, match=r"attach takes the optimizers that train: engine\.attach\(optimizer\)"):
            engine.attach()
        engine.attach(*optimizers)
        engine.checkpoint({"model": model}, step=0).result()
    said = " ".join(told(caplog, "not_in_state"))
    for each in optimizers:
        assert f"{type(each).__name__} is attached, and is not in the state" in said


def test_dropout_without_its_generators_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    states: list[dict[str, Any]] = [
        {"model": model},
        {"model": model, "rng": RNGState()},
        {"model": model, "all": [RNGState()]},
        {"model": model, "torch_rng": torch.get_rng_state()},
        {"model": model, "mine": Mine()},
        {"model": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))},
        {"model": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()},
    ]
    said = []
    for number, state in enumerate(states):
        caplog.clear()
        with SyncCheckpointEngine(tmp_path / str(number)) as engine:
            engine.checkpoint(state, step=0).result()
        said.append(told(caplog, "not_in_state"))
    (text,) = said[0]
    assert text.startswith("a Dropout in the state draws random numbers, and their generators are not in the state")
    assert not any(said[1:])


@pytest.mark.parametrize("model_too", [False, True])
def test_a_state_with_the_optimizer_of_before_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_too: bool
) -> None:
    """In a notebook: the cell of the optimizer was run again, and that of the state was not."""
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    again = torch.optim.AdamW((nn.Linear(2, 2) if model_too else model).parameters())
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.attach(again)
        engine.checkpoint(state, step=0).result()
    said = next(each for each in told(caplog, "not_in_state") if "AdamW is attached" in each)
    assert "the state holds another one: if this one was made anew, make the state anew, too; if not, save {" in said
    assert ("trains another model" in said) is model_too


def test_a_scheduler_that_is_not_in_the_state_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    additions: list[dict[str, Any]] = [{}, {"s": scheduler}, {"s": scheduler.state_dict()}, {"x": Mine()}]
    for number, more in enumerate(additions):
        with SyncCheckpointEngine(tmp_path / str(number)) as engine:
            engine.checkpoint(state | more, step=0).result()
    (line,) = told(caplog, "not_in_state")
    assert line.startswith("a scheduler was made for an optimizer of the state, and is not in the state: what it")
    assert line.endswith('anew; if it makes steps, save {..., "scheduler": scheduler}')


def test_objects_that_an_engine_trained_before_are_told_of_where_nothing_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after Ctrl-C before the first checkpoint, when the cell of a notebook is run again."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    for _ in range(2):
        with SyncCheckpointEngine(tmp_path, interval=100, save_last=False) as engine:
            engine.attach(optimizer)
            assert engine.restore(state) is None
            with engine.step(state, 0):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    (line,) = told(caplog, "trained_before")
    assert "there is no checkpoint to restore, and an engine of this process has trained with 'optimizer'" in line
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state, step=0).result()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.restore(state)
    assert len(told(caplog, "trained_before")) == 1


class Mine:
    """May hold anything."""

    def state_dict(self) -> Any:
        return {"x": 1}

    def load_state_dict(self, state: Any) -> None: ...


def test_steps_that_do_not_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"x": 1}
    with SyncCheckpointEngine(tmp_path / "epochs", interval=1000) as engine:
        for _ in range(3):
            for step in range(2):
                with engine.step(state, step):
                    pass
        assert told(caplog, "step_went_back")[0].startswith("step 0 comes after step 1, without a restore")
        assert len(told(caplog, "step_went_back")) == 1
    caplog.clear()
    with SyncCheckpointEngine(tmp_path / "twice", interval=1000) as engine:
        for _ in range(2):
            with engine.step(state, 7):
                engine.checkpoint(state, step=7)
        assert told(caplog, "step_went_back")[0].startswith("step 7 comes after step 7, without")
    caplog.clear()
    with SyncCheckpointEngine(tmp_path / "smaller") as engine:
        engine.checkpoint(state, step=7).result()
        engine.checkpoint(state, step=3).result()
        assert len(told(caplog, "step_went_back")) == 1
    caplog.clear()
    with SyncCheckpointEngine(tmp_path / "fine", keep_last=9) as engine:
        engine.checkpoint(state, step=0).result()
        for step in range(3):
            with engine.step(state, step):
                engine.checkpoint(state, step=step, name=f"number {step}").result()
            engine.checkpoint(state, step=step).result()
        engine.restore(state, step=1)
        engine.checkpoint(state, step=2).result()
    with SyncCheckpointEngine(tmp_path / "fine", overwrite=True) as engine:
        for step in (5, 4, 4):
            engine.checkpoint(state, step=step).result()
    assert not told(caplog, "step_went_back")


def test_the_folder_above_stores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        with SyncCheckpointEngine(tmp_path / "runs" / name) as engine:
            engine.checkpoint(STATE, step=1).result()
    assert not told(caplog, "stores_below")
    with SyncCheckpointEngine(tmp_path / "runs") as engine:
        (said,) = told(caplog, "stores_below")
        assert "runs holds no checkpoint, but has stores in its folders: a, b; to go on with one of them" in said
        engine.checkpoint(STATE, step=1).result()
    with SyncCheckpointEngine(tmp_path / "runs"):
        assert len(told(caplog, "stores_below")) == 1


def test_stores_with_the_names_of_checkpoints_of_other_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("epoch=3.ckpt", "checkpoint-20"):
        with SyncCheckpointEngine(tmp_path / name) as engine:
            engine.checkpoint(STATE, step=1).result()
    with pytest.raises(NoCheckpointError, match=r"there are stores in it: [^;]*$") as raised:
        load_sync(tmp_path)
    assert "pccheck import" not in str(raised.value)
    (tmp_path / "old.pt").touch()
    with pytest.raises(NoCheckpointError, match=r"; there is old\.pt in it: `pccheck import` makes"):
        load_sync(tmp_path)
    with SyncCheckpointEngine(tmp_path):
        (line,) = told(caplog, "others_here")
    assert "(old.pt)" in line


@pytest.mark.parametrize("name", ["old.pt", "epoch=3.ckpt", "checkpoint-20", ".metadata"])
def test_a_folder_with_checkpoints_of_other_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "train.log").write_text("a log and a config beside a store are fine")
    (tmp_path / "config.yaml").touch()
    with SyncCheckpointEngine(tmp_path, overwrite=True), SyncCheckpointEngine(tmp_path / "other"):
        assert not told(caplog, "others_here")
    (tmp_path / name).mkdir() if name == "checkpoint-20" else (tmp_path / name).touch()
    with SyncCheckpointEngine(tmp_path) as engine:
        (said,) = told(caplog, "others_here")
        source = f"{tmp_path} {tmp_path} --from dcp" if name == ".metadata" else f"{tmp_path / name} {tmp_path}"
        assert said.endswith(f"and `pccheck import {source}`")
        with pytest.raises(NoCheckpointError, match=f"holds no checkpoint; there is {name} in it: `pccheck import`"):
            load_sync(tmp_path)
        engine.checkpoint(STATE, step=1).result()
    with SyncCheckpointEngine(tmp_path):
        assert len(told(caplog, "others_here")) == 1


def test_a_step_that_there_is_not_names_those_that_there_are(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=8) as engine:
        for step in range(8):
            engine.checkpoint(STATE, step=step, name="best" if step == 3 else None).result()
        there = "; there are steps 7, 6, 5, 4, 3, ...$"
        calls: list[Callable[[], Any]] = [
            lambda: engine.restore({"x": torch.ones(3)}, step=9),
            lambda: engine.pin(step=9),
            lambda: engine.remove(step=9),
            lambda: load_sync(tmp_path, step=9),
        ]
        for call in calls:
            with pytest.raises(NoCheckpointError, match=there):
                call()
        with pytest.raises(NoCheckpointError, match=r"named 'worst'; those with names are 'best'$"):
            engine.restore({"x": torch.ones(3)}, name="worst")


async def awaited(function: Callable[..., Any], *arguments: Any) -> Any:
    return await function(*arguments)


def test_damage_names_store_and_step_and_a_fall_back_the_users_line(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(STATE, step=step).result()
    state = {"x": torch.ones(3)}
    for slot, named in (("slot-001", 2), ("slot-000", 1)):
        (tmp_path / slot).write_bytes(b"damaged")
        with SyncCheckpointEngine(tmp_path, keep_last=2) as engine, pytest.raises(DamagedError) as raised:
            engine.restore(state, step=named)
        assert str(raised.value).startswith(f"{tmp_path}, checkpoint of step {named}: ")
        assert "without a step and a name the newest whole one is taken" in str(raised.value)
        if named == 2:
            with SyncCheckpointEngine(tmp_path, keep_last=2) as engine, pytest.warns(RuntimeWarning) as warned:
                engine.restore(state)
            with pytest.warns(RuntimeWarning) as loading:
                load_sync(tmp_path)
            with pytest.warns(RuntimeWarning) as awaiting:
                asyncio.run(awaited(load, tmp_path))
            for each in (warned, loading, awaiting):
                assert [one.filename for one in each] == [__file__]
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine, pytest.warns(RuntimeWarning):  # noqa: SIM117
        with pytest.raises(DamagedError, match="no other one can be read"):
            engine.restore(state)


def test_a_locked_store_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SyncCheckpointEngine(tmp_path).open()
    monkeypatch.setattr("__main__.my_engine", engine, raising=False)
    with pytest.raises(StoreLockedError, match=r": close it first: my_engine\.close\(\) \(opening"):
        SyncCheckpointEngine(tmp_path).open()
    monkeypatch.delattr("__main__.my_engine")
    monkeypatch.setattr("__main__.Out", {2: "text", 3: engine}, raising=False)  # of a notebook
    with pytest.raises(StoreLockedError, match=r": close it first: Out\[3\]\.close\(\) \(opening"):
        SyncCheckpointEngine(tmp_path).open()
    engine.close()

    async def main() -> None:
        async with CheckpointEngine(tmp_path) as other:
            monkeypatch.setattr("__main__.my_engine", other, raising=False)
            with pytest.raises(StoreLockedError, match=r": close it first: await my_engine\.close\(\) \("):
                SyncCheckpointEngine(tmp_path).open()

    asyncio.run(main())


def test_a_path_that_is_none_is_named(tmp_path: Path) -> None:
    path: Any = None  # of an option that was not given
    with pytest.raises(TypeError, match=r"the path of the store is a folder \(str or Path\), not None"):
        SyncCheckpointEngine(path)


def test_a_loop_behind_the_block_of_its_engine_is_told_so(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        pass
    with (
        pytest.raises(ClosedError, match="is closed: steps and checkpoints belong inside its block"),
        engine.step({}, 0),
    ):
        pass


def test_a_method_in_the_place_of_its_object_is_named(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(
            UnsupportedStateError, match=r"model: .*put the Linear itself there, not its method state_dict$"
        ):
            engine.checkpoint({"model": nn.Linear(1, 1).state_dict}, step=0)
        with pytest.raises(UnsupportedStateError, match="code is never saved"):
            engine.checkpoint({"work": tmp_path.exists}, step=0)


def test_an_engine_that_is_not_open_says_how_to_open_it(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path)
    with pytest.raises(
        ClosedError, match=r"not open yet; use it as a context manager \(`with`\), or call `engine.open"
    ):
        engine.checkpoint(STATE, step=1)

    async def use() -> None:
        await CheckpointEngine(tmp_path).checkpoint(STATE, step=1)

    with pytest.raises(ClosedError, match=r"\(`async with`\), or write `await engine.open\(\)`$"):
        asyncio.run(use())
