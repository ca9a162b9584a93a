"""Names of checkpoints, their removal through the open engine, and retention that is left to the caller."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pccheck_async import (
    CheckpointEngine,
    Keep,
    NoCheckpointError,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    open_checkpoint,
    stores,
)
from pccheck_async.cli import app
from pccheck_async.errors import StoreError, StoreFullError, UnsupportedStateError
from pccheck_async.format.record import MOST_ENTRIES, NAME_KEY
from pccheck_async.store import StoreReader, at_once
from tests.engine.test_inline_capture_engine import stuck_engine


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((10,), float(step)), "step": step}


def save(engine: SyncCheckpointEngine, step: int, name: str | None = None, **how: Any) -> None:
    engine.checkpoint(state_of(step), step=step, name=name, **how).result()


def names(path: Path) -> list[str | None]:
    return [info.name for info in list_checkpoints(path)]


@pytest.mark.slow
def test_a_checkpoint_is_found_by_its_name(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with SyncCheckpointEngine(run, keep_last=3) as engine:
        save(engine, 1, "epoch=1", metadata={"loss": 0.5})
        save(engine, 2, "epoch=2")
        save(engine, 3)
        state = state_of(0)
        assert engine.restore(state, name="epoch=1").step == state["step"] == 1  # type: ignore[union-attr]
        with pytest.raises(NoCheckpointError, match="named 'epoch=9'"):
            engine.restore(state, name="epoch=9")
        with pytest.raises(ValueError, match="not both"):
            engine.restore(state, step=1, name="epoch=1")
        assert names(run) == [None, "epoch=2", "epoch=1"]
        assert load_sync(run, name="epoch=2")["step"] == 2
        with open_checkpoint(run, name="epoch=1") as opened:
            assert (opened["step"], opened.info.name, dict(opened.info.metadata)) == (1, "epoch=1", {"loss": 0.5})
        assert stores.export(run, out, to="torch", name="epoch=1").info.step == 1
    assert stores.describe(run, name="epoch=2").info.step == 2
    assert [one.info.step for one in stores.verify(run, name="epoch=1").checkpoints] == [1]
    stores.copy(run, tmp_path / "copy", name="epoch=1")
    assert names(tmp_path / "copy") == ["epoch=1"]
    with pytest.raises(ValueError, match="'epoch=1' already"):
        stores.copy(run, tmp_path / "copy", name="epoch=1")
    for read in (load_sync, stores.describe, stores.verify):
        with pytest.raises(NoCheckpointError, match="named 'epoch=9'"):
            read(run, name="epoch=9")
    assert [info.name for info in stores.remove(run, name="epoch=1").removed] == ["epoch=1"]
    with pytest.raises(NoCheckpointError, match="named 'epoch=1'"):
        stores.remove(run, step=[3], name="epoch=1")
    assert names(run) == [None, "epoch=2"]


def test_a_name_is_metadata_of_the_same_format(tmp_path: Path) -> None:
    """What knows nothing of names reads the record, and finds the name among the metadata."""
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1, "epoch=1", metadata={"loss": 0.5})
    found = at_once(tmp_path, StoreReader.newest)
    assert found is not None
    assert found[1].version == 1
    assert dict(found[1].entries[0].metadata) == {"loss": 0.5, NAME_KEY: "epoch=1"}


def test_two_checkpoints_of_one_name_are_refused(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        save(engine, 1, "last")
        with pytest.raises(ValueError, match=r"'last' already.*remove\(name='last'\)"):
            save(engine, 2, "last")
        save(engine, 3, "last", replace=True)
        assert [(info.step, info.name) for info in engine.checkpoints()] == [(3, "last")]
        engine.pin(step=3)
        save(engine, 4, "last", replace=True)
        assert [(info.step, info.pinned) for info in engine.checkpoints()] == [(4, False)]
        engine.remove(name="last", force=True)
        save(engine, 5, "last")
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(ValueError, match="'last' already"):
        save(engine, 6, "last")


def test_of_two_threads_that_save_under_one_name_one_is_refused(tmp_path: Path) -> None:
    class Slow:
        """While its state is being read, another thread saves."""

        def state_dict(self) -> dict[str, int]:
            with ThreadPoolExecutor() as threads:
                threads.submit(save, engine, 1, "best").result(60)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise NotImplementedError

    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(ValueError, match="'best' already"):
            engine.checkpoint({"slow": Slow()}, step=2, name="best")
        assert [(info.step, info.name) for info in engine.checkpoints()] == [(1, "best")]


def test_a_name_in_flight_is_taken() -> None:
    engine, stuck, _ = stuck_engine()
    try:
        stuck.hold("reserve", "write", "flush")
        pending = engine.checkpoint(state_of(1), step=1, name="last")
        with pytest.raises(ValueError, match="in flight"):
            engine.checkpoint(state_of(2), step=2, name="last")
        stuck.release()
        assert pending.result(30).name == pending.name == "last"
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["", 3, b"last", "x" * 600, "\ud800"], ids=repr)
def test_what_is_no_name(tmp_path: Path, name: Any) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises((TypeError, ValueError, UnsupportedStateError)):
            engine.checkpoint(state_of(1), name=name)
        with pytest.raises(UnsupportedStateError, match="name="):
            engine.checkpoint(state_of(1), metadata={NAME_KEY: "x"})
        assert not engine.checkpoints()


def test_removal_through_the_open_engine(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last="all") as engine:
        for step in (1, 2, 2, 3):
            save(engine, step)
        save(engine, 4, "best")
        slots = engine.statistics().slots
        assert [info.step for info in engine.remove(step=2)] == [2, 2]
        assert [info.name for info in engine.remove(name="best")] == ["best"]
        assert engine.statistics().slots < slots
        with pytest.raises(NoCheckpointError, match="of step 2"):
            engine.remove(step=2)
        with pytest.raises(TypeError):
            engine.remove()
        assert [info.step for info in list_checkpoints(tmp_path)] == [3, 1]
        engine.remove(step=1)
        with pytest.raises(StoreError, match="no checkpoint would be left"):
            engine.remove(step=3)
        assert [info.step for info in engine.remove(step=3, force=True)] == [3]
        assert list_checkpoints(tmp_path) == []


def test_removal_waits_for_what_it_removes_and_for_what_would_be_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path, keep_last="all", max_in_flight=3) as engine:
            await (await engine.checkpoint(state_of(1), step=1, name="old"))
            await engine.checkpoint(state_of(2), step=2, name="new")
            assert [info.name for info in await engine.remove(name="old")] == ["old"]  # or none would be left
            assert [info.name for info in engine.checkpoints()] == ["new"]
            pending = await engine.checkpoint(state_of(3), step=3, name="gone")
            assert [info.name for info in await engine.remove(name="gone")] == ["gone"]
            assert (await pending).name == "gone"  # it was durable
            assert [info.name for info in engine.checkpoints()] == ["new"]

    asyncio.run(main())


def test_removal_of_all_others_waits_for_one_in_flight() -> None:
    engine, stuck, _ = stuck_engine(keep_last=2)
    try:
        save(engine, 1)
        stuck.hold("reserve", "write", "flush")
        engine.checkpoint(state_of(2), step=2)
        stuck.wait_stuck()
        with ThreadPoolExecutor() as threads:
            removal = threads.submit(engine.remove, step=1)
            with pytest.raises(TimeoutError):
                removal.result(0.3)
            stuck.release()
            assert [info.step for info in removal.result(30)] == [1]
        assert [info.step for info in engine.checkpoints()] == [2]
    finally:
        stuck.release()
        engine.close()


@pytest.mark.slow
def test_all_are_kept_until_a_record_names_no_more(tmp_path: Path) -> None:
    class Asked:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with SyncCheckpointEngine(tmp_path, keep_last="all") as engine:
        for step in range(MOST_ENTRIES):
            engine.checkpoint({"step": step}, step=step, name=f"{step}")
        asked = Asked()
        with pytest.raises(StoreFullError, match=f"64 checkpoints.*names {MOST_ENTRIES} at most: remove"):
            engine.checkpoint({"asked": asked})
        assert asked.asked == 0
        engine.checkpoint({"step": 64}, step=64, name="63", replace=True).result()
        engine.remove(step=0)
        engine.checkpoint({"step": 65}, step=65).result()
        assert [info.step for info in engine.checkpoints()] == [65, 64, *range(62, 0, -1)]
        assert "all that a commit record names" in str(engine.space_needed(nbytes=1))
    with pytest.raises(ValueError, match="keep="):
        SyncCheckpointEngine(tmp_path, keep_last="all", keep=Keep(every=3))
    with pytest.raises(ValueError, match="keep_last"):
        SyncCheckpointEngine(tmp_path, keep_last="some")  # type: ignore[arg-type]


@pytest.mark.slow
def test_names_on_the_command_line(tmp_path: Path) -> None:
    def pccheck(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    run = str(tmp_path / "run")
    with SyncCheckpointEngine(run, keep_last=3) as engine:
        save(engine, 1)
        assert "name" not in "".join(pccheck("ls", run).split()).replace(run, "")  # which may be wrapped
        save(engine, 2, "best\x1b[2J")
        save(engine, 3, "last")
    listed = pccheck("ls", run)
    assert "last" in listed
    assert "\x1b[2J" not in listed
    assert [one["name"] for one in json.loads(pccheck("ls", run, "--json"))] == ["last", "best\x1b[2J", None]
    assert "Named last." in pccheck("show", run, "--name", "last")
    assert "Every checksum holds" in pccheck("verify", run, "--name", "last")
    pccheck("export", run, str(tmp_path / "out"), "--to", "torch", "--name", "last")
    pccheck("copy", run, str(tmp_path / "copy"), "--name", "last")
    assert names(tmp_path / "copy") == ["last"]
    pccheck("remove", run, "--step=1", "--name", "last", "--yes")
    assert names(tmp_path / "run") == ["best\x1b[2J"]
    assert CliRunner().invoke(app, ["remove", run, "--yes"]).exit_code == 2
    assert CliRunner().invoke(app, ["show", run, "--name", "nobody"]).exit_code == 3
