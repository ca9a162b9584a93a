"""One conformance suite for all engines, on all loops; then what only the extension has."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import functools
import gc
import itertools
import mmap
import os
import platform
import re
import resource
import select
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pccheck_async.format import checksum
from pccheck_async.transfer.operations import native, python
from pccheck_async.transfer.operations.base import ChainStep, Kind, Operations, Step
from pccheck_async.transfer.operations.threads import WorkerThreads
from tests.conftest import ENGINES, need

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]

CHUNK = 1 << 20


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.fixture
def engine(io: str) -> Callable[..., Operations]:
    return ENGINES[io]


@pytest.fixture
def operations(runner: asyncio.Runner, engine: Callable[..., Operations]) -> Iterator[Operations]:
    """An engine with a single copying thread, so that a test can keep it busy."""

    async def create() -> Operations:
        return engine(io_threads=2, copy_threads=1)

    operations = runner.run(create())
    yield operations
    runner.run(operations.close())
    assert operations.running == 0


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the runner's loop, where its operations live."""

    @functools.wraps(test)
    def run(runner: asyncio.Runner, **arguments: Any) -> None:
        runner.run(test(runner=runner, **arguments))

    return run


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield fd
    os.close(fd)


class StuckPages:
    """Memory that stops whichever thread touches it until :meth:`let_go`: an operation that runs for as long as wanted.

    The kernel (userfaultfd) reports the touch and leaves the thread waiting for its page.
    """

    _USER_MODE_ONLY = 1  # needs no privilege
    _API, _REGISTER, _ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC020AA04

    def __init__(self) -> None:
        number = {"x86_64": 323, "aarch64": 282}.get(platform.machine())
        fd = -1 if number is None else ctypes.CDLL(None).syscall(number, os.O_CLOEXEC | self._USER_MODE_ONLY)
        if fd < 0:
            pytest.skip("no userfaultfd here")
        self.fd: int = fd
        self.memory = mmap.mmap(-1, CHUNK)
        self.view = memoryview(self.memory)
        self._range = (address_of(self.memory), CHUNK)
        fcntl.ioctl(fd, self._API, bytearray(struct.pack("=QQQ", 0xAA, 0, 0)))
        fcntl.ioctl(fd, self._REGISTER, bytearray(struct.pack("=QQQQ", *self._range, 1, 0)))

    async def touched(self) -> None:
        """Wait until a thread is stuck."""
        loop, stuck = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.fd, stuck.set)
        await stuck.wait()
        loop.remove_reader(self.fd)
        os.read(self.fd, 32)

    def let_go(self) -> None:
        """Give out zeroed pages. Idempotent."""
        if self.fd >= 0:
            fcntl.ioctl(self.fd, self._ZEROPAGE, bytearray(struct.pack("=QQQQ", *self._range, 0, 0)))
            os.close(self.fd)
            self.fd = -1


@pytest.fixture
def stuck(operations: Operations) -> Iterator[StuckPages]:
    pages = StuckPages()
    yield pages
    pages.let_go()  # before the engine, of which it asked to be set up, is closed


class Owner:
    """Something a weak reference can watch."""


