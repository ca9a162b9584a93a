"""Files: the medium on a real filesystem; and what every medium promises."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pccheck_async.errors import CorruptStoreError, DurabilityUnknownError, ReadError, StoreFullError, WriteError
from pccheck_async.format.record import COMMIT_NAME
from pccheck_async.medium import File, Medium, Part
from pccheck_async.medium.files import Files
from pccheck_async.medium.filesystem import filesystem_type, probe
from pccheck_async.testing import (
    MEDIUM_CHECKS,
    CrashDisk,
    CrashWriter,
    FailingWriter,
    StuckWriter,
    ThrottledWriter,
    WrappingWriter,
)
from pccheck_async.transfer import PAGE_BYTES, map_memory
from pccheck_async.transfer.operations import ChainStep, Operations, Step
from tests.fixtures import BACKENDS
from tests.support.planted import PLANTED, planted


@asynccontextmanager
async def opened(folder: Path, io: str, *, create: bool = True) -> AsyncIterator[Files]:
    operations = BACKENDS[io](io_threads=1, copy_threads=1)
    writer = Files(folder, operations)
    try:
        await writer.prepare(create=create)
        yield writer
    finally:
        await writer.close()
        await operations.close()


MEDIA: dict[str, Callable[[Medium], Medium]] = {
    "itself": lambda writer: writer,
    "wrapped": WrappingWriter,
    "failing": lambda writer: FailingWriter(writer, fail_at=None),
    "stuck": lambda writer: StuckWriter(writer, kinds=()),
    "throttled": lambda writer: ThrottledWriter(writer, total=1e12),
}
"""Media on a medium: the doubles keep what it promises, as long as they fail, hold and delay nothing."""


@pytest.mark.parametrize("check", MEDIUM_CHECKS, ids=lambda check: check.__name__)
def test_files_keep_what_a_medium_promises(
    check: Callable[..., Coroutine[Any, Any, None]], tmp_path: Path, io: str
) -> None:
    async def main() -> None:
        made: list[Operations] = []

        async def make() -> Medium:
            made.append(BACKENDS[io](io_threads=1, copy_threads=1))
            return Files(tmp_path / "store", made[-1])

        try:
            await check(make)
        finally:
            for operations in made:
                await operations.close()

    asyncio.run(main())


@pytest.mark.parametrize("check", MEDIUM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("turns", [0, 3])
def test_doubles_keep_what_a_medium_promises(
    check: Callable[..., Coroutine[Any, Any, None]], medium: str, turns: int
) -> None:
    disk = CrashDisk()

    async def make() -> Medium:
        return MEDIA[medium](CrashWriter(disk, turns=turns))

    asyncio.run(check(make))


Body = Callable[[Files], Coroutine[Any, Any, None]]
OnDisk = Callable[[Path, Body], None]


@pytest.fixture
def on_disk(io: str) -> OnDisk:
    """Run a test with a writer for a folder, over every I/O backend in turn."""

    def run(folder: Path, test: Body) -> None:
        async def main() -> None:
            async with opened(folder, io) as writer:
                await test(writer)

        asyncio.run(main())

    return run


def block(text: bytes = b"x") -> memoryview:
    memory = map_memory(PAGE_BYTES)
    memory.write(text)
    return memoryview(memory)[:PAGE_BYTES]


def test_persist_tells_a_failed_flush_from_a_failed_write(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        (tmp_path / "slot-000").write_bytes(bytes(PAGE_BYTES))
        unwritable = await writer.open("slot-000", writable=False)
        with pytest.raises(WriteError) as told:
            await writer.make_durable([(unwritable, [(0, block())])])
        assert (told.type, told.value.errno) == (WriteError, errno.EBADF)
        assert writer.statistics().flush.count == 0
        missing = File("slot-001", 0, fd=1_000_000)  # nobody has as many
        with pytest.raises(DurabilityUnknownError):
            await writer.make_durable([(missing, ())])

    on_disk(tmp_path, test)


def test_persist_of_two_files_lets_go_of_the_first_before_it_writes_the_second(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        files = [await writer.reserve(name, 2 * PAGE_BYTES) for name in ("slot-000", "commit")]
        others = [await writer.open(file.name, writable=False) for file in files]
        for file in files:
            assert await writer.lock(file)
        missing = File("slot-001", 0, fd=1_000_000)
        with pytest.raises(DurabilityUnknownError) as told:  # from the first flush on
            await writer.make_durable([(files[0], [(0, block(b"one"))]), (missing, [(0, block(b"two"))])])
        assert told.value.filename == str(tmp_path / "slot-001")
        assert [await writer.lock(other, shared=True) for other in others] == [True, False]
        await writer.unlock(others[0])
        await writer.make_durable([(files[0], [(0, block(b"1"))]), (files[1], [(PAGE_BYTES, block(b"2"))])])
        assert (tmp_path / "slot-000").read_bytes()[:1] + (tmp_path / "commit").read_bytes()[PAGE_BYTES:][:1] == b"12"
        io = writer.statistics()
        assert (io.write.count, io.flush.count) == (4, 3)

    on_disk(tmp_path, test)


def test_persist_writes_what_was_refused_again_and_nothing_else(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        files = [await writer.reserve(name, 2 * PAGE_BYTES) for name in ("slot-000", "commit")]
        if not files[1].direct:
            pytest.skip("no direct I/O on this filesystem")
        unaligned = memoryview(map_memory(2 * PAGE_BYTES))[1 : PAGE_BYTES + 1]
        unaligned[:3] = b"two"
        await writer.make_durable([(files[0], [(0, block(b"one"))]), (files[1], [(0, unaligned)])])
        assert [file.direct for file in files] == [True, False]
        assert [(tmp_path / file.name).read_bytes()[:3] for file in files] == [b"one", b"two"]
        io = writer.statistics()
        assert (io.write.count, io.flush.count) == (3, 2), "one of them was refused"

    on_disk(tmp_path, test)


def test_a_handler_of_the_log_that_raises_ends_no_write(
    tmp_path: Path, on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    async def test(writer: Files) -> None:
        file = await writer.reserve("slot-000", PAGE_BYTES)
        if not file.direct:
            pytest.skip("no direct I/O on this filesystem")
        unaligned = memoryview(map_memory(2 * PAGE_BYTES))[1 : PAGE_BYTES + 1]
        unaligned[:3] = b"all"
        monkeypatch.setattr(logging.getLogger("pccheck_async"), "handlers", [Raises()])
        await writer.make_durable([(file, [(0, unaligned)])])
        assert (tmp_path / "slot-000").read_bytes()[:3] == b"all"

    on_disk(tmp_path, test)


def test_a_flush_that_is_refused_is_a_failure_and_not_repeated(tmp_path: Path, on_disk: OnDisk) -> None:
    """Only writes are refused for being direct; a flush that failed may have dropped what it should have written."""

    async def test(writer: Files) -> None:
        if not writer.statistics().direct:
            pytest.skip("no direct I/O on this filesystem")
        receiver, sender = os.pipe()  # flushing one is EINVAL
        try:
            file = File("slot-000", 0, fd=sender, direct=True)
            with pytest.raises(DurabilityUnknownError) as told:
                await writer.make_durable([(file, ())])
            assert told.value.errno == errno.EINVAL
            assert file.direct
            assert (writer.statistics().direct, writer.statistics().flush.count) == (True, 1)
        finally:
            os.close(receiver)
            os.close(sender)

    on_disk(tmp_path, test)


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "raised"])
@pytest.mark.parametrize("alike", [True, False], ids=["as_any_writer", "as_this_one"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
def test_a_cancelled_persist_ends_and_tells_of_its_flush(
    tmp_path: Path, on_disk: OnDisk, ignored: bool, alike: bool, fails: bool
) -> None:
    async def test(posix: Files) -> None:
        writer: Medium = WrappingWriter(posix) if alike else posix
        file, last = [await writer.reserve(name, PAGE_BYTES) for name in ("slot-000", "slot-001")]
        if fails:
            last = File("slot-001", 0, fd=1_000_000)
        parts = [(file, [(0, block(b"begun"))]), (last, [(0, block(b"ended"))])]
        persisting = asyncio.ensure_future(writer.make_durable(parts, ignore_cancellation=ignored))
        await asyncio.sleep(0)
        persisting.cancel()
        await asyncio.wait((persisting,))
        assert (tmp_path / "slot-000").read_bytes().startswith(b"begun")
        assert (tmp_path / "slot-001").read_bytes().startswith(b"ended") is not fails
        assert persisting.cancelled() is not (ignored or fails)
        if fails:
            assert isinstance(error := persisting.exception(), DurabilityUnknownError)
            assert error.errno == errno.EBADF

    on_disk(tmp_path, test)


def test_what_is_refused_is_written_again_though_it_was_cancelled(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        file = await writer.reserve("slot-000", 2 * PAGE_BYTES)
        if not file.direct:
            pytest.skip("no direct I/O on this filesystem")
        unaligned = memoryview(map_memory(2 * PAGE_BYTES))[1 : PAGE_BYTES + 1]
        unaligned[:3] = b"all"
        persisting = asyncio.ensure_future(writer.make_durable([(file, [(0, unaligned)])], ignore_cancellation=True))
        await asyncio.sleep(0)
        persisting.cancel()
        await persisting
        assert (tmp_path / "slot-000").read_bytes()[:3] == b"all"

    on_disk(tmp_path, test)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_backend_that_takes_no_more_after_a_flush_leaves_it_unsure(tmp_path: Path, io: str, flushed: bool) -> None:
    """Of what was to be written again: the first copy of a record may be on its way to the device."""

    async def main() -> None:
        operations = BACKENDS[io](io_threads=1, copy_threads=1)
        chain, calls = operations.chain, 0

        async def chain_once(steps: Sequence[ChainStep], ended: list[Step]) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise OSError(errno.EBADF, "closed")
            await chain(steps, ended)

        medium = Files(tmp_path, operations)
        try:
            await medium.prepare(create=True)
            files = [await medium.reserve(name, 2 * PAGE_BYTES) for name in ("slot-000", "commit")]
            if not files[1].direct:
                pytest.skip("no direct I/O on this filesystem")
            unaligned = memoryview(map_memory(2 * PAGE_BYTES))[1 : PAGE_BYTES + 1]
            refused: list[Part] = [(files[1], [(0, unaligned)])]
            operations.chain = chain_once  # type: ignore[method-assign]
            with pytest.raises(WriteError) as told:
                await medium.make_durable([(files[0], [(0, block(b"one"))])] * flushed + refused)
            assert (told.type, told.value.errno) == (DurabilityUnknownError if flushed else WriteError, errno.EBADF)
        finally:
            await medium.close()
            await operations.close()

    asyncio.run(main())


def test_a_created_file_reads_as_zeros_and_has_its_space(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        await writer.reserve("slot-000", 64 * PAGE_BYTES)
        found = (tmp_path / "slot-000").stat()
        assert found.st_blocks * 512 >= 64 * PAGE_BYTES
        assert not any((tmp_path / "slot-000").read_bytes())

    on_disk(tmp_path, test)


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_cancelled_small_file_is_left_alone(
    tmp_path: Path, on_disk: OnDisk, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the call returns, no thread of it works on the file any more."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    really: Callable[..., Any] = getattr(os, call)

    def slow(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread() or begun.is_set():
            return really(*arguments, **named)
        begun.set()
        go_on.wait(30)
        result = really(*arguments, **named)
        ended.set()
        return result

    async def test(writer: Files) -> None:
        monkeypatch.setattr(os, call, slow)
        writing = asyncio.create_task(writer.replace("store.json", b"abc"))
        await asyncio.to_thread(begun.wait, 30)
        writing.cancel()
        await asyncio.wait([writing], timeout=0.05)
        assert not writing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert ended.is_set()

    on_disk(tmp_path, test)


def test_new_folders_are_made(tmp_path: Path, io: str) -> None:
    async def test() -> None:
        async with opened(tmp_path / "a" / "b", io):
            assert (tmp_path / "a" / "b").is_dir()

    asyncio.run(test())


def test_reading_makes_nothing(tmp_path: Path, io: str) -> None:
    async def test() -> None:
        async with opened(tmp_path / "none", io, create=False) as writer:
            assert await writer.names() == []
            assert await writer.read_small("store.json") is None
        assert not (tmp_path / "none").exists()

    asyncio.run(test())


def test_a_lock_goes_with_its_file_though_something_holds_that_open(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        file = await writer.reserve("slot-000", PAGE_BYTES)
        other = await writer.open("slot-000", writable=False)
        assert await writer.lock(file)
        held = os.dup(file.fd)  # as a request does in the kernel, a moment longer than it runs
        await writer.close(file)
        assert await writer.lock(other, shared=True)
        os.close(held)

    on_disk(tmp_path, test)


def test_errors_keep_errno_and_name(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        with pytest.raises(FileNotFoundError):
            await writer.open("slot-000", writable=True)
        file = await writer.reserve("slot-000", PAGE_BYTES)
        with pytest.raises(WriteError) as exists:
            await writer.reserve("slot-000", PAGE_BYTES)
        assert exists.value.errno == errno.EEXIST
        reading = await writer.open("slot-000", writable=False)
        with pytest.raises(WriteError) as refused:
            await writer.write(reading, 0, block())
        assert refused.value.errno == errno.EBADF
        assert refused.value.filename == str(tmp_path / "slot-000")
        await writer.close(file)
        with pytest.raises(ReadError) as closed:
            await writer.read(file, 0, block())
        assert closed.value.errno == errno.EBADF

    on_disk(tmp_path, test)


def test_a_file_that_does_not_fit_leaves_nothing(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, hard))
        try:
            with pytest.raises(StoreFullError, match=rf"{PAGE_BYTES} bytes in this process .*RLIMIT_FSIZE.*untouched"):
                await writer.reserve("slot-000", 10 * PAGE_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await writer.names() == []

    on_disk(tmp_path, test)


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_file_is_not_opened(tmp_path: Path, on_disk: OnDisk, kind: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "store"
    victim.write_bytes(b"precious")
    folder.mkdir()

    async def test(writer: Files) -> None:
        with planted(folder / "name", kind, victim):
            for refused in (
                writer.open("name", writable=True),
                writer.open("name", writable=False),
                writer.read_small("name"),
            ):
                with pytest.raises(CorruptStoreError, match="not a file of this package: see what it is"):
                    await refused
            with pytest.raises(WriteError):
                await writer.reserve("name", PAGE_BYTES)
        assert victim.read_bytes() == b"precious"

    on_disk(folder, test)


def test_files_wait_for_the_device(tmp_path: Path, on_disk: OnDisk) -> None:
    """``O_NONBLOCK`` is for the opening alone."""

    async def test(writer: Files) -> None:
        await writer.reserve("slot-000", PAGE_BYTES)
        file = await writer.open("slot-000", writable=True)
        assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_NONBLOCK

    on_disk(tmp_path, test)


def test_direct_io_refused_at_the_first_transfer_falls_back(
    tmp_path: Path, on_disk: OnDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(writer: Files) -> None:
        file = await writer.reserve("slot-000", PAGE_BYTES)
        if not file.direct:
            pytest.skip("no direct I/O on this filesystem")
        memory = map_memory(2 * PAGE_BYTES)
        unaligned = memoryview(memory)[1 : PAGE_BYTES + 1]  # what a stricter device would call unaligned
        with suppress(OSError):
            os.pwrite(file.fd, unaligned, 0)
            pytest.skip("this filesystem takes direct writes that are not aligned")
        await writer.write(file, 0, unaligned)
        assert not file.direct
        assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
        assert not writer.statistics().direct
        assert "buffered I/O" in caplog.text

    on_disk(tmp_path, test)


def test_tmpfs_uses_buffered_io_and_says_so(on_disk: OnDisk, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path("/dev/shm") / f"pccheck-test-{os.getpid()}"
    folder.mkdir()
    try:
        with caplog.at_level("INFO", "pccheck_async"):

            async def test(writer: Files) -> None:
                file = await writer.reserve("slot-000", PAGE_BYTES)
                await writer.write(file, 0, block(b"hello"))
                await writer.make_durable([(file, ())])
                assert not writer.statistics().direct
                assert "buffered I/O with fdatasync: tmpfs" in caplog.text
                await writer.remove("slot-000")

            on_disk(folder, test)
    finally:
        folder.rmdir()


def test_the_filesystem_is_that_of_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subvolumes of btrfs, and files of an overlay, have devices that are mounted nowhere."""
    known = filesystem_type(tmp_path)
    stat = os.stat

    def of_a_subvolume(path: Any, **named: Any) -> os.stat_result:
        found = stat(path, **named)
        return os.stat_result((*found[:2], 0x7FFF, *found[3:]))

    assert (filesystem_type("/proc/sys"), filesystem_type("/none")) == ("proc", "unknown")
    monkeypatch.setattr(os, "stat", of_a_subvolume)
    assert os.stat(tmp_path).st_dev == 0x7FFF
    assert filesystem_type(tmp_path) == known != "unknown"


