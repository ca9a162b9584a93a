"""Runs one of the examples in this process, as ``python examples/NAME.py`` does."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo  # imported here, like the rest, once, by the server that forks processes; optimizers import it

import pccheck_async.api.engine
import pccheck_async.api.sync
import pccheck_async.training.data  # noqa: F401

__all__ = ["EXAMPLES", "run_example"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, folder: str, arguments: list[str]) -> None:
    """Run it in ``folder``, with what it prints appended to the file ``output`` there."""
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for a loader's workers: they would inherit the server's
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # Python 3.12: fork of a loader's workers
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec", FutureWarning)  # Lightning's own, and the next
    warnings.filterwarnings("ignore", ".*does not have many workers")
    path = str(EXAMPLES / f"{name}.py")
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
