"""The measurements behind the figures: each is one question, run by its name."""

from pccheck_async.bench.experiments.base import Experiment, Findings, Settings
from pccheck_async.bench.experiments.costs import Costs
from pccheck_async.bench.experiments.growth import Growth
from pccheck_async.bench.experiments.small import Small

__all__ = ["EXPERIMENTS", "Experiment", "Findings", "Settings"]

_ALL: tuple[type[Experiment], ...] = (Costs, Small, Growth)

EXPERIMENTS: dict[str, type[Experiment]] = {experiment.name: experiment for experiment in _ALL}
"""Every experiment by its name, in the order of a whole run."""
