"""Lightning's own checkpoints, each path a store of one checkpoint, written while training goes on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from pccheck_async.api import SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.engine import PendingCheckpoint
from pccheck_async.integrations.free_slots import remove_free_slots
from pccheck_async.medium.folder import sync
from pccheck_async.medium.renaming import exchange

__all__ = ["PCcheckIO"]

_MOST = 2
_METADATA = {"saved_by": "PCcheckIO"}


class PCcheckIO(TorchCheckpointIO):
    """Saves what ``trainer.save_checkpoint`` and ``ModelCheckpoint`` save, as folders; reads these, and files of torch.

    A save returns when the checkpoint is captured. Its path appears when it is durable, whole; a path that was there
    keeps what it had until then. Removals wait for the saves before them, and nothing is removed after a save that
    failed. The failure is raised by the next save, load or at the end.

    Args:
        settings: Of :class:`pccheck_async.SyncCheckpointEngine`, such as ``allow_pickle=True`` for hyperparameters that
            only pickle can hold.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = {"max_in_flight": 1, **settings}
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()
        self._unfinished: set[Path] = set()
        self._error: Exception | None = None  # of a save; nothing is removed until it was raised

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Capture a checkpoint; it gets its path when it is durable.

        Raises:
            TypeError: There are storage options.
            FileExistsError: The path is a folder of something else, such as the store of a PCcheckCallback.
            CheckpointError: An earlier save failed.
        """
        if storage_options is not None:
            raise TypeError("PCcheckIO has no storage options")
        place = Path(path).absolute()
        self._wait(0 if place in self._unfinished or os.path.lexists(place) else _MOST - 1)
        place.parent.mkdir(parents=True, exist_ok=True)
        in_place = place.is_dir() and not place.is_symlink()  # its commit replaces what it holds
        if in_place and not _is_own(place):
            raise FileExistsError(f"{place} is a folder that PCcheckIO did not save, and does not replace")
        # What a killed process left under that name is taken over; of one that lives, it is locked.
        store = place if in_place else place.with_name(f".{place.name}.saving")
        engine = SyncCheckpointEngine(store, **self._settings).open()
        try:
            pending = engine.checkpoint(checkpoint, step=checkpoint.get("global_step"), metadata=_METADATA)
        except BaseException:
            engine.close()
            raise
        self._unfinished.add(place)
        self._then(partial(_finish, engine, pending, store, place))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what was saved at a path: a folder of this class, or a file of ``torch.save``.

        With ``weights_only=True`` nothing is unpickled, whatever the settings allow.

        Raises:
            ValueError: The folder holds no checkpoint of this class.
        """
        self._wait(0)
        if not os.path.isdir(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        if not _is_own(path):
            raise ValueError(
                f"{path} is a folder that PCcheckIO did not save; PCcheckCallback resumes from its own by itself"
            )
        where = "cpu" if map_location is None else map_location
        allow_pickle = not weights_only and self._settings.get("allow_pickle", False)
        return load_sync(path, device=where, allow_pickle=allow_pickle)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove what is at a path, once the saves before have become durable."""
        self._then(partial(os.unlink if os.path.islink(path) else super().remove_checkpoint, path), removes=True)

    def teardown(self) -> None:
        """Wait until everything is durable; raises the failure of a save."""
        self._wait(0)

    def _then(self, work: Callable[[], None], *, removes: bool = False) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "pccheck-lightning")
        self._waiting.append(self._thread.submit(self._do, work, removes))

    def _do(self, work: Callable[[], None], removes: bool) -> None:
        if removes and self._error is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._error = self._error or error

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()
        if not self._waiting and self._thread is not None:
            self._unfinished.clear()
            self._thread.shutdown()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _is_own(path: str | Path) -> bool:
    saved = list_checkpoints(path)
    return bool(saved) and saved[0].metadata == _METADATA


def _finish(engine: SyncCheckpointEngine, pending: PendingCheckpoint, store: Path, place: Path) -> None:
    """Wait until a checkpoint is durable, and give it its path."""
    try:
        pending.result()
    finally:
        engine.close()
        remove_free_slots(store)
    if store == place:
        return
    try:
        os.rename(store, place)
    except NotADirectoryError:  # a file of torch.save, or a link
        exchange(store, place)
        store.unlink()
    sync(place.parent)  # else the path might be gone after a power failure, and a removal before it not
