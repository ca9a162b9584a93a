# SPDX-License-Identifier: Apache-2.0
"""A callback that saves the whole training between two batches, and restores it there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Never

import torch.distributed as dist
from lightning import __version__
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, Timer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from pccheck_async.api import SyncCheckpointEngine, engine_settings, renamed_path
from pccheck_async.engine import Private, StorageOptions, flight_of, note_closing_failure_on
from pccheck_async.errors import StateMismatchError
from pccheck_async.format import Restored, explained
from pccheck_async.group import Group
from pccheck_async.integrations.lightning.checkpoint_io import is_own
from pccheck_async.integrations.lightning.draws import Draws, flat, skip
from pccheck_async.integrations.metrics import with_metrics
from pccheck_async.integrations.mismatch import SAME_AGAIN, advise_in_trainer
from pccheck_async.integrations.resumed import in_words, log_stopped, refuse_store, wrong_trainer
from pccheck_async.state import RNGState, paths
from pccheck_async.training import TrainingStep
from pccheck_async.training.data import ResumableLoader

__all__ = ["PRIVATE", "PCcheckCallback"]

PRIVATE: Final = {
    "Trainer.fit_loop": (
        "on_advance_end", "on_iteration_done", "epoch_progress", "epoch_loop", "state_dict", "load_state_dict",
        "_combined_loader", "_data_fetcher", "_load_combined_loader_states", "_combined_loader_states_to_load",
        "is_resuming", "_can_stop_early", "setup_data", "_should_reload_train_dl", "_last_train_dl_reload_epoch",
    ),
    "Trainer.fit_loop.epoch_loop": (
        "on_advance_end", "on_run_start", "on_iteration_done", "batch_progress", "val_loop", "_should_accumulate",
        "_num_ready_batches_reached", "_on_before_fetch", "restarting", "_results",
    ),
    "Trainer.fit_loop.epoch_loop.val_loop": (
        "setup_data", "_combined_loader", "_should_reload_val_dl", "_last_val_dl_reload_epoch", "_results",
    ),
    "Trainer._checkpoint_connector": ("_get_loops_state_dict", "resume_start"),
    "Trainer._logger_connector": ("_callback_metrics", "_first_loop_iter"),
}  # fmt: skip
"""The undocumented attributes of Lightning that are used, in addition to ``Timer._duration``,
``BaseFinetuning._restarting``, ``Metric._update_count`` and the imports above of ``call``, ``fabric`` and results.

