# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that the ranks of a group restore together, and the sources of their parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from pccheck_async.engine import Caller, Draining, RestoreCandidate, RestoreCandidates
from pccheck_async.errors import (
    DamagedError,
    GroupError,
    IncompleteCheckpointError,
    NoCheckpointError,
    ReadError,
    StateMismatchError,
    StoreError,
    is_exhausted,
)
from pccheck_async.format import Entry, Key, Reach
from pccheck_async.group.actions import Action, ChangeState, EndRestore, FillArrays, MatchManifest
from pccheck_async.group.control import Client
from pccheck_async.group.driver import Driver, RestoreAction
from pccheck_async.group.elsewhere import ReceivedPart, send_part
from pccheck_async.group.member import Member
from pccheck_async.group.messages import Broken, MatchOutcome
from pccheck_async.group.view import Complete
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import DroppedMeanwhileError, FolderPart, OwnSlot, Source, UnreadableError, rank_name
from pccheck_async.telemetry import write, write_and_warn

__all__ = ["AgreedCandidates", "PartSources"]


class AgreedCandidates(RestoreCandidates):
    """The candidates that rank 0 proposes: all ranks restore the same one, or none and raise the same error.

    Args:
        member: This rank's member, through which it takes part in the restore.
        stopped: Returns why nothing is decided any more; None while decisions are made.
        parts: The sources of the parts of checkpoints.
        do: Carries out actions of the member, on the engine's loop.
        agreed: Queue of the actions that the ranks agree on, one for each request and answer.
        ask: Returns the actions that request the restore.
    """

    def __init__(
        self,
        member: Member,
        stopped: Callable[[], Broken | None],
        parts: PartSources,
        do: Callable[[list[Action]], None],
        agreed: asyncio.Queue[RestoreAction],
        ask: Callable[[], list[Action]],
    ) -> None:
        self._member = member
        self._stopped = stopped
        self._restore = member.restore
        self._parts = parts
        self._do = do
        self._actions = agreed
        self._ask = ask
        self._asked, self._agreed = False, False
        self._next: RestoreAction | None = None
        self._mismatch: Exception | None = None
        self._step: int | None = None  # of the last candidate
        self._left: list[RestoreCandidate] = []  # other sources of it
        self._further = False  # another host has a copy
        self._source: Reach = "disk"  # of the present one
        self._passed: Sequence[int] = ()  # copies on other hosts, by rank
        self._again = False  # with another source, of which the other ranks need not know

    async def next(self, caller: Caller) -> RestoreCandidate | None:
        if self._again:
            self._again = False
            return self._tried(self._left.pop(0))
        if not self._asked:
            if (stopped := self._stopped()) is not None:
                raise GroupError(stopped.why)
            self._asked = True
            await caller.run(self._agree(self._ask))
        while True:
            match self._next:
                case MatchManifest(key, damage, passed):
                    passed_over, self._step = self._step, self._parts.step(key)
                    if damage:
                        self.fell_back = True
                        self._warn_of(passed_over, damage)
                    self._further, self._passed = self._parts.has_further(key, passed), passed
                    if found := self._parts.candidates(key, passed):
                        self._left = found[1:]
                        return self._tried(found[0])
                    why = "its part is not in its store"
                    outcome: MatchOutcome = "elsewhere" if self._further else "damaged"
                    await caller.run(self._agree(partial(self._restore.matched, outcome, why)))
                case EndRestore(reason, why):
                    self._agreed = True
                    if reason == "none":
                        return None
                    raise (self._mismatch if reason == "mismatch" else None) or _error(reason, why)
                case other:
                    raise GroupError(f"the restore cannot go on with {other!r}")

    def _tried(self, candidate: RestoreCandidate) -> RestoreCandidate:
        self._source = candidate.source
        return candidate

    def _warn_of(self, step: int | None, damage: str) -> None:
        """Warn that all ranks pass over the checkpoint of a step: on rank 0, and where a part was found damaged."""
        rank = self._member.rank
        if rank == 0 or f"rank {rank}: " in damage:
            text = f"the checkpoint of step {step} cannot be read ({damage}); all ranks fall back to step {self._step}"
            write_and_warn("fell_back", text, step=step, error=damage)

    def _pass_over(self, error: Exception | None) -> bool:
        """After an UnreadableError, choose another source of this rank's part of the same checkpoint.

        Returns whether there is one that this rank reads itself. Damage belongs to one copy of a part: a bit flipped in
        memory drops no checkpoint.
        """
        if not isinstance(error, UnreadableError) or is_exhausted(error.error):
            return False
        step = self._step
        if not self._left:
            if self._further:
                text = "a copy of step %s cannot be read, and one on another host is: %s"
                self._write(text, step, error.error)
            return False
        self._again = True
        self._write("a copy of step %s cannot be read, another one is: %s", step, error.error)
        return True

    def _write(self, text: str, step: int | None, error: Exception) -> None:
        if self._source in ("disk", "remote"):
            write("copy_unreadable", text, step, error, step=step)
        else:
            write("memory_unreadable", text, step, error, step=step)

    async def matched(self, caller: Caller, error: Exception | None) -> bool:
        if self._pass_over(error):
            return False
        if isinstance(self._next, FillArrays):  # all ranks matched, and this one reads another copy
            if error is not None:
                await caller.run(self._agree(partial(self._restore.verified, str(error), elsewhere=self._further)))
            return error is None
        outcome: MatchOutcome = "ok" if error is None else "mismatch"
        self._mismatch = error
        unseen = isinstance(error, StateMismatchError) and (error.parts_unseen or bool(error.missing))
        if unseen and self._parts.has_out_of_sight(self._restore.key, self._passed):
            outcome = "unseen"  # an older checkpoint may be on a disk that all ranks see
        if isinstance(error, DroppedMeanwhileError):
            outcome, self._mismatch = "unread", None  # rank 0 proposes the newest one that is there now
        if isinstance(error, UnreadableError):
            if is_exhausted(error.error):  # the checkpoint is whole, and must not be dropped for it
                self._mismatch = error.error
            else:
                outcome = "unread" if isinstance(error.error, ReadError) else "damaged"
                outcome = "elsewhere" if self._further else outcome
                self._mismatch = None
        why = "" if error is None else str(error)
        await caller.run(self._agree(partial(self._restore.matched, outcome, why)))
        return isinstance(self._next, FillArrays)

    async def filled(self, caller: Caller, error: UnreadableError | None, differing: Collection[int]) -> bool:
        if self._pass_over(error):
            return False
        damage, unread = (None, False) if error is None else (str(error), isinstance(error.error, ReadError))
        further = self._further and error is not None and not is_exhausted(error.error)
        answer = partial(self._restore.verified, damage, differing, unread=unread, elsewhere=further)
        await caller.run(self._agree(answer))
        self._agreed = isinstance(self._next, ChangeState)
        return self._agreed

    async def abandon(self, caller: Caller, error: BaseException) -> None:
        if not self._agreed and self._stopped() is None:  # the others wait for this rank's request, or an answer
            await caller.run(self._abandon(f"the restore ended: {error!r}"))

    async def _agree(self, answer: Callable[[], list[Action]]) -> None:
        """Send this rank's request or answer, and wait for the next action."""
        self._do(answer())
        self._next = await self._actions.get()

    async def _abandon(self, why: str) -> None:
        if not self._asked:
            self._do(self._ask())
        while not self._actions.empty():
            self._actions.get_nowait()  # no later call receives these
        self._do(self._restore.abandon(why))


