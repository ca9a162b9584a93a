# SPDX-License-Identifier: Apache-2.0
"""One schedule for all ranks: after which steps they save, and which step is the last one before they are preempted.

Only rank 0's policy decides. On reaching a scheduled step, and before it waits for anything, rank 0 publishes the next
one; a rank that has passed the last one it knows waits for that at the end of its step. A policy that does not know
its next save in advance is consulted after every step; then steps are also scheduled at which nothing is saved, and a
save that becomes due is made at the next step to be scheduled.

Preemption: any rank reports it; rank 0 proposes a last step a few ahead; all acknowledge; rank 0 confirms. A rank that
has passed the proposed step refuses it, and a later one is proposed, with twice the lead. One that reaches it
unconfirmed waits. Proposals are answered by a thread of the protocol, also after the loop has ended, never by the
trainer's thread, which may be inside a collective that waits for a rank that waits here. So every call of
:class:`Schedule` is made under one lock.

Steps are the user's numbers and grow, not always by one. In a window of gradient accumulation no step is saved: saves
due then, the last step included, are due at the first step at or after it that is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pccheck_async.group.messages import Acknowledge, Confirm, Next, Preempted, Propose, Withdraw

__all__ = ["LeadSchedule", "Schedule", "Verdict"]


class Verdict(Enum):
    """The action of a rank at the end of a step."""

    GO = "go on"
    SAVE = "save this step, then ask again"
    STOP = "save this step, unless that is done, and stop"
    WAIT = "wait for the next decision, then ask again"


@dataclass(slots=True, eq=False)
class Schedule:
    """One rank's copy of the schedule."""

    rank: int
    step: int = -1
    """The step that the trainer is in, or ended last."""
    ended: bool = False
    """Whether the trainer's loop has ended."""
    reached: int | None = None
    """The step at whose end the last scheduled step was found to be reached; None before that."""
    upcoming: tuple[Next, ...] = ()
    """Scheduled steps that were not reached yet."""
    proposed: int | None = None
    """The step of a proposal that this rank acknowledged, until it is confirmed or a later one comes."""
    final: int | None = None
    """The confirmed last step."""

    def begin(self, step: int) -> None:
        """Called when the trainer begins a step: proposals of earlier steps are refused from now on."""
        self.step = step

    def end(self) -> None:
        """Called when the trainer's loop has ended, or stopped."""
        self.ended = True

    def at_end(self, step: int, *, whole: bool = True) -> Verdict:
        """Return the verdict for the end of a step, to be followed; ``whole``: outside windows of accumulation.

        A scheduled step that is reached is then no longer upcoming: a second call for the same step goes on from there.
        """
        self.step = step
        if not whole:
            return Verdict.GO
        if self.final is not None and step >= self.final:
            return Verdict.STOP
        if self.upcoming and step >= self.upcoming[0].step:
            save = self.upcoming[0].save
            self.reached, self.upcoming = step, self.upcoming[1:]
            if save:
                return Verdict.SAVE
        return Verdict.WAIT if self._has_to_wait(step) else Verdict.GO

    def _has_to_wait(self, step: int) -> bool:
        unconfirmed = self.proposed is not None and step >= self.proposed
        return unconfirmed or self._lacks_schedule(step)

    def _lacks_schedule(self, step: int) -> bool:
        return not self.upcoming and (self.reached is None or step > self.reached)

    def learn(self, decision: Next | Propose | Confirm | Withdraw) -> Acknowledge | None:
        """Take a decision of rank 0; return the answer if it is a proposal, else None."""
        match decision:
            case Next():
                self.upcoming += (decision,)
            case Propose():
                return self._answer(decision)
            case Confirm():
                self.final, self.proposed = decision.step, None
            case Withdraw():
                self.proposed = None
        return None

    def _answer(self, proposal: Propose) -> Acknowledge:
        passed = self._has_passed(proposal.step)
        self.proposed = None if passed else proposal.step
        return Acknowledge(self.rank, proposal.number, self.step if passed else None, passed and self.ended)

    def _has_passed(self, step: int) -> bool:
        return self.ended or self.step > step


@dataclass(slots=True, eq=False)
class LeadSchedule:
    """Rank 0's side of the schedule."""

    world: int
    lead: int = 2
    """Number of steps from the present one to the proposed one."""
    step: int = -1
    """The step that rank 0's trainer is in, or ended last."""
    published: int | None = None
    """The scheduled step that was published last."""
    proposal: Propose | None = None
    answers: dict[int, Acknowledge] = field(default_factory=dict)
    settled: bool = False
    """Whether a last step was confirmed, or the proposal withdrawn."""

    def publish(self, step: int, *, save: bool = True) -> list[Next]:
        """Return the decision that ``step`` is the next scheduled one. Raises ValueError: it is not after the last."""
        if self.published is not None and step <= self.published:
            raise ValueError(f"step {step} is scheduled after step {self.published}: schedules go forward")
        self.published = step
        return [Next(step, save)]

    def receive(self, message: Preempted | Acknowledge) -> list[Propose | Confirm | Withdraw]:
        """Take a message; return the decisions."""
        if self.settled:
            return []
        if isinstance(message, Preempted):
            return [] if self.proposal is not None else [self._propose(self.step)]
        if self.proposal is None or message.number != self.proposal.number:
            return []
        self.answers[message.rank] = message
        if len(self.answers) < self.world:
            return []
        return [self._conclude(self.proposal)]

    def _conclude(self, proposal: Propose) -> Propose | Confirm | Withdraw:
        """Conclude a proposal that all ranks answered: confirm it, propose a later step, or withdraw it."""
        if any(answer.ended for answer in self.answers.values()):
            self.settled = True  # the others' loops end after the same step
            return Withdraw()
        passed = [answer.passed for answer in self.answers.values() if answer.passed is not None]
        if passed:
            self.lead *= 2
            return self._propose(max(passed))
        self.settled = True
        return Confirm(proposal.step)

    def _propose(self, step: int) -> Propose:
        number = 0 if self.proposal is None else self.proposal.number + 1
        self.proposal, self.answers = Propose(number, step + self.lead), {}
        return self.proposal
