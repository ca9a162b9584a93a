# SPDX-License-Identifier: Apache-2.0
"""The part of a checkpoint that is exported, and the dtypes and values that each format can express."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import structs

from pccheck_async.api import Connection, StoredState
from pccheck_async.errors import CorruptStoreError, StateMismatchError, UnsupportedStateError
from pccheck_async.format import CheckpointInfo, dtypes
from pccheck_async.format import skeleton as nodes
from pccheck_async.format.manifest import Manifest, TensorEntry
from pccheck_async.format.skeleton import ArrayNode, Node, NumpyDtypeNode, NumpyScalarNode, TupleNode, arrays
from pccheck_async.state import paths
from pccheck_async.state.restore.tree import below, leaves, opened, refuse_boxes, select
from pccheck_async.state.values import atom, from_node

__all__ = [
    "SAFETENSORS",
    "SAVED",
    "Saved",
    "Selection",
    "contiguous",
    "divided",
    "native",
    "pickled",
    "refusal",
    "select_part",
    "torch_name",
]

T = TypeVar("T")
SAVED: Final = "pccheck_async.msgpack"
"""Name of the record in torch's archive, or the file in DCP's folder, with the encoded :class:`Saved`."""
_ADAPTERS: Final = {"lightning": ("model", "loops", "others"), "transformers": ("model", "trainer")}
"""Parts of the state that the PCcheckCallback of each framework always saves."""
_MOST_INT_BYTES: Final = 255
"""Most bytes of an int that torch's restricted unpickler reads."""


class Saved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The facts about an exported checkpoint that an import gives to the new checkpoint."""

    step: int
    metadata: dict[str, str | int | float | bool | None]
    name: str | None = None

    @classmethod
    def encoded(cls, info: CheckpointInfo) -> bytes:
        """Return the encoded facts about a checkpoint, the contents of the file :data:`SAVED`."""
        return msgspec.msgpack.encode(cls(step=info.step, metadata=dict(info.metadata), name=info.name))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """Return the facts that :meth:`encoded` made; ``where`` is for the message of CorruptStoreError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CorruptStoreError(f"{SAVED} in {where} cannot be read: {error}") from error


@dataclass(slots=True)
class Selection:
    """A part of a checkpoint to export, with its leaves by their paths in it.

    Attributes:
        refused: Values that the format cannot express, with the reason; if there are any, nothing is exported.
        changed: Values that are exported in another form, with that form.
    """

    manifest: Manifest
    node: Node
    leaves: dict[str, Node]
    refused: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def stored_paths(self) -> set[str]:
        """The paths of the selected leaves in the whole checkpoint."""
        chosen = {*map(id, self.leaves.values())}
        return {path for path, node in leaves(self.manifest.skeleton) if id(node) in chosen}

    @property
    def arrays(self) -> dict[str, TensorEntry]:
        """The manifest's entries of the selected tensors and arrays, by path."""
        tensors = self.manifest.tensors
        return {path: tensors[node.index] for path, node in self.leaves.items() if isinstance(node, ArrayNode)}

    def refuse_arrays(self, to: Format) -> None:
        """Add the arrays that the format ``to`` cannot express to ``refused``."""
        troubles = {path: refusal(entry, to) for path, entry in self.arrays.items()}
        self.refused += [f"{paths.plain(path)} {trouble}" for path, trouble in troubles.items() if trouble]

    def saved_by(self, adapter: str) -> dict[str, Node]:
        """Return the top-level nodes, by name, of a checkpoint that the PCcheckCallback of ``adapter`` saved.

        Raises UnsupportedStateError if a part is missing that such a callback always saves.
        """
        there = dict(below(self.node))
        lacking = {name: [part for part in parts if part not in there] for name, parts in _ADAPTERS.items()}
        if lacking[adapter]:
            fits = next((name for name, parts in lacking.items() if not parts), "torch")
            raise UnsupportedStateError(
                f"PCcheckCallback of integrations.{adapter} saved no such checkpoint: it has no "
                f"{', no '.join(lacking[adapter])}, and nothing was written; export it with --to {fits}, to={fits!r}"
            )
        return there

    def check(self, what: str) -> None:
        """Raise UnsupportedStateError with a list of the refused values, if there are any; ``what`` is the format."""
        if self.refused:
            listed = "; ".join(self.refused[:50]) + ("; ..." if len(self.refused) > 50 else "")
            raise UnsupportedStateError(
                f"{what} cannot hold {len(self.refused)} of {len(self.leaves)} leaves, and nothing was written: "
                f"{listed}. Choose others with keys, or another format"
            )


