"""A decoded manifest is matched: with new memory for ``load``, with the live objects for ``engine.restore``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pccheck_async.format.manifest import Manifest
from pccheck_async.format.skeleton import PickledNode, arrays, walk
from pccheck_async.state.ambient import apart, refuse_tracing
from pccheck_async.state.composed import check_classes, compose
from pccheck_async.state.pickles import refuse_pickled, unpickle
from pccheck_async.state.restore.arrays import Allocation, Targets, place_of
from pccheck_async.state.restore.bind import Binding, Restoration, warn_of_unpickling
from pccheck_async.state.restore.diff import Rules, diff
from pccheck_async.state.restore.tree import leaves, rebuild, refuse_boxes, select
from pccheck_async.state.save.detached import refuse_filling
from pccheck_async.state.save.flatten import LiveTree, check_outermost, flatten_live

__all__ = ["allocate", "clear_gradients", "live_tree", "match"]


def allocate(
    manifest: Manifest, keys: Sequence[str] | None = None, device: Any = "cpu", *, allow_pickle: bool = False
) -> Restoration:
    """Prepare a restore into new memory; its ``finish`` returns a nested dict, with a dict in place of each Stateful.

    Args:
        manifest: Of the checkpoint.
        keys: Paths or globs of the leaves and subtrees to load; None for all. Only their bytes are read.
        device: The final place of tensors (see :func:`place_of`); numpy arrays stay on the host.
        allow_pickle: Whether pickled values are unpickled; else they are refused, before any byte is read.

    Raises:
        UnsupportedStateError: There is a pickled value, or a tensor of a class that is not imported.
        StateMismatchError: One of ``keys`` selects nothing.
        IncompleteCheckpointError: A tensor lies on several ranks, of which this is one's part.
        CorruptStoreError: The skeleton describes no value.
        RuntimeError: There is no such device; raised by torch.
    """
    place = place_of(device)
    skeleton = manifest.skeleton if keys is None else select(manifest.skeleton, keys)
    refuse_boxes(skeleton)
    check_classes(skeleton)
    pickled = {
        id(each): path for path, leaf in leaves(skeleton) for each in walk(leaf) if isinstance(each, PickledNode)
    }
    if pickled and not allow_pickle:
        refuse_pickled(*next((each, pickled[id(each)]) for each in walk(skeleton) if isinstance(each, PickledNode)))
    allocation = Allocation(manifest, sorted(arrays(skeleton)))

    def finish() -> Any:
        warn_of_unpickling(pickled.values())
        values = partial(rebuild, skeleton, lambda index: allocation.array(index, place), composed=compose)
        with apart():  # this may be the caller's thread
            return values(pickled=lambda node: unpickle(node, pickled.get(id(node), ""), device))

    return Restoration(Targets(allocation.targets()), finish, move=partial(allocation.move, place))


def live_tree(state: Mapping[str, Any]) -> LiveTree:
    """Return the tree of a live state, once for all checkpoints that are compared with it. See :func:`match`."""
    refuse_tracing("restore")
    check_outermost(state)
    refuse_filling(state)
    return flatten_live(state)


def match(
    state: Mapping[str, Any] | LiveTree,
    manifest: Manifest,
    by_address: bool = False,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    generators: bool = True,
    added: Collection[str] = (),
    dry_run: bool = False,
) -> Restoration:
    """Prepare a restore into the live ``state`` (or its :func:`live_tree`): check it first, and change nothing.

    Its ``finish`` copies arrays that were not filled in place, calls every ``load_state_dict`` and returns ``state``.
    Arrays are filled in place if they lie in memory as they were stored, otherwise by a copy at the end. A container
    that holds an array takes a saved None in its place, and no other plain value.

    A live plain value (without tensors, arrays and objects) takes any saved value: lists, dicts and sets are
    refilled with content of their type, any other value is replaced in its container. An object that was saved inside
    needs an entry at its own path: an object, or a plain value, which takes the object's state.

    Optimizers need no state yet; their parameters are identified by the names that were saved, else by their numbers.
    Any other Stateful gets its own tensors if dtype and shape are equal, else new ones. For ``strict``, ``dtype``
    and the comparison of modules see :meth:`CheckpointEngine.restore`. ``by_address`` is whether
    the copy backend writes to the memory of CUDA tensors. Without ``generators`` every :class:`RNGState` stays as it
    is: the saved ones are another rank's. Paths that :func:`merge_parts` ``added`` need not be in the state.
    For a ``dry_run`` nothing is allocated, and the error for a state that differs is not raised but returned.

    Raises:
        UnsupportedStateError: ``state`` is not a mapping with strings for keys, or has the ``state_dict()`` of a live
            object in the object's place; or this was called while tensors are traced.
        StateMismatchError: The state differs; lists the paths.
        CorruptStoreError: The skeleton describes no value.
    """
    tree = state if isinstance(state, LiveTree) else live_tree(state)
    found = diff(tree, manifest, Rules(strict, dtype, allow_pickle, generators, added))
    binding = Binding(found, by_address)
    found.mismatched += binding.conflicts()
    error = found.error(strict=strict)
    if dry_run:
        return binding.plan(error)
    if error is not None:
        raise error
    return binding.allocate()


def clear_gradients(tensors: Iterable[torch.Tensor]) -> int:
    """Set the gradients of these tensors to None, as in a process that was just started; return how many there were."""
    with apart():
        leaves = {id(each): each for each in tensors if each.is_leaf and each.grad is not None}
        for tensor in leaves.values():
            tensor.grad = None
    return len(leaves)
