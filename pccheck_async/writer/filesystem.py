"""What kind of filesystem a folder is on, and what direct I/O asks for there, both from the kernel itself."""

from __future__ import annotations

import errno
import os

from pccheck_async.memory import PAGE_BYTES

try:
    from pccheck_async._ext import dio_alignment
except ImportError:  # built without a compiler

    def dio_alignment(fd: int, /) -> tuple[int, int] | None:
        """Without the extension the kernel is not asked."""
        return None


__all__ = ["IN_MEMORY", "WEAK_RESERVATION", "direct_alignment", "filesystem_type"]

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""Newer kernels accept O_DIRECT here, aligned or not, and go through the page cache all the same."""
WEAK_RESERVATION = frozenset(
    {"btrfs", "zfs", "bcachefs", "overlay", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs"}
)
"""Copy-on-write, layered or remote: space that was reserved may still be missing when it is written."""


def direct_alignment(fd: int) -> tuple[int, int]:
    """Return (memory alignment, offset and length alignment) in bytes for direct I/O on an open file.

    Where the kernel does not say (before Linux 6.1, some filesystems), the larger of page and preferred block size is
    assumed: every filesystem known to do direct I/O accepts it. Raises OSError where the kernel says there is none.
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
    """Return the name of the filesystem that ``folder`` is on ("ext4"), "unknown" where the kernel does not tell."""
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown"
