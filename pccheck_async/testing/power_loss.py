"""Every folder that may be found after the power failed at one instant.

What the model lets a power failure do, on purpose more than any one filesystem does:

* Of the changes to a file that no flush covers (writes, and the sizes of new files), any subset survives, in the order
  in which they were made. Each surviving write may be torn: sectors are written whole or not at all, in any order, so
  that prefixes, holes and scattered sectors remain. A size may stop anywhere below the one that was set, and a write
  beyond a size that was lost is lost with it.
* Of the changes to the folder that no ``sync_names`` covers, any subset survives in which a change comes with all
  earlier ones that touch the same names. A journal that commits in order gives the prefixes, which are among these;
  copy-on-write filesystems and parallel journals give others. Renames are atomic. Flushing a file does not make its
  name durable.
* What a flush covers survives, unharmed. A write that was in flight when the flush was submitted is not covered.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pccheck_async.testing.snapshot import Change, FolderChange, Resized, Snapshot, Written, replay

__all__ = ["Image", "closed", "power_loss_images", "tear"]


@dataclass(frozen=True, slots=True)
class Image:
    """The files found in the folder after the power came back.

    Attributes:
        files: Contents by name.
        digest: Hash of names and contents, to count distinct images with.
    """

    files: Mapping[str, bytes]
    digest: bytes

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> Image:
        """Make an image of files by name."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(files):
            digest.update(f"{name}\0".encode() + _digest(files[name]))
        return cls(files, digest.digest())


@functools.lru_cache(maxsize=64)
def _digest(content: bytes) -> bytes:
    """Most images of a disk share most of their files, as the same objects."""
    return hashlib.blake2b(content, digest_size=16).digest()


def power_loss_images(
    snapshot: Snapshot, *, sector: int = 4096, limit: int = 64, rng: random.Random | None = None
) -> Iterator[Image]:
    """Yield distinct images, at most ``limit``, that a power failure at ``snapshot`` may leave.

    Nothing survived and everything survived come first. Where all subsets of the unflushed changes fit into ``limit``,
    all are yielded; what is left of ``limit`` goes to torn writes. Otherwise changes that survive alone, changes that
    are lost alone, and random subsets with torn writes are drawn.

    Args:
        snapshot: The disk at the instant of the failure.
        sector: What the device writes atomically, in bytes.
        limit: Images at most.
        rng: Source of the draws; None for a fixed one.
    """
    rng = rng or random.Random(0)
    units = _Units(snapshot)
    tried: set[tuple[int, ...]] = set()
    seen: set[bytes] = set()
    for fates in itertools.islice(_choices(units.count, limit, rng), _ATTEMPTS * limit):
        if fates in tried and _TORN not in fates:
            continue
        tried.add(fates)
        image = units.image(fates, sector, rng)
        if image.digest not in seen:
            seen.add(image.digest)
            yield image
            if len(seen) == limit:
                return


def tear(change: Change, sector: int, rng: random.Random) -> list[Change]:
    """Return what remains of a torn change: a prefix, all but a hole, or scattered sectors; a size in between."""
    if isinstance(change, Resized):
        return [Resized(rng.randrange(0, change.nbytes + 1, min(sector, change.nbytes) or 1), change.completed)]
    sectors = list(change.sectors(sector))
    first, last = sorted((rng.randint(0, len(sectors)), rng.randint(0, len(sectors))))
    match rng.randrange(3):
        case 0:
            landed = sectors[:last]
        case 1:
            landed = sectors[:first] + sectors[last:]
        case _:
            landed = [part for part in sectors if rng.random() < 0.5]
    return list(_joined(landed))


def _joined(parts: Iterable[Written]) -> Iterator[Written]:
    """Join what is adjacent, so that few changes remain to choose subsets of."""
    last: Written | None = None
    for part in parts:
        if last is not None and last.offset + len(last.data) == part.offset:
            last = dataclasses.replace(last, data=last.data + part.data)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


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
"""Draws for each image asked for; where few images exist, most draws repeat one."""


class _Units:
    """The changes of a snapshot that a power failure decides on, files' before the folder's."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._changes = [(inode, c) for inode in snapshot.reachable() for c in snapshot.files[inode].unflushed]
        self.count = snapshot.undecided

    def image(self, fates: Sequence[int], sector: int, rng: random.Random) -> Image:
        survived: dict[int, list[Change]] = {}
        for (inode, change), fate in zip(self._changes, fates, strict=False):
            if fate == _TORN:
                survived.setdefault(inode, []).extend(tear(change, sector, rng))
            elif fate == _WHOLE:
                survived.setdefault(inode, []).append(change)
        names = dict(self._snapshot.names)
        folder_fates = fates[len(self._changes) :]
        for entry in closed(self._snapshot.pending, (i for i, fate in enumerate(folder_fates) if fate != _LOST)):
            entry.apply(names)
        return Image.of({name: self._content(inode, survived.get(inode, ())) for name, inode in names.items()})

    def _content(self, inode: int, survived: Sequence[Change]) -> bytes:
        durable = self._snapshot.files[inode].durable
        return replay(durable, survived) if survived else durable


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
