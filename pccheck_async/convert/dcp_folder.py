# SPDX-License-Identifier: Apache-2.0
"""Writes a folder of ``torch.distributed.checkpoint`` by that package itself, which gets the tensors one by one."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save, save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pccheck_async.api import Connection, StoredTensor
from pccheck_async.convert.selection import SAVED, Saved, Selection, divided, refusal
from pccheck_async.convert.target import new_folder
from pccheck_async.errors import CheckpointError, UnsupportedStateError
from pccheck_async.format.skeleton import ArrayNode, CounterNode, DictNode, ListNode, Node, OrderedDictNode, PickledNode
from pccheck_async.state import paths
from pccheck_async.state.restore.tree import below, leaves, mapping_keys, opened, rebuild

__all__ = ["PART_BYTES", "write"]

PART_BYTES: Final = 32 << 20
_FILE: Final = 64 << 20
"""Most bytes of tensors in one file, and so in memory at a time."""


def write(selection: Selection, connection: Connection, path: Path) -> None:
    """Write the selection into a new folder.

    Raises:
        UnsupportedStateError: DCP cannot write some values (lists them), or two leaves would have one name.
    """
    planner = _Planner(connection)
    state = planner.tree(selection.node, "", selection)
    selection.check("a folder of torch.distributed.checkpoint")
    if not isinstance(state, dict):
        raise UnsupportedStateError("a folder of torch.distributed.checkpoint holds a dict; choose another root")
    with new_folder(path) as folder:
        writer = _Writer(folder)
        try:
            _save_alone(state, writer, planner)
        except CheckpointException as error:
            failure = next(iter(error.failures.values()), (error,))[0]
            if isinstance(failure, ValueError) and not isinstance(failure, CheckpointError):  # two leaves of one name
                raise UnsupportedStateError(f"torch.distributed.checkpoint refuses this state: {failure}") from error
            raise failure from error
        (folder / SAVED).write_bytes(Saved.encoded(connection.entry.info))


def _save_alone(state: dict[str, Any], writer: FileSystemWriter, planner: SavePlanner) -> None:
    """Save from this process alone, even if ``torch.distributed`` is initialised."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be here
        if "no_dist" in inspect.signature(save).parameters:
            save(state, storage_writer=writer, planner=planner, no_dist=True)
        else:  # torch up to 2.6
            warnings.simplefilter("ignore", FutureWarning)
            save_state_dict(state, writer, no_dist=True, planner=planner)


class _Writer(FileSystemWriter):
    """Writes several files, because the base class keeps all tensors of a file in memory until it is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file after the other."""
        files = [
            dataclasses.replace(plan, items=items, storage_data=None) for items in divided(plan.items, _nbytes, _FILE)
        ]
        results: list[WriteResult] = []
        for file in self.prepare_global_plan(files):
            results += super().write_data(file, planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


class _Lazy:
    """Stand-in for an array inside a value that is pickled as a whole; it is read when it is pickled, as the array."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._stored.read().__reduce_ex__(protocol)


class _Planner(DefaultSavePlanner):
    """A planner that has tensors without data, divides large ones, and reads each part when it is written."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._stored: dict[int, tuple[torch.Tensor, StoredTensor]] = {}  # by the identity of its stand-in

    def tree(self, node: Node, path: str, selection: Selection) -> Any:
        """Return the state with stand-ins for its arrays; add values that DCP cannot write to ``selection.refused``."""

        def inside(node: Node) -> list[Any]:
            return [self.tree(child, paths.child(path, name), selection) for name, child in below(node)]

        node = opened(node)
        match node:
            case ArrayNode():
                stored = self._stored_tensor(node, path, selection, pickled=False)
                return _Lazy(stored) if stored.kind == "ndarray" else self._stand_in(stored)
            case DictNode() | OrderedDictNode() | CounterNode():
                if not node.values:
                    kind = type(node).__name__[:-4].lower()
                    selection.changed.append(f"{path or 'the state'} (an empty {kind}, left out)")
                return dict(zip(mapping_keys(node), inside(node), strict=True))
            case ListNode():
                return inside(node)
            case _:
                named = list(leaves(node, path))
                names = {id(leaf): name for name, leaf in named}
                stand_ins = {
                    leaf.index: _Lazy(self._stored_tensor(leaf, name, selection, pickled=True))
                    for name, leaf in named
                    if isinstance(leaf, ArrayNode)
                }

                def refuse(value: PickledNode) -> None:  # one in an OrderedDict's _metadata is no leaf
                    selection.refused.append(f"{names.get(id(value), path)} (a pickled {value.kind})")

                # Arrays that are not leaves (an OrderedDict's _metadata) and composed ones were refused in select_part.
                return rebuild(node, stand_ins.get, pickled=refuse, composed=lambda *_: None)

    def _stored_tensor(self, node: ArrayNode, path: str, selection: Selection, *, pickled: bool) -> StoredTensor:
        entry = self._connection.manifest.tensors[node.index]
        # A pickled array needs a dtype that torch can pickle; torch.distributed.checkpoint need not support it.
        if entry.kind != "ndarray" and (trouble := refusal(entry, "torch" if pickled else "dcp")):
            selection.refused.append(f"{path} {trouble}")
        return StoredTensor(self._connection, entry, path)

    def _stand_in(self, stored: StoredTensor) -> torch.Tensor:
        assert isinstance(stored.dtype, torch.dtype)
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        if stored.kind == "parameter":
            tensor = torch.nn.Parameter(tensor, stored.requires_grad)
        else:
            tensor.requires_grad_(stored.requires_grad)
        self._stored[id(tensor)] = tensor, stored
        return tensor

    def create_local_plan(self) -> SavePlan:
        """Return the plan of the base class, with large tensors divided."""
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._divided(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _divided(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if item.type is not WriteItemType.TENSOR or data is None or not data.size:
            return [item]
        itemsize = data.properties.dtype.itemsize
        row = data.size[1:].numel() * itemsize
        count = max(1, PART_BYTES // max(row, 1))
        if data.size[0] <= count:
            return [item]
        divided = []
        for start in range(0, data.size[0], count):
            offsets = torch.Size([start, *[0] * (len(data.size) - 1)])
            sizes = torch.Size([min(count, data.size[0] - start), *data.size[1:]])
            part = dataclasses.replace(data, chunk=ChunkStorageMetadata(offsets, sizes))
            divided.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=part))
        return divided

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of an item; for a tensor, read it now."""
        found = self._stored.get(id(self.state_dict.get(write_item.index.fqn)))
        if found is None:
            return super().resolve_data(write_item)
        stored, data = found[1], write_item.tensor_data
        if write_item.type is WriteItemType.TENSOR or data is None:
            return stored.read().detach()
        start = data.chunk.offsets[0]
        return stored[start : start + data.chunk.sizes[0]]