def select_part(connection: Connection, keys: Sequence[str] | None, root: str | None) -> Selection:
    """Return the leaves to export: those whose paths match a glob of ``keys`` (None: all), below the part ``root``.

    Raises StateMismatchError if one of ``keys`` matches nothing, or there is no container ``root``;
    IncompleteCheckpointError if only one rank's part of a tensor is there.
    """
    manifest = connection.manifest
    node = manifest.skeleton if keys is None else select(manifest.skeleton, keys)
    if root:
        try:
            node = StoredState(connection, node).node(root)
        except KeyError as error:
            raise StateMismatchError(f"nothing to export: {error.args[0]}", missing=[root]) from None
        if not below(node):
            raise StateMismatchError(f"{root!r} is a leaf; export its container with keys=[{root!r}]", missing=[root])
    node = opened(node)
    refuse_boxes(node)
    chosen = Selection(manifest, node, dict(leaves(node)) if below(node) else {})
    composed = [(path, leaf.name) for path, leaf in chosen.leaves.items() if isinstance(leaf, nodes.ComposedNode)]
    chosen.refused += [f"{paths.plain(path)} (a {name}, which is composed of other tensors)" for path, name in composed]
    named = {index for leaf in chosen.leaves.values() for index in arrays(leaf)}
    if named != set(arrays(node)):
        chosen.refused.append("an array in the _metadata of an OrderedDict")
    return chosen


def native(node: Node, path: str, selection: Selection) -> Node:
    """Return the tree with states in place of objects, and Python's values in place of numpy's scalars.

    Adds changed and refused values to ``selection``. A key of a mapping is reported under the path of the mapping.
    """
    match node:
        case nodes.StatefulNode():
            return native(opened(node), path, selection)
        case nodes.DictNode() | nodes.OrderedDictNode() | nodes.CounterNode():
            values = [native(child, paths.child(path, name), selection) for name, child in below(node)]
            keys = [_key(key, path, selection) for key in node.keys]
            if isinstance(node, nodes.OrderedDictNode):
                metadata = [native(each, path, selection) for each in node.metadata]
                return nodes.OrderedDictNode(keys, values, metadata)
            return type(node)(keys, values)
        case nodes.SetNode():
            return nodes.SetNode([_key(item, path, selection) for item in node.items])
        case NumpyScalarNode():
            return native(_scalar(node, path, selection), path, selection)
        case nodes.FrozenSetNode():
            trouble = "a frozenset"
        case NumpyDtypeNode():
            trouble = "a dtype of numpy"
        case nodes.PickledNode():
            trouble = f"a pickled {node.kind}"
        case nodes.BytesNode() if not node.data:
            trouble = "bytes, but none; it takes a pickle that is not allowed"
        case nodes.BigIntNode() if len(node.data) > _MOST_INT_BYTES:
            trouble = f"an int of {len(node.data)} bytes"
        case _ if below(node):
            items = [native(child, paths.child(path, name), selection) for name, child in below(node)]
            return structs.replace(node, items=items)  # type: ignore[type-var]
        case _:
            return node
    selection.refused.append(f"{paths.plain(path)} ({trouble})")
    return None


def _key(node: Node, path: str, selection: Selection) -> Node:
    """Apply :func:`native` to a mapping's key or a set's member, of which a tuple is the only possible container."""
    if isinstance(node, TupleNode):
        return TupleNode([_key(item, path, selection) for item in node.items])
    return native(node, f"{path} (a key)" if isinstance(node, (NumpyScalarNode, NumpyDtypeNode)) else path, selection)


