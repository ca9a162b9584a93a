"""A store into whose folder somebody has put what is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pccheck_async import CheckpointError, SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.errors import CorruptStoreError, InvalidTuningError
from pccheck_async.medium.folder import open_regular
from pccheck_async.medium.status_file import read_status
from tests.support.planted import PLANTED, ended, planted

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
NEWEST = 2


def train(path: Path) -> None:
    with SyncCheckpointEngine(path, keep_last=2) as engine:
        engine.checkpoint({"step": 1}, step=1).result(60)
        engine.checkpoint({"step": NEWEST}, step=NEWEST).result(60)


def restored(path: Path) -> None:
    """Where a slot is no file, a writer begins all the same."""
    with SyncCheckpointEngine(path, keep_last=2) as engine:
        engine.restore({"step": 0}, step=NEWEST)


def newest_slot(path: Path) -> str:
    return stores.verify(path).checkpoints[0].slot


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["store.json", "commit", "slot"])
def test_in_place_of_a_file_of_a_store(tmp_path: Path, kind: str, name: str) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    train(store)
    name = newest_slot(store) if name == "slot" else name
    path = store / name
    path.rename(victim)
    before = victim.read_bytes()
    with planted(path, kind, victim):
        error = ended(lambda: restored(store), path)
        assert isinstance(error, CorruptStoreError), "a writer leaves it alone"
        assert f"{path} is a" in str(error)
        for read in (list_checkpoints, lambda path: load_sync(path, step=NEWEST), stores.recover):
            error = ended(lambda read=read: read(store), path)  # type: ignore[misc]
            if name.startswith("slot-") and read in (list_checkpoints, stores.recover):
                assert error is None, "the record is whole"
            elif read is not stores.recover or name == "commit":
                assert isinstance(error, CorruptStoreError)
                assert name in str(error)
        if name.startswith("slot-"):
            with pytest.warns(RuntimeWarning, match="falling back to step 1"):
                assert load_sync(store)["step"] == 1
            (checked,) = stores.verify(store).checkpoints
            assert checked.damage[0].reason == str(ended_open(path))
            assert stores.recover(store).missing == (name,)
            searched = stores.recover(store, search=True)
            assert [one.note for one in searched.found if one.file == name] == [str(ended_open(path))]
    victim.rename(path)
    assert path.read_bytes() == before
    assert load_sync(store)["step"] == NEWEST


def ended_open(path: Path) -> BaseException | None:
    return ended(lambda: os.close(open_regular(path, os.O_RDONLY)), path)


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["status", "store.json.new", "slot-000"])
def test_in_a_folder_that_becomes_a_store(tmp_path: Path, kind: str, name: str) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    store.mkdir()
    victim.write_bytes(b"precious")
    with planted(store / name, kind, victim):
        error = ended(lambda: train(store), store / name)
        if name == "status":
            assert error is None, "the status is no part of a store"
            assert read_status(store) is None
        elif error is not None:
            assert isinstance(error, CheckpointError)
            assert name in str(error)
    assert victim.read_bytes() == b"precious"


def test_settings_that_are_no_file(tmp_path: Path) -> None:
    with planted(tmp_path / "tuning.json", "pipe", tmp_path):
        error = ended(lambda: stores.read_tuning(tmp_path), tmp_path / "tuning.json")
        assert isinstance(error, InvalidTuningError)
        assert "is a pipe" in str(error)


def test_a_pipe_is_not_imported(tmp_path: Path) -> None:
    with planted(tmp_path / "file", "pipe", tmp_path):
        error = ended(lambda: stores.import_(tmp_path / "file", tmp_path / "s", source="torch"), tmp_path / "file")
        assert isinstance(error, FileNotFoundError)