No documented hook is called after all work of a batch: the module's own hooks, and schedulers that monitor a metric,
run after a callback's ``on_train_batch_end`` and ``on_validation_end``. ``on_advance_end`` of the two loops is last.
"""


class PCcheckCallback(Callback):
    """Saves the training at each ``interval``, and resumes from the newest checkpoint when ``fit`` begins.

    A checkpoint holds the model with its buffers, optimizers, schedulers, the precision plugin, loops, the states of
    callbacks and the datamodule, data that ``on_save_checkpoint`` hooks add, the means that ``self.log(on_epoch=True)``
    has gathered, the positions of training loaders that have a ``state_dict``, and the global generators. It is taken
    between two batches, after a validation that follows the first of them, and not inside a window of gradient
    accumulation. After a restore loaders without a position are iterated over again up to the batch, with the random
    numbers that the epoch began with.

    With several ranks all must give the same arguments, and they save one checkpoint together.

    ``fit(ckpt_path=...)`` is refused if the folder holds a checkpoint. The first ``fit`` restores; later ones of the
    same Trainer and module continue with the state in memory, unless the one before raised. With ``fast_dev_run``
    nothing is saved or restored.

    Args:
        path: Folder of the store.
        interval: Optimizer steps (batches, in manual optimization) between two checkpoints, a ``timedelta`` or a
            policy. The default saves as often as costs at most 3 % of the training time.
        save_last: Also save at the end of training: at ``max_steps``, ``max_epochs``, ``max_time`` or early.
        resume_stopped: Continue a training that had been stopped early (``trainer.should_stop``). False: ``fit`` then
            returns at once, as at ``max_epochs``, unless a limit is larger now.
        private: As for :meth:`pccheck_async.SyncCheckpointEngine.restore`. The states of loops, callbacks and the
            datamodule may always differ by rank.
        replicated: As for :class:`pccheck_async.Group`; by default all that DistributedDataParallel keeps equal.
        trusted_replicas: As for :class:`pccheck_async.Group`.
        settings: Further settings of :class:`pccheck_async.SyncCheckpointEngine`.

    Attributes:
        engine: The engine while ``fit`` runs; else None.
        restored: The checkpoint that was restored, or None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        interval: Any = None,
        save_last: bool = True,
        resume_stopped: bool = False,
        private: Private = (),
        replicated: Sequence[str] = (),
        trusted_replicas: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        own = PCcheckCallback.__init__.__kwdefaults__ or {}
        settings = engine_settings("PCcheckCallback", settings, [*own, "folder"])
        path, settings = renamed_path("PCcheckCallback", path, "folder", settings)
        Group(0, 1, None, replicated=replicated, trusted_replicas=trusted_replicas)
        SyncCheckpointEngine(path, interval=interval, save_last=save_last, **settings)  # wrong settings raise now
        self._path = path
        self._settings = {"interval": interval, **settings}
        self._replicated, self._trusted_replicas = replicated, trusted_replicas
        self._save_last = save_last
        self._resume_stopped = resume_stopped
        self._private = private
        self.engine: SyncCheckpointEngine | None = None
        self.restored: Restored | None = None
        self._of: tuple[Any, LightningModule] | None = None  # the training in memory
        self._rng: dict[str, Any] | None = None
        self._state: dict[str, Any] = {}
        self._step = ExitStack()
        self._this: TrainingStep | None = None
        self._says = ""  # where training goes on, until it is said
        self._shown: dict[str, Any] = {}  # metrics of the restored checkpoint, until training begins
        self._measured: dict[str, Any] = {}  # by the validation that follows the step underway

    @explained
    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Make Lightning raise ValueError if it opens a store as ``ckpt_path``, which is not known before."""
        connector = trainer._checkpoint_connector
        open_file = connector.resume_start

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            connector.resume_start = open_file
            if checkpoint_path is not None and not (os.path.isdir(checkpoint_path) and is_own(checkpoint_path)):
                refuse_store(checkpoint_path, "ckpt_path")
            open_file(checkpoint_path, weights_only=weights_only)

        connector.resume_start = resume_start

    if not TYPE_CHECKING:  # where it would hide misspelt names

        def __getattr__(self, name: str) -> Never:
            raise wrong_trainer(self, name, "transformers", "PCcheckCallback(path).attach(trainer)")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Open the store, restore everything but the generators, and wrap methods of the loops."""
        if trainer.fast_dev_run:
            return
        if [callback for callback in trainer.callbacks if isinstance(callback, PCcheckCallback)] != [self]:
            raise ValueError("a Trainer takes one PCcheckCallback: two would restore two states")
        settings = self._settings
        if dist.is_initialized():
            group = settings.get("group", dist.group.WORLD)
            group = Group.of(group, replicated=self._replicated, trusted_replicas=self._trusted_replicas)
            if not group.replicated:
                group = Group.of(group, replicated=_replicated(trainer.model))
            settings = {**settings, "group": group}
        goes_on = self._of == (trainer, pl_module)  # the state in memory is newer than the saved one
        engine = SyncCheckpointEngine(self._path, save_last=False, **{"overwrite": goes_on, **settings})
        self._state = _state(trainer)
        self.engine = engine.open()
        if trainer.optimizers:
            engine.attach(*trainer.optimizers)
        if not goes_on:
            with advise_in_trainer(engine.path):
                self.restored = _restore(engine, self._state, trainer, self._private)
            if trainer.ckpt_path and self.restored is not None:
                ended = ", the last one of a run that has ended" if _ends(trainer) else ""
                raise ValueError(
                    f"fit(ckpt_path={trainer.ckpt_path!r}), and {self._path} holds step {self.restored.step}{ended}: "
                    "leave ckpt_path out to resume, or give PCcheckCallback an empty folder"
                )
            self._rng = RNGState().state_dict() if self.restored else None
            self._of = trainer, pl_module
            self._shown = self._state["others"].metrics
            if self.restored is not None and (self._resume_stopped or not self._stop_again(trainer, self.restored)):
                self._says = in_words(self.restored, engine.path, ended=_ends(trainer))
                if _ends(trainer):
                    self._say()
        loop = trainer.fit_loop
        draws: Draws = self._state["draws"]
        _around(loop.epoch_loop, "on_advance_end", after=lambda: self._end_batch(trainer))
        _around(loop, "on_advance_end", after=lambda: self._end_step(trainer))
        _around(loop, "_load_combined_loader_states", before=partial(self._before_positions, loop))
        _around(loop.epoch_loop, "on_run_start", before=lambda: self._begin_epoch(trainer))
        _around(loop.epoch_loop, "_on_before_fetch", before=lambda: draws.note_fetch(loop._combined_loader))
        draws.make_again(loop, "train")
        draws.make_again(loop.epoch_loop.val_loop, "val")
        # After the sanity check, which empties them, and where a fit that has nothing to train returns.
        _around(loop, "setup_data", after=lambda: trainer._logger_connector._callback_metrics.update(self._shown))

    def _before_positions(self, loop: Any) -> None:
        """Called before Lightning restores the positions of loaders, and then creates the iterator of the epoch."""
        self._state["draws"].note_iter()
        epoch = loop.epoch_progress.current
        if self._rng is None:
            return
        if epoch.processed != epoch.ready and not _ends(loop.trainer):
            self._state["sizes"].check_loaders()
        elif len(loop._combined_loader_states_to_load) != sum(map(_has_position, flat(loop))):
            loop._combined_loader_states_to_load = []  # the next epoch begins at its start, or nothing is left

    def _stop_again(self, trainer: Any, restored: Restored) -> bool:
        """Stop the training if it had been stopped before and no limit is larger now; return whether none follows."""
        if not (why := self._state["sizes"].told_to_stop()):
            return False
        trainer.should_stop = True
        if not trainer.fit_loop._can_stop_early:  # Lightning trains on to min_epochs or min_steps first
            return False
        log_stopped(why, "max_epochs, max_steps or max_time", restored)
        return True

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Go to the saved position in the data, and then restore the generators, from which setting up data drew."""
        if self.engine is not None:
            _refuse_some_positions(trainer.fit_loop._combined_loader.flattened)
        self._shown = {}
        if self._rng is None:
            return
        loop = trainer.fit_loop
        epoch, batch = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
        if epoch.completed == epoch.ready:
            _forget_restart(loop)
        elif batch.completed == batch.ready:
            self._state["sizes"].check(batch.ready)
            # A file of Lightning has no metrics: as after its own ``ckpt_path``, an epoch that it ended in takes no
            # step of a schedule that goes by one.
            kept = [] if self._state["others"].metrics else [loop]
            if not _with_position(loop):
                skip(loop, epoch.processed, batch.ready, self._state["draws"])
            results: _Results = self._state["results"]
            results.go_on()
            _around(loop.epoch_loop, "on_run_start", after=lambda: _forget_restart(loop, *kept), once=True)
            _around(loop.epoch_loop, "on_advance_end", after=partial(results.warn, batch.ready), once=True)
        self._say()  # nothing is refused any more
        RNGState().load_state_dict(self._rng)
        self._state["draws"].go_on()
        self._rng = None

    def _say(self) -> None:
        if self._says:
            rank_zero_info(self._says)
        self._says = ""

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step context, unless one is open because of gradient accumulation."""
        if self.engine is not None and self._this is None:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            step = trainer.global_step if pl_module.automatic_optimization else progress.total.ready - 1
            self._this = self._step.enter_context(self.engine.step(self._state, step))

    def _begin_epoch(self, trainer: Any) -> None:
        """Record the generators at the start of an epoch, unless its iterator was created before (first or resumed)."""
        loop = trainer.fit_loop
        if trainer.current_epoch > 0 and not loop.is_resuming and not loop.epoch_loop.restarting:
            self._state["draws"].note_iter()

    def _end_batch(self, trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_accumulate() and not loop._num_ready_batches_reached():
            self._end_step(trainer)

    def _end_step(self, trainer: Any) -> None:
        """End the step context: after a batch, or for the last batch of an epoch after all work at the epoch's end."""
        if self.engine is None or self._this is None:
            return
        this, self._this = self._this, None
        this.metadata["epoch"] = trainer.fit_loop.epoch_progress.current.ready - 1
        measured, self._measured = self._measured, {}
        this.metadata = with_metrics(this.metadata, measured, self._settings.get("keep"))
        self._step.close()
        if _ends(trainer) and self._save_last and this.pending is None:
            this.pending = self.engine.checkpoint(self._state, step=this.step, metadata=this.metadata)
        if _ends(trainer):
            self.engine.wait_captured()  # callbacks may change the model when training has ended
        if this.pending is not None and flight_of(this.pending).on_disk:
            for logger in trainer.loggers:
                logger.log_metrics(self.engine.scalars(), step=trainer.global_step)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep the metrics of the validation for the metadata of the step."""
        if not trainer.sanity_checking:
            self._measured = dict(trainer.fit_loop.epoch_loop.val_loop._results.metrics(False)["callback"])

    @explained
    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish the saves in progress, within the engine's ``exit_timeout``, and close the engine."""
        if self.engine is not None:
            self._close(trainer, exception)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Wait until all saves are durable, and close the engine."""
        if self.engine is not None:
            self._close(trainer, None)

    def _close(self, trainer: Any, error: BaseException | None) -> None:
        engine, self.engine, self._this = self.engine, None, None
        loop = trainer.fit_loop
        for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            for name in _WRAPPED:
                vars(each).pop(name, None)
        assert engine is not None
        if error is not None:
            self._of = None  # the state in memory may be half of a batch
        with note_closing_failure_on(error), ExitStack() as closing:
            patience = self._settings.get("storage", StorageOptions()).exit_timeout
            closing.callback(engine.close, None if error is None else patience)
            if error is not None:
                self._step.__exit__(type(error), error, error.__traceback__)
        self._step = ExitStack()


class _Loops:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer._checkpoint_connector._get_loops_state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._trainer.fit_loop.load_state_dict(state["fit_loop"])


class _Callbacks:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = call._call_callbacks_state_dict(self._trainer)
        return states

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        call._call_callbacks_load_state_dict(self._trainer, {"callbacks": state})


class _Others:
    """Saves and restores the rest of Lightning's checkpoint: plugins, the datamodule, data that hooks add."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.metrics: dict[str, Any] = {}

    def _base(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": __version__,
            "state_dict": dict(trainer.lightning_module.state_dict()),
        }

    def _plugins(self) -> dict[str, Any]:
        """Return the objects whose state Lightning saves under the name of their class, by that name."""
        parts = (self._trainer.precision_plugin, self._trainer.datamodule)
        return {type(part).__qualname__: part for part in parts if part is not None}

    def state_dict(self) -> dict[str, Any]:
        trainer, checkpoint = self._trainer, self._base()
        weights = checkpoint["state_dict"]
        checkpoint |= {name: state for name, part in self._plugins().items() if (state := part.state_dict())}
        trainer.precision_plugin.on_save_checkpoint(checkpoint)
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        if (other_weights := checkpoint.pop("state_dict")) is not weights:
            checkpoint[_INSTEAD] = other_weights  # of an average, which Lightning's files have in the model's place
        current = [name for name, value in checkpoint.items() if value is weights]
        kept = {name: value for name, value in checkpoint.items() if value is not weights}
        return kept | {_METRICS: dict(trainer._logger_connector._callback_metrics), _CURRENT: current}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        trainer, checkpoint = self._trainer, dict(state)
        self.metrics = checkpoint.pop(_METRICS, {})
        weights = self._base()["state_dict"]
        checkpoint |= dict.fromkeys(checkpoint.pop(_CURRENT, ()), weights)
        checkpoint["state_dict"] = checkpoint.pop(_INSTEAD, weights)
        trainer.precision_plugin.on_load_checkpoint(checkpoint)
        for name, part in self._plugins().items():
            if name in checkpoint:
                part.load_state_dict(checkpoint[name])
        call._call_callbacks_on_load_checkpoint(trainer, checkpoint | {"callbacks": {}})
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)


