"""Which I/O engine it becomes, and what is said about that."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pccheck_async import SyncCheckpointEngine, load_sync
from pccheck_async.medium.open_medium import open_session
from pccheck_async.transfer.operations import native
from tests.conftest import ENGINES, need
from tests.support.processes import open_files, passes_in_a_forked_child

_IO_URING_SETUP = 425


def refuse_io_uring(error: int) -> None:
    """Let the kernel refuse io_uring to this process, as containers do: a seccomp filter that nothing removes."""

    def instruction(code: int, value: int, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", code, 0, otherwise, value)

    load_number, jump_if_equal, end, allow, fail = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    filters = ctypes.create_string_buffer(
        instruction(load_number, 0)
        + instruction(jump_if_equal, _IO_URING_SETUP, otherwise=1)
        + instruction(end, fail | error)
        + instruction(end, allow)
    )
    program = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(filters)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    for arguments in ((set_no_new_privileges, 1, 0, 0, 0), (set_seccomp, by_filter, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def save_and_load(folder: Path, io: str) -> tuple[str, str]:
    """Save one checkpoint and check it; return what the statistics say of the engine, and why it."""
    with SyncCheckpointEngine(folder, io=io) as engine:  # type: ignore[arg-type]
        engine.checkpoint({"tensor": torch.arange(5000)}, step=1).result(60)
        found = engine.statistics()
    assert torch.equal(load_sync(folder)["tensor"], torch.arange(5000))
    return found.io, found.decisions.reasons["io"]


def test_the_engine_asked_for_is_used(tmp_path: Path, io: str) -> None:
    said, reason = save_and_load(tmp_path, io)
    assert said.startswith(f"{io}, ")
    assert reason == f"{io}: asked for"
    assert said.endswith(reason)


def test_auto_says_what_it_found(tmp_path: Path) -> None:
    said, reason = save_and_load(tmp_path, "auto")
    if not native.available():
        assert reason == "python: the C extension was not built here"
    elif native.why_no_io_uring() is None:
        assert reason == "threads: as fast as io_uring where that was measured, which works here too"
    else:
        assert reason == f"threads: {native.why_no_io_uring()}"
    assert said.startswith(reason.partition(":")[0])
    assert said.endswith(reason)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.ENOMEM], ids=errno.errorcode.get)
def test_io_uring_refused_by_the_kernel(tmp_path: Path, error: int) -> None:
    need("io_uring")

    def in_the_child() -> None:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        refuse_io_uring(error)
        said, reason = save_and_load(tmp_path / "auto", "auto")
        assert said.startswith("threads, ")
        assert said.endswith(reason)
        assert f"the kernel refuses io_uring ({os.strerror(error)}: " in reason
        with pytest.raises(ValueError, match=re.escape(os.strerror(error))) as refused:
            save_and_load(tmp_path / "asked for", "io_uring")
        assert "use io='auto' or 'threads'" in str(refused.value)
        assert not (tmp_path / "asked for").exists()

    assert passes_in_a_forked_child(in_the_child)


@pytest.mark.parametrize("io", ["io_uring", "threads"])
def test_without_the_extension(tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_why_not", ImportError("not built"))
    with pytest.raises(ValueError, match=f"io='{io}' needs the C extension"):
        save_and_load(tmp_path, io)
    assert save_and_load(tmp_path, "auto")[1] == "python: the C extension was not built here"
    assert native.why_no_io_uring() == "the C extension was not built here"


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=", ".join(["auto", *ENGINES])):
        save_and_load(tmp_path, "magic")


def test_a_function_that_makes_no_writer_leaves_nothing_behind(
    tmp_path: Path, nothing_left_behind: Callable[..., None]
) -> None:
    def fails(path: str, operations: object) -> None:
        raise RuntimeError("no writer")

    with pytest.raises(RuntimeError, match="no writer"), SyncCheckpointEngine(tmp_path, io=fails):  # type: ignore[arg-type]
        pass


def test_a_cancelled_close_closes_the_files(tmp_path: Path) -> None:
    """Else they would stay locked, with nobody left to close them."""
    gate = threading.Event()

    async def main() -> None:
        session = await open_session(tmp_path, "python", writers=1, copiers=1)
        file = await session.writer.create("file", 4096)
        assert await session.writer.try_lock(file)
        running = asyncio.create_task(session.operations.call(gate.wait, 60))
        await asyncio.sleep(0)
        closing = asyncio.create_task(session.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await running
        assert not open_files(tmp_path)

    asyncio.run(main())
