# SPDX-License-Identifier: Apache-2.0
"""Rank 0's decisions on the messages of all ranks, in one ordered log. How they are driven: see :mod:`.member`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pccheck_async.bucket import BucketState
from pccheck_async.errors import CheckpointError, NoCheckpointError, StoreError, StoreFullError, first_few, readable
from pccheck_async.format import Entry, describe_which, name_in
from pccheck_async.group.messages import (
    Abort,
    AboutMemory,
    Acknowledge,
    Admitted,
    AnyDecision,
    AnyMessage,
    AskParts,
    Broken,
    BucketChanged,
    Cause,
    Change,
    ChangeRequest,
    Commit,
    Compare,
    Copied,
    Digests,
    Failed,
    Found,
    Goodbye,
    Hello,
    InBucket,
    InMemory,
    Joined,
    KeptPart,
    Matched,
    Metadata,
    NoMoreParts,
    Ok,
    Opened,
    Preempted,
    Refusal,
    Refused,
    RestoreRequest,
    Roster,
    RoundEnd,
    SentParts,
    Start,
    Verified,
    WantedStep,
)
from pccheck_async.group.parts import Key, Run, SeenStore, Settled, link_to, members_digest, run_id
from pccheck_async.group.restore import LeadRestore, There
from pccheck_async.group.rounds import LeadRounds
from pccheck_async.group.schedule import LeadSchedule
from pccheck_async.group.uploads import LeadUploads
from pccheck_async.group.view import View, kept_at_start, line_of_run, view_beside_bucket, view_of, view_of_both
from pccheck_async.store import Retention

__all__ = ["Coordinator"]


_UNEVEN = (
    "the ranks' states do not make whole tensors, those under {}: of a tensor that lies on several ranks, or that all "
    "have alike, one of them has another shape, dtype or placement, has it at another place in its state, or lacks it; "
    "or the ranges of FlatShards leave a gap or overlap. Compare the names, shapes, placements and order of the ranks' "
    "states"
)


_DIFFERS = (
    "ranks differ in tensors that DistributedDataParallel or replicated= declares to be alike, such as {}; in the "
    "next checkpoint each rank saves its own. Local SGD makes them differ, and GPUs of several kinds may; else ranks "
    "have drifted apart. trusted_replicas= excludes tensors from the comparison"
)
_MIXED = "some ranks captured it before they knew that replicas differ, others after that"


@dataclass(slots=True, eq=False)
class _Ballot:
    """Rank 0's state of a checkpoint that is not decided about."""

    step: int
    rank: int
    """The rank that sent ``step``, the first one to send any."""
    metadata: Metadata | None = None
    """None until rank 0 admitted it."""
    entry: Entry | None = None
    prepared: set[int] = field(default_factory=set)
    sums: Counter[str] = field(default_factory=Counter)
    names: set[str | None] = field(default_factory=set)
    replicas: dict[int, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    """The ``replicas`` of each rank's :class:`Ok`, by rank."""
    differing: set[tuple[int, ...]] = field(default_factory=set)
    digests: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """The digests of each rank's replicas, by rank, once they were found to differ."""


class Coordinator:
    """Makes rank 0's decisions, from the messages of its inbox in their order.

    Args:
        world: Number of ranks in the group.
        retention: The rules of retention.
        nonce: A random number of 64 bits, which tells this run from another one with the same run number.
        memory: If this is the disk's coordinator: the memory tier's, None without that tier. The memory tier's has
            votes, a keep-list and settled counters of its own, and applies the same protocol to them; its decisions go
            into the same log. Both share its ``restore``.
        replicas: For the memory tier's: number of other hosts that have copies.
        token: For the memory tier's: the ``token`` of :class:`Roster`.
    """

    def __init__(
        self,
        world: int,
        retention: Retention,
        nonce: int,
        memory: Coordinator | None = None,
        *,
        replicas: int = 0,
        token: bytes = b"",
    ) -> None:
        self.world = world
        self.retention = retention
        self.nonce = nonce
        self.schedule = LeadSchedule(world)
        self.memory = memory
        self.replicas = replicas
        self.rounds = LeadRounds(world)
        self.uploads = LeadUploads(world)
        self.bucket: BucketState | None = None
        """The state of the drain; None without one."""
        self._found_bucket: BucketState | None = None  # at the opening
        self._dropped: set[int] = set()  # counters that were rejected or removed; the bucket may have them yet
        self._token = token
        self.disk: Coordinator | None = None
        """The disk's coordinator, if this is the memory tier's; else None."""
        self.restore: LeadRestore = LeadRestore(world) if memory is None else memory.restore
        if memory is not None:
            memory.disk = self
        self.run: Run | None = None
        self.broken: Broken | None = None
        self.committed: dict[int, tuple[Run, Entry]] = {}
        """The kept complete checkpoints that all ranks agree on, by counter, with rank 0's metadata."""
        self.unproven: tuple[Key, ...] = ()
        self.settled = Settled()
        self._hellos: dict[int, Hello] = {}
        self._roster = Roster((), ())  # once all said hello
        self._found: dict[int, Found] = {}
        self._view: View | None = None
        self._stores: dict[int, bytes] = {}
        self._came_from: Key | None = None
        self._ballots: dict[int, _Ballot] = {}
        self._changes: dict[int, dict[int, ChangeRequest]] = {}
        self._left: dict[int, Goodbye] = {}

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said hello: opening the group waits for them."""
        return [rank for rank in range(self.world) if rank not in self._hellos]

    @property
    def remaining(self) -> list[int]:
        """The ranks that have not said goodbye, or upload yet: rank 0 leaves, and its log ends, after them."""
        gone = self._left.keys() if self.bucket is None else self._left.keys() & self.uploads.left
        return [rank for rank in range(self.world) if rank not in gone]

    def awaited(self) -> dict[str, list[int]]:
        """Return the ranks that each open checkpoint or restore waits for; no timeout ends the waiting."""
        where = "" if self.disk is None else " in memory"
        answered: dict[str, Collection[int]] = {
            f"the checkpoint of step {one.step}{where}": one.digests if self._is_complete(one) else one.prepared
            for one in self._ballots.values()
        }
        if self.restore.requests:
            answered["a restore"] = set(self.restore.answered)
        if self.uploads.running is not None and self.uploads.answers:
            step = self.uploads.running.upload.step
            answered[f"the copy of step {step} to the bucket"] = self.uploads.answers.keys()
        awaited = {what: [rank for rank in range(self.world) if rank not in ranks] for what, ranks in answered.items()}
        return awaited if self.memory is None else self.memory.awaited() | awaited

    def receive(self, message: AnyMessage) -> Sequence[AnyDecision]:
        """Take the next message of the inbox; return the decisions, to be published in this order.

        Raises ValueError: there is no such rank. After any error the caller calls :meth:`give_up`.
        """
        if not 0 <= message.rank < self.world:
            raise ValueError(f"there is no rank {message.rank} among {self.world}")
        match message:
            # Committed checkpoints stay readable, preempted ranks leave, and rank 0 leaves after the last one.
            case Ok() | Failed() | Admitted() | Joined() | ChangeRequest() | Copied() if self.broken is not None:
                return []
            case Ok():
                return self._receive_ok(message)
            case Failed():
                return self._receive_failed(message)
            case Admitted():
                return self._receive_admitted(message)
            case Copied():
                return self._receive_copied(message)
            case Preempted() | Acknowledge():
                return self.schedule.receive(message)
            case AskParts():
                return self.uploads.begin(message)
            case SentParts():
                return self.uploads.receive(message)
            case NoMoreParts():
                return self.uploads.leave(message.rank)
            case BucketChanged():
                self.bucket = message.state
                return [InBucket(message.state)]
            case RestoreRequest() | Matched() | Verified():
                there, rejected = list[There](), list[There]()
                for run, one in self._restorable():
                    (rejected if one.rejected else there).append((Key(one.counter, run), one.step, one.name))
                return self.restore.receive(message, there, self._lacking(), rejected)
            case AboutMemory():
                return self._receive_about_memory(message.message)
            case Hello():
                return self._receive_hello(message)
            case Found():
                return self._receive_found(message)
            case Joined():
                self._stores[message.rank], self._came_from = message.store_id, message.came_from
                return self._start() if self._may_start() else []
            case ChangeRequest():
                return self._receive_change(message)
            case Digests():
                return self._receive_digests(message)
            case Goodbye():
                self._left[message.rank] = message
                if self.broken is not None:
                    return []
                return [*self._abort_what_lacks_ranks(), *self._end_rounds(message)]

    def _receive_about_memory(self, message: AnyMessage) -> list[AnyDecision]:
        if self.memory is None:
            raise ValueError("a message about a tier in memory, which is not there")
        decisions = _in_memory(self.memory.receive(message))
        if isinstance(message, Goodbye) and self.broken is None:
            decisions += self._abort_what_lacks_ranks()
        return decisions

    def schedule_in_memory(self, step: int, *, save: bool) -> Sequence[AnyDecision]:
        """Return the decision that ``step`` is the next scheduled one in memory; ``save``: all ranks save there then.

        Returns nothing without a memory tier, or once it is broken.
        """
        if self.memory is None or self.memory.broken is not None:
            return []
        return _in_memory(self.memory.schedule.publish(step, save=save))

    def _restorable(self) -> list[tuple[Run, Entry]]:
        """Return the checkpoints of all tiers, newest first; of one that is in several, the disk's entry.

        Only the disk's entry has whether it is pinned or rejected.
        """
        disk = self.disk or self
        copies = () if disk.bucket is None else disk.bucket.valid
        in_bucket = {copy.entry.counter: (copy.key.run, copy.entry) for copy in copies if copy.key is not None}
        there = {counter: one for counter, one in in_bucket.items() if counter not in disk._dropped}
        there |= self.committed | disk.committed
        return [there[counter] for counter in sorted(there, reverse=True)]

    # -- opening

    def refuse_late(self, seconds: float) -> list[AnyDecision]:
        """Refuse the opening if ranks did not say hello within so many seconds.

        If ranks are missing in the memory tier alone, break that tier.
        """
        text = "ranks {} did not open {} within {} s"
        if missing := self.missing:
            return [Refused(text.format(", ".join(map(str, missing)), "this group", seconds))]
        if self.memory is not None and (missing := self.memory.missing) and self.broken is None:
            ranks = ", ".join(map(str, missing))
            return self._break(text.format(ranks, "the tier in memory of this group", seconds), missing[0])
        return []

    def _receive_hello(self, message: Hello) -> list[AnyDecision]:
        self._hellos[message.rank] = message
        if self.missing:
            return []
        hellos = [self._hellos[rank] for rank in range(self.world)]
        for name in ("version", "world", "settings"):
            if (why := _difference(name, hellos)) is not None:
                return [Refused(why)]
        domains = list(dict.fromkeys(hello.domain for hello in hellos))
        self._roster = Roster(
            tuple(domains.index(hello.domain) for hello in hellos),
            tuple(hello.host for hello in hellos),
            tuple(hello.address for hello in hellos) if self.replicas else (),
            self._token,
        )
        return [self._roster]

    def _receive_found(self, message: Found) -> list[AnyDecision]:
        self._found[message.rank] = message
        homes, hosts = self._roster.homes, self._roster.hosts
        if not homes:
            raise ValueError("records were found before all ranks said hello")
        if len(self._found) < len({*homes}):
            return []
        stores = [store for rank in sorted(self._found) for store in self._found[rank].stores]
        view = view_of(stores, homes, hosts) if self.disk is None else self._view_of_both(self.disk, stores)
        for bucket in (one.bucket for one in self._found.values() if one.bucket is not None):
            view, self.bucket = view_beside_bucket(stores, homes, hosts, bucket)
            self._found_bucket = self.bucket
            self._dropped |= {one.entry.counter for one in view.remote if one.entry.rejected}
        self._view = view
        if view.error is not None:
            return [Refused(view.error)]
        try:
            self.retention.check_room([one.entry for one in view.complete])
        except StoreFullError as error:
            return [Refused(f"{error.strerror}, or open with a smaller max_in_flight")]
        self.settled = Settled(view.base + 1)
        self.committed = {one.entry.counter: (one.run, one.entry) for one in view.complete}
        self.unproven = view.unproven
        return [Opened(view, self.nonce, self.bucket)]

    def _view_of_both(self, disk: Coordinator, found: Sequence[SeenStore]) -> View:
        """Return the view over both tiers (:func:`view_of_both`), or over the disk alone if that one has an error."""
        assert disk._view is not None
        on_disk = [store for rank in sorted(disk._found) for store in disk._found[rank].stores]
        places = self._roster.homes, self._roster.hosts
        view = view_of_both(on_disk, disk._roster.homes, found, *places, disk._found_bucket)
        if view.error is not None:  # then the disk alone counts
            view = replace(view_of_both(on_disk, disk._roster.homes, (), *places, disk._found_bucket), base=view.base)
        return view

    def _lacking(self) -> str:
        if self.disk is not None:  # what only memory had is lost with its host
            return self.disk._lacking()
        lacking = [one for one in self._view.incomplete if not one.proven] if self._view is not None else []
        return "; ".join(
            f"the checkpoint of step {one.step} lacks the parts of {one.lacking}"
            + (f" (on {', '.join(one.hosts)})" if one.hosts else "")
            for one in lacking
        )

    # -- commits

    def _may_start(self) -> bool:
        """Whether the run may start: every rank has taken over its store (I12), and the disk's run has started.

        Before that, a power failure may bring back parts that a keep-list drops, and lose parts that it names.
        """
        started = self.disk is None or self.disk.run is not None  # its line is durable on all disks
        return self.run is None and len(self._stores) == self.world and started

    def _start(self) -> list[AnyDecision]:
        view = self._view
        assert view is not None
        if self.disk is not None:
            return [self._start_in_memory(self.disk, view)]
        self.run = Run(view.number, self.nonce, members_digest(self._stores.items()))
        # Pins since the opening count; checkpoints that were unpinned go with the next commit.
        now = self.committed
        there = [replace(one, entry=now[one.entry.counter][1]) for one in view.complete if one.entry.counter in now]
        kept = {one.entry.counter for one in kept_at_start(view.complete, there, self.retention, self.restore.damaged)}
        self.committed = {counter: one for counter, one in self.committed.items() if counter in kept}
        self.unproven += self._came_from_in_part(view)
        start = Start(self.run, self._keep_list(), self.unproven)
        also = _in_memory(self.memory._start()) if self.memory is not None and self.memory._may_start() else []
        return [start, *also]

    def _came_from_in_part(self, view: View) -> tuple[Key, ...]:
        """Return the checkpoint that the run goes on from, if the disk has only some of its parts, and memory the rest.

        The parts on disk stay until a newer checkpoint is complete there.
        """
        return tuple(one.key for one in view.incomplete if one.key == self._came_from and one.key not in self.unproven)

    def _start_in_memory(self, disk: Coordinator, view: View) -> Start:
        """Start the disk's run in memory: checkpoints there stay if the run's line, now durable on disk, accepts them.

        Incomplete ones over both tiers are newer than the checkpoint that the run goes on from, and are dropped: no
        later line accepts them.
        """
        assert disk.run is not None
        assert disk._view is not None
        self.run = disk.run
        run = run_id(self.run.number, self.run.nonce)
        line = line_of_run(disk._view, disk._found_bucket, run, view.base, disk._came_from)

        def accepted(key: Key) -> bool:
            return line.accepts(*link_to(key))

        there = [replace(one, pinned=False) for run, one in self._newest_first() if accepted(Key(one.counter, run))]
        kept = self.retention.retain(there[1:], there[0], self.restore.damaged).entries if there else []
        kept += [entry for entry in self._floor_found(view, there) if entry not in kept]
        self.committed = {entry.counter: (self.committed[entry.counter][0], entry) for entry in kept}
        return Start(self.run, self._keep_list(), ())

    def _floor_found(self, view: View, there: Collection[Entry]) -> list[Entry]:
        """Return the newest checkpoint in ``there`` with enough copies on this run's hosts, and make it the floor.

        The list is empty if there is none.
        """
        hosts = len({*self._roster.homes})
        if not self.replicas or hosts == 1:
            return []
        wanted = min(self.replicas, hosts - 1) + 1
        copied = {one.key.counter: one.key for one in view.complete if one.copies(hosts) >= wanted}
        found = [entry for entry in there if entry.counter in copied][:1]
        self.rounds.floor = copied[found[0].counter] if found else None
        return found

    def _receive_admitted(self, message: Admitted) -> list[AnyDecision]:
        if message.counter in self.settled:
            return []
        ballot = self._ballots.setdefault(message.counter, _Ballot(message.step, message.rank))
        ballot.metadata = message.metadata
        return self._check_step(ballot, message) or self._abort_what_lacks_ranks()

    def _receive_ok(self, message: Ok) -> list[AnyDecision]:
        if message.counter in self.settled or message.run != self.run:
            return []
        ballot = self._ballots.setdefault(message.counter, _Ballot(message.step, message.rank))
        if broken := self._check_step(ballot, message):
            return broken
        ballot.prepared.add(message.rank)
        ballot.entry = message.entry or ballot.entry
        ballot.sums.update(message.sums)
        ballot.names.add(message.name)
        ballot.replicas[message.rank] = message.replicas
        ballot.differing.add(message.differing)
        return self._conclude(message.counter, ballot) if self._is_complete(ballot) else self._abort_what_lacks_ranks()

    def _conclude(self, counter: int, ballot: _Ballot) -> list[AnyDecision]:
        """Decide about a checkpoint that all ranks have prepared."""
        if len(ballot.names) > 1:
            why = f"the ranks call it differently: {', '.join(sorted(map(repr, ballot.names)))}"
            return [self._abort(counter, why, -1)]
        if self._is_mixed(ballot):
            # All have the same set from here on: else the next one may be mixed, too.
            known = tuple(sorted({ranks for some in ballot.differing for ranks in some}))
            return [Compare(counter, known), self._abort(counter, _MIXED, -1, "differs")]
        if names := [name for name, total in ballot.sums.items() if total % (1 << 64)]:
            return [self._abort(counter, _UNEVEN.format(", ".join(readable(names))), -1)]
        if differing := self._differing(ballot):
            return [Compare(counter, differing)]
        return self._commit(counter, ballot)

    def _is_mixed(self, ballot: _Ballot) -> bool:
        """Whether some ranks saved replicas that others left to one: ``differing`` changed between their captures."""
        return len(ballot.differing) > 1

    def _differing(self, ballot: _Ballot) -> tuple[int, ...]:
        """Return hashes of the ranks whose replicas differ, as far as these ranks sampled the same part of them."""
        digests: dict[tuple[int, int], set[int]] = {}
        for replicas in ballot.replicas.values():
            for ranks, (part, digest) in replicas.items():
                digests.setdefault((ranks, part), set()).add(digest)
        return tuple(sorted({ranks for (ranks, _), values in digests.items() if len(values) > 1}))

    def _receive_digests(self, message: Digests) -> list[AnyDecision]:
        """Abort with the names of differing replicas, once the digests of all ranks are in."""
        ballot = self._ballots.get(message.counter)
        if ballot is None:
            return []
        ballot.digests[message.rank] = message.by_path
        if len(ballot.digests) < self.world:
            return []
        by_path: dict[str, set[int]] = {}
        for digests in ballot.digests.values():
            for path, digest in digests.items():
                by_path.setdefault(path, set()).add(digest)
        names = sorted(path for path, values in by_path.items() if len(values) > 1)
        return [self._abort(message.counter, _DIFFERS.format(first_few(names)), -1, "differs")]

    def _is_complete(self, ballot: _Ballot) -> bool:
        return len(ballot.prepared) == self.world

    def _check_step(self, ballot: _Ballot, message: Admitted | Ok) -> list[AnyDecision]:
        """Break the group if the message has another step than the ballot; return that decision, else nothing.

        Ranks that save different steps as one checkpoint have lost each other.
        """
        if ballot.step == message.step:
            return []
        return self._break(
            f"rank {message.rank} saved step {message.step} as the checkpoint {message.counter} of this group, rank "
            f"{ballot.rank} step {ballot.step}: all ranks have to save after the same steps",
            message.rank,
        )

    def _break(self, why: str, rank: int) -> list[AnyDecision]:
        self.broken = Broken(why, rank)
        memory = self.memory
        if memory is None or memory.run is not None or memory.broken is not None:
            return [self.broken]
        return [self.broken, *_in_memory(memory._break(why, rank))]  # it begins after the disk's run alone

    def give_up(self, why: str) -> list[AnyDecision]:
        """Break the group, and end a restore, after a message that raised an error: a rank may wait for an answer."""
        if self.broken is None:
            self.broken = Broken(why, -1)
        memory = self.memory
        also = [] if memory is None or memory.broken is not None else _in_memory(memory._break(why, -1))
        return [self.broken, self.restore.end(why), *also]

    def _receive_failed(self, message: Failed) -> list[AnyDecision]:
        if message.latched:
            return self._break(message.why, message.rank)
        if message.counter in self.settled:
            return []
        return [self._abort(message.counter, message.why, message.rank, "torn" if message.torn else "failed")]

    def _abort(self, counter: int, why: str, rank: int, cause: Cause = "failed") -> AnyDecision:
        self._settle(counter)
        return Abort(counter, why, rank, cause)

    def _settle(self, *counters: int) -> None:
        for counter in counters:
            self.settled.add(counter)
            self._ballots.pop(counter, None)

    def _abort_what_lacks_ranks(self) -> list[AnyDecision]:
        """Abort the checkpoints in which a rank that has left takes no part."""
        decisions: list[AnyDecision] = []
        # One that says so of memory only saves on disk, too, what it has in memory.
        leaving = {} if self.memory is None else self.memory._left
        for rank, goodbye in (leaving | self._left).items():
            why = f"rank {rank} left before" + (f": {goodbye.why}" if goodbye.why else "")
            behind = [counter for counter in self._ballots if counter > goodbye.counter]
            decisions += [self._abort(counter, why, rank) for counter in behind]
        return decisions

    def _commit(self, counter: int, ballot: _Ballot) -> list[AnyDecision]:
        """Commit a checkpoint that all ranks prepared, and apply retention; abort it if there is no room to keep it."""
        assert self.run is not None
        assert ballot.entry is not None
        committed = [entry for _, entry in self._newest_first()]
        kept = self.retention.retain(committed, ballot.entry, self.restore.damaged).entries
        try:
            self.retention.check_place(len(kept) - 1)
        except StoreFullError as error:
            return [self._abort(counter, str(error), -1)]
        self._settle(counter)
        self.committed[counter] = (self.run, ballot.entry)
        # A restore that is under way reads its candidate on all ranks: it goes with the commit after that.
        reading = self.restore.candidate.counter if self.restore.candidate is not None else None
        stays = {entry.counter for entry in kept} | {counter, reading} | self.rounds.kept
        self.committed = {at: one for at, one in self.committed.items() if at in stays}
        self.unproven = ()
        superseded = self._superseded(counter, kept)
        self._settle(*superseded)
        return [Commit(counter, self._keep_list(), superseded), *self._next_round()]

    def _next_round(self) -> list[AnyDecision]:
        """Begin a round about the newest checkpoint in memory, if this run made it, and it is still to be copied."""
        if not self.replicas or len({*self._roster.homes}) == 1 or self._left or not self.committed:
            return []
        run, newest = self._newest_first()[0]
        begun = self.rounds.begin(Key(newest.counter, run), newest.step) if run == self.run else None
        return [] if begun is None else [begun]

    def _receive_copied(self, message: Copied) -> list[AnyDecision]:
        """End the round once all copies are there, or one cannot be made, and begin the next one."""
        floor = self.rounds.floor
        ended, why, rank = self.rounds.receive(message), message.why, message.rank
        if ended is None:
            return []
        if why is None and ended.key.counter not in self.committed:
            self.rounds.floor, why, rank = floor, "the checkpoint was removed meanwhile", -1
        # What the rules alone keep, and the floor: the one before that is not needed any more.
        entries = [entry for _, entry in self._newest_first()]
        kept = self.retention.retain(entries[1:], entries[0], self.restore.damaged).entries if entries else []
        reading = self.restore.candidate.counter if self.restore.candidate is not None else None
        stays = {entry.counter for entry in kept} | {reading} | self.rounds.kept
        self.committed = {at: one for at, one in self.committed.items() if at in stays}
        end = RoundEnd(ended.number, ended.key, ended.step, self._keep_list(), why, rank)
        return [end, *self._next_round()]

    def _end_rounds(self, message: Goodbye) -> list[AnyDecision]:
        """End the running round, and the waiting for later ones, as a rank has left."""
        rounds = self.rounds
        if not self.replicas or self.run is None or not self.committed:
            return []
        rounds.running, (run, newest) = None, self._newest_first()[0]
        why = f"rank {message.rank} left before"
        return [RoundEnd(rounds.number - 1, Key(newest.counter, run), newest.step, self._keep_list(), why)]

    def _superseded(self, counter: int, kept: Sequence[Entry]) -> tuple[int, ...]:
        """Return the older checkpoints in flight that retention would not keep beside the ``kept`` ones.

        Rank 0 admitted all of them before the one with ``counter``, so that their steps and metadata are known.
        """
        older = [(at, one) for at, one in self._ballots.items() if at < counter]
        return tuple(at for at, one in sorted(older) if not self._would_keep(kept, at, one))

    def _would_keep(self, kept: Sequence[Entry], counter: int, ballot: _Ballot) -> bool:
        if self.retention.spaced:  # its time is not known: if no rule keeps it, it goes with the commit after its own
            return True
        entry = Entry(counter, ballot.step, 0.0, 0, 0, 0, 0, 0, False, ballot.metadata or {})
        return entry in self.retention.retain(kept, entry, self.restore.damaged).entries

    def _newest_first(self) -> list[tuple[Run, Entry]]:
        return [self.committed[counter] for counter in sorted(self.committed, reverse=True)]

    def _keep_list(self) -> tuple[KeptPart, ...]:
        return tuple(KeptPart(Key(entry.counter, run), entry.pinned) for run, entry in self._newest_first())

    def _receive_change(self, message: ChangeRequest) -> list[AnyDecision]:
        requests = self._changes.setdefault(message.index, {})
        requests[message.rank] = message
        if len(requests) < self.world:
            return []
        del self._changes[message.index]
        wanted = {one.wanted for one in requests.values()}
        if len(wanted) > 1:
            said = ", ".join(sorted(map(str, wanted)))
            return [Change(message.index, (), (), f"ranks asked for different changes: {said}")]
        chosen: set[int] = set()
        beside = self._beside_disk()
        try:
            self._check_memory(message.wanted)
            if message.wanted.change == "reject":
                chosen = self._rejected(message.wanted)
            changed = self._changed(message.wanted, chosen)
        except CheckpointError as error:  # there is none of that step, or no room for one more
            refused: Refusal = "missing" if isinstance(error, NoCheckpointError) else "refused"
            return [Change(message.index, (), (), str(error), refused)]
        self._dropped |= chosen | (self.committed.keys() - {entry.counter for entry in changed})
        if message.wanted.change.startswith("remove"):
            self._dropped |= {one.counter for _, one in beside.values() if one.matches(message.wanted.which)}
        self.committed = {entry.counter: (self.committed[entry.counter][0], entry) for entry in changed}
        keys = [Key(entry.counter, self.committed[entry.counter][0]) for entry in changed if entry.counter in chosen]
        keys += [key for key in self.unproven if key.counter in chosen]
        keys += [Key(counter, run) for counter, (run, _) in beside.items() if counter in chosen]
        superseded = tuple(sorted(chosen & self._ballots.keys()))
        self._settle(*superseded)
        follow = [] if self.memory is None else _in_memory(self.memory._follow(message, chosen))
        return [
            *follow,
            Change(message.index, self._keep_list(), self.unproven, None, "lost", tuple(keys), superseded),
        ]

    def _check_memory(self, wanted: WantedStep) -> None:
        """Raise StoreError if memory cannot follow a change: a restart would find checkpoints that the disk dropped."""
        if self.memory is not None and self.memory.broken is not None and "pin" not in wanted.change:
            why = self.memory.broken.why
            raise StoreError(f"the tier in memory is off ({why}), and may hold them: open the engine anew first")

    def _in_memory_alone(self) -> dict[int, tuple[Run, Entry]]:
        """Return the checkpoints in memory that the disk does not have: no record there can mark or pin them."""
        if self.memory is None:
            return {}
        return {counter: one for counter, one in self.memory.committed.items() if counter not in self.committed}

    def _beside_disk(self) -> dict[int, tuple[Run, Entry]]:
        """Return the checkpoints in memory or in the bucket that the disk does not have, by counter."""
        copies = () if self.bucket is None else self.bucket.valid
        there = {
            copy.entry.counter: (copy.key.run, copy.entry)
            for copy in copies
            if copy.key is not None and copy.entry.counter not in self.committed.keys() | self._dropped
        }
        return there | self._in_memory_alone()

    def _follow(self, request: ChangeRequest, rejected: Collection[int]) -> list[AnyDecision]:
        """Return the decision by which memory follows a change on disk: drop what is removed or rejected there."""
        wanted = request.wanted

        def stays(counter: int, entry: Entry) -> bool:
            if wanted.change.startswith("remove"):
                return not entry.matches(wanted.which)
            return counter not in rejected

        self.committed = {counter: one for counter, one in self.committed.items() if stays(counter, one[1])}
        return [] if self.broken is not None else [Change(request.index, self._keep_list(), (), None)]

    def _rejected(self, wanted: WantedStep) -> set[int]:
        """Return the counters of the checkpoints to reject: complete in any tier, in flight, or unproven.

        Rank 0 has admitted all up to ``wanted.until`` by now, so all ballots are known. Raises the errors of
        :meth:`Retention.reject`; StoreError if no rank could mark one of them.
        """
        view = self._view
        assert view is not None
        in_flight = {
            counter: (ballot.step, name_in(ballot.metadata or {})) for counter, ballot in self._ballots.items()
        }
        in_flight |= {one.key.counter: (one.step, None) for one in view.incomplete if one.key in self.unproven}
        alone = [entry for _, entry in self._beside_disk().values() if not entry.rejected]
        in_flight |= {entry.counter: (entry.step, entry.name) for entry in alone}
        entries = [entry for _, entry in self._newest_first()]
        chosen = self.retention.reject(entries, wanted.which, in_flight, wanted.until)
        self._check_own(chosen & self.committed.keys(), "reject")
        if self.memory is not None:
            self.memory._check_own(chosen & self._in_memory_alone().keys(), "reject")
        return chosen

    def _check_own(self, chosen: Collection[int], verb: str) -> None:
        """Raise StoreError if no rank could mark or drop a chosen one: no rank runs where its part lies."""
        for one in () if self._view is None else self._view.complete:
            own = any(place == home for place, home in zip(one.places, self._roster.homes, strict=False))
            if one.entry.counter in chosen and not own:
                raise StoreError(
                    f"the checkpoint of step {one.entry.step} is in folders that no rank writes to, as ranks have "
                    f"moved: save once more, then {verb}; nothing was {verb.rstrip('e')}ed"
                )

    def _changed(self, wanted: WantedStep, rejected: Collection[int]) -> list[Entry]:
        entries = [entry for _, entry in self._newest_first()]
        if wanted.change in ("reject", "was rejected"):
            return [entry.as_rejected() if entry.counter in rejected else entry for entry in entries]
        alone = [entry for _, entry in self._in_memory_alone().values()]
        first = max((entry.counter for entry in (*entries, *alone) if entry.matches(wanted.which)), default=None)
        if wanted.change in ("pin", "unpin"):
            if wanted.change == "pin" and first in {entry.counter for entry in alone}:
                raise StoreError(
                    f"the checkpoint{describe_which(wanted.which)} is in memory alone: pins are the disk's"
                )
            return self.retention.pin(entries, wanted.which, wanted.change == "pin")
        if first is None and any(one.matches(wanted.which) for _, one in self._beside_disk().values()):
            return entries  # in the bucket alone
        force = wanted.change == "remove even the last"
        if first is None or any(entry.matches(wanted.which) for entry in entries):
            return self.retention.remove(entries, wanted.which, force=force)
        self.retention.remove([*entries, *alone], wanted.which, force=force)  # :meth:`_follow` removes them
        assert self.memory is not None
        self.memory._check_own([entry.counter for entry in alone if entry.matches(wanted.which)], "remove")
        return entries


def _in_memory(decisions: Sequence[AnyDecision]) -> list[AnyDecision]:
    return [InMemory(decision) for decision in decisions if not isinstance(decision, InMemory)]


def _difference(name: str, hellos: Sequence[Hello]) -> str | None:
    """Return a sentence on the values of a field that ranks disagree on, None if they agree."""
    by_value: dict[object, list[int]] = {}
    for hello in hellos:
        by_value.setdefault(getattr(hello, name), []).append(hello.rank)
    if len(by_value) == 1:
        return None
    said = "; ".join(f"ranks {', '.join(map(str, ranks))}: {value}" for value, ranks in by_value.items())
    return f"the ranks opened this group with different {name}: {said}"
