# SPDX-License-Identifier: Apache-2.0
"""Bytes that a slot is known to hold, and that need not be written to it again: frozen layers.

A slot that is reused still holds an older checkpoint. This process keeps a hash of each piece of a chunk that it wrote
to the slot and flushed; a piece of the next checkpoint with the same hash at the same place is not written again. The
checkpoint in the slot is whole all the same, and refers to no other. Hashes, like the manifest's checksums, are of the
captured copy in a staging buffer, never of live bytes: bit rot in a piece that was not written is found like any other.

The hashes of a slot are moved to its lease, and only the flush after the lease's last write stores new ones. So no
hashes are known of a slot while it may be written, after an aborted or torn checkpoint, or in a new process.

Hashes are not used for checkpoints of one chunk, which are written together with their manifest; for slots mapped into
memory, into which captures copy; and for checkpoints that are written from a tier in memory: others may truncate a file
there, and only operations of the extension survive reading it then.
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
"""Bytes of a piece, a whole number of blocks. Small tensors that are trained lie among large frozen ones (LoRA): of 537
MiB with 168 such pairs, 6 % of the bytes changed, and 15 % were written; 38 % in pieces of a MiB, all in chunks."""
REWRITTEN: Final = 1 / 64
"""Share of the unchanged pieces that is written all the same, so that bit rot does not last."""
IDLE: Final = 3
"""Checkpoints in a row without an unchanged piece after which hashing ends, unless it is ``lasting``: a dense state has
none, and hashing delays its durability (by up to a sixth on a busy machine with a fast disk). Frozen layers match at
once, unless the bounds of chunks move."""

Hashes: TypeAlias = dict[tuple[int, int], list[bytes]]
"""Hashes of the pieces of each chunk, by offset and length of the chunk."""


@dataclass(slots=True, eq=False)
class SlotLease:
    """A slot that one checkpoint writes into; exclusive, also against other processes. Given back exactly once.

    Attributes:
        known: Hashes of the bytes that the slot is known to hold.
        hashes: Hashes of the chunks of this checkpoint.
        unchanged_nbytes: Bytes that were not written, as the slot is known to hold them.
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
    """The hashes of bytes that slots of one store hold. Used on one event loop.

    Args:
        medium: The medium of the store.
        call: Function that calls another one on a helper thread: hashing takes a millisecond for 16 MiB.
        lasting: Whether to continue hashing if no pieces match.

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
        """Move the hashes of a slot to its lease; they are dropped if others changed the file since the flush."""
        stamp, hashes = self._slots.pop(lease.slot, (None, {}))
        if stamp is not None and stamp == self._medium.stamp(lease.file):
            lease.known = hashes

    async def changed(self, lease: SlotLease, offset: int, data: memoryview) -> list[tuple[int, int]]:
        """Hash a chunk, and return the parts of it to write, as bounds in ``data``: the slot is known to hold the rest.

        Cancellation: raised when ``data`` is read no more.
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
        """Store the hashes of a lease. Called when all bytes of its checkpoint are durable in the slot."""
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
        """Drop the hashes of a lease. Called before the slot of a checkpoint that is not committed is overwritten."""
        lease.hashes = {}
        self.forget_slot(lease.slot)

    def forget_slot(self, slot: int) -> None:
        """Drop the hashes of a slot. Called when it is removed."""
        self._slots.pop(slot, None)

    def forget_all(self) -> None:
        """Drop all hashes. Called when it is unknown which bytes are durable."""
        self._slots.clear()


def _hashes(data: memoryview) -> list[bytes]:
    """Return the hash of each piece of ``data``."""
    found = []
    for start in range(0, len(data), PIECE_NBYTES):
        piece = xxh3_128()
        piece.update(data[start : start + PIECE_NBYTES])  # unlike xxh3_128_digest, it releases the GIL
        found.append(piece.digest())
    return found
