"""Small states: how close a save comes to the least that any crash-consistent save does."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from examples.paper.lab.bare_sequence import BareSequence
from examples.paper.lab.bits import differences, scribble
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.medians import median_interval
from examples.paper.lab.methods import Handle, Method, State
from examples.paper.lab.methods.base import Done
from examples.paper.lab.methods.files import sync_folder
from examples.paper.lab.methods.pccheck import PCcheck
from examples.paper.lab.methods.torch_save import TorchSaveRename
from examples.paper.lab.table import Row
from examples.paper.lab.workloads import Raw
from pccheck_async.bench.machine import survey

__all__ = ["Savez", "Small"]

_SIZES = (64 << 10, 1 << 20)
_TENSORS = 4
_WARM_SAVES = 10
_PAIRS, _QUICK_PAIRS = 25, 8
"""In a round, whose median is a row."""


class Savez(Method):
    """``numpy.savez`` into a new file that takes the old one's name once it is flushed, the folder flushed too."""

    name = "savez + fsync + rename"
    durable = atomic = True
    resumable = False

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint.npz"

    def save(self, state: State, step: int) -> Handle:
        """Replace the file."""
        temporary = self.file.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, step=np.int64(step), **{name: tensor.numpy() for name, tensor in state.items()})
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.file)
        sync_folder(self.folder)
        return Done()

    def load(self, into: State) -> int:
        """Copy out of the file."""
        with np.load(self.file) as file:
            for name, tensor in into.items():
                tensor.numpy()[...] = file[name]
            return int(file["step"])


_KINDS: tuple[type[Method], ...] = (PCcheck, Savez, TorchSaveRename)


class Small(Experiment):
    """Latency of saves of some kilobytes, in interleaved pairs with the bare sequence."""

    name = "small"
    title = "How long does a small state take to become durable?"

    def run(self, settings: Settings) -> Findings:
        """Measure each size; the medians of rounds are rows."""
        kinds = [kind for kind in _KINDS if settings.methods is None or kind.name in settings.methods]
        rounds, pairs = settings.rounds(9), _QUICK_PAIRS if settings.quick else _PAIRS
        findings = Findings()
        if not kinds:
            findings.notes.append(f"It is about {', '.join(kind.name for kind in _KINDS)}.")
            return findings
        with tempfile.TemporaryDirectory(prefix="pccheck-small-", dir=settings.folder) as name:
            direct = survey(Path(name)).direct
            if not direct.startswith("yes"):
                findings.notes.append(f"The bare sequence was not measured: direct I/O: {direct}.")
            for nbytes in _SIZES:
                settings.progress(f"{nbytes >> 10} KiB, {rounds} rounds of {pairs} saves with each method")
                place = Path(name) / str(nbytes)
                with _Pairs(kinds, place, nbytes, bare=direct.startswith("yes")) as measured:
                    for _ in range(rounds):
                        measured.round(pairs)
                    measured.check()
                findings.rows += measured.rows
                findings.notes += measured.notes()
        findings.notes.append(
            f"{_TENSORS} tensors of float32, every one changed before each save; each row is the median of a round of "
            f"{pairs} saves, each of them between two bare sequences, methods in a new order each time; the limit is "
            "that sequence: write, flush, write a record, flush."
        )
        return findings


class _Pairs:
    def __init__(self, kinds: Sequence[type[Method]], folder: Path, nbytes: int, *, bare: bool) -> None:
        self.workload = Raw(nbytes, _TENSORS)
        self.rows: list[Row] = []
        self._beyond: dict[str, list[float]] = {}
        self._every: dict[str, list[float]] = {}
        self._order = random.Random(0)
        self._step = self._rounds = 0
        folder.mkdir()
        self._bare = BareSequence(folder, nbytes) if bare else None
        self._methods = [kind(folder / str(at)) for at, kind in enumerate(kinds)]
        for _ in range(_WARM_SAVES):
            for method in self._methods:
                self._save(method)

    def round(self, pairs: int) -> None:
        """Save so often with each method, and note the medians."""
        seconds: dict[str, list[tuple[float, float]]] = {method.name: [] for method in self._methods}
        for _ in range(pairs):
            self._order.shuffle(self._methods)
            for method in self._methods:
                before = self._limit()
                taken = self._save(method)
                seconds[method.name].append((taken, (before + self._limit()) / 2))
        for name, both in seconds.items():
            self._every.setdefault(name, []).extend(taken * 1e3 for taken, _ in both)
            self._beyond.setdefault(name, []).extend((taken - bare) * 1e3 for taken, bare in both)
            self.rows.append(
                Row(
                    figure="small",
                    method=name,
                    x=self.workload.nbytes,
                    repetition=self._rounds,
                    value=statistics.median(taken for taken, _ in both) * 1e3,
                    unit="ms",
                    floor=statistics.median(bare for _, bare in both) * 1e3 if self._bare else None,
                )
            )
        self._rounds += 1

    def check(self) -> None:
        """Load what each method saved last."""
        self.workload.step()
        state, into = self.workload.state(), self.workload.twin().state()
        for method in self._methods:
            method.save(state, self._step).wait()
            scribble(into)
            if method.load(into) != self._step or differences(state, into):
                raise RuntimeError(f"{method.name} did not restore what it saved")

    def notes(self) -> list[str]:
        """Say what lies in the rows' medians."""
        said = []
        for name in sorted(self._every):
            median, low, high = median_interval(self._beyond[name])
            late = statistics.quantiles(self._every[name], n=100, method="inclusive")[98]
            beyond = f"{median:.3f} ms [{low:.3f}, {high:.3f}] beyond the bare sequence, " if self._bare else ""
            said.append(
                f"{self.workload.nbytes >> 10} KiB, {name}: {beyond}99th percentile {late:.2f} ms of "
                f"{len(self._every[name])} saves."
            )
        return said

    def _limit(self) -> float:
        return self._bare.seconds() if self._bare else 0.0

    def _save(self, method: Method) -> float:
        self._step += 1
        self.workload.step()
        state = self.workload.state()
        start = time.perf_counter()
        method.save(state, self._step).wait()
        return time.perf_counter() - start

    def __enter__(self) -> _Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        for method in self._methods:
            method.close()
        if self._bare:
            self._bare.close()
