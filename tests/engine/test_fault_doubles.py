from __future__ import annotations

import asyncio
import errno
import random
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.errors import ClosedError, ReadError, StoreFullError, WriteError
from pccheck_async.medium import File, StepwiseMedium
from pccheck_async.testing import (
    Access,
    CrashDisk,
    CrashWriter,
    DiskSnapshot,
    FailingWriter,
    Image,
    ImageWriter,
    StuckWriter,
    ThrottledWriter,
    power_loss_images,
)

T = TypeVar("T")
BLOCK = 512


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def small_disk(observer: Callable[[DiskSnapshot], None] | None = None) -> CrashDisk:
    return CrashDisk(block_bytes=BLOCK, observer=observer)


def block(fill: int, blocks: int = 1) -> memoryview:
    return memoryview(bytearray([fill]) * BLOCK * blocks)


def images(snapshot: DiskSnapshot, *, sector: int = BLOCK, limit: int = 256) -> list[dict[str, bytes]]:
    return [dict(image.files) for image in power_loss_images(snapshot, sector=sector, limit=limit)]


async def durable_file(writer: StepwiseMedium, name: str = "a", blocks: int = 2) -> File:
    file = await writer.reserve(name, blocks * BLOCK)
    await writer.write(file, 0, block(1, blocks))
    await writer.flush(file)
    await writer.sync_names()
    return file


# -- contents, volatile and durable


def test_what_is_flushed_and_named_survives_and_nothing_else_must() -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer)
        await writer.write(file, BLOCK, block(2))

    run(use())
    before, after = bytes(block(1, 2)), bytes(block(1)) + bytes(block(2))
    assert disk.contents() == {"a": after}
    assert images(disk.snapshot()) == [{"a": before}, {"a": after}]


def test_flush_does_not_make_the_name_durable() -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk)
        await writer.flush(await writer.reserve("a", BLOCK))

    run(use())
    assert images(disk.snapshot()) == [{}, {"a": bytes(BLOCK)}]


def test_sync_names_does_not_make_bytes_or_size_durable() -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await writer.reserve("a", 2 * BLOCK)
        await writer.write(file, 0, block(1))
        await writer.sync_names()

    run(use())
    found = {image["a"] for image in images(disk.snapshot())}
    assert {b"", bytes(2 * BLOCK), bytes(block(1)) + bytes(BLOCK), bytes(block(1))} <= found
    assert all(len(content) <= 2 * BLOCK for content in found)


def test_flush_covers_only_what_was_complete_when_it_was_submitted() -> None:
    snapshots: list[DiskSnapshot] = []
    disk = small_disk(snapshots.append)

    async def use() -> None:
        file = await durable_file(CrashWriter(disk, turns=0))
        inode = disk.find("a")
        late = disk.submit_write(inode, 0, bytes(block(7)))
        covered = disk.submit_flush(inode)
        disk.complete_write(inode, late, bytes(block(7)))
        disk.complete_flush(inode, covered)
        assert file.nbytes == 2 * BLOCK

    run(use())
    assert {image["a"][0] for image in images(disk.snapshot())} == {1, 7}


def test_a_replaced_file_is_the_old_one_or_the_new_one() -> None:
    snapshots: list[DiskSnapshot] = []
    disk = small_disk(snapshots.append)

    async def use() -> None:
        writer = CrashWriter(disk)
        await writer.replace("s", b"old")
        snapshots.clear()
        await writer.replace("s", b"newer")

    run(use())
    assert images(disk.snapshot()) == [{"s": b"newer"}]
    found = [image for snapshot in snapshots for image in images(snapshot)]
    assert {image["s"] for image in found} == {b"old", b"newer"}
    assert {image.get("s.new") for image in found} >= {None, b"", b"newer"}


