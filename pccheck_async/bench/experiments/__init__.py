"""The measurements behind the figures: each is one question, run by its name."""

from pccheck_async.bench.experiments.base import Experiment, Findings, Settings
from pccheck_async.bench.experiments.overhead import Overhead
from pccheck_async.bench.experiments.throughput import Throughput
from pccheck_async.bench.experiments.timelines import Timelines

__all__ = ["EXPERIMENTS", "Experiment", "Findings", "Settings"]

_ALL: tuple[type[Experiment], ...] = (Throughput, Overhead, Timelines)

EXPERIMENTS: dict[str, type[Experiment]] = {experiment.name: experiment for experiment in _ALL}
"""Every experiment by its name, in the order of a whole run."""
