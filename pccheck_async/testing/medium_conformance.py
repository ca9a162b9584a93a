# SPDX-License-Identifier: Apache-2.0
"""Checks of the guarantees that every medium gives, to run on a new one.

::

    @pytest.mark.parametrize("check", MEDIUM_CHECKS, ids=lambda check: check.__name__)
    def test_my_medium(check, tmp_path):
        async def make():
            return MyMedium(tmp_path)          # each time another process's view of one place

        asyncio.run(check(make))

A check raises AssertionError if a guarantee is broken. No check can find out which bytes survive a power failure: use
:class:`~pccheck_async.testing.CrashDisk` for that.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pccheck_async.errors import CheckpointError, CorruptStoreError, DurabilityUnknownError, WriteError
from pccheck_async.medium import File, Medium
from pccheck_async.transfer import aligned_buffer

__all__ = ["MEDIUM_CHECKS"]

Make = Callable[[], Awaitable[Medium]]
"""Function that returns a new medium on the same place, as if opened by another process; at first it is empty."""
Check = Callable[[Make], Coroutine[Any, Any, None]]


def _require(holds: object, promise: str) -> None:
    if not holds:
        raise AssertionError(promise)


async def _error(call: Coroutine[Any, Any, object], *kinds: type[BaseException]) -> BaseException:
    """Return the error that a call raises; raise AssertionError unless it is one of ``kinds``."""
    try:
        await call
    except kinds as error:
        return error
    raise AssertionError(f"{call} raises one of {[kind.__name__ for kind in kinds]}")


def _block(nbytes: int, text: bytes) -> memoryview:
    block = aligned_buffer(nbytes)
    block[: len(text)] = text
    return block


async def _begins(medium: Medium, file: File, offset: int, nbytes: int) -> bytes:
    """Return the bytes before the first zero byte in the ``nbytes`` of a file at ``offset``."""
    into = aligned_buffer(nbytes)
    _require(await medium.read(file, offset, into) == nbytes, "read fills the buffer where the file is long enough")
    view = await medium.view(file, offset, nbytes)
    _require(view is None or view == into, "view returns the bytes that read returns, or None")
    return bytes(into).split(b"\0")[0]


async def nothing_is_found_where_nothing_is(make: Make) -> None:
    """Check that reading in an empty place finds and creates nothing."""
    medium = await make()
    _require(await medium.names() == [], "an empty place has no names")
    _require(await medium.read_small("small") is None, "read_small returns None where there is no such file")
    await _error(medium.open("slot-000", writable=False), FileNotFoundError)
    _require(await medium.names() == [], "reading makes nothing")
    await medium.close()


_checks: list[Check] = [nothing_is_found_where_nothing_is]


def _check(promise: Callable[[Medium, Medium, int], Awaitable[None]]) -> Check:
    """Add a check to the list; it is called with two processes' views of one place, and the block size there."""

    @functools.wraps(promise)
    async def check(make: Make) -> None:
        medium = await make()
        block_bytes = (await medium.prepare(create=True)).block_bytes
        other = await make()
        await promise(medium, other, block_bytes)
        await medium.close()
        await other.close()

    _checks.append(check)
    return check


@_check
async def it_says_what_it_asks_for(medium: Medium, other: Medium, block: int) -> None:
    """Check that alignments are powers of two, and that there is a reason for direct I/O or its absence."""
    facts = await medium.prepare(create=True)
    for number in (facts.block_bytes, facts.memory_alignment):
        _require(number > 0 and number & (number - 1) == 0, "alignments are powers of two")
    _require(facts.why, "facts say why direct I/O is used or not")


