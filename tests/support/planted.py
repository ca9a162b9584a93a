"""What somebody may put in the place of a file of a store."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PLANTED", "ended", "planted"]

PLANTED = ["pipe", "folder", "link to a file", "link to a device", "link to nothing", "socket", "device"]


@contextmanager
def planted(path: Path, kind: str, victim: Path) -> Iterator[None]:
    """Put something of this kind at ``path``; links to a file lead to ``victim``."""
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(os.fspath(path))
        case "device":
            try:
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
            except PermissionError:
                pytest.skip("needs the right to make devices")
        case _:
            path.symlink_to(
                {"link to a file": victim, "link to a device": Path("/dev/zero")}.get(kind, Path("/nowhere"))
            )
    try:
        yield
    finally:
        if kind == "folder":
            path.rmdir()
        else:
            path.unlink(missing_ok=True)  # a left-over is removed, whatever it is


def ended(call: Callable[[], Any], pipe: Path) -> BaseException | None:
    """Return what a call raises, or fail if it waits for the other end of ``pipe``."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is what the caller looks at
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if waits := thread.is_alive():
        with suppress(OSError):
            other_end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            thread.join()
            os.close(other_end)
    assert not waits, f"waits for the other end of {pipe.name}"
    return raised[0] if raised else None
