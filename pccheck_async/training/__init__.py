# SPDX-License-Identifier: Apache-2.0
"""The parts of a training loop: step contexts, accumulation windows, policies, preemption, resumable data.

This package implements the hooks that the engine has for training.
It may import: engine and the rooms below. Policies are in :mod:`.policy`, resumable data in :mod:`.data`.
"""

from pccheck_async.training.run import AsyncStepContext, StepContext, TrainingRun, TrainingStep

__all__ = ["AsyncStepContext", "StepContext", "TrainingRun", "TrainingStep"]
