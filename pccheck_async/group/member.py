# SPDX-License-Identifier: Apache-2.0
"""The group commit: one rank's part, and rank 0's decisions. Messages in, actions out: no I/O, no clock, no thread.

How it is driven. Every rank has a :class:`Member`; rank 0 has a :class:`Coordinator`, too. An adapter calls a method
for each event, and carries out the actions that the method returns, in order. ``Post`` puts a message into rank
0's inbox; rank 0's adapter hands each message of the inbox to :meth:`Coordinator.receive` and appends the result to
the log, in order; every adapter hands each decision of the log to :meth:`Member.learn`, rank 0's own, too. Calls of
one object never overlap; nothing else is assumed: messages of different ranks may arrive in any order, and decisions
at any time later. A rank says hello once it holds the lock of its own store. ::

    opening    hello            -> Post(Hello); the lowest rank of each domain: Scan, found; then Ready or Unopened
    admission  request          -> (first: TakeOver, took_over) ... Admit; at most max_in_flight at a time
    writing    written, failed  -> WriteRecord, record_durable -> Post(Ok) ... Resolve ... WriteRecord, Free
    ending     drain, leave     -> the last record applies all decisions; ``idle`` is true when all is done

``commit()`` of a store is split at its record: the data is durable before ``written``, ``WriteRecord`` writes the
record, ``Free`` frees slots. A decision is applied by the record of the next prepare, unless an admission waits for a
slot or a permit, a change of the kept checkpoints waits, or the engine drains: then by a record of its own.

Invariants: the record of a prepare names all kept checkpoints; an ok follows the flush; a commit needs the oks of all
ranks; each rank that reads the decision resolves its handle; and a part is dropped only by an applied decision that
keeps a newer complete checkpoint, or that aborts the part's own. Each of the rules behind these is a function of its
own: the tests replace one after the other by a wrong one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from msgspec.structs import replace

from pccheck_async.bucket import BucketState
from pccheck_async.format import Entry, Line, name_in
from pccheck_async.group.actions import (
    Action,
    Admit,
    Cancel,
    EndRestore,
    EndRound,
    Free,
    Post,
    Ready,
    RemoveOrphans,
    Resolve,
    ResolveChange,
    Scan,
    SendCopies,
    TakeOver,
    Unopened,
    WriteRecord,
)
from pccheck_async.group.messages import (
    VERSION,
    Abort,
    Admitted,
    AnyDecision,
    Broken,
    Candidate,
    Change,
    ChangeRequest,
    Commit,
    Compare,
    Confirm,
    Copied,
    Digests,
    Failed,
    Found,
    Goodbye,
    Hello,
    InBucket,
    InMemory,
    Joined,
    Metadata,
    NetworkAddress,
    Next,
    NotRestored,
    Ok,
    Opened,
    PartsSent,
    Preempted,
    Propose,
    Refusal,
    Refused,
    Restored,
    Roster,
    Round,
    RoundEnd,
    SendParts,
    Start,
    Verify,
    WantedStep,
    Withdraw,
)
from pccheck_async.group.parts import Applied, Key, Part, Run, SeenStore, Settled
from pccheck_async.group.placement import holders_of
from pccheck_async.group.restore import Restore
from pccheck_async.group.rounds import Rounds
from pccheck_async.group.schedule import Schedule
from pccheck_async.group.view import FoundBucket, View

__all__ = ["Member", "apply_decisions", "is_undecided"]

_Outcome = Literal["durable", "superseded", "failed", "differs", "torn"]


class _Phase(Enum):
    WAITING = "for a permit or a slot"
    WRITING = "into its slot"
    WRITTEN = "all of it is durable, no record names it"
    PREPARING = "the record that names it is being written"
    PREPARED = "a durable record names it"
    FAILED = "its slot was given back, the group does not know yet"
    ENDING = "decided otherwise while it was being written"


_LEASED = (_Phase.WRITING, _Phase.WRITTEN, _Phase.ENDING)
_IN_FLIGHT = (*_LEASED, _Phase.PREPARING, _Phase.PREPARED)


@dataclass(slots=True, eq=False)
class _Job:
    """A checkpoint from its request until nothing remains to be done for it."""

    step: int
    sums: dict[str, int]
    name: str | None = None
    differing: tuple[int, ...] = ()
    replicas: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)
    """The digests of single replicas, by path, for :class:`Digests`."""
    phase: _Phase = _Phase.WAITING
    entry: Entry | None = None
    decided: int | None = None
    """The number of decisions that this rank had read with the one about this checkpoint; None: there is none yet."""
    differs: bool = False
    """Whether it was aborted because replicas differ."""


@dataclass(slots=True, eq=False)
class _Writing:
    """The record that is being written."""

    parts: dict[Key, Part]
    decisions: int
    prepares: tuple[int, ...]
    changes: tuple[int, ...]


class Member:
    """One rank's side of the protocol.

    Args:
        rank: This rank.
        world: Number of ranks in the group.
        max_in_flight: Most checkpoints that hold a slot and have not ended.
        reserved: The most checkpoints that retention keeps at a time (:attr:`Retention.reserved`).
        own: This rank's own store as found at opening; its ``domain`` is not read. None: there is none yet.
        in_memory: Whether this is the member of the memory tier: if that tier breaks, restores go on.
        replicas: For the memory tier: number of other hosts that have copies of each part.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        max_in_flight: int,
        reserved: int,
        own: SeenStore | None,
        in_memory: bool = False,
        replicas: int = 0,
    ) -> None:
        self.rank = rank
        self.roster = Roster((), ())
        self.rounds = Rounds(replicas)
        self.in_memory = in_memory
        self.world = world
        self.max_in_flight = max_in_flight
        self.reserved = reserved
        self.schedule = Schedule(rank)
        self.restore = Restore(rank)
        self.view: View | None = None
        self.nonce = 0
        """The random number of the run that begins; 0 before the opening."""
        self.found_bucket: FoundBucket | None = None
        """The bucket that this rank has taken over; None without a drain, and on other ranks than rank 0."""
        self.bucket: BucketState | None = None
        """The state of the drain at the opening; None without one."""
        self.line: Line | None = None
        """The line that this rank writes to its disk when it joins the run; None without a tier beside the disk."""
        self.came_from: Key | None = None
        """The checkpoint that the run goes on from by its line; None: it begins anew, or there is no such tier."""
        self.counter = -1
        """The counter of the last checkpoint that was requested; before the first one, the largest of earlier runs."""
        self.stopped: Broken | None = None
        """Why nothing more is done in this run; None while it goes on."""
        self.learned = 0
        """Number of decisions that were taken from the log."""
        self.parts: dict[Key, Part] = {part.key: part for part in own.parts} if own is not None else {}
        """The parts that the newest durable record names."""
        self.run: Run | None = None
        """The run that has begun; None before decision 0."""
        self.keep: dict[Key, bool] = {}
        """The keep-list: the checkpoints that the group keeps, each with whether it is pinned."""
        self.unproven: frozenset[Key] = frozenset()
        self.rejected: set[Key] = set()
        """The rejected checkpoints, which restores pass over; some may be gone already."""
        self.settled = Settled()
        self.differing: frozenset[int] = frozenset()
        """Hashes of ranks whose replicas differ: in captures from now on each of them saves its own."""
        self._joining = False
        self._orphans: tuple[SeenStore, ...] = ()
        self._jobs: dict[int, _Job] = {}
        self._early: dict[int, Resolve] = {}  # decided before this rank came to them
        self._writing: _Writing | None = None
        self._latched: str | None = None
        self._draining = False
        self.changes_asked = 0
        """Number of changes of the kept checkpoints that were requested; the next one has this index."""
        self._unanswered: set[int] = set()  # changes
        self._changes: tuple[int, ...] = ()  # decided, and not in a durable record of this rank
        self._left = False

    # -- opening

    def hello(self, *, domain: str, host: str, settings: str, address: NetworkAddress | None = None) -> list[Action]:
        """Take part in the opening. The arguments are those of :class:`Hello`."""
        return [Post(Hello(self.rank, VERSION, self.world, domain, host, settings, address))]

    def found(self, stores: Sequence[SeenStore]) -> list[Action]:
        """Report the stores in this domain, this rank's own among them; their ``domain`` is set here."""
        home = self.homes[self.rank]
        seen = tuple(replace(store, domain=home) for store in stores)
        # No rank writes to the folder of a rank that does not run here: this one answers for them.
        self._orphans = tuple(one for one in seen if one.rank >= self.world or not self._is_written(one.rank, home))
        return [Post(Found(self.rank, seen, self.found_bucket))]

    @property
    def homes(self) -> tuple[int, ...]:
        """The domain of each rank; empty before all ranks have met."""
        return self.roster.homes

    def _is_written(self, rank: int, home: int) -> bool:
        """Whether the folder of a rank in a domain has a writer: that rank, or one that holds copies of its parts."""
        return self.homes[rank] == home or any(self.homes[holder] == home for holder in self.rounds.holders[rank])

    def _meet(self, roster: Roster) -> list[Action]:
        self.roster = roster
        self.rounds.holders = holders_of(roster.homes, self.rounds.replicas)
        return [Scan()] if self.homes.index(self.homes[self.rank]) == self.rank else []

    def _open(self, view: View, nonce: int, bucket: BucketState | None) -> list[Action]:
        self.view, self.nonce, self.bucket = view, nonce, bucket
        self.counter = view.base
        self.rejected.update(one.key for one in view.complete if one.entry.rejected)
        self.settled = Settled(view.base + 1)
        return [Ready()]

    # -- checkpoints

    @property
    def idle(self) -> bool:
        """Whether everything that was requested has ended, and every record that was due is durable."""
        return not self._jobs and self._writing is None and not self._unanswered

    def request(
        self,
        step: int,
        metadata: Metadata | None = None,
        sums: Mapping[str, int] | None = None,
        differing: Collection[int] = (),
        counter: int | None = None,
    ) -> list[Action]:
        """Request a checkpoint: its number is then :attr:`counter`, even if it fails.

        ``sums`` and ``differing`` are those of :class:`Ok`. ``counter`` is by default the next one; with a memory tier
        it has to be given, as checkpoints of both tiers share one sequence of counters.
        """
        counter = self.counter = self.counter + 1 if counter is None else counter
        if self.stopped is not None:
            return [Resolve(counter, "failed", self.stopped.why, self.stopped.rank)]
        if (early := self._early.pop(counter, None)) is not None:
            return [early]
        self._jobs[counter] = _Job(step, dict(sums or {}), name_in(metadata or {}), tuple(sorted(differing)))
        actions = self.join()
        if self.rank == 0:
            actions.append(Post(Admitted(self.rank, counter, step, metadata or {})))
        if self._latched is not None:
            return actions + self.failed(counter, self._latched)
        return actions + self._advance()

    def written(
        self,
        counter: int,
        entry: Entry,
        replicas: Mapping[int, tuple[int, int]] | None = None,
        digests: Mapping[str, int] | None = None,
    ) -> list[Action]:
        """Called when all of a checkpoint is durable in its slot.

        ``replicas`` is as in :class:`Ok`, ``digests`` as ``by_path`` in :class:`Digests`.
        """
        job = self._jobs.get(counter)
        if job is not None and job.phase is _Phase.WRITING:  # else it was cancelled meanwhile, and `released` comes
            job.phase, job.entry = _Phase.WRITTEN, entry
            job.replicas, job.digests = replicas or {}, digests or {}
        return self._advance()

    def failed(self, counter: int, why: str, *, torn: bool = False) -> list[Action]:
        """Called when a checkpoint failed or was cancelled before it was written, and its slot was given back.

        ``torn``: its capture was torn.
        """
        job = self._jobs.get(counter)
        if job is None:
            return []
        if job.phase is _Phase.ENDING:
            return self.released(counter)
        job.phase = _Phase.FAILED
        return [Post(Failed(self.rank, counter, why, self._latched is not None, torn)), *self._advance()]

    def released(self, counter: int) -> list[Action]:
        """Called when the slot of a cancelled checkpoint was given back."""
        self._jobs.pop(counter, None)
        return self._advance()

    def took_over(self, store_id: bytes) -> list[Action]:
        """Called when this rank has taken over its store, so that free slots are safe to write over (I12)."""
        return [Post(Joined(self.rank, store_id, self.came_from))]

    @property
    def kept_copies(self) -> set[Key]:
        """The checkpoints of which this rank keeps copies of other ranks' parts.

        These are the floor, or, before there is one, those of earlier runs that are kept; and the one being copied.
        """
        rounds = self.rounds
        of_rounds = {rounds.floor, None if rounds.running is None else rounds.running.key}
        return {key for key in self.keep if key in of_rounds or (rounds.floor is None and key.run != self.run)}

    def copied(self, number: int, why: str | None = None) -> list[Action]:
        """Report that the holders of this rank's copies have its part of a round's checkpoint, or why one has not."""
        return [Post(Copied(self.rank, number, why))]

    def record_durable(self) -> list[Action]:
        """Called when the record was flushed: reports the parts that it prepares, frees those that it does not name."""
        if self._writing is None:  # it was given up meanwhile
            return []
        written, before = self._writing, self.parts
        self._writing, self.parts = None, written.parts
        actions: list[Action] = []
        for counter in written.prepares:
            if (job := self._jobs.get(counter)) is not None:  # else all has ended meanwhile
                job.phase = _Phase.PREPARED
                actions += self._vote(counter, job)
        gone = tuple(part for key, part in before.items() if key not in self.parts)
        if gone:
            actions.append(Free(gone))
        for counter, job in list(self._jobs.items()):
            if job.phase is _Phase.PREPARED and job.decided is not None and job.decided <= written.decisions:
                del self._jobs[counter]
        actions += self._resolve_changes(written.changes)
        return actions + self._advance()

    def record_failed(self, why: str) -> list[Action]:
        """Called when a flush, the record or the take-over failed: this rank writes no more records (I11)."""
        self._latched, self._writing = why, None
        return [Post(Failed(self.rank, self.counter, why, latched=True))]

    def lost(self, why: str, rank: int = 0) -> list[Action]:
        """Called when rank 0 or its log is gone: all waiting calls fail, and no checkpoint is dropped."""
        actions = self._stop(Broken(why, rank))
        if self.restore.active:
            self.restore.active = False
            actions.append(EndRestore("lost", why))
        return actions

    def preempted(self) -> list[Action]:
        """Report that this rank was preempted: the schedule will name the step after which all ranks stop."""
        return [Post(Preempted(self.rank))]

    def drain(self) -> list[Action]:
        """Apply each decision at once, until :attr:`idle`."""
        self._draining = True
        return self._advance()

    def leave(self, why: str | None = None) -> list[Action]:
        """Take part in no later checkpoint; with an error (``why``), checkpoints that wait for admission fail.

        Checkpoints being written go on, or are cancelled and reported as ``failed`` before this. Rank 0 leaves last.
        """
        if self._left:
            return []
        self._left = True
        actions: list[Action] = []
        if why is not None and self.stopped is None:
            for counter, job in list(self._jobs.items()):
                if job.phase is _Phase.WAITING:
                    actions += self.failed(counter, why)
        return [*actions, Post(Goodbye(self.rank, self.counter, why)), *self.drain()]

    def pin(self, which: int | str, pinned: bool) -> list[Action]:
        """Request to pin the newest checkpoint of a step, or that of a name; or to unpin all of the step or name."""
        return self._change(WantedStep("pin" if pinned else "unpin", which))

    def remove(self, which: int | str, *, force: bool) -> list[Action]:
        """Request to drop all checkpoints of a step, or that of a name; ``force``: even if no other is left."""
        return self._change(WantedStep("remove even the last" if force else "remove", which))

    def reject(self, which: int | str, until: int) -> list[Action]:
        """Request to reject all checkpoints from a step or name on, up to the counter ``until``, also in flight."""
        return self._change(WantedStep("reject", which, until))

    def was_rejected(self, which: int | str, until: int) -> list[Action]:
        """Request a change that ends once the records of all ranks have the marks: called once this rank's has."""
        return self._change(WantedStep("was rejected", which, until))

    def is_over(self, counter: int) -> bool:
        """Return whether a checkpoint was decided about, or cannot be committed any more, as it failed on this rank."""
        job = self._jobs.get(counter)
        return counter in self.settled or (job is not None and job.phase is _Phase.FAILED)

    def _change(self, wanted: WantedStep) -> list[Action]:
        """Request a change of the kept checkpoints, joining the run if need be. Requests are numbered from 0 on."""
        index = self.changes_asked
        self.changes_asked += 1
        if self.stopped is not None:
            return [ResolveChange(index, self.stopped.why)]
        self._unanswered.add(index)
        return [*self.join(), Post(ChangeRequest(self.rank, index, wanted))]

    @property
    def joined(self) -> bool:
        """Whether this rank joined the run, or is about to."""
        return self._joining

    def join(self) -> list[Action]:
        """Join the run, by taking over this rank's store, unless that was begun. Called at the run's first admission.

        Opening the group writes nothing to the stores before that.
        """
        if self._joining:
            return []
        self._joining = True
        return [TakeOver(self._orphans, self.line)]

    def _vote(self, counter: int, job: _Job) -> list[Action]:
        """Report to rank 0 that this rank's part is prepared, unless the checkpoint is decided already.

        Called only after the flush: else a checkpoint could be decided whose bytes a power failure takes.
        """
        if job.decided is not None:
            return []
        assert self.run is not None
        entry = job.entry if self.rank == 0 else None
        claims = job.sums, job.name, job.replicas, job.differing
        return [Post(Ok(self.rank, self.run, counter, job.step, entry, *claims))]

    def _advance(self) -> list[Action]:
        """Admit checkpoints that have room, and write the record that is due."""
        if self.run is None or self.stopped is not None or self._latched is not None:
            return []
        actions: list[Action] = []
        for counter, job in self._jobs.items():
            if job.phase is _Phase.WAITING:
                if not self._has_room():
                    break
                job.phase = _Phase.WRITING
                actions.append(Admit(counter))
        if self._writing is None and (record := self._record_due(self.run)) is not None:
            actions.append(record)
        if self._draining and self.idle:
            self._draining = False
        return actions

    def _has_room(self) -> bool:
        in_flight = sum(job.phase in _IN_FLIGHT for job in self._jobs.values())
        named = self.parts.keys() | (self._writing.parts.keys() if self._writing is not None else ())
        leased = sum(job.phase in _LEASED for job in self._jobs.values())
        return in_flight < self.max_in_flight and len(named) + leased < self._capacity()

    def _capacity(self) -> int:
        """The most slots. Kept checkpoints of earlier runs have slots of their own: else a crash loop uses up all."""
        return self.max_in_flight + max(self.reserved, len(self.keep) + len(self.unproven))

    def _record_due(self, run: Run) -> WriteRecord | None:
        prepares = tuple(counter for counter, job in self._jobs.items() if job.phase is _Phase.WRITTEN)
        # Again under the record's lock: only still undecided ones are prepared.
        parts = apply_decisions(self.parts, run, self.keep, self.unproven, self.settled)
        for key in self.rejected & parts.keys():
            parts[key] = replace(parts[key], entry=parts[key].entry.as_rejected())
        applies = self._changes or (parts != self.parts and self._apply_is_due())
        if not prepares and not applies:
            return None
        for counter in prepares:
            job = self._jobs[counter]
            job.phase = _Phase.PREPARING
            assert job.entry is not None
            part = Part(run, self.rank, self.world, committed=False, entry=job.entry)
            parts[part.key] = part
        self._writing = _Writing(parts, self.learned, prepares, self._changes)
        self._changes = ()
        newest_first = tuple(sorted(parts.values(), key=lambda part: -part.entry.counter))
        return WriteRecord(newest_first, self._applied(run))

    def _applied(self, run: Run) -> Applied:
        return Applied(run, self.learned, tuple(key for key, pinned in self.keep.items() if pinned))

    def _apply_is_due(self) -> bool:
        """Whether a record that applies decisions does not wait for the next prepare.

        A restart must not find a checkpoint whose replicas differ: until its abort is applied, all records name it.
        """
        return self._draining or any(job.phase is _Phase.WAITING or job.differs for job in self._jobs.values())

    def _resolve_changes(
        self, indices: Collection[int], why: str | None = None, refused: Refusal = "lost"
    ) -> list[Action]:
        actions: list[Action] = [ResolveChange(index, why, refused) for index in indices]
        self._unanswered.difference_update(indices)
        return actions

    # -- decisions

    def learn(self, decision: AnyDecision) -> list[Action]:
        """Take the next decision of the log, and return the actions for it."""
        self.learned += 1
        match decision:
            case Next() | Propose() | Confirm() | Withdraw():
                answer = self.schedule.learn(decision)
                return [] if answer is None else [Post(answer)]
            case Candidate() | Verify() | Restored() | NotRestored():
                if isinstance(decision, Restored):
                    self.differing |= {*decision.differing}
                return self.restore.learn(decision)
            case Roster():
                return self._meet(decision)
            case Opened():
                return self._open(decision.view, decision.nonce, decision.bucket)
            case Refused():
                return [Unopened(decision.why)]
            case SendParts() | PartsSent() | InBucket():  # the drain's (:mod:`.drain`)
                return []
            case _ if self.stopped is not None:
                return []
            case Broken():
                return [*self._stop(decision), *([] if self.in_memory else self.restore.broke(decision.why))]
            case Start():
                self.run, self.keep = decision.run, dict(decision.keep)
                self.unproven = frozenset(decision.unproven)
                return self._advance()
            case Commit():
                return self._learn_commit(decision)
            case Compare():
                self.differing |= {*decision.differing}
                job = self._jobs.get(decision.counter)
                return [Post(Digests(self.rank, decision.counter, job.digests if job is not None else {}))]
            case Abort():
                return [*self._settle(decision.counter, decision.cause, decision.why, decision.rank), *self._advance()]
            case Change():
                return self._learn_change(decision)
            case Round():
                self.rounds.running = decision
                return [SendCopies(decision)]
            case RoundEnd():
                self.rounds.running, self.keep = None, dict(decision.keep)
                self.rounds.floor = decision.key if decision.why is None else self.rounds.floor
                return [EndRound(decision), *self._advance()]
            case InMemory():
                raise ValueError("a decision about the tier in memory, which is not there")

    def _learn_commit(self, decision: Commit) -> list[Action]:
        self.keep, self.unproven = dict(decision.keep), frozenset()
        actions = self._settle(decision.counter, "durable")
        for counter in decision.superseded:
            actions += self._settle(counter, "superseded")
        return [*actions, *self._remove_orphans(), *self._advance()]

    def _learn_change(self, decision: Change) -> list[Action]:
        if decision.why is not None:
            return self._resolve_changes((decision.index,), decision.why, decision.refused)
        self.keep, self.unproven = dict(decision.keep), frozenset(decision.unproven)
        self.rejected.update(decision.rejected)
        actions = [action for counter in decision.superseded for action in self._settle(counter, "superseded")]
        return [*actions, *self._note_change(decision.index), *self._advance()]

    def _note_change(self, index: int) -> list[Action]:
        """Make the caller of a change wait until a record with the change is durable: before, a crash may undo it."""
        self._changes += (index,)
        return []

    def _settle(self, counter: int, outcome: _Outcome, why: str = "", rank: int = -1) -> list[Action]:
        self.settled.add(counter)
        resolve = Resolve(counter, outcome, why, rank)
        job = self._jobs.get(counter)
        if job is None:
            self._early[counter] = resolve
            return []
        job.decided, job.differs = self.learned, outcome == "differs"
        if job.phase in (_Phase.WAITING, _Phase.FAILED):
            del self._jobs[counter]
        elif job.phase in _LEASED:
            job.phase = _Phase.ENDING
            return [resolve, Cancel(counter)]
        return [resolve]

    def _remove_orphans(self) -> list[Action]:
        """Remove folders without a writer that hold no kept checkpoint. Called after a commit of this run only.

        Before one, such folders may hold the only complete checkpoint.
        """
        gone = tuple(one for one in self._orphans if not any(part.key in self.keep for part in one.parts))
        self._orphans = tuple(one for one in self._orphans if one not in gone)
        return [RemoveOrphans(gone)] if gone else []

    def _stop(self, broken: Broken) -> list[Action]:
        if self.stopped is not None:
            return []
        self.stopped = broken
        waiting = [counter for counter, job in self._jobs.items() if job.decided is None]
        actions: list[Action] = [Resolve(counter, "failed", broken.why, broken.rank) for counter in waiting]
        actions += [Cancel(counter) for counter, job in self._jobs.items() if job.phase in _LEASED]
        self._jobs, self._early, self._changes = {}, {}, ()
        actions += self._resolve_changes(sorted(self._unanswered), broken.why)
        return actions


def apply_decisions(
    parts: Mapping[Key, Part], run: Run, keep: Mapping[Key, bool], unproven: Collection[Key], settled: Settled
) -> dict[Key, Part]:
    """Return the parts of a rank's ``parts`` that its next record names, after all decisions of the group so far.

    Parts are named of checkpoints that the group keeps (``keep``; the value: whether it is pinned), that this run has
    not decided about yet, and that it cannot decide about (``unproven``). All other parts are left out: of checkpoints
    that were aborted, superseded, no longer kept, or begun by a run that ended.
    """
    named: dict[Key, Part] = {}
    for key, part in parts.items():
        if key in keep:
            entry = part.entry if part.entry.pinned == keep[key] else replace(part.entry, pinned=keep[key])
            named[key] = replace(part, committed=True, entry=entry)
        elif key in unproven or is_undecided(key, run, settled):
            named[key] = part
    return named


def is_undecided(key: Key, run: Run, settled: Settled) -> bool:
    """Return whether the checkpoint ``key`` is of this run, and nothing was decided about it."""
    return key.run == run and key.counter not in settled
