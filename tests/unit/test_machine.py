"""What a process may use: read from files as the kernel writes them, in and outside of containers."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from pccheck_async import SyncCheckpointEngine
from pccheck_async.transfer import available_cores, available_memory, share_of_machine
from tests.support.processes import passes_in_a_forked_child

MIB = 1 << 20
GIB = 1 << 30
V2 = "0::/a/b"
V1 = "7:memory:/a/b\n4:cpu,cpuacct:/a/b\n2:cpuset:/a/b\n0::/"
MEMORY = {
    "nothing": (V2, {}, 8 * GIB),
    "a limit": (V2, {"a/b/memory.max": GIB, "a/b/memory.current": 300 * MIB}, 724 * MIB),
    "no limit": (V2, {"a/b/memory.max": "max", "a/b/memory.current": GIB}, 8 * GIB),
    "files were read": (
        V2,
        {
            "a/b/memory.max": GIB,
            "a/b/memory.current": GIB - 4096,
            "a/b/memory.stat": f"anon {200 * MIB}\nfile {800 * MIB}\ninactive_file {600 * MIB}\nactive_file 5",
        },
        600 * MIB + 4096,
    ),
    "more is dropped than is used": (
        V2,
        {"a/b/memory.max": GIB, "a/b/memory.current": MIB, "a/b/memory.stat": f"inactive_file {2 * MIB}"},
        GIB,
    ),
    "an ancestor's limit": (
        V2,
        {"a/b/memory.max": "max", "a/b/memory.current": MIB, "a/memory.max": GIB, "a/memory.current": GIB // 2},
        GIB // 2,
    ),
    "slowed down": (
        V2,
        {"a/b/memory.max": 2 * GIB, "a/b/memory.high": GIB, "a/b/memory.current": 24 * MIB},
        1000 * MIB,
    ),
    "a container": (V2, {"memory.max": GIB, "memory.current": 24 * MIB}, 1000 * MIB),
    "version 1": (
        V1,
        {
            "memory/a/b/memory.limit_in_bytes": GIB,
            "memory/a/b/memory.usage_in_bytes": GIB,
            "memory/a/b/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}",
        },
        100 * MIB,
    ),
    "a container of version 1": (
        V1,
        {"memory/memory.limit_in_bytes": GIB, "memory/memory.usage_in_bytes": 24 * MIB},
        1000 * MIB,
    ),
}
CORES = {
    "nothing": (V2, {}, 8),
    "a quota": (V2, {"a/b/cpu.max": "250000 100000"}, 2),
    "no quota": (V2, {"a/b/cpu.max": "max 100000"}, 8),
    "an ancestor's quota": (V2, {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
    "less than one": (V2, {"cpu.max": "50000 100000"}, 1),
    "version 1": (V1, {"cpu/a/b/cpu.cfs_quota_us": "400000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 4),
    "a container of version 1": (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    "version 1, no quota": (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, 8),
}


def kernel(root: Path, cgroup: str, files: dict[str, object]) -> Path:
    """Write what a kernel tells."""
    told: dict[str, object] = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    told |= {"proc/self/cgroup": cgroup, "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 * MIB} kB\nHugetlb: 0 kB"}
    for name, text in told.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(("cgroup", "files", "nbytes"), MEMORY.values(), ids=MEMORY)
def test_memory(tmp_path: Path, cgroup: str, files: dict[str, object], nbytes: int) -> None:
    assert available_memory(kernel(tmp_path, cgroup, files)) == nbytes


@pytest.mark.parametrize(("cgroup", "files", "cores"), CORES.values(), ids=CORES)
def test_cores(
    tmp_path: Path, cgroup: str, files: dict[str, object], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert available_cores(kernel(tmp_path, cgroup, files)) == cores


@pytest.mark.parametrize(("limit", "used"), [(resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")])
def test_a_process_with_a_limit_of_its_own_saves_within_it(tmp_path: Path, limit: int, used: str) -> None:
    def saves() -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now = int(status[used].split()[0]) * 1024
        resource.setrlimit(limit, (now + 512 * MIB, resource.RLIM_INFINITY))
        assert available_memory() <= 512 * MIB
        with SyncCheckpointEngine(tmp_path) as engine:
            assert engine.statistics().decisions.host_memory <= 128 * MIB
            engine.checkpoint({"tensor": torch.arange(1 << 20)}, step=1).result()

    assert passes_in_a_forked_child(saves)


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_ranks_of_one_host_share_it(name: str) -> None:
    cores, memory = share_of_machine({})
    half, less = share_of_machine({name: "2"})
    assert half == max(1, cores // 2)
    assert less == pytest.approx(memory / 2, rel=0.2)
    assert share_of_machine({name: "1000"})[0] == 1
    assert share_of_machine({name: "nonsense"})[0] == share_of_machine({name: "0"})[0] == cores
