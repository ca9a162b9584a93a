"""What the guide says about stores of strangers, planted files and the modes of files."""

from __future__ import annotations

import os
import stat
import tarfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pccheck_async import CheckpointError, SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.cli import app
from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.medium.status_file import read_status
from tests.support.warm import run_warm

runner = CliRunner()


def save(path: Path) -> str:
    """Save one checkpoint and return the name of its slot."""
    with SyncCheckpointEngine(path, max_in_flight=1, overwrite=True) as engine:
        engine.checkpoint({"x": torch.arange(9.0), "note": "plain"}, step=1).result(60)
    return stores.describe(path).slot


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def symlink(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def folder(path: Path, _: Path) -> None:
    path.mkdir()


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o077, 0o600, 0o700), (0o027, 0o640, 0o750)])
def test_the_umask_decides_who_may_read(
    tmp_path: Path, umask: Callable[[int], int], mask: int, file_mode: int, folder_mode: int
) -> None:
    umask(mask)
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({"x": torch.arange(9.0)}, step=1).result(60)
        while read_status(tmp_path / "store") is None:  # its thread writes it soon after the first checkpoint
            pass
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()}
    stores.export(tmp_path / "store", tmp_path / "x.pt", to="torch")
    assert {"store.json", "commit", "slot-000", "status"} <= set(modes)
    assert set(modes.values()) == {file_mode}
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == folder_mode
    assert stat.S_IMODE((tmp_path / "x.pt").stat().st_mode) == file_mode


@pytest.mark.slow
@pytest.mark.parametrize("plant", [pipe, symlink, folder])
@pytest.mark.parametrize("name", ["store.json", "commit", "slot"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, plant: Callable[[Path, Path], None]) -> None:
    """A pipe would be waited for for ever, and a symlink might lead to what only the reader may read."""
    store = tmp_path / "store"
    slot = save(store)
    path = store / (slot if name == "slot" else name)
    victim = tmp_path / "victim"
    path.rename(victim)  # what a symlink leads to is the very file
    before = victim.read_bytes()
    plant(path, victim)
    with pytest.raises(CheckpointError):
        load_sync(store)
    for command in ("ls", "show", "verify", "recover"):
        result = runner.invoke(app, [command, str(store)])
        assert isinstance(result.exception, SystemExit | None), (command, result.exception)
        assert result.exit_code != 0 or (command, name) == ("recover", "slot"), (command, result.output)
    if name == "slot":
        assert save(store) != slot  # another one takes its place
    else:
        with pytest.raises(CheckpointError):
            save(store)
    assert victim.read_bytes() == before


def test_a_huge_identity_is_not_read_whole(tmp_path: Path) -> None:
    save(tmp_path)
    os.truncate(tmp_path / "store.json", 1 << 40)  # sparse: it takes no room on the disk
    with pytest.raises(CheckpointError, match="too large"):
        list_checkpoints(tmp_path)


CAGE = """
    import sys, warnings
    from pathlib import Path
    import torch
    from typer.testing import CliRunner
    from pccheck_async import SyncCheckpointEngine, list_checkpoints, load_sync, open_checkpoint, stores
    from pccheck_async.errors import UnsupportedStateError

    def look(path, copied):
        list_checkpoints(path)
        load_sync(path)
        stores.describe(path)
        stores.verify(path)
        stores.compare(path, path)
        stores.recover(path, search=True)
        stores.copy(path, copied)
        with open_checkpoint(path) as found:
            found["x"]
        state = {"x": torch.zeros(9), "note": None}
        with SyncCheckpointEngine(copied) as engine:
            engine.restore(state)
        assert state["note"] == "plain"

    def refused(read):
        try:
            read()
        except UnsupportedStateError as error:
            assert "a pickled" in str(error)
        else:
            raise AssertionError("it was read")

    def look_at_pickles(path, copied):
        list_checkpoints(path)
        assert [leaf.kind for leaf in stores.describe(path).leaves] == ["tensor", "pickled"]
        assert stores.verify(path).whole
        assert not stores.compare(path, path).differences
        stores.recover(path, search=True)
        stores.copy(path, copied)
        refused(lambda: load_sync(path))
        load_sync(path, keys=["x"])
        with open_checkpoint(path) as found:
            found["x"]
            refused(lambda: found["runs"])
        with SyncCheckpointEngine(copied) as engine:
            refused(lambda: engine.restore({"x": torch.zeros(9), "runs": None}))
        refused(lambda: stores.export(path, copied / "out", to="torch"))

    forbidden = ("pickle.find_class", "marshal.", "compile", "exec", "subprocess.", "os.exec", "os.system",
                 "os.posix_spawn", "os.fork", "socket.", "ctypes.dlopen")

    def watch(event, arguments):
        if event.startswith(forbidden):
            import os
            os.write(2, f"{event} {arguments!r}"[:2000].encode())
            os._exit(9)

    path, copied, again, hostile, other, another = map(Path, sys.argv[1:])
    look_at_pickles(hostile, other)
    look(path, copied)  # what Python imports when something is used first is not what is meant
    sys.addaudithook(watch)
    look(path, again)
    look_at_pickles(hostile, another)
    print("read", flush=True)
    sys.modules["pickle"].loads(sys.modules["pickle"].dumps(Path))  # the cage holds
"""


PLACES = ("store", "copied", "again", "hostile", "other", "another")


@pytest.mark.slow
def test_nothing_that_reads_a_store_unpickles_or_runs_anything(tmp_path: Path) -> None:
    save(tmp_path / "store")
    with SyncCheckpointEngine(tmp_path / "hostile", allow_pickle=True) as engine:
        engine.checkpoint({"x": torch.arange(9.0), "runs": Runs()}).result(60)
    script = tmp_path / "cage.py"
    script.write_text(textwrap.dedent(CAGE))

    caged = run_warm(script, *(tmp_path / each for each in PLACES), text=True)
    assert caged.stdout == "read\n", caged.stderr
    assert caged.returncode == 9
    assert caged.stderr.startswith("pickle.find_class")


class Runs:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("ran",)


def test_an_import_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Runs()}, tmp_path / "zip.pt")
    torch.save({"x": Runs()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with tarfile.open(tmp_path / "oldest.pt", "w") as archive:
        archive.add(tmp_path / "old.pt", "storages")
    for name in ("zip.pt", "old.pt", "oldest.pt"):
        with pytest.raises(UnsupportedStateError, match="code in it"):
            stores.import_(name, "store", source="torch")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "zip.pt").read_bytes()[:100])
    with pytest.raises((UnsupportedStateError, CorruptStoreError)):
        stores.import_("cut.pt", "store", source="torch")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # that was what it would have done
