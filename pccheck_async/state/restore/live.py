# SPDX-License-Identifier: Apache-2.0
"""A live state flattened into a tree that is compared with stored ones; unlike for saving, no value is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import skeleton
from pccheck_async.format.skeleton import DictNode, ListNode, StatefulNode
from pccheck_async.state import paths, values
from pccheck_async.state.ambient import refuse_tracing
from pccheck_async.state.boxes import FlatShard
from pccheck_async.state.cache.patterns import array_node
from pccheck_async.state.leaves import Leaves
from pccheck_async.state.save.flatten import Flattener, Visited, check_outermost, naming_owner, too_deep
from pccheck_async.state.stateful import is_stateful, live_state, refuse_filling

_ARRAYS: Final = (torch.Tensor, np.ndarray, FlatShard)
"""Types of arrays that a restore can fill."""


class Opaque(NamedTuple):
    """A live value that cannot be saved; for a mapping, with its keys and the nodes of its values."""

    keys: Sequence[Any] = ()
    items: Sequence[Any] = ()


class Live(NamedTuple):
    """A live container or object: its path, the value, and facts about it."""

    path: str
    value: Any
    has_parts: bool
    """Whether there are arrays or objects inside."""
    is_savable: bool
    state: Any = None
    """For an object, the result of its ``state_dict()``."""


@dataclass(slots=True, eq=False)
class LiveTree:
    """A live state, flattened for the comparison with stored ones."""

    state: Mapping[str, Any]
    skeleton: (
        Any  # like that of :class:`FlatState`, with an :class:`Opaque` or a list for each value that cannot be saved
    )
    leaves: Leaves  # of any class that may be filled: tensors on several ranks and composed ones are one leaf each
    lives: dict[int, Live]  # by the identity of their nodes


def live_tree(state: Mapping[str, Any]) -> LiveTree:
    """Flatten ``state`` to restore into it, on the calling thread, calling ``state_dict()`` of every Stateful in it.

    One tree serves for all checkpoints that are compared with it. Values that saving would refuse are allowed: they
    may be replaced by the stored value, or parts of them restored. Raises UnsupportedStateError for a state that
    :func:`.bind.match` refuses.
    """
    refuse_tracing("restore")
    check_outermost(state)
    refuse_filling(state)
    flattener = _Flattener()
    try:
        root, _ = flattener.mapping(state, "", 1, DictNode)
    except RecursionError:
        raise too_deep() from None
    flattener.lives[id(root)] = Live("", state, True, True)
    return LiveTree(state, root, flattener.leaves, flattener.lives)


class _Flattener(Flattener):
    """A walk over a state to restore into."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[int, Live] = {}
        self.asked = 1  # a dict may be the state of an optimizer before its first step, and take a stored one
        self._refused = 0  # values so far that cannot be saved

    def other(self, value: Any, path: str, depth: int) -> Visited:
        arrays = self.leaves.values
        if isinstance(value, _ARRAYS):
            self.leaves.paths.append(path)
            arrays.append(value)  # type: ignore[arg-type]
            return array_node(len(arrays) - 1), None
        parts, refused = len(arrays) + len(self.objects), self._refused
        node: Any
        try:
            if isinstance(value, (np.generic, np.dtype)):
                node = values.numpy_value(value, path)
            else:
                node, _ = self.container(value, path, depth)
        except UnsupportedStateError:
            if is_stateful(value):
                raise
            self._refused += 1
            node = self._opaque(value, path, depth)
        if type(node) is not StatefulNode:
            has_parts = len(arrays) + len(self.objects) > parts
            self.lives[id(node)] = Live(path, value, has_parts, self._refused == refused)
        return node, None

    def object(self, value: Any, path: str, depth: int) -> Visited:
        self.objects.append(value)
        with naming_owner("state_dict", path, value):
            state = live_state(value) if isinstance(value, torch.nn.Module) else value.state_dict()
        node = StatefulNode(self.node(state, path, depth + 1)[0])
        self.lives[id(node)] = Live(path, value, True, True, state)
        return node, None

    def _opaque(self, value: Any, path: str, depth: int) -> Opaque | ListNode:
        """Return the node of a value that cannot be saved."""
        if depth > skeleton.MAX_DEPTH or id(value) in self.open or not isinstance(value, (Mapping, list, tuple)):
            return Opaque()
        self.open.add(id(value))
        keys: Sequence[Any] = [*value] if isinstance(value, Mapping) else range(len(value))
        items = [value[key] for key in keys]
        nodes, _ = self.each(paths.components(keys), items, path + "." if path else "", depth)
        self.open.discard(id(value))
        return Opaque(keys, nodes) if isinstance(value, Mapping) else ListNode(nodes)
