# SPDX-License-Identifier: Apache-2.0
"""The line of a store: which run writes to it, and what that run descends from.

Checkpoints in memory outlive the process that made them, and counters repeat on other hosts and after a roll-back. So
neither a name nor a counter says whether a checkpoint in memory belongs to the history that the store on disk
continues. Before its first checkpoint in any tier a run writes its line into the record on disk, durably; a checkpoint
in memory is valid only if that line :meth:`~Line.accepts` its run and counter.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec

__all__ = ["Line", "Link"]

_MOST_LINKS = 8


class Link(NamedTuple):
    """The newest checkpoint of one earlier run that a later run descends from, by run and counter."""

    run: bytes
    counter: int


class Line(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One run, and the checkpoints of earlier runs that it descends from.

    Attributes:
        run: The id of the run: 16 random bytes for each opening of an engine.
        base: The largest counter that existed when the run began; the counters of its own checkpoints are larger.
        chain: The checkpoint that it restored, and its ancestors in earlier runs: newest first, at most 8.
    """

    run: bytes
    base: int
    chain: tuple[Link, ...] = ()

    def accepts(self, run: bytes, counter: int) -> bool:
        """Return whether a checkpoint of ``run`` is this run's own, or one that it descends from."""
        own = run == self.run and counter > self.base
        return own or any(run == link.run and counter <= link.counter for link in self.chain)

    def run_of(self, counter: int) -> bytes | None:
        """Return the run that made the checkpoint with this counter on this line; None if no link covers it."""
        if counter > self.base:
            return self.run
        for link, before in pairwise((*self.chain, Link(b"", -1))):
            if before.counter < counter <= link.counter:
                return link.run
        return None

    def descend(self, run: bytes, base: int, restored: int | None) -> Line:
        """Return the line of a run that continues from the checkpoint with the counter ``restored`` (None: none)."""
        came_from = None if restored is None else self.run_of(restored)
        return Line.begin(self, run, base, None if restored is None or came_from is None else Link(came_from, restored))

    @classmethod
    def begin(cls, before: Line | None, run: bytes, base: int, came_from: Link | None) -> Line:
        """Return the line of a run that continues from ``came_from`` (None: none) in a store with the line ``before``.

        If ``came_from`` is not on that line, as its run had no tier in memory, older links are left out.
        """
        if came_from is None:
            return cls(run, base)
        known = before is not None and before.accepts(*came_from)
        older = [link for link in before.chain if link.counter < came_from.counter] if before and known else []
        return cls(run, base, (came_from, *older)[:_MOST_LINKS])

    @property
    def sane(self) -> bool:
        """Whether a run may have written this line."""
        counters = [self.base + 1, *(link.counter for link in self.chain)]
        return (
            all(len(run) == 16 for run in (self.run, *(link.run for link in self.chain)))
            and len(self.chain) <= _MOST_LINKS
            and -1 <= self.base < 1 << 62
            and all(newer > older >= 0 for newer, older in pairwise(counters))
        )