def test_an_old_file_that_is_kept_is_never_lost() -> None:
    snapshots: list[DiskSnapshot] = []
    disk = small_disk(snapshots.append)

    async def use() -> None:
        writer = CrashWriter(disk)
        await writer.replace("s", b"old")
        snapshots.clear()
        await writer.replace("s", b"newer", keep_as="kept")

    run(use())
    assert images(disk.snapshot()) == [{"s": b"newer", "kept": b"old"}]
    assert all(b"old" in image.values() for snapshot in snapshots for image in images(snapshot))


def test_later_changes_of_a_name_come_with_earlier_ones() -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk)
        await durable_file(writer)
        await writer.remove("a")
        await writer.flush(await writer.reserve("a", BLOCK))
        await writer.flush(await writer.reserve("other", BLOCK))

    run(use())
    without = [{"a": bytes(block(1, 2))}, {}, {"a": bytes(BLOCK)}]
    found = images(disk.snapshot())
    assert all(image in found for image in without + [{**image, "other": bytes(BLOCK)} for image in without])
    assert len(found) == 6


def test_all_subsets_of_few_writes_are_enumerated_first_none_then_all() -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer, blocks=6)
        for position in range(6):
            await writer.write(file, position * BLOCK, block(2))

    run(use())
    found = ["".join(str(image["a"][position * BLOCK]) for position in range(6)) for image in images(disk.snapshot())]
    assert found[:2] == ["111111", "222222"]
    assert len(set(found)) == 2**6


@pytest.mark.parametrize(("sector", "whole"), [(BLOCK, False), (4096, True)])
def test_writes_tear_at_sectors(sector: int, whole: bool) -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer, blocks=8)
        await writer.write(file, 0, block(2, 8))

    run(use())
    found = {image["a"] for image in images(disk.snapshot(), sector=sector)}
    assert all(
        len(set(content[start : start + BLOCK])) == 1 for content in found for start in range(0, 8 * BLOCK, BLOCK)
    )
    assert len(found) == 2 if whole else len(found) > 30


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("wf"), st.integers(0, 3), st.integers(1, 250)), max_size=12), st.integers())
def test_every_block_of_an_image_is_one_that_was_written_since_the_flush(
    steps: list[tuple[str, int, int]], seed: int
) -> None:
    disk = small_disk()
    volatile, durable = [1] * 4, [1] * 4
    possible = [{1} for _ in range(4)]

    async def use() -> None:
        writer = CrashWriter(disk, turns=0)
        file = await durable_file(writer, blocks=4)
        for kind, position, fill in steps:
            if kind == "w":
                await writer.write(file, position * BLOCK, block(fill))
                volatile[position] = fill
                possible[position].add(fill)
            else:
                await writer.flush(file)
                durable[:] = volatile
                possible[:] = [{fill} for fill in volatile]

    run(use())
    rng = random.Random(seed)
    found = [image.files["a"] for image in power_loss_images(disk.snapshot(), sector=BLOCK, limit=32, rng=rng)]
    fills = [[set(content[p * BLOCK : (p + 1) * BLOCK]) for p in range(4)] for content in found]
    assert fills[0] == [{fill} for fill in durable]
    assert [{fill} for fill in volatile] in fills
    assert all(len(fill) == 1 and fill <= possible[p] for image in fills for p, fill in enumerate(image))


