# SPDX-License-Identifier: Apache-2.0
"""``python -m pccheck_async`` is the ``pccheck`` command, and so is its installed script."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command. Ctrl-C ends it with status 130 and without a traceback, also during its imports."""
    try:
        from pccheck_async.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