def address_of(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def table(*segments: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("=QQQ", *segment) for segment in segments)


def threads_now() -> int:
    """Threads of this process, without those that the kernel keeps for io_uring for as long as it likes."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return sum(not name.startswith("iou-") for name in names)


def threads_settle_at(count: int) -> bool:
    """Return whether no more threads are left; a joined one is in ``/proc`` until the kernel is through with it."""
    for _ in range(100_000):
        if threads_now() <= count:
            return True
        os.sched_yield()
    return False


def fds_now() -> int:
    return len(os.listdir("/proc/self/fd"))


async def let_others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# ---- Chains


@on_loop
async def test_a_chain_performs_its_steps_in_order(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    before = time.perf_counter()
    ended: list[Step] = []
    await operations.chain(
        [
            (Kind.WRITE, fd, 0, memoryview(b"aaaa")),
            (Kind.WRITE, fd, 2, memoryview(b"bbbb")),
            (Kind.FLUSH, fd),
            (Kind.WRITE, fd, 4, memoryview(b"c")),
        ],
        ended,
    )
    assert all(result >= 0 for result, _ in ended)
    assert len(ended) == 4
    times = [before, *(at for _, at in ended), time.perf_counter()]
    assert times == sorted(times)
    assert os.pread(fd, 10, 0) == b"aabbcb"


@on_loop
async def test_nothing_of_a_chain_follows_a_failure(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    reader, writer = os.pipe()
    try:
        after = (Kind.WRITE, fd, 0, memoryview(b"after"))
        for failing in (
            (Kind.FLUSH, writer),
            (Kind.WRITE, writer, 0, memoryview(b"x")),
        ):  # EINVAL, ESPIPE: pipes have neither
            ended: list[Step] = []
            await operations.chain([(Kind.WRITE, fd, 8, memoryview(b"before")), failing, after], ended)
            first, second = ended
            assert first[0] >= 0
            assert -second[0] in (errno.EINVAL, errno.ESPIPE)
        assert os.pread(fd, 20, 0) == bytes(8) + b"before"
    finally:
        os.close(reader)
        os.close(writer)


@on_loop
async def test_a_refused_chain_does_nothing(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    good = (Kind.WRITE, fd, 0, memoryview(b"y"))
    for offset in (-1, 2**63 - 1, 2**64):
        bad = (Kind.WRITE, fd, offset, memoryview(b"x"))
        for steps in ([bad, good], [good, bad]):
            with pytest.raises(ValueError, match=r"offset|negative|64 bits"):
                await operations.chain(steps, [])
            assert os.fstat(fd).st_size == 0
    with pytest.raises(ValueError, match="a chain"):
        await operations.chain([good, (Kind.READ, fd, 0, bytearray(1))], [])
    assert os.fstat(fd).st_size == 0


@on_loop
async def test_a_chain_unlocks_where_it_comes_to_it(
    runner: asyncio.Runner, operations: Operations, fd: int, tmp_path: Path
) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX)
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        read, write = os.pipe()
        os.close(read)
        ended: list[Step] = []
        await operations.chain([(Kind.FLUSH, write), (Kind.UNLOCK, fd)], ended)
        os.close(write)
        assert len(ended) == 1
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        await operations.chain([(Kind.WRITE, fd, 0, memoryview(b"x")), (Kind.UNLOCK, fd), (Kind.FLUSH, fd)], ended)
        assert [result >= 0 for result, _ in ended] == [False, True, True, True]
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(other)


@on_loop
async def test_a_chain_ends_at_a_file_that_was_removed(
    runner: asyncio.Runner, operations: Operations, fd: int, tmp_path: Path
) -> None:
    ended: list[Step] = []
    # What is no file is left to the step that uses it.
    steps: list[ChainStep] = [(Kind.LINKED, -1), (Kind.LINKED, fd), (Kind.WRITE, fd, 0, memoryview(b"x"))]
    await operations.chain(steps, ended)
    assert [min(result, 0) for result, _ in ended] == [0, 0, 0]
    (tmp_path / "file").unlink()
    ended.clear()
    await operations.chain([*steps, (Kind.FLUSH, fd)], ended)
    assert [result for result, _ in ended] == [0, -errno.ENOENT]


@on_loop
async def test_how_a_chain_ended_is_known_though_its_caller_was_cancelled(
    runner: asyncio.Runner, operations: Operations, fd: int
) -> None:
    ended: list[Step] = []
    chain = asyncio.ensure_future(
        operations.chain([(Kind.WRITE, fd, 0, memoryview(b"x")), (Kind.FLUSH, 1_000_000)], ended)
    )
    await asyncio.sleep(0)
    while not os.fstat(fd).st_size:
        pass  # the loop does not get to know how it ends before it is cancelled
    chain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await chain
    assert [min(result, 0) for result, _ in ended] == [0, -errno.EBADF]
    assert not operations.running


@on_loop
async def test_a_chain_that_waits_for_its_turn_happens_though_it_is_cancelled(
    runner: asyncio.Runner, operations: Operations, fd: int
) -> None:
    long: list[ChainStep] = [(Kind.WRITE, fd, 0, memoryview(bytes(1 << 20)))] * 200
    before = [asyncio.ensure_future(operations.chain(long, [])) for _ in range(2)]  # as many as there are threads
    ended: list[Step] = []
    chain = asyncio.ensure_future(operations.chain([(Kind.WRITE, fd, 1 << 20, memoryview(b"x"))], ended))
    await asyncio.sleep(0)
    chain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await chain
    assert [result >= 0 for result, _ in ended] == [True]
    assert os.pread(fd, 2, 1 << 20) == b"x"
    await asyncio.gather(*before)


@on_loop
async def test_gather_at_once_does_what_gather_does(runner: asyncio.Runner, operations: Operations) -> None:
    source = bytearray(os.urandom(200_000))
    segments = table((address_of(source), 100, 150_000), (address_of(source) + 150_000, 150_200, 50_000))
    one, other = bytearray(b"x" * 210_000), bytearray(b"y" * 210_000)
    checksum = operations.gather_at_once(segments, memoryview(one))
    assert checksum == await operations.gather(segments, memoryview(other)) == zlib.crc32(one)
    assert one == other
    with pytest.raises(ValueError, match="outside"):
        operations.gather_at_once(segments, memoryview(bytearray(200_000)))


# ---- Transfers


@on_loop
async def test_what_is_written_is_read(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    data = os.urandom(3 * CHUNK + 17)
    await operations.write(fd, 4099, memoryview(data))
    await operations.flush(fd)
    into = bytearray(len(data))
    assert await operations.read(fd, 4099, memoryview(into)) == len(data)
    assert into == data
    hole = bytearray(b"x" * 4099)
    assert await operations.read(fd, 0, memoryview(hole)) == 4099
    assert not any(hole)


@on_loop
async def test_reads_are_short_only_at_the_end(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    await operations.write(fd, 0, memoryview(b"0123456789"))
    into = bytearray(8)
    assert await operations.read(fd, 5, memoryview(into)) == 5
    assert into == b"56789\0\0\0"
    assert await operations.read(fd, 10, memoryview(into)) == 0
    assert await operations.read(fd, 1 << 40, memoryview(into)) == 0
    assert await operations.read(fd, 0, memoryview(bytearray())) == 0
    await operations.write(fd, 0, memoryview(b""))


@on_loop
async def test_direct_io(runner: asyncio.Runner, operations: Operations, tmp_path: Path) -> None:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT on {tmp_path}: {error}")
    try:
        with mmap.mmap(-1, CHUNK) as memory, memoryview(memory) as view:
            view[:] = os.urandom(CHUNK)
            expected = bytes(view)
            await operations.write(fd, 0, view)
            await operations.flush(fd)
            view[:] = bytes(CHUNK)
            assert await operations.read(fd, 0, view) == CHUNK
            assert view == expected
            os.truncate(tmp_path / "direct", CHUNK - 1000)  # ends inside a sector
            assert await operations.read(fd, 0, view) == CHUNK - 1000
    finally:
        os.close(fd)


@on_loop
async def test_buffers_of_other_items_are_bytes(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    numbers: Any = memoryview(bytearray(struct.pack("=4d", 1, 2, 3, 4))).cast("d")
    await operations.write(fd, 0, numbers)
    into: Any = memoryview(bytearray(32)).cast("d")
    assert await operations.read(fd, 0, into) == 32
    assert into == numbers
    assert await operations.checksum(numbers) == zlib.crc32(numbers)


@on_loop
async def test_errors_keep_their_number(runner: asyncio.Runner, operations: Operations, tmp_path: Path) -> None:
    async def fails_with(number: int, operation: Coroutine[Any, Any, Any]) -> None:
        with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
            await operation
        assert caught.value.errno == number

    closed = os.open(tmp_path, os.O_RDONLY)
    os.close(closed)
    await fails_with(errno.EBADF, operations.write(closed, 0, memoryview(b"x")))
    await fails_with(errno.EBADF, operations.read(closed, 0, memoryview(bytearray(1))))
    await fails_with(errno.EBADF, operations.flush(closed))
    full = os.open("/dev/full", os.O_RDWR)
    await fails_with(errno.ENOSPC, operations.write(full, 0, memoryview(b"x")))
    os.close(full)
    folder = os.open(tmp_path, os.O_RDONLY)
    await fails_with(errno.EISDIR, operations.read(folder, 0, memoryview(bytearray(1))))
    os.close(folder)
    receiver, sender = os.pipe()
    await fails_with(errno.EINVAL, operations.flush(sender))
    await fails_with(errno.ESPIPE, operations.write(sender, 0, memoryview(b"x")))
    os.close(receiver)
    os.close(sender)


@on_loop
async def test_batches_of_hundreds(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    pieces = [os.urandom(500) for _ in range(600)]
    async with asyncio.TaskGroup() as group:
        for n, piece in enumerate(pieces):
            group.create_task(operations.write(fd, n * 500, memoryview(piece)))
    buffers = [bytearray(500) for _ in pieces]
    reads = [operations.read(fd, n * 500, memoryview(buffer)) for n, buffer in enumerate(buffers)]
    sums = [operations.checksum(memoryview(piece)) for piece in pieces]
    results = await asyncio.gather(*reads, *sums)
    assert buffers == pieces
    assert results == [500] * 600 + [zlib.crc32(piece) for piece in pieces]


@on_loop
async def test_a_refusal_reaches_only_its_own(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    memory = bytearray(8)
    outcomes = await asyncio.gather(
        operations.write(fd, 0, memoryview(b"fine")),
        operations.write(fd, -1, memoryview(b"x")),
        operations.read(fd, 0, memoryview(b"read-only")),
        operations.gather(b"23 bytes make no tables", memoryview(memory)),
        operations.gather(table((1, 0, 9)), memoryview(memory)),
        operations.gather(table((1, 4, 2), (1, 3, 1)), memoryview(memory)),
        operations.gather(table((0, 0, 1)), memoryview(memory)),
        operations.gather(b"", memoryview(b"read-only")),
        operations.scatter(memoryview(memory), 0, table((1, 2**64 - 1, 2))),
        operations.checksum(memoryview(b"fine")),
        return_exceptions=True,
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds[0] is type(None)
    assert outcomes[-1] == zlib.crc32(b"fine")
    assert all(issubclass(kind, (ValueError, TypeError, BufferError)) for kind in kinds[1:-1]), outcomes
    assert os.pread(fd, 10, 0) == b"fine"


# ---- Memory


@on_loop
async def test_gather_zeroes_gaps_and_sums_everything(runner: asyncio.Runner, operations: Operations) -> None:
    source, into = bytearray(b"abcdefgh"), bytearray(b"\xff" * 40000)
    segments = table((address_of(source), 3, 4), (0, 7, 0), (address_of(source) + 4, 20000, 4))
    result = await operations.gather(segments, memoryview(into))
    expected = bytearray(40000)
    expected[3:7], expected[20000:20004] = b"abcd", b"efgh"
    assert into == expected
    assert result == zlib.crc32(expected)
    assert await operations.gather(b"", memoryview(into)) == zlib.crc32(bytes(40000))
    assert not any(into)
    assert await operations.gather(b"", memoryview(bytearray())) == 0


@on_loop
async def test_scatter_verifies_before_it_copies(runner: asyncio.Runner, operations: Operations) -> None:
    source = os.urandom(CHUNK)
    into = bytearray(100)
    segments = table((address_of(into), CHUNK - 50, 50), (address_of(into) + 50, CHUNK - 50, 50))
    with pytest.raises(OSError, match="checksum mismatch") as caught:
        await operations.scatter(memoryview(source), zlib.crc32(source) ^ 1, segments)
    assert caught.value.errno == errno.EBADMSG
    assert not any(into)
    await operations.scatter(memoryview(source), zlib.crc32(source), segments)
    assert into == source[-50:] * 2


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.tuples(st.integers(0, 40000), st.binary(max_size=300))), tail=st.integers(0, 40000))
def test_gather_and_scatter_do_what_slices_do(
    runner: asyncio.Runner, operations: Operations, pieces: list[tuple[int, bytes]], tail: int
) -> None:
    model, segments, sources = bytearray(), [], []
    for gap, piece in pieces:
        model += bytes(gap)
        sources.append(bytearray(piece + b"\0"))
        segments.append((address_of(sources[-1]), len(model), len(piece)))
        model += piece
    model += bytes(tail)

    into = bytearray(b"\xa5" * len(model))
    result = runner.run(operations.gather(table(*segments), memoryview(into), sources))
    assert into == model
    assert result == zlib.crc32(model)
    for source in sources:
        source[:] = bytes(len(source))
    runner.run(operations.scatter(memoryview(bytes(into)), result, table(*segments), sources))
    assert [source[:-1] for source in sources] == [piece for _, piece in pieces]


@pytest.mark.parametrize("align", range(17))
def test_checksum_is_zlibs(align: int) -> None:
    data = os.urandom(400)
    for length in range(301):
        view = memoryview(data)[align : align + length]
        for value in (0, 1, 0x80000000, 0xFFFFFFFF, 0x12345678):
            assert checksum.crc32(view, value) == zlib.crc32(view, value)


@given(st.binary(max_size=5000), st.integers(0, 2**32 - 1), st.data())
def test_checksum_continues(content: bytes, value: int, data: st.DataObject) -> None:
    split = data.draw(st.integers(0, len(content)))
    assert checksum.crc32(content, value) == zlib.crc32(content, value)
    assert checksum.crc32(content[split:], checksum.crc32(content[:split], value)) == zlib.crc32(content, value)


# ---- Cancellation, lifetime (invariant I9)


@on_loop
async def test_cancelling_waits_for_what_runs(
    runner: asyncio.Runner, operations: Operations, stuck: StuckPages
) -> None:
    owner = Owner()
    watch = weakref.ref(owner)
    into = memoryview(bytearray(CHUNK))
    segments = table((address_of(stuck.memory), 0, CHUNK))
    task = asyncio.create_task(operations.gather(segments, into, owner))
    del owner
    await stuck.touched()
    task.cancel()
    await let_others_run()
    task.cancel()  # impatience changes nothing
    await let_others_run()
    assert not task.done()
    assert operations.running == 1
    assert watch() is not None
    stuck.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operations.running == 0
    del task  # its traceback holds the frames that the arguments are in
    await let_others_run()
    gc.collect()
    assert watch() is None
    into.release()  # raises while anything uses it


@on_loop
async def test_cancelling_drops_what_has_not_started(
    runner: asyncio.Runner, operations: Operations, stuck: StuckPages
) -> None:
    first = asyncio.create_task(operations.checksum(stuck.view))
    await stuck.touched()
    content = bytearray(100)
    view = memoryview(content)
    second = asyncio.create_task(operations.checksum(view))
    third = asyncio.create_task(operations.checksum(memoryview(b"third")))
    await let_others_run()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    view.release()
    content.append(1)  # a bytearray that is in use cannot grow
    assert not first.done()
    stuck.let_go()
    assert await first == zlib.crc32(bytes(CHUNK))
    assert await third == zlib.crc32(b"third")


@on_loop
async def test_cancelling_before_submission(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    task = asyncio.create_task(operations.write(fd, 0, memoryview(b"x")))
    asyncio.get_running_loop().call_soon(
        task.cancel
    )  # ahead of the batch, which the task's first step queues behind it
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operations.running == 0


@on_loop
async def test_keepalives_end_with_their_operation(runner: asyncio.Runner, operations: Operations) -> None:
    owners = [Owner() for _ in range(2)]
    watches = [weakref.ref(owner) for owner in owners]
    data = bytearray(CHUNK)
    result = await operations.gather(b"", memoryview(data), owners[0])
    await operations.scatter(memoryview(data), result, b"", owners[1])
    del owners
    assert [watch() for watch in watches] == [None, None]
    data.append(0)


@on_loop
async def test_close_waits_for_what_runs(runner: asyncio.Runner, operations: Operations, stuck: StuckPages) -> None:
    running = asyncio.create_task(operations.checksum(stuck.view))
    queued = asyncio.create_task(operations.checksum(memoryview(b"queued")))
    await stuck.touched()
    closing = asyncio.create_task(operations.close())
    await let_others_run()
    assert not closing.done()
    with pytest.raises(OSError, match="closed"):
        await operations.checksum(memoryview(b"late"))
    closing.cancel()  # stops the waiting only
    with pytest.raises(asyncio.CancelledError):
        await closing
    stuck.let_go()
    await operations.close()
    assert await running == zlib.crc32(bytes(CHUNK))
    assert await queued == zlib.crc32(b"queued")
    await operations.close()


@on_loop
async def test_calls(runner: asyncio.Runner, operations: Operations) -> None:
    assert await operations.call(divmod, 7, 2) == (3, 1)
    assert await operations.call(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await operations.call(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await operations.call(next, iter(()))


def test_nothing_leaks(runner: asyncio.Runner, engine: Callable[..., Operations], fd: int) -> None:
    async def use() -> None:
        operations = engine(io_threads=3, copy_threads=2)
        await asyncio.gather(*(operations.write(fd, 0, memoryview(b"x")) for _ in range(20)))
        await operations.close()

    runner.run(use())
    threads, fds = threads_now(), fds_now()
    for _ in range(5):
        runner.run(use())
    assert fds_now() <= fds
    assert threads_settle_at(threads)


def rings_now() -> tuple[int, int]:
    """Descriptors and mappings of rings; uvloop may have one, too."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is gone
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links.count("anon_inode:[io_uring]"), Path("/proc/self/maps").read_text().count("[io_uring]")


def in_forked_child(body: Callable[[], None]) -> int:
    """Run ``body`` in a forked child; return its exit status: 0 where it returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: what this is about
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@on_loop
async def test_worker_threads_are_not_in_a_forked_child(runner: asyncio.Runner) -> None:
    workers = WorkerThreads(asyncio.get_running_loop(), lambda *_: None, count=1, name="test")

    def child() -> None:
        with pytest.raises(RuntimeError, match="forked"):
            workers.submit([(1, print, ())])
        workers.close()

    assert in_forked_child(child) == 0
    workers.close()


@on_loop
async def test_a_forked_child_inherits_no_ring(runner: asyncio.Runner, engine: Callable[..., Operations]) -> None:
    def child() -> None:
        assert rings_now() == before

    before = rings_now()
    operations = engine(io_threads=1, copy_threads=1)
    assert (rings_now() != before) == (operations.name == "io_uring")
    assert in_forked_child(child) == 0
    await operations.close()
    assert rings_now() == before


@pytest.fixture
def room_for_threads() -> Iterator[Callable[[int], None]]:
    """Limit how many more threads find room for their stacks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    stack = threading.stack_size(1 << 30)

    def limit(count: int) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (count << 30) + (1 << 29), hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    threading.stack_size(stack)


@on_loop
async def test_threads_that_cannot_all_be_started_are_not_left(
    runner: asyncio.Runner, engine: Callable[..., Operations], room_for_threads: Callable[[int], None]
) -> None:
    before, refused = threading.active_count(), 0
    for count in range(7):
        room_for_threads(count)
        try:
            operations = engine(io_threads=2, copy_threads=2)
        except RuntimeError:
            refused += 1
        else:
            await operations.close()
        assert threading.active_count() <= before
    assert refused


def test_python_waits_where_a_device_is_out_of_requests(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the extension does (``tests/c/test_transfer.c``): no file here answers EAGAIN when asked to."""
    answers = iter([errno.EAGAIN, 0, errno.EAGAIN, errno.EAGAIN, 0])

    def busy(move: Callable[..., int]) -> Callable[..., int]:
        def moved(*arguments: Any) -> int:
            if number := next(answers):
                raise OSError(number, os.strerror(number))
            return move(*arguments)

        return moved

    monkeypatch.setattr(os, "pwrite", busy(os.pwrite))
    monkeypatch.setattr(os, "preadv", busy(os.preadv))
    python.write_all(fd, 0, memoryview(b"data"))
    into = bytearray(4)
    assert python.read_all(fd, 0, memoryview(into)) == 4
    assert into == b"data"
    assert next(answers, None) is None
    answers = itertools.repeat(errno.EAGAIN)
    with pytest.raises(BlockingIOError):
        python.write_all(fd, 0, memoryview(b"data"))


# ---- The extension's own contracts

if native.available():
    from pccheck_async import _ext

    @pytest.fixture(params=["threads", "io_uring"])
    def kind(request: pytest.FixtureRequest) -> str:
        name: str = request.param
        need(name)
        return name

    @pytest.fixture
    def queue(kind: str) -> Iterator[_ext.Queue]:
        queue = _ext.Queue(2, 1, kind)
        yield queue
        queue.close()

    def reap(queue: _ext.Queue, count: int) -> dict[int, tuple[int, Any]]:
        ended: dict[int, tuple[int, Any]] = {}
        while len(ended) < count:
            select.select([queue], [], [])
            ended |= {token: (result, found) for token, result, found in queue.reap()}
        return ended

    def is_readable(queue: _ext.Queue) -> bool:
        return bool(select.select([queue], [], [], 0)[0])

    def test_completions_arrive_on_the_eventfd(queue: _ext.Queue) -> None:
        assert queue.reap() == []
        queue.submit([(2**64 - 1, _ext.CHECKSUM, b"abc"), (7, _ext.FLUSH, -1)])
        assert queue.running == 2
        assert reap(queue, 2) == {2**64 - 1: (0, zlib.crc32(b"abc")), 7: (-errno.EBADF, None)}
        assert queue.running == 0
        assert not is_readable(queue)

    @pytest.mark.parametrize(
        "bad",
        [
            None,
            (),
            (1,),
            (1, 99),
            (1, "0"),
            (-1, _ext.FLUSH, 0),
            (2**64, _ext.FLUSH, 0),
            (1, _ext.FLUSH),
            (1, _ext.FLUSH, 2**40),
            (1, _ext.WRITE, 0, -1, b""),
            (1, _ext.WRITE, 0, 2**63 - 1, b"x"),
            (1, _ext.WRITE, 0, 0, "text"),
            (1, _ext.WRITE, 0, 0, memoryview(b"strided")[::2]),
            (1, _ext.READ, 0, 0, b"constant"),
            (1, _ext.GATHER, bytearray(24), bytearray(8), None),
            (1, _ext.GATHER, bytes(23), bytearray(8), None),
            (1, _ext.GATHER, table((1, 0, 9)), bytearray(8), None),
            (1, _ext.GATHER, table((2**64 - 1, 0, 2)), bytearray(8), None),
            (1, _ext.SCATTER, b"", 2**32, b"", None),
            (1, _ext.SCATTER, b"", -1, b"", None),
            (1, _ext.SCATTER, b"8 bytes.", 0, table((1, 8, 1)), None),
            (1, _ext.UNLOCK, 0),
            (1, _ext.LINKED, 0),
            (1, _ext.CHAIN, ()),
            (1, _ext.CHAIN, [(_ext.FLUSH, 0)]),
            (1, _ext.CHAIN, ((_ext.WRITE, 0, 0, bytearray(1)), (_ext.FLUSH,))),
            (1, _ext.CHAIN, ((_ext.FLUSH, 0), ())),
            (1, _ext.CHAIN, ((_ext.FLUSH, 0), None)),
            (1, _ext.CHAIN, ((_ext.FLUSH, 0), ("0",))),
            (1, _ext.CHAIN, ((_ext.WRITE, 0, -1, b""),)),
            (1, _ext.CHAIN, ((_ext.WRITE, 0, 2**63 - 1, b"x"),)),
            (1, _ext.CHAIN, ((_ext.FLUSH, 0), (_ext.READ, 0, 0, bytearray(1)))),
            (1, _ext.CHAIN, ((_ext.CHAIN, ((_ext.FLUSH, 0),)),)),
        ],
    )
    def test_a_batch_is_all_or_nothing(queue: _ext.Queue, bad: Any) -> None:
        data, owner = bytearray(10), Owner()
        watch = weakref.ref(owner)
        good = (1, _ext.GATHER, b"", data, owner)
        with pytest.raises((ValueError, TypeError, BufferError, OverflowError)):
            queue.submit([good, bad])
        assert queue.running == 0
        assert not is_readable(queue)
        data.append(1)
        del good, owner
        assert watch() is None

    def test_chains_do_not_nest_however_deep(queue: _ext.Queue) -> None:
        steps: tuple[Any, ...] = ()
        for _ in range(200_000):  # too deep for a C stack
            steps = ((_ext.CHAIN, steps),)
        with pytest.raises(ValueError, match="a chain is made of"):
            queue.submit([(1, _ext.CHAIN, steps)])

    def test_kinds_are_those_of_the_extension() -> None:
        assert {kind.name: int(kind) for kind in Kind} == {kind.name: getattr(_ext, kind.name) for kind in Kind}

    def test_an_operation_is_of_the_kind_that_was_checked(queue: _ext.Queue) -> None:
        class Fickle:
            kinds = iter((_ext.CHECKSUM, _ext.CHAIN))

            def __index__(self) -> int:
                return next(self.kinds)

        queue.submit([(1, Fickle(), b"abc")])  # type: ignore[list-item]
        assert reap(queue, 1) == {1: (0, zlib.crc32(b"abc"))}

    def test_buffers_are_held_until_reaped(queue: _ext.Queue) -> None:
        data, owner = bytearray(100), Owner()
        watch = weakref.ref(owner)
        queue.submit([(1, _ext.GATHER, b"", data, owner)])
        del owner
        select.select([queue], [], [])
        with pytest.raises(BufferError):
            data.append(1)
        assert watch() is not None
        queue.reap()
        data.append(1)
        assert watch() is None

    def test_reaping_may_call_the_queue_again(queue: _ext.Queue) -> None:
        class Submits:
            def __del__(self) -> None:
                queue.submit([(2, _ext.CHECKSUM, b"again")])
                queue.reap()

        queue.submit([(1, _ext.GATHER, b"", bytearray(8), Submits())])
        assert 1 in reap(queue, 1)

    def test_cancelled_in_the_kernel() -> None:
        need("io_uring")  # which alone reads from an eventfd, and waits there as long as the test wants
        queue = _ext.Queue(2, 1, "io_uring")
        fd, into = os.eventfd(0), bytearray(8)
        queue.submit([(token, _ext.READ, fd, 0, into) for token in range(4)])
        ended: dict[int, int] = {}
        while len(ended) < 4:
            for token in range(4):  # again and again: the kernel misses what is just changing hands there
                queue.cancel(token)
            select.select([queue], [], [], 0.001)
            ended |= {token: result for token, result, _ in queue.reap()}
        assert set(ended.values()) == {-errno.ECANCELED}
        into.append(0)  # nothing uses it
        os.eventfd_write(fd, 7)
        assert os.eventfd_read(fd) == 7  # nobody else reads there any more
        assert not any(into)
        os.close(fd)
        queue.close()

    def test_closed_queue(queue: _ext.Queue) -> None:
        data = bytearray(10)
        queue.submit([(n, _ext.CHECKSUM, data) for n in range(100)])
        queue.close()
        queue.close()
        for call in (queue.fileno, lambda: queue.submit([]), lambda: queue.cancel(1)):
            with pytest.raises(ValueError, match="closed"):
                call()
        ended = queue.reap()
        assert sorted(token for token, *_ in ended) == list(range(100))
        assert {result for _, result, _ in ended} <= {0, -errno.ECANCELED}
        data.append(1)
        assert queue.reap() == []

    def test_wrong_arguments() -> None:
        for arguments in ((0, 1), (1, 0), (-1, 1), (257, 1), (1, 1, "no such engine")):
            with pytest.raises(ValueError, match=r"threads|engine"):
                _ext.Queue(*arguments)
        with pytest.raises(TypeError):
            _ext.Queue()  # type: ignore[call-arg]

    class Table(bytes):
        queue: _ext.Queue

    class Buffer(bytearray):
        queue: _ext.Queue

    @pytest.mark.parametrize("through", ["segments", "buffer", "keepalive", "step"])
    def test_forgotten_queues_close_with_a_warning(kind: str, through: str, fd: int) -> None:
        gc.collect()  # what earlier tests left says nothing here
        threads, fds = threads_now(), fds_now()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            queue = _ext.Queue(2, 2, kind)
            table, buffer, keepalive = Table(), Buffer(CHUNK), Owner()
            batch: dict[str, tuple[Any, Any]] = {
                "segments": (table, (1, _ext.GATHER, table, bytearray(CHUNK), None)),
                "buffer": (buffer, (1, _ext.GATHER, b"", buffer, None)),
                "keepalive": (keepalive, (1, _ext.GATHER, b"", bytearray(CHUNK), keepalive)),
                "step": (buffer, (1, _ext.CHAIN, ((_ext.WRITE, fd, 0, buffer),))),
            }
            owner, operation = batch[through]
            owner.queue = queue  # only the garbage collector finds it
            queue.submit([operation])
            del queue, table, buffer, keepalive, batch, owner, operation
            gc.collect()
        assert [warning.category for warning in caught] == [ResourceWarning]
        assert fds_now() <= fds
        assert threads_settle_at(threads)

    def forgotten(kind: str) -> list[Owner]:
        """A queue in a cycle, which alone holds a view that is older: the garbage collector comes to the view first."""
        view, owner = memoryview(bytearray(CHUNK)), Owner()
        queue = _ext.Queue(1, 1, kind)
        owner.queue = queue  # type: ignore[attr-defined]
        queue.submit([(1, _ext.GATHER, b"", view, owner)])
        return [owner]

    @pytest.mark.parametrize("closed", [False, True])
    def test_a_forgotten_queue_lets_go_of_views_in_time(kind: str, closed: bool) -> None:
        def child() -> None:  # it would crash
            [owner] = forgotten(kind)
            if closed:
                owner.queue.close()  # type: ignore[attr-defined]
            del owner
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()

        assert in_forked_child(child) == 0

    def test_a_forked_child_keeps_what_the_queue_holds(kind: str) -> None:
        gc.collect()  # what earlier tests left says nothing in the child
        owners, unraisable = forgotten(kind), list[object]()
        queue = owners[0].queue  # type: ignore[attr-defined]

        def child() -> None:
            nonlocal queue
            sys.unraisablehook = unraisable.append
            owners.clear()
            del queue
            gc.collect()
            assert not unraisable

        assert in_forked_child(child) == 0
        queue.close()
        queue.reap()

    def test_forked_children_cannot_use_it(kind: str) -> None:
        before = rings_now()
        queue = _ext.Queue(2, 1, kind)
        data = bytearray(CHUNK)
        queue.submit([(n, _ext.CHECKSUM, data) for n in range(50)])  # some run while the child is made

        def child() -> None:
            for call in (queue.fileno, queue.reap, lambda: queue.submit([]), lambda: queue.cancel(1)):
                with pytest.raises(RuntimeError, match="forked"):
                    call()
            queue.close()
            queue.close()
            assert rings_now() == before
            other = _ext.Queue(1, 1, kind)  # its own works
            other.submit([(1, _ext.CHECKSUM, b"child")])
            assert reap(other, 1) == {1: (0, zlib.crc32(b"child"))}
            other.close()

        assert in_forked_child(child) == 0
        assert len(reap(queue, 50)) == 50
        queue.close()

    @on_loop
    async def test_a_child_forked_while_a_ring_is_made_does_not_inherit_it(
        runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need("io_uring")
        make, exits, before = _ext.Queue, list[int](), rings_now()

        def child() -> None:
            assert rings_now() == before

        forking = threading.Thread(target=lambda: exits.append(in_forked_child(child)))

        def make_while_another_forks(*arguments: Any) -> _ext.Queue:
            queue = make(*arguments)
            forking.start()
            forking.join(0.2)  # where it does not wait for the engine, it is through by then
            return queue

        monkeypatch.setattr(_ext, "Queue", make_while_another_forks)
        operations = ENGINES["io_uring"](io_threads=1, copy_threads=1)
        forking.join()
        await operations.close()
        assert exits == [0]

    def test_a_forked_child_forgets_a_queue_without_hanging(kind: str) -> None:
        queues = [_ext.Queue(1, 1, kind)]
        queues[0].submit([(n, _ext.CHECKSUM, bytes(CHUNK)) for n in range(10)])

        def child() -> None:
            queues.clear()
            gc.collect()

        assert in_forked_child(child) == 0
        queues[0].close()

    def test_other_interpreters_have_their_own(kind: str) -> None:
        # In a process of its own: before Python 3.12, torch's backward() fails for ever where one had a second one.
        pytest.importorskip("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
        inner = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("pccheck_async._ext", {_ext.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
queue = module.Queue(1, 1, {kind!r})
queue.submit([(1, module.CHECKSUM, b"abc")])
queue.close()
assert len(queue.reap()) == 1
"""
        outer = f"""
import sys
interpreters = __import__("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
interpreter = interpreters.create()
assert not interpreters.run_string(interpreter, {inner!r})
interpreters.destroy(interpreter)
"""
        subprocess.run([sys.executable, "-c", outer], check=True, timeout=600)

    def test_alignment_of_direct_io(tmp_path: Path) -> None:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        found = _ext.dio_alignment(fd)
        os.close(fd)
        if found is not None:
            assert all(n & (n - 1) == 0 for n in found)
        with pytest.raises(OSError, match="descriptor"):
            _ext.dio_alignment(fd)
        receiver, sender = os.pipe()
        assert _ext.dio_alignment(receiver) is None
        os.close(receiver)
        os.close(sender)

    def test_checksum_wraps_like_zlib_and_names_its_implementation() -> None:
        assert _ext.crc32(b"x", -1) == zlib.crc32(b"x", -1)
        assert _ext.crc32(b"x", 2**40 + 5) == zlib.crc32(b"x", 2**40 + 5)
        assert _ext.crc32(bytes(CHUNK)) == zlib.crc32(bytes(CHUNK))
        assert checksum.IMPLEMENTATION == _ext.CRC_IMPLEMENTATION
        assert checksum.IMPLEMENTATION in {"vpclmulqdq", "pclmulqdq", "arm64", "table"}

    @on_loop
    async def test_no_room_for_threads_is_said(runner: asyncio.Runner, room_for_threads: Callable[[int], None]) -> None:
        threading.stack_size(1 << 18)  # those of Python find room, those of C take what ulimit -s says
        room_for_threads(0)
        with pytest.raises(RuntimeError, match="can't start new threads: see ulimit -u"):
            native.NativeOperations(io_threads=1, copy_threads=256)

else:

    @pytest.mark.skip(reason="the extension was not built")
    def test_extension() -> None:
        """Stands for all that follows above, so that a run without them says so."""


def test_python_takes_a_write_that_moves_nothing_for_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the extension does (``tests/c/test_transfer.c``)."""

    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with (tmp_path / "f").open("wb") as file, pytest.raises(OSError, match="Input/output") as failed:
        python.write_all(file.fileno(), 0, memoryview(b"data"))
    assert failed.value.errno == errno.EIO
