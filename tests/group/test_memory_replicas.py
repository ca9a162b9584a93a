"""Copies in the memory of other hosts: what survives the loss of hosts, with their memory and their disks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from pccheck_async import Group, MemoryTier, SyncCheckpointEngine
from tests.support.ranks import run_ranks, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("machine_asked_once"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:the checkpoint of step"),
]
SIZES = pytest.mark.parametrize("elements", [500, 300_000], ids=["one request", "chunks"])


class Hosts:
    """Hosts, each with a disk and a memory of its own, and the ranks that run on them."""

    def __init__(self, disks: Path, memory: Path, *, replicas: int = 1, **settings: Any) -> None:
        self.disks, self.memory, self.replicas, self.settings = disks, memory, replicas, settings

    def tier(self, host: int) -> MemoryTier:
        (self.memory / f"{host}").mkdir(exist_ok=True)
        return MemoryTier(interval=1, path=str(self.memory / f"{host}"), replicas=self.replicas, **self.settings)

    def lose(self, hosts: Iterable[int]) -> None:
        for host in hosts:
            shutil.rmtree(self.memory / f"{host}")
            shutil.rmtree(self.disks / f"{host}")

    def part(self, host: int, rank: int) -> Path:
        (folder,) = (self.memory / f"{host}").iterdir()
        return folder / f"rank-{rank:05d}"

    def run(
        self,
        places: list[int],
        steps: range = range(0),
        *,
        on_disk: range = range(0),
        elements: int = 500,
        then: Callable[[SyncCheckpointEngine, int], Any] = lambda engine, rank: None,
    ) -> list[Any]:
        """Restore, save steps in memory, wait until the last one is on other hosts, and die; ``places``: of each rank.

        Returns what each rank restored, or what ``then`` returned.
        """

        def work(group: Group) -> Any:
            host = places[group.rank]
            folder = self.disks / f"{host}" / "run"
            engine = SyncCheckpointEngine(folder, group=group, memory=self.tier(host), save_last=False).open()
            state = state_of(group.rank, -1, elements)
            restored = engine.restore(state, private="modulo")
            found = (-1, "none") if restored is None else (restored.step, restored.source)
            if restored is not None:
                assert torch.equal(state["tensor"], state_of(state["rank"], restored.step, elements)["tensor"])
            for number in steps:
                where = "disk" if number in on_disk else "memory"
                pending = engine.checkpoint(state_of(group.rank, number, elements), step=number, tier=where)  # type: ignore[arg-type]
                pending.wait_reached("memory", 20)
                if where == "disk":
                    pending.result(20)
                if number == steps[-1]:
                    pending.wait_reached("replicas", 20)
            answer = then(engine, group.rank)
            (marks / str(group.rank)).touch()
            wait_for(*(marks / str(rank) for rank in range(len(places))))
            return found if answer is None else answer  # and the process ends without closing it

        with TemporaryDirectory() as name:
            marks = Path(name)
            return run_ranks(len(places), work)


@pytest.fixture
def hosts(tmp_path: Path, shared_memory: Path) -> Callable[..., Hosts]:
    return partial(Hosts, tmp_path, shared_memory)


def state_of(rank: int, step: int, elements: int = 500) -> dict[str, Any]:
    return {"tensor": torch.arange(elements) + 1000 * step + rank, "step": step, "rank": rank}


@SIZES
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_is_lost_with_its_memory_and_its_disk(hosts: Callable[..., Hosts], elements: int, lost: int) -> None:
    both = hosts()
    assert both.run([0, 1], range(3), elements=elements) == [(-1, "none")] * 2
    both.lose([lost])
    expected = [(2, "memory")] * 2
    expected[lost] = (2, "replicas")
    assert both.run([0, 1], elements=elements) == expected
    assert both.run([0, 1], range(3, 5), elements=elements) == expected
    both.lose([1 - lost])
    assert both.run([0, 1], elements=elements) == [(4, "replicas" if rank == 1 - lost else "memory") for rank in (0, 1)]