@_check
async def a_reserved_file_holds_zeros(medium: Medium, other: Medium, block: int) -> None:
    """Check that a reserved file has its size and name at once, holds zeros, and is never made twice."""
    file = await medium.reserve("slot-000", 3 * block)
    _require((file.name, file.nbytes) == ("slot-000", 3 * block), "a file knows its name and size")
    into = _block(4 * block, b"?" * 4 * block)
    _require(await medium.read(file, 0, into) == 3 * block, "read is short at the end of the file")
    _require(not any(into[: 3 * block]), "a reserved file holds zeros")
    _require(await medium.read(file, 3 * block, into[:block]) == 0, "read returns 0 behind the end")
    _require(await medium.names() == ["slot-000"], "names has it")
    error = await _error(medium.reserve("slot-000", block), WriteError)
    _require(isinstance(error, WriteError) and error.errno == errno.EEXIST, "reserve makes nothing twice")


@_check
async def others_see_what_is_written(medium: Medium, other: Medium, block: int) -> None:
    """Check that bytes are written at their offset only, and that other processes see them."""
    file = await medium.reserve("slot-000", 3 * block)
    await medium.write(file, block, _block(block, b"middle"))
    seen = await other.open("slot-000", writable=False)
    texts = [await _begins(other, seen, at * block, block) for at in range(3)]
    _require(texts == [b"", b"middle", b""], "others see what was written, where it was written")
    _require(seen.nbytes == 3 * block, "writing inside a file does not change its size")


@_check
async def names_come_and_go(medium: Medium, other: Medium, block: int) -> None:
    """Check that a removed name is gone for all processes, and that the open file can still be read."""
    for name in ("slot-001", "slot-000"):
        file = await medium.reserve(name, block)
    await medium.write(file, 0, _block(block, b"kept"))
    _require(await other.names() == ["slot-000", "slot-001"], "names are sorted")
    await medium.remove("slot-000")
    await medium.sync_names()
    _require(await other.names() == ["slot-001"], "a removed name is gone")
    _require(await _begins(medium, file, 0, block) == b"kept", "an open file stays readable when its name is gone")
    await _error(medium.remove("slot-000"), WriteError)


@_check
async def a_file_is_told_from_its_successor(medium: Medium, other: Medium, block: int) -> None:
    """Check that two openings of a file have the same identity, and a new file of that name another one."""
    file = await medium.reserve("commit", block)
    _require((await other.open("commit", writable=False)).identity == file.identity, "one file has one identity")
    await medium.remove("commit")
    again = await medium.reserve("commit", block)
    _require(again.identity != file.identity, "a new file has another identity while the old one is open")


