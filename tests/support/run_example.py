"""``python -m tests.support.run_example NAME [STEPS]`` runs an example as ``python examples/NAME.py [STEPS]`` does."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

__all__ = ["EXAMPLES", "ignore_warnings_of_trainers"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def ignore_warnings_of_trainers() -> None:
    """Ignore what code of Lightning and of Hugging Face does, and what it advises."""
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec", FutureWarning)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")


def main() -> None:
    """Run it, with warnings that are errors."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # Python 3.12: fork of a loader's workers
    ignore_warnings_of_trainers()
    path = str(EXAMPLES / f"{sys.argv[1]}.py")
    sys.argv = [path, *sys.argv[2:]]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
