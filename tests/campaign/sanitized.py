"""The extension under sanitizers, driven by the tests in Python: ``python -m tests.campaign.sanitized``.

The package is copied to a temporary folder with an extension built there; leaks are not looked for, since Python has
its own. Takes the test files to run as arguments, or a program: ``-m tests.campaign.fuzz_shelf 600``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=gnu11", "-g", "-O1", "-pthread", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
TESTS = [
    "tests/transfer/test_operations.py",
    "tests/transfer/test_extension.py",
    "tests/store/test_medium.py",
    "tests/engine/test_engine.py",
]


def main() -> int:
    """Build, run, and return what pytest returned."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("pccheck_async", "tests", "examples", "ext"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        binary = copy / "pccheck_async" / f"_ext{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = sysconfig.get_paths()["include"]
        sources = sorted((copy / "ext").glob("*.c"))
        subprocess.run(
            ["gcc", *FLAGS, "-shared", "-fPIC", f"-I{copy / 'ext'}", f"-I{include}", *sources, "-o", binary], check=True
        )
        libraries = [
            subprocess.run(
                ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        env = os.environ | {
            "LD_PRELOAD": ":".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_segv=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "PYTHONPATH": str(copy),
            "PYTHONMALLOC": "malloc",
        }
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
        command = sys.argv[1:] if sys.argv[1:2] == ["-m"] else [*pytest, *(sys.argv[1:] or TESTS)]
        return subprocess.run([sys.executable, *command], cwd=copy, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
