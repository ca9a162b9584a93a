"""Bad input and faults: a clear error, and what is on the shelf stays."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import Shelf
from pccheck_async.errors import (
    ClosedError,
    CorruptStoreError,
    NewerFormatError,
    StoreFailedError,
    StoreFullError,
    StoreLockedError,
    UnsupportedStateError,
)
from pccheck_async.medium.mapping import Mapping
from pccheck_async.shelf import format as layout
from pccheck_async.transfer import PAGE_BYTES
from tests.support.processes import forked
from tests.support.state_strategies import difference
from tests.support.warm import run_warm

MIB = 1 << 20
CONTENT = {"x": np.arange(1000.0), "config": {"lr": 0.1, "names": ["a"]}, "t": torch.ones(3)}


@pytest.fixture
def filled(path: Path) -> Path:
    with Shelf(path, MIB) as shelf:
        for name, value in CONTENT.items():
            shelf[name] = value
    return path


def unharmed(path: Path) -> None:
    with Shelf(path) as shelf:
        assert not difference(CONTENT, dict(shelf))
        assert shelf.verify() == ()


def patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_full_shelf(filled: Path) -> None:
    with Shelf(filled) as shelf:
        free = shelf.free_bytes
        with pytest.raises(StoreFullError, match=r"'large' needs 1048576 bytes in one piece, and \d+ of 1048576 are"):
            shelf["large"] = np.zeros(MIB, np.uint8)
        with pytest.raises(StoreFullError):
            shelf["x"] = np.zeros(MIB, np.uint8)
        shelf["half"] = np.zeros(MIB * 6 // 10, np.uint8)
        with pytest.raises(StoreFullError, match="a copy of 'half'"), shelf.transaction("x", "half"):
            pytest.fail("it has begun")
        del shelf["half"]
        assert shelf.free_bytes == free
    unharmed(filled)


def test_full_inside_a_transaction_that_goes_on(filled: Path) -> None:
    with Shelf(filled) as shelf, shelf.transaction("x"):
        shelf.x[0] = 5
        with pytest.raises(StoreFullError):
            shelf["x"] = np.zeros(MIB, np.uint8)
    with Shelf(filled) as shelf:
        assert shelf.x[:2].tolist() == [5, 1]


@pytest.mark.parametrize("name", ["transaction", "path", "verify"])
def test_a_name_of_the_shelf_itself(name: str, filled: Path) -> None:
    with Shelf(filled) as shelf, pytest.raises(AttributeError, match=f"shelf\\['{name}'\\]"):
        setattr(shelf, name, 1)
    unharmed(filled)


@pytest.mark.parametrize(("name", "error"), [(5, TypeError), (None, TypeError), ("", ValueError), (b"x", TypeError)])
def test_a_name_that_is_none(name: Any, error: type[Exception], filled: Path) -> None:
    with Shelf(filled) as shelf:
        with pytest.raises(error, match="name"):
            shelf[name] = 1
        with pytest.raises((KeyError, TypeError)), shelf.transaction(name):
            pytest.fail("it has begun")
    unharmed(filled)


def test_a_name_that_cannot_be_encoded(filled: Path) -> None:
    with Shelf(filled) as shelf, pytest.raises(UnsupportedStateError, match="name"):
        shelf["\udc80"] = 1
    unharmed(filled)


def test_another_type_and_another_shape(filled: Path) -> None:
    """An assignment replaces whatever was there; an operation in place fails as NumPy's does, and is undone."""
    with Shelf(filled) as shelf:
        with pytest.raises(ValueError, match="broadcast"), shelf.transaction("x"):
            shelf.x[:] = np.ones(7)
        assert not difference(CONTENT["x"], shelf.x)
        old = shelf.x
        shelf["x"] = "now a string"
        shelf["x"] = np.ones((2, 2))
        assert not difference(CONTENT["x"], old)
        shelf["x"] = CONTENT["x"]
    unharmed(filled)


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a", None]),
        np.zeros(2, "i4,f8"),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        {"deep": [{"er": {1: object()}}]},
        Exception,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dtype_or_type_that_is_not_kept(value: Any, filled: Path) -> None:
    with Shelf(filled) as shelf, pytest.raises(UnsupportedStateError, match=r"^x"):
        shelf["x"] = value
    unharmed(filled)


def test_a_container_that_was_spoiled_undoes_the_transaction(filled: Path) -> None:
    with Shelf(filled) as shelf:
        with pytest.raises(UnsupportedStateError, match="config"), shelf.transaction("config", "x"):
            shelf.config["lr"] = object()
        assert not difference(CONTENT, dict(shelf))
        shelf.config["lr"] = object()
        assert shelf.verify() == ("config",)
    unharmed(filled)


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 62])
def test_a_size_that_is_none(nbytes: int, path: Path) -> None:
    with pytest.raises(ValueError, match="nbytes"):
        Shelf(path, nbytes)
    with pytest.raises(TypeError, match="nbytes"):
        Shelf(path, 1e6)  # type: ignore[arg-type]
    assert not path.exists()


