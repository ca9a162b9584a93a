"""Shelves that somebody forged, checksums and all; and what a reader and a writer make of them."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pccheck_async import CheckpointError, Shelf
from pccheck_async.format import crc32
from pccheck_async.shelf import format as layout
from pccheck_async.shelf.format import Extent, Root
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.upkeep import list_leaves
from tests.support.hostile import NUMBERS, Forger, victim


class ShelfPrey:
    """A whole shelf, and files like it with something else in their directory, root or header."""

    def __init__(self, path: Path) -> None:
        with Shelf(path, 256 << 10) as shelf, shelf.transaction():
            for name, value in victim().items():
                shelf[name] = value
        self.whole = path.read_bytes()
        self.header = layout.decode_header(self.whole)
        self.root = layout.newest_root(self.header, self.whole, len(self.whole))
        place = self.root.directory
        self.directory: Any = msgspec.msgpack.decode(self.whole[place.offset : place.end])

    def forged(self, rng: random.Random) -> bytes:
        """Return a forged file."""
        forger = Forger(rng)
        match rng.randrange(8):
            case 0:
                return self._with_root(rng)
            case 1:
                data = bytearray(self.whole)
                for _ in range(rng.choice((1, 1, 3, 50))):
                    data[rng.choice((rng.randrange(3 * PAGE_BYTES), rng.randrange(200), rng.randrange(len(data))))] ^= (
                        255
                    )
                return bytes(data[: rng.choice((len(data), rng.randrange(len(data) + 1)))])
            case _:
                return self.with_directory(forger.forged(self.directory, self._with_checksums))

    def with_directory(self, data: bytes) -> bytes:
        """Return the file with another directory, which its root names rightly."""
        file = bytearray(self.whole)
        end = max(extent.end for extent in self._extents())
        file[end : end + len(data)] = data
        file += bytes(-len(file) % PAGE_BYTES)
        root = Root(self.root.sequence, len(file), Extent(end, len(data)), crc32(data))
        file[self._place : self._place + layout.ROOT.size] = root.encode(self.header)
        return bytes(file)

    def with_root(self, sequence: int, nbytes: int, offset: int, length: int) -> bytes:
        """Return the file with other numbers in the root that is in force, under a right checksum."""
        root = Root(sequence, nbytes, Extent(offset, length), self.root.checksum)
        file = bytearray(self.whole)
        file[self._place : self._place + layout.ROOT.size] = root.encode(self.header)
        return bytes(file)

    @property
    def _place(self) -> int:
        return self.header.place(self.root.sequence)

    def _extents(self) -> list[Extent]:
        sizes = [(offset, manifest["payload_nbytes"]) for offset, manifest in self.directory[1].values()]
        return [Extent(offset, self.header.pages(nbytes)) for offset, nbytes in sizes] + [Extent(0, 3 * PAGE_BYTES)]

    def _with_root(self, rng: random.Random) -> bytes:
        facts: list[int] = [self.root.sequence, self.root.nbytes, *self.root.directory]
        for _ in range(rng.choice((1, 1, 2))):
            facts[rng.randrange(4)] = rng.choice(
                (rng.choice(NUMBERS), facts[rng.randrange(4)] + rng.choice((-1, 1, 4096)))
            )
        return self.with_root(*(number % (1 << 64) for number in facts))

    def _with_checksums(self, tree: Any) -> Any:
        """Let the checksums of forged variables be right, where there is something to check."""
        try:
            for offset, manifest in tree[1].values():
                for chunk in manifest["chunks"]:
                    chunk[2] = crc32(self.whole[offset : offset + chunk[1]])
        except (TypeError, KeyError, IndexError, AttributeError, ValueError):
            pass
        return tree


def examine_shelf(data: bytes, path: Path) -> str:
    """Read a file and write to it; say how far that went. Any exception but CheckpointError is raised on."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.pwrite(fd, data, 0)
    os.close(fd)
    found = "refused"
    try:
        with Shelf(path, readonly=True) as shelf:
            found = "opened"
            for variable in shelf.variables().values():
                repr([leaf.text() for leaf in list_leaves(variable.manifest).leaves if leaf.entry is None])
            shelf.verify()
            for value in dict(shelf).values():
                # Of torch, which cannot print every view of every dtype, and of Python, which prints no huge integer.
                with suppress(NotImplementedError, ValueError):
                    repr(value)
            found = "read"
    except CheckpointError:
        pass
    try:
        with Shelf(path) as shelf:
            names = list(shelf)
            with shelf.transaction(*names[:3]):
                shelf["new"] = [1]
                for name in names[3:6]:
                    del shelf[name]
            shelf["again"] = dict(shelf)
            found += ", written"
    except CheckpointError:
        pass
    return found
