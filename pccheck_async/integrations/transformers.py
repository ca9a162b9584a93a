# SPDX-License-Identifier: Apache-2.0
"""A callback that makes Hugging Face's ``Trainer`` save into a store; running the same command again resumes exactly.

::

    PCcheckCallback("checkpoints").attach(trainer)
    trainer.train()

The Trainer does not give itself to callbacks, and has determined epoch and position before it calls the first one. So
:meth:`PCcheckCallback.attach` wraps methods of the trainer, which :data:`METHODS` lists.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Never, Self

import torch
from torch.nn.parallel import DistributedDataParallel

from pccheck_async.api import SyncCheckpointEngine, engine_settings, renamed_path
from pccheck_async.engine import Policy, Private, StepReport, unwrapped
from pccheck_async.errors import first_few
from pccheck_async.format import Restored, explained
from pccheck_async.integrations.metrics import with_metrics
from pccheck_async.integrations.mismatch import SAME_AGAIN, advise_in_trainer
from pccheck_async.integrations.resumed import in_words, log_stopped, refuse_store, wrong_trainer
from pccheck_async.integrations.versions import require
from pccheck_async.state import RNGState
from pccheck_async.store import Keep
from pccheck_async.telemetry import write
from pccheck_async.training import StepContext, TrainingStep
from pccheck_async.training.data import ResumableLoader
from pccheck_async.training.policy import EverySteps

require("transformers", "5.24")

import transformers  # noqa: E402
from transformers.trainer_callback import (  # noqa: E402
    EarlyStoppingCallback,
    ExportableState,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer_utils import compare_trainer_and_checkpoint_args  # noqa: E402

from pccheck_async.integrations.accelerate_loader import AcceleratedLoader, sizes  # noqa: E402

__all__ = ["ATTRIBUTES", "METHODS", "PROGRESS", "PCcheckCallback"]

METHODS: Final = {
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_inner_training_loop": ("batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "set_initial_training_values": ("args", "dataloader"),
    "_init_training_state": (
        "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_load_rng_state": ("checkpoint",),
    "_maybe_log_save_evaluate": (
        "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate",
    ),
}  # fmt: skip
"""The methods of the Trainer that are wrapped, with their parameters, in the order in which training calls them."""

ATTRIBUTES: Final = ("_tr_loss", "_globalstep_last_logged", "current_flos")
"""Private attributes of the Trainer that are saved and restored: losses and floating-point operations that were not
logged yet. ``_total_loss_scalar`` is set, too."""

PROGRESS: Final = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
"""The fields of the TrainerState that are restored. The other ones follow from the arguments of the resumed run."""

_TIMES: Final = ("_runtime", "_per_second", "_preparation_time")
"""Suffixes of the names of metrics that measure the machine, and are not put into a checkpoint's metadata."""

_trainers_log = transformers.utils.logging.get_logger("transformers.trainer")  # of which users see the warnings
_STORE: Final = "the store of PCcheckCallback"
"""Stands for the store where the Trainer's methods take the path to resume from."""


