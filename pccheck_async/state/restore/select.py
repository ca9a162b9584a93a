"""The part of a skeleton that ``load(keys=...)`` asks for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pccheck_async.errors import StateMismatchError
from pccheck_async.format.skeleton import (
    CounterNode,
    DictNode,
    ListNode,
    Node,
    OrderedDictNode,
    StatefulNode,
    TupleNode,
)
from pccheck_async.state import paths
from pccheck_async.state.restore.rebuild import mapping_keys

__all__ = ["select"]


def select(skeleton: Node, keys: Sequence[str]) -> Node:
    r"""Return ``skeleton`` cut down to what ``keys`` name: paths or globs of leaves or of whole subtrees.

    A key is compared with paths as they are written: ``a.b`` is not ``a\.b``. Only one to which nothing is written
    alike is compared with paths without their escapes.

    A mapping keeps the entries under which something was selected. A list or tuple of which only some items were
    selected becomes a dict from their index to them, so that no item changes its place.

    Raises:
        StateMismatchError: One of ``keys`` selects nothing; lists them. Or it names several leaves, without escapes.
    """
    patterns = [keys] if isinstance(keys, str) else list(keys)
    selection = _Selection(patterns)
    selected = selection.cut(skeleton, "")
    if selection.unused:
        selection = _Selection(patterns, unescaped=frozenset(selection.unused))
        selected = selection.cut(skeleton, "")
    if selection.unused:
        raise StateMismatchError(_nothing(sorted(selection.unused), skeleton), missing=sorted(selection.unused))
    for text, several in selection.named.items():
        if len(several) > 1:
            listed = f"{', '.join(several[:20])}{', ...' if len(several) > 20 else ''}"
            raise StateMismatchError(f"{text!r} is the name of several leaves: {listed}; write it with its escapes")
    return selected if selected is not None else DictNode([], [])


def _nothing(unused: Sequence[str], skeleton: Node) -> str:
    assert isinstance(skeleton, DictNode)
    names = paths.components(mapping_keys(skeleton))
    there = f"{', '.join(names[:20])}{', ...' if len(names) > 20 else ''}" or "none at all"
    return f"no leaf matches {', '.join(map(repr, unused))}; there are: {there}"


class _Selection:
    def __init__(self, patterns: Sequence[str], unescaped: Collection[str] = ()) -> None:
        self._matchers = {text: paths.matcher(text, unescaped=text in unescaped) for text in patterns}
        self.unused = set(patterns)
        self.named: dict[str, list[str]] = {}  # what those without escapes are the names of

    def cut(self, node: Node, path: str) -> Node | None:
        """The selected part of what is below ``node``; None for nothing (a selected None is kept by :meth:`_each`)."""
        match node:
            case StatefulNode():
                child = self.cut(node.child, path)
                return None if child is None else StatefulNode(child)
            case DictNode() | OrderedDictNode() | CounterNode():
                names = paths.components(mapping_keys(node))
                found = self._each(names, node.values, path)
                if not found:
                    return None
                chosen, values = [node.keys[index] for index, _ in found], [value for _, value in found]
                if isinstance(node, OrderedDictNode):
                    return OrderedDictNode(chosen, values, node.metadata if len(found) == len(names) else [])
                return type(node)(chosen, values)
            case ListNode() | TupleNode():
                found = self._each([str(index) for index in range(len(node.items))], node.items, path)
                if not found:
                    return None
                if len(found) == len(node.items):
                    return type(node)([value for _, value in found])
                return DictNode([index for index, _ in found], [value for _, value in found])
            case _:
                return None

    def _each(self, names: Sequence[str], nodes: Sequence[Node], path: str) -> list[tuple[int, Node]]:
        found: list[tuple[int, Node]] = []
        for index, (name, node) in enumerate(zip(names, nodes, strict=True)):
            below = paths.child(path, name)
            if self._matches(below):
                self._mark(node, below)
                found.append((index, node))
            else:
                part = self.cut(node, below)
                if part is not None:
                    found.append((index, part))
        return found

    def _matches(self, path: str) -> bool:
        hits = [text for text, matches in self._matchers.items() if matches(path)]
        self.unused.difference_update(hits)
        for text in hits:
            if text != path and text == paths.plain(path):
                self.named.setdefault(text, []).append(path)
        return bool(hits)

    def _mark(self, node: Node, path: str) -> None:
        """Look below a node that is selected anyway, for keys that would otherwise count as selecting nothing."""
        if self.unused:
            self.cut(node, path)
