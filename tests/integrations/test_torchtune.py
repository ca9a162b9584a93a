"""The guide's change to a recipe of torchtune, made to the installed one: killed anywhere, its bits are the same."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtune")

from omegaconf import OmegaConf
from torchtune.models.llama3 import llama3

from tests.support.killed_training import Journal, agree, live

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torchtune's own, of many kinds

PAGE = (Path(__file__).parents[2] / "examples" / "guide" / "torchtune.md").read_text()
MODEL: dict[str, Any] = {
    "vocab_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "embed_dim": 16,
    "max_seq_len": 16,
}
MODEL |= {"intermediate_dim": 32, "attn_dropout": 0.1}
STEPS = 24


def changed_recipe() -> dict[str, Any]:
    """Make the guide's change to the recipe; return what the program defines."""
    found = importlib.util.find_spec("torchtune")
    assert found is not None
    assert found.origin is not None
    text = (Path(found.origin).parents[1] / "recipes" / "full_finetune_single_device.py").read_text()
    blocks = re.findall(r"```(diff|python)\n(.*?)```", PAGE, re.DOTALL)
    for hunk in re.split(r"^@@.*\n", dict(blocks)["diff"], flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] == " ")
        assert text.count(before) == 1, before
        text = text.replace(before, "".join(line[1:] for line in lines))
    text = text.replace("% 10 == 0", "% 2 == 0")
    program: dict[str, Any] = {"__name__": "changed_recipe"}
    exec(compile(dict(blocks)["python"] + text.replace("from __future__", "#"), "recipe", "exec"), program)
    return program


class Tokenizer:
    pad_id = 0


def dataset(tokenizer: Any) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 32, (9,), generator=draw).tolist() for _ in range(36)]
    return [{"tokens": text, "labels": [*text[1:], -100]} for text in texts]


class Logger:
    """Notes each step in the journal of this life."""

    journal: Journal

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self.journal.note(f"loss {step}", payload["loss"])

    def close(self) -> None: ...


def finetune(folder: Path, journal: Journal) -> None:
    Logger.journal = journal
    torch.set_num_threads(1)
    me = "tests.integrations.test_torchtune"
    config = OmegaConf.create(
        {
            "model": {"_component_": "torchtune.models.llama3.llama3", **MODEL},
            "tokenizer": {"_component_": f"{me}.Tokenizer"},
            "dataset": {"_component_": f"{me}.dataset"},
            "metric_logger": {"_component_": f"{me}.Logger"},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 3,
            },
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "checkpointer": {
                "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
                "checkpoint_dir": str(folder / "base"),
                "checkpoint_files": ["model.pt"],
                "model_type": "LLAMA3",
                "output_dir": str(folder / "out"),
            },
            "device": "cpu",
            "dtype": "fp32",
            "seed": 3,
            "epochs": 4,
            "batch_size": 3,
            "shuffle": True,
            "gradient_accumulation_steps": 2,
            "max_steps_per_epoch": None,
            "compile": False,
            "resume_from_checkpoint": False,
            "optimizer_in_bwd": False,
            "output_dir": str(folder / "out"),
            "enable_activation_checkpointing": False,
            "enable_activation_offloading": False,
        }
    )
    recipe = changed_recipe()["FullFinetuneRecipeSingleDevice"](config)
    recipe.setup(config)
    recipe._engine.on_event(lambda event: journal.reach(f"{event.name} {getattr(event, 'step', '')}"))
    recipe.train()
    recipe.cleanup()
    journal.note("end", [recipe._model.state_dict(), recipe._optimizer.state_dict(), recipe._lr_scheduler.state_dict()])


def work(folder: Path) -> Callable[[Journal], None]:
    (folder / "base").mkdir(parents=True)
    torch.manual_seed(0)
    torch.save(llama3(**MODEL).state_dict(), folder / "base" / "model.pt")
    return partial(finetune, folder)


@pytest.mark.parametrize("moment", ["loss 1", "captured 4", "loss 6", "admitted 6", "loss 7", "loss 23"])
def test_the_changed_recipe_goes_on_with_the_same_bits(tmp_path: Path, moment: str) -> None:
    whole = live(work(tmp_path / "whole"), tmp_path / "journal")
    assert whole.keys == [*(f"loss {step}" for step in range(1, STEPS + 1)), "end"]
    again = work(tmp_path / "killed")
    agree(whole, [live(again, tmp_path / "journal", moment), live(again, tmp_path / "journal")])
