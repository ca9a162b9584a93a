# SPDX-License-Identifier: Apache-2.0
"""Rounds in which checkpoints in memory are copied to other hosts.

A round is about one complete checkpoint, the same for all ranks. It ends when every rank said that all of its copies
are there, and that checkpoint is the *floor* then: until a later round ends well, the memory of all ranks keeps it, and
the checkpoint of the round that runs. Nothing waits for a round: if the network is slow, there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pccheck_async.group.messages import Copied, Round
from pccheck_async.group.parts import Key

__all__ = ["LeadRounds", "Rounds"]


@dataclass(slots=True, eq=False)
class Rounds:
    """One rank's side."""

    replicas: int
    """How many other hosts have copies of each part, if there are so many."""
    holders: Sequence[Sequence[int]] = ()
    """Of each rank, those that hold copies of its parts."""
    running: Round | None = None
    floor: Key | None = None
    """The newest checkpoint of this run whose copies are all there."""


@dataclass(slots=True, eq=False)
class LeadRounds:
    """Rank 0's side: rounds, one at a time, in which so many ranks take part."""

    world: int
    number: int = 0
    """Of the next round."""
    floor: Key | None = None
    """The newest checkpoint whose copies are all there."""
    running: Round | None = None
    tried: int = -1
    """The counter of the last one that was to be copied."""
    votes: set[int] = field(default_factory=set)

    @property
    def kept(self) -> set[int]:
        """Counters of the checkpoints that memory keeps beside those that its rules keep."""
        keys = [self.floor, None if self.running is None else self.running.key]
        return {key.counter for key in keys if key is not None}

    def begin(self, key: Key, step: int) -> Round | None:
        """Begin a round about the newest complete checkpoint; None if one runs, or was about that."""
        if self.running is not None or key.counter <= self.tried:
            return None
        self.running, self.tried, self.votes = Round(self.number, key, step), key.counter, set()
        self.number += 1
        return self.running

    def receive(self, message: Copied) -> Round | None:
        """Take a vote in; return the round that ends with it."""
        running = self.running
        if running is None or message.number != running.number:
            return None
        self.votes.add(message.rank)
        if message.why is None and not self._is_complete():
            return None
        self.running = None
        if message.why is None:
            self.floor = running.key
        return running

    def _is_complete(self) -> bool:
        return len(self.votes) == self.world
