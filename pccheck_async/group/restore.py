# SPDX-License-Identifier: Apache-2.0
"""The ranks agree three times: on the candidate, on the match before arrays are filled, on the chunks before the rest.

All ranks restore one checkpoint, or none does, with one error. If it is damaged on any rank, all ranks fall back to the
next older one; with a given step that is an error. Ranks do not choose for themselves, as the newest checkpoint may be
damaged on one rank, and the one that this rank falls back to may not exist on another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pccheck_async.format import Which, describe_which, matches
from pccheck_async.group.actions import Action, ChangeState, EndRestore, FillArrays, MatchManifest, Post
from pccheck_async.group.messages import (
    Candidate,
    Matched,
    MatchOutcome,
    NotRestored,
    Reason,
    Restored,
    RestoreRequest,
    Verified,
    Verify,
)
from pccheck_async.group.parts import Key

__all__ = ["LeadRestore", "Restore", "There"]

RestoreDecision: TypeAlias = Candidate | Verify | Restored | NotRestored
There: TypeAlias = tuple[Key, int, str | None]
"""A complete checkpoint with its step and name."""


@dataclass(slots=True, eq=False)
class Restore:
    """One rank's side of restores. Calls of ``restore`` come one after the other."""

    rank: int
    index: int = -1
    attempt: int = -1
    active: bool = False
    """Whether a restore is under way."""
    key: Key | None = None
    """The last candidate."""
    restored: Key | None = None
    """The checkpoint that was restored last: training goes on from there."""
    abandoned: str | None = None
    """Why this rank's call ended while the restore is under way: the member goes on answering, with no caller."""
    _next: tuple[tuple[Which, bool], ...] = ()
    """The request of a new call that came while ``abandoned`` was set; empty for none."""

    def request(self, which: Which, dry_run: bool = False) -> list[Action]:
        """Request a restore of the newest checkpoint, the newest of a step, or that of a name.

        If an abandoned restore is still under way, the request is sent when that has ended.
        """
        if self.abandoned is not None:  # rank 0 begins no other one before that ended
            self._next = ((which, dry_run),)
            return []
        self.index, self.attempt, self.active = self.index + 1, -1, True
        return [Post(RestoreRequest(self.rank, self.index, which, dry_run))]

    def matched(self, outcome: MatchOutcome, why: str = "") -> list[Action]:
        """Report how the manifest of the candidate compares with the state."""
        return [Post(Matched(self.rank, self.index, self.attempt, outcome, why))]

    def verified(
        self,
        damage: str | None = None,
        differing: Collection[int] = (),
        *,
        unread: bool = False,
        elsewhere: bool = False,
    ) -> list[Action]:
        """Report whether all chunks of the candidate are whole, and hashes of ranks that saved different replicas."""
        answer = Verified(self.rank, self.index, self.attempt, damage, tuple(sorted(differing)), unread, elsewhere)
        return [Post(answer)]

    def abandon(self, why: str) -> list[Action]:
        """Refuse this rank's part in the restore under way, as its call has ended; a request that waits is dropped."""
        if not self.active:
            return []
        if self.abandoned is not None:
            self._next = ()
            return []
        self.abandoned = why
        return self.matched("mismatch", why)

    def broke(self, why: str) -> list[Action]:
        """End a restore that has no candidate yet, as the group broke: other ranks may not request it any more."""
        if not self.active or self.attempt >= 0 or self.abandoned is not None:
            return []
        self.active = False
        return [EndRestore("disagreement", why)]

    def learn(self, decision: RestoreDecision) -> list[Action]:
        """Take a decision; return the actions."""
        if self.abandoned is not None:
            if isinstance(decision, Candidate):
                self.attempt = decision.attempt
                return self.matched("mismatch", self.abandoned)
            if isinstance(decision, Verify):
                return []
            self.active, self.abandoned, asked = False, None, self._next
            self._next = ()
            return self.request(*asked[0]) if asked else []
        if not self.active or decision.index != self.index:
            return []  # the group broke: this rank's call ended, or it requests nothing any more
        match decision:
            case Candidate():
                self.attempt, self.key = decision.attempt, decision.key
                return [MatchManifest(decision.key, decision.why, decision.passed)]
            case Verify():
                assert self.key is not None
                return [FillArrays(self.key)]
            case Restored():
                self.active, self.restored = False, decision.key
                return [ChangeState(decision.key)]
            case NotRestored():
                self.active = False
                return [EndRestore(decision.reason, _text(decision))]


