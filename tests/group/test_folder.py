"""The folder of a group: its id where the filesystem has no hard links, and folders that cannot be made."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from pccheck_async.errors import CorruptStoreError, WriteError
from pccheck_async.format.record import GROUP_NAME
from pccheck_async.group.folder import domain_of, wait_for_made
from pccheck_async.group.ranks import Ranks
from tests.support.children import in_child


def no_links(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_without_hard_links_one_of_many_chooses_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_links)  # as on exFAT and some network filesystems
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(domain_of(tmp_path / "group"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path / "group") == [GROUP_NAME]  # nothing is left behind


def test_nothing_is_left_behind_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="No space left"):
        domain_of(tmp_path)
    assert os.listdir(tmp_path) == []


def test_an_id_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = domain_of(tmp_path / "other")
    data = (tmp_path / "other" / GROUP_NAME).read_bytes()
    (tmp_path / GROUP_NAME).touch()
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / GROUP_NAME).write_bytes(data))
    assert domain_of(tmp_path) == chosen


def test_all_ranks_of_a_host_find_one_folder_in_memory_while_one_makes_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked, asked, unlink = threading.Event(), threading.Event(), Path.unlink

    def late(self: Path, missing_ok: bool = False) -> None:
        linked.set()
        assert asked.wait(20)
        unlink(self, missing_ok=missing_ok)

    def find() -> Path:
        return Ranks.memory_folder(None, str(tmp_path / "rank-00001"), Path("/dev/shm"), None)  # type: ignore[arg-type]

    def ask(_: float) -> None:
        asked.set()
        maker.join()

    monkeypatch.setattr(Path, "unlink", late)
    monkeypatch.setattr(time, "sleep", ask)
    maker = threading.Thread(target=domain_of, args=(tmp_path,))
    maker.start()
    assert linked.wait(20)
    found = find()
    asked.set()
    maker.join()
    assert found == find()


def test_a_link_that_a_backup_has_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain_of(tmp_path / "group")
    (tmp_path / "backup").hardlink_to(tmp_path / "group" / GROUP_NAME)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    wait_for_made(tmp_path / "group")


@pytest.mark.slow
def test_an_id_that_nobody_writes_is_damaged(tmp_path: Path) -> None:
    (tmp_path / GROUP_NAME).touch()
    with pytest.raises(CorruptStoreError, match=r"recover .* --write"):
        domain_of(tmp_path)


@pytest.mark.slow
def test_a_folder_above_that_may_not_be_entered_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)

    def work() -> list[str]:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        else:
            closed.chmod(0)
        found = []
        for folder in (closed / "group", closed / "deep" / "group"):
            try:
                domain_of(folder)
            except WriteError as error:
                found.append(str(error))
        return found

    try:
        found = in_child(work)
    finally:
        closed.chmod(0o700)
    assert len(found) == 2
    assert all("Permission denied" in one and "folders that it may enter" in one for one in found)
