# SPDX-License-Identifier: Apache-2.0
"""Measures a disk and chooses settings: checkpoints in flight, writers, bytes of a chunk, staging memory.

It may import: training and the rooms below.
"""

from pccheck_async.tuning.choice import Point
from pccheck_async.tuning.tuned import Measurement, TunedSettings, Tuning, check_target, read_tuning
from pccheck_async.tuning.tuner import Progress, checkpoint_bytes, tune

__all__ = [
    "Measurement", "Point", "Progress", "TunedSettings", "Tuning", "check_target", "checkpoint_bytes", "read_tuning",
    "tune",
]  # fmt: skip
