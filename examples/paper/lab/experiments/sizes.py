"""Figure 11 of PCcheck: the time until one checkpoint is durable, by its size."""

from __future__ import annotations

from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.measure import measure
from examples.paper.lab.methods import METHODS, find_method
from examples.paper.lab.table import Row
from examples.paper.lab.workloads import Raw

__all__ = ["Sizes"]

_TENSORS = 100


class Sizes(Experiment):
    """Every method whose checkpoints survive a power failure, with nothing trained beside it."""

    name = "sizes"
    title = "How long does a checkpoint take to become durable, by its size?"

    def run(self, settings: Settings) -> Findings:
        """Measure all methods by turns, size after size; restores are checked."""
        megabytes = (4, 32) if settings.quick else (10, 30, 100, 300, 1000)
        rounds = settings.rounds(5)
        methods = durable_methods(settings)
        findings = Findings()
        for each in megabytes:
            workload = Raw(each * 10**6, _TENSORS)
            nbytes = workload.nbytes
            settings.progress(f"sizes: {each} MB")
            result = measure(methods, workload, settings.folder, rounds, limits=True, progress=settings.progress)
            limits = result.limits.get("durable", [])
            for row in result.rows:
                if row.problem:
                    findings.notes.append(f"Figure 11, {row.method} at {each} MB: {row.problem}")
                    continue
                findings.rows += [
                    Row(
                        figure="11",
                        method=row.method,
                        x=nbytes,
                        repetition=repetition,
                        value=sample.durable * 1e3,
                        unit="ms",
                        floor=limits[repetition] * 1e3 if limits else None,
                    )
                    for repetition, sample in enumerate(row.samples)
                ]
        findings.notes.append(
            f"Figure 11: {_TENSORS} equal float32 tensors, all changed before every save, and nothing trained beside "
            "it; every restore was compared bit by bit. The limit is the best of several ways of direct writing, flush "
            "included."
        )
        return findings


def durable_methods(settings: Settings) -> list[str]:
    """Return the methods to compare that say they are durable.

    Raises:
        ValueError: a name that there is not.
    """
    if settings.methods is not None:
        return [name for name in settings.methods if find_method(name).durable]
    found = (method for method in METHODS.values() if method.durable and method.why_not() is None)
    return [method.name for method in found if method.name != "pccheck overlapped"]  # nothing to overlap with