def test_descriptors_do_not_leak(tmp_path: Path, on_disk: OnDisk) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def test(writer: Files) -> None:
        for number in range(5):
            await writer.reserve(f"slot-00{number}", PAGE_BYTES)

    on_disk(tmp_path, test)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_abandon_closes_everything_at_once(tmp_path: Path, on_disk: OnDisk) -> None:
    async def test(writer: Files) -> None:
        file = await writer.reserve("slot-000", PAGE_BYTES)
        fd = file.fd
        writer.abandon()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    on_disk(tmp_path, test)


def test_cancelled_creation_does_not_lose_its_descriptor(tmp_path: Path, on_disk: OnDisk) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def test(writer: Files) -> None:
        task = asyncio.create_task(writer.reserve("slot-000", PAGE_BYTES))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    on_disk(tmp_path, test)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_folder_that_is_moved_stays_the_one(tmp_path: Path, on_disk: OnDisk) -> None:
    one, moved = tmp_path / "one", tmp_path / "moved"

    async def test(writer: Files) -> None:
        await writer.reserve("slot-000", PAGE_BYTES)
        one.rename(moved)
        one.mkdir()
        for name in ("slot-000", "slot-001", "store.json"):
            (one / name).write_text("another store's")
        await writer.reserve("slot-001", PAGE_BYTES)
        await writer.remove("slot-000")
        await writer.replace("store.json", b"mine")
        await writer.sync_names()
        assert await writer.read_small("store.json") == b"mine"
        assert (await writer.open("slot-001", writable=True)).nbytes == PAGE_BYTES
        assert await writer.names() == ["slot-001", "store.json"]

    on_disk(one, test)
    assert sorted(os.listdir(moved)) == ["slot-001", "store.json"]
    assert [path.read_text() for path in one.iterdir()] == ["another store's"] * 3


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def test_what_is_synced_is_in_the_kernel_by_then(
    tmp_path: Path, on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No double sees the system calls: which files and folders are synced, and how much of them is there by then."""
    synced: list[tuple[tuple[int, int], int]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        found = os.fstat(fd)
        synced.append(((found.st_dev, found.st_ino), found.st_size))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    store = tmp_path / "new" / "store"

    async def test(writer: Files) -> None:
        for new in (store.parent, store):
            assert _inode(new.parent) in [inode for inode, _ in synced], f"the name of {new} is not durable"
        synced.clear()
        await writer.replace("small", b"content")
        assert synced[0] == (_inode(store / "small"), 7)
        assert [inode for inode, _ in synced[1:]] == [_inode(store)]
        synced.clear()
        await writer.reserve("slot-000", PAGE_BYTES)
        await writer.sync_names()
        assert [inode for inode, _ in synced] == [_inode(store)]

    on_disk(store, test)


def test_a_device_that_fails_to_read_does_not_refuse_direct_io(
    tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of the file that is tried may be a bad one."""

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def main() -> None:
        async with opened(tmp_path, io) as writer:
            await writer.reserve(COMMIT_NAME, PAGE_BYTES)
            if not writer.statistics().direct:
                pytest.skip("no direct I/O on this filesystem")
            monkeypatch.setattr(os, "preadv", fail)
            assert (await writer.prepare(create=False)).direct

    asyncio.run(main())


def test_a_new_folder_behind_a_link_is_probed_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert probe(tmp_path / "link", create=True) == probe(tmp_path / "folder", create=True)


def test_a_folder_without_nameless_files_is_probed_by_one_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = probe(tmp_path, create=True)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # as a kernel sees it that has no such flag
    assert probe(tmp_path, create=True) == expected
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_zeros_are_written_where_space_cannot_be_reserved(
    tmp_path: Path, io: str, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    async def main() -> None:
        async with opened(tmp_path, io) as writer:
            monkeypatch.setattr(os, "posix_fallocate", refuse)
            assert "zeros" not in writer.statistics().why
            nbytes = (5 << 20) + PAGE_BYTES
            for name in ("slot-000", "slot-001"):
                file = await writer.reserve(name, nbytes)
                assert file.nbytes == nbytes
                found = (tmp_path / name).stat()
                assert found.st_size == nbytes <= found.st_blocks * 512  # no holes
            await writer.write(file, PAGE_BYTES, block(b"hello"))
            await writer.make_durable([(file, ())])
            assert (tmp_path / "slot-001").read_bytes() == bytes(PAGE_BYTES) + bytes(block(b"hello")) + bytes(
                nbytes - 2 * PAGE_BYTES
            )
            assert f"zeros ({os.strerror(error)})" in writer.statistics().why

    with caplog.at_level(logging.INFO, "pccheck_async"):
        asyncio.run(main())
    assert [record.event for record in caplog.records].count("zeros") == 1  # type: ignore[attr-defined]


def test_a_reservation_that_fails_for_want_of_space_writes_no_zeros(
    tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with opened(tmp_path, io) as writer:
            monkeypatch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(StoreFullError):
                await writer.reserve("slot-000", PAGE_BYTES)
            assert await writer.names() == []

    asyncio.run(main())
