"""``python -m pccheck_async.cli`` is the ``pccheck`` command."""

from pccheck_async.cli import main

if __name__ == "__main__":
    main()
