# SPDX-License-Identifier: Apache-2.0
"""The kind of filesystem that a folder is on, and its alignment for direct I/O, from the kernel and by a trial."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from pccheck_async.format.record import COMMIT_NAME, REGION_NBYTES, slot_number
from pccheck_async.medium.base import MediumFacts
from pccheck_async.medium.folder import open_new, open_regular
from pccheck_async.transfer import PAGE_BYTES, map_memory

try:
    from pccheck_async._ext import dio_alignment
except ImportError:  # built without a compiler

    def dio_alignment(fd: int, /) -> tuple[int, int] | None:
        """Return None: only the extension can query the kernel."""
        return None


__all__ = ["IN_MEMORY", "filesystem_type", "free_bytes", "probe", "slot_bytes", "slot_sizes"]

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""Filesystems in memory. Newer kernels accept O_DIRECT on them, aligned or not, but still use the page cache."""
WEAK_RESERVATION = frozenset(
    {"btrfs", "zfs", "bcachefs", "overlay", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs"}
)
"""Copy-on-write, layered or remote filesystems: reserved space may still be missing when it is written."""


def direct_alignment(fd: int) -> tuple[int, int]:
    """Return (memory alignment, offset and length alignment) in bytes for direct I/O on an open file.

    If the kernel does not report it (before Linux 6.1, some filesystems), the larger of page and preferred block size
    is assumed: every filesystem known to do direct I/O accepts it. Raises OSError if the file takes no direct I/O.
    """
    told = dio_alignment(fd)
    if told == (0, 0):
        raise OSError(errno.EOPNOTSUPP, "the kernel says that this file takes no direct I/O")
    if told is not None:
        return told
    preferred = os.fstat(fd).st_blksize
    power_of_two = preferred if preferred & (preferred - 1) == 0 else PAGE_BYTES
    return PAGE_BYTES, max(PAGE_BYTES, min(power_of_two, 64 * 1024))


def filesystem_type(folder: str | os.PathLike[str]) -> str:
    """Return the name of the filesystem that ``folder`` is on ("ext4"); "unknown" if the kernel does not report it."""
    try:
        # By the mount, not by the device: that of a btrfs subvolume, or of an overlay, is not the one that is mounted.
        wanted = _mount(folder)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[0] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown"


def _mount(folder: str | os.PathLike[str]) -> str:
    """Return the mount ID, as in ``/proc/self/mountinfo``, of the mount that ``folder`` is on; "" if it is unknown."""
    fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    return next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")


def probe(folder: Path, create: bool) -> MediumFacts:
    """Return alignment and direct I/O of a folder, by a trial: O_DIRECT may be refused at open, or at a transfer."""
    kind = filesystem_type(folder)
    if kind in IN_MEMORY:
        return _buffered(f"{kind} lies in memory")
    try:
        fd, writable = _open_probe(folder, create)
    except OSError as error:
        return _buffered(f"O_DIRECT is refused at open ({error.strerror})")
    try:
        memory_alignment, block = direct_alignment(fd)
        if block > REGION_NBYTES or block & (block - 1):  # such as XFS's allocation units for copy on write
            return _buffered(f"O_DIRECT takes blocks of {block} bytes here; a store's are powers of two up to 64 KiB")
        with map_memory(block) as memory, memoryview(memory)[:block] as view:
            try:
                _ = os.pwrite(fd, view, 0) if writable else os.preadv(fd, [view], 0)
            except OSError as error:  # a device that fails to read has taken the transfer
                if writable or error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
    except OSError as error:
        return _buffered(f"O_DIRECT is refused at the first transfer ({error.strerror})")
    finally:
        os.close(fd)
    reservation = "; space reserved here may still be missing later" if kind in WEAK_RESERVATION else ""
    why = f"O_DIRECT works on this {kind} in blocks of {block} bytes{reservation}"
    return MediumFacts(block, memory_alignment, direct=True, why=why)


def _open_probe(folder: Path, create: bool) -> tuple[int, bool]:
    """Open a file with O_DIRECT for a trial; return its descriptor, and whether it is writable.

    An existing store is probed by reading its records, so that opening it writes nothing; a group's folder by those of
    a rank; a new folder, with ``create``, by writing a nameless file. Raises OSError.
    """
    try:
        return open_regular(folder / COMMIT_NAME, os.O_RDONLY | os.O_DIRECT), False
    except FileNotFoundError:
        if not create:
            commit = next(folder.glob(f"rank-*/{COMMIT_NAME}"), None)
            if commit is None:
                raise
            return open_regular(commit, os.O_RDONLY | os.O_DIRECT), False
    fd, path = open_new(folder, os.O_DIRECT)
    if path is not None:
        path.unlink()
    return fd, True


def _buffered(why: str) -> MediumFacts:
    return MediumFacts(PAGE_BYTES, 1, direct=False, why=why)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write on the filesystem of ``folder``, which need not exist."""
    facts = os.statvfs(next(parent for parent in (folder, *folder.parents) if parent.exists()))
    return facts.f_bavail * facts.f_frsize


def slot_bytes(folder: Path) -> int:
    """Return the bytes of the slots of the store in ``folder``, 0 where there is none."""
    return sum(slot_sizes(folder))


def slot_sizes(folder: Path) -> list[int]:
    """Return the bytes of each slot of the store in ``folder``; none where there is no store."""
    sizes = []
    if folder.is_dir():
        for entry in os.scandir(folder):
            if slot_number(entry.name) is not None:
                with suppress(OSError):  # an engine may remove it meanwhile, and a bad one has no size
                    sizes.append(entry.stat().st_size)
    return sizes
