# SPDX-License-Identifier: Apache-2.0
"""Log lines and errors for trainers' callbacks, about where a training resumes from, or why it does not."""

from __future__ import annotations

import os

from pccheck_async.format import Restored
from pccheck_async.format.record import GROUP_NAME, IDENTITY_NAME
from pccheck_async.telemetry import write

__all__ = ["in_words", "log_stopped", "refuse_store", "wrong_trainer"]


def refuse_store(path: str | os.PathLike[str], argument: str) -> None:
    """Raise ValueError if ``path`` is a store of this package, which the trainer's own reader cannot read.

    Args:
        path: The path that the trainer was told to resume from.
        argument: Name of the trainer's argument with that path.
    """
    if any(os.path.isfile(os.path.join(path, name)) for name in (IDENTITY_NAME, GROUP_NAME)):
        raise ValueError(
            f"{argument} is {os.fspath(path)!r}, a store of this package: leave {argument} out, and PCcheckCallback "
            "trains on by itself from the folder that it is given. The weights alone, as to validate, test or predict: "
            f'model.load_state_dict(load_sync({os.fspath(path)!r}, keys=["model"])["model"]), of PCcheckIO "state_dict"'
        )


def wrong_trainer(callback: object, name: str, room: str, use: str) -> AttributeError:
    """Return the error for an attribute that a callback lacks, perhaps because it was given to the other framework.

    Args:
        callback: The callback.
        name: Name of the attribute.
        room: Module of the integrations with the callback for the other framework.
        use: Code that shows how that callback is used.
    """
    text = f"{type(callback).__name__!r} object has no attribute {name!r}"
    if name.startswith("on_") or name in ("attach", "setup", "state_key", "state_dict"):
        own = type(callback).__module__
        text += f": this one is {own}'s; in the other trainer use that of pccheck_async.integrations.{room}: {use}"
    return AttributeError(text, name=name, obj=callback)


def in_words(restored: Restored, path: str, *, ended: bool) -> str:
    """Return a line for the trainer's own log: after which step training goes on, or that it has ended."""
    what = "nothing is left to train" if ended else "training goes on"
    return f"PCcheckCallback: {what} after step {restored.step}, from {path}"


def log_stopped(why: str, limits: str, restored: Restored) -> None:
    """Log why nothing is trained, because the restored training had been stopped, and how to continue it."""
    text = (
        "nothing is trained: training was told to stop after step %d (%s); it goes on with a larger %s, or with "
        "PCcheckCallback(resume_stopped=True)"
    )
    write("stopped", text, restored.step, why, limits, step=restored.step)
