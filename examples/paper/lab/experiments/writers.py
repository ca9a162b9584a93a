"""Figure 13 of PCcheck: what training is slowed down by checkpoints in flight and by writers."""

from __future__ import annotations

import random
from itertools import product

from examples.paper.lab.course import slow_course
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.workloads import SlowDevice

__all__ = ["Writers"]

_INTERVAL = 5
_NBYTES = 8 << 20
_CHUNKS = 16
_SLOWDOWN = 4.0
"""With one writer, by the cap of one request."""
_FILE, _TOTAL = 1.5, 2.5
"""What one file and all of them reach, in requests."""


class Writers(Experiment):
    """On a device that caps each request, each file and all of them; the limit follows from the caps."""

    name = "writers"
    title = "How much do checkpoints slow training down, by how many are in flight and by the number of writers?"

    def run(self, settings: Settings) -> Findings:
        """Measure blocks of training, each with an engine of its own, in another order in every round."""
        in_flight = (1, 2) if settings.quick else (1, 2, 3)
        writers = (1, 2, 4) if settings.quick else (1, 2, 3, 4)
        step = 0.01 if settings.quick else 0.02
        request = _NBYTES / (_SLOWDOWN * _INTERVAL * step)
        device = SlowDevice(per_request=request, per_stream=_FILE * request, total=_TOTAL * request)
        findings = Findings()
        draw = random.Random(0)
        with slow_course(settings.folder, device, nbytes=_NBYTES, step_seconds=step) as course:
            for repetition in range(settings.rounds(4)):
                settings.progress(f"writers, round {repetition + 1}")
                course.begin_round()
                found = {}
                pairs = list(product(in_flight, writers))
                for number, count in draw.sample(pairs, len(pairs)):
                    found[number, count] = course.step_seconds(
                        interval=_INTERVAL,
                        checkpoints=3 if settings.quick else 9,
                        max_in_flight=number,
                        lead=2 * number + 1,  # training waits once all places are taken: these fill more slowly
                        writers=count,
                        chunk_bytes=_NBYTES // _CHUNKS,
                    )
                plain = course.plain()
                for (number, count), seconds in found.items():
                    bandwidth = request * min(count, _FILE * number, _TOTAL)
                    findings.rows.append(
                        course.slowdown(
                            "13",
                            series=count,
                            x=number,
                            repetition=repetition,
                            step_seconds=seconds,
                            limit=_NBYTES / (bandwidth * _INTERVAL * plain),
                        )
                    )
        findings.notes = [
            f"Figure 13: a state of {_NBYTES >> 20} MiB in {_CHUNKS} chunks, saved every {_INTERVAL} steps of "
            f"{step * 1e3:g} ms, on a device emulated to write {request / 1e6:.1f} MB/s of each request, {_FILE:g} "
            f"times that of each file and {_TOTAL:g} times that in all; the writers (p) are the engine's: all "
            "checkpoints in flight share them.",
            f"Figure 13: the limit is max(1, m / (B f t)) with B of min(p, {_FILE:g} N, {_TOTAL:g}) requests; steady "
            "state.",
        ]
        return findings
