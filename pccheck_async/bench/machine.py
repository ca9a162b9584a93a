# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine and the filesystem, and the processor time used."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from pccheck_async.medium.filesystem import filesystem_type, probe
from pccheck_async.transfer import available_cores, available_memory

__all__ = ["BenchPlace", "busy_seconds", "survey"]


@dataclass(frozen=True, slots=True)
class BenchPlace:
    """Facts about the machine, its available memory, and the filesystem and its support for direct I/O, as text."""

    machine: str
    memory_bytes: int
    kernel: str
    device: str
    filesystem: str
    direct: str
    python: str
    torch: str


def survey(folder: Path) -> BenchPlace:
    """Return the facts about this machine and ``folder``; creates and removes a temporary file in ``folder``."""
    facts = probe(folder, create=True)
    return BenchPlace(
        machine=f"{platform.machine()}, {available_cores()} of {os.cpu_count()} cores, {_model()}",
        memory_bytes=available_memory(),
        kernel=platform.release(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        filesystem=filesystem_type(folder),
        direct=f"yes, aligned to {facts.block_bytes} bytes" if facts.direct else f"no: {facts.why}",
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "model unknown")


def busy_seconds() -> float:
    """Return the processor seconds that the whole system has used since boot, the kernel's own threads included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
