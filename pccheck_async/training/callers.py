# SPDX-License-Identifier: Apache-2.0
"""Recognises, by frames and source text, training loops that would resume wrongly.

The results are used for warnings only. Loops of another form are not recognised.
"""

from __future__ import annotations

import ast
import gc
import linecache
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["count_before", "fixed_passes"]


def count_before(generator: FrameType) -> int | None:
    """Return the number that ``enumerate`` will give to the next item of the generator whose frame this is.

    None if no ``enumerate`` iterates over it. Takes some 0.05 s if the caller's code names ``enumerate``.
    """
    caller = generator.f_back
    if caller is None or "enumerate" not in caller.f_code.co_names:
        return None
    for each in gc.get_objects():
        if type(each) is enumerate:
            counted: Any = each.__reduce__()[1]  # the iterator and the next number
            if getattr(counted[0], "gi_frame", None) is generator:
                return int(counted[1])
    return None


def fixed_passes(frame: FrameType | None) -> str:
    """Return the ``for ... in range(...)`` head of a loop over epochs that makes equally many passes at each start.

    ``frame`` is the one that begins a pass. Returns "" unless the innermost loop around it is a ``for`` over ``range``
    (or ``trange``) with one argument, or with a constant as start, without ``break`` and ``return``.
    """
    while frame is not None:
        loop = None if frame.f_globals.get("__name__", "").startswith("pccheck_async.") else _loop_around(frame)
        if loop is not None:
            if not isinstance(loop, ast.For) or _is_left_early(loop) or not any(map(_is_fixed, ast.walk(loop.iter))):
                return ""
            return f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
        frame = frame.f_back
    return ""


def _loop_around(frame: FrameType) -> ast.For | ast.AsyncFor | ast.While | None:
    """Return the innermost loop of the frame's function whose body the frame is executing; None if it is in none."""
    line = frame.f_lineno
    try:
        node: ast.AST | None = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except Exception:  # noqa: BLE001 - also Python's SystemError where a collection of garbage parses meanwhile
        return None
    found = None
    while node is not None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = None
        elif isinstance(node, ast.While | ast.For | ast.AsyncFor) and line >= node.body[0].lineno:
            found = node
        node = next((each for each in _statements(node) if each.lineno <= line <= (each.end_lineno or 0)), None)
    return found


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.excepthandler | ast.match_case):
            yield from _statements(child)


def _is_fixed(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "trange")):
        return False
    if len(node.args) > 1:
        return isinstance(node.args[0], ast.Constant)
    # Not n - loader.epoch.
    return any(isinstance(each, ast.Constant | ast.Name | ast.Attribute | ast.Subscript) for each in node.args)


def _is_left_early(loop: ast.For) -> bool:
    return any(isinstance(node, ast.Break | ast.Return) for node in ast.walk(loop))
