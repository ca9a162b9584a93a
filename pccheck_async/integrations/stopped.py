# SPDX-License-Identifier: Apache-2.0
"""A training that was stopped before its limits, such as by an early stop, stays stopped when started again."""

from __future__ import annotations

from pccheck_async.format import Restored
from pccheck_async.telemetry import write

__all__ = ["log_stopped"]


def log_stopped(why: str, limits: str, restored: Restored) -> None:
    """Log why nothing is trained, and how to go on."""
    text = (
        "nothing is trained: training was told to stop after step %d (%s); it goes on with a larger %s, or with "
        "PCcheckCallback(resume_stopped=True)"
    )
    write("stopped", text, restored.step, why, limits, step=restored.step)
