# SPDX-License-Identifier: Apache-2.0
"""Standard input, output and error of a process that was started without them."""

from __future__ import annotations

import os

__all__ = ["fill_standard_files"]


def fill_standard_files() -> None:
    """Put ``/dev/null`` where descriptors 0 to 2 are closed.

    The next file that is opened would get such a number: a slot, overwritten by error messages to descriptor 2, or a
    descriptor of uvloop's, which ends the process when it is to close one of these.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # the lowest number that is free is the one that is opened
            os.set_inheritable(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), True)
