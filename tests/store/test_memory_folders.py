"""What engines with a tier in memory have left there: listed, shown beside the store on disk, and removed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pccheck_async import MemoryTier, SyncCheckpointEngine, load_sync
from pccheck_async.cli import app
from pccheck_async.upkeep import clear_memory, list_memory, memory_of
from tests.engine.test_memory_tier import engine_on, restored_by, state_of, train


@pytest.fixture
def tier(shared_memory: Path) -> MemoryTier:
    return MemoryTier(interval=1, path=str(shared_memory))


def pccheck(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_they_are_listed_and_removed(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path / "one", tier, range(4), on_disk=range(1, 2))
    train(tmp_path / "two", tier, range(2))
    said = pccheck("memory", "ls", "--path", tier.path)
    assert said.exit_code == 0
    assert f"In {tier.path}:" in said.stdout
    assert len([name for name in said.stdout.split() if name.startswith("pccheck-")]) == 2
    found = json.loads(pccheck("memory", "ls", "--path", tier.path, "--json").stdout)
    assert [each["in_use"] for each in found] == [False, False]
    assert sorted(each["origin"] for each in found) == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert sorted(each["checkpoints"][0]["step"] for each in found) == [1, 3]
    one = next(each for each in found if each["checkpoints"][0]["step"] == 3)
    said = pccheck("memory", "clear", Path(one["path"]).name, "--path", tier.path)
    assert said.exit_code == 0
    assert "Removed 1 store in memory" in said.stdout
    assert restored_by(tmp_path / "one", tier) == (1, "disk")
    assert restored_by(tmp_path / "two", tier) == (1, "memory")
    said = pccheck("memory", "clear", os.path.relpath(tmp_path / "two"), "--path", tier.path)
    assert said.stdout.startswith("Removed 1 store in memory")
    assert pccheck("memory", "clear", "--all", "--path", tier.path).exit_code == 0
    said = pccheck("memory", "clear", "--all", "--path", tier.path)
    assert said.exit_code == 0
    assert said.stdout == f"Nothing was removed: {tier.path} has no store of this user.\n"
    said = pccheck("memory", "clear", tmp_path / "two", "--path", tier.path)
    assert said.exit_code == 2
    assert "two is no store in memory of this user: `pccheck memory ls`" in said.stderr
    assert pccheck("memory", "ls", "--path", tier.path).exit_code == 3
    assert list(Path(tier.path).iterdir()) == []


def test_one_whose_path_only_begins_alike_stays(tmp_path: Path, tier: MemoryTier) -> None:
    for name in ("run", "run-2"):
        train(tmp_path / name, tier, range(2))
    assert pccheck("memory", "clear", tmp_path / "run", "--path", tier.path).exit_code == 0
    assert [each.origin for each in list_memory(tier.path)] == [str(tmp_path / "run-2")]


def test_one_that_is_open_stays(tmp_path: Path, tier: MemoryTier) -> None:
    with engine_on(tmp_path, tier) as engine:
        engine.checkpoint(state_of(1), step=1, tier="memory").wait_reached("memory", 60)
        (found,) = list_memory(tier.path)
        assert found.in_use
        assert pccheck("memory", "clear", found.path).exit_code == 1
        said = pccheck("memory", "clear", "--all", "--path", tier.path)
        assert (said.exit_code, said.stdout) == (0, f"Nothing was removed: {tier.path} has 1 in use.\n")
        assert pccheck("memory", "clear", tmp_path, "--path", tier.path).exit_code == 1
        assert "in use" in pccheck("memory", "ls", "--path", tier.path).stdout
        engine.checkpoint(state_of(2), step=2)
    assert load_sync(tmp_path)["step"] == 2


def test_one_that_cannot_be_read_is_shown_and_removed(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(2))
    (found,) = list_memory(tier.path)
    (found.path / "store.json").write_bytes(b"?")
    said = pccheck("memory", "ls", "--path", tier.path)
    assert said.exit_code == 0
    assert "store.json is damaged" in said.stdout.replace("\n", " ")
    clear_memory(found.path)
    assert list_memory(tier.path) == []


def test_what_is_no_store_in_memory_is_never_removed(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path / "run", tier, range(2), on_disk=range(2))
    for wrong in (tmp_path / "run", tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="is no store in memory of this user"):
            clear_memory(wrong)
    (found,) = list_memory(tier.path)
    link = found.path.with_name(f"{found.path.name}-link")
    link.symlink_to(tmp_path / "run")
    with pytest.raises(ValueError, match="is no store in memory"):
        clear_memory(link)
    assert pccheck("memory", "clear").exit_code == 2
    assert pccheck("memory", "clear", found.path, "--all").exit_code == 2
    assert load_sync(tmp_path / "run")["step"] == 1


def test_what_counts_for_a_store(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    assert [info.step for info in memory_of(tmp_path, tier.path)] == [3]
    train(tmp_path, None, range(2, 3))
    assert memory_of(tmp_path, tier.path) == []
    assert memory_of(tmp_path / "none", tier.path) == []


def test_ls_says_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: MemoryTier) -> None:
    monkeypatch.setattr("pccheck_async.upkeep.memory_of", lambda path: memory_of(path, tier.path))
    train(tmp_path / "new", tier, range(4))
    said = pccheck("ls", tmp_path / "new")
    assert said.exit_code == 0
    assert "On disk is none yet. In memory on this machine: step 3" in said.stdout.replace("\n", " ")
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    said = pccheck("ls", tmp_path).stdout
    assert "In memory on this machine: step 3" in said
    with SyncCheckpointEngine(tmp_path, save_last=False) as engine:
        engine.restore(state_of(-1))
        engine.checkpoint(state_of(9), step=9)
    assert "In memory" not in pccheck("ls", tmp_path).stdout
