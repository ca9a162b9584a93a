"""What one rank does for the others: its torn captures fail all, rank 0 goes last, orphaned stores are taken over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import SyncCheckpointEngine, list_checkpoints
from pccheck_async.errors import CheckpointError
from pccheck_async.format.record import IDENTITY_NAME, decode_identity
from pccheck_async.group import Group
from pccheck_async.group.control import Server
from pccheck_async.store import Store, rank_name
from tests.support.ranks import run_ranks, wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("torn", [0, 1])
def test_a_torn_capture_of_any_rank_fails_the_checkpoint_on_all(tmp_path: Path, torn: int) -> None:
    begun = tmp_path / "changed"

    def rank_main(group: Group) -> tuple[str, str]:
        torch.set_num_threads(1)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with SyncCheckpointEngine(tmp_path / "group", group=group, save_last=False, max_in_flight=1) as engine:
            engine.attach(optimizer)
            if group.rank != torn:  # none is admitted before all ranks asked for it
                wait_for(begun)
            pending = engine.checkpoint({"model": model, "optimizer": optimizer}, step=1, overlap=True)
            if group.rank == torn:
                with torch.no_grad():
                    model.weight.add_(1.0)
                begun.touch()
            try:
                pending.result(60)
            except CheckpointError as error:
                return type(error).__name__, str(error)
        return "", ""

    found = run_ranks(2, rank_main)
    assert [kind for kind, _ in found] == ["TornCaptureError"] * 2, found
    assert f"rank {torn}" in found[1 - torn][1], found
    assert list_checkpoints(tmp_path / "group") == []


def test_a_step_that_is_torn_on_one_rank_ends_the_training_of_none(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[int]:
        torch.set_num_threads(1)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state, torn = {"model": model, "optimizer": optimizer}, Path(tmp_path / "torn")
        with SyncCheckpointEngine(tmp_path / "group", group=group, interval=1000, save_last=False) as engine:
            engine.attach(optimizer)
            for step in range(4):
                with engine.step(state, step) as this:
                    model(torch.ones(1, 8)).sum().backward()
                    optimizer.step()
                    if step in (1, 3):
                        this.save()
                    if (step, group.rank) == (1, 0):  # none is admitted before all ranks asked for it
                        wait_for(torn)
                if (step, group.rank) == (1, 1):
                    with torch.no_grad():
                        model.weight.add_(1.0)
                    torn.touch()
                engine.wait_captured()
                while this.pending is not None and not this.pending.done():
                    time.sleep(0.01)  # no call of the engine, which might raise the failure
            engine.drain()
            return [info.step for info in engine.checkpoints()]

    assert run_ranks(2, rank_main) == [[3], [3]]


def test_rank_0_goes_last(tmp_path: Path) -> None:
    closing = tmp_path / "closing"

    def rank_main(group: Group) -> list[int] | None:
        torch.set_num_threads(1)
        remaining: list[list[int]] = []
        close = Server.close

        def noted(server: Server, seconds: float) -> list[int]:
            closing.touch()
            remaining.append(close(server, seconds))
            return remaining[-1]

        Server.close = noted  # type: ignore[assignment,method-assign]  # in a process of its own
        with SyncCheckpointEngine(tmp_path / "group", group=group) as engine:
            engine.checkpoint({"x": group.rank}, step=1).result(60)
            if group.rank == 1:
                wait_for(closing)
        return remaining[0] if remaining else None

    assert run_ranks(2, rank_main) == [[], None]  # rank 1 had left when the log was taken away


def test_the_store_of_a_rank_that_is_not_there_is_taken_over_before_a_record_is_written(tmp_path: Path) -> None:
    """I12: what its last writer wrote and did not flush is made durable before anything is built on it."""
    folder = tmp_path / "group"

    def save(group: Group) -> list[str]:
        torch.set_num_threads(1)
        done: list[str] = []
        take_over, write_record = Store.take_over, Store.write_record

        async def note_take_over(store: Store) -> None:
            await take_over(store)
            done.append(f"took over {store.file.identity.store_id}")

        async def note_record(store: Store, *args: Any) -> None:
            done.append(f"record of {store.file.identity.store_id}")
            await write_record(store, *args)

        Store.take_over, Store.write_record = note_take_over, note_record  # type: ignore[assignment,method-assign]
        with SyncCheckpointEngine(folder, group=group) as engine:
            engine.checkpoint({"x": torch.ones(3)}, step=3 - group.world_size).result(60)
        return done

    run_ranks(2, save)
    ids = [decode_identity((folder / rank_name(rank) / IDENTITY_NAME).read_bytes()).store_id for rank in (0, 1)]
    (done,) = run_ranks(1, save)
    assert sorted(done[: done.index(f"record of {ids[0]}")]) == sorted(f"took over {each}" for each in ids)
