"""Removing checkpoints from a bucket by its URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

import torch
from typer.testing import CliRunner

from pccheck_async import (
    Drain,
    Group,
    NoCheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    stores,
)
from pccheck_async.bucket import upload
from pccheck_async.cli import app
from pccheck_async.errors import StoreError
from tests.support.thread_ranks import on_ranks

MIB = 1 << 20


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "OBJECT_BYTES", MIB)


def state(step: int) -> dict[str, Any]:
    frozen = torch.arange(MIB // 2, dtype=torch.int32)
    return {"frozen": frozen, "trained": torch.full((MIB // 4,), step, dtype=torch.float32), "step": step}


def engine(folder: Path, url: str, **settings: Any) -> SyncCheckpointEngine:
    storage = StorageOptions(chunk_bytes=MIB)
    return SyncCheckpointEngine(folder, keep_last=4, drain=Drain(url, keep_last=4), storage=storage, **settings)


def save(opened: SyncCheckpointEngine, *steps: int) -> None:
    for step in steps:
        opened.checkpoint(state(step), step=step).wait_reached("remote", 30)


def steps(url: str) -> list[int]:
    return [info.step for info in list_checkpoints(url)]


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_a_removed_one_and_what_only_it_needs_are_gone(tmp_path: Path, url: str) -> None:
    with engine(tmp_path / "run", url) as opened:
        save(opened, 1, 2, 3)
    before = sum(files(tmp_path / "bucket").values())
    removal = stores.remove(url, step=2, take_over=True)
    assert [info.step for info in removal.removed] == [2]
    assert removal.removed[0].tiers == ("remote",)
    assert steps(url) == [3, 1]
    assert all(stores.verify(url, step=step).whole for step in (1, 3))
    freed = before - sum(files(tmp_path / "bucket").values())
    assert MIB < removal.freed_nbytes < 2 * MIB  # the frozen ones are needed by the others
    assert abs(freed - removal.freed_nbytes) < 4096  # records are not counted
    with engine(tmp_path / "run", url) as opened:  # the run goes on, and copies
        found = opened.restore(restored := state(0))
        assert found is not None
        assert found.step == restored["step"] == 3
        save(opened, 4)
    assert steps(url) == [4, 3, 1]


def test_the_newest_one_comes_again_from_the_disk(tmp_path: Path, url: str) -> None:
    with engine(tmp_path / "run", url) as opened:
        save(opened, 1, 2)
    stores.remove(url, step=2, take_over=True)
    assert steps(url) == [1]
    with engine(tmp_path / "run", url) as opened:  # closing copies the newest one on disk
        opened.restore(state(0))
    assert steps(url) == [2, 1]
    assert stores.verify(url).whole


def test_without_being_told_that_the_run_has_ended_nothing_changes(tmp_path: Path, url: str) -> None:
    with engine(tmp_path / "run", url) as opened:
        save(opened, 1, 2)
        there = files(tmp_path / "bucket")
        with pytest.raises(StoreError, match=r"is owned by run [0-9a-f]{8}.*call engine\.remove in it.*--take-over"):
            stores.remove(url, step=1)
        with pytest.raises(NoCheckpointError, match="holds no checkpoint of step 7"):
            stores.remove(url, step=7, take_over=True)
        with pytest.raises(StoreError, match="no checkpoint would be left"):
            stores.remove(url, step=[1, 2], take_over=True)
        assert files(tmp_path / "bucket") == there
        save(opened, 3)


def test_a_run_that_still_copies_says_that_it_does_no_more(tmp_path: Path, url: str) -> None:
    with engine(tmp_path / "run", url) as opened:
        save(opened, 1, 2)
        stores.remove(url, step=1, take_over=True)
        pending = opened.checkpoint(state(3), step=3)
        pending.result()
        with pytest.raises(Exception, match="the drain has stopped"):
            pending.wait_reached("remote", 30)
        assert "another run" in opened.statistics().drain_trouble
    assert steps(url) == [2]
    assert steps(str(tmp_path / "run"))[0] == 3


def test_the_last_one_goes_by_force(tmp_path: Path, url: str) -> None:
    with engine(tmp_path / "run", url) as opened:
        save(opened, 1)
    stores.remove(url, step=1, take_over=True, force=True)
    assert steps(url) == []
    assert all(name.startswith("commits/") for name in files(tmp_path / "bucket"))
    with engine(tmp_path / "other", url) as opened:
        assert opened.restore(state(0)) is None


def test_the_command(tmp_path: Path, url: str) -> None:
    with engine(tmp_path / "run", url) as opened:
        save(opened, 1, 2)

    def remove(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["remove", url, *arguments])

    assert remove("--step", "1", "--yes").exit_code == 1
    assert remove("--step", "7", "--yes", "--take-over").exit_code == 3
    assert steps(url) == [2, 1]
    result = remove("--step", "1", "--yes", "--take-over", "--json")
    assert result.exit_code == 0
    assert [each["step"] for each in json.loads(result.stdout)["removed"]] == [1]
    assert steps(url) == [2]
    assert load_sync(url)["step"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("machine_asked_once")
def test_a_groups_one_goes_with_all_parts(tmp_path: Path, url: str) -> None:
    def work(group: Group) -> None:
        with engine(tmp_path / "run", url, group=group) as opened:
            save(opened, 1, 2)

    def restore(group: Group) -> None:
        with engine(tmp_path / "run", url, group=group) as opened:
            found = opened.restore(state(0))
            assert found is not None
            assert found.step == 2
            save(opened, 3)

    on_ranks(2, work)
    stores.remove(url, step=1, take_over=True)
    assert steps(url) == [2]
    assert stores.verify(url).whole
    on_ranks(2, restore)
    assert steps(url) == [3, 2]
