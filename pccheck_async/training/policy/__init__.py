# SPDX-License-Identifier: Apache-2.0
"""Policies: each gets a report of every step and every checkpoint, and decides after which steps to checkpoint.

They read no clock: the times are in the reports, so that a run can be replayed or simulated.
"""

from pccheck_async.engine import Decision, Policy, SaveReport, StepReport
from pccheck_async.training.policy.every import EverySeconds, EverySteps, make_policy
from pccheck_async.training.policy.formulas import (
    CheckFreqChoice,
    checkfreq_interval,
    daly_seconds,
    interval_floor,
    sustained_interval,
    young_seconds,
)
from pccheck_async.training.policy.measured import Adaptive, CheckFreqInterval, Measured, PCcheckInterval, YoungDaly

__all__ = [
    "Adaptive", "CheckFreqChoice", "CheckFreqInterval", "Decision", "EverySeconds", "EverySteps", "Measured",
    "PCcheckInterval", "Policy", "SaveReport", "StepReport", "YoungDaly", "checkfreq_interval", "daly_seconds",
    "interval_floor", "make_policy", "sustained_interval", "young_seconds",
]  # fmt: skip
