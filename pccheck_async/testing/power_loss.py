# SPDX-License-Identifier: Apache-2.0
"""The contents of a ``CrashDisk`` at one instant, and every folder that may be found after the power failed then.

The power failures of the model, on purpose more than any one filesystem allows:

* Of the changes to a file that no flush covers (writes, and the sizes of new files), any subset survives, in the order
  in which they were made. Each surviving write may be torn: sectors are written whole or not at all, in any order, so
  that prefixes, holes and scattered sectors remain. A size may stop anywhere below the one that was set, and a write
  beyond a size that was lost is lost with it.
* Of the changes to the folder that no ``sync_names`` covers, any subset survives in which a change comes with all
  earlier ones that touch the same names. A journal that commits in order gives the prefixes, which are among these;
  copy-on-write filesystems and parallel journals give others. Renames are atomic. Flushing a file does not make its
  name durable.
* Changes covered by a flush survive, unharmed. A write that was in flight when the flush was submitted is not covered.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["DiskSnapshot", "Image", "power_loss_images"]


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Bytes written to a file and not flushed."""

    offset: int
    data: bytes
    extends: bool = False
    """Whether the write was meant to grow the file. Others are cut off at a size that did not become durable."""
    completed: bool = False
    """False while the write is in flight: no flush covers it, and a process death may tear it."""

    def apply(self, content: bytearray) -> None:
        if self.extends and self.offset > len(content):
            content.extend(bytes(self.offset - len(content)))
        length = len(self.data) if self.extends else max(0, min(len(self.data), len(content) - self.offset))
        content[self.offset : self.offset + length] = self.data[:length]

    def sectors(self, sector: int) -> Iterator[Written]:
        """Split at the multiples of ``sector``: the pieces that a device writes atomically."""
        position = 0
        while position < len(self.data):
            end = min(position + sector - (self.offset + position) % sector, len(self.data))
            yield Written(self.offset + position, self.data[position:end], self.extends, self.completed)
            position = end


@dataclass(frozen=True, slots=True, eq=False)
class Resized:
    """A change that gives a new file its size, and that a power loss may undo: it was not flushed."""

    nbytes: int
    completed: bool = False

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(self.nbytes - len(content)))


Change = Written | Resized


@dataclass(frozen=True, slots=True, eq=False)
class FolderChange:
    """One atomic change of the folder: a name is given to a new file, moved to a file's new name, or removed."""

    name: str
    inode: int | None = None
    """The new file, None if a name is moved or removed."""
    to: str = ""
    """The new name, replacing any file of that name; empty if it is removed."""
    completed: bool = False
    """False while the change is in flight: no ``sync_names`` covers it."""

    @property
    def touches(self) -> frozenset[str]:
        """The names that this change reads or writes."""
        return frozenset((self.name, self.to or self.name))

    def apply(self, names: dict[str, int]) -> None:
        if self.inode is not None:
            names[self.name] = self.inode
        elif (inode := names.pop(self.name, None)) is not None and self.to:
            names[self.to] = inode


@dataclass(frozen=True, slots=True)
class FileState:
    """One file: its durable bytes, then the changes that no flush covers, oldest first."""

    durable: bytes = b""
    unflushed: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """The disk at one operation boundary. Immutable and cheap: it shares all bytes with the disk it was taken from."""

    boundary: str
    """The operation that was just submitted or completed, for messages."""
    acknowledged: int | None
    """Counter of the newest checkpoint promised to be durable, None before the first promise."""
    block_bytes: int
    files: Mapping[int, FileState]
    """By inode number."""
    names: Mapping[str, int]
    """Durable names and the inodes they stand for."""
    pending: tuple[FolderChange, ...]
    """Changes of the folder not yet durable, oldest first."""

    def reachable(self) -> list[int]:
        """Inodes that some durable image may contain."""
        linked = {change.inode for change in self.pending if change.inode is not None}
        return sorted(linked.union(self.names.values()))

    @property
    def undecided(self) -> int:
        """Changes that a power failure decides on: a number n allows up to 2 ** n images, torn writes not counted."""
        return len(self.pending) + sum(len(self.files[inode].unflushed) for inode in self.reachable())


def replay(durable: bytes, changes: Iterable[Change]) -> bytes:
    """Return ``durable`` after ``changes`` landed in their order: the same object where there are none."""
    landing = list(changes)
    content = bytearray(durable if landing else b"")
    for change in landing:
        change.apply(content)
    return bytes(content) if landing else durable


@dataclass(frozen=True, slots=True)
class Image:
    """The files found in the folder after the power came back: contents by name."""

    files: Mapping[str, bytes]
    digest: bytes
    """Hash of names and contents, to count distinct images with."""

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> Image:
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(files):
            digest.update(f"{name}\0".encode() + _digest(files[name]))
        return cls(files, digest.digest())


@functools.lru_cache(maxsize=64)
def _digest(content: bytes) -> bytes:
    """Most images of a disk share most of their files, as the same objects."""
    return hashlib.blake2b(content, digest_size=16).digest()