class PartSources:
    """The sources of the parts of complete checkpoints, as one rank sees them.

    Domains are numbered: first those of the memory tier, if there is one, then those of the disks, and last the bucket,
    which all ranks see.

    Args:
        disk: This rank's driver of the disk.
        memory: This rank's driver of the memory tier; None without that tier.
        client: This rank's client of the control plane.
        drain: The drain of this rank's engine; None without one.
    """

    def __init__(self, disk: Driver, memory: Driver | None, client: Client, drain: Draining | None = None) -> None:
        self._disk = disk
        self._memory = memory
        self._client = client
        self._restore = disk.member.restore
        self._shift = 0 if memory is None else len({*memory.member.homes})
        self._drain = drain
        self._bucket = self._shift + len({*disk.member.homes})  # its domain
        self._in_bucket: dict[Key, Entry] = {}  # as of the present candidate: all ranks have to know the same

    def has_further(self, key: Key, passed: Sequence[int]) -> bool:
        """Return whether there is a further copy of this rank's part, besides the present one and the passed ones.

        ``passed``: as in :class:`.messages.Candidate`.
        """
        rank = self._disk.member.rank
        return len(self._options(key, rank)) > 1 + (passed[rank] if passed else 0)

    def candidates(self, key: Key, passed: Sequence[int]) -> list[RestoreCandidate]:
        """Return a checkpoint as one candidate per source of this rank's part, the nearest source first."""
        member, ways = self._disk.member, self._ways(key, self._disk.member.rank, passed)
        old = len(ways[0]) if ways else 0
        if ways and old != member.world and member.rank == 0:
            text = (
                "this checkpoint is of %d ranks, here are %d: rank r restores, of the ranks' private values, "
                "those of rank r modulo %d; RNGState stays as it is"
            )
            write("other_world", text, old, member.world, old, store=os.fspath(self._disk.folder))
        return [found for way in ways if (found := self._candidate(key, way)) is not None]

    def _candidate(self, key: Key, way: Sequence[int]) -> RestoreCandidate | None:
        member, sources, elsewhere, disk = self._disk.member, dict[int, Source](), [], self._disk
        rank, old = member.rank, len(way)
        own, other_world = rank % old, None if old == member.world else (rank, member.world)
        for each, domain in enumerate(way):
            if (opened := self._seen(rank, domain)) is not None:
                sources[each] = FolderPart(opened, rank_name(each), key)
            else:
                elsewhere.append(each)
        tier: Reach = "memory" if way[own] < self._shift else "remote" if way[own] == self._bucket else "disk"
        if tier == "remote":
            return RestoreCandidate(sources, own, elsewhere, other_world=other_world, source=tier)
        nearest = self._memory if tier == "memory" and self._memory is not None else disk
        if (part := nearest.member.parts.get(key)) is not None and self._sees(rank, way[own]):
            sources[own] = OwnSlot(nearest.store, part.entry)
        elif self._complete(key) is None and self._sees(rank, way[own]):
            return None
        elif own not in sources:
            name = rank_name(rank)
            sources[own] = ReceivedPart(self._client, self._prefix(rank), disk.opened, disk.folder, name)
            if tier == "memory" and self._memory is not None and self._memory.member.rounds.replicas:
                tier = "replicas"
        return RestoreCandidate(sources, own, elsewhere, other_world=other_world, source=tier)

    def _ways(self, key: Key, rank: int, passed: Sequence[int]) -> list[Sequence[int]]:
        """Return the ways in which a rank may read a checkpoint now: each has the domain to read each part from.

        The nearest source of the rank's own part comes first; sources that were ``passed`` are left out. All ranks
        compute the same ways for each rank. A single way may be one whose part has to be sent.
        """
        options, number = self._options(key, rank), passed[rank] if passed else 0
        return options[number] if number < len(options) else []

    def _options(self, key: Key, rank: int) -> list[list[Sequence[int]]]:
        """Return lists of ways, to be tried in this order: first all that need no sending, then each of the others."""
        memory, found = self._memory, self._complete(key)
        disk = [home + self._shift for home in self._disk.member.homes]
        ways: list[Sequence[int]] = []
        if found is not None:
            ways += found.ways_through(self._domains_with(key))
            if key in self._in_bucket:
                ways.append([self._bucket] * found.world)
        else:  # parts of this run are in their ranks' domains
            ways += [memory.member.homes] if memory is not None and key in memory.member.keep else []
            if key in self._disk.member.keep or (memory is None and key not in self._in_bucket):
                ways.append(disk)
            ways += [[self._bucket] * len(disk)] if key in self._in_bucket else []
            if memory is not None and key == memory.member.rounds.floor:
                ways += [
                    [memory.member.homes[one] for one in each]
                    for each in zip(*memory.member.rounds.holders, strict=True)
                ]
        distinct = [way for at, way in enumerate(ways) if way not in ways[:at]]
        seen = [way for way in distinct if self._sees(rank, way[rank % len(way)])]
        others: dict[int, list[Sequence[int]]] = {}
        for way in distinct:
            if not self._sees(rank, domain := way[rank % len(way)]):
                others.setdefault(domain, [self._nearest(rank, way, distinct)])
        near: list[Sequence[int]] = [*dict.fromkeys(self._nearest(rank, way, distinct) for way in seen)]
        return [near, *others.values()] if near else [*others.values()]

    def _domains_with(self, key: Key) -> set[int]:
        """Return the domains that may still have a checkpoint from before this run: each tier drops its own."""
        disk, memory, domains = self._disk.member, self._memory, set[int]()
        if memory is not None and (memory.member.run is None or key in memory.member.keep):
            domains |= {*range(self._shift)}
        in_bucket = key in self._in_bucket
        if not in_bucket or disk.run is None or key in disk.keep or key in disk.unproven:
            domains |= {*range(self._shift, self._bucket)}
        return domains | ({self._bucket} if in_bucket else set())

    def _nearest(self, rank: int, way: Sequence[int], ways: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return a way in which other ranks' parts that the rank does not see are replaced by copies that it sees."""
        places, own = zip(way, *ways, strict=True), rank % len(way)
        return tuple(
            each[0] if part == own else next((domain for domain in each if self._sees(rank, domain)), each[0])
            for part, each in enumerate(places)
        )

    def _sees(self, rank: int, domain: int) -> bool:
        disk, memory = self._disk.member.homes[rank] + self._shift, self._memory
        return domain in (disk, self._bucket) or (memory is not None and domain == memory.member.homes[rank])

    def _seen(self, rank: int, domain: int) -> OpenMedium | None:
        """Return the medium with the folders of a domain; None if the rank does not see the domain."""
        if not self._sees(rank, domain):
            return None
        if domain == self._bucket:
            return None if self._drain is None else self._drain.opened
        driver = self._disk if domain >= self._shift else self._memory
        return None if driver is None else driver.opened

    def has_out_of_sight(self, key: Key | None, passed: Sequence[int]) -> bool:
        """Return whether parts of a checkpoint that this rank does not see are to be read from other hosts' memory."""
        rank = self._disk.member.rank
        ways = [] if key is None or self._memory is None else self._ways(key, rank, passed)
        others = [
            domain for way in ways for part, domain in enumerate(way) if part != rank % len(way)
        ]  # its own is sent
        return any(domain < self._shift and not self._sees(rank, domain) for domain in others)

    def step(self, key: Key) -> int | None:
        """Return the step of a complete checkpoint; None if it is not known here."""
        found = self._complete(key)
        for driver in (self._disk, self._memory):
            if driver is not None and (part := driver.member.parts.get(key)) is not None:
                return part.entry.step
        entry = self._in_bucket.get(key) if found is None else found.entry
        return None if entry is None else entry.step

    def sendings(self, key: Key, passed: Sequence[int]) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield coroutines that send parts which ranks on other hosts restore, and which this rank has to send.

        Called for each candidate as soon as this rank learns it.
        """
        copies = () if self._drain is None else self._drain.state.valid
        self._in_bucket = {copy.key: copy.entry for copy in copies if copy.key is not None}
        found = self._complete(key)
        world = self._disk.member.world if found is None else found.world
        for rank in range(self._disk.member.world):
            if not (ways := self._ways(key, rank, passed)):
                continue
            way, source = ways[0], rank % world
            opened = self._seen(self._disk.member.rank, domain := way[source])
            lowest = next((one for one in range(self._disk.member.world) if self._sees(one, domain)), -1)
            if opened is not None and not self._sees(rank, domain) and lowest == self._disk.member.rank:
                part = FolderPart(opened, rank_name(source), key)
                yield send_part(self._client, self._prefix(rank), part)

    def _complete(self, key: Key) -> Complete | None:
        view = (self._disk if self._memory is None else self._memory).member.view
        return next((one for one in (*view.remote, *view.complete) if one.key == key), None) if view else None

    def _prefix(self, rank: int) -> str:
        """Return the prefix of the keys under which a rank receives the part that it restores."""
        return f"part/{self._restore.index}/{self._restore.attempt}/{rank}"


def _error(reason: str, why: str) -> Exception:
    kind = {
        "incomplete": IncompleteCheckpointError,
        "no step": NoCheckpointError,
        "mismatch": StateMismatchError,
        "damaged": DamagedError,
        "rejected": StoreError,
    }.get(reason, GroupError)
    if reason == "incomplete":
        why += (
            "; put the folders of these ranks back, from a backup or their hosts, in the place of empty ones that this "
            "start has made, or of another group's, or begin anew in another folder"
        )
    error: Exception = kind(why)
    return error