def test_images_are_reproducible_and_counted_by_their_bytes() -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer, blocks=8)
        for position in range(8):
            await writer.write(file, position * BLOCK, block(2))

    run(use())
    first, second = (
        [image.digest for image in power_loss_images(disk.snapshot(), limit=40, rng=random.Random(5))] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 40
    assert Image.of({"a": b"1", "b": b""}).digest != Image.of({"a": b"", "b": b"1"}).digest


# -- boundaries and concurrency


def test_observer_sees_submission_and_completion_of_every_operation() -> None:
    seen: list[DiskSnapshot] = []
    disk = small_disk(seen.append)

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await writer.reserve("a", BLOCK)
        await writer.write(file, 0, block(3))
        await writer.flush(file)
        await writer.remove("a")
        await writer.sync_names()
        await writer.replace("c", b"")

    run(use())
    operations = ["reserve a", "write a [0, 512)", "flush a", "remove a", "sync_names"]
    operations += ["write c.new", "rename c.new c", "sync_names"]
    assert [s.boundary for s in seen] == [f"{op} {half}" for op in operations for half in ("submitted", "completed")]


def test_concurrent_operations_overtake_each_other_reproducibly() -> None:
    def order(seed: int) -> list[str]:
        seen: list[DiskSnapshot] = []
        disk = small_disk(seen.append)

        async def use() -> None:
            writer = CrashWriter(disk, turns=8, seed=seed)
            file = await writer.reserve("a", 8 * BLOCK)
            await asyncio.gather(*(writer.write(file, n * BLOCK, block(n)) for n in range(8)))

        run(use())
        return [s.boundary for s in seen if s.boundary.endswith("completed")]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_buffer_that_is_reused_too_early_shows() -> None:
    data = block(1)

    def reuse(snapshot: DiskSnapshot) -> None:
        if snapshot.boundary == "write a [0, 512) submitted":
            data[:] = block(2)

    disk = small_disk(reuse)

    async def use() -> None:
        writer = CrashWriter(disk)
        await writer.write(await writer.reserve("a", BLOCK), 0, data)

    run(use())
    assert set(disk.contents()["a"]) == {1, 2}


def test_a_cancelled_write_ends_before_the_cancellation_is_raised() -> None:
    disk = small_disk()

    async def use() -> None:
        writer = CrashWriter(disk, turns=8, seed=3)
        file = await writer.reserve("a", BLOCK)
        writing = asyncio.ensure_future(writer.write(file, 0, block(1)))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    run(use())
    assert disk.contents()["a"] == bytes(block(1))


def test_snapshots_may_be_taken_from_another_thread() -> None:
    disk = small_disk()
    done = threading.Event()
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            while not done.is_set():
                for image in power_loss_images(disk.snapshot(), limit=4):
                    assert len(image.files.get("a", b"")) in (0, 2 * BLOCK)
        except BaseException as error:
            failures.append(error)
            raise

    watcher = threading.Thread(target=watch)
    watcher.start()

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer)
        for fill in range(50):
            await writer.write(file, 0, block(fill))
            await writer.flush(file)

    run(use())
    done.set()
    watcher.join()
    assert not failures


# -- processes


def test_process_death_keeps_what_was_written_and_frees_locks_but_makes_nothing_durable() -> None:
    disk = small_disk()
    disk.acknowledge(3)
    disk.acknowledge(2)

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer)
        assert await writer.lock(file)
        await writer.write(file, 0, block(9))

    run(use())
    after = CrashDisk.after_process_death(disk.snapshot())
    assert after.contents() == disk.contents()
    assert after.acknowledged == 3
    assert images(after.snapshot()) == images(disk.snapshot())

    async def reopen() -> None:
        writer = CrashWriter(after)
        file = await writer.open("a", writable=True)
        assert await writer.lock(file)
        await writer.flush(file)

    run(reopen())
    assert images(after.snapshot()) == [dict(after.contents())]


def test_process_death_tears_writes_in_flight() -> None:
    seen: list[DiskSnapshot] = []
    disk = small_disk(seen.append)

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer, blocks=8)
        await writer.write(file, 0, block(2, 8))

    run(use())
    writing = [s for s in seen if s.boundary == "write a [0, 4096) submitted"][-1]
    contents = {
        CrashDisk.after_process_death(writing, rng=random.Random(seed), sector=BLOCK).contents()["a"]
        for seed in range(40)
    }
    assert len(contents) > 10
    assert all(set(content) <= {1, 2} for content in contents)
    assert CrashDisk.after_process_death(writing).contents()["a"] == bytes(block(2, 8))


