"""Frameworks that tests import when they use them: a process pays for what it has imported at each of its forks."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ["Lazily", "need_framework"]


class Lazily:
    """A module that is imported when something of it is used first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest, which looks whether this is a test
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def need_framework(*names: str) -> None:
    """Skip the test module that is being imported where one of these is not installed."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
