# SPDX-License-Identifier: Apache-2.0
"""A ``CheckpointIO`` for Lightning's own checkpoints: each path is a store of one, written while training continues."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from pccheck_async.api import SyncCheckpointEngine, engine_settings, list_checkpoints, load_sync
from pccheck_async.engine import PendingCheckpoint
from pccheck_async.integrations.free_slots import remove_free_slots
from pccheck_async.integrations.lightning.in_turn import InTurn
from pccheck_async.medium.folder import sync
from pccheck_async.medium.renaming import exchange

__all__ = ["METADATA", "OTHERS", "PCcheckIO", "is_own", "put_in_place"]

_MOST = 2
METADATA = {"saved_by": "PCcheckIO"}
OTHERS = "pccheck_others"
"""Key of everything but model and optimizers in a checkpoint of a PCcheckModelParallelStrategy."""


class PCcheckIO(TorchCheckpointIO):
    """Saves checkpoints of ``trainer.save_checkpoint`` and ``ModelCheckpoint`` as folders; reads these and torch files.

    A save returns when the checkpoint is captured. Its path appears, complete, when the checkpoint is durable; an older
    checkpoint at the path stays until then. Removals wait for the saves before them. After a save that failed nothing
    is removed until the next save, load or teardown has raised the error.

    Args:
        settings: Settings of :class:`pccheck_async.SyncCheckpointEngine`, such as ``allow_pickle=True`` for
            hyperparameters that only pickle can save.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = {"max_in_flight": 1, "overwrite": True, **engine_settings("PCcheckIO", settings)}
        self._turn = InTurn()
        self._unfinished: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Capture a checkpoint; its path appears when it is durable.

        Raises:
            TypeError: ``storage_options`` are given.
            FileExistsError: The path is a folder that is no such checkpoint, such as the store of a PCcheckCallback.
            CheckpointError: An earlier save failed.
        """
        if storage_options is not None:
            raise TypeError("PCcheckIO has no storage options")
        place = Path(path).absolute()
        self._wait(0 if place in self._unfinished or os.path.lexists(place) else _MOST - 1)
        place.parent.mkdir(parents=True, exist_ok=True)
        in_place = place.is_dir() and not place.is_symlink()  # its commit replaces the contents
        if in_place and not is_own(place):
            raise FileExistsError(f"{place} is a folder that PCcheckIO did not save, and does not replace")
        # Leftovers of a killed process under that name are taken over; those of a live one are locked.
        store = place if in_place else place.with_name(f".{place.name}.saving")
        engine = SyncCheckpointEngine(store, **self._settings).open()
        try:
            step = checkpoint.get("global_step")
            pending = engine.checkpoint(checkpoint, step=step, metadata=METADATA)
        except BaseException:
            engine.close()
            raise
        self._unfinished.add(place)
        self._turn.then(partial(_finish, engine, pending, store, place))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at a path: a folder of this class, or a file of ``torch.save``.

        With ``weights_only=True`` nothing in a folder is unpickled, even with ``allow_pickle=True``.

        Raises:
            ValueError: The folder holds no checkpoint of this class.
        """
        self._wait(0)
        if not os.path.isdir(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        if not is_own(path):
            raise ValueError(
                f"{path} is a folder that PCcheckIO did not save; PCcheckCallback resumes from its own by itself"
            )
        where = "cpu" if map_location is None else map_location
        allow_pickle = not weights_only and self._settings.get("allow_pickle", False)
        found = load_sync(path, device=where, allow_pickle=allow_pickle)
        others: dict[str, Any] = found.pop(OTHERS, {})
        return found | others

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at a path in the background, once earlier saves are durable; not if one failed."""
        self._turn.then(partial(os.unlink if os.path.islink(path) else super().remove_checkpoint, path), removes=True)

    def teardown(self) -> None:
        """Wait until all saves are durable, and raise the error of one that failed."""
        self._wait(0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings alone: saves in progress stay with this object when a Trainer is copied or pickled."""
        return self._settings

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__init__(**settings)  # type: ignore[misc]

    def _wait(self, most: int) -> None:
        self._turn.wait(most)
        if most == 0:
            self._unfinished.clear()


def is_own(path: str | Path) -> bool:
    """Return whether a folder is a checkpoint that PCcheckIO or PCcheckModelParallelStrategy saved."""
    saved = list_checkpoints(path)
    return bool(saved) and saved[0].metadata == METADATA


def _finish(engine: SyncCheckpointEngine, pending: PendingCheckpoint, store: Path, place: Path) -> None:
    """Wait until a checkpoint is durable, close its engine, and rename its store to its path."""
    try:
        pending.result()
    finally:
        engine.close()
        remove_free_slots(store)
    put_in_place(store, place)


def put_in_place(store: Path, place: Path) -> None:
    """Rename a closed store to its path, and set the path's time to now, by which Lightning finds ``"last"``."""
    if store != place:
        try:
            os.rename(store, place)
        except NotADirectoryError:  # a file of torch.save, or a link
            exchange(store, place)
            store.unlink()
        sync(place.parent)  # else the path might be gone after a power failure, and a removal before it not
    os.utime(place)
