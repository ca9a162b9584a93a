"""Figure 12 of PCcheck: what training is slowed down by interval and by checkpoints in flight."""

from __future__ import annotations

import random
from itertools import product

from examples.paper.lab.course import slow_course
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.workloads import SlowDevice

__all__ = ["InFlight"]

_NBYTES = 4 << 20
_DURABLE_STEPS = 10
"""Steps that a checkpoint takes to become durable (Tw / t), by the device's cap."""


class InFlight(Experiment):
    """On a device that caps each file; the limit is the model's, max(1, Tw / (N f t))."""

    name = "in_flight"
    title = "How much do checkpoints slow training down, by their interval and by how many are in flight?"

    def run(self, settings: Settings) -> Findings:
        """Measure blocks of training, each with an engine of its own, in another order in every round."""
        intervals = (1, 3, 10) if settings.quick else (1, 2, 5, 10, 20, 50)
        in_flight = (1, 2, 4) if settings.quick else (1, 2, 3, 4)
        step = 0.01 if settings.quick else 0.02
        device = SlowDevice(per_stream=_NBYTES / (_DURABLE_STEPS * step))
        findings = Findings()
        draw = random.Random(0)
        with slow_course(settings.folder, device, nbytes=_NBYTES, step_seconds=step) as course:
            for repetition in range(settings.rounds(3)):
                settings.progress(f"in_flight, round {repetition + 1}")
                course.begin_round()
                plain, alone = course.plain(), course.alone()
                found = {}
                pairs = list(product(in_flight, intervals))
                for number, interval in draw.sample(pairs, len(pairs)):
                    found[number, interval] = course.step_seconds(
                        interval=interval,
                        checkpoints=_timed(number, alone / (number * interval * plain), quick=settings.quick),
                        max_in_flight=number,
                    )
                plain = course.plain()
                findings.rows += [
                    course.slowdown(
                        "12",
                        series=number,
                        x=interval,
                        repetition=repetition,
                        step_seconds=seconds,
                        limit=alone / (number * interval * plain),
                    )
                    for (number, interval), seconds in found.items()
                ]
        cap = _NBYTES / (_DURABLE_STEPS * step) / 1e6
        findings.notes = [
            f"Figure 12: a state of {_NBYTES >> 20} MiB, a trainer that sleeps {step * 1e3:g} ms per step, and a "
            f"device emulated to write {cap:.1f} MB/s of each file: a checkpoint alone takes {_DURABLE_STEPS} such "
            "steps.",
            "Figure 12: the limit is max(1, Tw / (N f t)), with Tw and t measured in the same round; steady state, the "
            "drain is not in it.",
        ]
        return findings


def _timed(in_flight: int, model: float, *, quick: bool) -> int:
    """How many checkpoints to time: enough for turns of all places in flight where training waits for them."""
    if model <= 1:
        return 2 if quick else 4
    return 2 * in_flight + 2 if quick else max(4 * in_flight, 10)
