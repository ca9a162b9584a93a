"""What fails on one rank: it ends alike on all of them, and nothing that is complete is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointEngine, CheckpointError, Group, GroupError, StorageOptions, SyncCheckpointEngine
from pccheck_async.errors import ReadError, WriteError
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import WrappingWriter
from pccheck_async.testing.doubles import Access
from tests.support.ranks import run_ranks, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:checkpoint of step"),
]


class FailsWhenTold(WrappingWriter):
    """Fails accesses of some kinds to the files of some names, from the moment on that it is told."""

    kinds: Collection[str] = ()
    part_of_name = ""

    async def perform(self, access: Access, call: Any) -> Any:
        if access.kind in self.kinds and self.part_of_name in access.name:
            raise WriteError(5, "told to fail", access.name)
        return await call()


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((50_000,), float(100 * step + rank)), "step": step}


def outcomes(engine: SyncCheckpointEngine, rank: int, steps: range) -> list[str]:
    """Save these steps; return the kinds of the errors, "" for none."""
    found = []
    for step in steps:
        try:
            engine.checkpoint(state_of(rank, step), step=step).result(20)
        except CheckpointError as error:
            found.append(type(error).__name__)
        else:
            found.append("")
    return found


def fails_on_rank_1(folder: Path, kinds: Collection[str], part_of_name: str, group: Group) -> list[str]:
    """Save two steps, then two while rank 1 fails, then two more."""
    medium: FailsWhenTold | None = None

    def make(path: str, operations: Any) -> Medium:
        nonlocal medium
        medium = FailsWhenTold(Files(path, operations))
        return medium

    engine = SyncCheckpointEngine(folder, group=group, storage=StorageOptions(io=make)).open()
    assert medium is not None
    found = outcomes(engine, group.rank, range(2))
    if group.rank == 1:
        medium.kinds, medium.part_of_name = kinds, part_of_name
    found += outcomes(engine, group.rank, range(2, 4))
    medium.kinds = ()
    found += outcomes(engine, group.rank, range(4, 6))
    try:
        engine.close(10)
    except CheckpointError:
        found.append("closing")
    return found


def newest(folder: Path, group: Group) -> tuple[int, float]:
    with SyncCheckpointEngine(folder, group=group) as engine:
        state = state_of(group.rank, -1)
        restored = engine.restore(state)
        assert restored is not None
        return restored.step, float(state["w"][0])


def test_a_write_that_fails_costs_all_ranks_that_checkpoint_and_no_other(tmp_path: Path) -> None:
    first, second = run_ranks(2, partial(fails_on_rank_1, tmp_path, {"write"}, "slot"))
    assert first[:6] == ["", "", "GroupError", "GroupError", "", ""]
    assert second[:6] == ["", "", "WriteError", "WriteError", "", ""]
    assert run_ranks(2, partial(newest, tmp_path)) == [(5, 500.0), (5, 501.0)]


@pytest.mark.parametrize("part_of_name", ["slot", "commit"])
def test_a_flush_that_fails_ends_all_commits_of_the_run_and_drops_nothing(tmp_path: Path, part_of_name: str) -> None:
    first, second = run_ranks(2, partial(fails_on_rank_1, tmp_path, {"flush"}, part_of_name))
    assert first[:2] == second[:2] == ["", ""]
    assert set(first[2:6]) == {"GroupError"}
    assert second[2] in {"StoreFailedError", "GroupError"}
    assert "" not in second[2:6]
    found = run_ranks(2, partial(newest, tmp_path))
    assert found[0][0] == found[1][0] >= 1
    assert [value for _, value in found] == [100.0 * found[0][0] + rank for rank in range(2)]


class FailsToReadOnce(WrappingWriter):
    """Fails one read of a slot: the first one after so many, once it is told."""

    left = -1

    async def perform(self, access: Access, call: Any) -> Any:
        if access.kind == "read" and "slot" in access.name:
            self.left -= 1
            if self.left == -1:
                raise ReadError(errno.EIO, "told to fail", access.name)
        return await call()


def restores_past_a_failure(folder: Path, reads: int, group: Group) -> tuple[int, list[int]]:
    """Save two steps, restore while a read of rank 1 fails, and save a third one; return what is left."""
    medium: FailsToReadOnce | None = None

    def make(path: str, operations: Any) -> Medium:
        nonlocal medium
        medium = FailsToReadOnce(Files(path, operations))
        return medium

    with SyncCheckpointEngine(folder, group=group, storage=StorageOptions(io=make), keep_last=3) as engine:
        assert outcomes(engine, group.rank, range(2)) == ["", ""]
        assert medium is not None
        if group.rank == 1:
            medium.left = reads
        with pytest.warns(RuntimeWarning, match="all ranks fall back to step 0"):
            restored = engine.restore(state_of(group.rank, -1))
        assert restored is not None
        assert outcomes(engine, group.rank, range(2, 3)) == [""]
        return restored.step, [info.step for info in engine.checkpoints()]


@pytest.mark.parametrize("reads", [0, 1])  # the manifest's is the first
def test_a_read_that_fails_costs_no_checkpoint(tmp_path: Path, reads: int) -> None:
    assert run_ranks(2, partial(restores_past_a_failure, tmp_path, reads)) == [(0, [2, 1, 0])] * 2


class HoldsOneBack(WrappingWriter):
    """Holds all writes to the slot that is written to first, from the moment on that it is told."""

    holds = False
    name = ""

    async def perform(self, access: Access, call: Any) -> Any:
        if self.holds and access.kind == "write" and "slot" in access.name:
            self.name = self.name or access.name
            while self.holds and access.name == self.name:  # noqa: ASYNC110 - told by another thread
                await asyncio.sleep(0.001)
        return await call()


def overtaken(folder: Path, group: Group) -> list[tuple[int, bool]]:
    """Save two steps at once, of which rank 1 writes the second one first; return what is durable instead, and why."""
    medium: HoldsOneBack | None = None

    def make(path: str, operations: Any) -> Medium:
        nonlocal medium
        medium = HoldsOneBack(Files(path, operations))
        return medium

    with SyncCheckpointEngine(folder, group=group, storage=StorageOptions(io=make), max_in_flight=2) as engine:
        assert outcomes(engine, group.rank, range(1)) == [""]
        assert medium is not None
        medium.holds = group.rank == 1
        older, newer = (engine.checkpoint(state_of(group.rank, step), step=step) for step in (1, 2))
        newer.result(20)
        medium.holds = False
        assert outcomes(engine, group.rank, range(3, 6)) == [""] * 3  # the slot was given back
        return [(pending.result(20).step, pending.superseded) for pending in (older, newer)]


def test_a_checkpoint_that_a_newer_one_overtakes_ends_well_on_ranks_that_still_write_it(tmp_path: Path) -> None:
    first, second = run_ranks(2, partial(overtaken, tmp_path))
    assert first == second == [(2, True), (2, False)]
    assert run_ranks(2, partial(newest, tmp_path)) == [(5, 500.0), (5, 501.0)]


def killed_later(folder: Path, victim: int, group: Group) -> str:
    engine = SyncCheckpointEngine(folder, group=group).open()
    assert outcomes(engine, group.rank, range(2)) == ["", ""]
    (folder / f"ready-{group.rank}").touch()
    if group.rank == victim:
        time.sleep(30)
    pending = engine.checkpoint(state_of(group.rank, 2), step=2)
    try:
        pending.result(2 if victim else 20)
    except TimeoutError:
        return "waits"
    except GroupError:
        return "GroupError"
    return "durable"


@pytest.mark.parametrize(("victim", "outcome"), [(0, "GroupError"), (1, "waits")])
def test_a_rank_that_dies_leaves_the_others_waiting_or_told(tmp_path: Path, victim: int, outcome: str) -> None:
    """Nobody guesses that a rank is dead; but without rank 0 nothing is ever decided."""

    def rank_main(group: Group) -> None:
        found = "" if group.rank == victim else killed_later(tmp_path, victim, group)
        if group.rank == victim:
            killed_later(tmp_path, victim, group)
        (tmp_path / "found").write_text(found)
        os._exit(0)

    def kill(pids: list[int]) -> None:
        wait_for(*(tmp_path / f"ready-{rank}" for rank in range(2)))
        os.kill(pids[victim], signal.SIGKILL)
        wait_for(tmp_path / "found")

    run_ranks(2, rank_main, meanwhile=kill, statuses=[])
    assert (tmp_path / "found").read_text() == outcome
    assert run_ranks(2, partial(newest, tmp_path)) == [(1, 100.0), (1, 101.0)]


def test_a_rank_that_is_stopped_for_a_while_holds_the_others_up_and_costs_nothing(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[str]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            found = outcomes(engine, group.rank, range(2))
            (tmp_path / f"ready-{group.rank}").touch()
            return found + outcomes(engine, group.rank, range(2, 40))

    def stop(pids: list[int]) -> None:
        wait_for(*(tmp_path / f"ready-{rank}" for rank in range(2)))
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(pids[1], signal.SIGCONT)

    assert run_ranks(2, rank_main, meanwhile=stop) == [[""] * 40] * 2


CHUNK = 1 << 20


def saved_side_by_side(folder: Path, group: Group) -> None:
    """Save two checkpoints at once with one staging buffer: one in one chunk, the other in many on rank 1 alone."""

    async def main() -> None:
        storage = StorageOptions(host_memory=CHUNK, chunk_bytes=CHUNK)
        async with CheckpointEngine(folder, group=group, save_last=False, max_in_flight=2, storage=storage) as engine:
            for step in range(0, 20, 2):
                large = torch.ones(CHUNK * (12 if group.rank else 1) // 6)
                states = {step: {"t": large}, step + 1: {"t": torch.ones(CHUNK // 6)}}
                pendings = await asyncio.gather(*[engine.checkpoint(each, step=key) for key, each in states.items()])
                for pending in pendings:
                    await pending

    asyncio.run(main())


def test_ranks_with_one_buffer_do_not_wait_for_each_other_s(tmp_path: Path) -> None:
    """Their checkpoints reach the buffer in different orders, and none is decided before all ranks wrote it."""
    run_ranks(2, partial(saved_side_by_side, tmp_path))
