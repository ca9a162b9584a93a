"""Settings of an engine in one dict, for tests that mix those of its storage with others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pccheck_async import StorageOptions

_OF_STORAGE = {field.name for field in fields(StorageOptions)}


def engine_settings(**settings: Any) -> dict[str, Any]:
    """Return keyword arguments of an engine: fields of ``StorageOptions`` go into ``storage``."""
    storage = {name: settings.pop(name) for name in _OF_STORAGE & settings.keys()}
    return {**settings, "storage": StorageOptions(**storage)}