class _Results:
    """Saves and restores the means and the like that ``self.log(on_epoch=True)`` gathers in a training epoch.

    The state has, by key of the result, the metric's states by name. Metrics of torchmetrics whose states are lists are
    saved without them: they would grow with each batch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: Mapping[str, Any] = {}
        self._known: list[str] = []  # the keys whose states were restored

    def _gathered(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys and metrics that were logged in the epoch underway."""
        for key, each in self._trainer.fit_loop.epoch_loop._results.items():
            if each.meta.on_epoch and not each.has_reset:
                yield key, each

    def state_dict(self) -> dict[str, Any]:
        results = self._trainer.fit_loop.epoch_loop._results
        saved = {**results.waiting} if isinstance(results, _ResultsOn) else {}
        for key, each in self._gathered():
            metric = each if each.is_tensor else each.value
            states = metric.metric_state
            if any(isinstance(state, list) for state in states.values()):
                states = {}
            saved[key] = {"states": states, "count": metric.update_count, "attribute": each.meta.metric_attribute}
        return saved

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._saved = state

    def go_on(self) -> None:
        """Make the results of the epoch underway continue from the saved states."""
        trainer, values = self._trainer, {}
        modules = dict(trainer.lightning_module.named_modules())
        for key, saved in self._saved.items():
            if saved["attribute"] is None:
                values[key] = saved
            elif (metric := modules.get(saved["attribute"])) is not None:
                _gather_on(metric, saved)
            else:
                continue
            if saved["states"]:
                self._known.append(key)
        trainer.fit_loop.epoch_loop._results = _ResultsOn(values)
        trainer._logger_connector._first_loop_iter = True  # else the next batch would be taken for an epoch's first

    def warn(self, batch: int) -> None:
        """Warn if a scheduler or callback monitors a mean over the epoch that lacks the batches before ``batch``."""
        gathered = [each.meta for key, each in self._gathered() if key not in self._known]
        names = {name for meta in gathered for name in (meta.name, f"{meta.name}_epoch")}
        by = [*self._trainer.lr_scheduler_configs, *self._trainer.callbacks]
        if monitored := sorted(names.intersection(str(getattr(each, "monitor", None)) for each in by)):
            rank_zero_warn(
                f"{', '.join(monitored)} of this epoch counts from batch {batch} on: what self.log(on_epoch=True) "
                "gathered before is not in the checkpoint, and a scheduler, EarlyStopping or ModelCheckpoint that goes "
                "by it may decide otherwise than in a run that was not interrupted"
            )


