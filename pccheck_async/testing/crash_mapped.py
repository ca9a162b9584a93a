# SPDX-License-Identifier: Apache-2.0
"""Persistent memory with volatile caches, for a :class:`CrashDisk` whose files are mapped.

After a power failure any subset of the stored units of 8 bytes survives (tear images with ``sector=8``), until their
cache lines of 64 bytes were written back and a fence followed: then all of them survive.
"""

from __future__ import annotations

from collections.abc import Callable

from pccheck_async.medium import File
from pccheck_async.medium.mapping import Mapping
from pccheck_async.testing.crash import CrashDisk, CrashWriter, Inode
from pccheck_async.testing.power_loss import Change

__all__ = ["ATOM", "CrashMapping", "MappedCrashWriter"]

ATOM = 8
"""Number of bytes that the processor stores atomically."""
_LINE = 64


class CrashMapping(Mapping):
    """A mapping of a file on a :class:`CrashDisk`. Tests plant a mistake by omitting or reordering its steps."""

    def __init__(self, disk: CrashDisk, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode
        self._written_back: list[Change] = []
        self.durable = True

    def _copy(self, offset: int, data: memoryview) -> None:
        change = self._disk.submit_write(self._inode, offset, bytes(data))
        self._disk.boundary(f"store [{offset}, {offset + len(data)}) begun")
        self._disk.complete_write(self._inode, change, bytes(data))
        self._disk.boundary(f"store [{offset}, {offset + len(data)})")

    def _write_back(self, offset: int, nbytes: int) -> None:
        first, end = offset // _LINE * _LINE, -(-(offset + nbytes) // _LINE) * _LINE
        self._written_back += self._disk.split(self._inode, first, end, _LINE)
        self._disk.boundary(f"lines [{first}, {end}) written back")

    def _fence(self) -> None:
        self._disk.complete_flush(self._inode, set(self._written_back))
        self._written_back.clear()
        self._disk.boundary("fence")


class MappedCrashWriter(CrashWriter):
    """A :class:`CrashWriter` that writes through mappings, so that each write is durable at once.

    ``mapping`` makes the mapping of a file.
    """

    mapping: Callable[[CrashDisk, Inode], Mapping] = CrashMapping

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        def store(_: None) -> None:
            self._writable_inode(file, offset, len(data))
            self._mapping(file).store(offset, data)

        if not self._mapping(file).settled:
            await self.flush(file)
        with self._clock.timed("write", len(data)):
            await self._perform(f"write {file.name} [{offset}, {offset + len(data)})", file.name, lambda _: None, store)

    async def flush(self, file: File) -> None:
        """Flush a file through the kernel on the first call; from then on each write is durable without a flush."""
        mapping = self._mapping(file)
        if not mapping.settled:
            await super().flush(file)
            mapping.settled = True
        else:
            with self._clock.timed("flush"):
                pass

    def _mapping(self, file: File) -> Mapping:
        if file.mapping is None:
            file.mapping = self.mapping(self.disk, self._inode(file))
        return file.mapping
