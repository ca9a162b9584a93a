"""What a benchmark saves, and how long the steps between two saves take."""

from pccheck_async.bench.workloads.base import Workload, state_bytes
from pccheck_async.bench.workloads.device import SlowDevice
from pccheck_async.bench.workloads.raw import Raw, Sleeping
from pccheck_async.bench.workloads.training import GPT, Digits

__all__ = ["GPT", "WORKLOADS", "Digits", "Raw", "Sleeping", "SlowDevice", "Workload", "state_bytes"]

WORKLOADS: dict[str, type[Workload]] = {workload.name: workload for workload in (Raw, Sleeping, GPT, Digits)}
"""Every workload by its name."""