@_check
async def a_small_file_is_replaced_as_a_whole(medium: Medium, other: Medium, block: int) -> None:
    """Check that a replaced file has the new bytes only, and that the old file is kept under ``keep_as``."""
    for data in (b"first and long", b"second"):
        await medium.replace("small", data)
        _require(await other.read_small("small") == data, "replace leaves the new bytes and nothing else")
    await medium.replace("small", b"third", keep_as="kept")
    _require(await other.read_small("kept") == b"second", "keep_as keeps the old file")
    _require(await other.names() == ["kept", "small"], "replace leaves nothing else behind")
    await medium.reserve("large", (2 << 20) // block * block)
    await _error(other.read_small("large"), CorruptStoreError)


@_check
async def locks_exclude_others(medium: Medium, other: Medium, block: int) -> None:
    """Check that only shared locks coexist, and that unlock, closing the file and closing the medium end a lock."""
    mine = await medium.reserve("slot-000", block)
    theirs = await other.open("slot-000", writable=False)
    _require(await medium.lock(mine), "a free file is locked")
    _require(not await other.lock(theirs, shared=True), "an exclusive lock keeps out shared ones")
    await medium.unlock(mine)
    _require(await other.lock(theirs, shared=True), "unlock ends a lock")
    _require(not await medium.lock(mine), "a shared lock keeps out exclusive ones")
    _require(await medium.lock(mine, shared=True), "shared locks go together")
    await other.close(theirs)
    _require(await medium.lock(mine), "closing a file ends its lock")
    theirs = await other.open("slot-000", writable=True)
    _require(not await other.lock(theirs), "an exclusive lock keeps out others")
    await medium.close()
    _require(await other.lock(theirs), "closing a medium ends its locks")
    other.abandon()


@_check
async def parts_become_durable_in_order(medium: Medium, other: Medium, block: int) -> None:
    """Check that ``make_durable`` writes all pieces of all files, and unlocks every file but the last."""
    files = [await medium.reserve(name, 2 * block) for name in ("slot-000", "commit")]
    others = [await other.open(file.name, writable=False) for file in files]
    for file in files:
        _require(await medium.lock(file), "a free file is locked")
    pieces = [(0, _block(block, b"one")), (block, _block(block, b"two"))]
    await medium.make_durable([(files[0], pieces), (files[1], pieces[1:])])
    await medium.make_durable([(files[1], ())])
    await medium.make_durable([])
    texts = [await _begins(other, file, at, block) for file in others for at in (0, block)]
    _require(texts == [b"one", b"two", b"", b"two"], "all pieces are written")
    locks = [await other.lock(file, shared=True) for file in others]
    _require(locks == [True, False], "every file but the last is unlocked")


@_check
async def what_is_unknown_after_a_failure_is_told(medium: Medium, other: Medium, block: int) -> None:
    """Check the errors: WriteError if the first file's write fails, DurabilityUnknownError after a flush."""
    file, _ = [await medium.reserve(name, block) for name in ("slot-000", "slot-001")]
    unwritable = await medium.open("slot-001", writable=False)
    piece = 0, _block(block, b"text")
    error = await _error(medium.make_durable([(unwritable, [piece]), (file, [piece])]), WriteError)
    _require(not isinstance(error, DurabilityUnknownError), "a failed write to the first file is no more than that")
    _require(await _begins(medium, file, 0, block) == b"", "what comes after a failure does not happen")
    await _error(medium.make_durable([(file, [piece]), (unwritable, [piece])]), DurabilityUnknownError)
    _require(await _begins(medium, file, 0, block) == b"text", "what comes before a failure happens")


@_check
async def what_has_begun_ends_though_it_is_cancelled(medium: Medium, other: Medium, block: int) -> None:
    """Check that a cancelled call returns only after all of its work was done."""
    file = await medium.reserve("slot-000", 2 * block)
    for ignored in (False, True):
        offset = block * ignored
        piece = offset, _block(block, b"cancelled")
        task = asyncio.ensure_future(medium.make_durable([(file, [piece])], ignore_cancellation=ignored))
        await asyncio.sleep(0)
        begun = task.cancel()  # else it never waited
        await asyncio.wait((task,))
        expected = begun and not ignored
        _require(task.cancelled() is expected, "cancellation is raised at the end, unless it is ignored")
        _require(await _begins(medium, file, offset, block) == b"cancelled", "all of it is done when it returns")


@_check
async def transfers_are_counted(medium: Medium, other: Medium, block: int) -> None:
    """Check that transfers are counted by kind, with their bytes."""
    file = await medium.reserve("slot-000", 2 * block)
    await medium.write(file, 0, _block(block, b"one"))
    await medium.make_durable([(file, [(block, _block(block, b"two"))])])
    await medium.read(file, 0, aligned_buffer(2 * block))
    seen = medium.statistics()
    _require((seen.write.count, seen.write.nbytes) == (2, 2 * block), "writes are counted, in make_durable too")
    _require((seen.read.count, seen.flush.count) == (1, 1), "reads and flushes are counted")
    _require(seen.backend and seen.why, "statistics name the backend")


@_check
async def what_is_closed_takes_nothing_more(medium: Medium, other: Medium, block: int) -> None:
    """Check that closing twice is allowed, and that using a closed file or medium is an error."""
    first, second = [await medium.reserve(name, block) for name in ("slot-000", "slot-001")]
    await medium.close(first)
    await medium.close(first)
    await _error(medium.read(first, 0, aligned_buffer(block)), OSError)
    await medium.read(second, 0, aligned_buffer(block))
    await medium.close()
    await medium.close()
    await _error(medium.read(second, 0, aligned_buffer(block)), OSError)
    await _error(medium.open("slot-001", writable=False), CheckpointError, OSError)


MEDIUM_CHECKS = tuple(_checks)
"""All checks. Each needs an empty place of its own, and may leave files there."""
