"""Filesystems of their own on loop devices, and the power failing under them. Needs root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

MIB = 1 << 20
MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-m", "0"],
    "ext4 of 1 KiB blocks": ["mkfs.ext4", "-q", "-m", "0", "-b", "1024"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
    "ext2": ["mkfs.ext2", "-q", "-m", "0"],
    "tmpfs": [],
    "overlay": ["mkfs.ext4", "-q", "-m", "0"],
}
"""How each is made."""

_SHUTDOWN = 0x8004587D
"""``_IOR('X', 125, __u32)``: EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN."""
LOG_FLUSHED, LOG_LOST = 1, 2
"""Whether the journal in memory still reaches the device."""


def unmount(place: Path) -> None:
    """Take a filesystem off, as soon as requests of processes and rings that ended have ended, too."""
    for _ in range(200):
        if not subprocess.run(["umount", place], check=False, capture_output=True).returncode:
            return
        time.sleep(0.05)
    subprocess.run(["umount", place], check=True)


class Mounted:
    """A filesystem that is mounted while this is entered.

    Args:
        folder: Where the image and the mount point go.
        kind: One of :data:`MAKE`.
        nbytes: Its size.

    Attributes:
        place: The mount point.
    """

    def __init__(self, folder: Path, kind: str, nbytes: int = 320 * MIB) -> None:
        self._folder, self._kind = folder, kind
        self._image = folder / "image"
        self._below = folder / "below"
        self.place = folder / "mount"
        make = MAKE[kind]
        if os.geteuid() != 0 or (make and not shutil.which(make[0])):
            pytest.skip(f"needs root and {make[0] if make else 'mount'}")
        self.place.mkdir()
        self._nbytes = nbytes
        if make:
            with self._image.open("wb") as file:
                file.truncate(nbytes)
            subprocess.run([*make, self._image], check=True, capture_output=True)

    def __enter__(self) -> Self:
        self.mount()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.unmount()

    def mount(self) -> None:
        """Mount it; the journal is not committed by the clock."""
        if self._kind == "tmpfs":
            self._mount("-t", "tmpfs", "-o", f"size={self._nbytes}", "tmpfs", self.place)
        elif self._kind == "overlay":
            self._below.mkdir(exist_ok=True)
            self._mount("-o", "loop", self._image, self._below)
            upper, work, lower = (self._below / name for name in ("upper", "work", "lower"))
            for each in (upper, work, lower):
                each.mkdir(exist_ok=True)
            options = f"lowerdir={lower},upperdir={upper},workdir={work}"
            self._mount("-t", "overlay", "-o", options, "overlay", self.place)
        else:
            self._mount("-o", "loop,commit=300" if self._kind.startswith("ext4") else "loop", self._image, self.place)

    def unmount(self) -> None:
        """Take it off."""
        unmount(self.place)
        if self._kind == "overlay":
            unmount(self._below)

    def lose_power(self, how: int) -> None:
        """Let no write reach the device any more."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, how.to_bytes(4, "little"))
        finally:
            os.close(fd)

    def abort(self) -> None:
        """Let ext4 find its journal aborted: from now on the filesystem is read-only."""
        subprocess.run(["mount", "-o", "remount,abort", self.place], check=True)

    @staticmethod
    def _mount(*arguments: str | Path) -> None:
        done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot be mounted here: {done.stderr.strip()}")