class PCcheckCallback(TrainerCallback):
    """Saves the whole state of a Trainer's run while it trains; running the same command again resumes it.

    :meth:`attach` it, instead of passing it in ``callbacks=``. Then ``trainer.train()`` resumes from the newest
    checkpoint in the store, or trains from the beginning if there is none. If a folder that the Trainer itself saved is
    given as ``resume_from_checkpoint=``, training resumes from that; ValueError is raised if the store holds a later
    step, which would be replaced.

    The step of a checkpoint is the Trainer's ``global_step``. A checkpoint holds model, optimizer, scheduler, gradient
    scaler, random number generators (of each rank), the position in the data, the TrainerState with its log and best
    metric, the states of callbacks (``ExportableState``), and losses that were not logged yet. A step is saved after
    its logging and evaluation; the last step of an epoch after those of the epoch. The Trainer's own saving is not
    affected.

    Of models with adapters (PEFT) the frozen parameters are not saved: the command must load the same ones again,
    and restoring raises StateMismatchError if it did not.

    Under ``torch.distributed`` all ranks save one checkpoint together (``group``).

    Args:
        path: Folder of the store.
        interval: As for :class:`pccheck_async.CheckpointEngine`; an int is a number of global steps, like
            ``save_steps``.
        save_last: Also save the last step.
        resume_stopped: Continue a training that a callback had stopped (``should_training_stop``). False:
            ``trainer.train()`` then returns at once, as at ``max_steps``, unless that is larger now.
        private: As for :meth:`pccheck_async.SyncCheckpointEngine.restore`. The Trainer's own losses may always differ.
        settings: Further settings of the engine.

    Attributes:
        engine: The engine of the training underway. Another callback may call its methods from ``on_train_begin`` on,
            such as ``engine.on_preemption()``.
        restored: The checkpoint from which the last training resumed; None if it began anew.

    Raises:
        TypeError: The engine has no such setting.
        ValueError: A setting is out of range.
    """

    engine: SyncCheckpointEngine
    restored: Restored | None = None
    _context: StepContext | None = None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        interval: int | timedelta | Policy | None = None,
        save_last: bool = True,
        resume_stopped: bool = False,
        private: Private = (),
        **settings: Any,
    ) -> None:
        own = PCcheckCallback.__init__.__kwdefaults__ or {}
        settings = engine_settings("PCcheckCallback", settings, [*own, "store"])
        path, settings = renamed_path("PCcheckCallback", path, "store", settings)
        self._make_engine = partial(
            SyncCheckpointEngine,
            path,
            interval=_EverySteps(interval) if type(interval) is int else interval,
            save_last=False,  # the Trainer's work at its end, such as loading the best model, is not the last step's
            **settings,
        )
        self._make_engine()  # wrong settings are refused here, and not where training begins
        self._grouped = "group" in settings
        self._keep: Keep | None = settings.get("keep")
        self._save_last = save_last
        self._resume_stopped = resume_stopped
        self._private: Private = private if private == "modulo" else ["trainer.*", *private]
        self._trainer: Any = None

    if not TYPE_CHECKING:  # where it would hide misspelt names

        def __getattr__(self, name: str) -> Never:
            raise wrong_trainer(self, name, "lightning", "Trainer(callbacks=[PCcheckCallback(path)])")

    @explained
    def attach(self, trainer: transformers.Trainer) -> Self:
        """Make ``trainer`` save its training and resume it; return this callback.

        Raises:
            RuntimeError: The trainer has another PCcheckCallback, or this one is attached already.
            TypeError: The object lacks methods that are wrapped: it is no Trainer, or one of another version.
            ValueError: The trainer uses ``auto_find_batch_size`` or DeepSpeed.
        """
        if missing := [name for name in (*METHODS, "callback_handler") if not hasattr(trainer, name)]:
            kind, version = f"{type(trainer).__module__}.{type(trainer).__qualname__}", transformers.__version__
            raise TypeError(
                f"a {kind} lacks {first_few(missing, 3)}, which attach wraps: it is for the Trainer of transformers "
                f"{version}, and that of Lightning takes pccheck_async.integrations.lightning.PCcheckCallback"
            )
        callbacks = trainer.callback_handler.callbacks
        if self._trainer is not None or any(
            isinstance(each, PCcheckCallback) for each in callbacks if each is not self
        ):
            raise RuntimeError("this Trainer has a PCcheckCallback, or this one another Trainer: attach one to each")
        if trainer.args.auto_find_batch_size:
            raise ValueError("auto_find_batch_size=True starts anew with other batches; find their size before")
        if trainer.is_deepspeed_enabled:
            raise ValueError("DeepSpeed saves by its own engine: see pccheck_async.integrations.deepspeed")
        self._trainer = trainer
        for name in METHODS:
            setattr(trainer, name, partial(getattr(self, name), getattr(trainer, name)))
        for each in callbacks:
            if (manager := getattr(each, "jit_manager", None)) is not None:
                manager.execute_jit_checkpoint = partial(self._preempted, manager.execute_jit_checkpoint)
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)  # loggers come later, and see the additions to logs
        return self

    # -- methods of the Trainer, in the order of METHODS, each with the one that it wraps

    def _load_from_checkpoint(
        self, original: Callable[..., None], resume_from_checkpoint: Any, *args: Any, **named: Any
    ) -> None:
        """Raise ValueError if the path is a store of this package, in which the Trainer finds no checkpoint."""
        refuse_store(resume_from_checkpoint, "resume_from_checkpoint")
        original(resume_from_checkpoint, *args, **named)

    def _inner_training_loop(
        self, original: Callable[..., Any], *args: Any, resume_from_checkpoint: Any = None, trial: Any, **named: Any
    ) -> Any:
        """Run the training, which resumes from the store by default, and then close the engine, also after an error.

        Raises ValueError for a search for hyperparameters (``trial``).
        """
        if trial is not None:
            raise ValueError("a search for hyperparameters trains many times; attach to a trainer of one training")
        self._progress, self._generators = _Progress(self._trainer), _Generators()
        self._context = self._prepared = self.restored = None
        if resume_from_checkpoint is None:
            resume_from_checkpoint = _STORE
        with ExitStack() as self._open:
            return original(*args, resume_from_checkpoint=resume_from_checkpoint, trial=trial, **named)

    def set_initial_training_values(self, original: Callable[..., Any], args: Any, dataloader: Any) -> Any:
        """Keep the dataloader and its sizes for the restore, and raise the number of epochs if steps are limited."""
        self._dataloader = dataloader
        self._progress.sizes = sizes(dataloader) | {"accumulation": args.gradient_accumulation_steps}
        self._epochs, *others = original(args, dataloader)
        # A limit of steps ends the training by itself, and epochs of a run with larger batches had fewer.
        return max(self._epochs, args.max_steps), *others

    def _init_training_state(
        self, original: Callable[..., Any], max_steps: int, per_epoch: int, epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Restore everything; return the number of epochs that are done, and of batches done in the one underway."""
        trainer, progress = self._trainer, self._progress
        epoch, batches = original(max_steps, per_epoch, self._epochs, None if resume is _STORE else resume, trial)
        if resume is _STORE:
            # The position is needed now, and the objects to restore it with are prepared right after this.
            self._prepared = trainer._prepare_for_training(max_steps, self._dataloader, resume)
            with advise_in_trainer(self.engine.path):
                self.restored = self.engine.restore(self._state, private=self._private)
            epoch, updates = progress.position(per_epoch)
            if progress.is_resized:
                self._set_limits(per_epoch, epoch, updates)
            ended = trainer.state.global_step >= trainer.state.max_steps
            stopped = not ended and self._stays_stopped()
            if self.restored is not None and not stopped and trainer.is_world_process_zero():
                # Information is not shown by default.
                _trainers_log.warning(in_words(self.restored, self.engine.path, ended=ended))
            if ended or stopped:
                return epochs, 0
            batches = 0 if trainer.args.ignore_data_skip else updates * trainer.args.gradient_accumulation_steps
        progress.epoch, self._skips = epoch, batches > 0
        progress.began = trainer.state.global_step - batches // trainer.args.gradient_accumulation_steps
        return epoch, batches

    def _set_limits(self, per_epoch: int, epoch: int, updates: int) -> None:
        """Count limits from the restored epoch on: the Trainer assumes ``per_epoch`` updates in earlier epochs, too."""
        args, state = self._trainer.args, self._trainer.state
        began = state.global_step - updates
        if args.max_steps > 0:
            state.num_train_epochs = epoch + math.ceil((args.max_steps - began) / per_epoch)
        else:
            state.max_steps = began + math.ceil((args.num_train_epochs - epoch) * per_epoch)

    def _stays_stopped(self) -> bool:
        """Return whether nothing is trained, because a callback had stopped the restored training; log that."""
        why = self._progress.told_to_stop
        if not why or self._resume_stopped or self.restored is None:
            return False
        log_stopped(why, "max_steps or num_train_epochs", self.restored)
        return True

    def _prepare_for_training(
        self, original: Callable[..., Any], max_steps: int, train_dataloader: Any, resume: Any
    ) -> Any:
        """Prepare model and optimizer, and open the engine; the second call returns the result of the first."""
        if self._prepared is None:
            trainer = self._trainer
            if isinstance(train_dataloader, ResumableLoader):
                train_dataloader = AcceleratedLoader(train_dataloader, trainer.accelerator)
            self._prepared = original(max_steps, train_dataloader, None if resume is _STORE else resume)
            ranks = torch.distributed.is_available() and torch.distributed.is_initialized() and not self._grouped
            more: dict[str, Any] = {"group": torch.distributed.group.WORLD} if ranks else {}
            if resume is not _STORE:  # the state comes from elsewhere, as the user wants
                more["overwrite"] = True
            engine = self._make_engine(**more)
            self.engine = self._open.enter_context(engine)
            latest, step = engine.latest, trainer.state.global_step
            if resume is not _STORE and latest is not None and latest.step > step:
                raise ValueError(
                    f"training resumes from {resume} at step {step}, and {engine.path} holds step {latest.step}: leave "
                    "resume_from_checkpoint out to go on from that, or give PCcheckCallback another folder"
                )
            self.engine.attach(trainer.optimizer)
            self._state = _state_of(trainer) | {"rng": self._generators, "trainer": self._progress}
        return self._prepared

    def _load_rng_state(self, original: Callable[..., Any], checkpoint: Any) -> None:
        """Restore the generators now, because loading the first batches may have drawn from them."""
        if checkpoint is _STORE:
            self._generators.put_back()
        else:
            original(checkpoint)

    def _maybe_log_save_evaluate(self, original: Callable[..., Any], *args: Any, **named: Any) -> None:
        """End the step context after the step was logged and evaluated; the last of an epoch after the epoch was."""
        original(*args, **named)
        state, control = self._trainer.state, self._trainer.control
        ends = control.should_epoch_stop or control.should_training_stop or float(state.epoch).is_integer()
        if self._context is None or (ends and not self._epoch_ended):
            return
        context, self._context = self._context, None
        if self._this.step != state.global_step:
            return  # the epoch ended inside a window of accumulation
        context.__exit__(None, None, None)
        if control.should_training_stop or self._progress.epoch >= state.num_train_epochs:
            self._save_last_step()
            self.engine.wait_captured()

    def _save_last_step(self) -> None:
        this = self._this
        if self._save_last and (this.pending is None or this.pending.skipped):
            self.engine.drain()
            self.engine.checkpoint(self._state, step=this.step, metadata=this.metadata, overlap=True)

    def _preempted(self, save: Callable[[], None]) -> None:
        """Called when ``enable_jit_checkpoint`` stops training for a SIGTERM; records it, so that a restart resumes."""
        self._progress.preempted = True
        save()

    # -- events that the Trainer calls

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore the values that the Trainer has just reset; RuntimeError if the callback was not attached."""
        if self._trainer is None:
            raise RuntimeError("callbacks= takes no PCcheckCallback: call PCcheckCallback(path).attach(trainer)")
        self._progress.finish()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Restore the generators before samplers and worker processes are seeded from them; record their state."""
        progress = self._progress
        if self._generators.saved is not None:
            if self._skips:
                if progress.generators:  # a folder of the Trainer's that was imported has none
                    RNGState().load_state_dict(progress.generators)
            else:
                self._generators.put_back()
        progress.generators = RNGState().state_dict()

    def on_step_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Begin the step context of one update of the parameters."""
        self._epoch_ended = False
        self._context = self.engine.step(self._state, state.global_step + 1)
        self._this: TrainingStep = self._context.__enter__()

    def on_epoch_end(self, _: Any, state: TrainerState, control: Any, **__: Any) -> None:
        """Record that an epoch is done, unless training stops inside it, from where it may be resumed."""
        self._epoch_ended = True
        if not control.should_training_stop or float(state.epoch).is_integer():
            self._progress.epoch += 1
            self._progress.began = state.global_step

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add the loss and epoch to the checkpoint's metadata, and numbers of the engine to the log."""
        if self._context is not None:
            self._this.metadata |= {name: logs[name] for name in ("epoch", "loss") if name in logs}
        if "loss" in logs:  # not into the results of evaluate() and train()
            scalars = self.engine.scalars()
            logs |= {
                name: scalars[name]
                for name in ("checkpoint/latest_step", "checkpoint/stall_seconds")
                if name in scalars
            }

    def on_evaluate(self, *_: Any, metrics: Mapping[str, Any], **__: Any) -> None:
        """Add the metrics of an evaluation to the metadata of the step underway, as far as they fit."""
        if self._context is not None:
            measured = {name: each for name, each in metrics.items() if name != "epoch" and not name.endswith(_TIMES)}
            numbers = {name: each for name, each in measured.items() if isinstance(each, int | float)}
            self._this.metadata = with_metrics(self._this.metadata, numbers, self._keep)


class _EverySteps(EverySteps):
    """EverySteps for ``global_step``, which is 1 after the first step."""

    def due(self, report: StepReport) -> bool:
        return super().due(replace(report, step=report.step - 1))

    def next_after(self, step: int) -> int:
        return super().next_after(step - 1) + 1


class _Generators(RNGState):
    """The global generators, which a restore changes only later, when :meth:`put_back` is called."""

    saved: Mapping[str, Any] | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self.saved = state_dict

    def put_back(self) -> None:
        if self.saved is not None:
            super().load_state_dict(self.saved)
            self.saved = None


class _Progress:
    """Saves and restores the Trainer's progress.

    Attributes:
        epoch: Number of epochs that are done.
        began: The global step at which the epoch underway began.
        generators: States of the global generators at that step, from which samplers and workers are seeded.
        sizes: The sizes on which a position inside an epoch depends: those of :func:`.sizes`, and ``"accumulation"``.
        preempted: Whether a signal stops the training.
        told_to_stop: Why the restored training had been stopped before its ``max_steps``; "" if it had not, or
            ``max_steps`` is larger now.
    """

    preempted = False
    told_to_stop = ""

    def __init__(self, trainer: Any) -> None:
        self.epoch = self.began = 0
        self.generators: Mapping[str, Any] = {}
        self.sizes: Mapping[str, int | None] = {}
        self._trainer = trainer
        self._saved: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = vars(trainer.state) | {
            "stateful_callbacks": TrainerState(stateful_callbacks=self._callbacks()).stateful_callbacks
        }
        return {
            "state": json.dumps(state),  # of trainer_state.json; the log may be long, and one text is cheap
            "epoch": self.epoch,
            "began": self.began,
            "generators": self.generators,
            "sizes": self.sizes,
            "stopped": self._why_stopped(),
            "unlogged": {name: getattr(trainer, name, None) for name in ATTRIBUTES},  # not there yet for a restore
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._saved = state_dict
        state, saved = self._trainer.state, json.loads(state_dict["state"])
        compare_trainer_and_checkpoint_args(self._trainer.args, SimpleNamespace(**saved))  # warns, as the Trainer does
        for name in PROGRESS:
            setattr(state, name, saved[name])
        if state.best_model_checkpoint is not None and not os.path.isdir(state.best_model_checkpoint):
            if self._trainer.args.load_best_model_at_end:
                text = (
                    "the best model, of step %s (%s), was in %s, which is gone: load_best_model_at_end leaves the last "
                    "model, unless a better one comes"
                )
                write("best_model_gone", text, state.best_global_step, state.best_metric, state.best_model_checkpoint)
            state.best_model_checkpoint = None  # as the Trainer does where it is gone
        self.generators = state_dict.get("generators", {})
        if state.max_steps <= saved["max_steps"]:
            self.told_to_stop = state_dict.get("stopped", "")
        for title, states in saved["stateful_callbacks"].items():
            alike = [each for each in self._callbacks() if type(each).__name__ == title]
            for callback, each in zip(alike, states if isinstance(states, list) else [states], strict=False):
                for name, value in each["attributes"].items():
                    setattr(callback, name, value)

    def check_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Check that a saved position inside an epoch means the same samples now.

        Raises:
            ValueError: A step, or the dataset, has another number of samples than in the saved run.
        """
        before, now = state_dict.get("sizes"), self.sizes
        if not before or self._trainer.args.ignore_data_skip:
            return
        updates = json.loads(state_dict["state"])["global_step"] - state_dict["began"]
        if updates and _differ(before, now):
            raise ValueError(
                f"saved after {updates} steps of epoch {state_dict['epoch']}, with {_in_words(before)}, and there are "
                f"{_in_words(now)} now: {SAME_AGAIN}"
            )

    @property
    def is_resized(self) -> bool:
        """Whether batches, accumulation windows or the dataset have other sizes than in the restored run."""
        return self._saved is not None and self._saved.get("sizes", self.sizes) != self.sizes

    def position(self, per_epoch: int) -> tuple[int, int]:
        """Return the number of epochs that are done, and of updates done in the epoch underway."""
        step = self._trainer.state.global_step
        if self._saved is None or "began" not in self._saved:  # imported from a folder of the Trainer's
            return int(step // per_epoch), int(step % per_epoch)
        return int(self._saved["epoch"]), int(step - self._saved["began"])

    def finish(self) -> None:
        """Restore the values that the Trainer resets before it calls ``on_train_begin``."""
        if self._saved is not None and "unlogged" in self._saved:
            trainer = self._trainer
            for name in ATTRIBUTES:
                setattr(trainer, name, self._saved["unlogged"][name])
            trainer._tr_loss = trainer._tr_loss.to(trainer.args.device)
            trainer._total_loss_scalar = -trainer._tr_loss.item()  # the result of train() is of this training alone

    def _why_stopped(self) -> str:
        if not self._trainer.control.should_training_stop or self.preempted:
            return ""
        for each in self._callbacks():
            if isinstance(each, EarlyStoppingCallback):
                worse = each.early_stopping_patience_counter
                if worse >= each.early_stopping_patience:
                    return f"{type(each).__name__}: {worse} evaluations without a better metric"
        # At the last step the Trainer's own callback sets it.
        ended = self._trainer.state.global_step >= self._trainer.state.max_steps
        return "" if ended else "a callback set should_training_stop"

    def _callbacks(self) -> list[Any]:
        trainer = self._trainer
        return [
            each for each in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(each, ExportableState)
        ]


def _differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a step, or the dataset, has another number of samples, as far as these are known."""
    pairs = {name: (before[name], now[name]) for name in before}
    batches = (1, 1) if None in pairs["batch"] else pairs["batch"]
    windows = {batch * window for batch, window in zip(batches, pairs["accumulation"], strict=True)}
    return len(windows) > 1 or (None not in pairs["samples"] and len({*pairs["samples"]}) > 1)


def _in_words(sizes: Mapping[str, Any]) -> str:
    batch, samples = ("?" if sizes[name] is None else sizes[name] for name in ("batch", "samples"))
    return (
        f"{batch} samples in a batch of all ranks, gradient_accumulation_steps={sizes['accumulation']} and {samples} "
        "samples in the dataset"
    )


def _state_of(trainer: Any) -> dict[str, Any]:
    model = trainer.model_wrapped if isinstance(trainer.model_wrapped, DistributedDataParallel) else trainer.model
    state = {"model": model, "optimizer": unwrapped(trainer.optimizer), "scheduler": trainer.lr_scheduler}
    if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
        state["scaler"] = scaler
    if hasattr(trainer.model, "peft_config"):
        named = trainer.model.state_dict(keep_vars=True)
        frozen = {
            name: each
            for name, each in named.items()
            if isinstance(each, torch.nn.Parameter) and not each.requires_grad
        }
        state["model"] = {name: each for name, each in named.items() if name not in frozen}
        state["frozen"] = {_digest(frozen): torch.tensor(len(frozen))}
    return state


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and sums of tensors, as a name in the state that others do not match."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        total = tensor.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total.item()}\n".encode())
    return digest.hexdigest()