def _text(decision: NotRestored) -> str:
    return decision.why[-1] if -1 in decision.why else _joined(decision.why)


def _joined(why: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {each}" for rank, each in sorted(why.items()))


@dataclass(slots=True, eq=False)
class LeadRestore:
    """Rank 0's side of restores."""

    world: int
    index: int = 0
    """The index of the restore that is under way, or comes next."""
    attempt: int = 0
    which: Which = None
    candidate: Key | None = None
    requests: dict[int, RestoreRequest] = field(default_factory=dict)
    matches: dict[int, Matched] = field(default_factory=dict)
    verified: dict[int, Verified] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    """Counters of checkpoints that some rank found damaged: the next commit drops them."""
    sources: dict[int, int] = field(default_factory=dict)
    """How many sources of a rank's part of the candidate could not be read, by rank."""
    passed: set[int] = field(default_factory=set)
    """Counters of checkpoints that this restore passes over, and that are kept: reads failed, or it is a dry run."""

    def receive(
        self,
        message: RestoreRequest | Matched | Verified,
        there: Sequence[There],
        lacking: str,
        rejected: Sequence[There] = (),
    ) -> list[RestoreDecision]:
        """Take a message; return the decisions.

        Args:
            message: A message of any rank.
            there: The complete checkpoints that are not rejected, newest first.
            lacking: A sentence on checkpoints that lack parts; empty for none.
            rejected: The complete checkpoints that are rejected.
        """
        if message.index != self.index:
            return []
        if isinstance(message, RestoreRequest):
            self.requests[message.rank] = message
            return self._begin(there, lacking, rejected) if len(self.requests) == self.world else []
        if message.attempt != self.attempt or self.candidate is None:
            return []
        if isinstance(message, Matched):
            self.matches[message.rank] = message
            return self._conclude_match(there) if self._all_in(self.matches) else []
        self.verified[message.rank] = message
        return self._conclude(self.candidate, there) if self._all_in(self.verified) else []

    @property
    def answered(self) -> Collection[int]:
        """The ranks that have sent the message for which the restore under way waits."""
        if self.candidate is None:
            return self.requests.keys()
        return (self.verified if self._all_in(self.matches) else self.matches).keys()

    def _all_in(self, answers: dict[int, Matched] | dict[int, Verified]) -> bool:
        return len(answers) == self.world

    def _begin(self, there: Sequence[There], lacking: str, rejected: Sequence[There]) -> list[RestoreDecision]:
        wanted = {request.which for request in self.requests.values()}
        if len(wanted) > 1:
            asked = {rank: _asked(request.which) for rank, request in self.requests.items()}
            return [self._end("disagreement", asked)]
        self.which = wanted.pop()
        if self._wanted(there):
            return self._try_next(there, {})
        reason: Reason
        if self._wanted(rejected):
            reason, why = "rejected", f"none but rejected checkpoints{describe_which(self.which)} are there"
        elif self.which is not None:
            reason, why = "no step", f"there is no complete checkpoint{describe_which(self.which)}"
        else:
            return [self._end("incomplete", {-1: lacking}) if lacking else self._end("none", {})]
        return [self._end(reason, {-1: f"{why}; {lacking}" if lacking else why})]

    def _wanted(self, there: Sequence[There]) -> list[Key]:
        return [key for key, step, name in there if matches(self.which, step, name)]

    def _try_next(
        self, there: Sequence[There], damage: dict[int, str], reason: Reason = "damaged"
    ) -> list[RestoreDecision]:
        """Propose the newest checkpoint that no rank found damaged; without one end the restore with ``reason``.

        If a step or name was requested, and ``damage`` found, the restore ends, too.
        """
        whole = [key for key in self._wanted(there) if key.counter not in self.damaged | self.passed]
        asked_again = self.which is not None and damage
        if not whole or asked_again:
            return [self._end(reason, damage or {-1: "every complete checkpoint is damaged on some rank"})]
        self.candidate = whole[0]
        self.attempt += 1
        self.matches, self.verified, self.sources = {}, {}, {}
        return [Candidate(self.index, self.attempt, self.candidate, _joined(damage))]

    def _try_again(self, candidate: Key, ranks: Iterable[int]) -> list[RestoreDecision]:
        """Propose the same checkpoint again: these ranks read their parts from another host."""
        self.sources |= {rank: self.sources.get(rank, 0) + 1 for rank in ranks}
        self.attempt += 1
        self.matches, self.verified = {}, {}
        passed = tuple(self.sources.get(rank, 0) for rank in range(self.world))
        return [Candidate(self.index, self.attempt, candidate, "", passed)]

    def _conclude_match(self, there: Sequence[There]) -> list[RestoreDecision]:
        damage = {rank: one.why for rank, one in self.matches.items() if one.outcome in ("damaged", "unread")}
        mismatch = {rank: one.why for rank, one in self.matches.items() if one.outcome == "mismatch"}
        if damage:
            return self._fall_back(damage, there, any(one.outcome == "damaged" for one in self.matches.values()))
        unseen = {rank: one.why for rank, one in self.matches.items() if one.outcome == "unseen"}
        if unseen and (self._is_dry_run or not mismatch):  # of a dry run all ranks' outcome is a mismatch
            return self._fall_back(unseen, there, False, "mismatch")
        mismatch |= unseen
        elsewhere = [rank for rank, one in self.matches.items() if one.outcome == "elsewhere"]
        if elsewhere and not mismatch and self.candidate is not None:
            return self._try_again(self.candidate, elsewhere)
        return [self._end("mismatch", mismatch)] if mismatch else [Verify(self.index, self.attempt)]

    def _conclude(self, candidate: Key, there: Sequence[There]) -> list[RestoreDecision]:
        damage = {rank: one.damage for rank, one in self.verified.items() if one.damage is not None}
        if damage and all(self.verified[rank].elsewhere for rank in damage):
            return self._try_again(candidate, damage)
        if damage:
            return self._fall_back(damage, there, not all(self.verified[rank].unread for rank in damage))
        differing = {ranks for one in self.verified.values() for ranks in one.differing}
        ended = Restored(self.index, candidate, tuple(sorted(differing)))
        self._reset()
        return [ended]

    def end(self, why: str) -> NotRestored:
        """End the restore that is under way or comes next; the group is broken."""
        return self._end("disagreement", {-1: why})

    @property
    def _is_dry_run(self) -> bool:
        return any(request.dry_run for request in self.requests.values())

    def _fall_back(
        self, damage: dict[int, str], there: Sequence[There], lost: bool, reason: Reason = "damaged"
    ) -> list[RestoreDecision]:
        assert self.candidate is not None
        (self.damaged if lost and not self._is_dry_run else self.passed).add(self.candidate.counter)
        return self._try_next(there, damage, reason)

    def _end(self, reason: Reason, why: dict[int, str]) -> NotRestored:
        ended = NotRestored(self.index, reason, why)
        self._reset()
        return ended

    def _reset(self) -> None:
        self.index, self.attempt, self.candidate = self.index + 1, 0, None
        self.requests, self.matches, self.verified, self.passed = {}, {}, {}, set()


def _asked(which: Which) -> str:
    if which is None:
        return "asked for the newest"
    return f"asked for {which!r}" if isinstance(which, str) else f"asked for step {which}"