def test_writes_of_a_dead_process_that_linger_in_the_kernel_keep_the_lock_and_land_later() -> None:
    seen: list[DiskSnapshot] = []
    disk = small_disk(seen.append)

    async def use() -> None:
        writer = CrashWriter(disk)
        file = await durable_file(writer)
        await writer.write(file, 0, block(2, 2))

    run(use())
    writing = [s for s in seen if s.boundary == "write a [0, 1024) submitted"][-1]
    after = CrashDisk.after_process_death(writing, lingering=3)
    assert after.contents()["a"] == bytes(block(1, 2))

    async def reopen() -> list[bool]:
        writer = CrashWriter(after)
        file = await writer.open("a", writable=True)
        return [await writer.lock(file) for _ in range(4)]

    assert run(reopen()) == [False, False, True, True]
    assert after.contents()["a"] == bytes(block(2, 2))


@pytest.mark.parametrize(
    ("first", "second", "granted"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
)
def test_locks_are_shared_or_exclusive_per_open_file(first: bool, second: bool, granted: bool) -> None:
    async def use() -> None:
        disk = small_disk()
        mine, theirs = CrashWriter(disk), CrashWriter(disk)
        held = await durable_file(mine)
        other = await theirs.open("a", writable=False)
        assert await mine.lock(held, shared=first)
        assert await theirs.lock(other, shared=second) is granted
        await mine.unlock(held)
        assert await theirs.lock(other)
        assert not await mine.lock(held, shared=True)
        await theirs.close()
        assert await mine.lock(held)

    run(use())


# -- errors, as the real writer raises them


def test_crash_writer_fails_as_system_calls_do() -> None:
    async def use() -> None:
        disk = CrashDisk(block_bytes=BLOCK, capacity=3 * BLOCK)
        writer = CrashWriter(disk)
        file = await durable_file(writer)
        with pytest.raises(StoreFullError):
            await writer.reserve("b", 2 * BLOCK)
        with pytest.raises(WriteError) as exists:
            await writer.reserve("a", 0)
        assert exists.value.errno == errno.EEXIST
        with pytest.raises(WriteError) as misaligned:
            await writer.write(file, 1, block(0))
        assert misaligned.value.errno == errno.EINVAL
        with pytest.raises(WriteError) as absent:
            await writer.remove("x")
        assert absent.value.errno == errno.ENOENT
        with pytest.raises(FileNotFoundError):
            await writer.open("x", writable=False)
        assert await writer.read_small("x") is None
        reader = await writer.open("a", writable=False)
        with pytest.raises(WriteError) as refused:
            await writer.write(reader, 0, block(0))
        assert refused.value.errno == errno.EBADF
        assert await writer.names() == ["a"]
        await writer.close()
        with pytest.raises(ReadError):
            await writer.read(reader, 0, block(0))
        with pytest.raises(ClosedError):
            await writer.open("a", writable=False)

    run(use())


def test_image_writer_reads_and_refuses_to_change() -> None:
    async def use() -> None:
        writer = ImageWriter(Image.of({"a": bytes(block(5))}), block_bytes=BLOCK)
        file = await writer.open("a", writable=False)
        into = block(0, 2)
        assert await writer.read(file, 0, into) == BLOCK
        assert bytes(into[:BLOCK]) == bytes(block(5))
        assert await writer.read_small("a") == bytes(block(5))
        for change in (writer.remove("a"), writer.reserve("b", 0), writer.replace("a", b""), writer.sync_names()):
            with pytest.raises(WriteError) as refused:
                await change
            assert refused.value.errno == errno.EROFS

    run(use())


# -- the wrapping doubles


async def some_work(writer: StepwiseMedium) -> None:
    file = await durable_file(writer)
    into = block(0, 2)
    await writer.read(file, 0, into)
    await writer.remove("a")


def test_failing_writer_fails_every_operation_in_turn() -> None:
    counting = FailingWriter(CrashWriter(small_disk()), fail_at=None)
    run(some_work(counting))
    assert counting.operations == 5
    for number, kind in enumerate(("reserve", "write", "flush", "sync_names", "remove"), start=1):
        writer = FailingWriter(CrashWriter(small_disk()), fail_at=number)
        with pytest.raises(WriteError) as failure:
            run(some_work(writer))
        assert failure.value.errno == errno.EIO
        assert [access.kind for access in writer.failed] == [kind]
        assert writer.operations == number


def test_failing_writer_maps_errors_as_the_real_writer_does() -> None:
    full = FailingWriter(CrashWriter(small_disk()), fail_at=1, error=errno.ENOSPC)
    with pytest.raises(StoreFullError):
        run(some_work(full))
    unreadable = FailingWriter(CrashWriter(small_disk()), fail_at=1, kinds={"read"})
    with pytest.raises(ReadError):
        run(some_work(unreadable))


def test_failing_writer_that_stays_failed() -> None:
    async def use() -> None:
        writer = FailingWriter(CrashWriter(small_disk()), fail_at=2, kinds={"flush"}, stays=True)
        file = await writer.reserve("a", BLOCK)
        await writer.flush(file)
        for _ in range(2):
            with pytest.raises(WriteError):
                await writer.flush(file)

    run(use())


def test_stuck_writer_hangs_until_released_from_another_thread() -> None:
    disk = small_disk()
    writer = StuckWriter(CrashWriter(disk), kinds={"write"})
    worker = threading.Thread(target=run, args=(some_work(writer),))
    worker.start()
    writer.wait_stuck()
    assert writer.stuck == [Access("write", "a", 2 * BLOCK)]
    assert disk.contents()["a"] == bytes(2 * BLOCK)
    writer.release()
    worker.join()
    assert writer.stuck == []
    assert disk.contents() == {}


def test_stuck_operations_outlive_their_cancellation() -> None:
    async def use() -> None:
        disk = small_disk()
        writer = StuckWriter(CrashWriter(disk), kinds=())
        file = await writer.reserve("a", 2 * BLOCK)
        writer.hold("write", after=1)
        await writer.write(file, 0, block(1))
        writing = asyncio.ensure_future(writer.write(file, BLOCK, block(2)))
        await asyncio.to_thread(writer.wait_stuck)
        writing.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not writing.done()
        writer.release()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert disk.contents()["a"] == bytes(block(1)) + bytes(block(2))
        with pytest.raises(TimeoutError):
            writer.wait_stuck(timeout=0)

    run(use())


class VirtualTime(selectors.SelectSelector):
    """A selector that does not wait but says that time has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def virtual_time_loop() -> asyncio.AbstractEventLoop:
    selector = VirtualTime()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return loop


@pytest.mark.parametrize(
    ("files", "per_stream", "total", "lanes", "seconds"),
    [
        (1, None, None, None, 0.0),
        (1, 1.0, None, None, 2.0),
        (4, 1.0, None, None, 2.0),
        (4, None, 1.0, None, 8.0),
        (4, 1.0, 2.0, None, 4.0),
        (4, 1.0, 100.0, None, 2.0),
        (1, None, None, 1, 2.0),
        (1, None, None, 2, 1.0),
        (4, None, None, 3, 3.0),
        (4, 1.0, None, 2, 4.0),
        (4, 1.0, None, 8, 2.0),
        (2, None, 1.0, 4, 4.0),
    ],
)
def test_throttled_writer_caps_each_stream_each_request_and_all_together(
    files: int, per_stream: float | None, total: float | None, lanes: int | None, seconds: float
) -> None:
    """Blocks per second; ``lanes`` requests at a time, of one block per second each."""

    async def use() -> float:
        caps = [None if cap is None else cap * BLOCK for cap in (per_stream, total)]
        writer = ThrottledWriter(
            CrashWriter(small_disk()),
            per_stream=caps[0],
            total=caps[1],
            per_request=BLOCK if lanes else None,
            requests=lanes or 1,
        )
        opened = [await writer.reserve(str(n), 2 * BLOCK) for n in range(files)]
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(writer.write(file, half * BLOCK, block(1)) for file in opened for half in (0, 1)))
        return asyncio.get_running_loop().time() - start

    with asyncio.Runner(loop_factory=virtual_time_loop) as runner:
        assert runner.run(use()) == pytest.approx(seconds)
