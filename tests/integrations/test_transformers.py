"""Hugging Face's Trainer, the real one, killed and started again by the same command."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pkgutil
import shutil
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import Keep, MemoryTier, StateMismatchError, list_checkpoints, load_sync, open_checkpoint, stores
from pccheck_async.errors import ClosedError
from pccheck_async.store import Store, Written
from tests.support.children import fork
from tests.support.killed_training import Journal, Life, agree, bits, live
from tests.support.lazily import Lazily, need_framework
from tests.support.warm import run_warm

need_framework("transformers")
transformers, kit = Lazily("transformers"), Lazily("tests.support.hf_training")
adapter = Lazily("pccheck_async.integrations.transformers")

MOMENTS = (
    "loss 0.2",  # before anything was saved
    "loss 2.2",  # in the last, partial window of an epoch
    "step 3",  # after it, before the evaluation
    "predicted 3#2",  # in the evaluation
    "evaluation 3",  # after it, before its save
    "epoch begins 3",
    "loss 3.1",  # on the other side of an epoch's end
    "captured 5",
    "admitted 6",
    "loss 8.3",  # in the last window of all
)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "normed": {"model": "normed", "interval": 2, "options": {"dataloader_num_workers": 2}},
    "bert": {"model": "bert", "options": {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 3}},
    "llama-bf16": {"model": "llama", "options": {"bf16": True, "dataloader_num_workers": 2}},
}


def killed(training: Callable[[Path], Any], folder: Path, *moments: str) -> list[Life]:
    """Return the lives of one run that is killed at these moments."""
    (folder / "cut").mkdir()
    work = training(folder / "cut")
    return [live(work, folder / "journal", moment) for moment in (*moments, None)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Life]:
    """Return what the uninterrupted run of a configuration computes."""
    known: dict[str, Life] = {}

    def run(name: str) -> Life:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = live(kit.Training(folder, saved=False, **CONFIGURATIONS[name]), folder / "journal")
        return known[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("gpt2", MOMENTS[:1] + MOMENTS[2:3]),
        pytest.param("gpt2", (MOMENTS[1], MOMENTS[7]), marks=pytest.mark.campaign),
        pytest.param("normed", (MOMENTS[4],), marks=pytest.mark.campaign),
        ("bert", (MOMENTS[5],)),
        pytest.param("llama-bf16", (MOMENTS[9],), marks=pytest.mark.campaign),
    ],
)
def test_killed_and_resumed(name: str, moments: tuple[str, ...], whole: Callable[[str], Life], tmp_path: Path) -> None:
    lives = killed(lambda folder: kit.Training(folder, **CONFIGURATIONS[name]), tmp_path, *moments)
    agree(whole(name), lives)


@pytest.mark.slow
def test_killed_and_resumed_from_memory(whole: Callable[[str], Life], tmp_path: Path, shared_memory: Path) -> None:
    settings = {"interval": 1000, "settings": {"memory": MemoryTier(interval=1, path=str(shared_memory))}}
    lives = killed(lambda folder: kit.Training(folder, **settings), tmp_path, "in_memory 5")
    agree(whole("gpt2"), lives)
    assert "loss 0.0" not in lives[1].keys
    assert len(list_checkpoints(tmp_path / "cut" / "store")) == 1  # written when training ended


@pytest.mark.campaign
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_killed_at_every_moment(name: str, workers: int, moment: str, tmp_path: Path) -> None:
    options = CONFIGURATIONS[name].get("options", {}) | {"dataloader_num_workers": workers}
    configuration = CONFIGURATIONS[name] | {"options": options}
    (tmp_path / "whole").mkdir()
    whole = live(kit.Training(tmp_path / "whole", saved=False, **configuration), tmp_path / "journal")
    if name == "bert":  # it evaluates every two steps
        moment = {"predicted 3#2": "predicted 4#2", "evaluation 3": "evaluation 4"}.get(moment, moment)
    if name == "normed" and moment == "captured 5":  # it saves every two
        moment = "captured 6"
    agree(whole, killed(lambda folder: kit.Training(folder, **configuration), tmp_path, moment))


# -- what is relied on


def test_the_methods_that_are_wrapped_are_there() -> None:
    for name, parameters in adapter.METHODS.items():
        found = [*inspect.signature(getattr(transformers.Trainer, name)).parameters]
        assert tuple(found) == ("self", *parameters), name


def test_what_is_read_of_the_trainer_is_there(tmp_path: Path) -> None:
    trainer, _ = kit.Training(tmp_path, saved=False, options={"max_steps": 1}).make(Journal(tmp_path / "journal"))
    trainer.train()
    assert [name for name in (*adapter.ATTRIBUTES, "_total_loss_scalar") if not hasattr(trainer, name)] == []
    others = {
        "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
        "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
        "stateful_callbacks",
    }  # fmt: skip
    assert {field.name for field in fields(trainer.state)} == {*adapter.PROGRESS} | others


# -- data


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_resumable_loader_repeats_the_masks_of_a_random_collator(workers: int, tmp_path: Path) -> None:
    def training(folder: Path, **more: Any) -> Any:
        options = {"dataloader_num_workers": workers}
        return kit.Training(folder, model="bert", trainer=kit.Resumable, options=options, **more)

    whole = live(training(tmp_path, saved=False), tmp_path / "journal")
    agree(whole, killed(training, tmp_path, "loss 4.3"))


@pytest.mark.slow
def test_samplers_that_draw_from_the_global_generator_repeat_their_order(tmp_path: Path) -> None:
    options = {"train_sampling_strategy": "group_by_length"}
    whole = live(kit.Training(tmp_path, saved=False, options=options), tmp_path / "journal")
    agree(whole, killed(lambda folder: kit.Training(folder, options=options), tmp_path, "loss 4.3"))


# -- what a run can have beside the defaults


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_are_saved_without_the_frozen_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return peft.get_peft_model(
            kit.MODELS["gpt2"](), peft.LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.1, fan_in_fan_out=True)
        )

    whole = live(kit.Training(tmp_path, model=adapted, saved=False), tmp_path / "journal")
    agree(whole, killed(lambda folder: kit.Training(folder, model=adapted), tmp_path, "loss 4.2"))
    store = tmp_path / "cut" / "store"
    with open_checkpoint(store) as checkpoint:
        assert {path.split(".")[0] for path in checkpoint} >= {"model", "frozen"}
        assert not [path for path in checkpoint if path.startswith("model") and "lora" not in path]
    other = kit.Training(tmp_path / "cut", model=lambda: adapted(1)).make(Journal(tmp_path / "none"))[0]
    before = bits(other.model.state_dict())
    with pytest.raises(StateMismatchError, match="frozen"):
        other.train()
    assert bits(other.model.state_dict()) == before


@pytest.mark.slow
def test_the_best_model_and_patience_are_resumed_beside_the_trainers_own_saving(tmp_path: Path) -> None:
    """Early stopping ends the run at step 6; the best model is loaded after the last save."""
    options = {
        "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "loss",
        "greater_is_better": True, "num_train_epochs": 6, "learning_rate": 0.05,
    }  # fmt: skip

    def training(folder: Path, **more: Any) -> Any:
        return kit.Training(folder, options=options, callbacks=lambda: [transformers.EarlyStoppingCallback(2)], **more)

    (tmp_path / "whole").mkdir()
    whole = live(training(tmp_path / "whole", saved=False), tmp_path / "journal")
    assert "log 18" not in whole.keys, "nothing was stopped early"
    lives = killed(training, tmp_path, "loss 4.1", "captured 6")
    agree(whole, lives)
    assert sorted(path.name for path in (tmp_path / "cut" / "output").iterdir())[:2] == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.slow
def test_a_folder_of_the_trainers_own_wins_but_replaces_no_later_step(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4}
    whole = live(kit.Training(tmp_path, options=options), tmp_path / "journal")
    again = kit.Training(tmp_path, options=options)
    with pytest.raises(ValueError, match=r"at step 4, and .* holds step 9: leave resume_from_checkpoint out"):
        again(Journal(tmp_path / "journal"), resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-4"))
    assert [info.step for info in list_checkpoints(tmp_path / "store")] == [9]
    shutil.rmtree(tmp_path / "store")
    life = live(
        lambda journal: again(journal, resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-4")),
        tmp_path / "journal",
    )
    assert life.keys[0] == "loss 4.1"
    assert [line for line in life.lines if "loss" in line[0]] == [
        line for line in whole.lines if line[0].startswith("loss") and int(line[0][5]) >= 4
    ]
    assert [info.step for info in list_checkpoints(tmp_path / "store")] == [9]


@pytest.mark.slow
def test_a_best_model_that_is_gone_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {
        "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "loss",
        "greater_is_better": True, "num_train_epochs": 2,
    }  # fmt: skip
    live(kit.Training(tmp_path, options=options), tmp_path / "journal")
    shutil.rmtree(tmp_path / "output")
    caplog.clear()
    trainer, callback = kit.Training(tmp_path, options=options | {"num_train_epochs": 3}).make(
        Journal(tmp_path / "more")
    )
    assert callback is not None
    trainer.train()
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "best_model_gone"]
    assert "the best model, of step " in line.getMessage()
    assert "which is gone: load_best_model_at_end leaves the last model, unless a better one" in line.getMessage()


@pytest.mark.slow
def test_the_same_step_from_a_folder_of_the_trainers_own_is_nothing_to_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    live(kit.Training(tmp_path, options=options), tmp_path / "journal")
    assert [info.step for info in list_checkpoints(tmp_path / "store")] == [4]
    caplog.clear()
    trainer, callback = kit.Training(tmp_path, options=options | {"max_steps": 6}).make(Journal(tmp_path / "more"))
    assert callback is not None
    trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-4"))
    assert [info.step for info in list_checkpoints(tmp_path / "store")] == [6]
    assert not [record for record in caplog.records if getattr(record, "event", "") == "unrestored"]


# -- faults


@pytest.mark.slow
def test_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    training = kit.Training(tmp_path, options={"max_steps": 4})
    trainer, callback = training.make(Journal(tmp_path / "journal"))
    assert callback is not None
    trainer.evaluate()
    trainer.train()
    trained = bits(trainer.model.state_dict())
    trainer.evaluate()
    assert trainer.train().global_step == 4
    assert callback.restored is not None
    assert callback.restored.step == 4
    assert bits(trainer.model.state_dict()) == trained
    again, callback = training.make(Journal(tmp_path / "journal"))
    again.train()
    assert bits(again.model.state_dict()) == trained
    longer, _ = kit.Training(tmp_path, options={"max_steps": 6}).make(Journal(tmp_path / "journal"))
    assert longer.train().global_step == 6


def stops_at(step: int) -> Any:
    """Return a callback that tells training to stop, in the middle of an epoch for example."""

    def on_step_end(_: Any, args: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_training_stop |= state.global_step == step

    return type("Stops", (transformers.TrainerCallback,), {"on_step_end": on_step_end})()


BEST = {"metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 0.05}
EARLY: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], int, str]] = {
    "epoch": (lambda: [transformers.EarlyStoppingCallback(2)], BEST, 9, "EarlyStoppingCallback: 2 evaluations"),
    "steps": (
        lambda: [transformers.EarlyStoppingCallback(1)],
        BEST | {"eval_strategy": "steps", "eval_steps": 2},
        4,
        "EarlyStoppingCallback: 1 evaluations",
    ),
    "callback": (lambda: [stops_at(4)], {}, 4, "a callback set should_training_stop"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EARLY)
def test_a_training_that_was_told_to_stop_trains_no_more(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks, options, end, why = EARLY[kind]

    def start(epochs: int = 6, **settings: Any) -> tuple[int, list[int]]:
        caplog.clear()
        journal = tmp_path / "journal"
        journal.unlink(missing_ok=True)
        given = options | {"num_train_epochs": epochs}
        trainer, _ = kit.Training(tmp_path, options=given, callbacks=callbacks, settings=settings).make(
            Journal(journal)
        )
        reached = trainer.train().global_step
        said = [json.loads(line)[0] for line in journal.read_text().splitlines()] if journal.exists() else []
        return reached, [key for key in said if key.startswith("loss")]

    assert start()[0] == end
    assert not caplog.records
    for _ in range(2):
        assert start() == (end, [])
        assert f"told to stop after step {end} ({why}" in caplog.text
    assert start(5) == (end, [])  # less is no more
    assert start(7)[0] > end
    assert not caplog.records


@pytest.mark.slow
def test_a_training_goes_on_where_that_is_asked_for_or_a_signal_had_stopped_it(tmp_path: Path) -> None:
    def stopped_at(*callbacks: Any, **settings: Any) -> int:
        training = kit.Training(
            tmp_path, callbacks=lambda: [*callbacks], settings=settings, options={"enable_jit_checkpoint": True}
        )
        trainer, _ = training.make(Journal(tmp_path / "journal"))
        jit = next(each for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))

        def on_substep_end(_: Any, args: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step == 2:
                jit.jit_manager._enable_checkpoint()  # what a SIGTERM does some seconds later

        trainer.add_callback(type("Signals", (transformers.TrainerCallback,), {"on_substep_end": on_substep_end})())
        return int(trainer.train().global_step)

    assert stopped_at() == 3  # with the step that is underway
    assert stopped_at(stops_at(5)) == 5
    assert stopped_at() == 5
    assert stopped_at(resume_stopped=True) == 9


@pytest.mark.slow
def test_other_arguments_than_those_of_the_checkpoint_are_named(tmp_path: Path) -> None:
    kit.Training(tmp_path, options={"max_steps": 3})(Journal(tmp_path / "journal"))
    other = {"max_steps": 4, "per_device_train_batch_size": 3, "logging_steps": 7}
    trainer, _ = kit.Training(tmp_path, options=other).make(Journal(tmp_path / "journal"))
    transformers.logging.set_verbosity_warning()  # until the next Trainer sets its own
    with Lazily("transformers.testing_utils").CaptureLogger(transformers.logging.get_logger()) as log:
        trainer.train()
    assert "per_device_train_batch_size: 3 (from args) != " in log.out
    assert "logging_steps: 7 (from args) != " in log.out


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["Noting", "Resumable"])
def test_other_sizes_are_refused_inside_an_epoch_and_taken_at_its_end(trainer: str, tmp_path: Path) -> None:
    def train(steps: int, **options: Any) -> int:
        options |= {"max_steps": steps, "eval_strategy": "no"}
        made, _ = kit.Training(tmp_path, options=options, trainer=getattr(kit, trainer)).make(
            Journal(tmp_path / "journal")
        )
        return int(made.train().global_step)

    assert train(2) == 2
    for options in [{"gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 4}]:
        if trainer == "Resumable" and "per_device_train_batch_size" in options:
            continue  # it has a size of its own
        with pytest.raises(StateMismatchError) as caught:
            train(4, **options)
        assert "saved after 2 steps of epoch 0, with 2 samples in a batch of all ranks, gradient_acc" in str(
            caught.value
        )
        assert "give the same again until the epoch has ended" in str(caught.value)
    if trainer == "Noting":  # the same samples in each step
        assert train(3, gradient_accumulation_steps=2, per_device_train_batch_size=4) == 3
    assert train(3) == 3
    assert train(9, gradient_accumulation_steps=2) == 9  # an epoch of six steps


@pytest.mark.slow
@pytest.mark.parametrize(("window", "last"), [(2, 15), (8, 7), (4, 9)])
def test_other_sizes_at_the_end_of_an_epoch_leave_the_number_of_epochs(window: int, last: int, tmp_path: Path) -> None:
    def train(epochs: int, window: int) -> tuple[int, float]:
        options = {"num_train_epochs": epochs, "gradient_accumulation_steps": window, "eval_strategy": "no"}
        made, _ = kit.Training(tmp_path, options=options).make(Journal(tmp_path / "journal"))
        made.train()
        return made.state.global_step, made.state.epoch

    assert train(1, 4) == (3, 1)
    assert train(3, window) == (last, 3)


@pytest.mark.slow
def test_a_checkpoint_without_the_sizes_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "pccheck_async.integrations.transformers._Progress.state_dict"
    whole = pkgutil.resolve_name(name)
    monkeypatch.setattr(name, lambda self: {key: value for key, value in whole(self).items() if key != "sizes"})
    kit.Training(tmp_path, options={"max_steps": 2})(Journal(tmp_path / "journal"))
    monkeypatch.undo()
    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    trainer, _ = kit.Training(tmp_path, options=options).make(Journal(tmp_path / "journal"))
    assert trainer.train().global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_train_begin", RuntimeError),
        ("on_step_begin", KeyboardInterrupt),
        ("on_step_end", RuntimeError),
        ("on_evaluate", KeyboardInterrupt),
        ("on_epoch_end", RuntimeError),
    ],
)
def test_an_exception_in_a_hook_closes_the_store(hook: str, error: type[BaseException], tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error("by the test")

    trainer, callback = kit.Training(tmp_path).make(Journal(tmp_path / "journal"))
    assert callback is not None
    trainer.add_callback(type("Failing", (transformers.TrainerCallback,), {hook: fail})())
    with pytest.raises(error, match="by the test"):
        trainer.train()
    with pytest.raises(ClosedError):
        callback.engine.checkpoint({}, step=1)
    trainer.pop_callback(trainer.callback_handler.callbacks[-1])
    assert trainer.train().global_step == 9
    assert list_checkpoints(tmp_path / "store")[0].step == 9


@pytest.mark.slow
@pytest.mark.parametrize("change", ["another model", "a renamed layer", "another width"])
def test_another_model_is_named_and_nothing_is_changed(change: str, tmp_path: Path) -> None:
    kit.Training(tmp_path, model="normed", options={"max_steps": 2})(Journal(tmp_path / "journal"))

    def changed() -> Any:
        model: Any = kit.MODELS["gpt2" if change == "another model" else "normed"]()
        if change == "a renamed layer":
            model.tail, model.head = model.head, None
            model.forward = lambda input_ids, labels: {"loss": model.tail(model.embedding(input_ids)).mean()}
        elif change == "another width":
            model.body = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 16))
        return model

    trainer, _ = kit.Training(tmp_path, model=changed, options={"max_steps": 2}).make(Journal(tmp_path / "journal"))
    before = bits(trainer.model.state_dict())
    with pytest.raises(StateMismatchError) as caught:
        trainer.train()
    said = str(caught.value)
    assert {"another model": "transformer", "a renamed layer": "tail", "another width": "body"}[change] in said
    assert "strict" not in said
    assert (
        "go on with what was saved, or give PCcheckCallback another folder to begin anew; the weights alone: "
        f"load_sync('{tmp_path}/store', keys=[\"model\"]). "
    ) in said
    assert load_sync(tmp_path / "store", keys=["model"])["model"].keys() == kit.Normed().state_dict().keys()
    assert bits(trainer.model.state_dict()) == before


@pytest.mark.slow
def test_the_last_step_is_saved_though_its_own_save_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Store.commit

    async def slow(self: Store, written: Written) -> bool:
        await asyncio.sleep(1)
        return await commit(self, written)

    monkeypatch.setattr(Store, "commit", slow)
    training = kit.Training(tmp_path, settings={"max_in_flight": 1, "on_busy": "skip"}, options={"eval_strategy": "no"})
    trainer, callback = training.make(Journal(tmp_path / "journal"))
    trainer.train()
    assert callback is not None
    assert callback.engine.statistics().skipped
    assert list_checkpoints(tmp_path / "store")[0].step == 9


def test_wrong_uses_are_told(tmp_path: Path) -> None:
    trainer, callback = kit.Training(tmp_path).make(Journal(tmp_path / "journal"))
    assert callback is not None
    with pytest.raises(RuntimeError, match="attach one"):
        callback.attach(trainer)
    with pytest.raises(RuntimeError, match="attach one"):
        adapter.PCcheckCallback(tmp_path / "other").attach(trainer)
    with pytest.raises(TypeError, match=r"lacks .*_inner_training_loop"):
        adapter.PCcheckCallback(tmp_path / "other").attach(object())
    with pytest.raises(TypeError, match="interval"):
        adapter.PCcheckCallback(tmp_path / "other", intervall=3)
    unattached, _ = kit.Training(tmp_path, saved=False).make(Journal(tmp_path / "journal"))
    unattached.add_callback(adapter.PCcheckCallback(tmp_path / "other"))
    with pytest.raises(RuntimeError, match="attach"):
        unattached.train()
    finding, _ = kit.Training(tmp_path, saved=False, options={"auto_find_batch_size": True}).make(
        Journal(tmp_path / "j")
    )
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        adapter.PCcheckCallback(tmp_path / "other").attach(finding)


@pytest.mark.slow
def test_without_transformers_one_line_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "for name in ('transformers', 'versions'): del sys.modules[f'pccheck_async.integrations.{name}']\n"
        "import importlib.metadata as metadata; version = metadata.version\n"
        "metadata.version = lambda name: version('no ' * (name == 'transformers') + name)\n"
        "try: import pccheck_async.integrations.transformers\n"
        "except ImportError as error: print(error)"
    )
    adapter.METHODS  # noqa: B018 - imports it
    said = run_warm("-c", program, text=True).stdout
    assert said.count("\n") == 1
    assert 'pip install "pccheck-async[transformers]"' in said


@pytest.mark.slow
def test_a_signal_saves_the_step_underway(tmp_path: Path) -> None:
    class Preempted(transformers.TrainerCallback):  # type: ignore[name-defined]
        def __init__(self, callback: Any) -> None:
            self.callback = callback

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.callback.engine.on_preemption()

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer, callback = kit.Training(tmp_path, interval=100).make(Journal(tmp_path / "journal"))
    assert callback is not None
    trainer.add_callback(Preempted(callback))
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 128 + signal.SIGTERM
    assert list_checkpoints(tmp_path / "store")[0].step == 5


def test_logs_have_what_the_engine_did_and_results_have_not(tmp_path: Path) -> None:
    logs: list[dict[str, Any]] = []

    class Listening(transformers.TrainerCallback):  # type: ignore[name-defined]
        def on_log(self, *_: Any, **named: Any) -> None:
            logs.append(named["logs"])

    trainer, _ = kit.Training(tmp_path, options={"max_steps": 4, "logging_steps": 1, "eval_strategy": "no"}).make(
        Journal(tmp_path / "journal")
    )
    trainer.add_callback(Listening())
    result = trainer.train()
    assert [each["checkpoint/stall_seconds"] >= 0 for each in logs if "loss" in each] == [True] * 4
    assert not [name for name in result.metrics if name.startswith("checkpoint/")]
    assert not [name for each in trainer.state.log_history for name in each if name.startswith("checkpoint/")]
    assert list_checkpoints(tmp_path / "store")[0].metadata["loss"] == trainer.state.log_history[-2]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("measures", [0, 40])
def test_an_evaluation_leaves_its_metrics_in_the_metadata_and_the_best_is_kept(measures: int, tmp_path: Path) -> None:
    def measured(_: Any) -> dict[str, Any]:
        many = {f"a_metric_with_a_long_name_{number:02}": float(number) for number in range(measures)}
        return {**many, "words": "no number", "z": 0.5}

    def train(name: str, interval: int, keep: Any) -> tuple[dict[int, Any], dict[int, float]]:
        settings = {"keep_last": 20, "keep": keep}
        training = kit.Training(
            tmp_path / name, interval=interval, settings=settings, more={"compute_metrics": measured}
        )
        trainer, _ = training.make(Journal(tmp_path / "journal"))
        trainer.train()
        losses = {each["step"]: each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each}
        return {info.step: info.metadata for info in list_checkpoints(tmp_path / name / "store")}, losses

    found, losses = train("every", 1, Keep(best=("eval_z", 1, "min")))
    assert [*losses] == [3, 6, 9]
    assert sorted(step for step, metadata in found.items() if "eval_z" in metadata) == [3, 6, 9]
    if not measures:
        assert found[9].keys() == {"epoch", "eval_loss", "eval_z"}
        assert {step: found[step]["eval_loss"] for step in losses} == losses
        assert found[2].keys() == {"epoch", "loss"}
        found, losses = train("best", 100, Keep(best=("eval_loss", 1, "min")))  # such a step is saved
        assert found.keys() >= {min(losses, key=lambda step: losses[step])}


@pytest.mark.slow
def test_a_training_that_goes_on_says_so_once(tmp_path: Path) -> None:
    said = []
    for steps in (2, 3, 3):
        options = {"max_steps": steps, "eval_strategy": "no"}
        trainer, _ = kit.Training(tmp_path, options=options).make(Journal(tmp_path / "journal"))
        transformers.logging.set_verbosity_warning()  # Hugging Face's default; until the next Trainer sets its own
        with Lazily("transformers.testing_utils").CaptureLogger(transformers.logging.get_logger()) as log:
            trainer.train()
        said += [line for line in log.out.splitlines() if "PCcheckCallback" in line] or ["-"]
    store = tmp_path / "store"
    assert said == [
        "-",
        f"PCcheckCallback: training goes on after step 2, from {store}",
        f"PCcheckCallback: nothing is left to train after step 3, from {store}",
    ]


# -- ranks


def live_ranks(training: Any, folder: Path, die_at: tuple[int, str] | None = None, *, world: int = 2) -> list[Life]:
    """Run the training on some ranks, as torchrun would; where one is to die, kill the others when that is dead."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]

    def work(rank: int) -> None:
        with (folder / f"output-{rank}").open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"}
        Lazily("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
        moment = die_at[1] if die_at is not None and die_at[0] == rank else None
        try:
            training(Journal(folder / f"journal-{rank}", moment))
        except BaseException:  # noqa: BLE001 - a forked child must not return into the test runner
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    for rank in range(world):
        (folder / f"journal-{rank}").unlink(missing_ok=True)
    children = [fork(partial(work, rank)) for rank in range(world)]
    first = children[0 if die_at is None else die_at[0]]
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    said = "".join((folder / f"output-{rank}").read_text() for rank in range(world))
    assert code == (0 if die_at is None else -signal.SIGKILL), said
    for other in children:
        if other == first:
            continue
        if die_at is not None:
            os.kill(other, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
        assert code in ((0,) if die_at is None else (1, -signal.SIGKILL)), said
    lines = [
        [json.loads(line) for line in (folder / f"journal-{rank}").read_text().splitlines()] for rank in range(world)
    ]
    return [Life(die_at is not None, [(key, value) for key, value in each]) for each in lines]


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_although_the_losses_of_the_trainer_differ_by_rank(tmp_path: Path) -> None:
    options = {"logging_steps": 100, "eval_strategy": "no"}
    live_ranks(kit.Training(tmp_path, options=options | {"max_steps": 4}), tmp_path)  # two epochs
    assert "trainer.unlogged._tr_loss" in stores.describe(tmp_path / "store").differing
    (life,) = live_ranks(kit.Training(tmp_path, options=options | {"max_steps": 5}), tmp_path, world=1)
    assert life.keys == ["loss 4.1", "loss 4.2", "loss 4.3", "loss 4.4", "final"]
    assert list_checkpoints(tmp_path / "store")[0].step == 5


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "moment", ["loss 1.1", "evaluation 2", "epoch begins 2", "captured 3", "admitted 4", "loss 5.2"]
)
def test_one_of_two_ranks_is_killed(rank: int, moment: str, tmp_path: Path) -> None:
    """Each rank has 6 batches of an epoch: windows of 4 and 2."""
    whole = live_ranks(kit.Training(tmp_path / "whole", model="normed", saved=False), tmp_path / "whole")
    training = kit.Training(tmp_path / "cut", model="normed")
    lives = [live_ranks(training, tmp_path / "cut", where) for where in ((rank, moment), None)]
    for number in range(2):
        agree(whole[number], [life[number] for life in lives])
