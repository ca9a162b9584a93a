# SPDX-License-Identifier: Apache-2.0
"""The contents of a group's commit records: a rank's parts of checkpoints, and the last decision that was applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from pccheck_async.format import Applied, Entry, Key, Line, Link, Run

__all__ = [
    "MOST_HASH",
    "Applied",
    "Key",
    "Part",
    "Run",
    "SeenStore",
    "Settled",
    "link_to",
    "member_hash",
    "members_digest",
    "on_the_line",
    "run_id",
]  # fmt: skip

MOST_HASH = 1 << 64


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's part of a checkpoint: an entry of a commit record, format version 2."""

    run: Run
    rank: int
    world: int
    committed: bool
    """Whether the record applied the decision that committed the checkpoint; else the part is only prepared. This does
    not matter for completeness: a checkpoint is complete if all ranks' records name it, whoever read the decision."""
    entry: Entry

    @property
    def key(self) -> Key:
        """The checkpoint that this is a part of."""
        return Key(self.entry.counter, self.run)


class SeenStore(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A store as found at opening."""

    domain: int
    """The number of the filesystem, in the order of the lowest ranks that run there."""
    rank: int
    """The rank of the store's folder. Another rank may run in this domain now, or none."""
    store_id: bytes
    applied: Applied | None
    parts: tuple[Part, ...]
    line: Line | None = None
    """The line of the record, if the store is on disk."""

    @property
    def runs(self) -> set[Run]:
        """The runs that the store's record names."""
        return {part.run for part in self.parts} | ({self.applied.run} if self.applied is not None else set())


def run_id(number: int, nonce: int) -> bytes:
    """Return the 16-byte id of a run of a group, as :class:`Line` and its links have it."""
    return number.to_bytes(8, "big") + nonce.to_bytes(8, "big")


def link_to(key: Key) -> Link:
    """Return the link by which a line names a group's checkpoint."""
    return Link(run_id(key.run.number, key.run.nonce), key.counter)


def on_the_line(stores: Iterable[SeenStore], line: Line | None) -> Sequence[SeenStore]:
    """Return stores in memory reduced to the parts that a line on disk accepts; None accepts nothing."""

    def accepted(store: SeenStore) -> SeenStore:
        parts = tuple(part for part in store.parts if line is not None and line.accepts(*link_to(part.key)))
        return replace(store, parts=parts, applied=None)  # pins are the disk's

    return [accepted(store) for store in stores]


def members_digest(stores: Iterable[tuple[int, bytes]]) -> int:
    """Return a digest of the stores (rank, store id) of a run. It is a sum, so that combinations are cheap to try."""
    return sum(member_hash(rank, store_id) for rank, store_id in stores) % MOST_HASH


def member_hash(rank: int, store_id: bytes) -> int:
    """Return the hash of one store, a term of the sum :func:`members_digest`."""
    return int.from_bytes(blake2b(rank.to_bytes(4, "little") + store_id, digest_size=8).digest(), "little")


class Settled:
    """The counters of checkpoints that were decided about: all below ``floor``, and those in ``above``."""

    __slots__ = ("above", "floor")

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.above: set[int] = set()

    def __contains__(self, counter: int) -> bool:
        return counter < self.floor or counter in self.above

    def add(self, counter: int) -> None:
        """Add the counter of a checkpoint that was decided about."""
        self.above.add(counter)
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1