def test_a_size_beyond_the_filesystem(filled: Path) -> None:
    with pytest.raises(StoreFullError, match="space"):
        Shelf(filled.with_name("new"), 1 << 50)
    assert os.listdir(filled.parent) == [filled.name]
    with pytest.raises(StoreFullError):
        Shelf(filled, 1 << 50)
    with Shelf(filled) as shelf:
        with pytest.raises(StoreFullError):
            shelf.grow(1 << 50)
        shelf["x"] = shelf.x
    assert filled.stat().st_size == MIB
    unharmed(filled)


def test_a_file_that_was_truncated_or_grown(filled: Path) -> None:
    os.truncate(filled, 3 * MIB)
    unharmed(filled)
    os.truncate(filled, MIB // 2)
    with pytest.raises(CorruptStoreError, match="truncated: it has 524288 bytes of 1048576"):
        Shelf(filled)
    os.truncate(filled, MIB)
    unharmed(filled)


def test_a_file_that_is_truncated_while_it_is_open(filled: Path) -> None:
    with Shelf(filled) as shelf:
        os.truncate(filled, MIB // 2)
        with pytest.raises(CorruptStoreError, match="truncated"), shelf.transaction("x"):
            pytest.fail("it has begun")
        with pytest.raises(CorruptStoreError, match="truncated"):
            shelf["y"] = 1
        os.truncate(filled, MIB)
    unharmed(filled)


def test_space_is_reserved(filled: Path) -> None:
    """No store into a hole of the file can fail for want of space (SIGBUS)."""
    assert filled.stat().st_blocks * 512 >= MIB
    with Shelf(filled, 2 * MIB):
        assert filled.stat().st_blocks * 512 >= 2 * MIB


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_space_is_reserved_by_zeros_where_there_is_no_other_way(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = tmp_path / "shelf"
    with Shelf(path, MIB) as shelf:
        shelf["x"] = 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB - PAGE_BYTES, before[1]))
    try:
        with pytest.raises(StoreFullError):  # the last write ends early, and is no error yet
            Shelf(path, 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == MIB
    with Shelf(path, 2 * MIB) as shelf:
        assert path.stat().st_blocks * 512 >= 2 * MIB
        assert shelf["x"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: patch(path, 0, b"NOTSHELF"), "not the file of a shelf"),
        (lambda path: patch(path, 20, bytes([path.read_bytes()[20] ^ 1])), "header of the shelf is damaged"),
        (lambda path: patch(path, PAGE_BYTES, b"\xff" * (PAGE_BYTES + 64)), "both roots"),
        (lambda path: os.truncate(path, 0), "not the file of a shelf"),
        (lambda path: os.truncate(path, PAGE_BYTES), "both roots"),
        (lambda path: path.write_bytes(b""), "not the file of a shelf"),
        (lambda path: path.write_bytes(os.urandom(MIB)), "not the file of a shelf"),
    ],
)
def test_what_is_no_shelf(change: Callable[[Path], Any], message: str, filled: Path) -> None:
    change(filled)
    before = filled.read_bytes()
    for readonly in (False, True):
        with pytest.raises(CorruptStoreError, match=message):
            Shelf(filled, readonly=readonly)
    assert filled.read_bytes() == before


def test_a_shelf_of_a_newer_version(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "VERSION", 7)
    patch(filled, 0, layout.Header(PAGE_BYTES, bytes(16)).encode())
    monkeypatch.undo()
    with pytest.raises(NewerFormatError, match="format 7; this package reads format 1"):
        Shelf(filled)


def test_a_shelf_of_a_machine_with_larger_pages(filled: Path) -> None:
    patch(filled, 0, layout.Header(2048, bytes(16)).encode())
    with pytest.raises(CorruptStoreError, match="pages of 2048 bytes"):
        Shelf(filled)