class _ResultsOn(_ResultCollection):
    """Results of a resumed epoch: when Lightning creates one, as it is logged first, it gets its saved states.

    Args:
        waiting: Saved states of results that were not logged since the restore; shrinks.
    """

    def __init__(self, waiting: dict[str, Any]) -> None:
        super().__init__(training=True)
        self.waiting = waiting

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, metric)
        if key in self.waiting:
            _gather_on(metric, self.waiting.pop(key))

    def reset(self, *arguments: Any, **named: Any) -> None:
        self.waiting = {}  # of an epoch that has ended
        super().reset(*arguments, **named)


def _gather_on(metric: Any, saved: Mapping[str, Any]) -> None:
    """Set the states and the update count of a metric to the saved ones, if there are any."""
    for name, state in saved["states"].items():
        setattr(metric, name, move_data_to_device(state, metric.device))
        metric._update_count = saved["count"]


class _Sizes:
    """Saves sizes that a position in an epoch depends on, the limits of the training, and what was frozen."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "batches": trainer.num_training_batches,
            "loaders": len(flat(trainer.fit_loop)),
            "positions": _with_position(trainer.fit_loop),
            "accumulation": trainer.accumulate_grad_batches,
            "stopped": _why_stopped(trainer),
            "limits": _limits(trainer),
            "frozen": _frozen(trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._saved = state

    def freeze(self) -> None:
        """Freeze exactly the parameters that were frozen at the checkpoint, if there is a BaseFinetuning callback."""
        if not _tuners(self._trainer) or not (frozen := self._saved.get("frozen")):
            return
        module = self._trainer.lightning_module
        for name, parameter in module.named_parameters():
            parameter.requires_grad = name not in frozen["parameters"]
        for name, part in module.named_modules():
            if isinstance(part, _BatchNorm):
                part.track_running_stats = name not in frozen["norms"]

    def told_to_stop(self) -> str:
        """Return why the saved training had been stopped; "" if it had not, or a limit is larger now."""
        saved, now = self._saved.get("limits", {}), _limits(self._trainer)
        raised = any(now[name] > limit for name, limit in saved.items())
        return "" if raised else self._saved.get("stopped", "")

    def check_loaders(self) -> None:
        """Raise StateMismatchError if the saved epoch had another number of loaders, or others have positions."""
        loop = self._trainer.fit_loop
        count, now = len(flat(loop)), _with_position(loop)
        then = self._saved.get("loaders", count)
        if then != count:
            raise StateMismatchError(
                f"the checkpoint was made inside an epoch of {then} training loader(s), and this program has {count}: "
                f"the rest of the epoch would be other batches; {SAME_AGAIN}"
            )
        if self._saved.get("positions", now) != now:
            kinds = "no position in the data, as a DataLoader", "a position of their own, as a ResumableLoader"
            had, here = kinds if now else kinds[::-1]
            raise StateMismatchError(
                f"the checkpoint was made inside an epoch whose loaders had {had}, and those of this program have "
                f"{here}: the rest of the epoch would be other batches; {SAME_AGAIN}"
            )

    def check(self, batches: int) -> None:
        """Raise StateMismatchError if an epoch has another number of batches now; warn of other gradient windows."""
        saved, now = self._saved, self.state_dict()
        if saved.get("batches", now["batches"]) != now["batches"]:
            raise StateMismatchError(
                f"the checkpoint was made after {batches} of {saved['batches']} batches of an epoch, which has "
                f"{now['batches']} now: {SAME_AGAIN}"
            )
        if saved.get("accumulation", now["accumulation"]) != now["accumulation"]:
            text = "accumulate_grad_batches is %d and was %d in the checkpoint: windows change inside an epoch"
            rank_zero_warn(text % (now["accumulation"], saved["accumulation"]))


_WRAPPED: Final = ("on_advance_end", "on_run_start", "setup_data", "_load_combined_loader_states", "_on_before_fetch")
_UNKNOWN: Final = frozenset({"draws", "results", "rng", "sizes"})
"""Parts of the state that a converted file of Lightning, or a checkpoint of an older version, does not have."""
_INSTEAD, _METRICS, _CURRENT = "pccheck_state_dict", "pccheck_metrics", "pccheck_current"


def _state(trainer: Any) -> dict[str, Any]:
    """Return the app state of the training; a converted file of Lightning has the same names."""
    return {
        "model": trainer.lightning_module,
        "optimizers": [*trainer.optimizers],
        "lr_schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        "callbacks": _Callbacks(trainer),
        "loops": _Loops(trainer),
        "others": _Others(trainer),
        "draws": Draws(trainer),
        "results": _Results(trainer),
        "sizes": _Sizes(trainer),
        "rng": RNGState(),
    }


def _restore(engine: SyncCheckpointEngine, state: dict[str, Any], trainer: Any, private: Private) -> Restored | None:
    if private != "modulo":  # such as averages, of each rank's batches
        private = ["callbacks.*", "loops.*", "others.*", "results.*", *_broadcast(trainer.model), *private]
    try:
        restored = engine.restore(state, private=private)
    except StateMismatchError as error:
        missing = {path.split(".")[0] for path in error.missing}
        rebuilt = error.mismatched or error.unexpected
        if not missing <= _UNKNOWN or (rebuilt and not _tuners(trainer)):
            raise
        if rebuilt:  # their states have the groups of parameters that they gave to the optimizers
            engine.restore({"callbacks": state["callbacks"]}, strict=False, private=private)
            for each in _tuners(trainer):
                each.on_fit_start(trainer, trainer.lightning_module)
        there = {name: part for name, part in state.items() if name not in missing}
        restored = engine.restore(there, private=private)
    for each in _tuners(trainer):
        each._restarting = False  # its on_fit_start would give the optimizers the groups as they were first
    state["sizes"].freeze()
    return restored


def _tuners(trainer: Any) -> list[Any]:
    return [each for each in trainer.callbacks if isinstance(each, BaseFinetuning)]


def _frozen(trainer: Any) -> dict[str, list[str]]:
    """Return the names of the frozen ``"parameters"``, and of the BatchNorm modules with frozen averages (``"norms"``).

    Empty if the trainer has no ``BaseFinetuning``.
    """
    if not _tuners(trainer):
        return {}
    module = trainer.lightning_module
    norms = [(name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    return {
        "parameters": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "norms": [name for name, part in norms if not part.track_running_stats],
    }


def _replicated(model: Any) -> list[str]:
    """Return globs over the paths of tensors that DistributedDataParallel keeps equal on all ranks; [] without it."""
    if not isinstance(model, DistributedDataParallel) or model.parameters_to_ignore:
        return []
    names = (paths.escape(name) for name, _ in model.module.named_parameters(remove_duplicate=False))
    return [*(paths.child("model", name) for name in names), "optimizers.*.state.*"]


def _limits(trainer: Any) -> dict[str, float]:
    """Return the limits of the training by name, in epochs, steps and seconds; infinity for none."""
    loop = trainer.fit_loop
    timers = [each._duration for each in trainer.callbacks if isinstance(each, Timer)]
    limits = {"max_epochs": loop.max_epochs, "max_steps": loop.max_steps}
    return {
        **{name: math.inf if limit == -1 else float(limit) for name, limit in limits.items()},
        "max_time": min((limit for limit in timers if limit is not None), default=math.inf),
    }


def _why_stopped(trainer: Any) -> str:
    if not trainer.should_stop:
        return ""
    for each in trainer.callbacks:
        if isinstance(each, EarlyStopping) and each.stopping_reason_message is not None:
            return f"{type(each).__name__}: {each.stopping_reason_message}"
        if isinstance(each, Timer) and (left := each.time_remaining()) is not None and left <= 0:
            return "max_time"
    return "trainer.should_stop was set"


def _broadcast(model: Any) -> list[str]:
    """Return the paths of buffers that DistributedDataParallel overwrites by rank 0's before each forward."""
    if not isinstance(model, DistributedDataParallel) or not model.broadcast_buffers:
        return []
    return [paths.child("model", paths.escape(name)) for name, _ in model.module.named_buffers(remove_duplicate=False)]


