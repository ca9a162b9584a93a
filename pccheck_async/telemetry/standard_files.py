# SPDX-License-Identifier: Apache-2.0
"""Standard input, output and error of a process that was started without them."""

from __future__ import annotations

import os

__all__ = ["fill_standard_files"]


def fill_standard_files() -> None:
    """Open ``/dev/null`` in place of those of the descriptors 0 to 2 that are closed.

    Otherwise the next file that is opened would get such a number: a slot, which error messages to descriptor 2 would
    overwrite, or a file of uvloop, which ends the process when it has to close one of these descriptors.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # the lowest number that is free is the one that is opened
            os.set_inheritable(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), True)
