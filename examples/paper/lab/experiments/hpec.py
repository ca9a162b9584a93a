"""The HPEC'22 paper on crash-consistent clustering: the time of one save, by the number of clusters."""

from __future__ import annotations

import importlib
import os
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from examples.paper.lab.course import DiffersError, check_restore
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.methods import CLUSTERING, Method, find_method
from examples.paper.lab.table import Row
from pccheck_async.medium.filesystem import IN_MEMORY, filesystem_type

__all__ = ["HPEC", "Place", "ratios", "saves"]

_WARM = 3
"""Rounds that are not counted: the engine's slots, the shelf's places and the others' files are created in them."""
_OURS, _WAITED = "pccheck", "pccheck until captured"
"""A save, and the part of it that the next iteration waits for: the others return when they have saved."""
_COMPARED = ("pccheck", "pccheck mapped", "shelf reassigned", "shelf in place")
_MEMORY = Path("/dev/shm")
_PROGRAMS: Final = {"kmeans": "KMeans", "gmm": "Gaussian mixture"}


class Place(NamedTuple):
    """Where is saved: a figure of its own, and what its panels say of it."""

    figure: str
    label: str
    folder: Path


class HPEC(Experiment):
    """KMeans and Gaussian mixtures on images of MNIST's shape, saved after every iteration.

    A round is an iteration, after which every method saves the state at every place, in a new order each time. All that
    the plain ways leave to be written back is written before the next way begins, which pays for nothing but its own.
    """

    name = "hpec"
    title = "How long does it take to save a clustering's state, by the number of clusters?"

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether the examples are there: a checkout that is not installed has them elsewhere."""
        found = find_spec("examples.paper")
        return None if found else "examples.paper is not here: this runs in a clone of the repository"

    def run(self, settings: Settings) -> Findings:
        """Save after every iteration by every method, on the disk and in memory."""
        for name in settings.methods or ():
            if name not in CLUSTERING:
                find_method(name)  # another experiment's
        kinds = [kind for name, kind in CLUSTERING.items() if settings.methods is None or name in settings.methods]
        findings, places = Findings(), _places(settings.folder)
        if len(places) == 1:
            findings.notes.append(f"Figures hpec: {places[0].label} only: one folder on a disk and a tmpfs are needed")
        for program, label in _PROGRAMS.items():
            ks = (2, 6, 10) if program == "kmeans" else (2, 4)
            for k in ks if settings.quick else range(2, 11):
                settings.progress(f"hpec: {label}, k = {k}")
                model = clustering(program, k, samples=500 if settings.quick else 1000)
                rows, notes = saves(kinds, model, places, settings.rounds(10), label, k)
                findings.rows += rows
                findings.notes += notes
        findings.notes += ratios(findings.rows)
        findings.notes.append(
            "Figures hpec: KMeans (NumPy) and a Gaussian mixture (torch) on synthetic images of MNIST's shape, 784 "
            "features in float64; the next round is the next iteration. What has fsync in its name, pccheck and the "
            "shelf survive a power failure on a disk; on tmpfs, where persistent memory is emulated, nothing does and "
            "fsync does nothing. Every restore was compared bit by bit."
        )
        return findings


def _places(folder: Path) -> list[Place]:
    kind = filesystem_type(folder)
    if kind in IN_MEMORY:
        return [Place("hpec-tmpfs-emulation", f"{kind} (emulation)", folder)]
    places = [Place("hpec-disk", kind, folder)]
    if os.access(_MEMORY, os.W_OK) and filesystem_type(_MEMORY) in IN_MEMORY:
        places.append(Place("hpec-tmpfs-emulation", "tmpfs (emulation)", _MEMORY))
    return places


def clustering(program: str, k: int, samples: int) -> Any:
    """Return a clustering before its first iteration.

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
    return model


def saves(
    kinds: Sequence[type[Method]], model: Any, places: Sequence[Place], rounds: int, label: str, k: int
) -> tuple[list[Row], list[str]]:
    """Save after every iteration; one that has converged begins anew.

    Args:
        kinds: The methods.
        model: A clustering that was started.
        places: Where each of them saves.
        rounds: Iterations that count.
        label: What the clustering is called.
        k: Its clusters.

    Returns:
        What every save took, and why there is nothing of a method whose restore differs.
    """
    shuffle = random.Random(1)
    rows: list[Row] = []
    notes = []
    with ExitStack() as stack:
        entries = []
        for place in places:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=place.folder))
            for number, kind in enumerate(kinds):
                entries.append((place, stack.enter_context(kind(Path(folder) / str(number)))))
        seconds: list[list[tuple[float, float]]] = [[] for _ in entries]
        for number in range(_WARM + rounds):
            if model.converged:
                model.start()
            model.iterate()
            state = model.state_dict()
            for at in shuffle.sample(range(len(entries)), len(entries)):
                seconds[at].append(_save(entries[at][1], state, number))
                os.sync()
        for (place, method), each in zip(entries, seconds, strict=True):
            try:
                check_restore(method, state, {key: _blank(value) for key, value in state.items()})
            except DiffersError as error:
                notes.append(f"Figure {place.figure}, {label}, k = {k}: failed: {error}")
                continue
            for repetition, one in enumerate(each[_WARM:]):
                rows += _rows(place, method.name, one, label, k, repetition)
    return rows, notes


def _save(method: Method, state: dict[str, Any], step: int) -> tuple[float, float]:
    """Return the seconds until the next iteration might begin, and until the method called it saved."""
    start = time.perf_counter()
    handle = method.save(state, step)
    handle.captured()
    captured = time.perf_counter() - start
    handle.wait()
    return captured, time.perf_counter() - start


def _rows(
    place: Place, method: str, seconds: tuple[float, float], label: str, k: int, repetition: int
) -> Iterator[Row]:
    captured, saved = seconds
    for name, each in ((method, saved), (_WAITED, captured))[: 1 + (method == _OURS)]:
        yield Row(
            figure=place.figure,
            workload=f"{label}, {place.label}",
            method=name,
            x=k,
            repetition=repetition,
            value=each * 1e3,
            unit="ms",
        )


def ratios(rows: Iterable[Row]) -> Iterator[str]:
    """Say for each panel how many times as long as a method of this package the ``savez`` take, over all k."""
    values: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        values.setdefault(row.workload, {}).setdefault(row.method, {}).setdefault(row.x, []).append(row.value)
    for workload, methods in values.items():
        for own in [name for name in _COMPARED if name in methods]:
            said = []
            for other in [name for name in methods if name.startswith("savez")]:
                times = [median(methods[other][x]) / median(methods[own][x]) for x in methods[own]]
                said.append(f"{other} {min(times):.2g} to {max(times):.2g}")
            if said:
                yield f"{workload}: times as long as {own}, medians, least to most over k: {', '.join(said)}."


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else value
