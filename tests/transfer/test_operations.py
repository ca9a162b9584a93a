"""One conformance suite for both backends, on all loops."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import gc
import itertools
import mmap
import os
import platform
import random
import re
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pccheck_async.format import checksum, combine
from pccheck_async.transfer.operations import ChainStep, Kind, Operations, Step, python
from pccheck_async.transfer.operations.worker_threads import WorkerThreads
from tests.fixtures import BACKENDS
from tests.support.processes import passes_in_a_forked_child
from tests.transfer.conftest import CHUNK, Owner, address_of, fds_now, on_loop, table, threads_fall_to, threads_now

MIB = 1 << 20


def sums_of(data: bytes | bytearray) -> bytes:
    """Return the checksums of each MiB, as the extension and its fallback have to compute them."""
    return b"".join(struct.pack("<I", zlib.crc32(data[at : at + MIB])) for at in range(0, len(data), MIB))


@pytest.fixture
def backend(io: str) -> Callable[..., Operations]:
    return BACKENDS[io]


@pytest.fixture
def operations(runner: asyncio.Runner, backend: Callable[..., Operations]) -> Iterator[Operations]:
    """A backend with a single copying thread, so that a test can keep it busy."""

    async def create() -> Operations:
        return backend(io_threads=2, copy_threads=1)

    operations = runner.run(create())
    yield operations
    runner.run(operations.close())
    assert operations.running == 0


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
    pages.let_go()  # before the backend, which this fixture depends on, is closed


async def started(operation: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Start an operation in the task that awaits it."""
    return await operation(*arguments)


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
    for impossible in ([good, (Kind.READ, fd, 0, bytearray(1))], []):
        with pytest.raises(ValueError, match="a chain"):
            await operations.chain(impossible, [])
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
    sums = operations.gather_at_once(segments, memoryview(one))
    assert sums == await operations.gather(segments, memoryview(other)) == sums_of(one)
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
    assert await operations.checksums(numbers) == sums_of(bytes(numbers))


@on_loop
async def test_errors_keep_their_number(runner: asyncio.Runner, operations: Operations, tmp_path: Path) -> None:
    async def fails_with(number: int, operation: Awaitable[Any]) -> None:
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
            group.create_task(started(operations.write, fd, n * 500, memoryview(piece)))
    buffers = [bytearray(500) for _ in pieces]
    reads = [operations.read(fd, n * 500, memoryview(buffer)) for n, buffer in enumerate(buffers)]
    sums = [operations.checksums(memoryview(piece)) for piece in pieces]
    results = await asyncio.gather(*reads, *sums)
    assert buffers == pieces
    assert results == [500] * 600 + [sums_of(piece) for piece in pieces]


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
        operations.checksums(memoryview(b"fine")),
        return_exceptions=True,
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert not issubclass(kinds[0], Exception)
    assert outcomes[-1] == sums_of(b"fine")
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
    assert result == sums_of(expected)
    assert await operations.gather(b"", memoryview(into)) == sums_of(bytes(40000))
    assert not any(into)
    assert await operations.gather(b"", memoryview(bytearray())) == b""


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


@pytest.mark.slow
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
    result = runner.run(started(operations.gather, table(*segments), memoryview(into), sources))
    assert into == model
    assert result == sums_of(model)
    for source in sources:
        source[:] = bytes(len(source))
    runner.run(started(operations.scatter, memoryview(bytes(into)), zlib.crc32(model), table(*segments), sources))
    assert [source[:-1] for source in sources] == [piece for _, piece in pieces]


