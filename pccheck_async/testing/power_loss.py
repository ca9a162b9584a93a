# SPDX-License-Identifier: Apache-2.0
"""The contents of a ``CrashDisk`` at one instant, and every folder that may be found after a power failure then.

The model allows these effects of a power failure, intentionally more than any one filesystem does:

* Of the changes to a file that no flush covers (writes, and the sizes of new files), any subset survives, in the order
  in which they were made. Each surviving write may be torn: sectors are written whole or not at all, in any order, so
  that prefixes, holes and scattered sectors remain. A file may have any size below the one that was set, and a write
  beyond the size that remains is lost.
* Of the changes to the folder that no ``sync_names`` covers, any subset survives in which a change comes with all
  earlier ones that touch the same names. A journal that commits in order results in prefixes, which are among these;
  copy-on-write filesystems and parallel journals result in others. Renames are atomic. Flushing a file does not make
  its name durable.
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
    """A write to a file that was not flushed."""

    offset: int
    data: bytes
    extends: bool = False
    """Whether the write grows the file. Other writes are cut off at the file's end if its size was lost."""
    completed: bool = False
    """Whether the write has ended. While it is in flight, no flush covers it, and a process death may tear it."""

    def apply(self, content: bytearray) -> None:
        if self.extends and self.offset > len(content):
            content.extend(bytes(self.offset - len(content)))
        length = len(self.data) if self.extends else max(0, min(len(self.data), len(content) - self.offset))
        content[self.offset : self.offset + length] = self.data[:length]

    def sectors(self, sector: int) -> Iterator[Written]:
        """Yield the pieces that a device writes atomically: the write, split at the multiples of ``sector``."""
        position = 0
        while position < len(self.data):
            end = min(position + sector - (self.offset + position) % sector, len(self.data))
            yield Written(self.offset + position, self.data[position:end], self.extends, self.completed)
            position = end


@dataclass(frozen=True, slots=True, eq=False)
class Resized:
    """The change that sets the size of a new file. As it was not flushed, a power failure may undo it."""

    nbytes: int
    completed: bool = False

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(self.nbytes - len(content)))


Change = Written | Resized


@dataclass(frozen=True, slots=True, eq=False)
class FolderChange:
    """One atomic change of the folder: a file is created, renamed or removed."""

    name: str
    inode: int | None = None
    """Number of the created file; None if a file is renamed or removed."""
    to: str = ""
    """The new name of a renamed file, which replaces any file of that name; else empty."""
    completed: bool = False
    """Whether the change has ended. While it is in flight, no ``sync_names`` covers it."""

    @property
    def touches(self) -> frozenset[str]:
        """Return the names that this change reads or writes."""
        return frozenset((self.name, self.to or self.name))

    def apply(self, names: dict[str, int]) -> None:
        if self.inode is not None:
            names[self.name] = self.inode
        elif (inode := names.pop(self.name, None)) is not None and self.to:
            names[self.to] = inode


@dataclass(frozen=True, slots=True)
class FileState:
    """One file: its durable bytes, and the changes that no flush has made durable, oldest first."""

    durable: bytes = b""
    unflushed: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """The disk at one operation boundary. Immutable, and cheap, since it shares all bytes with the disk."""

    boundary: str
    """The operation that was just submitted or completed, for messages."""
    acknowledged: int | None
    """Counter of the newest checkpoint reported as durable; None if there is none."""
    block_bytes: int
    files: Mapping[int, FileState]
    """All files, by inode number."""
    names: Mapping[str, int]
    """Durable names of files, with their inode numbers."""
    pending: tuple[FolderChange, ...]
    """Changes of the folder that are not durable yet, oldest first."""

    def reachable(self) -> list[int]:
        """Return the numbers of the inodes that an image may contain, sorted."""
        linked = {change.inode for change in self.pending if change.inode is not None}
        return sorted(linked.union(self.names.values()))

    @property
    def undecided(self) -> int:
        """Return the number of changes that a power failure may lose: n allow 2 ** n images, torn writes aside."""
        return len(self.pending) + sum(len(self.files[inode].unflushed) for inode in self.reachable())


def replay(durable: bytes, changes: Iterable[Change]) -> bytes:
    """Return ``durable`` with ``changes`` applied in order; the same object if there are none."""
    landing = list(changes)
    content = bytearray(durable if landing else b"")
    for change in landing:
        change.apply(content)
    return bytes(content) if landing else durable


@dataclass(frozen=True, slots=True)
class Image:
    """The files found in the folder after a power failure: contents by name."""

    files: Mapping[str, bytes]
    digest: bytes
    """Hash of names and contents, by which distinct images are told apart."""

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> Image:
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(files):
            digest.update(f"{name}\0".encode() + _digest(files[name]))
        return cls(files, digest.digest())


@functools.lru_cache(maxsize=64)
def _digest(content: bytes) -> bytes:
    """Return a hash of a file's content; cached, since images of a disk share the contents of most files."""
    return hashlib.blake2b(content, digest_size=16).digest()


def power_loss_images(
    snapshot: DiskSnapshot, *, sector: int = 4096, limit: int = 64, rng: random.Random | None = None
) -> Iterator[Image]:
    """Yield distinct images, at most ``limit``, that a power failure at ``snapshot`` may leave.

    The first two images are those in which all unflushed changes are lost, and in which all survive. If all subsets of
    the changes fit into ``limit``, all follow, and then images with torn writes. Otherwise some images follow in which
    one change alone survives, is lost or is torn, and then random subsets with torn writes.

    Args:
        snapshot: The disk at the instant of the failure.
        sector: Unit that the device writes atomically, in bytes.
        limit: Most images.
        rng: Random generator; None for one with a fixed seed.
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
    """Return the parts of a torn change that survive.

    For a write a prefix, all but a hole, or scattered sectors; for a new file's size a smaller size.
    """
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
    """Return the ``chosen`` changes (by index), except those after an omitted change of the same names."""
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
"""Fates of a change in a power failure: it is lost, survives whole, or is torn."""
_ATTEMPTS = 3
"""Number of draws for each requested image: if few images exist, most draws repeat one."""


def _image(snapshot: DiskSnapshot, fates: Sequence[int], sector: int, rng: random.Random) -> Image:
    """Return the image of a snapshot, given a fate for each unflushed change of files, then for each of the folder."""
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
    """Yield tuples of fates for ``count`` changes, most of them random; endless unless ``count`` is 0."""
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
