# SPDX-License-Identifier: Apache-2.0
"""The storage reader for ``dcp.load``."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import add
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from pccheck_async.bucket import is_location
from pccheck_async.engine import call_once
from pccheck_async.errors import CorruptStoreError, GroupError, NoCheckpointError, ReadError, StateMismatchError
from pccheck_async.format import Entry, Key
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.group import chunk_pool, open_place
from pccheck_async.integrations.dcp.ids import ID_KEY, CheckpointID, is_id, name_of, step_of
from pccheck_async.integrations.dcp.layout import StoredItem, StoredValue, metadata_of
from pccheck_async.state import Box
from pccheck_async.state.restore.parts import StoredBox, Wanted, reshard
from pccheck_async.store import PartReader, Staging, only_rejected

__all__ = ["StorageReader"]


class _Chosen(NamedTuple):
    """The checkpoint that a rank chose to load."""

    key: Key
    step: int


class StorageReader(storage.StorageReader):
    """Loads checkpoints with ``dcp.load``, also beside a running writer, into any sharding and number of ranks.

    ``checkpoint_id`` is as for :class:`StorageWriter`: the newest checkpoint that was saved under this name is loaded,
    or else the newest of the step that the name ends with. Without an id (or with the root) the newest one is loaded.
    Every rank reads the manifests of all ranks' parts, so the root must be on a filesystem that all ranks share. Then
    each rank reads every chunk that it needs once, and verifies its checksum.

    Checkpoints of an engine are read, too: tensors and values have the names that DCP would give them; of values that
    each rank has for itself, only those of rank 0 can be loaded.

    Args:
        root: Folder of the checkpoints, or the URL of a bucket.
    """

    def __init__(self, root: CheckpointID) -> None:
        super().__init__()
        self._root = os.fspath(root).rstrip("/") if is_location(root) else os.path.abspath(root)
        self._name: str | None = None
        self._chosen: _Chosen | None = None
        self._stored: dict[Any, StoredItem | StoredValue] = {}

    @property
    def checkpoint_id(self) -> str:
        """The path that names the checkpoint; the root if no name was given."""
        return self._root if self._name is None else os.path.join(self._root, self._name)

    def reset(self, checkpoint_id: CheckpointID | None = None) -> None:
        """Set the name of the next checkpoint to load. Raises ValueError if the id is outside the root."""
        self._name = name_of(checkpoint_id, self._root)
        self._chosen = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Choose the checkpoint, and return DCP's metadata of it.

        Raises:
            NoCheckpointError: there is no checkpoint, or none of this name.
            IncompleteCheckpointError: the parts of some ranks are not in this folder.
            CorruptStoreError, ReadError: a record or a manifest cannot be read.
        """
        if "rank" in kwargs:  # after an error here, DCP requests that of this rank alone
            raise NoCheckpointError("there is no metadata of single ranks")
        self._chosen, manifests = call_once(_choose(self._root, self._name), "pccheck-dcp")
        metadata = metadata_of(manifests)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the metadata's places of tensors and values."""
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the checkpoint that this rank chose as ``storage_data``."""
        assert self._chosen is not None
        return replace(plan, storage_data=self._chosen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans; raise GroupError if ranks chose other checkpoints, as one was committed meanwhile."""
        if len({plan.storage_data for plan in plans}) > 1:
            steps = ", ".join(str(plan.storage_data.step) for plan in plans)
            raise GroupError(f"the ranks chose checkpoints of steps {steps}: one was committed meanwhile; load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan, tensors in place; values that are no tensors come last.

        Raises:
            DamagedError: a chunk is damaged, or the checkpoint was dropped meanwhile. Some tensors may be overwritten.
            ReadError: the device failed.
        """
        assert self._chosen is not None
        _Load(self._stored, plan.items, planner).run(self._root, self._chosen.key)
        read: Future[None] = Future()
        read.set_result(None)
        return read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointID) -> bool:
        """Return whether this can be a checkpoint id: a path, and no URL."""
        return is_id(checkpoint_id)


async def _choose(root: str, name: str | None) -> tuple[_Chosen, dict[int, Manifest]]:
    """Return the checkpoint of a name (None: the newest), and the manifests of its parts by rank."""
    async with await open_place(root, "auto") as place:
        if not place.complete:
            raise place.nothing(None)
        entry = _named([one.entry for one in place.complete], root, name)
        one = next(one for one in place.complete if one.entry is entry)
        staging, found = Staging(chunk_pool(MIN_BLOCK)), dict[int, Manifest]()
        for rank in range(one.world):
            async with _held(place.part(one.key, rank, staging)) as part:
                found[rank] = part.manifest
        return _Chosen(one.key, entry.step), found


def _named(entries: Sequence[Entry], root: str, name: str | None) -> Entry:
    """Return the newest entry of a name, or else of the step in it. Raises NoCheckpointError, StoreError."""
    step = step_of(name)
    found = [one for one in entries if name is None or one.metadata.get(ID_KEY) == name]
    found += [one for one in entries if step is not None and one.step == step]
    if error := only_rejected(found, None, root):
        raise error
    if found:
        return next(one for one in found if not one.rejected)
    there = ", ".join(str(one.metadata.get(ID_KEY, f"step {one.step}")) for one in entries)
    raise NoCheckpointError(f"{root} holds no checkpoint {'' if name is None else repr(name)}; there are: {there}")


@asynccontextmanager
async def _held(part: PartReader) -> AsyncGenerator[PartReader]:
    """Lock a part's slot while the part is read, and then close it. Raises CorruptStoreError, ReadError."""
    try:
        await part.hold()
        yield part
    finally:
        await part.close()


class _Load:
    """Reads the items of one plan, and gives them to the planner."""

    def __init__(
        self, stored: dict[Any, StoredItem | StoredValue], items: Sequence[ReadItem], planner: LoadPlanner
    ) -> None:
        self._planner = planner
        self._wanted: list[Wanted] = []
        self._boxes: dict[int, dict[str, list[StoredBox]]] = {}  # by rank and name, which identify each
        self._tensors: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []  # the planner's, and those to fill
        self._bytes: list[tuple[ReadItem, torch.Tensor]] = []
        self._values: list[tuple[ReadItem, StoredValue]] = []
        for item in items:
            where = stored[item.storage_index]
            if isinstance(where, StoredValue):
                self._values.append((item, where))
            elif item.type is LoadItemType.BYTE_IO:
                data = torch.empty(where.shape, dtype=torch.uint8)
                self._bytes.append((item, data))
                self._want(item, where, where.box.offsets, data)
            else:
                self._want_tensor(item, where)

    def _want_tensor(self, item: ReadItem, where: StoredItem) -> None:
        target = self._planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            name = item.storage_index.fqn
            raise ValueError(f"{name}: the planner gives the shape {tuple(target.shape)}, not {tuple(item.lengths)}")
        filled = target if target.dtype == where.dtype else torch.empty(target.shape, dtype=where.dtype)
        self._tensors.append((item, target, filled))
        self._want(item, where, [*map(add, where.box.offsets, item.storage_offsets)], filled)

    def _want(self, item: ReadItem, where: StoredItem, offsets: Sequence[int], local: torch.Tensor) -> None:
        name, box = f"{where.rank}/{where.path}/{where.box.offsets}", where.box
        self._boxes.setdefault(box.part, {})[name] = [box._replace(mesh=0)]
        live = Box(tuple(offsets), tuple(local.shape), (0,) * local.ndim)
        self._wanted.append(Wanted(item.dest_index.fqn, name, 0, where.shape, live, local, local))

    def run(self, root: str, key: Key) -> None:
        """Read all items, and give them to the planner."""
        if self._wanted:
            call_once(self._fill(root, key), "pccheck-dcp")
            for one in self._wanted:
                one.finish()
        for item, target, filled in self._tensors:
            if filled is not target:
                target.copy_(filled)
            self._planner.commit_tensor(item, target)
        for item, data in self._bytes:
            self._planner.load_bytes(item, io.BytesIO(data.numpy().tobytes()))
        for item, stored in self._values:
            buffer = io.BytesIO()
            torch.save(stored.value, buffer)
            buffer.seek(0)
            self._planner.load_bytes(item, buffer)

    async def _fill(self, root: str, key: Key) -> None:
        async with await open_place(root, "auto") as place:
            staging = Staging(chunk_pool(MIN_BLOCK))
            parts = {rank: place.part(key, rank, staging) for rank in self._boxes}
            first = min(parts)
            self._wanted = [one.placed(parts[first].backend.by_address) for one in self._wanted]
            planned, troubles = reshard(self._wanted, self._boxes, first)
            if troubles:
                raise StateMismatchError(f"what is to be loaded does not fit: {', '.join(troubles)}")
            begun = False
            for rank, targets in planned.items():
                try:
                    async with _held(parts[rank]) as part:
                        begun = True
                        await part.fill(targets)
                except (CorruptStoreError, ReadError) as error:
                    if begun:
                        error.add_note("the tensors to be loaded may hold parts of this checkpoint")
                    raise
