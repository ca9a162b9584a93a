"""What tore captures beside training: leaves that are captured before the call returns from then on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

from pccheck_async.telemetry.logs import write

__all__ = ["Tears"]

_RECENT: Final = 8
"""Captures among which a leaf must be torn twice: evaluations, say, tear every second or third."""
_NAMED: Final = 3


class Tears:
    """Remembers which leaves changed in the middle of captures. May be used from several threads.

    A training loop whose code changes weights outside the steps of attached optimizers (sharpness-aware minimisation,
    updates by hand) would have no checkpoint at all. One that such a change hits by chance loses one.
    """

    def __init__(self) -> None:
        self._eager: frozenset[str] = frozenset()
        self._recent: deque[frozenset[str]] = deque(maxlen=_RECENT)

    def note(self, torn: Collection[str], constants: Iterable[str]) -> None:
        """Note how one capture ended.

        Args:
            torn: Paths of the leaves that changed in the middle of it; none where it was whole.
            constants: Those that were left to it only because they had not changed so far: once is enough for them.
        """
        again = frozenset().union(constants, *self._recent).intersection(torn)
        self._recent.append(frozenset(torn))
        if more := again - self._eager:
            self._eager |= more
            names = ", ".join(sorted(more)[:_NAMED]) + (f" and {len(more) - _NAMED} more" if len(more) > _NAMED else "")
            text = (
                "code outside the steps of attached optimizers changes %s while checkpoints are captured beside "
                "training; from now on that is captured before engine.step ends, which takes longer: call "
                "engine.wait_captured() before that code instead, and open the engine anew"
            )
            with suppress(Exception):  # of a handler of the log: the checkpoint ends all the same
                write(logging.WARNING, "captured_eagerly", text, names)

    def sources(self, paths: Sequence[str], source_of: Sequence[int]) -> list[int]:
        """Return the sources of the leaves that are captured before the call returns."""
        eager = self._eager
        if not eager:
            return []
        return [source for path, source in zip(paths, source_of, strict=True) if source >= 0 and path in eager]
