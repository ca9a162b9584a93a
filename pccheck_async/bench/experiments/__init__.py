"""The measurements behind the figures: each is one question, run by its name."""

from pccheck_async.bench.experiments.base import Experiment, Findings, Settings

__all__ = ["EXPERIMENTS", "Experiment", "Findings", "Settings"]

_ALL: tuple[type[Experiment], ...] = ()

EXPERIMENTS: dict[str, type[Experiment]] = {experiment.name: experiment for experiment in _ALL}
"""Every experiment by its name, in the order of a whole run."""