def power_loss_images(
    snapshot: DiskSnapshot, *, sector: int = 4096, limit: int = 64, rng: random.Random | None = None
) -> Iterator[Image]:
    """Yield distinct images, at most ``limit``, that a power failure at ``snapshot`` may leave.

    Nothing survived and everything survived come first. If all subsets of the unflushed changes fit into ``limit``,
    all are yielded; the rest of ``limit`` goes to torn writes. Otherwise changes that survive alone, changes that
    are lost alone, and random subsets with torn writes are drawn.

    Args:
        snapshot: The disk at the instant of the failure.
        sector: Unit that the device writes atomically, in bytes.
        limit: Images at most.
        rng: Source of the draws; None for a fixed one.
    """
    rng = rng or random.Random(0)
    tried: set[tuple[int, ...]] = set()
    seen: set[bytes] = set()
    for fates in itertools.islice(_choices(snapshot.undecided, limit, rng), _ATTEMPTS * limit):
        if fates in tried and _TORN not in fates:
            continue
        tried.add(fates)
        image = _image(snapshot, fates, sector, rng)
        if image.digest not in seen:
            seen.add(image.digest)
            yield image
            if len(seen) == limit:
                return


def tear(change: Change, sector: int, rng: random.Random) -> list[Change]:
    """Return the remains of a torn change: a prefix, all but a hole, or scattered sectors; a size in between."""
    if isinstance(change, Resized):
        return [Resized(rng.randrange(0, change.nbytes + 1, min(sector, change.nbytes) or 1), change.completed)]
    length = len(change.data)
    edges = [0, *range(sector - change.offset % sector, length, sector), length] if length else [0]
    count = len(edges) - 1
    first, last = sorted((rng.randint(0, count), rng.randint(0, count)))
    match rng.randrange(3):
        case 0:
            landed = [range(last)]
        case 1:
            landed = [range(first), range(last, count)] if first < last else [range(count)]
        case _:
            # Adjacent sectors are one change, so that few remain to choose subsets of.
            chosen = [rng.random() < 0.5 for _ in range(count)]
            starts = [i for i in range(count) if chosen[i] and not (i and chosen[i - 1])]
            ends = [i + 1 for i in range(count) if chosen[i] and chosen[i + 1 : i + 2] != [True]]
            landed = list(map(range, starts, ends))
    return [
        dataclasses.replace(
            change, offset=change.offset + edges[run.start], data=change.data[edges[run.start] : edges[run.stop]]
        )
        for run in landed
        if run
    ]


def closed(pending: Sequence[FolderChange], chosen: Iterable[int]) -> list[FolderChange]:
    """Return the changes at ``chosen`` without those that lack an earlier change of the same names."""
    chosen = set(chosen)
    lacking: set[str] = set()
    kept = []
    for index, change in enumerate(pending):
        if index in chosen and lacking.isdisjoint(change.touches):
            kept.append(change)
        else:
            lacking |= change.touches
    return kept


_LOST, _WHOLE, _TORN = range(3)
"""Fates of a change."""
_ATTEMPTS = 3
"""Draws for each requested image; if few images exist, most draws repeat one."""


def _image(snapshot: DiskSnapshot, fates: Sequence[int], sector: int, rng: random.Random) -> Image:
    """Return the image after these fates of the changes of a snapshot, files' before the folder's."""
    changes = [(inode, change) for inode in snapshot.reachable() for change in snapshot.files[inode].unflushed]
    survived: dict[int, list[Change]] = {}
    for (inode, change), fate in zip(changes, fates, strict=False):
        if fate == _TORN:
            survived.setdefault(inode, []).extend(tear(change, sector, rng))
        elif fate == _WHOLE:
            survived.setdefault(inode, []).append(change)
    names = dict(snapshot.names)
    folder_fates = fates[len(changes) :]
    for entry in closed(snapshot.pending, (i for i, fate in enumerate(folder_fates) if fate != _LOST)):
        entry.apply(names)
    files = {name: (snapshot.files[inode].durable, survived.get(inode, ())) for name, inode in names.items()}
    return Image.of({name: replay(durable, changed) for name, (durable, changed) in files.items()})


def _choices(count: int, limit: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Yield a fate for each of ``count`` units, again and again; endless unless there are no units."""
    yield (_LOST,) * count
    if count == 0:
        return
    yield (_WHOLE,) * count
    if count < limit.bit_length():
        yield from itertools.product((_LOST, _WHOLE), repeat=count)
    else:
        for alone in rng.sample(range(count), min(count, limit // 4)):
            odd, others = rng.choice(((_WHOLE, _LOST), (_LOST, _WHOLE), (_TORN, _WHOLE)))
            yield tuple(odd if unit == alone else others for unit in range(count))
    while True:
        lost, torn = rng.choice((0.1, 0.5, 0.9)), rng.choice((0.1, 0.5))
        yield tuple(_LOST if rng.random() < lost else _TORN if rng.random() < torn else _WHOLE for _ in range(count))
