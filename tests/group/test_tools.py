"""The tools on a group's folder: what is complete on all ranks, one rank's part of it, and what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pccheck_async import StoreError, SyncCheckpointEngine, copy_checkpoint
from tests.support.ranks import save_in_group


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two ranks with the steps 1, 2 and 3, step 1 pinned, which nobody changes."""
    folder = tmp_path_factory.mktemp("made") / "group"
    save_in_group(folder, 2, 1, 2, 3, pinned=(1,))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    copy = tmp_path / "group"
    shutil.copytree(made, copy)
    return copy


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_no_store_is_made_in_a_groups_folder(folder: Path) -> None:
    before = names_in(folder)
    with pytest.raises(StoreError, match="holds a group's checkpoints: open it with group="):
        SyncCheckpointEngine(folder).open()
    with SyncCheckpointEngine(folder.parent / "single") as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    with pytest.raises(StoreError, match="group's checkpoints"):
        copy_checkpoint(folder.parent / "single", folder)
    assert names_in(folder) == before
