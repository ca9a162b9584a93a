# SPDX-License-Identifier: Apache-2.0
"""The medium for persistent memory: files of a folder, mapped into memory (PCcheck, section 3.3)."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from pccheck_async.errors import DurabilityUnknownError
from pccheck_async.medium.base import File, MediumFacts, Part, Piece, StepwiseMedium
from pccheck_async.medium.files import REMOVED, Files, map_error
from pccheck_async.medium.filesystem import IN_MEMORY, filesystem_type
from pccheck_async.medium.folder import open_nameless
from pccheck_async.medium.mapping import INSTRUCTIONS, Kind, Mapping, map_file
from pccheck_async.telemetry import write
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.transfer.operations import MOST_BYTES_ON_LOOP

__all__ = ["MappedFiles", "kind_of_folder"]

_WHY: dict[Kind, str] = {
    "persistent": "the filesystem maps persistent memory (MAP_SYNC)",
    "emulated": "tmpfs lies in memory: persistent memory is emulated, and nothing survives the power",
    "cached": "mapped files of the page cache, which msync flushes",
}


def kind_of_folder(folder: Path) -> Kind:
    """Return the kind of mapped files in a folder, or in the nearest folder above it that exists.

    For that, a new file without a name is mapped; nothing is written to an existing store.
    """
    folder = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    with suppress(OSError):
        fd = open_nameless(folder)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            map_file(fd, PAGE_BYTES, sync=True)
            return "persistent"
        finally:
            os.close(fd)
    return "emulated" if filesystem_type(folder) in IN_MEMORY else "cached"


class MappedFiles(StepwiseMedium, Files):
    """:class:`Files` that are written through mappings.

    On persistent memory, data is durable as soon as it is written, without a system call.
    """

    chains = True
    stages = True
    _kind: Kind = "cached"  # until it is prepared: right everywhere

    async def prepare(self, *, create: bool) -> MediumFacts:
        if create:
            await self._make_folder()
        self._kind = kind = await self._operations.call(kind_of_folder, self._folder.path)
        by = "" if kind == "cached" else f"; lines are written back by {INSTRUCTIONS or 'msync'}"
        self._facts = MediumFacts(PAGE_BYTES, 1, direct=kind == "persistent", why=_WHY[kind] + by)
        write("mapped", "%s: %s", self._folder.path, self._facts.why)
        return self._facts

    @property
    def _direct_flag(self) -> int:
        return 0

    async def reserve(self, name: str, nbytes: int) -> File:
        file = await super().reserve(name, nbytes)
        try:
            return await self._map(file, is_new=True)
        except BaseException:
            await self.close(file)
            await self.remove(name)
            raise

    async def open(self, name: str, *, writable: bool) -> File:
        file = await super().open(name, writable=writable)
        try:
            return await self._map(file, is_new=False) if writable else file
        except BaseException:
            await self.close(file)
            raise

    async def _map(self, file: File, *, is_new: bool) -> File:
        if file.nbytes:
            with self._errors(file.name, map_error):
                map_it = partial(Mapping, file.fd, file.nbytes, self._kind, is_new=is_new)
                file.mapping = await self._operations.call(map_it)
        return file

    def stage(self, file: File, offset: int, nbytes: int) -> memoryview | None:
        return None if file.mapping is None else file.mapping.view[offset : offset + nbytes]

    async def view(self, file: File, offset: int, nbytes: int) -> memoryview | None:
        mapping = file.mapping
        # Pages of the page cache would come one fault after the other.
        in_memory = mapping is not None and mapping.durable and offset + nbytes <= file.nbytes
        return mapping.view[offset : offset + nbytes] if mapping is not None and in_memory else None

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        mapping = file.mapping
        if mapping is None:
            await super().write(file, offset, data)
            return
        start = time.perf_counter()
        try:
            if not mapping.settled:
                await self._settle(file, mapping)
            if len(data) <= MOST_BYTES_ON_LOOP:
                mapping.store(offset, data)
            else:
                await self._operations.call(mapping.store, offset, data)
        except OSError as error:
            raise map_error(error, self._folder.path / file.name) from error
        finally:
            self._clock.note("write", start, time.perf_counter(), len(data))

    async def flush(self, file: File) -> None:
        mapping = file.mapping
        start = time.perf_counter()
        try:
            if mapping is None:
                await self._operations.flush(file.fd)
            elif not mapping.settled:
                await self._settle(file, mapping)
            elif not mapping.durable:
                await self._operations.call(mapping.flush)
        except OSError as error:
            raise map_error(error, self._folder.path / file.name) from error
        finally:
            self._clock.note("flush", start, time.perf_counter())

    async def _settle(self, file: File, mapping: Mapping) -> None:
        # Crash: the new file has no size yet, or data that a dead predecessor stored was in caches only (I12).
        await self._operations.flush(file.fd)
        mapping.settled = True

    async def make_durable(self, parts: Sequence[Part], *, ignore_cancellation: bool = False) -> None:
        for file, _ in parts:
            # Else all could succeed, and be gone with the descriptors.
            if os.fstat(file.fd).st_nlink == 0:
                removed = OSError(errno.ENOENT, REMOVED)
                raise DurabilityUnknownError.of(map_error(removed, self._folder.path / file.name)) from removed
        if all(_at_once(*part) for part in parts):
            await self._make_durable(parts)  # nothing in it waits, so nothing can cancel it
        else:
            await super().make_durable(parts, ignore_cancellation=ignore_cancellation)


def _at_once(file: File, pieces: Sequence[Piece]) -> bool:
    """Whether pieces of a file become durable without waiting for a thread or the kernel."""
    mapping = file.mapping
    ready = mapping is not None and mapping.durable and mapping.settled
    return ready and all(len(data) <= MOST_BYTES_ON_LOOP for _, data in pieces)
