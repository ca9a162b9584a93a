"""All around a training step: the step context, accumulation windows, policies, preemption, resumable data.

It puts an engine together with what the engine asks of training.
It may import: engine and what is below. Policies are in :mod:`.policy`, resumable data in :mod:`.data`.
"""

from pccheck_async.training.run import AsyncStepContext, StepContext, TrainingRun, TrainingStep

__all__ = ["AsyncStepContext", "StepContext", "TrainingRun", "TrainingStep"]
