"""Where something was measured: the machine, and the filesystem under the folder."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from pccheck_async.medium.filesystem import IN_MEMORY, direct_alignment, filesystem_type
from pccheck_async.transfer import available_cores, available_memory

__all__ = ["Place", "survey"]


@dataclass(frozen=True, slots=True)
class Place:
    """A machine and a filesystem.

    Attributes:
        machine: Processor architecture, cores that the process may use, and the model where the kernel tells.
        memory_bytes: What the process could take when it was asked.
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
    """Return where this runs; writes a passing file into ``folder``."""
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
    if filesystem_type(folder) in IN_MEMORY:
        return "no: in memory"
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            return f"no: {error.strerror}"
        try:
            return f"yes, aligned to {direct_alignment(fd)[1]} bytes"
        except OSError as error:
            return f"no: {error.strerror}"
        finally:
            os.close(fd)


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "model unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "model unknown")
