"""Tiny trainings by Hugging Face's Trainer that write all they compute into a journal."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pccheck_async import ResumableLoader, RNGState
from pccheck_async.integrations.accelerate_loader import AcceleratedLoader
from pccheck_async.integrations.transformers import PCcheckCallback
from tests.support.killed_training import Journal

__all__ = ["MODELS", "Noting", "Resumable", "Training"]

SAMPLES, TOKENS, WORDS = 22, 8, 32


class Normed(nn.Module):
    """A model with buffers that training changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.body(self.embedding(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(scores, labels[:, 0]), "logits": scores}


_IDS = {"bos_token_id": 0, "eos_token_id": 1}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=8, n_layer=1, n_head=2, **_IDS)
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=TOKENS,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            attention_dropout=0.2,
            **_IDS,
        )
    ),
    "normed": Normed,
}


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return what does not differ from run to run; of train(), what it computed by itself is left out, too."""
    timed = ("_runtime", "_per_second", "train_loss", "checkpoint/", "_preparation_time")
    return {name: value for name, value in metrics.items() if not any(each in name for each in timed)}


class Told(TrainerCallback):
    """Writes losses, evaluations and moments into the journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.journal.reach(f"epoch begins {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.journal.reach(f"step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.journal.note(f"log {state.global_step}", without_times(logs))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.journal.reach(f"predicted {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        self.journal.note(f"evaluation {state.global_step}", without_times(metrics))


class Noting(Trainer):
    """Writes the loss of each micro-batch into the journal."""

    journal: Journal
    _micro = (0, 0)

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **named)
        step, number = self.state.global_step, self._micro[1] + 1 if self._micro[0] == self.state.global_step else 1
        self._micro = step, number
        self.journal.note(f"loss {step}.{number}", loss)
        return loss


def masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch with words masked at random."""
    words = torch.stack([row["input_ids"] for row in rows])
    hidden = torch.rand(words.shape) < 0.3
    return {"input_ids": words.masked_fill(hidden, 2), "labels": words.masked_fill(~hidden, -100)}


class Resumable(Noting):
    """Reads with a ResumableLoader, whose collator draws at random."""

    def get_train_dataloader(self) -> Any:
        workers = self.args.dataloader_num_workers
        loader = ResumableLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=masked, num_workers=workers)
        attached = any(isinstance(each, PCcheckCallback) for each in self.callback_handler.callbacks)
        return loader if attached else AcceleratedLoader(loader, self.accelerator)


@dataclass
class Training:
    """One configuration: 11 batches of an epoch in windows of 4, 4 and 3, three epochs: nine steps."""

    folder: Path
    model: str | Callable[[], nn.Module] = "gpt2"
    interval: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    trainer: type[Noting] = Noting
    more: dict[str, Any] = field(default_factory=dict)
    saved: bool = True

    def make(self, journal: Journal) -> tuple[Noting, PCcheckCallback | None]:
        """Return a trainer, and what is attached to it."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        options = {
            "num_train_epochs": 3, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2,
            "learning_rate": 1e-2, "logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "no",
            "per_device_eval_batch_size": 4,
        } | self.options  # fmt: skip
        arguments = TrainingArguments(
            str(self.folder / "output"), report_to=[], use_cpu=True, disable_tqdm=True, log_level="error",
            dataloader_pin_memory=False, **options,
        )  # fmt: skip
        data = {"train_dataset": samples(), "eval_dataset": samples()[:9]} | self.more
        model = MODELS[self.model] if isinstance(self.model, str) else self.model
        trainer = self.trainer(model(), arguments, callbacks=[*self.callbacks(), Told(journal)], **data)
        trainer.remove_callback(PrinterCallback)
        trainer.journal = journal
        if not self.saved:
            return trainer, None
        callback = PCcheckCallback(self.folder / "store", interval=self.interval, **self.settings).attach(trainer)
        trainer.add_callback(_Moments(callback, journal))
        return trainer, callback

    def __call__(self, journal: Journal, **resume: Any) -> None:
        """Train to the end, and note what came out."""
        trainer, _ = self.make(journal)
        trainer.train(**resume)
        history = [without_times(each) for each in trainer.state.log_history if "train_runtime" not in each]
        journal.note(
            "final",
            {
                "model": trainer.model.state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
                "scheduler": trainer.lr_scheduler.state_dict(),
                "history": history,
                "best": (trainer.state.best_metric, trainer.state.total_flos, trainer.state.epoch),
                "torch": torch.get_rng_state(),
                "python": RNGState().state_dict()["python"],
            },
        )


class _Moments(TrainerCallback):
    """Lets a process die inside a save."""

    def __init__(self, callback: PCcheckCallback, journal: Journal) -> None:
        self._callback, self._journal = callback, journal

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._callback.engine.on_event(lambda event: self._journal.reach(f"{event.name} {getattr(event, 'step', '')}"))


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
