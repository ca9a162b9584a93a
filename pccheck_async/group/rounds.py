# SPDX-License-Identifier: Apache-2.0
"""Rounds in which checkpoints in memory are copied to other hosts.

A round is about one complete checkpoint, the same for all ranks. It succeeds when every rank has reported that all of
its copies are made; the checkpoint then is the *floor*: until a later round succeeds, the memory of all ranks keeps it,
besides the checkpoint of the running round. Nothing waits for a round: if the network is slow, there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pccheck_async.group.messages import Copied, Round
from pccheck_async.group.parts import Key

__all__ = ["LeadRounds", "Rounds"]


@dataclass(slots=True, eq=False)
class Rounds:
    """One rank's side of the rounds."""

    replicas: int
    """The number of other hosts that have copies of each part, if there are so many."""
    holders: Sequence[Sequence[int]] = ()
    """The ranks that hold copies of a rank's parts, for each rank."""
    running: Round | None = None
    floor: Key | None = None
    """The newest checkpoint of this run whose copies are all there."""


@dataclass(slots=True, eq=False)
class LeadRounds:
    """Rank 0's side: rounds, one at a time, in which ``world`` ranks take part."""

    world: int
    number: int = 0
    """The number of the next round."""
    floor: Key | None = None
    """The newest checkpoint whose copies are all there."""
    running: Round | None = None
    tried: int = -1
    """The counter of the checkpoint of the last round that began; -1 before the first."""
    votes: set[int] = field(default_factory=set)

    @property
    def kept(self) -> set[int]:
        """Counters of the checkpoints that memory keeps in addition to those that the rules of retention keep."""
        keys = [self.floor, None if self.running is None else self.running.key]
        return {key.counter for key in keys if key is not None}

    def begin(self, key: Key, step: int) -> Round | None:
        """Begin a round about the newest complete checkpoint; return None if one runs, or was about this or a newer."""
        if self.running is not None or key.counter <= self.tried:
            return None
        self.running, self.tried, self.votes = Round(self.number, key, step), key.counter, set()
        self.number += 1
        return self.running

    def receive(self, message: Copied) -> Round | None:
        """Count a rank's report; return the round if it ends with it, by success or failure, else None."""
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
