"""Training data whose position is a few numbers, saved with the rest of the state and resumed without replay."""

from pccheck_async.training.data.loader import ResumableLoader
from pccheck_async.training.data.sampler import ResumableSampler

__all__ = ["ResumableLoader", "ResumableSampler"]
