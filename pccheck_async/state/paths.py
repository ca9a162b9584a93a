r"""Names of leaves: ``optimizer.state.0.exp_avg``.

A path joins the keys from the root to the leaf with dots. A dot or backslash inside a key is written with a backslash
before it, so the key ``"a.b"`` (``a\.b``) is not ``a`` -> ``b``. Keys that are not strings are written as Python shows
them (``0``, ``None``, ``(1, 2)``). A string is put in single quotes only where the same mapping also holds another key
that would be written the same (``{0: ..., "0": ...}`` gives ``0`` and ``'0'``); a string that starts with a quote has
it escaped (``\'``), and an empty one is written ``''``. So no two leaves of a state share a path.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

__all__ = ["child", "components", "escape", "matcher", "plain"]

_SPECIAL = re.compile(r"[.\\]")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def escape(key: str) -> str:
    """Return a string key as it is written in a path."""
    if not key:
        return "''"  # not nothing: the root's path is empty
    if "." in key or "\\" in key:
        key = key.replace("\\", r"\\").replace(".", r"\.")
    return "\\" + key if key.startswith("'") else key


def components(keys: Sequence[Hashable]) -> list[str]:
    """Return how each key of one mapping is written, all different."""
    if all(type(key) is str for key in keys):
        return [escape(key) for key in keys if isinstance(key, str)]
    written = [escape(key) if type(key) is str else _SPECIAL.sub(r"\\\g<0>", _show(key)) for key in keys]
    counts = Counter(written)
    return [
        f"'{text}'" if type(key) is str and counts[text] > 1 else text for key, text in zip(keys, written, strict=True)
    ]


def child(path: str, component: str) -> str:
    """Return the path of a child; the root's path is empty."""
    return f"{path}.{component}" if path else component


def plain(path: str) -> str:
    r"""Return the path without its escapes: ``model.layers\.0`` as people type it, ``model.layers.0``."""
    return _ESCAPED.sub(r"\1", path) if "\\" in path else path


def matcher(pattern: str, *, unescaped: bool = False) -> Callable[[str], bool]:
    r"""Return whether a path is selected by ``pattern``: the path itself or a shell glob (``*``, ``?``, ``[...]``).

    ``*`` also matches dots.

    Args:
        pattern: What is looked for.
        unescaped: Look for it in the path without its escapes: ``model.layers.0.weight`` then finds
            ``model.layers\.0\.weight``, and else only what is written so.
    """
    glob = re.compile(fnmatch.translate(pattern)).match

    def matches(path: str) -> bool:
        name = plain(path) if unescaped else path
        return pattern == name or glob(name) is not None

    return matches


def _show(key: Hashable) -> str:
    match key:
        case bool():
            return repr(key)
        case int() if type(key) is int and key.bit_length() > 64:
            return hex(key)  # Python refuses to print very long ints in decimal
        case tuple() if type(key) is tuple:
            return f"({_join(key)})"
        case np.generic():
            return f"np.{type(key).__name__}({key.item()!r})"  # numpy's own way changed with version 2
        case frozenset():
            return f"{{{', '.join(sorted(map(_show_quoted, key)))}}}"
        case _:
            return repr(key)


def _join(items: Iterable[Hashable]) -> str:
    return ", ".join(map(_show_quoted, items))


def _show_quoted(key: Hashable) -> str:
    return repr(key) if isinstance(key, str) else _show(key)
