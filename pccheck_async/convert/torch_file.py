# SPDX-License-Identifier: Apache-2.0
"""Writes a file of ``torch.save``: a zip archive of stored records, one per storage, and a pickle of views of them.

Storages are written as they are in the payload, so views, strides and ties are kept. Storages that tensors of several
dtypes view are written untyped, in the form that torch itself uses for its newer dtypes.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from pickle import Pickler
from typing import Any, Final

import torch

from pccheck_async.api import Connection
from pccheck_async.convert.selection import SAVED, Saved, Selection, native, pickled, torch_name
from pccheck_async.convert.target import Sink, new_file
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import ALIGNMENT, TensorEntry, viewed_ranges
from pccheck_async.format.skeleton import Node
from pccheck_async.state.restore.tree import rebuild
from pccheck_async.store import CheckpointReader

__all__ = ["Archive", "write"]

_FOLDER: Final = "archive/"
_PROTOCOL: Final = 2
_ALIGNMENT: Final = 64
"""Alignment of a record's bytes in the file, as in torch's files, so that they can be mapped."""
_EXTRA: Final = 0x4246
"""Number of the extra field in zip headers that torch uses for padding."""


def write(selection: Selection, connection: Connection, path: Path) -> None:
    """Write the selection into a new file; memory is bounded by a few chunks, and all values that are not arrays.

    Raises UnsupportedStateError with a list of the values that ``torch.load(weights_only=True)`` could not read.
    """
    node = native(selection.node, "", selection)
    selection.refuse_arrays("torch")
    arrays = [name for name, entry in selection.arrays.items() if entry.kind == "ndarray"]
    selection.changed += [f"{name} (a numpy array, as a tensor)" for name in arrays]
    selection.check("a file of torch.save that is read with weights_only=True")
    connection.call(_write(node, selection, connection, path))


async def _write(node: Node, selection: Selection, connection: Connection, path: Path) -> None:
    storages = _storages(selection)
    async with new_file(path) as file:
        archive = Archive(file)
        await archive.record("data.pkl", _pickled(node, selection, storages))
        await archive.record("byteorder", sys.byteorder.encode())
        for storage in storages.values():
            await archive.stream(f"data/{storage.key}", storage.nbytes, storage.pieces(connection.checkpoint))
        await archive.record(SAVED, Saved.encoded(connection.entry.info))
        await archive.record("version", b"3\n")
        await archive.end()


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage in the file: ``nbytes`` bytes from ``base`` on; bytes that no exported tensor views are zero."""

    key: str
    offset: int
    base: int
    nbytes: int
    ranges: list[tuple[int, int]]
    dtype: torch.dtype | None

    async def pieces(self, checkpoint: CheckpointReader) -> AsyncGenerator[memoryview | bytes, None]:
        """Yield the bytes in pieces, each valid until the next is requested."""
        end, behind = self.base, self.base + self.nbytes
        for low, high in (*self.ranges, (behind, behind)):
            for start in range(end, low, 1 << 20):
                yield bytes(min(1 << 20, low - start))
            async with aclosing(checkpoint.pieces([(self.offset + low, self.offset + high)])) as pieces:
                async for piece in pieces:
                    yield piece
            end = high


def _storages(selection: Selection) -> dict[int, _Storage]:
    """Return the layout of each storage that exported tensors view, by the storage's index in the manifest."""
    views: dict[int, list[TensorEntry]] = {}
    for entry in selection.arrays.values():
        if entry.storage is not None:
            views.setdefault(entry.storage, []).append(entry)
    storages: dict[int, _Storage] = {}
    for index in sorted(views):
        entries = views[index]
        ranges = viewed_ranges(entries)
        names = {torch_name(entry) for entry in entries}
        dtype = dtypes.torch_dtype(str(*names)) if len(names) == 1 else None
        base = ranges[0][0] // ALIGNMENT * ALIGNMENT
        nbytes = ranges[-1][1] - base
        if dtype is not None:
            nbytes += -nbytes % dtype.itemsize
        offset = selection.manifest.storages[index].offset
        storages[index] = _Storage(str(len(storages)), offset, base, nbytes, ranges, dtype)
    return storages


