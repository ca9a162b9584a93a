"""What this process may use of the machine: cores and memory, cgroup limits and affinity included."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_cores", "available_memory"]


def available_cores() -> int:
    """Cores that this process may run on (affinity and cgroup CPU quota)."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroups():
        quota = _read(folder / "cpu.max").split()
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return max(1, cores)


def available_memory() -> int:
    """Bytes that this process can still take: free memory of the machine, or what its cgroups leave."""
    fields = (line.split() for line in _read(Path("/proc/meminfo")).splitlines())
    free = next((int(f[1]) * 1024 for f in fields if f[0] == "MemAvailable:"), os.sysconf("SC_PAGE_SIZE") * 1024)
    for folder in _cgroups():
        for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, now = _read(folder / limit).strip(), _read(folder / use).strip()
            if most.isdigit() and now.isdigit():
                free = min(free, max(0, int(most) - int(now)))
    return free


def _cgroups() -> list[Path]:
    """This process's cgroup folders, its own first, then the ancestors; version 1's memory controller too."""
    folders: list[Path] = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        own = root / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
