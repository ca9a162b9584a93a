# SPDX-License-Identifier: Apache-2.0
"""Rank 0's record of the upload that is under way: which ranks have sent their parts of a checkpoint to the bucket.

The upload ends when every rank has answered, also if some failed: the next one may upload under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from pccheck_async.group.messages import AskParts, PartsSent, SendParts, SentParts, UploadFailure

__all__ = ["LeadUploads"]

_ORDER = get_args(UploadFailure)


@dataclass(slots=True, eq=False)
class LeadUploads:
    """Rank 0's side of uploads.

    Attributes:
        world: Number of ranks.
        running: The request that is under way; None: there is none.
        answers: The answers to it, by rank.
        left: The ranks that upload nothing more.
    """

    world: int
    running: AskParts | None = None
    answers: dict[int, SentParts] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def begin(self, message: AskParts) -> list[SendParts | PartsSent]:
        """Take a request; return the decisions."""
        self.running, self.answers = message, {}
        decisions: list[SendParts | PartsSent] = [SendParts(message.number, message.upload)]
        for rank in self.left:
            decisions += self.leave(rank)
        return decisions

    def receive(self, message: SentParts) -> list[PartsSent]:
        """Take an answer; return the decision once all ranks have answered. Answers to earlier requests are ignored."""
        if self.running is None or message.number != self.running.number:
            return []
        self.answers.setdefault(message.rank, message)
        return self._end() if len(self.answers) == self.world else []

    def leave(self, rank: int) -> list[PartsSent]:
        """Called when a rank uploads nothing more: it answers no more."""
        self.left.add(rank)
        if self.running is None:
            return []
        return self.receive(SentParts(rank, self.running.number, (), "refused", "it has left"))

    def _end(self) -> list[PartsSent]:
        answers = [self.answers[rank] for rank in sorted(self.answers)]
        number = answers[0].number
        self.running = None
        if failed := [one for one in answers if one.failed]:
            first = min(failed, key=lambda one: _ORDER.index(one.failed))
            return [PartsSent(number, (), first.failed, f"rank {first.rank}: {first.why}")]
        parts = sorted((part for one in answers for part in one.parts), key=lambda part: part.rank)
        return [PartsSent(number, tuple(parts))]
