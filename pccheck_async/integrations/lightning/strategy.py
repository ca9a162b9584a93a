# SPDX-License-Identifier: Apache-2.0
"""A strategy for FSDP2 and tensor parallelism: ``trainer.save_checkpoint`` and ``ModelCheckpoint`` save the shards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy

from pccheck_async.api import SyncCheckpointEngine
from pccheck_async.group import read_place
from pccheck_async.integrations.free_slots import remove_free_slots
from pccheck_async.integrations.lightning.checkpoint_io import METADATA, OTHERS, is_own, put_in_place
from pccheck_async.integrations.lightning.in_turn import InTurn

__all__ = ["PCcheckModelParallelStrategy"]


class PCcheckModelParallelStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` whose checkpoints are written while training continues, by all ranks together.

    Nothing is gathered: each rank saves its shards, and they can be restored onto any other number of ranks. Each path
    is the folder of a group with one checkpoint, on a filesystem that all ranks share. The path appears when the
    checkpoint is durable on all ranks. Removals and failures are handled as by :class:`PCcheckIO`, which can load such
    a path in full, in one process.

    Args:
        arguments: Positional arguments of ``ModelParallelStrategy``.
        engine: Settings of :class:`pccheck_async.SyncCheckpointEngine`.
        named: Keyword arguments of ``ModelParallelStrategy``.
    """

    def __init__(self, *arguments: Any, engine: Mapping[str, Any] | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._settings = {"max_in_flight": 1, "overwrite": True, **(engine or {})}
        self._turn = InTurn()
        self._unfinished: set[Path] = set()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state_dict: this rank's shards, and tensors that all ranks have whole."""
        assert self.model is not None
        return dict(self.model.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return this rank's shards of an optimizer's state."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return dict(inner.state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Capture a checkpoint on all ranks; its path appears when it is durable on all of them.

        Raises:
            TypeError: ``storage_options`` are given.
            FileExistsError: The path is a folder that is no such checkpoint.
            CheckpointError: An earlier save failed.
        """
        if storage_options is not None:
            raise TypeError("PCcheckModelParallelStrategy has no storage options")
        place = Path(os.path.abspath(filepath))
        in_place = place.is_dir() and not place.is_symlink()
        found = place, os.path.lexists(place), in_place, in_place and is_own(place)
        place, there, in_place, own = self.broadcast(found)
        if in_place and not own:
            raise FileExistsError(f"{place} is a folder that PCcheckIO did not save, and does not replace")
        self._turn.wait(0 if there or place in self._unfinished else 1)
        self._unfinished.add(place)
        store = place if in_place else place.with_name(f".{place.name}.saving")
        parts = {name: checkpoint.pop(name, []) for name in ("state_dict", "optimizer_states")}
        engine = SyncCheckpointEngine(store, **{"group": dist.group.WORLD, **self._settings}).open()
        try:
            step = checkpoint.get("global_step")
            pending = engine.checkpoint({**parts, OTHERS: checkpoint}, step=step, metadata=METADATA)
        except BaseException:
            engine.close()
            raise

        def finish() -> None:
            try:
                pending.result()
            finally:
                engine.close()  # on rank 0 after the others
            if self.is_global_zero:
                for part in store.glob("rank-*"):
                    remove_free_slots(part)
                put_in_place(store, place)

        self._turn.then(finish)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore model and optimizers in place; return the rest of the checkpoint. Reads folders of torch's DCP, too.

        Raises:
            ValueError: One process saved the checkpoint.
            StateMismatchError: The checkpoint is of another model; nothing was changed.
        """
        self._turn.wait()
        dist.barrier()  # rank 0 gives the paths
        path = Path(self.broadcast(checkpoint_path))
        if not is_own(path):
            return dict(super().load_checkpoint(path, weights_only))
        read_place(path).check_group("one process saved it; load it with PCcheckIO")
        assert self.lightning_module is not None
        others = _Others()
        state: dict[str, Any] = {"state_dict": self.model, OTHERS: others}
        if trains := bool(self.optimizers):
            state["optimizer_states"] = [*self.optimizers]
        with SyncCheckpointEngine(path, **{"group": dist.group.WORLD, **self._settings}) as engine:
            strict = trains and self.lightning_module.strict_loading
            # Each rank's own values are of its batches: states of loops and callbacks, and averages of BatchNorm.
            own = [
                f"{OTHERS}.*",
                *(f"state_dict.{name}" for name, _ in self.model.named_buffers(remove_duplicate=False)),
            ]
            engine.restore(state, strict=strict, private=own)
        return others.loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the checkpoint at a path in the background, once earlier saves are durable; not if one failed."""
        if self.is_global_zero:
            self._turn.then(partial(shutil.rmtree, filepath), removes=True)

    def teardown(self) -> None:
        """Wait until all saves are durable, and raise the error of one that failed."""
        try:
            self._turn.wait()
        finally:
            super().teardown()


class _Others:
    """Receives the parts of a checkpoint other than model and optimizers: loops, schedulers, states of callbacks."""

    loaded: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.loaded = dict(state)
