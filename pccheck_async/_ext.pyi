# SPDX-License-Identifier: Apache-2.0
"""Operations on bytes in C, built from ``ext/`` if possible; ``operations/python.py`` does the same."""

from collections.abc import Sequence
from typing import Any, Final, final

from typing_extensions import Buffer

CRC_IMPLEMENTATION: Final[str]
"""Implementation of CRC-32 on this processor: "vpclmulqdq", "pclmulqdq", "arm64" or "table"."""

PERSIST_IMPLEMENTATION: Final[str]
"""Instruction that writes cache lines back: "clwb", "clflushopt", "clflush", "dc cvap", "dc cvac"; "" for none."""

WRITE: Final[int]
READ: Final[int]
FLUSH: Final[int]
GATHER: Final[int]
SCATTER: Final[int]
CHECKSUM: Final[int]
CHAIN: Final[int]
UNLOCK: Final[int]
LINKED: Final[int]

_Operation = (
    # (token, WRITE, fd, offset, data): write all of data. Result: its size.
    # (token, READ, fd, offset, into): fill into. Result: the bytes read, fewer only at the end of the file.
    tuple[int, int, int, int, Buffer]
    # (token, FLUSH, fd): fdatasync. Result: 0.
    | tuple[int, int, int]
    # (token, GATHER, segments, into, keepalive): copy in, zero the gaps. Checksums: of each MiB of into.
    | tuple[int, int, bytes, Buffer, Any]
    # (token, SCATTER, source, checksum, segments, keepalive): verify, then copy out. Result: 0, or -EBADMSG.
    | tuple[int, int, Buffer, int, bytes, Any]
    # (token, CHECKSUM, data). Checksums: of each MiB of data.
    | tuple[int, int, Buffer]
    # (token, CHAIN, steps): tuples like these without tokens: writes, flushes, (UNLOCK, fd), which releases a flock,
    # and (LINKED, fd): -ENOENT if the open file has no name. Each is performed after the one before it succeeded.
    # Result: 0, or that of the step that failed; the steps after it are not performed.
    | tuple[int, int, tuple[Any, ...]]
)
"""Tokens, of 64 bits, are the caller's and need only be unique among the operations it may want to cancel.

``segments`` is a table of native unsigned 64-bit triples (address, offset in the buffer, length); for GATHER in growing
order of offset and not overlapping. Addresses cannot be checked: ``keepalive`` must own the memory that they name.
"""

@final
class Queue:
    """A queue of operations, which are submitted and reaped in batches; one eventfd signals their completion.

    Operations run in any order. A queue keeps the buffers and ``keepalive`` of an operation until it is reaped,
    also if it failed. Write, read, flush and chain share ``io_threads``; gather, scatter and checksum share
    ``copy_threads`` (1 to 256 each). A queue that is collected unclosed is closed, with a ResourceWarning.

    In a forked child all but ``running`` and :meth:`close` raise RuntimeError; :meth:`close` then only closes the
    child's copy of the eventfd.
    """

    def __new__(cls, io_threads: int, copy_threads: int) -> Queue: ...
    def fileno(self) -> int:
        """Return the eventfd: readable while completions wait to be reaped. It belongs to the queue: do not read it."""

    def submit(self, batch: Sequence[_Operation], /) -> None:
        """Start a batch of operations; none if one is malformed (ValueError, TypeError, BufferError)."""

    def reap(self) -> list[tuple[int, int, bytes | list[tuple[int, float]] | None]]:
        """Return all completions, and release their buffers. Never waits; works on a closed queue, too.

        Returns:
            Tuples of token, result or -errno, and checksums (None if the operation computes none or failed). For a
            chain that was performed the third is a list with the result and the end time (``time.perf_counter()``)
            of each step, up to the one that failed.
        """

    def cancel(self, token: int, /) -> bool:
        """Cancel an operation that has not started: it completes with -ECANCELED. Return False if it has started."""

    def close(self) -> None:
        """Cancel operations that have not started, wait (without the GIL) for the rest, end the threads. Idempotent."""

    @property
    def running(self) -> int:
        """The number of operations that were submitted and not reaped yet."""

def crc32(data: Buffer, value: int = 0, /) -> int:
    """Return the CRC-32 of ``data``, continuing from ``value``, as ``zlib.crc32`` does."""

def crc32_pieces(data: Buffer, /) -> bytes:
    """Return the CRC-32 of each MiB of ``data``, the last one maybe shorter: four bytes each, little-endian."""

def crc32_combine(sums: Buffer, nbytes: int, /) -> int:
    """Return the CRC-32 of ``nbytes`` bytes from ``sums``, which :func:`crc32_pieces` returned for them.

    Raises ValueError if the length of ``sums`` does not fit ``nbytes``.
    """

def gather(segments: bytes, into: Buffer, /) -> bytes:
    """Perform a GATHER on this thread, and return the checksums. Raises ValueError for an impossible table."""

def store(into: Buffer, data: Buffer, /) -> None:
    """Copy ``data`` over all of ``into``, past the caches where that is possible.

    Raises:
        OSError: A page of a mapped file is missing: the file was truncated, or the memory is broken (EIO).
        ValueError: The buffers differ in length.
    """

def write_back(memory: Buffer, /) -> None:
    """Write back the cache lines of ``memory``; in a file mapped with MAP_SYNC, :func:`fence` makes them durable.

    Raises:
        OSError: A page of a mapped file is missing (see :func:`store`).
        NotImplementedError: ``PERSIST_IMPLEMENTATION`` is empty.
    """

def fence() -> None:
    """Make all cache lines that this thread wrote back durable before any later store."""

def dio_alignment(fd: int, /) -> tuple[int, int] | None:
    """Return the alignment that direct I/O on ``fd`` needs, from ``statx``.

    Returns:
        Alignment in bytes of memory, and of offsets and lengths; (0, 0) if the file does not support direct I/O;
        None if the kernel (before 6.1) or the filesystem does not report it.
    """

def match(
    values: list[Any],
    patterns: tuple[Any, ...],
    start: int,
    leaves: list[Any],
    plain: list[Any],
    ask: Any,
    /,
) -> int:
    """Compare values, from index ``start`` on, with their patterns (see ``state/cache/patterns.py``).

    The arrays and plain values in matching values are added to ``leaves`` and ``plain``, in their order. The
    ``state_dict()`` of an object is obtained by ``ask(object, path)``, whose exceptions propagate.

    Returns:
        The index of the first value that does not match, of which nothing is added; ``len(values)`` if all match.
    """

def look(
    api: object,
    tensors: list[Any],
    calls: tuple[Any, ...],
    /,
) -> tuple[bytes, bytes, bytes, list[Any]]:
    """Return the layout of tensors, as tables of bytes that are equal to those of another call if the layout is.

    Args:
        api: The ``__dlpack_c_exchange_api__`` of the tensors' type.
        tensors: Objects of that type.
        calls: ``untyped_storage``, ``data_ptr`` and ``nbytes`` of storages, ``is_neg``, ``is_conj``, and the names of
            ``dtype`` and ``requires_grad``.

    Returns:
        Forms (device, number of dimensions, dtype, shape and strides of each tensor, back to back), traits (24 bytes
        for each: offset, dtype if DLPack has one word for several, bits), memory (address and size of each
        storage), and the storages.

    Raises:
        NotImplementedError: The version of ``api`` is too new or too old.
        RuntimeError: A tensor has no shape, strides or storage, or DLPack has no name for its dtype or device.
    """
