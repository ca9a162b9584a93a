"""Slots that this user may not open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from pccheck_async import StorageOptions, SyncCheckpointEngine, stores
from pccheck_async.cli import app
from pccheck_async.errors import ReadError, WriteError, read_error, write_error
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.testing import WrappingWriter
from pccheck_async.transfer.operations import Operations
from tests.support.children import in_child
from tests.support.group_folders import save_in_group


class Forbidding(WrappingWriter):
    """Lets nobody open some files."""

    forbidden: ClassVar[set[str]] = set()

    async def open(self, name: str, *, writable: bool) -> File:
        if name in self.forbidden:
            kind = WriteError if writable else ReadError
            raise kind(errno.EACCES, os.strerror(errno.EACCES), name)
        return await super().open(name, writable=writable)


@pytest.mark.parametrize("make", [read_error, write_error])
def test_what_may_not_be_opened_is_not_called_damaged(make: Callable[[OSError, str], OSError]) -> None:
    error = make(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "slot-000")
    assert "Permission denied; that is no damage: use the account that owns the file" in str(error)


def test_a_slot_that_may_not_be_opened_is_neither_passed_over_nor_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forbidding, "forbidden", set())
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint({"x": torch.zeros(1000) + step}, step=step).result(60)
    newest, older = (stores.describe(tmp_path, step=step).slot for step in (2, 1))

    def forbidding(path: str, operations: Operations) -> Forbidding:
        return Forbidding(Files(path, operations))

    options = StorageOptions(io=forbidding)
    Forbidding.forbidden = {newest}
    with pytest.raises(WriteError, match="Permission denied"):
        SyncCheckpointEngine(tmp_path, keep_last=2, storage=options).open()
    with pytest.raises(ReadError, match="Permission denied"):
        stores.verify(tmp_path, io=forbidding)
    Forbidding.forbidden = {"slot-077"}
    (tmp_path / "slot-077").touch()  # one that no record names is left alone
    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=options) as engine:
        assert [info.step for info in engine.checkpoints()] == [2, 1]
    assert newest != older


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A folder that every user may enter: not so pytest's own."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["store", "above", "rank"])
def test_a_folder_that_may_not_be_entered_is_named_with_the_permission(for_all: Path, which: str) -> None:
    (path := for_all / "above" / "store").parent.mkdir()
    if which == "rank":
        save_in_group(path, 2, 1)
    else:
        with SyncCheckpointEngine(path) as engine:
            engine.checkpoint({"x": 1}, step=1).result(60)
    closed = {"store": path, "above": path.parent, "rank": path / "rank-00001"}[which]
    commands = [["ls"], ["verify"], ["recover"], ["recover", "--write"], ["watch", "--once"]]

    def look() -> list[tuple[int, str]]:
        results = [CliRunner().invoke(app, [*command, str(path)]) for command in commands]
        return [(result.exit_code, result.output) for result in results]

    def look_as_another() -> list[tuple[int, str]]:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        return look()

    look()  # here, so that all is imported: nor may that user read every module
    closed.chmod(0)
    try:
        found = in_child(look_as_another)
    finally:
        closed.chmod(0o755)
    for status, said in found:
        expected = f"Permission denied: this process may not read and enter the folder {closed}; that is no damage"
        assert (status, expected in said) == (1, True), said
