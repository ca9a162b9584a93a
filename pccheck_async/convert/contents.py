"""What is exported of a checkpoint, and what a format can say of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec import structs

from pccheck_async.errors import StateMismatchError, UnsupportedStateError
from pccheck_async.format.manifest import Manifest, TensorEntry
from pccheck_async.format.skeleton import (
    ArrayNode,
    BigIntNode,
    BytesNode,
    CounterNode,
    DictNode,
    FrozenSetNode,
    Node,
    NumpyDtypeNode,
    NumpyScalarNode,
    OrderedDictNode,
    SetNode,
    StatefulNode,
    TupleNode,
    arrays,
)
from pccheck_async.state import paths
from pccheck_async.state.restore.select import select
from pccheck_async.state.restore.walk import below, leaves, opened
from pccheck_async.state.values import atom, from_node

__all__ = ["Contents", "contents", "contiguous", "native"]


_MOST_INT_BYTES: Final = 255
"""Of an int that torch's restricted unpickler reads."""


@dataclass(slots=True)
class Contents:
    """A part of a checkpoint.

    Attributes:
        manifest: Of the checkpoint.
        node: The part.
        leaves: Its leaves by their paths in it.
        refused: What the format cannot express, with the reason: nothing is exported then.
        changed: What comes out as something else, with what that is.
    """

    manifest: Manifest
    node: Node
    leaves: dict[str, Node]
    refused: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def arrays(self) -> dict[str, TensorEntry]:
        """The tensors and arrays by their paths."""
        tensors = self.manifest.tensors
        return {path: tensors[node.index] for path, node in self.leaves.items() if isinstance(node, ArrayNode)}

    def check(self, what: str) -> None:
        """Raise UnsupportedStateError where anything was refused; lists it."""
        if self.refused:
            listed = "; ".join(self.refused[:50]) + ("; ..." if len(self.refused) > 50 else "")
            raise UnsupportedStateError(
                f"{what} cannot hold {len(self.refused)} of {len(self.leaves)} leaves, and nothing was written: "
                f"{listed}. Choose others with keys, or another format"
            )


def contents(manifest: Manifest, keys: Sequence[str] | None, root: str | None) -> Contents:
    """Choose what to export.

    Args:
        manifest: Of the checkpoint.
        keys: Globs over leaf paths, None for all.
        root: Path of the part that becomes the whole, None for the state itself.

    Raises:
        StateMismatchError: One of ``keys`` selects nothing, or there is no container ``root``.
    """
    node = manifest.skeleton if keys is None else select(manifest.skeleton, keys)
    for spelled in (str, paths.plain):  # as paths are written; where there is none, without their escapes
        part, missing = _descend(node, root or "", spelled)
        if not missing:
            break
    else:
        there = ", ".join(name for name, _ in below(part)[:20]) or "nothing"
        raise StateMismatchError(
            f"there is no {root!r} to export; at {missing!r} there are: {there}", missing=[root or ""]
        )
    node = part
    if root and not below(node):
        raise StateMismatchError(f"{root!r} is a leaf; export its container with keys=[{root!r}]", missing=[root])
    node = opened(node)
    chosen = Contents(manifest, node, dict(leaves(node)) if below(node) else {})
    named = {leaf.index for leaf in chosen.leaves.values() if isinstance(leaf, ArrayNode)}
    if named != set(arrays(node)):
        chosen.refused.append("an array in the _metadata of an OrderedDict")
    return chosen


def _descend(node: Node, path: str, spelled: Callable[[str], str]) -> tuple[Node, str]:
    """Follow a path as far as there is something; return what is there, and the rest of the path."""
    while path:
        inside = [(spelled(name), child) for name, child in below(node)]
        found = [(name, child) for name, child in inside if f"{path}.".startswith(f"{name}.")]
        if not found:
            break
        name, node = max(found, key=lambda pair: len(pair[0]))
        path = path[len(name) + 1 :]
    return node, path


def native(node: Node, path: str, found: Contents) -> Node:
    """Return the tree without objects, and with Python's values for numpy's scalars; note these, and what is refused.

    Keys are no leaves, and are named by the mapping that has them.
    """
    match node:
        case StatefulNode():
            return native(opened(node), path, found)
        case DictNode() | OrderedDictNode() | CounterNode():
            values = [native(child, paths.child(path, name), found) for name, child in below(node)]
            keys = [_key(key, path, found) for key in node.keys]
            if isinstance(node, OrderedDictNode):
                metadata = [native(each, path, found) for each in node.metadata]
                return OrderedDictNode(keys, values, metadata)
            return type(node)(keys, values)
        case SetNode():
            return SetNode([_key(item, path, found) for item in node.items])
        case FrozenSetNode():
            found.refused.append(f"{path} (a frozenset)")
            return None
        case NumpyDtypeNode():
            found.refused.append(f"{path} (a dtype of numpy)")
            return None
        case NumpyScalarNode():
            return native(_scalar(node, path, found), path, found)
        case BytesNode() if not node.data:
            found.refused.append(f"{path} (bytes, but none; it takes a pickle that is not allowed)")
            return None
        case BigIntNode() if len(node.data) > _MOST_INT_BYTES:
            found.refused.append(f"{path} (an int of {len(node.data)} bytes)")
            return None
        case _ if below(node):
            items = [native(child, paths.child(path, name), found) for name, child in below(node)]
            return structs.replace(node, items=items)  # type: ignore[type-var]
        case _:
            return node


def _key(node: Node, path: str, found: Contents) -> Node:
    """Keys and members of sets are hashable, and that is all that may be below them."""
    if isinstance(node, TupleNode):
        return TupleNode([_key(item, path, found) for item in node.items])
    return native(node, f"{path} (a key)" if isinstance(node, (NumpyScalarNode, NumpyDtypeNode)) else path, found)


def _scalar(node: NumpyScalarNode, path: str, found: Contents) -> Node:
    scalar = from_node(node)
    kind = np.dtype(node.dtype).kind
    value: Hashable = str(scalar) if kind == "U" else bytes(scalar) if kind == "S" else scalar.item()  # keeps its NULs
    if kind not in "biufcSU" or isinstance(value, np.generic):
        found.refused.append(f"{path} (a numpy scalar of dtype {node.dtype})")
        return None
    found.changed.append(f"{path} (a numpy scalar of dtype {node.dtype}, as Python's {type(value).__name__})")
    return atom(value, path)


def contiguous(entry: TensorEntry) -> bool:
    """Whether the elements lie in C order without gaps."""
    step = 1
    for size, stride in zip(reversed(entry.shape), reversed(entry.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
