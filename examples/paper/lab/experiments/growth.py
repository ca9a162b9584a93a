"""How cost grows with the bytes of a state, the number of its tensors, and the number of checkpoints so far."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from examples.paper.lab.bits import scribble
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.methods.pccheck import PCcheck
from examples.paper.lab.table import Row
from pccheck_async import SyncCheckpointEngine
from pccheck_async.bench.machine import survey
from pccheck_async.bench.raw_disk import RawDisk, RawLimit, slot_file
from pccheck_async.bench.rounds import evict
from pccheck_async.format import align
from pccheck_async.transfer import available_memory

__all__ = ["Growth"]

MIB, GIB = 1 << 20, 1 << 30
_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB, 8 * GIB)
_TENSORS = (1, 10, 100, 1000, 10_000, 100_000)
_TENSORS_BYTES = 64 * MIB
_CHECKPOINTS = (1, 10, 100, 1000, 10_000)
_CHECKPOINT_BYTES = 64 << 10
_MOST_TENSORS_OF_BYTES = 100
_SLICES = 9
"""Into so many are the saves before a number of checkpoints cut; the median of each is a row."""
_RAW_BYTES = GIB
"""The disk's limit is measured with no more memory than this, and taken to grow with the bytes from there on."""


class Growth(Experiment):
    """Time for each byte, tensor and checkpoint while there are ever more of them; memory and descriptors too."""

    name = "growth"
    title = "Does cost grow as the work does?"

    def run(self, settings: Settings) -> Findings:
        """Measure all three."""
        findings = Findings()
        if settings.methods is not None and PCcheck.name not in settings.methods:
            findings.notes.append(f"It is about {PCcheck.name}.")
            return findings
        with tempfile.TemporaryDirectory(prefix="pccheck-growth-", dir=settings.folder) as name:
            folder = Path(name)
            _grow_bytes(folder, settings, findings)
            _grow_tensors(folder, settings, findings)
            _grow_checkpoints(folder, settings, findings)
        return findings


