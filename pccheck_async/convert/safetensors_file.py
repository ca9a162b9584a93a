# SPDX-License-Identifier: Apache-2.0
"""Writes a file of safetensors: a header in JSON, and the bytes of the tensors after it.

Or a folder of several such files with an index, in the layout of Hugging Face's libraries.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import torch

from pccheck_async.api import Connection, rows
from pccheck_async.convert.selection import SAFETENSORS, Saved, Selection, contiguous, divided, torch_name
from pccheck_async.convert.target import new_file, new_folder
from pccheck_async.errors import readable
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.format.skeleton import ArrayNode, Node, replace_arrays
from pccheck_async.state import Array, as_bits

__all__ = [
    "INDEX", "STATE", "TAKEN", "WHOLE", "StoredArray", "StoredStructure", "check_metadata", "parts", "write",
]  # fmt: skip

WHOLE: Final = "model.safetensors"
"""Name of the file in a folder with one file."""
INDEX: Final = "model.safetensors.index.json"
"""Name of the index in a folder with several files, which has the file of each tensor."""

STATE: Final = "pccheck_async.state"
_VALUES: Final = "pccheck_async.values"
TAKEN: Final = frozenset({"format", "total_size", STATE, _VALUES})
"""Keys of metadata that the format, Hugging Face's libraries or this package use themselves."""
_PART: Final = 32 << 20
_MOST_HEADER: Final = 100_000_000
"""Most bytes of a header; readers of the format refuse more."""


