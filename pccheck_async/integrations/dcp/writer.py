# SPDX-License-Identifier: Apache-2.0
"""The storage writer for ``dcp.save`` and ``dcp.async_save``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pccheck_async.api import renamed
from pccheck_async.engine import EngineConfig
from pccheck_async.integrations.dcp.ids import CheckpointID, is_id, name_of
from pccheck_async.integrations.dcp.layout import state_of
from pccheck_async.integrations.dcp.saves import Saves, forget, place_for, saves_of
from pccheck_async.store import Keep

__all__ = ["StorageWriter"]


class StorageWriter(storage.StorageWriter):
    """Saves the plans of ``dcp.save`` and ``dcp.async_save``, crash-consistently on all ranks.

    ``checkpoint_id`` names a checkpoint under the root: the root joined with a name, or the name alone. A number at the
    end of the name is the step (``"run/step-10"``, ``"10"``); for other names, and without an id, the step is one more
    than the last. There are no folders of single checkpoints: ``keep_last`` and ``keep`` decide which ones are kept.

    With several ranks the root is the folder of a group. With one rank, if ``torch.distributed`` is not initialised or
    ``no_dist=True``, the root is a store of one process. The engine is opened at the first save and stays open until
    :meth:`close`, or the end of the process; all writers of a process with this root share it.

    Args:
        root: Folder of the checkpoints; created if it does not exist.
        keep_last: Number of the newest checkpoints that are kept.
        keep: Rules for further ones that are kept (:class:`pccheck_async.Keep`).
        timeout: Seconds within which all ranks must reach their first save.
        options: Further arguments of :class:`pccheck_async.CheckpointEngine` that concern saving, such as
            ``storage``.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int = 1,
        keep: Keep = Keep(),
        timeout: float = 300.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self._root = os.path.abspath(root)
        options = renamed("StorageWriter", {"keep_last": keep_last, "keep": keep, **options})
        self._settings = EngineConfig(overwrite=True, **options), timeout
        self._name: str | None = None
        self._rank = 0
        self._begun: Saves | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings alone, because another process opens an engine of its own."""
        return self.__dict__ | {"_begun": None}

    @property
    def checkpoint_id(self) -> str:
        """The path that names the checkpoint; the root if no name was given."""
        return self._root if self._name is None else os.path.join(self._root, self._name)

    def reset(self, checkpoint_id: CheckpointID | None = None) -> None:
        """Set the name of the next checkpoint alone. Raises ValueError if the id is outside the root."""
        self._name = name_of(checkpoint_id, self._root)

    def storage_meta(self) -> StorageMeta:
        """Begin a save, which DCP does by this call, first, on every rank; return the checkpoint's id."""
        self._begun = saves_of(self._root, *self._settings)
        self._begun.begin(self._name)
        meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        self._name = None
        return meta

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store this process's rank. Raises ValueError for ``use_collectives=False``."""
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False is not supported: ranks that do not plan together write no common checkpoint; "
                "leave it out, or save with no_dist=True and a root for each rank"
            )
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans with the address of the ranks' TCP store; only the first plan of a rank needs it."""
        place = place_for(self._root, len(plans))
        return [replace(plan, storage_data=place) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Capture this rank's part, write it, and wait until it is durable; :meth:`finish` waits for the commit.

        If this rank fails, the error is raised, and the checkpoint fails on all ranks.
        """
        saves = self._begun
        assert saves is not None
        saves.open(plan.storage_data, self._rank)
        saves.save(lambda: state_of(plan, planner, alone=saves.alone))
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Wait until the checkpoint is durable on all ranks. Nothing is written for DCP's ``metadata``.

        Durability: when this returns, the checkpoint survives power loss.

        Raises GroupError: the checkpoint failed on a rank.
        """
        assert self._begun is not None
        self._begun.finish()

    def close(self) -> None:
        """Close this process's engine for this root; the next save opens a new one. All ranks must call this.

        Not needed at the end of a process.
        """
        if (saves := forget(self._root)) is not None:
            saves.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointID) -> bool:
        """Return whether this can be a checkpoint id: a path, and no URL."""
        return is_id(checkpoint_id)
