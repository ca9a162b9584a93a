# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that the ranks of a group restore together, and the sources of their parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from pccheck_async.engine import Caller, RestoreCandidate, RestoreCandidates
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
from pccheck_async.format import Key
from pccheck_async.group.actions import Action, ChangeState, EndRestore, FillArrays, MatchManifest
from pccheck_async.group.control import Client
from pccheck_async.group.elsewhere import ReceivedPart, send_part
from pccheck_async.group.member import Member
from pccheck_async.group.messages import MatchOutcome
from pccheck_async.group.view import Complete
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import DroppedMeanwhileError, FolderPart, OwnSlot, Source, Store, UnreadableError, rank_name
from pccheck_async.telemetry import write, write_and_warn

__all__ = ["AgreedCandidates", "PartSources", "RestoreAction"]

RestoreAction: TypeAlias = MatchManifest | FillArrays | ChangeState | EndRestore


class AgreedCandidates(RestoreCandidates):
    """The candidates that rank 0 proposes: all ranks restore the same one, or none and raise the same error.

    Args:
        member: This rank's.
        parts: The sources of its parts.
        do: Carries out actions of the member, on the engine's loop.
        agreed: The actions that the ranks agree on, one for each request and answer.
        ask: Requests the restore.
    """

    def __init__(
        self,
        member: Member,
        parts: PartSources,
        do: Callable[[list[Action]], None],
        agreed: asyncio.Queue[RestoreAction],
        ask: Callable[[], list[Action]],
    ) -> None:
        self._member = member
        self._restore = member.restore
        self._parts = parts
        self._do = do
        self._actions = agreed
        self._ask = ask
        self._asked, self._agreed = False, False
        self._next: RestoreAction | None = None
        self._mismatch: Exception | None = None
        self._step: int | None = None  # of the last candidate

    async def next(self, caller: Caller) -> RestoreCandidate | None:
        if not self._asked:
            if (stopped := self._member.stopped) is not None:
                raise GroupError(stopped.why)
            self._asked = True
            await caller.run(self._agree(self._ask))
        while True:
            match self._next:
                case MatchManifest(key, damage):
                    passed_over, self._step = self._step, self._parts.step(key)
                    if damage:
                        self.fell_back = True
                        self._warn_of(passed_over, damage)
                    if (found := self._parts.candidate(key)) is not None:
                        return found
                    why = "its part is not in its store"
                    await caller.run(self._agree(partial(self._restore.matched, "damaged", why)))
                case EndRestore(reason, why):
                    self._agreed = True
                    if reason == "none":
                        return None
                    raise (self._mismatch if reason == "mismatch" else None) or _error(reason, why)
                case other:
                    raise GroupError(f"the restore cannot go on with {other!r}")

    def _warn_of(self, step: int | None, damage: str) -> None:
        """Warn that all ranks pass over the checkpoint of a step: on rank 0, and where its part was found damaged."""
        rank = self._member.rank
        if rank == 0 or f"rank {rank}: " in damage:
            text = f"the checkpoint of step {step} cannot be read ({damage}); all ranks fall back to step {self._step}"
            write_and_warn("fell_back", text, step=step, error=damage)

    async def matched(self, caller: Caller, error: Exception | None) -> bool:
        outcome: MatchOutcome = "ok" if error is None else "mismatch"
        self._mismatch = error
        if isinstance(error, DroppedMeanwhileError):
            outcome, self._mismatch = "unread", None  # rank 0 proposes the newest one that is there now
        if isinstance(error, UnreadableError):
            if is_exhausted(error.error):  # the checkpoint is whole, and must not be dropped for it
                self._mismatch = error.error
            else:
                outcome = "unread" if isinstance(error.error, ReadError) else "damaged"
                self._mismatch = None
        why = "" if error is None else str(error)
        await caller.run(self._agree(partial(self._restore.matched, outcome, why)))
        return isinstance(self._next, FillArrays)

    async def filled(self, caller: Caller, error: UnreadableError | None, differing: Collection[int]) -> bool:
        damage, unread = (None, False) if error is None else (str(error), isinstance(error.error, ReadError))
        await caller.run(self._agree(partial(self._restore.verified, damage, differing, unread=unread)))
        self._agreed = isinstance(self._next, ChangeState)
        return self._agreed

    async def abandon(self, caller: Caller, error: BaseException) -> None:
        if not self._agreed and self._member.stopped is None:  # the others wait for this rank's request, or an answer
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

    Args:
        member: This rank's.
        store: This rank's.
        opened: The medium of the group's folder, which is prepared.
        folder: That folder.
        client: This rank's.
    """

    def __init__(self, member: Member, store: Store, opened: OpenMedium, folder: Path, client: Client) -> None:
        self._member = member
        self._store = store
        self._opened = opened
        self._folder = folder
        self._client = client

    def candidate(self, key: Key) -> RestoreCandidate | None:
        """Return a checkpoint, of which this rank restores one part; None if that is gone."""
        member, found, sources, elsewhere = self._member, self._complete(key), dict[int, Source](), []
        # Parts of this run are in their ranks' domains.
        rank, places = member.rank, member.homes if found is None else found.places
        old = len(places)
        own, other_world = rank % old, None if old == member.world else (rank, member.world)
        if other_world and rank == 0:
            text = (
                "this checkpoint is of %d ranks, here are %d: rank r restores, of the ranks' private values, "
                "those of rank r modulo %d; RNGState stays as it is"
            )
            write("other_world", text, old, member.world, old, store=os.fspath(self._folder))
        for each, domain in enumerate(places):
            if domain == member.homes[rank]:
                sources[each] = FolderPart(self._opened, rank_name(each), key)
            else:
                elsewhere.append(each)
        if (part := member.parts.get(key)) is not None:
            sources[own] = OwnSlot(self._store, part.entry)
        elif found is None:
            return None
        elif own not in sources:
            prefix, name = self._prefix(rank), rank_name(rank)
            sources[own] = ReceivedPart(self._client, prefix, self._opened, self._folder, name)
        return RestoreCandidate(sources, own, elsewhere, other_world=other_world)

    def step(self, key: Key) -> int | None:
        """Return the step of a complete checkpoint; None if it is gone."""
        part, found = self._member.parts.get(key), self._complete(key)
        return part.entry.step if part is not None else None if found is None else found.entry.step

    def sendings(self, key: Key) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield coroutines that send the parts that other hosts restore and only this one has."""
        if (found := self._complete(key)) is None:
            return
        homes = self._member.homes
        for rank, home in enumerate(homes):
            source = rank % found.world
            if (domain := found.places[source]) != home and homes.index(domain) == self._member.rank:
                part = FolderPart(self._opened, rank_name(source), key)
                yield send_part(self._client, self._prefix(rank), part)

    def _complete(self, key: Key) -> Complete | None:
        complete = self._member.view.complete if self._member.view is not None else ()
        return next((one for one in complete if one.key == key), None)

    def _prefix(self, rank: int) -> str:
        """Return the prefix of the keys under which a rank receives the part that it restores."""
        return f"part/{self._member.restore.index}/{self._member.restore.attempt}/{rank}"


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
