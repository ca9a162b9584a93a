# SPDX-License-Identifier: Apache-2.0
"""Cores and memory that this process may use, by affinity, cgroup limits and resource limits."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

__all__ = ["available_cores", "available_descriptors", "available_memory", "share_of_cores", "share_of_machine"]

_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),  # beyond it the kernel slows the process down
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names of a cgroup's files for limit and use, and of the field of ``memory.stat`` for droppable page cache."""
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_RLIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def available_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use (affinity, cgroup CPU quota). ``root`` holds ``proc`` and ``sys``."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroups(root, "cpu"):
        quota, *rest = (_read(f"{folder}/cpu.max") or _read(f"{folder}/cpu.cfs_quota_us")).split() or [""]
        if quota.isdigit():  # "max" or -1: no quota
            period = rest[0] if rest else _read(f"{folder}/cpu.cfs_period_us").strip()
            if period.isdigit() and int(period) > 0:
                cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate: the least of free memory, cgroup and resource limits.

    Page cache of a cgroup counts as free, like that of the machine: the kernel drops it first.
    """
    free = _fields(f"{root}/proc/meminfo").get("MemAvailable:", os.sysconf("SC_PAGE_SIZE")) * 1024
    for folder in _cgroups(root, "memory"):
        for limit, use, cache in _MEMORY:
            most = _read(f"{folder}/{limit}").strip()
            if most.isdigit() and (now := _read(f"{folder}/{use}").strip()).isdigit():
                used = int(now) - _fields(f"{folder}/memory.stat").get(cache, 0)
                free = min(free, max(0, int(most) - max(0, used)))
    for number, used_by in _RLIMITS:
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            used = _fields(f"{root}/proc/self/status").get(f"{used_by}:", 0) * 1024
            free = min(free, max(0, soft - used))
    return free


def available_descriptors() -> int:
    """Return how many more files this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(0, limit - len(os.listdir("/proc/self/fd")))


def share_of_machine(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this process's share of cores (at least one), and of bytes of available memory.

    The shares are equal for all processes that a launcher started on this host; torchrun and MPI set their number in
    the environment. The processes need not be one group.
    """
    return share_of_cores(environment), available_memory() // _local_ranks(environment)


def share_of_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Return the cores of :func:`share_of_machine` only, which takes half as long."""
    return max(1, available_cores() // _local_ranks(environment))


def _local_ranks(environment: Mapping[str, str]) -> int:
    return max(1, *(int(environment[name]) for name in _LOCAL_RANKS if environment.get(name, "").isdigit()), 1)


def _cgroups(root: Path, controller: str) -> Sequence[Path]:
    return _cgroup_folders(_read(f"{root}/proc/self/cgroup"), root / "sys/fs/cgroup", controller)


@lru_cache(8)
def _cgroup_folders(mine: str, mounted: Path, controller: str) -> Sequence[Path]:
    """Return this process's cgroup folders for a controller, its own first, then the ancestors, of cgroup v1 and v2.

    ``mine`` is the content of ``/proc/self/cgroup``, ``mounted`` the folder of mounted cgroups. In a container the
    paths in ``mine`` may be those outside of it; the mounted root is then the container's own cgroup.
    """
    folders: list[Path] = []
    for line in mine.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / (controller if controllers else "")
        own = top / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder == top or top in folder.parents]
    return tuple(folders)


def _fields(path: str) -> dict[str, int]:
    """Return the numbers in a file of the kernel by name; each line is a name and a number."""
    lines = (line.split() for line in _read(path).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
