# SPDX-License-Identifier: Apache-2.0
"""A checkpoint manager for TorchTitan that saves into a group's store; name it in a job's configuration.

::

    from pccheck_async.integrations.torchtitan import CheckpointManager  # not from torchtitan.components.checkpointer

    Trainer.Config(checkpoint=CheckpointManager.Config(enable=True, interval=100, keep_latest_k=3), ...)

Tested with TorchTitan 0.3.0. The interface changes between versions. These parts of it are used: the hooks of
``BaseCheckpointManager`` (``_load``, ``_save``, ``_wait_for_saving``, ``_maybe_wait_for_staging``, ``_close``) and, of
``CheckpointManager``, ``_should_save``, ``_save_last_step`` and the same five hooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from pccheck_async.api import SyncCheckpointEngine
from pccheck_async.errors import NoCheckpointError, StateMismatchError
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.integrations.versions import require
from pccheck_async.state import RNGState

require("torchtitan", "0.3")

from torchtitan.components.checkpointer import DATALOADER  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager as Base  # noqa: E402

__all__ = ["CheckpointManager"]

RNG: Final = "rng"
"""Key in the checkpoint of each rank's random number generators, which TorchTitan itself does not save."""


class CheckpointManager(Base):
    """Saves all ranks' state together, while training continues; arguments are those of TorchTitan's CheckpointManager.

    A checkpoint holds the state that TorchTitan saves (model parts, optimizers, learning rate schedulers, data loader,
    step) and the random number generators of each rank. It is captured during the next forward and backward pass, and
    is complete on all ranks or does not exist. ``keep_latest_k`` is the engine's ``keep_last``; ``async_mode`` is
    ignored.

    Checkpoints are in ``folder``, the store of one group. If there is none, TorchTitan's own manager loads:
    ``initial_load_path``, or the newest ``step-N`` of an earlier run of TorchTitan in the same folder. A last step that
    is saved as model only (``last_save_model_only``, TorchTitan's default) is an export, which TorchTitan writes as
    ``step-N``; a restart resumes from the newest complete checkpoint, and not from the export.

    Attributes:
        engine: The engine; for ``statistics()``, ``on_event`` and the like.

    Raises:
        ValueError: ``keep_latest_k`` is 0 (all), 1, or more than a store keeps.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Base.Config):
        """The settings of TorchTitan's CheckpointManager, with a limit of ``keep_latest_k``."""

        def __post_init__(self) -> None:
            Base.Config.__post_init__(self)
            if self.enable and not 2 <= self.keep_latest_k <= MOST_ENTRIES:
                raise ValueError(
                    f"checkpoint.keep_latest_k is 2 to {MOST_ENTRIES}: a store names at most {MOST_ENTRIES} "
                    f"checkpoints, so it cannot keep {self.keep_latest_k or 'all'}"
                )

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if not self.enable:
            return
        self.save_future: Any = None
        self.engine = SyncCheckpointEngine(self.folder, keep_last=config.keep_latest_k, group=dist.group.WORLD)
        self.engine.open()
        self.engine.attach(*components["optimizers"])

    def _all_states(self) -> dict[str, Any]:
        return {**self.states, RNG: RNGState()}

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if last_step and self.last_save_model_only:
            self._save_last_step(curr_step)
            return True
        self.save_future = self.engine.checkpoint(self._all_states(), step=curr_step, overlap=True)
        if last_step:
            self.maybe_wait_for_saving()
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        excluded, state = self.exclude_from_loading, self._all_states()
        for name in excluded:
            if state.pop(name, state) is state:
                raise ValueError(f"checkpoint.exclude_from_loading: {name!r} is not one of {', '.join(state)}")
        try:
            restored = self.engine.restore(state, step=None if step == -1 else step, strict=not excluded)
        except NoCheckpointError:
            restored = None
        if restored is None:
            loaded, newest = bool(super()._load(step)), self.engine.latest
            if loaded and newest is not None and newest.step > step:
                raise ValueError(
                    f"step {step} of TorchTitan's own was loaded, and {self.engine.path} holds step {newest.step}: "
                    "load without a step to go on from that, or give another folder"
                )
            return loaded
        if restored.missing:
            raise StateMismatchError(missing=restored.missing)
        self._make_iterator()
        return True

    def _make_iterator(self) -> None:
        """Make the data loader create its iterator now, without changing the random number generators.

        Creating it draws a random number, which the step after the checkpoint did not draw in the saved run.
        ``state_dict()`` creates the iterator of a ``StatefulDataLoader``, and its next ``iter()`` uses that.
        """
        if (loader := self.states[DATALOADER]) is not None:
            rng = RNGState()
            drawn = rng.state_dict()
            loader.state_dict()
            rng.load_state_dict(drawn)

    def _wait_for_saving(self) -> None:
        self.save_future.result()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        self.engine.wait_captured()

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "engine"):  # else its opening failed
            self.engine.close()
