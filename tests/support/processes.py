"""Forked children and open files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Names of the files in ``folder`` that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is gone
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link.startswith(str(folder))]


def forked(body: Callable[[], None]) -> int:
    """Run ``body`` in a child and return what it ended with: 0, 1 where it raised, minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:  # noqa: BLE001 - told, and then the child ends
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def passes_in_a_forked_child(check: Callable[[], None]) -> bool:
    """Whether ``check`` raises nothing in a forked child, which never returns into the test runner."""
    return forked(check) == 0