def _ends(trainer: Any) -> bool:
    loop = trainer.fit_loop
    epochs = -1 if loop.max_epochs is None else loop.max_epochs  # as for steps, -1 is no limit
    ended: bool = (
        (trainer.should_stop and loop._can_stop_early)
        or 0 <= loop.max_steps <= loop.epoch_loop.global_step
        or 0 <= epochs <= loop.epoch_progress.current.completed
    )
    return ended


def _around(
    loop: Any,
    name: str,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
    once: bool = False,
) -> None:
    """Wrap a method of a loop so that each call (or the next one only: ``once``) calls ``before`` and ``after``."""
    method = getattr(loop, name)

    def run(*arguments: Any) -> None:
        before()
        method(*arguments)
        if once:
            setattr(loop, name, method)
        after()

    setattr(loop, name, run)


def _forget_restart(loop: Any, *kept: Any) -> None:
    """Make the loops continue as if they had never stopped: the state is between two batches, with nothing to redo.

    Loops in ``kept`` stay marked as restarted until their next iteration.
    """
    for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        if each not in kept:
            each.on_iteration_done()


def _with_position(loop: Any) -> bool:
    """Return whether one of a loop's loaders restores its position by itself; False before they are set up."""
    return any(map(_has_position, flat(loop)))


def _has_position(loader: Any) -> bool:
    return hasattr(loader, "load_state_dict")


def _refuse_some_positions(loaders: list[Any]) -> None:
    """Raise ValueError for several loaders of which some have a position, unless all are ResumableLoaders."""
    kinds = [type(loader).__qualname__ for loader in loaders]
    own = [isinstance(loader, ResumableLoader) for loader in loaders]
    if len(loaders) > 1 and not all(own) and any(map(_has_position, loaders)):
        raise ValueError(
            f"training would not go on with the same batches after a restart: its loaders are {', '.join(kinds)}; of "
            "several loaders all are ResumableLoaders, or none has a load_state_dict (DataLoader)"
        )
