# SPDX-License-Identifier: Apache-2.0
"""The advice of a StateMismatchError, for users of a trainer: a callback calls ``restore`` for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pccheck_async.errors import StateMismatchError

__all__ = ["SAME_AGAIN", "advise_in_trainer"]

SAME_AGAIN: Final = "give the same again until the epoch has ended, and change it from there on"
"""The remedy if sizes have changed inside an epoch."""


@contextmanager
def advise_in_trainer(path: str) -> Iterator[None]:
    """Give a StateMismatchError the advice that holds where no user calls ``restore`` of the store at ``path``."""
    try:
        yield
    except StateMismatchError as error:
        advice = (
            "go on with what was saved, or give PCcheckCallback another folder to begin anew; the weights alone: "
            f'load_sync({path!r}, keys=["model"])'
        )
        error.args = (error.with_advice(advice).replace("restore(state, private=", "PCcheckCallback(private="),)
        raise
