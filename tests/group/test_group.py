"""Engines of several ranks: the same verbs, one checkpoint, one error."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    Group,
    GroupError,
    NoCheckpointError,
    PendingCheckpoint,
    StateMismatchError,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
)
from pccheck_async.engine.flight import Flight
from pccheck_async.engine.status_publisher import Publisher
from pccheck_async.errors import (
    DamagedError,
    IncompleteCheckpointError,
    StoreError,
    StoreLockedError,
    UnsupportedStateError,
)
from pccheck_async.store import Store
from pccheck_async.telemetry import Stream
from tests.engine.test_user_code import Locks
from tests.support.group_folders import spoil
from tests.support.processes import forked
from tests.support.ranks import run_ranks, wait_for
from tests.support.settings import engine_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:checkpoint of step"),
]


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((50_000,), float(100 * step + rank)), "rank": rank, "step": step}


def save(folder: Path, group: Group, steps: range, **settings: Any) -> list[int]:
    """Save these steps; return those that are there in the end."""
    with SyncCheckpointEngine(folder, group=group, **engine_settings(**settings)) as engine:
        for step in steps:
            engine.checkpoint(state_of(group.rank, step), step=step).result()
        return [info.step for info in engine.checkpoints()]


def restore(folder: Path, group: Group, step: int | None = None, **settings: Any) -> dict[str, Any] | None:
    with SyncCheckpointEngine(folder, group=group, **engine_settings(**settings)) as engine:
        state = state_of(group.rank, -1)
        return None if engine.restore(state, step=step) is None else state


def _restore_step(folder: Path, step: int | None, group: Group) -> dict[str, Any] | None:
    return restore(folder, group, step, keep_last=2)


def failure(work: Callable[[], object]) -> tuple[str, str]:
    """Return kind and text of the error that ``work`` raises, "" for none."""
    try:
        work()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_find_what_all_have_saved(tmp_path: Path, world: int) -> None:
    assert run_ranks(world, lambda group: restore(tmp_path, group)) == [None] * world
    assert run_ranks(world, lambda group: save(tmp_path, group, range(5), keep_last=2)) == [[4, 3]] * world
    for step, expected in ((None, 4), (3, 3)):
        states = run_ranks(world, partial(_restore_step, tmp_path, step))
        assert [int(state["w"][0]) for state in states] == [100 * expected + rank for rank in range(world)]
        assert [state["rank"] for state in states] == [*range(world)]


def test_async_engines(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[int]:
        async def main() -> list[int]:
            async with CheckpointEngine(tmp_path, group=group) as engine:
                assert await engine.restore(state_of(group.rank, -1)) is None
                pending = [await engine.checkpoint(state_of(group.rank, step), step=step) for step in range(6)]
                infos = [await each for each in pending]
                await engine.drain()
                return [infos[-1].step, *(info.step for info in engine.checkpoints())]

        return asyncio.run(main())

    assert run_ranks(2, rank_main) == [[5, 5]] * 2


def test_a_run_over_one_that_was_not_restored_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, lambda group: save(tmp_path, group, range(5)))

    def again(group: Group) -> list[int]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            for refused in (partial(engine.checkpoint, step=3), lambda state: engine.step(state, 0).__enter__()):
                with pytest.raises(ValueError, match=r"holds step 4, .* has not restored it"):
                    refused(state_of(group.rank, 3))
            engine.checkpoint(state_of(group.rank, 5), step=5).result()
            engine.checkpoint(state_of(group.rank, 3), step=3).result()
            return [info.step for info in engine.checkpoints()]

    assert run_ranks(2, again) == [[3]] * 2


def test_many_in_flight_end_in_one_way_on_all_ranks(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[tuple[int, bool]]:
        with SyncCheckpointEngine(tmp_path, group=group, max_in_flight=3) as engine:
            pending: list[PendingCheckpoint] = []
            for step in range(30):
                time.sleep(0.003 * ((step + group.rank) % 3))
                pending.append(engine.checkpoint(state_of(group.rank, step), step=step))
            return [(each.result().step, each.superseded) for each in pending][-1:] + [
                (step, each.superseded) for step, each in enumerate(pending)
            ]

    first, second = run_ranks(2, rank_main)
    assert first == second
    assert first[0] == (29, False)


def test_pins_are_those_of_all_ranks(tmp_path: Path) -> None:
    def pin(group: Group) -> list[int]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            for step in range(4):
                engine.checkpoint(state_of(group.rank, step), step=step).result()
                if step == 1:
                    assert engine.pin(step=1).step == 1
            assert failure(lambda: engine.pin(step=17))[0] == NoCheckpointError.__name__
            return [info.step for info in engine.checkpoints()]

    assert run_ranks(2, pin) == [[3, 1]] * 2
    assert run_ranks(2, lambda group: save(tmp_path, group, range(4, 6))) == [[5, 1]] * 2

    def unpin(group: Group) -> list[int]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            engine.unpin(step=1)
            engine.checkpoint(state_of(group.rank, 6), step=6).result()
            return [info.step for info in engine.checkpoints()]

    assert run_ranks(2, unpin) == [[6]] * 2


def test_damage_on_one_rank_takes_all_to_the_next_older(tmp_path: Path) -> None:
    run_ranks(2, lambda group: save(tmp_path, group, range(3), keep_last=2))
    spoil(tmp_path, 1)

    def fall_back(group: Group) -> int:
        with pytest.warns(RuntimeWarning, match="step 2 cannot be read .rank 1: .*; all ranks fall back to step 1"):
            state = restore(tmp_path, group, keep_last=2)
        assert state is not None
        return int(state["w"][0])

    assert run_ranks(2, fall_back) == [100, 101]
    asked = run_ranks(2, lambda group: failure(lambda: restore(tmp_path, group, 2, keep_last=2)))
    assert asked[0] == asked[1]
    assert asked[0][0] == DamagedError.__name__
    assert "rank 1" in asked[0][1]


def test_a_state_that_does_not_match_on_one_rank_changes_none(tmp_path: Path) -> None:
    run_ranks(2, lambda group: save(tmp_path, group, range(1)))

    def rank_main(group: Group) -> tuple[str, float]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            state: dict[str, Any] = {"w": torch.full((50_000,), -1.0), "rank": -1, "step": -1}
            if group.rank == 1:
                state["more"] = torch.zeros(3)
            kind, text = failure(lambda: engine.restore(state))
            assert "more" in text
            return kind, float(state["w"][0])

    assert run_ranks(2, rank_main) == [(StateMismatchError.__name__, -1.0)] * 2


def test_a_checkpoint_that_fails_on_one_rank_fails_on_all_and_the_next_one_goes_on(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[str]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            engine.checkpoint(state_of(group.rank, 0), step=0).result()
            state = state_of(group.rank, 1)
            if group.rank == 1:
                state["what"] = object()
            kinds = [failure(lambda: engine.checkpoint(state, step=1).result())[0]]
            engine.checkpoint(state_of(group.rank, 2), step=2).result()
            return kinds + [str(info.step) for info in engine.checkpoints()]

    assert run_ranks(2, rank_main) == [[GroupError.__name__, "2"], [UnsupportedStateError.__name__, "2"]]


class Unspeakable(Exception):  # noqa: N818
    """An error of a user's that cannot even be shown; looks at locks where somebody tries."""

    locks = Locks()

    def __repr__(self) -> str:
        self.locks.look()
        raise self


