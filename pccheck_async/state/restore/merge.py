"""Entries of other parts of a checkpoint that the part being read lacks: the other stages of a pipeline.

Of mappings with tensors below, entries are put together by their names. Not so inside an optimizer's state, which
numbers its parameters: another stage's number 3 is another parameter. The part being read wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import structs

from pccheck_async.format.manifest import Manifest
from pccheck_async.format.skeleton import (
    ArrayNode,
    ComposedNode,
    MappingNode,
    Node,
    ShardedNode,
    StatefulNode,
    replace_arrays,
    walk,
)
from pccheck_async.state import paths
from pccheck_async.state.restore.reshard import private_mesh
from pccheck_async.state.restore.tree import entries, has_parts

__all__ = ["merge_parts"]


def merge_parts(own: int, manifests: Mapping[int, Manifest]) -> tuple[Manifest, frozenset[str]]:
    """Return the manifest of part ``own`` with entries that only others have (the lowest of them); and their paths.

    Tensors of others are nodes without boxes: their bytes are in no storage of this manifest.
    """
    manifest, added = manifests[own], set[str]()
    skeleton = manifest.skeleton
    for part in sorted(manifests.keys() - {own}):
        skeleton = _merge(skeleton, manifests[part].skeleton, "", (part, manifests[part]), added)
    return structs.replace(manifest, skeleton=skeleton), frozenset(added)


def _merge(node: Node, other: Node, path: str, source: tuple[int, Manifest], added: set[str]) -> Node:
    if isinstance(node, StatefulNode) and isinstance(other, StatefulNode):
        child = _merge(node.child, other.child, path, source, added)
        return node if child is node.child else StatefulNode(child)
    if not isinstance(node, MappingNode) or not isinstance(other, MappingNode):
        return node
    here, there = ({key: (name, child) for key, name, child in entries(each)} for each in (node, other))
    if "param_groups" in {**here, **there} or not (has_parts(node) or has_parts(other)):
        return node
    keys, values, changed = [*node.keys], [*node.values], False
    for number, (key, (name, child)) in enumerate(here.items()):
        if key in there:
            values[number] = _merge(child, there[key][1], paths.child(path, name), source, added)
            changed |= values[number] is not child
    for key_node, (key, (name, child)) in zip(other.keys, there.items(), strict=True):
        if key not in here and not any(_not_merged(child, source[1])):
            keys.append(key_node)
            values.append(replace_arrays(child, lambda one: _elsewhere(one, *source)))
            added.add(paths.child(path, name))
            changed = True
    return structs.replace(node, keys=keys, values=values) if changed else node


def _not_merged(node: Node, manifest: Manifest) -> Iterator[bool]:
    for one in walk(node):
        yield isinstance(one, ComposedNode) or (
            isinstance(one, ArrayNode) and manifest.tensors[one.index].kind == "ndarray"
        )


def _elsewhere(node: ArrayNode | ShardedNode, part: int, manifest: Manifest) -> ShardedNode:
    if isinstance(node, ShardedNode):
        return structs.replace(node, offsets=(), boxes=())
    entry = manifest.tensors[node.index]
    return ShardedNode(private_mesh(part), entry.dtype, True, entry.shape, (), ())
