"""Hugging Face's Trainer, the real one, killed and started again by the same command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import Trainer

from pccheck_async.integrations.transformers import ATTRIBUTES, METHODS, PROGRESS
from tests.support.hf_training import MODELS, Training
from tests.support.killed_training import Journal, Life, agree, live

MOMENTS = (
    "loss 0.2",  # before anything was saved
    "loss 2.2",  # in the last, partial window of an epoch
    "step 3",  # after it, before the evaluation
    "predicted 3#2",  # in the evaluation
    "evaluation 3",  # after it, before its save
    "epoch begins 3",
    "loss 3.1",  # on the other side of an epoch's end
    "captured 5",
    "durable 6",
    "loss 8.3",  # in the last window of all
)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "normed": {"model": MODELS["normed"], "interval": 2, "options": {"dataloader_num_workers": 2}},
    "bert": {"model": MODELS["bert"], "options": {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 3}},
    "llama-bf16": {"model": MODELS["llama"], "options": {"bf16": True, "dataloader_num_workers": 2}},
}


def killed(training: Callable[[Path], Training], folder: Path, *moments: str) -> list[Life]:
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
            known[name] = live(Training(folder, saved=False, **CONFIGURATIONS[name]), folder / "journal")
        return known[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("gpt2", MOMENTS[:1] + MOMENTS[2:3]),
        ("gpt2", (MOMENTS[1], MOMENTS[7])),
        ("normed", (MOMENTS[4], MOMENTS[9])),
        ("bert", (MOMENTS[5],)),
        ("llama-bf16", (MOMENTS[8],)),
    ],
)
def test_killed_and_resumed(name: str, moments: tuple[str, ...], whole: Callable[[str], Life], tmp_path: Path) -> None:
    lives = killed(lambda folder: Training(folder, **CONFIGURATIONS[name]), tmp_path, *moments)
    agree(whole(name), lives)


@pytest.mark.campaign
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_killed_at_every_moment(name: str, workers: int, moment: str, tmp_path: Path) -> None:
    options = CONFIGURATIONS[name].get("options", {}) | {"dataloader_num_workers": workers}
    configuration = CONFIGURATIONS[name] | {"options": options}
    (tmp_path / "whole").mkdir()
    whole = live(Training(tmp_path / "whole", saved=False, **configuration), tmp_path / "journal")
    if name == "bert":  # it evaluates every two steps
        moment = {"predicted 3#2": "predicted 4#2", "evaluation 3": "evaluation 4"}.get(moment, moment)
    agree(whole, killed(lambda folder: Training(folder, **configuration), tmp_path, moment))


# -- what is relied on


def test_the_methods_that_are_wrapped_are_there() -> None:
    for name, parameters in METHODS.items():
        found = [*inspect.signature(getattr(Trainer, name)).parameters]
        assert tuple(found) == ("self", *parameters), name


def test_what_is_read_of_the_trainer_is_there(tmp_path: Path) -> None:
    trainer, _ = Training(tmp_path, saved=False, options={"max_steps": 1}).make(Journal(tmp_path / "journal"))
    trainer.train()
    assert [name for name in (*ATTRIBUTES, "_total_loss_scalar") if not hasattr(trainer, name)] == []
    others = {
        "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
        "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
        "stateful_callbacks",
    }  # fmt: skip
    assert {field.name for field in fields(trainer.state)} == {*PROGRESS} | others
