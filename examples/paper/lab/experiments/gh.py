"""Figures 5 and 6 of PCcheck's port to GH200: time per checkpoint, and training from start to end, by size."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.paper.lab.course import check_restore, one_thread, train
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.measure import measure
from examples.paper.lab.methods import find_method
from examples.paper.lab.table import Row
from examples.paper.lab.workloads import Sleeping

__all__ = ["GH"]

_METHODS = ("torch.save + fsync", "torch.save + fsync + rename", "CheckFreq", "pccheck overlapped")
_TENSORS = 100
_CHECKPOINTS = 3
"""Of a training from start to end, as in the port: every 50 of 151 steps."""


class GH(Experiment):
    """A trainer that leaves the processor alone, as one on a GPU does."""

    name = "gh"
    title = "How long does a checkpoint take, and a training with checkpoints from start to end, by the state's size?"

    def run(self, settings: Settings) -> Findings:
        """Measure single checkpoints, then whole trainings, size after size; restores are checked."""
        megabytes = (4, 12) if settings.quick else (250, 750)
        step = 0.01 if settings.quick else 0.1
        interval = 10 if settings.quick else 20
        methods = list(_METHODS if settings.methods is None else settings.methods)
        for method in methods:
            find_method(method)
        findings = Findings()
        for each in megabytes:
            workload = Sleeping(each * 10**6, _TENSORS, step)
            with one_thread():
                settings.progress(f"gh: {each} MB, single checkpoints")
                _single(findings, settings, methods, workload)
                settings.progress(f"gh: {each} MB, whole trainings")
                _whole(findings, settings, methods, workload, interval)
        findings.notes += [
            f"Figures gh5 and gh6: {_TENSORS} float32 tensors of {' and '.join(map(str, megabytes))} MB in all, in the "
            f"proportion of the port's two states, and a trainer that sleeps {step * 1e3:g} ms per step, then changes "
            "every tensor, with one thread of torch; every restore was compared bit by bit.",
            f"Figure gh6: {_CHECKPOINTS * interval} steps, a checkpoint after every {interval}, until the last one is "
            "saved; the limit is the same training without checkpoints.",
        ]
        return findings


def _single(findings: Findings, settings: Settings, methods: Sequence[str], workload: Sleeping) -> None:
    result = measure(methods, workload, settings.folder, settings.rounds(3), limits=True, progress=settings.progress)
    limits = result.limits.get("durable", [])
    for row in result.rows:
        if row.problem:
            findings.notes.append(f"Figure gh5, {row.method} at {workload.nbytes / 1e6:g} MB: {row.problem}")
            continue
        for repetition, sample in enumerate(row.samples):
            assert sample.step_stall is not None
            for panel, value, floor in (
                ("until it is saved", sample.durable, limits[repetition] if limits else None),
                ("that training waits", sample.step_stall, None),
            ):
                findings.rows.append(
                    Row(
                        figure="gh5",
                        workload=panel,
                        method=row.method,
                        x=workload.nbytes,
                        repetition=repetition,
                        value=value,
                        unit="s",
                        floor=floor,
                    )
                )


def _whole(findings: Findings, settings: Settings, methods: Sequence[str], workload: Sleeping, interval: int) -> None:
    draw = random.Random(0)
    twin = workload.twin().state()
    failed: dict[str, str] = {}
    rows: list[Row] = []
    drains: dict[str, list[float]] = {}
    for repetition in range(settings.rounds(3)):
        plain = train(workload, None, steps=_CHECKPOINTS * interval).seconds
        for name in draw.sample(methods, len(methods)):
            if name in failed:
                continue
            try:
                with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=settings.folder) as folder:
                    with find_method(name)(Path(folder)) as method:
                        method.attach(workload.optimizer)
                        course = train(workload, method, steps=_CHECKPOINTS * interval, interval=interval)
                    with find_method(name)(Path(folder)) as again:
                        check_restore(again, workload.state(), twin)
            except Exception as error:  # noqa: BLE001 - another method's failure is a note, not the end
                failed[name] = f"{type(error).__name__}: {error}"[:500]
                continue
            drains.setdefault(name, []).append(course.drain)
            rows.append(
                Row(
                    figure="gh6",
                    method=name,
                    x=workload.nbytes,
                    repetition=repetition,
                    value=course.seconds + course.drain,
                    unit="s",
                    floor=plain,
                )
            )
    rows.sort(key=lambda row: methods.index(row.method))
    findings.rows += [row for row in rows if row.method not in failed]
    size = f"{workload.nbytes / 1e6:g} MB"
    findings.notes += [f"Figure gh6, {name} at {size}: failed: {reason}" for name, reason in failed.items()]
    findings.notes += [
        f"Figure gh6, {name} at {size}: of it the drain after the last step took {max(each):.2f} s at most"
        for name, each in sorted(drains.items(), key=lambda item: methods.index(item[0]))
        if name not in failed
    ]
