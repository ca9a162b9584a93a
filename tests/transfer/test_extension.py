"""What only the extension has: the contracts of ``_ext.pyi``."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
import subprocess
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pccheck_async.format import checksum
from pccheck_async.transfer.operations import Kind, NativeOperations
from tests.support.processes import passes_in_a_forked_child
from tests.transfer.conftest import CHUNK, Owner, fds_now, on_loop, table, threads_fall_to, threads_now

if TYPE_CHECKING:
    from pccheck_async import _ext
else:
    _ext = pytest.importorskip("pccheck_async._ext", reason="the extension was not built")


@pytest.fixture
def queue() -> Iterator[_ext.Queue]:
    queue = _ext.Queue(2, 1)
    yield queue
    queue.close()


def sum_of(data: bytes) -> bytes:
    """Return the table of checksums of less than a MiB."""
    return zlib.crc32(data).to_bytes(4, "little")


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
    assert reap(queue, 2) == {2**64 - 1: (0, sum_of(b"abc")), 7: (-errno.EBADF, None)}
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


@pytest.mark.slow
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
    assert reap(queue, 1) == {1: (0, sum_of(b"abc"))}


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
    for arguments in ((0, 1), (1, 0), (-1, 1), (257, 1)):
        with pytest.raises(ValueError, match="1 to 256 threads"):
            _ext.Queue(*arguments)
    with pytest.raises(TypeError):
        _ext.Queue()  # type: ignore[call-arg]


class Table(bytes):
    queue: _ext.Queue


class Buffer(bytearray):
    queue: _ext.Queue


@pytest.mark.parametrize("through", ["segments", "buffer", "keepalive", "step"])
def test_forgotten_queues_close_with_a_warning(through: str, fd: int) -> None:
    gc.collect()  # what earlier tests left says nothing here
    threads, fds = threads_now(), fds_now()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        queue = _ext.Queue(2, 2)
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
    assert threads_fall_to(threads)


def test_a_queue_whose_last_reference_goes_is_closed_without_the_garbage_collector() -> None:
    gc.collect()
    fds, threads = fds_now(), threads_now()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        queue, keepalive = _ext.Queue(2, 2), Owner()
        gone = weakref.ref(keepalive)
        queue.submit([(1, _ext.GATHER, b"", bytearray(CHUNK), keepalive)])
        del keepalive
        gc.disable()
        try:
            del queue
            assert gone() is None
        finally:
            gc.enable()
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert fds_now() <= fds
    assert threads_fall_to(threads)


def forgotten() -> list[Owner]:
    """A queue in a cycle, which alone holds a view that is older: the garbage collector comes to the view first."""
    view, owner = memoryview(bytearray(CHUNK)), Owner()
    queue = _ext.Queue(1, 1)
    owner.queue = queue  # type: ignore[attr-defined]
    queue.submit([(1, _ext.GATHER, b"", view, owner)])
    return [owner]


@pytest.mark.parametrize("closed", [False, True])
def test_a_forgotten_queue_lets_go_of_views_in_time(closed: bool) -> None:
    def child() -> None:  # it would crash
        [owner] = forgotten()
        if closed:
            owner.queue.close()  # type: ignore[attr-defined]
        del owner
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    assert passes_in_a_forked_child(child)


def test_a_forked_child_keeps_what_the_queue_holds() -> None:
    gc.collect()  # what earlier tests left says nothing in the child
    owners, unraisable = forgotten(), list[object]()
    queue = owners[0].queue  # type: ignore[attr-defined]

    def child() -> None:
        nonlocal queue
        sys.unraisablehook = unraisable.append
        owners.clear()
        del queue
        gc.collect()
        assert not unraisable

    assert passes_in_a_forked_child(child)
    queue.close()
    queue.reap()


def test_forked_children_cannot_use_it() -> None:
    queue = _ext.Queue(2, 1)
    data = bytearray(CHUNK)
    queue.submit([(n, _ext.CHECKSUM, data) for n in range(50)])  # some run while the child is made

    def child() -> None:
        for call in (queue.fileno, queue.reap, lambda: queue.submit([]), lambda: queue.cancel(1)):
            with pytest.raises(RuntimeError, match="forked"):
                call()
        queue.close()
        queue.close()
        other = _ext.Queue(1, 1)  # its own works
        other.submit([(1, _ext.CHECKSUM, b"child")])
        assert reap(other, 1) == {1: (0, sum_of(b"child"))}
        other.close()

    assert passes_in_a_forked_child(child)
    assert len(reap(queue, 50)) == 50
    queue.close()


def test_a_forked_child_forgets_a_queue_without_hanging() -> None:
    queues = [_ext.Queue(1, 1)]
    queues[0].submit([(n, _ext.CHECKSUM, bytes(CHUNK)) for n in range(10)])

    def child() -> None:
        queues.clear()
        gc.collect()

    assert passes_in_a_forked_child(child)
    queues[0].close()


def test_other_interpreters_have_their_own() -> None:
    # In a process of its own: before Python 3.12, torch's backward() fails for ever where one had a second one.
    pytest.importorskip("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
    inner = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("pccheck_async._ext", {_ext.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
queue = module.Queue(1, 1)
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
        NativeOperations(io_threads=1, copy_threads=256)
