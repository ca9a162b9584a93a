"""The HPEC'22 paper on crash-consistent clustering: the time of one save, by the number of clusters."""

from __future__ import annotations

import importlib
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.paper.lab.course import DiffersError, check_restore
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.methods import Method, State, find_method
from examples.paper.lab.methods.savez import Savez, SavezCompressed, SavezCompressedDurable, SavezDurable
from examples.paper.lab.table import Row
from pccheck_async.medium.filesystem import filesystem_type

__all__ = ["HPEC"]

_WARM = 1
"""Rounds that are not counted: the engine's slots and the others' files are created in them."""
_METHODS: tuple[type[Method], ...] = (
    Savez,
    SavezDurable,
    SavezCompressed,
    SavezCompressedDurable,
    find_method("torch.save + fsync + rename"),
    find_method("pccheck"),
)
_OURS, _WAITED = "pccheck", "pccheck until captured"
"""A save, and the part of it that the next iteration waits for: the others return when they have saved."""
_MEMORY = Path("/dev/shm")


class HPEC(Experiment):
    """KMeans and Gaussian mixtures on images of MNIST's shape, saved between two iterations.

    All that the plain ways leave to be written back is written before the next way begins, which pays for nothing but
    its own.
    """

    name = "hpec"
    title = "How long does it take to save a clustering's state, by the number of clusters?"

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether the examples are there: a checkout that is not installed has them elsewhere."""
        found = find_spec("examples.paper")
        return None if found else "examples.paper is not here: this runs in a clone of the repository"

    def run(self, settings: Settings) -> Findings:
        """Save the same state by every method in every round, on the disk and in memory."""
        methods = [each for each in _METHODS if settings.methods is None or each.name in settings.methods]
        for name in settings.methods or ():
            if name not in {each.name for each in _METHODS}:
                find_method(name)
        findings = Findings()
        places = {filesystem_type(settings.folder): settings.folder}
        if os.access(_MEMORY, os.W_OK) and filesystem_type(_MEMORY) == "tmpfs":
            places["tmpfs (emulation of persistent memory)"] = _MEMORY
        else:
            findings.notes.append(f"Figures hpec: {_MEMORY} is no tmpfs that can be written: the disk only")
        for program, label in (("kmeans", "KMeans"), ("gmm", "GMM")):
            ks = (2, 6, 10) if program == "kmeans" else (2, 4)
            for k in ks if settings.quick else range(2, 11):
                settings.progress(f"hpec: {label}, k = {k}")
                state = clustering(program, k, samples=500 if settings.quick else 1000)
                # Compressing a mixture takes seconds; a save of some kilobytes takes one or two thousandths.
                rounds = settings.rounds(15 if program == "kmeans" else 3)
                for where, folder in places.items():
                    rows, notes = _saves(methods, state, folder, rounds, f"hpec-{program}", f"{label}, {where}", k)
                    findings.rows += rows
                    findings.notes += notes
        findings.notes.append(
            "Figures hpec: states of KMeans (NumPy) and of a Gaussian mixture (torch) after two iterations on "
            "synthetic images of MNIST's shape, 784 features in float64; what is called durable or crash-safe and "
            "pccheck survive a power failure on a disk, nothing does on tmpfs. Every restore was compared bit by bit."
        )
        return findings


def clustering(program: str, k: int, samples: int) -> State:
    """Return the state of a clustering after two iterations.

    Args:
        program: ``kmeans`` or ``gmm``.
        k: Clusters.
        samples: Images to cluster: how many does not change the shape of the state.
    """
    examples: Any = importlib.import_module("examples.paper.clustering")
    module: Any = importlib.import_module(f"examples.paper.{program}")
    images, draw = examples.load_samples("synthetic", samples), np.random.default_rng(1)
    model = module.KMeans(images, k, 1e-4, draw) if program == "kmeans" else module.Mixture(images, k, 1e-3, 1e-3, draw)
    model.start()
    for _ in range(2):
        model.iterate()
    state: State = model.state_dict()
    return state


def _change(state: State) -> None:
    """Do what an iteration does: other bits, of the same kind."""
    for array in state.values():
        if isinstance(array, np.ndarray):
            np.multiply(array, 1 + 1e-9, out=array)
        elif isinstance(array, torch.Tensor):
            array.mul_(1 + 1e-9)


def _saves(
    kinds: Sequence[type[Method]], state: State, folder: Path, rounds: int, figure: str, workload: str, k: int
) -> tuple[list[Row], list[str]]:
    """Return what every method's saves took, and why there is nothing of a method whose restore differs."""
    shuffle = random.Random(1)
    seconds: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    if _OURS in seconds:
        seconds[_WAITED] = []
    notes = []
    with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=folder) as name, ExitStack() as stack:
        places = [(kind, Path(name) / str(at)) for at, kind in enumerate(kinds)]
        methods = [stack.enter_context(kind(place)) for kind, place in places]
        for number in range(_WARM + rounds):
            _change(state)
            for method in shuffle.sample(methods, len(methods)):
                start = time.perf_counter()
                handle = method.save(state, number)
                handle.captured()
                if method.name == _OURS:
                    seconds[_WAITED].append(time.perf_counter() - start)
                handle.wait()
                seconds[method.name].append(time.perf_counter() - start)
                os.sync()
        for method in methods:
            into = {key: _blank(value) for key, value in state.items()}
            try:
                check_restore(method, state, into)
            except DiffersError as error:
                del seconds[method.name]
                if method.name == _OURS:
                    del seconds[_WAITED]
                notes.append(f"Figure {figure}, {workload}, k = {k}: failed: {error}")
    rows = [
        Row(
            figure=figure,
            workload=workload,
            method=method,
            x=k,
            repetition=repetition,
            value=one * 1e3,
            unit="ms",
        )
        for method, each in seconds.items()
        for repetition, one in enumerate(each[_WARM:])
    ]
    return rows, notes


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else value
