"""Figure 14 of PCcheck: what training is slowed down by host memory and by the number of chunks."""

from __future__ import annotations

import random
from itertools import product

from examples.paper.lab.course import slow_course
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.workloads import SlowDevice

__all__ = ["Memory"]

_INTERVAL = 5
_IN_FLIGHT = 2
_NBYTES = 8 << 20
_INTERVALS_DURABLE = 1.6
"""A checkpoint takes so many intervals to become durable: less than may be in flight, so memory alone holds it up."""


class Memory(Experiment):
    """On a device that caps each file and has room for all in flight; the limit is max(1, Tw / (N f t))."""

    name = "memory"
    title = "How much do checkpoints slow training down, by the engine's host memory and by the number of chunks?"

    def run(self, settings: Settings) -> Findings:
        """Measure blocks of training, each with an engine of its own, in another order in every round."""
        memory = (0.5, 1.0, 2.0) if settings.quick else (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
        chunks = (2, 8) if settings.quick else (2, 4, 8, 16)
        step = 0.01 if settings.quick else 0.02
        cap = _NBYTES / (_INTERVALS_DURABLE * _INTERVAL * step)
        findings = Findings()
        draw = random.Random(0)
        with slow_course(settings.folder, SlowDevice(per_stream=cap), nbytes=_NBYTES, step_seconds=step) as course:
            for repetition in range(settings.rounds(3)):
                settings.progress(f"memory, round {repetition + 1}")
                course.begin_round()
                alone = course.alone()
                found = {}
                pairs = list(product(memory, chunks))
                for multiple, count in draw.sample(pairs, len(pairs)):
                    found[multiple, count] = course.step_seconds(
                        interval=_INTERVAL,
                        checkpoints=4 if settings.quick else 12,
                        max_in_flight=_IN_FLIGHT,
                        host_memory=int(multiple * _NBYTES),
                        chunk_bytes=_NBYTES // count,
                    )
                plain = course.plain()
                findings.rows += [
                    course.slowdown(
                        "14",
                        series=count,
                        x=multiple,
                        repetition=repetition,
                        step_seconds=seconds,
                        limit=alone / (_IN_FLIGHT * _INTERVAL * plain),
                    )
                    for (multiple, count), seconds in found.items()
                ]
        findings.notes = [
            f"Figure 14: a state of {_NBYTES >> 20} MiB, saved every {_INTERVAL} steps of {step * 1e3:g} ms with "
            f"{_IN_FLIGHT} in flight, on a device emulated to write {cap / 1e6:.1f} MB/s of each file: a checkpoint "
            f"alone takes {_INTERVALS_DURABLE:g} such intervals.",
            "Figure 14: the limit is max(1, Tw / (N f t)), which knows no bound of memory; steady state.",
        ]
        return findings
