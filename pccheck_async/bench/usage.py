"""Processor time of the whole system, and files dropped from the page cache: asked of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["busy_seconds", "evict"]


def busy_seconds() -> float:
    """Return the processor seconds that the whole system has used since boot, the kernel's own threads included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def evict(folder: Path) -> None:
    """Drop the files in a folder from the page cache, so that reading them is reading the device."""
    os.sync()  # dirty pages would stay
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
