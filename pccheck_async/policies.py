# SPDX-License-Identifier: Apache-2.0
"""When a training step saves: policies that come with the package, and the reports and decisions of one of your own."""

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
