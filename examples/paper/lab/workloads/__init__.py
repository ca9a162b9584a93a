"""What a benchmark saves, and how long the steps between two saves take."""

from examples.paper.lab.workloads.base import Workload, state_bytes
from examples.paper.lab.workloads.device import SlowDevice
from examples.paper.lab.workloads.raw import Raw, Sleeping
from examples.paper.lab.workloads.training import GPT, Digits

__all__ = ["GPT", "WORKLOADS", "Digits", "Raw", "Sleeping", "SlowDevice", "Workload", "state_bytes"]

WORKLOADS: dict[str, type[Workload]] = {workload.name: workload for workload in (Raw, Sleeping, GPT, Digits)}
"""Every workload by its name."""