def _grow_bytes(folder: Path, settings: Settings, findings: Findings) -> None:
    direct = survey(folder).direct.startswith("yes")
    for nbytes in _BYTES[:4] if settings.quick else _BYTES:
        if (lacking := _lacking(folder, nbytes)) is not None:
            findings.notes.append(f"{nbytes / GIB:g} GiB were not measured: {lacking}.")
            continue
        settings.progress(f"a state of {nbytes / MIB:g} MiB")
        count = min(_MOST_TENSORS_OF_BYTES, nbytes // (256 << 10))
        with _Store(folder, nbytes, count) as store:
            limits = _Limits(store, nbytes) if direct else None
            taken = []
            for _ in range(settings.rounds(9)):
                if limits:
                    limits.measure()
                taken.append(store.round())
            floors = limits.seconds() if limits else {}
        for number, times in enumerate(taken):
            for series, seconds in times.items():
                floor = floors[series][number] * GIB / nbytes if series in floors else None
                findings.rows.append(
                    _row("growth_bytes", series, nbytes, number, seconds * GIB / nbytes, "s/GiB", floor)
                )
    findings.notes.append(
        "Bytes: up to 100 tensors, a store for each state, restores with a cold page cache; the limit is the disk's "
        f"own, beyond {_RAW_BYTES // GIB} GiB that of so many bytes."
    )


def _grow_tensors(folder: Path, settings: Settings, findings: Findings) -> None:
    medians: dict[int, dict[str, float]] = {}
    counts = _TENSORS[:4] if settings.quick else _TENSORS
    for count in counts:
        settings.progress(f"{count} tensors")
        with _Store(folder, _TENSORS_BYTES, count) as store:
            taken = [store.round() for _ in range(settings.rounds(9))]
        medians[count] = {series: statistics.median(each[series] for each in taken) for series in taken[0]}
        for number, times in enumerate(taken):
            for series, seconds in times.items():
                findings.rows.append(_row("growth_tensors", series, count, number, seconds / count * 1e6, "µs"))
    few, many = counts[-2:]
    slopes = ", ".join(
        f"{series} {(medians[many][series] - medians[few][series]) / (many - few) * 1e6:.2f} µs"
        for series in medians[many]
    )
    findings.notes.append(
        f"{_TENSORS_BYTES // MIB} MiB in ever more tensors; for each one more between {few} and {many}: {slopes}."
    )


def _grow_checkpoints(folder: Path, settings: Settings, findings: Findings) -> None:
    numbers = _CHECKPOINTS[:3] if settings.quick else _CHECKPOINTS
    settings.progress(f"{numbers[-1]} checkpoints of {_CHECKPOINT_BYTES >> 10} KiB")
    seconds: list[float] = []
    with _Store(folder, _CHECKPOINT_BYTES, 4) as store:
        for number in range(1, numbers[-1] + 1):
            seconds.append(store.save()["durable"])
            if number in numbers:
                recent = seconds[-max(1, number // 2) :]
                size = -(-len(recent) // _SLICES)
                for slice_number, start in enumerate(range(0, len(recent), size)):
                    value = statistics.median(recent[start : start + size]) * 1e3
                    findings.rows.append(_row("growth_checkpoints", "durable", number, slice_number, value, "ms"))
                gc.collect()
                findings.rows.append(_row("growth_memory", "", number, 0, _resident_bytes() / MIB, "MiB"))
                findings.rows.append(
                    _row("growth_descriptors", "", number, 0, len(os.listdir("/proc/self/fd")), "open")
                )
        store.check()


class _Store:
    """A store of its own with an engine, and a state whose every byte follows from the number of the last save."""

    def __init__(self, folder: Path, nbytes: int, tensors: int) -> None:
        self.path = folder / "store"
        each = nbytes // tensors // 4
        self._base = torch.arange(each, dtype=torch.int32)
        self.state = {f"t{at:06d}": self._base + at for at in range(tensors)}
        self.saves = 0
        self.engine = SyncCheckpointEngine(self.path, max_in_flight=1).open()
        for _ in range(2):  # both slots are written once
            self.save()

    def save(self) -> dict[str, float]:
        """Change every tensor and save; returns the seconds until training might go on, and until it was durable."""
        for tensor in self.state.values():
            tensor.add_(1)
        self.saves += 1
        start = time.perf_counter()
        pending = self.engine.checkpoint(self.state, step=self.saves)
        stall = time.perf_counter() - start
        pending.result()
        return {"stall": stall, "durable": time.perf_counter() - start}

    def round(self) -> dict[str, float]:
        """Save, and restore what was saved."""
        times = self.save()
        scribble(self.state)
        evict(self.path)
        start = time.perf_counter()
        self.engine.restore(self.state)
        times["restore"] = time.perf_counter() - start
        self.check()
        return times

    def check(self) -> None:
        """Compare the state with what its bytes must be."""
        expected = self._base + self.saves
        for tensor in self.state.values():
            if not torch.equal(tensor, expected):
                raise RuntimeError("what was restored is not what was saved")
            expected += 1

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.state.clear()
        shutil.rmtree(self.path)


class _Limits:
    """What the disk can do with so many bytes, or as many as there is memory for."""

    def __init__(self, store: _Store, nbytes: int) -> None:
        self._store = store
        disk = RawDisk(min(align(nbytes, 4096), _RAW_BYTES))
        self._share = nbytes / disk.nbytes
        self._limits = {"durable": RawLimit(disk, write=True), "restore": RawLimit(disk, write=False)}

    def measure(self) -> None:
        """Measure one round."""
        for series, limit in self._limits.items():
            limit.measure(slot_file(self._store.path, committed=series == "restore"))

    def seconds(self) -> dict[str, list[float]]:
        """Measure a last round, and return the limits of each round by series."""
        self.measure()
        return {series: [each * self._share for each in limit.between()] for series, limit in self._limits.items()}


def _lacking(folder: Path, nbytes: int) -> str | None:
    if shutil.disk_usage(folder).free < 2.3 * nbytes + GIB:
        return "too little of the disk is free for two slots"
    if available_memory() < 1.6 * nbytes + 2 * GIB:
        return "too little memory is free"
    return None


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def _row(
    figure: str, series: str, x: float, repetition: int, value: float, unit: str, floor: float | None = None
) -> Row:
    return Row(
        figure=figure,
        method=PCcheck.name,
        series=series,
        x=x,
        repetition=repetition,
        value=value,
        unit=unit,
        floor=floor,
    )