@on_loop
async def test_gather_has_a_checksum_for_each_mebibyte(runner: asyncio.Runner, operations: Operations) -> None:
    """Segments and gaps that reach over the borders of MiBs, from sources at any address."""
    source = os.urandom(5 * MIB)
    owner = memoryview(bytearray(source))
    parts = [(0, 7), (3000, MIB - 2990), (2 * MIB + 1, MIB - 1), (3 * MIB, 100), (4 * MIB - 5, MIB // 2), (5 * MIB, 9)]
    for shift in (0, 1, 20):
        into, model = bytearray(b"\xa5" * (5 * MIB + 1024)), bytearray(5 * MIB + 1024)
        for offset, length in parts:
            model[offset : offset + length] = source[shift : shift + length]
        rows = table(*((address_of(owner) + shift, offset, length) for offset, length in parts))
        sums = await operations.gather(rows, memoryview(into), owner)
        assert into == model
        assert sums == sums_of(model) == await operations.checksums(memoryview(into))
        assert combine(sums, len(model)) == zlib.crc32(model)


COMBINES = {"python": checksum.combine_in_python, "chosen": combine}
SUMS = {"python": checksum.piece_sums_in_python, "chosen": checksum.piece_sums}


@settings(max_examples=30)
@given(
    count=st.integers(0, 3),
    rest=st.one_of(st.just(0), st.integers(1, 2048).map(lambda blocks: 512 * blocks), st.integers(0, MIB)),
    seed=st.integers(0, 2**32),
)
@pytest.mark.parametrize("how", COMBINES)
def test_checksums_of_pieces_combine_to_that_of_all(how: str, count: int, rest: int, seed: int) -> None:
    data = random.Random(seed).randbytes(count * MIB + rest)
    sums = SUMS[how](data)
    assert sums == sums_of(data)
    assert COMBINES[how](sums, len(data)) == zlib.crc32(data)
    first, last = sorted((seed % (count + 1), (seed >> 8) % (count + 1)))
    some = data[first * MIB : last * MIB]  # of any MiBs that lie beside each other
    assert COMBINES[how](sums[4 * first : 4 * last], len(some)) == zlib.crc32(some)


@pytest.mark.parametrize("how", COMBINES)
def test_tables_of_another_length_are_refused(how: str) -> None:
    for length, nbytes in ((0, 1), (4, 0), (4, MIB + 1), (8, MIB), (3, 1), (4, 2**63)):
        with pytest.raises(ValueError, match="no table of checksums"):
            COMBINES[how](bytes(length), nbytes)
    for nbytes in (-1, -MIB):
        with pytest.raises(ValueError, match=r"no table of checksums|negative"):
            COMBINES[how](b"", nbytes)


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
    task = asyncio.create_task(started(operations.gather, segments, into, owner))
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
    first = asyncio.create_task(started(operations.checksums, stuck.view))
    await stuck.touched()
    content = bytearray(100)
    view = memoryview(content)
    second = asyncio.create_task(started(operations.checksums, view))
    third = asyncio.create_task(started(operations.checksums, memoryview(b"third")))
    await let_others_run()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    view.release()
    content.append(1)  # a bytearray that is in use cannot grow
    assert not first.done()
    stuck.let_go()
    assert await first == sums_of(bytes(CHUNK))
    assert await third == sums_of(b"third")


@on_loop
async def test_cancelling_before_submission(runner: asyncio.Runner, operations: Operations, fd: int) -> None:
    task = asyncio.create_task(started(operations.write, fd, 0, memoryview(b"x")))
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
    await operations.scatter(memoryview(data), combine(result, CHUNK), b"", owners[1])
    del owners
    assert [watch() for watch in watches] == [None, None]
    data.append(0)


@on_loop
async def test_close_waits_for_what_runs(runner: asyncio.Runner, operations: Operations, stuck: StuckPages) -> None:
    running = asyncio.create_task(started(operations.checksums, stuck.view))
    queued = asyncio.create_task(started(operations.checksums, memoryview(b"queued")))
    await stuck.touched()
    closing = asyncio.create_task(operations.close())
    await let_others_run()
    assert not closing.done()
    with pytest.raises(OSError, match="closed"):
        await operations.checksums(memoryview(b"late"))
    closing.cancel()  # stops the waiting only
    with pytest.raises(asyncio.CancelledError):
        await closing
    stuck.let_go()
    await operations.close()
    assert await running == sums_of(bytes(CHUNK))
    assert await queued == sums_of(b"queued")
    await operations.close()


@on_loop
async def test_calls(runner: asyncio.Runner, operations: Operations) -> None:
    assert await operations.call(divmod, 7, 2) == (3, 1)
    assert await operations.call(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await operations.call(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await operations.call(next, iter(()))


@on_loop
async def test_what_a_cancelled_call_obtained_is_given_back(runner: asyncio.Runner, operations: Operations) -> None:
    """A file that is forgotten keeps its lock."""
    started, go, given_back = threading.Event(), threading.Event(), list[int]()

    def obtain() -> int:
        started.set()
        go.wait(60)
        return 7

    call = asyncio.create_task(operations.obtain(given_back.append, obtain))
    assert await operations.call(started.wait, 60)
    call.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert given_back == [7]


def test_nothing_leaks(runner: asyncio.Runner, backend: Callable[..., Operations], fd: int) -> None:
    async def use() -> None:
        operations = backend(io_threads=3, copy_threads=2)
        await asyncio.gather(*(operations.write(fd, 0, memoryview(b"x")) for _ in range(20)))
        await operations.close()

    runner.run(use())
    threads, fds = threads_now(), fds_now()
    for _ in range(5):
        runner.run(use())
    assert fds_now() <= fds
    assert threads_fall_to(threads)


@on_loop
async def test_worker_threads_are_not_in_a_forked_child(runner: asyncio.Runner) -> None:
    workers = WorkerThreads(asyncio.get_running_loop(), lambda *_: None, count=1, name="test")

    def child() -> None:
        with pytest.raises(RuntimeError, match="forked"):
            workers.submit([(1, print, ())])
        workers.close()

    assert passes_in_a_forked_child(child)
    workers.close()


@on_loop
async def test_threads_that_cannot_all_be_started_are_not_left(
    runner: asyncio.Runner, backend: Callable[..., Operations], room_for_threads: Callable[[int], None]
) -> None:
    before, refused = threading.active_count(), 0
    for count in range(7):
        room_for_threads(count)
        try:
            operations = backend(io_threads=2, copy_threads=2)
        except RuntimeError:
            refused += 1
        else:
            await operations.close()
        assert threading.active_count() <= before
    assert refused


@pytest.mark.slow
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


def test_python_takes_a_write_that_moves_nothing_for_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the extension does (``tests/c/test_transfer.c``)."""

    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with (tmp_path / "f").open("wb") as file, pytest.raises(OSError, match="Input/output") as failed:
        python.write_all(file.fileno(), 0, memoryview(b"data"))
    assert failed.value.errno == errno.EIO
