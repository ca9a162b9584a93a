"""Engines of several ranks reject alike: what one of them was told is so on all of them, after any end."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pccheck_async import (
    CheckpointEngine,
    Group,
    Keep,
    NoCheckpointError,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    stores,
)
from pccheck_async.cli import app
from pccheck_async.errors import IncompleteCheckpointError, StoreError, StoreLockedError
from pccheck_async.group import Member
from pccheck_async.group.ranks import Ranks
from pccheck_async.store import Store, StoreReader, Written, at_once, rank_name
from pccheck_async.testing.probe import probe
from tests.group.test_group import failure, restore, save, state_of
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]


def marks(folder: Path) -> list[tuple[int, bool]]:
    return [(info.step, info.rejected) for info in list_checkpoints(folder)]


def test_all_ranks_pass_over_what_they_rejected(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[Any]:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=6, max_in_flight=3) as engine:
            for step in range(4):
                engine.checkpoint(state_of(group.rank, step), step=step).result()
            flying = [engine.checkpoint(state_of(group.rank, step), step=step) for step in (4, 5)]
            rejected = {info.step for info in engine.reject(step=2)}
            engine.drain()
            assert rejected | {pending.step for pending in flying if pending.superseded} >= {2, 3}
            assert {info.step for info in engine.checkpoints() if not info.rejected} == {0, 1}
            assert all(pending.superseded or pending.step in rejected for pending in flying)
            assert engine.latest is not None
            assert engine.latest.step == 1
            said = [failure(lambda step=step: engine.reject(step=step)) for step in (17, 0)]  # type: ignore[misc]
            assert [kind for kind, _ in said] == [NoCheckpointError.__name__, StoreError.__name__]
            assert failure(lambda: engine.restore(state_of(group.rank, -1), step=3))[0] == StoreError.__name__
            state = state_of(group.rank, -1)
            assert engine.restore(state) is not None
            assert (state["step"], state["rank"]) == (1, group.rank)
            engine.checkpoint(state_of(group.rank, 2), step=2).result()
            return [(info.step, info.rejected) for info in engine.checkpoints()]

    assert run_ranks(2, rank_main) == [[(2, False), (1, False), (0, False)]] * 2
    assert marks(tmp_path) == [(2, False), (1, False), (0, False)]


def test_one_that_waits_for_its_turn_is_rejected_before_it_has_a_slot(tmp_path: Path) -> None:
    def rank_main(group: Group) -> Any:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=2, max_in_flight=1) as engine:
            engine.checkpoint(state_of(group.rank, 0), step=0).result(60)
            finish, entered, go = Store.finish_data, threading.Event(), threading.Event()

            async def held(self: Store, written: Written) -> None:
                entered.set()
                await asyncio.to_thread(go.wait, 60)
                await finish(self, written)

            with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor() as threads:
                patched.setattr(Store, "finish_data", held)
                first = engine.checkpoint(state_of(group.rank, 1), step=1)
                assert entered.wait(60)
                second = threads.submit(engine.checkpoint, state_of(group.rank, 2), step=2)
                while engine.statistics().in_flight < 2:
                    time.sleep(0.001)
                rejection = threads.submit(engine.reject, step=1)
                while 2 not in probe(engine).core.peers.member.settled:  # type: ignore[attr-defined]
                    time.sleep(0.001)
                go.set()
                assert [each.step for each in (first.result(60), second.result(60).result(60))] == [0, 0]
                rejection.result(60)
            for step in range(1, 9):
                engine.checkpoint(state_of(group.rank, step), step=step).result(60)
            table = probe(engine).store.slots.table
            return sorted(table.leased), [info.step for info in engine.checkpoints()]

    assert run_ranks(2, rank_main) == [([], [8, 7])] * 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_it_holds_for_other_numbers_of_ranks(tmp_path: Path, world: int) -> None:
    def reject(group: Group) -> list[int]:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=3) as engine:
            return [info.step for info in engine.reject(step=1)]  # before anything is saved: some ranks have no part

    assert run_ranks(2, lambda group: save(tmp_path, group, range(3), keep_last=3)) == [[2, 1, 0]] * 2
    assert run_ranks(world, reject) == [[2, 1]] * world
    assert marks(tmp_path) == [(2, True), (1, True), (0, False)]
    for record in (at_once(tmp_path / rank_name(rank), StoreReader.newest) for rank in range(min(world, 2))):
        assert record is not None
        assert [entry.rejected for entry in record[1].entries] == [True, True, False]
    if world == 2:
        restored = run_ranks(2, lambda group: restore(tmp_path, group, keep_last=3))
        assert [one["step"] for one in restored] == [0, 0]
        assert run_ranks(2, lambda group: save(tmp_path, group, range(1, 2), keep_last=3)) == [[1, 0]] * 2


def test_the_command_rejects_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    run_ranks(2, lambda group: save(folder, group, range(3), keep_last=3))
    shutil.copytree(folder, tmp_path / "copy")
    result = CliRunner().invoke(app, ["reject", str(folder), "--step", "1"])
    assert (result.exit_code, result.stdout) == (0, "Rejected steps 2, 1. A trainer tries step 0 first.\n")
    assert marks(folder) == [(2, True), (1, True), (0, False)]
    assert load_sync(folder)["step"] == load_sync(folder, rank=1)["step"] == stores.describe(folder).info.step == 0
    assert {each.info.step for each in stores.verify(folder).checkpoints} == {0}
    assert load_sync(folder, step=2)["step"] == 2
    with pytest.raises(NoCheckpointError):
        stores.reject(folder, step=1)
    with pytest.raises(StoreError, match="would be left"):
        stores.reject(folder, step=0)
    restored = run_ranks(2, lambda group: restore(folder, group, keep_last=3))
    assert [one["step"] for one in restored] == [0, 0]
    # A crash in between left the record of one rank as it was.
    for rank in range(2):
        mixed = tmp_path / f"mixed-{rank}"
        shutil.copytree(folder, mixed)
        shutil.rmtree(mixed / rank_name(rank))
        shutil.copytree(tmp_path / "copy" / rank_name(rank), mixed / rank_name(rank))
        assert marks(mixed) == [(2, True), (1, True), (0, False)]
        assert load_sync(mixed)["step"] == 0
        restored = run_ranks(2, lambda group, mixed=mixed: restore(mixed, group, keep_last=3))  # type: ignore[misc]
        assert [one["step"] for one in restored] == [0, 0]

    shutil.rmtree(tmp_path / "copy" / rank_name(1))  # it is on another node
    with pytest.raises(IncompleteCheckpointError, match="step 2 lacks the parts of rank 1"):
        stores.reject(tmp_path / "copy", step=1)

    def refused(group: Group) -> str:
        with SyncCheckpointEngine(folder, group=group, keep_last=3):
            return failure(lambda: stores.reject(folder, step=0))[0]

    assert run_ranks(2, refused) == [StoreLockedError.__name__] * 2


def test_a_call_that_is_cancelled_holds_up_no_other_rank(tmp_path: Path) -> None:
    async def reject(group: Group) -> list[int]:
        async with CheckpointEngine(tmp_path, group=group, keep_last=3) as engine:
            for step in range(3):
                await (await engine.checkpoint(state_of(group.rank, step), step=step)).durable()
            rejecting = asyncio.create_task(engine.reject(step=2))
            await asyncio.sleep(0)
            if group.rank == 1:
                rejecting.cancel()
            with suppress(asyncio.CancelledError):
                await rejecting
            await engine.pin(step=0)  # ranks count what they ask for alike
            return [info.step for info in engine.checkpoints() if info.rejected]

    assert run_ranks(2, lambda group: asyncio.run(reject(group))) == [[2], [2]]
    assert marks(tmp_path) == [(2, True), (1, False), (0, False)]


def test_a_save_that_drops_them_at_once_hides_none_from_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Member.was_rejected

    async def reject(group: Group) -> list[int]:
        async with CheckpointEngine(tmp_path, group=group, keep_last=2) as engine:
            for step in range(3):
                await (await engine.checkpoint(state_of(group.rank, step), step=step)).durable()
            marked, saved = asyncio.Event(), asyncio.Event()
            loop, change = asyncio.get_running_loop(), Ranks._change

            async def change_late(self: Ranks, asked: Any) -> None:
                if asked.func.__name__ == ask.__name__:
                    loop.call_soon_threadsafe(marked.set)
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(saved.wait(), loop))
                await change(self, asked)

            monkeypatch.setattr(Ranks, "_change", change_late)
            rejecting = asyncio.create_task(engine.reject(step=2))
            await marked.wait()
            for step in (3, 4):
                await (await engine.checkpoint(state_of(group.rank, step), step=step)).durable()
            saved.set()
            return [info.step for info in await rejecting]

    assert run_ranks(2, lambda group: asyncio.run(reject(group))) == [[2], [2]]
    assert marks(tmp_path) == [(4, False), (3, False)]


def test_a_save_that_drops_it_at_once_hides_none_that_was_unpinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unpin(group: Group) -> tuple[int, bool, list[int]]:
        async with CheckpointEngine(tmp_path, group=group) as engine:
            for step in range(2):
                await (await engine.checkpoint(state_of(group.rank, step), step=step, name=f"step {step}")).durable()
                if step == 0:
                    assert (await engine.pin(name="step 0")).pinned
            changed, saved = asyncio.Event(), asyncio.Event()
            loop, change = asyncio.get_running_loop(), Ranks._change

            async def return_late(self: Ranks, asked: Any) -> Any:
                left = await change(self, asked)
                loop.call_soon_threadsafe(changed.set)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(saved.wait(), loop))
                return left

            monkeypatch.setattr(Ranks, "_change", return_late)
            unpinning = asyncio.create_task(engine.unpin(step=0))
            await changed.wait()
            await (await engine.checkpoint(state_of(group.rank, 2), step=2)).durable()
            saved.set()
            info = await unpinning
            return info.step, info.pinned, [each.step for each in engine.checkpoints()]

    assert run_ranks(2, lambda group: asyncio.run(unpin(group))) == [(0, False, [2])] * 2


def test_pins_and_commits_of_all_ranks_at_once(tmp_path: Path) -> None:
    """Every second checkpoint is pinned while it and the next one are in flight; later ones are unpinned."""

    async def train(group: Group) -> list[tuple[int, bool]]:
        async with CheckpointEngine(tmp_path, group=group, keep_last=3, max_in_flight=2) as engine:
            for step in range(0, 24, 2):
                flying = [await engine.checkpoint(state_of(group.rank, at), step=at) for at in (step, step + 1)]
                pinned = await engine.pin(step=step + 1)
                assert (pinned.step, pinned.pinned) == (step + 1, True)
                if step % 4 == 2:
                    unpinning = engine.unpin(step=step - 1)  # beside the next checkpoints
                    assert (await unpinning).step == step - 1
                for pending in flying:
                    await pending.durable()
            return [(info.step, info.pinned) for info in engine.checkpoints()]

    one, other = run_ranks(2, lambda group: asyncio.run(train(group)))
    assert one == other
    assert [step for step, pinned in one if pinned] == [23, 19, 15, 11, 7, 3]
    assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == one


def test_all_ranks_reject_from_a_name_on(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[Any]:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=4, max_in_flight=3) as engine:
            for step in range(3):
                engine.checkpoint(state_of(group.rank, step), step=step, name=f"epoch={step}").result()
            flying = engine.checkpoint(state_of(group.rank, 3), step=3, name="epoch=3")
            rejected = {info.step for info in engine.reject(name="epoch=2")}
            engine.drain()
            assert flying.superseded or 3 in rejected
            return [failure(lambda: engine.reject(name="epoch=2"))[0], rejected >= {2}]

    assert run_ranks(2, rank_main) == [["NoCheckpointError", True]] * 2
    assert {step for step, rejected in marks(tmp_path) if not rejected} == {0, 1}


def test_none_but_rejected_ones_raise_on_all_ranks(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[str]:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=3) as engine:
            for step in range(2):
                engine.checkpoint(state_of(group.rank, step), step=step).result()
            engine.reject(step=1)
            kept = failure(lambda: engine.remove(step=0))[0]
            engine.remove(step=0, force=True)
            return [kept, failure(lambda: engine.restore(state_of(group.rank, -1)))[0]]

    assert run_ranks(2, rank_main) == [["StoreError", "StoreError"]] * 2
    with pytest.raises(StoreError, match="none but rejected"):
        load_sync(tmp_path)
    assert run_ranks(2, lambda group: failure(lambda: restore(tmp_path, group, keep_last=3))[0]) == ["StoreError"] * 2
    assert run_ranks(2, lambda group: save(tmp_path, group, range(5, 6), keep_last=3)) == [[5]] * 2


def test_a_removal_before_the_first_save_of_a_run(tmp_path: Path) -> None:
    run_ranks(2, lambda group: save(tmp_path, group, range(3), keep_last=3))

    def rank_main(group: Group) -> list[int]:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=3) as engine:
            engine.remove(step=2)
            engine.checkpoint(state_of(group.rank, 7), step=7).result()
            return [info.step for info in engine.checkpoints()]

    assert run_ranks(2, rank_main) == [[7, 1, 0]] * 2


def test_what_a_killed_receiver_left_goes_with_the_next_save(tmp_path: Path) -> None:
    run_ranks(2, lambda group: save(tmp_path, group, range(1)))
    left = tmp_path / rank_name(1) / ".fetched-0123456789abcdef"
    left.write_bytes(b"part of a checkpoint")
    run_ranks(2, lambda group: restore(tmp_path, group) and None)
    assert left.exists()  # opening and restoring write nothing
    run_ranks(2, lambda group: save(tmp_path, group, range(1, 2)))
    assert not left.exists()


def test_spaced_ones_are_kept_alike(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[int]:
        spaced = [(timedelta(days=1), timedelta(days=3))]
        with SyncCheckpointEngine(tmp_path, group=group, keep=Keep(spaced=spaced), max_in_flight=3) as engine:
            for step in range(6):
                engine.checkpoint(state_of(group.rank, step), step=step)
            engine.drain()
            engine.checkpoint(state_of(group.rank, 6), step=6).result()
            return [info.step for info in engine.checkpoints()]

    first, second = run_ranks(2, rank_main)
    assert first == second
    assert (first[0], first[-1]) == (6, 0)
    assert len(first) <= 3  # midnight may have passed
