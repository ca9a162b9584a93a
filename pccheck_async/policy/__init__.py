"""When to checkpoint: policies that are told of every step and every checkpoint, and answer yes or no.

Pure: time comes in with the reports, so that a run can be replayed or simulated.
"""

from pccheck_async.policy.adaptive import Adaptive
from pccheck_async.policy.base import Decision, Policy, SaveReport, StepReport
from pccheck_async.policy.checkfreq import CheckFreqInterval
from pccheck_async.policy.every import EverySeconds, EverySteps
from pccheck_async.policy.formulas import CheckFreqChoice, checkfreq_interval, daly_seconds, young_seconds
from pccheck_async.policy.make import make_policy
from pccheck_async.policy.pccheck import PCcheckInterval
from pccheck_async.policy.young_daly import YoungDaly

__all__ = [
    "Adaptive",
    "CheckFreqChoice",
    "CheckFreqInterval",
    "Decision",
    "EverySeconds",
    "EverySteps",
    "PCcheckInterval",
    "Policy",
    "SaveReport",
    "StepReport",
    "YoungDaly",
    "checkfreq_interval",
    "daly_seconds",
    "make_policy",
    "young_seconds",
]
