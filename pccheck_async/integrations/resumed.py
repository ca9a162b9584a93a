# SPDX-License-Identifier: Apache-2.0
"""The lines that say where a training goes on, or why it does not: a stopped one stays so when started again."""

from __future__ import annotations

import os

from pccheck_async.format import Restored
from pccheck_async.format.record import GROUP_NAME, IDENTITY_NAME
from pccheck_async.telemetry import write

__all__ = ["in_words", "log_stopped", "refuse_store", "wrong_trainer"]


def refuse_store(path: str | os.PathLike[str], argument: str) -> None:
    """Raise ValueError if a trainer was told to resume from a store, which its own reader does not know.

    Args:
        path: The value of the argument.
        argument: The name by which the trainer takes it.
    """
    if any(os.path.isfile(os.path.join(path, name)) for name in (IDENTITY_NAME, GROUP_NAME)):
        raise ValueError(
            f"{argument} is {os.fspath(path)!r}, a store of this package: leave {argument} out, and PCcheckCallback "
            "trains on by itself from the folder that it is given. The weights alone, as to validate, test or predict: "
            f'model.load_state_dict(load_sync({os.fspath(path)!r}, keys=["model"])["model"]), of PCcheckIO "state_dict"'
        )


def wrong_trainer(callback: object, name: str, room: str, use: str) -> AttributeError:
    """Return the error for an attribute that a callback has not: the trainer may be another framework's.

    Args:
        callback: The callback.
        name: The attribute.
        room: The module of the integrations with the callback for that framework.
        use: How that is used.
    """
    text = f"{type(callback).__name__!r} object has no attribute {name!r}"
    if name.startswith("on_") or name in ("attach", "setup", "state_key", "state_dict"):
        own = type(callback).__module__
        text += f": this one is {own}'s; in the other trainer use that of pccheck_async.integrations.{room}: {use}"
    return AttributeError(text, name=name, obj=callback)


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
