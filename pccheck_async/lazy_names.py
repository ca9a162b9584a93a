# SPDX-License-Identifier: Apache-2.0
"""Imports of a module's public names at their first use, so that ``--help`` need not wait a second for torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["importer"]


def importer(module: str, names: dict[str, Any], homes: Mapping[str, Mapping[str, str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module`` that imports public names at their first use.

    Args:
        module: The full name of the module.
        names: The globals of the module, to which imported values are added.
        homes: For each subpackage, the names to import from it, each with its public name.
    """
    sources = {public: (room, name) for room, each in homes.items() for name, public in each.items()}

    def get(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        room, source = sources[name]
        value = names[name] = getattr(import_module(f"pccheck_async.{room}"), source)
        return value

    return get
