"""What a :class:`~pccheck_async.testing.CrashDisk` held at one instant: what is durable, and what is not yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

__all__ = [
    "Change",
    "FileState",
    "FolderChange",
    "Resized",
    "Snapshot",
    "Written",
    "replay",
]


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Bytes written to a file and not flushed.

    Attributes:
        offset: Where, in bytes.
        data: What.
        extends: Whether the write was meant to grow the file. Others are cut off at a size that did not become durable.
        completed: False while the write is in flight: no flush covers it, and a process death may tear it.
    """

    offset: int
    data: bytes
    extends: bool = False
    completed: bool = False

    def apply(self, content: bytearray) -> None:
        """Let the bytes land in ``content``."""
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
    """The size of a new file that is not durable."""

    nbytes: int
    completed: bool = False

    def apply(self, content: bytearray) -> None:
        """Fill ``content`` up with zeros."""
        content.extend(bytes(self.nbytes - len(content)))


Change = Written | Resized


@dataclass(frozen=True, slots=True, eq=False)
class FolderChange:
    """One atomic change of the folder: a name is given to a new file, moved to a file's new name, or removed.

    Attributes:
        name: The name given, or the one that is gone.
        inode: The new file, None where a name is moved or removed.
        to: The name it moves to, replacing what had that; empty where it is removed.
        completed: False while the change is in flight: no ``sync_names`` covers it.
    """

    name: str
    inode: int | None = None
    to: str = ""
    completed: bool = False

    @property
    def touches(self) -> frozenset[str]:
        """The names that this change reads or writes."""
        return frozenset((self.name, self.to or self.name))

    def apply(self, names: dict[str, int]) -> None:
        """Change ``names``."""
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
class Snapshot:
    """The disk at one operation boundary. Immutable and cheap: it shares all bytes with the disk it was taken from.

    Attributes:
        boundary: The operation that was just submitted or completed, for messages.
        acknowledged: Counter of the newest checkpoint promised to be durable, None before the first promise.
        block_bytes: Alignment the disk asks for.
        files: Contents by inode number.
        names: Durable names and the inodes they stand for.
        pending: Changes of the folder not yet durable, oldest first.
    """

    boundary: str
    acknowledged: int | None
    block_bytes: int
    files: Mapping[int, FileState]
    names: Mapping[str, int]
    pending: tuple[FolderChange, ...]

    def reachable(self) -> list[int]:
        """Inodes that some durable image may contain."""
        linked = {change.inode for change in self.pending if change.inode is not None}
        return sorted(linked.union(self.names.values()))

    @property
    def undecided(self) -> int:
        """Changes that a power failure decides on: a number n allows up to 2 ** n images, torn writes not counted."""
        return len(self.pending) + sum(len(self.files[inode].unflushed) for inode in self.reachable())


def replay(durable: bytes, changes: Iterable[Change]) -> bytes:
    """Return ``durable`` after ``changes`` landed in their order."""
    content = bytearray(durable)
    for change in changes:
        change.apply(content)
    return bytes(content)
