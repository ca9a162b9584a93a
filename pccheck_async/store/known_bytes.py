# SPDX-License-Identifier: Apache-2.0
"""Bytes that a slot is known to hold, and that need not be written to it again: frozen layers.

A slot that is taken again still holds an older checkpoint. Of each piece of a chunk that this process wrote there and
flushed it knows a hash; a piece of the next checkpoint with the same hash at the same place is left out. The checkpoint
in the slot is whole all the same: there are no references to others. A hash is taken of the captured copy in a staging
buffer, never of live bytes, and so is the manifest's checksum: rot under a piece that was left out is found like any.

What is known of a slot goes to its lease, and only the flush after the lease's last write gives new hashes back. So
nothing is known of a slot while it may be written, after an aborted or torn checkpoint, or in a new process.

Left out are checkpoints of one chunk, which are written together with their manifest; slots mapped into memory, which
are captured into; and checkpoints that are written from a tier in memory: a file there may be cut off by others, and
only operations of the extension survive reading it then.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from pccheck_async.medium import File, Medium

xxh3_128: Any
try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None

__all__ = ["Hashes", "KnownBytes", "SlotLease", "can_hash"]

PIECE_NBYTES: Final = 256 << 10
"""A whole number of blocks. Small tensors that are trained lie among large frozen ones (LoRA): of 168 such pairs in 537
MiB, 6 % of the bytes, 15 % were written; 38 % in pieces of a MiB, and all of it in whole chunks."""
REWRITTEN: Final = 1 / 64
"""Share of the known pieces that is written all the same, so that rot does not last."""
IDLE: Final = 3
"""Checkpoints without any known piece after which hashing ends, unless it was asked for: a dense state has none, and is
durable later while it is hashed (up to a sixth on a busy machine with a fast disk). Frozen layers match at once, unless
the bounds of chunks move."""

Hashes: TypeAlias = dict[tuple[int, int], list[bytes]]
"""Of the pieces of chunks, by offset and length of the chunk."""


@dataclass(slots=True, eq=False)
class SlotLease:
    """A slot that one checkpoint writes into; exclusive, also against other processes. Given back exactly once.

    Attributes:
        known: Of the bytes that the slot is known to hold.
        hashes: Of the chunks of this checkpoint.
        unchanged_nbytes: Bytes that were not written, as they were known.
    """

    slot: int
    file: File
    known: Hashes = field(default_factory=dict)
    hashes: Hashes = field(default_factory=dict)
    unchanged_nbytes: int = 0


def can_hash() -> bool:
    """Return whether xxhash is installed."""
    return xxh3_128 is not None


class KnownBytes:
    """The hashes of bytes that slots of one store hold. Belongs to its loop.

    Args:
        medium: Of the store.
        call: Calls a function on a helper thread: hashing takes a millisecond for 16 MiB.
        lasting: Go on hashing though nothing matches.

    Attributes:
        is_on: Whether chunks are hashed.
        unchanged_nbytes: Bytes of flushed checkpoints that were not written.
    """

    def __init__(self, medium: Medium, call: Callable[..., Awaitable[Any]], *, lasting: bool = False) -> None:
        self.is_on = True
        self.unchanged_nbytes = 0
        self._medium = medium
        self._call = call
        self._lasting = lasting
        self._idle = 0
        self._slots: dict[int, tuple[object, Hashes]] = {}  # and the stamp of the file after the flush
        self._random = random.Random()  # not the user's

    def take(self, lease: SlotLease) -> None:
        """Give the lease what is known of its slot, and forget it: nobody else may rely on it until the next flush."""
        stamp, hashes = self._slots.pop(lease.slot, (None, {}))
        if stamp is not None and stamp == self._medium.stamp(lease.file):
            lease.known = hashes

    async def changed(self, lease: SlotLease, offset: int, data: memoryview) -> list[tuple[int, int]]:
        """Return the parts of a chunk to write, as bounds in ``data``: its slot is known to hold the others.

        Cancellation: ends once ``data`` is read no more.
        """
        if not self.is_on:
            return [(0, len(data))]
        place = offset, len(data)
        hashes = lease.hashes[place] = await self._call(_hashes, data)
        known = lease.known.get(place)
        if known is None:
            return [(0, len(data))]
        parts: list[tuple[int, int]] = []
        end = 0
        for is_written, pieces in groupby(map(self._is_written, hashes, known)):
            start, end = end, min(len(data), end + PIECE_NBYTES * len([*pieces]))
            if is_written:
                parts.append((start, end))
            else:
                lease.unchanged_nbytes += end - start
        return parts

    def _is_written(self, piece: bytes, known: bytes) -> bool:
        return piece != known or self._random.random() < REWRITTEN

    def note_flushed(self, lease: SlotLease) -> None:
        """Called when all that the lease wrote, and what it left out, is durable in its slot."""
        if not lease.hashes:
            return
        if lease.known:  # else there was nothing to compare with
            self._idle = 0 if lease.unchanged_nbytes else self._idle + 1
        self.unchanged_nbytes += lease.unchanged_nbytes
        stamp = self._medium.stamp(lease.file)
        if stamp is None or (self._idle >= IDLE and not self._lasting):
            self.is_on = False
            self.forget_all()
        elif self.is_on:
            self._slots[lease.slot] = stamp, lease.hashes

    def forget(self, lease: SlotLease) -> None:
        """Called before the slot of a checkpoint that will not be committed is overwritten."""
        lease.hashes = {}
        self.forget_slot(lease.slot)

    def forget_slot(self, slot: int) -> None:
        """Called when a slot is removed."""
        self._slots.pop(slot, None)

    def forget_all(self) -> None:
        """Called when it is unknown what is durable."""
        self._slots.clear()


def _hashes(data: memoryview) -> list[bytes]:
    """Return the hash of each piece."""
    found = []
    for start in range(0, len(data), PIECE_NBYTES):
        piece = xxh3_128()
        piece.update(data[start : start + PIECE_NBYTES])  # unlike xxh3_128_digest, it releases the GIL
        found.append(piece.digest())
    return found
