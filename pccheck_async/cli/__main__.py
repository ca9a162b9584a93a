# SPDX-License-Identifier: Apache-2.0
"""``python -m pccheck_async.cli`` is the ``pccheck`` command."""

from pccheck_async.cli import main

if __name__ == "__main__":
    main()