def test_a_damaged_root_leaves_the_one_before(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["n"] = 1
        shelf["n"] = 2
        sequence = shelf.sequence
    patch(path, (1 + sequence % 2) * PAGE_BYTES, b"\xff")
    with Shelf(path) as shelf:
        assert shelf.n == 1


def test_damage_is_told_by_verify(filled: Path) -> None:
    with Shelf(filled, readonly=True) as shelf:
        offset = shelf.variables()["x"].offset
    patch(filled, offset + 100, b"\xff")
    with Shelf(filled) as shelf:
        assert shelf.verify() == ("x",)
        shelf["x"] = CONTENT["x"]
    unharmed(filled)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file(make: Callable[[Path], None], path: Path) -> None:
    make(path)
    with pytest.raises((CorruptStoreError, FileExistsError)):
        Shelf(path)


def test_a_folder_that_does_not_exist(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Shelf(path / "in" / "it")
    with pytest.raises(FileNotFoundError):
        Shelf(path, readonly=True)


@pytest.mark.slow
def test_two_openers(filled: Path) -> None:
    with Shelf(filled) as shelf:
        for readonly in (False, True):
            with pytest.raises(StoreLockedError, match="open elsewhere"):
                Shelf(filled, readonly=readonly)
        code = f"from pccheck_async import Shelf; Shelf({str(filled)!r})"
        other = run_warm("-c", code, text=True)
        assert "StoreLockedError" in other.stderr
        shelf["x"] = shelf.x
    with Shelf(filled, readonly=True), pytest.raises(StoreLockedError):
        Shelf(filled)
    unharmed(filled)


@pytest.mark.slow
def test_the_lock_of_a_dying_process_is_waited_for(filled: Path) -> None:
    """A process that reads the memory map of a killed one (``ps``) keeps the mappings, and with them the lock."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with Shelf(filled):
                os.write(writer, b"!")
                time.sleep(0.2)
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1), "the child could not open it"
    os.close(reader)
    unharmed(filled)
    os.waitpid(child, 0)


def test_it_is_locked_as_long_as_nobody_closes_it(filled: Path) -> None:
    x = Shelf(filled).x  # the array holds the file
    with pytest.raises(StoreLockedError):
        Shelf(filled)
    del x
    unharmed(filled)


def test_a_closed_shelf(filled: Path) -> None:
    shelf = Shelf(filled)
    shelf.close()
    shelf.close()
    for use in (lambda: shelf["x"], lambda: list(shelf), shelf.verify, shelf.keys):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        shelf["x"] = 1
    with pytest.raises(ClosedError), shelf.transaction():
        pytest.fail("it has begun")
    unharmed(filled)


@pytest.mark.slow
def test_a_forked_child_reads_and_does_not_write(filled: Path) -> None:
    with Shelf(filled) as shelf:
        x = shelf.x

        def body() -> None:
            assert x[3] == (3 if not inside else -1)
            x[:] = 77
            assert x[3] == 77
            with pytest.raises(ClosedError):
                shelf["x"] = 1
            with pytest.raises(ClosedError), shelf.transaction("x"):
                pass
            shelf.close()

        inside = False
        assert forked(body) == 0
        assert x[3] == 3
        with suppress(InterruptedError), shelf.transaction("x"):
            x[3] = -1
            inside = True
            assert forked(body) == 0
            raise InterruptedError
        with pytest.raises(StoreLockedError):
            Shelf(filled)
    unharmed(filled)


def test_a_child_that_leaves_a_transaction_commits_nothing(filled: Path) -> None:
    with Shelf(filled) as shelf:
        parent = os.getpid()
        child = -1
        try:
            with shelf.transaction("x"):
                shelf.x[:] = 5
                child = os.fork()
                if child:
                    os.waitpid(child, 0)
                    raise InterruptedError
        except (InterruptedError, ClosedError) as error:
            if os.getpid() != parent:
                os._exit(0 if isinstance(error, ClosedError) else 1)
        assert not difference(CONTENT, dict(shelf))
    unharmed(filled)


@pytest.mark.slow
def test_the_parent_dies_and_its_child_does_not_keep_the_lock(filled: Path) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        shelf = Shelf(filled)
        x = shelf.x
        if os.fork() == 0:
            os.read(reader, 1)  # lives on
            os._exit(int(x[3]))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        unharmed(filled)
    finally:
        os.write(writer, b".")
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("at", [1, 2], ids=["before the root", "after the root"])
def test_a_flush_that_fails(at: int, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def flush(mapping: Mapping) -> None:
        calls.append(1)
        if len(calls) == at:
            raise OSError(5, "Input/output error")

    with Shelf(filled) as shelf:
        monkeypatch.setattr(Mapping, "flush", flush)
        with pytest.raises(StoreFailedError, match="reopen it to see what is durable"), shelf.transaction("x"):
            shelf.x[:] = 1
        monkeypatch.undo()
        with pytest.raises(StoreFailedError):
            shelf["y"] = 1
        assert shelf.config == CONTENT["config"]
    with Shelf(filled) as shelf:
        assert shelf.x[5] == (5 if at == 1 else 1)
        assert shelf.verify() == ()