def _scalar(node: NumpyScalarNode, path: str, selection: Selection) -> Node:
    scalar = from_node(node)
    kind = np.dtype(node.dtype).kind
    value: Hashable = (
        str.__str__(scalar) if kind == "U" else bytes(scalar) if kind == "S" else scalar.item()
    )  # keeps its NULs
    if kind not in "biufcSU" or isinstance(value, np.generic):
        selection.refused.append(f"{paths.plain(path)} (a numpy scalar of dtype {node.dtype})")
        return None
    selection.changed.append(
        f"{paths.plain(path)} (a numpy scalar of dtype {node.dtype}, as Python's {type(value).__name__})"
    )
    return atom(value, path)


def divided(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Divide items, in order, into lists of at most ``most`` bytes each; a larger item is alone in its list."""
    files, held = list[list[T]]([[]]), 0
    for item in items:
        if files[-1] and held + nbytes(item) > most:
            files.append([])
            held = 0
        files[-1].append(item)
        held += nbytes(item)
    return files


def contiguous(entry: TensorEntry) -> bool:
    """Return whether the elements are in C order without gaps."""
    step = 1
    for size, stride in zip(reversed(entry.shape), reversed(entry.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


# -- which format can hold an array

Format: TypeAlias = Literal["torch", "safetensors", "dcp"]

SAFETENSORS: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""Names of torch's dtypes in safetensors."""

_NUMPY: Final = {
    "|b1": "bool", "|i1": "int8", "|u1": "uint8", "<i2": "int16", "<u2": "uint16", "<i4": "int32", "<u4": "uint32",
    "<i8": "int64", "<u8": "uint64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64",
    "<c16": "complex128",
}  # fmt: skip
_PICKLE_PROTOCOL: Final = 2


def refusal(entry: TensorEntry, to: Format) -> str:
    """Return why a format cannot express an array, and which formats can; "" if it can."""
    trouble = _TROUBLES[to](entry)
    if not trouble:
        return ""
    if others := [other for other, find in _TROUBLES.items() if not find(entry)]:
        return f"({trouble}), which {' and '.join(others)} can hold"
    return (
        f"({trouble}), which no format can hold; `pccheck copy` can, or save x.view(torch.uint8) and the dtype's name"
    )


def torch_name(entry: TensorEntry) -> str | None:
    """Return the name of the torch dtype of an entry, or of that with the same bits as numpy's; None without one."""
    return _NUMPY.get(entry.dtype) if entry.kind == "ndarray" else entry.dtype


@cache
def pickled(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return how torch pickles tensors of a dtype: the rebuilding function, and the storage's type. Raises KeyError."""
    empty = torch.empty(0, dtype=dtypes.carrier(dtype)).view(dtype)
    function, (storage, *_) = empty.__reduce_ex__(_PICKLE_PROTOCOL)  # type: ignore[no-untyped-call]
    if isinstance(storage, torch.UntypedStorage):
        return function, torch.UntypedStorage
    return function, getattr(torch, storage._pickle_storage_type())


def _in_torch(entry: TensorEntry) -> str:
    name = torch_name(entry)
    if name is None:
        return f"a numpy array of dtype {entry.dtype}"
    if any(stride < 0 for stride in entry.stride) or entry.offset % entry.itemsize:
        return "a numpy array with strides that tensors do not have"
    try:
        pickled(dtypes.torch_dtype(name))
    except KeyError:
        return f"a tensor of dtype {name}, which torch does not save either"
    return ""


def _in_safetensors(entry: TensorEntry) -> str:
    return "" if torch_name(entry) in SAFETENSORS else f"dtype {entry.dtype}"


def _in_dcp(entry: TensorEntry) -> str:
    if entry.kind == "ndarray":
        return ""  # pickled by numpy
    if trouble := _in_torch(entry):
        return trouble
    try:
        torch._utils._element_size(dtypes.torch_dtype(entry.dtype))  # type: ignore[no-untyped-call]
    except TypeError:
        return f"a tensor of dtype {entry.dtype}, whose size torch.distributed.checkpoint does not know"
    return ""


_TROUBLES: Final = {"torch": _in_torch, "safetensors": _in_safetensors, "dcp": _in_dcp}
