# SPDX-License-Identifier: Apache-2.0
"""The lines that say where a training goes on, or why it does not: a stopped one stays so when started again."""

from __future__ import annotations

from pccheck_async.format import Restored
from pccheck_async.telemetry import write

__all__ = ["in_words", "log_stopped"]


def in_words(restored: Restored, path: str, *, ended: bool) -> str:
    """Return one line for the trainer's own log."""
    what = "nothing is left to train" if ended else "training goes on"
    return f"PCcheckCallback: {what} after step {restored.step}, from {path}"


def log_stopped(why: str, limits: str, restored: Restored) -> None:
    """Log why nothing is trained, and how to go on."""
    text = (
        "nothing is trained: training was told to stop after step %d (%s); it goes on with a larger %s, or with "
        "PCcheckCallback(resume_stopped=True)"
    )
    write("stopped", text, restored.step, why, limits, step=restored.step)
