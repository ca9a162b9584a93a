# SPDX-License-Identifier: Apache-2.0
"""Policies, which decide when a training step saves, and the classes that a policy of your own needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pccheck_async.lazy_names import importer

if TYPE_CHECKING:
    from pccheck_async.training.policy import (
        Adaptive,
        CheckFreqInterval,
        Decision,
        EverySeconds,
        EverySteps,
        PCcheckInterval,
        Policy,
        SaveReport,
        StepReport,
        YoungDaly,
    )

__all__ = [
    "Adaptive",
    "CheckFreqInterval",
    "Decision",
    "EverySeconds",
    "EverySteps",
    "PCcheckInterval",
    "Policy",
    "SaveReport",
    "StepReport",
    "YoungDaly",
]

__getattr__ = importer(
    __name__,
    globals(),
    {
        "training.policy": {
            "Adaptive": "Adaptive",
            "CheckFreqInterval": "CheckFreqInterval",
            "Decision": "Decision",
            "EverySeconds": "EverySeconds",
            "EverySteps": "EverySteps",
            "PCcheckInterval": "PCcheckInterval",
            "Policy": "Policy",
            "SaveReport": "SaveReport",
            "StepReport": "StepReport",
            "YoungDaly": "YoungDaly",
        },
    },
)


def __dir__() -> list[str]:
    return __all__
