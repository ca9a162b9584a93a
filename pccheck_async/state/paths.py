# SPDX-License-Identifier: Apache-2.0

r"""Names of leaves: ``optimizer.state.0.exp_avg``.

A path joins the keys from the root to the leaf with dots; a dot or backslash inside a key is escaped with a backslash
(``a\.b``). Keys that are not strings are written as by ``repr`` (``0``, ``(1, 2)``). A string is put in single quotes
only if its mapping also has another key that would be written the same way (``{0: ..., "0": ...}`` gives
``0`` and ``'0'``); a quote at the beginning of a string is escaped (``\'``), and an empty string is written ``''``. So
no two leaves of a state share a path.

Users see paths without escapes (:func:`readable`), as PyTorch names parameters, and may write them so:
``model.0.weight`` for ``model.0\.weight``. Leaves whose names would be equal without escapes keep them. A string that
equals the escaped path of a leaf always means that leaf.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from pccheck_async.errors import plain, readable

__all__ = ["child", "components", "escape", "first", "glob", "is_glob", "matcher", "plain", "readable"]

_MOST_BITS = 64  # of an int in decimal, which Python refuses for very long ones
_SPECIAL = re.compile(r"[.\\]")
_FIRST = re.compile(r"(?:[^.\\]|\\.)*", re.DOTALL)
_GLOB = re.compile(r"[*?\[]")


def escape(key: str) -> str:
    """Return a string key as a component of a path."""
    if not key:
        return "''"  # an empty path is the root's
    if "." in key or "\\" in key:
        key = key.replace("\\", r"\\").replace(".", r"\.")
    return "\\" + key if key.startswith("'") else key


def components(keys: Sequence[Hashable]) -> list[str]:
    """Return the components for the keys of one mapping, all different."""
    kinds = {*map(type, keys)}
    if kinds == {str}:
        texts: Any = keys
        joined = "\0".join(texts)  # a model may have thousands of keys, with dots
        if "'" in joined or joined.count("\0") >= len(keys) or not all(texts):
            return [*map(escape, texts)]
        return joined.replace("\\", r"\\").replace(".", r"\.").split("\0")
    if kinds == {int} and max(map(int.bit_length, keys)) <= _MOST_BITS:  # type: ignore[arg-type]
        return [*map(str, keys)]
    written = [escape(key) if type(key) is str else _SPECIAL.sub(r"\\\g<0>", _show(key)) for key in keys]
    counts = Counter(written)
    return [
        f"'{text}'" if type(key) is str and counts[text] > 1 else text for key, text in zip(keys, written, strict=True)
    ]


def child(path: str, component: str) -> str:
    """Return the path of the child called ``component`` of ``path``; the root's path is empty."""
    return f"{path}.{component}" if path else component


def first(path: str) -> str:
    """Return the outermost component of a path."""
    return _FIRST.match(path)[0]  # type: ignore[index]


def is_glob(text: str) -> bool:
    """Return whether a text has characters of a glob (``*``, ``?``, ``[...]``)."""
    return _GLOB.search(text) is not None


def glob(pattern: str) -> Callable[[str], bool]:
    """Return a predicate: whether a text equals ``pattern`` or matches it as a glob; ``*`` also matches dots."""
    matches = re.compile(fnmatch.translate(pattern)).match
    return lambda text: text == pattern or matches(text) is not None


def matcher(pattern: str) -> Callable[[str], bool]:
    r"""Return a predicate: whether a path, with or without its escapes, equals ``pattern`` or matches it as a glob.

    ``model.layers.0.weight`` also matches ``model.layers\.0\.weight``.
    """
    matches = glob(pattern)
    return lambda path: matches(path) or matches(plain(path))


def _show(key: Hashable) -> str:
    match key:
        case bool():
            return repr(key)
        case int() if type(key) is int and key.bit_length() > _MOST_BITS:
            return hex(key)
        case tuple() if type(key) is tuple:
            return f"({', '.join(map(_show_quoted, key))})"
        case np.generic():
            return f"np.{type(key).__name__}({key.item()!r})"  # repr() changed with numpy 2
        case frozenset():
            return f"{{{', '.join(sorted(map(_show_quoted, key)))}}}"
        case _:
            return repr(key)


def _show_quoted(key: Hashable) -> str:
    return repr(key) if isinstance(key, str) else _show(key)
