"""The measurements behind the figures: each is one question, run by its name."""

from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.experiments.costs import Costs
from examples.paper.lab.experiments.gh import GH
from examples.paper.lab.experiments.growth import Growth
from examples.paper.lab.experiments.hpec import HPEC
from examples.paper.lab.experiments.in_flight import InFlight
from examples.paper.lab.experiments.memory import Memory
from examples.paper.lab.experiments.overhead import Overhead
from examples.paper.lab.experiments.sizes import Sizes
from examples.paper.lab.experiments.small import Small
from examples.paper.lab.experiments.throughput import Throughput
from examples.paper.lab.experiments.timelines import Timelines
from examples.paper.lab.experiments.writers import Writers

__all__ = ["EXPERIMENTS", "Experiment", "Findings", "Settings"]

_ALL: tuple[type[Experiment], ...] = (
    *(Costs, Small, Growth),
    *(Throughput, Overhead, Timelines),
    *(Sizes, InFlight, Writers, Memory, GH, HPEC),
)

EXPERIMENTS: dict[str, type[Experiment]] = {experiment.name: experiment for experiment in _ALL}
"""Every experiment by its name, in the order of a whole run."""
