"""Experiments small enough for tests, which really save."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from examples.paper.lab.experiments import Experiment, Findings, Settings
from examples.paper.lab.methods import find_method
from examples.paper.lab.table import Row
from examples.paper.lab.timeline import Timeline, recorded
from examples.paper.lab.workloads import Raw
from pccheck_async import SyncCheckpointEngine

METHODS = ("pccheck", "torch.save")


class Tiny(Experiment):
    """Times of saves of 64 KiB by turns, and a timeline."""

    name = "tiny"
    title = "How long does a <tiny> save take?"

    def run(self, settings: Settings) -> Findings:
        workload = Raw(1 << 16, 3)
        found = Findings(notes=[f"The state has {workload.nbytes} bytes & 3 tensors."])
        with TemporaryDirectory(dir=settings.folder) as name, ExitStack() as stack:
            kinds = [find_method(each) for each in settings.methods or METHODS]
            methods = [stack.enter_context(kind(Path(name) / str(at))) for at, kind in enumerate(kinds)]
            for number in range(settings.rounds(3)):
                for method in methods:
                    settings.progress(f"round {number + 1}: {method.name}")
                    workload.step()
                    start = time.perf_counter()
                    handle = method.save(workload.state(), number)
                    handle.captured()
                    captured = time.perf_counter() - start
                    handle.wait()
                    for figure, value in (("gh5", time.perf_counter() - start), ("unheard of", captured)):
                        found.rows.append(
                            Row(
                                figure=figure,
                                workload=workload.name,
                                method=method.name,
                                x=workload.nbytes,
                                repetition=number,
                                value=value,
                                unit="s",
                            )
                        )
        found.timelines["two saves / at once"] = _timeline(settings)
        return found


class Failing(Experiment):
    name = "failing"
    title = "What if it fails?"

    def run(self, settings: Settings) -> Findings:
        with TemporaryDirectory(dir=settings.folder) as folder, SyncCheckpointEngine(folder) as engine:
            engine.checkpoint({"not": object()}, step=1)
        raise AssertionError


def _timeline(settings: Settings) -> Timeline:
    with (
        TemporaryDirectory(dir=settings.folder) as folder,
        SyncCheckpointEngine(folder) as engine,
        recorded(engine) as timeline,
    ):
        for step in range(2):
            engine.checkpoint({"weights": torch.full((1000,), float(step))}, step=step)
        engine.drain()
    return timeline
