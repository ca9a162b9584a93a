"""Where something was measured: the machine, and the filesystem under the folder."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from pccheck_async.medium.filesystem import filesystem_type, probe
from pccheck_async.transfer import available_cores, available_memory

__all__ = ["Place", "survey"]


@dataclass(frozen=True, slots=True)
class Place:
    """A machine and a filesystem.

    Attributes:
        machine: Processor architecture, cores that the process may use, and the model where the kernel tells.
        memory_bytes: Memory that was available to the process at that time.
        kernel: Release of the kernel.
        device: Name of the accelerator, "cpu" where there is none.
        filesystem: Type of the filesystem ("ext4").
        direct: Whether it takes direct I/O, and its alignment in bytes.
        python: Version of Python.
        torch: Version of torch.
    """

    machine: str
    memory_bytes: int
    kernel: str
    device: str
    filesystem: str
    direct: str
    python: str
    torch: str


def survey(folder: Path) -> Place:
    """Return where this runs; creates and removes a temporary file in ``folder``."""
    cuda = torch.cuda.is_available()
    return Place(
        machine=f"{platform.machine()}, {available_cores()} of {os.cpu_count()} cores, {_model()}",
        memory_bytes=available_memory(),
        kernel=platform.release(),
        device=torch.cuda.get_device_name() if cuda else "cpu",
        filesystem=filesystem_type(folder),
        direct=_direct(folder),
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def _direct(folder: Path) -> str:
    facts = probe(folder, create=True)
    return f"yes, aligned to {facts.block_bytes} bytes" if facts.direct else f"no: {facts.why}"


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "model unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "model unknown")