@dataclass(frozen=True, slots=True, eq=False)
class _StorageName:
    """Stand-in for a storage in the pickle."""

    persistent_id: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """Stand-in for a tensor in the pickle: the function that rebuilds it, and the arguments."""

    reduced: tuple[Any, tuple[Any, ...]]


class _Pickler(Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _StorageName) else None

    def reducer_override(self, obj: Any) -> Any:
        return obj.reduced if isinstance(obj, _View) else NotImplemented


def _pickled(node: Node, selection: Selection, storages: dict[int, _Storage]) -> bytes:
    tensors = selection.manifest.tensors
    empty = iter(range(len(storages), len(storages) + len(tensors)))
    names: dict[tuple[str, Any], _StorageName] = {}

    def view(index: int) -> _View:
        entry = tensors[index]
        dtype = dtypes.torch_dtype(str(torch_name(entry)))
        make, kind = pickled(dtype)
        storage = None if entry.storage is None else storages[entry.storage]
        if storage is not None and storage.dtype is None:
            make, kind = torch._utils._rebuild_tensor_v3, torch.UntypedStorage
        size = 1 if kind is torch.UntypedStorage else dtype.itemsize
        if storage is None:
            storage = _Storage(str(next(empty)), 0, entry.offset, 0, [], dtype)
            storages[-int(storage.key) - 1] = storage
        fresh = _StorageName(("storage", kind, storage.key, "cpu", storage.nbytes // size))
        name = names.setdefault((storage.key, kind), fresh)
        offset = (entry.offset - storage.base) // dtype.itemsize
        own = entry.requires_grad and entry.kind == "tensor"
        arguments: tuple[Any, ...] = (name, offset, entry.shape, entry.stride, own, OrderedDict())
        if make is torch._utils._rebuild_tensor_v3:
            arguments += (dtype,)
        plain = _View((make, arguments))
        if entry.kind != "parameter":
            return plain
        return _View((torch._utils._rebuild_parameter, (plain, entry.requires_grad, OrderedDict())))

    buffer = io.BytesIO()
    _Pickler(buffer, _PROTOCOL).dump(rebuild(node, view))
    return buffer.getvalue()


class Archive:
    """Writes a zip archive of stored records, aligned as in torch's files.

    zipfile writes into this object, forward only, because it cannot seek; the bytes go to the file after every piece.
    """

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._waiting: list[Any] = []
        self._written = 0
        forward: Any = self
        self._zip = zipfile.ZipFile(forward, "w", zipfile.ZIP_STORED)

    def write(self, data: Any, /) -> int:
        """Queue bytes for the file, which must not change until they are written; return their number."""
        nbytes = memoryview(data).nbytes
        self._waiting.append(data)
        self._written += nbytes
        return nbytes

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self._written

    def flush(self) -> None:
        """Do nothing: the queued bytes are written after every piece."""

    async def record(self, name: str, data: bytes) -> None:
        """Write a small record."""

        async def once() -> AsyncGenerator[bytes, None]:
            yield data

        await self.stream(name, len(data), once())

    async def stream(self, name: str, nbytes: int, pieces: AsyncGenerator[Any, None]) -> None:
        """Write a record of ``nbytes`` bytes from pieces."""
        info = zipfile.ZipInfo(_FOLDER + name)  # the date of all is 1980: equal states make equal files
        info.file_size, info.CRC = nbytes, 0  # the sum follows behind the bytes
        large = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile itself decides
        padding = -(self._written + len(info.FileHeader(zip64=large)) + 4) % _ALIGNMENT
        info.extra = _EXTRA.to_bytes(2, "little") + padding.to_bytes(2, "little") + b"Z" * padding
        async with aclosing(pieces):
            with self._zip.open(info, "w") as entry:
                async for piece in pieces:
                    entry.write(piece)
                    await self._drain()

    async def end(self) -> None:
        """Write the archive's directory of the records."""
        self._zip.close()
        await self._drain()

    async def _drain(self) -> None:
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            await self._file.write(data)
