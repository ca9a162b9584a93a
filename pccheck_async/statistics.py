# SPDX-License-Identifier: Apache-2.0
"""Counts and measurements of an engine, and the events that its hooks get."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pccheck_async.lazy_names import importer

if TYPE_CHECKING:
    from pccheck_async.engine import (
        CheckpointProgress,
        Decisions,
        Distribution,
        EngineStatistics,
    )
    from pccheck_async.telemetry import (
        Event,
        Stage,
    )

__all__ = [
    "CheckpointProgress",
    "Decisions",
    "Distribution",
    "EngineStatistics",
    "Event",
    "Stage",
]

__getattr__ = importer(
    __name__,
    globals(),
    {
        "engine": {
            "CheckpointProgress": "CheckpointProgress",
            "Decisions": "Decisions",
            "Distribution": "Distribution",
            "EngineStatistics": "EngineStatistics",
        },
        "telemetry": {"Event": "Event", "Stage": "Stage"},
    },
)


def __dir__() -> list[str]:
    return __all__
