# SPDX-License-Identifier: Apache-2.0
"""The memo of a state: results of one save that later saves of the same structure reuse.

A memo has the outline of the state, the layout of its leaves with the values computed from it
(:class:`.storages.Known`: plan, copy table, lazy sources, bytes of the manifest), and the leaves that stay constant.
States that one engine saves in turn (the two networks of a GAN, a learner and its target) have a memo each. The record
of torn leaves depends on the code around the engine: all memos of an engine share it, whatever their structure.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from pccheck_async.state.cache.constants import Constants
from pccheck_async.state.cache.layout_cache import LayoutCache
from pccheck_async.state.cache.patterns import Outline, same_objects
from pccheck_async.state.save.torn import TornLeaves

_MOST: Final = 4
"""Number of states whose memos are kept."""
_MOST_TYPES: Final = 64
"""Most values of a state whose types are compared before objects are looked for: those of thousands take a while."""


class Memo:
    """Memo of one state. Holds no tensor. May be used from several threads: each part is replaced as a whole."""

    def __init__(self, torn: TornLeaves) -> None:
        self.outline: Outline | None = None
        self.layout: LayoutCache | None = None
        self.constants = Constants()
        self.replicas: Any = None
        """Replicas found in the state, and the objects that they follow from (see :meth:`.owners.Owners.begin`)."""
        self.torn = torn


class Memos:
    """The memos of the states that were saved lately, the newest first. May be used from several threads."""

    def __init__(self) -> None:
        self._torn = TornLeaves()
        self._known: tuple[_Known, ...] = ()

    def of(self, state: Mapping[str, Any]) -> Memo:
        """Return the memo of a state with the same objects, else of one with the same keys, else a new one.

        A memo is found by its keys only if its state had no objects, or they are all gone: a program may wrap its
        objects anew for each checkpoint. The memo becomes the newest; the oldest may be dropped.
        """
        known, keys, types = self._known, [*state], [*map(type, islice(state.values(), _MOST_TYPES))]
        newest = known[0] if known and known[0].keys == keys else None
        if newest is not None and not newest.objects and newest.types == types:
            return newest.memo
        objects = _references(state)
        if newest is not None and _same(newest.objects, objects):
            return newest.memo
        memo = next((each.memo for each in known if objects and _same(each.objects, objects)), None) or next(
            (each.memo for each in known if {*each.keys} == {*keys} and all(one() is None for one in each.objects)),
            None,
        )
        memo = memo or Memo(self._torn)
        self._known = (_Known(keys, types, objects, memo), *[each for each in known if each.memo is not memo])[:_MOST]
        return memo


class _Known(NamedTuple):
    """A state that was saved, without its values."""

    keys: list[str]
    types: list[type]
    objects: list[weakref.ref[Any]]
    memo: Memo


def _same(others: list[weakref.ref[Any]], objects: list[weakref.ref[Any]]) -> bool:
    """Return whether two lists are references to the same objects; ``==`` would call the objects' own code."""
    return len(others) == len(objects) and same_objects(others, objects)


def _references(state: Mapping[str, Any]) -> list[weakref.ref[Any]]:
    """Return weak references to the outermost values of a state that have a ``state_dict``."""
    kinds = [kind for kind in {*map(type, state.values())} if hasattr(kind, "state_dict") and kind.__weakrefoffset__]
    return [weakref.ref(value) for value in state.values() if type(value) in kinds] if kinds else []