def test_a_call_whose_error_cannot_be_shown_fails_on_all_ranks_and_the_next_one_goes_on(tmp_path: Path) -> None:
    class Failing:
        def state_dict(self) -> dict[str, Any]:
            raise Unspeakable

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def rank_main(group: Group) -> list[str]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            Unspeakable.locks.engine = engine
            if group.rank == 1:
                with pytest.raises(Unspeakable):
                    engine.checkpoint({"failing": Failing()}, step=1)
                kinds = [str(Unspeakable.locks.under_lock)]
            else:
                kinds = list(failure(lambda: engine.checkpoint(state_of(0, 1), step=1).result()))
            engine.checkpoint(state_of(group.rank, 2), step=2).result()
            return kinds + [str(info.step) for info in engine.checkpoints()]

    (kind, text, *steps), other = run_ranks(2, rank_main)
    assert (kind, steps) == (GroupError.__name__, ["2"])
    assert "Unspeakable" in text
    assert other == ["0", "2"]


@pytest.mark.parametrize(
    ("place", "name"),
    [(Stream, "emit"), (Publisher, "start"), (Flight, "set_captured")],
    ids=["as it is counted", "before the engine's loop has it", "once it has it"],
)
def test_an_interrupted_admission_fails_on_all_ranks_and_the_next_one_goes_on(
    tmp_path: Path, place: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = getattr(place, name)

    def interrupt(*arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            raise KeyboardInterrupt
        method(*arguments)

    def rank_main(group: Group) -> list[str]:
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            engine.checkpoint(state_of(group.rank, 0), step=0).result()
            if group.rank == 1:
                monkeypatch.setattr(place, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.checkpoint(state_of(1, 1), step=1)
                kinds = ["KeyboardInterrupt"]
            else:
                kinds = [failure(lambda: engine.checkpoint(state_of(0, 1), step=1).result())[0]]
            engine.checkpoint(state_of(group.rank, 2), step=2).result()
            assert engine.statistics().in_flight == 0
            return kinds + [str(info.step) for info in engine.checkpoints()]

    (kind, *steps), other = run_ranks(2, rank_main)
    assert kind == "GroupError" or (kind == "" and place is Flight)  # it may be captured by then, and goes on
    assert [steps, other] == [["2"], ["KeyboardInterrupt", "2"]]


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    def rank_main(group: Group) -> tuple[str, str]:
        engine = SyncCheckpointEngine(tmp_path, group=group).open()
        found = failure(lambda: engine.checkpoint(state_of(0, 0), step=3 + group.rank).result())
        failure(engine.close)
        return found

    told = run_ranks(2, rank_main)
    assert told[0] == told[1]
    assert told[0][0] == GroupError.__name__
    assert "same steps" in told[0][1]


def test_a_rank_that_leaves_early_fails_what_the_others_still_save(tmp_path: Path) -> None:
    def rank_main(group: Group) -> tuple[str, str]:
        engine = SyncCheckpointEngine(tmp_path, group=group).open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result()
        found = "", ""
        if group.rank == 0:
            found = failure(lambda: engine.checkpoint(state_of(0, 1), step=1).result())
        failure(engine.close)
        return found

    assert run_ranks(2, rank_main)[0] == (
        GroupError.__name__,
        "the checkpoint 1 of the group failed: rank 1: rank 1 left before",
    )
    assert [int(state["step"]) for state in run_ranks(2, lambda group: restore(tmp_path, group))] == [0, 0]


def test_different_settings_are_refused_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(2, lambda group: failure(lambda: save(tmp_path, group, range(1), keep_last=1 + group.rank)))
    assert told[0] == told[1]
    assert told[0][0] == GroupError.__name__
    assert "settings" in told[0][1]
    told = run_ranks(2, lambda group: failure(lambda: save(tmp_path / f"run-{group.rank}", group, range(1))))
    assert told[0] == told[1]
    assert "run-1" in told[0][1]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    def rank_main(group: Group) -> tuple[str, str]:
        group.timeout = 1.5
        return ("", "") if group.rank == 1 else failure(lambda: save(tmp_path, group, range(1)))

    start = time.monotonic()
    told = run_ranks(3, rank_main)
    assert time.monotonic() - start < 30
    assert told[0] == told[2] == (GroupError.__name__, "ranks 1 did not open this group within 1.5 s")


def test_a_second_job_on_the_same_folder_is_refused_on_all_ranks(tmp_path: Path) -> None:
    saved, refused = tmp_path / "saved", [tmp_path / f"refused-{rank}" for rank in range(2)]
    told: list[tuple[str, str]] = []

    def first(group: Group) -> None:
        with SyncCheckpointEngine(tmp_path / "run", group=group) as engine:
            engine.checkpoint(state_of(group.rank, 0), step=0).result()
            saved.touch()
            wait_for(*refused)
            engine.checkpoint(state_of(group.rank, 1), step=1).result()

    def refused_here(group: Group) -> tuple[str, str]:
        why = failure(lambda: save(tmp_path / "run", group, range(1), lock_timeout=0.2))
        refused[group.rank].touch()
        wait_for(*refused)  # a rank 0 that goes before the other one has connected leaves it waiting for 20 s
        return why

    def second(_: list[int]) -> None:
        wait_for(saved)
        told.extend(run_ranks(2, refused_here))

    run_ranks(1, first, meanwhile=second)
    assert {kind for kind, _ in told} == {StoreLockedError.__name__, GroupError.__name__}


def test_stores_of_one_process_and_of_groups_are_told_apart(tmp_path: Path) -> None:
    single, several = tmp_path / "single", tmp_path / "several"
    with SyncCheckpointEngine(single) as engine:
        engine.checkpoint(state_of(0, 0), step=0).result()
    told = run_ranks(1, lambda group: failure(lambda: save(single, group, range(1))))
    assert told == [
        (StoreError.__name__, f"{single} holds the checkpoints of one process: give the group another folder")
    ]
    run_ranks(1, lambda group: save(several, group, range(1)))
    with pytest.raises(StoreError, match="with group="):
        SyncCheckpointEngine(several / "rank-00000").open()
    with pytest.raises(StoreError, match="group"):
        SyncCheckpointEngine(several).open()


def test_a_child_collects_an_engine_that_its_parent_closed(tmp_path: Path) -> None:
    """As a DataLoader's worker does, beside threads of its own."""

    def child() -> None:
        signal.alarm(10)
        for _ in range(8):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        gc.collect()

    def rank_main(group: Group) -> int:
        gc.disable()
        save(tmp_path, group, range(1))
        return forked(child)

    assert run_ranks(1, rank_main) == [0]


def test_what_makes_no_sense_in_a_group(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_busy"):
        SyncCheckpointEngine(tmp_path, group=Group(0, 1, None), on_busy="skip")
    with pytest.raises(TypeError, match="ProcessGroup"):
        SyncCheckpointEngine(tmp_path, group=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank 2"):
        Group(2, 2, None)


def test_a_record_has_room_for_what_is_in_flight(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 58"):
        SyncCheckpointEngine(tmp_path, group=Group(0, 1, None), keep_last=59, max_in_flight=3)


def test_what_was_complete_and_lacks_a_part_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, lambda group: save(tmp_path, group, range(2)))
    shutil.rmtree(tmp_path / "rank-00001")

    def rank_main(group: Group) -> tuple[str, str, bool]:
        with caplog.at_level("WARNING", "pccheck_async"), SyncCheckpointEngine(tmp_path, group=group) as engine:
            kind, text = failure(lambda: engine.restore(state_of(group.rank, -1)))
            return kind, text, "lacks the parts of rank 1 " in caplog.text

    first, second = run_ranks(2, rank_main)
    assert first[:2] == second[:2]
    assert first[0] == "IncompleteCheckpointError"
    assert "step 1" in first[1]
    assert "rank 1" in first[1]
    assert "in the place of empty ones that this start has made" in first[1]
    assert first[2]
    with pytest.raises(IncompleteCheckpointError, match="rank-00001 is empty, made by a start: remove it"):
        load_sync(tmp_path)


def test_a_folder_of_another_group_is_named(tmp_path: Path) -> None:
    for name in ("this", "another"):
        run_ranks(2, lambda group, folder=tmp_path / name: save(folder, group, range(2)))  # type: ignore[misc]
    shutil.rmtree(tmp_path / "this" / "rank-00001")
    shutil.copytree(tmp_path / "another" / "rank-00001", tmp_path / "this" / "rank-00001")
    with pytest.raises(
        IncompleteCheckpointError, match="rank-00000, rank-00001: no other rank has any of the checkpoints there"
    ):
        load_sync(tmp_path / "this")


def test_closing_that_is_cancelled_leaves_no_thread_of_the_group(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[str]:
        async def cancel_closing() -> None:
            engine = await CheckpointEngine(tmp_path, group=group).open()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Store, "finish_data", lambda *_: asyncio.sleep(60))
                pending = await engine.checkpoint(state_of(group.rank, 0), step=0)
                closing = asyncio.create_task(engine.close())
                await asyncio.wait((closing,), timeout=0.2)
                closing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await closing
                with pytest.raises(CheckpointError):
                    await pending.durable()

        asyncio.run(cancel_closing())
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("pccheck-group")]

    assert run_ranks(2, rank_main) == [[], []]


LEFT_OPEN = """
import sys
import torch
from torch.distributed import HashStore
from pccheck_async import Group, SyncCheckpointEngine
engine = SyncCheckpointEngine(sys.argv[1], group=Group(0, 1, HashStore())).open()
engine.checkpoint({"w": torch.ones(3)}, step=4)
"""


def test_an_engine_left_open_is_closed_at_the_exit(tmp_path: Path) -> None:
    """The interpreter has shut the loops' own threads down by then, and threads inside a TCPStore would abort it."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "was not closed before the interpreter exited; " in done.stderr
    assert "in flight" in done.stderr
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [4]


def test_names_and_removal_are_those_of_all_ranks(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[Any]:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last="all") as engine:
            for step in range(4):
                engine.checkpoint(state_of(group.rank, step), step=step, name=f"n{step}")
            removed = [info.name for info in engine.remove(name="n3")]  # in flight
            assert failure(lambda: engine.remove(step=17))[0] == NoCheckpointError.__name__
            engine.remove(step=1)
            state = state_of(group.rank, -1)
            assert engine.restore(state, name="n0") is not None
            differently = engine.checkpoint(state_of(group.rank, 8), step=8, name=f"of {group.rank}")
            assert "the ranks call it differently: 'of 0', 'of 1'" in failure(differently.result)[1]
            engine.checkpoint(state_of(group.rank, 9), step=9, name="n2", replace=True).result()
            return [removed, state["step"], [(info.step, info.name) for info in engine.checkpoints()]]

    there = [(9, "n2"), (0, "n0")]
    assert run_ranks(2, rank_main) == [[["n3"], 0, there]] * 2
    assert [(info.step, info.name) for info in list_checkpoints(tmp_path)] == there
    assert load_sync(tmp_path, name="n0", rank=1)["rank"] == 1
