"""The tests of the engine on other filesystems: ``python -m tests.campaign.filesystems [xfs btrfs ...]``. Needs root.

Each is made on a loop device (tmpfs in memory), and the tests run with their folders on it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.loop_devices import MAKE, MIB, Mounted

TESTS = [
    "tests/engine/test_engine.py",
    "tests/engine/test_failures.py",
    "tests/store/test_medium.py",
    "tests/engine/test_cancellation.py",
]


def main() -> int:
    """Run on each and say what came of it; return how many had failures."""
    failed = 0
    for kind in sys.argv[1:] or MAKE:
        with tempfile.TemporaryDirectory() as folder, Mounted(Path(folder), kind, 1024 * MIB) as device:
            base = device.place / "base"
            command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={base}", *TESTS]
            ran = subprocess.run(command, check=False, capture_output=True, text=True)
        lines = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
        print(f"{kind}: {ran.stdout.splitlines()[-1]}", *lines[:20], sep="\n  ", flush=True)
        failed += bool(ran.returncode)
    return failed


if __name__ == "__main__":
    sys.exit(main())
