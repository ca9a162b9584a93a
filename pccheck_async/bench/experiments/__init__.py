"""The measurements behind the figures: each is one question, run by its name."""

from pccheck_async.bench.experiments.base import Experiment, Findings, Settings
from pccheck_async.bench.experiments.costs import Costs
from pccheck_async.bench.experiments.gh import GH
from pccheck_async.bench.experiments.growth import Growth
from pccheck_async.bench.experiments.hpec import HPEC
from pccheck_async.bench.experiments.in_flight import InFlight
from pccheck_async.bench.experiments.memory import Memory
from pccheck_async.bench.experiments.overhead import Overhead
from pccheck_async.bench.experiments.sizes import Sizes
from pccheck_async.bench.experiments.small import Small
from pccheck_async.bench.experiments.throughput import Throughput
from pccheck_async.bench.experiments.timelines import Timelines
from pccheck_async.bench.experiments.writers import Writers

__all__ = ["EXPERIMENTS", "Experiment", "Findings", "Settings"]

_ALL: tuple[type[Experiment], ...] = (
    *(Costs, Small, Growth),
    *(Throughput, Overhead, Timelines),
    *(Sizes, InFlight, Writers, Memory, GH, HPEC),
)

EXPERIMENTS: dict[str, type[Experiment]] = {experiment.name: experiment for experiment in _ALL}
"""Every experiment by its name, in the order of a whole run."""
