# SPDX-License-Identifier: Apache-2.0
"""Replaces the advice in a StateMismatchError, for users of a trainer, whose callback calls ``restore`` for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pccheck_async.errors import StateMismatchError

__all__ = ["SAME_AGAIN", "advise_in_trainer"]

SAME_AGAIN: Final = "give the same again until the epoch has ended, and change it from there on"
"""Advice if sizes have changed since a checkpoint inside an epoch."""


@contextmanager
def advise_in_trainer(path: str) -> Iterator[None]:
    """Return a context manager that gives a StateMismatchError advice for users of a PCcheckCallback on ``path``."""
    try:
        yield
    except StateMismatchError as error:
        advice = (
            "go on with what was saved, or give PCcheckCallback another folder to begin anew; the weights alone: "
            f'load_sync({path!r}, keys=["model"])'
        )
        error.args = (error.with_advice(advice).replace("restore(state, private=", "PCcheckCallback(private="),)
        raise
