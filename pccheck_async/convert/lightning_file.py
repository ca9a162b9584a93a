# SPDX-License-Identifier: Apache-2.0
"""Converts the contents of a ``.ckpt`` of Lightning to the state of ``integrations.lightning``, and back.

Only the file is needed: Lightning need not be installed, so this is not a part of that adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pccheck_async.convert.selection import Selection
from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format.skeleton import DictNode
from pccheck_async.state.restore.tree import below, leaves

__all__ = ["is_checkpoint", "to_file", "to_state"]

_VERSION: Final = "pytorch-lightning_version"
_NAMES: Final = {
    "model": "state_dict",
    "optimizers": "optimizer_states",
    "lr_schedulers": "lr_schedulers",
    "callbacks": "callbacks",
    "loops": "loops",
}
"""Parts of the state, and their names in the file; the rest of the file becomes the part ``others``."""
_OTHERS: Final = "pccheck_others"
"""Key of everything but model and optimizers in the state that a PCcheckModelParallelStrategy saves."""


def is_checkpoint(held: object) -> bool:
    """Return whether the contents of a file of ``torch.save`` are a checkpoint of Lightning."""
    return isinstance(held, Mapping) and _NAMES["model"] in held and _VERSION in held


def to_state(held: Any, file: Path, missing: list[str]) -> tuple[dict[str, Any], int | None]:
    """Return the state in a file's contents ``held``, and its step or None; missing parts are added to ``missing``.

    Everything but the weights may be missing. The step is ``global_step - 1``, because the callback counts from 0.

    Raises:
        UnsupportedStateError: there is no ``state_dict``.
        CorruptStoreError: ``global_step`` is no step.
    """
    if not isinstance(held, Mapping) or _NAMES["model"] not in held:
        raise UnsupportedStateError(f"{file} is no checkpoint of Lightning: it has no state_dict")
    step = held.get("global_step")
    if step is not None and (type(step) is not int or not 0 <= step < 1 << 63):
        raise CorruptStoreError(f"{file} has no global_step that is one: {str(step)[:50]}")
    state = {part: held[name] for part, name in _NAMES.items() if name in held}
    others = {name: value for name, value in held.items() if name not in _NAMES.values()}
    missing += [f"{part} (the file has no {name})" for part, name in _NAMES.items() if name not in held]
    missing.append("rng (a file of Lightning holds none)")
    if step is None:
        missing.append("the step (the file has no global_step; it is counted on from the store, unless one is given)")
    return state | {"others": others}, None if step is None else max(0, step - 1)


def to_file(selection: Selection) -> Selection:
    """Return a selection with the names of Lightning's file.

    A checkpoint of PCcheckIO or PCcheckModelParallelStrategy has these names already; one of the callback is converted.
    Raises UnsupportedStateError if it is a checkpoint of neither.
    """
    there = dict(below(selection.node))
    if is_own := _NAMES["model"] in there and (_VERSION in there or _OTHERS in there):
        others = there.pop(_OTHERS, None)
        file = there | dict(() if others is None else below(others))
    else:
        there = selection.saved_by("lightning")
        file = {name: there[part] for part, name in _NAMES.items() if part in there} | dict(below(there["others"]))
    node = DictNode([*file], [*file.values()])
    chosen = Selection(selection.manifest, node, dict(leaves(node)), selection.refused, selection.changed)
    chosen.changed += [
        f"{part} (left out: a file of Lightning has no place for it)"
        for part in there
        if not is_own and part not in (*_NAMES, "others")
    ]
    return chosen