class StoredArray(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Properties of an array that the format itself cannot express.

    Attributes:
        name: Name of the array in the file.
        kind: Kind of the array in the state.
        requires_grad: Whether the array required gradients.
        tied_to: Index of the first array that is the same view of the same memory; of itself if there is no other.
    """

    name: str
    kind: Literal["tensor", "parameter", "ndarray"]
    requires_grad: bool
    tied_to: int


class StoredStructure(Saved, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The structure of the state without the bytes of its arrays, stored in the metadata as msgpack in base64.

    ``ArrayNode.index`` is an index into ``arrays``.
    """

    version: int
    skeleton: Node
    arrays: list[StoredArray]


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise TypeError if a user's metadata do not map str to str, ValueError if a key is one of :data:`TAKEN`."""
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise TypeError("metadata of safetensors maps str to str")
    if taken := sorted(TAKEN & metadata.keys()):
        raise ValueError(f"metadata has {', '.join(taken)}, which the export writes itself")


def write(
    selection: Selection, connection: Connection, path: Path, about: Mapping[str, str], most: int | None = None
) -> None:
    """Write the selection into a new file, or folder; memory is bounded by a few chunks.

    With ``most``, write a folder: files of at most ``most`` bytes of tensors each and an index, or one file without an
    index if that is enough. The structure of the whole state, and the user's metadata ``about``, are in the metadata of
    the file, or of the index. Raises UnsupportedStateError with a list of everything that the format cannot express.
    """
    names = _checked_names(selection)
    metadata = {**_metadata(selection, connection, names), **about}
    arrays = _in_payload_order(selection)
    files = [arrays] if most is None else divided(arrays, lambda item: item[1].nbytes, most)
    # Wide ones first, so that all are aligned; within a width the order stays.
    files = [sorted(file, key=lambda item: -item[1].itemsize) for file in files]
    if len(files) == 1:
        headers, titles = [_header(selection, metadata, names, files[0])], [WHOLE]
    else:
        headers = [_header(selection, {"format": metadata["format"]}, names, file) for file in files]
        titles = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if most is None:
        connection.call(_write(connection, headers[0], files[0], path))
        return
    with new_folder(path) as folder:
        for title, header, file in zip(titles, headers, files, strict=True):
            connection.call(_write(connection, header, file, folder / title))
        if len(files) > 1:
            places = {name: title for title, file in zip(titles, files, strict=True) for name, _ in file}
            weight_map = {names[name]: places[name] for name in selection.arrays}
            del metadata["format"]  # of a file
            whole = {"total_size": sum(entry.nbytes for entry in selection.arrays.values()), **metadata}
            index = json.dumps({"metadata": whole, "weight_map": weight_map}, indent=2)
            (folder / INDEX).write_text(index + "\n")


_Arrays: TypeAlias = list[tuple[str, TensorEntry]]


def _checked_names(selection: Selection) -> dict[str, str]:
    """Return the names of the arrays in the file, by their paths. Raises UnsupportedStateError for impossible ones."""
    arrays = selection.arrays
    selection.refuse_arrays("safetensors")
    halves = [name for name in arrays if name.encode(errors="ignore").decode() != name]
    selection.refused += [f"{name!r} (a name with half a surrogate pair)" for name in halves]
    if "__metadata__" in arrays:
        selection.refused.append("__metadata__ (a name that the format uses itself)")
    selection.check("safetensors")
    return dict(zip(arrays, readable(arrays), strict=True))


def _in_payload_order(selection: Selection) -> _Arrays:
    """Return the arrays in the order of their bytes in the payload, so that it is read forwards."""
    storages = selection.manifest.storages

    def position(item: tuple[str, TensorEntry]) -> int:
        entry = item[1]
        return 0 if entry.storage is None else storages[entry.storage].offset + entry.offset

    return sorted(selection.arrays.items(), key=position)


async def _write(connection: Connection, header: bytes, order: _Arrays, path: Path) -> None:
    async with new_file(path) as file:
        await file.write(len(header).to_bytes(8, "little") + header)
        async with aclosing(_pieces(connection, [entry for _, entry in order])) as pieces:
            async for piece in pieces:
                await file.write(piece)


def _header(selection: Selection, metadata: dict[str, str], names: dict[str, str], order: _Arrays) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for path, entry in order:
        start, end = end, end + entry.nbytes
        dtype = SAFETENSORS[str(torch_name(entry))]
        header[names[path]] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        if not contiguous(entry):
            selection.changed.append(f"{path} (strides {entry.stride}, in C order)")
    encoded = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MOST_HEADER:
        why = f"{len(encoded)} bytes of names and plain values; {_MOST_HEADER} are allowed"
        selection.refused.append(f"the header ({why})")
        selection.check("safetensors")
    return encoded


def _metadata(selection: Selection, connection: Connection, names: dict[str, str]) -> dict[str, str]:
    arrays: list[StoredArray] = []
    first: dict[Any, int] = {}
    shared: dict[int | None, dict[str, Any]] = {}  # views by path
    renumbered: dict[int, int] = {}
    for path, node in selection.leaves.items():
        if isinstance(node, ArrayNode):
            number = renumbered[node.index] = len(arrays)
            entry = selection.manifest.tensors[node.index]
            view = (entry.storage, entry.dtype, entry.shape, entry.stride, entry.offset)
            tied = number if entry.storage is None else first.setdefault(view, number)
            arrays.append(StoredArray(names[path], entry.kind, entry.requires_grad, tied))
            if entry.storage is not None:
                shared.setdefault(entry.storage, {})[path] = view
    for group in shared.values():
        if len(group) > 1:
            what = (
                "views of one storage, each in full" if len({*group.values()}) > 1 else "tied: a copy under each name"
            )
            selection.changed.append(f"{', '.join(group)} ({what})")
    info = connection.entry.info
    skeleton = replace_arrays(selection.node, lambda node: ArrayNode(renumbered[node.index]))  # type: ignore[union-attr]
    metadata = dict(info.metadata)
    structure = StoredStructure(
        version=1, step=info.step, name=info.name, metadata=metadata, skeleton=skeleton, arrays=arrays
    )
    values = {path: node for path, node in selection.leaves.items() if _in_json(node)}
    encoded = base64.b64encode(msgspec.msgpack.encode(structure)).decode()
    return {"format": "pt", _VALUES: json.dumps(values), STATE: encoded}


def _in_json(node: Node) -> bool:
    return node is None or isinstance(node, (bool, int, str)) or (isinstance(node, float) and math.isfinite(node))


async def _pieces(connection: Connection, entries: list[TensorEntry]) -> AsyncGenerator[memoryview, None]:
    """Yield the bytes of arrays one after the other, in C order; consecutive contiguous ones are read together."""
    storages = connection.manifest.storages
    waiting: list[tuple[int, int]] = []
    for entry in [*(entry for entry in entries if entry.storage is not None), None]:
        if entry is not None and entry.storage is not None and contiguous(entry):
            low, high = entry.extent
            start = storages[entry.storage].offset
            waiting.append((start + low, start + high))
            continue
        async with aclosing(connection.checkpoint.pieces(waiting)) as pieces:
            async for piece in pieces:
                yield piece
        waiting = []
        if entry is not None:
            for part in parts(entry, _PART):
                yield _bytes(await connection.fetch(part))


def parts(entry: TensorEntry, nbytes: int) -> Iterator[TensorEntry]:
    """Yield entries of parts of an array along its first dimension, of at most about ``nbytes`` each."""
    whole = entry.nbytes
    if not entry.shape or whole <= nbytes:
        yield entry
        return
    count = max(1, nbytes * entry.shape[0] // whole)
    for start in range(0, entry.shape[0], count):
        yield rows(entry, start, min(count, entry.shape[0] - start))


def _bytes(array: Array) -> memoryview:
    """Return the bytes of the elements in C order."""
    if isinstance(array, torch.Tensor):
        array = as_bits(array).contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
