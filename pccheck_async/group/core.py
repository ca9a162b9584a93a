"""The engine of one rank of a group: opening, restoring and ending are agreed on with the others."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pccheck_async.engine import (
    HOLDS_PARTS,
    Assembly,
    Caller,
    EngineConfig,
    EngineCore,
    PendingCheckpoint,
    Private,
    Reading,
    refuse_parts,
)  # fmt: skip
from pccheck_async.errors import (
    CheckpointError,
    DamagedError,
    GroupError,
    IncompleteCheckpointError,
    NoCheckpointError,
    StateMismatchError,
    StoreError,
    is_exhausted,
)
from pccheck_async.format import Key, Metadata, Restored, Which, new_step
from pccheck_async.group.actions import ChangeState, EndRestore, FillArrays, MatchManifest
from pccheck_async.group.control import Address, Client, Server
from pccheck_async.group.folder import seen_store
from pccheck_async.group.group import Group
from pccheck_async.group.messages import Failed
from pccheck_async.group.run import GroupRun, group_retention, serve
from pccheck_async.group.store import GroupStore
from pccheck_async.group.view import ranks_in_words
from pccheck_async.medium.open_medium import IO
from pccheck_async.state import Owners, broadcast_buffers, merge_parts, paths
from pccheck_async.store import (
    CheckpointReader,
    PartReader,
    Staging,
    Store,
    UnreadableError,
    first_few,
    rank_name,
    unreadable_errors,
)
from pccheck_async.telemetry import ReadProgress, events

__all__ = ["GroupCore"]


class _OtherWorld(NamedTuple):
    """How to restore values that each rank of another world had for itself."""

    group: Group
    private: Private

    async def check(
        self, caller: Caller, checkpoint: CheckpointReader, state: Mapping[str, Any], unexpected: Sequence[str]
    ) -> None:
        """Raise StateMismatchError if the parts have different tensors under one name, and UnreadableError.

        It is undefined then which of them a rank of this world restores. Buffers that DistributedDataParallel makes
        alike at the next forward may differ, and paths that the state lacks (``unexpected``) are not restored.
        """
        if self.private == "modulo":
            return
        allowed, below = broadcast_buffers(state), tuple(f"{path}." for path in unexpected)
        matchers = [paths.matcher(glob, unescaped=escaped) for glob in self.private for escaped in (False, True)]

        def among(path: str) -> bool:
            return not (path in allowed or f"{path}.".startswith(below) or any(match(path) for match in matchers))

        ranks = self.group.rank, self.group.world_size
        with unreadable_errors():
            found = await caller.run(checkpoint.differing(among, ranks))
        if found:
            elsewhere = checkpoint.elsewhere
            named = ranks_in_words(tuple(elsewhere), len(elsewhere))
            unseen = f" (those of {named} are not seen here)" if elsewhere else ""
            raise StateMismatchError(
                f"this checkpoint is of another number of ranks, which had different tensors{unseen} under one name: "
                f'{first_few(found)}; restore(state, private="modulo") gives rank r those of rank r modulo the old '
                "number, private=[...] does for the paths that match its globs",
                mismatched=found,
            )


class GroupCore(EngineCore):
    """One rank's engine. The arguments are those of :class:`EngineCore`; ``path`` is the group's folder.

    Attributes:
        address: Of the control plane, from the opening on.
    """

    address: Address

    store_kind: type[Store] = GroupStore

    def __init__(self, path: str | os.PathLike[str], io: IO, config: EngineConfig, group: Group) -> None:
        super().__init__(path, io, config)
        if config.on_busy == "skip":
            raise ValueError("on_busy='skip' is not for groups: what one rank skips, another one saves")
        self.keeps = group_retention(config)
        self.group = group
        self._server: Server | None = None
        self._met = False  # this rank said hello

    @property
    def store_path(self) -> str:
        """The folder of this rank's store."""
        return os.fspath(Path(self.path) / rank_name(self.group.rank))

    @property
    def run(self) -> GroupRun:
        """This opening of the group."""
        store = self.assembly.store
        assert isinstance(store, GroupStore)
        assert store.run is not None
        return store.run

    async def open(self, caller: Caller) -> None:
        """Lock (or create) this rank's store, meet the others, and agree on the checkpoints.

        Collective if the group is a process group: an address is broadcast on the calling thread.
        """
        if self.group.rank == 0 and self.state == "new":
            self._server = serve(self.group.world_size, self.config, self.group.timeout)
        self.address = self.group.share(self._server.address if self._server is not None else None)
        try:
            await super().open(caller)
        except BaseException as error:
            if not self._met:
                self._tell_unopened(error)
            raise

    def _tell_unopened(self, error: BaseException) -> None:
        """Report the failure at once: the others wait for this rank, which could not open its store."""
        with suppress(CheckpointError):
            client = Client(self.address, self.group.rank, lambda _: None, lambda _: None)
            client.post(Failed(self.group.rank, -1, f"cannot open its store: {error}", latched=True))
            client.close()

    async def _join(self, caller: Caller) -> None:
        assembly = self.assembly

        async def join() -> None:
            store = assembly.store
            assert isinstance(store, GroupStore)
            own = seen_store(self.group.rank, store.file.identity, store.committed.record)
            run = store.run = GroupRun(
                Path(self.path), self.group.rank, self.group.world_size, self.config, store, store.write_parts, own,
                assembly.scheduler.end_with, assembly.opened.operations,
            )  # fmt: skip
            run.server = self._server
            self._met = True
            await run.join(self.address)
            self.in_flight.counter = run.member.counter
            group = self.group
            self.captures.owners = Owners(
                group.rank, run.member.homes, group.world_ranks(), self.config.replicated, self.config.trusted_replicas,
                lambda: run.member.differing,
            )  # fmt: skip

        await caller.run(join())

    def _note_end(self, pending: PendingCheckpoint, error: Exception | None, superseded: bool, nbytes: int) -> None:
        super()._note_end(pending, error, superseded, nbytes)
        self.run.note_end(pending.counter, error)

    def end_schedule(self) -> None:
        """Called when this rank makes no more steps: no step is agreed on that it would not reach."""
        store = self._assembly.store if self._assembly is not None else None
        if isinstance(store, GroupStore) and store.run is not None:
            store.run.end_schedule()

    def start_checkpoint(
        self,
        state: Mapping[str, Any],
        step: int | None,
        metadata: Metadata | None,
        *,
        name: str | None = None,
        replace: bool = False,
        overlap: bool = False,
        last: bool = False,
    ) -> tuple[PendingCheckpoint, float]:
        """Start a checkpoint, see :meth:`EngineCore.start_checkpoint`; a call that raises fails it on all ranks."""
        counter = self.in_flight.counter
        try:
            return super().start_checkpoint(
                state, step, metadata, name=name, replace=replace, overlap=overlap, last=last
            )
        except BaseException as error:
            try:
                why = repr(error)  # before the lock: it may be a user's code
            except Exception:  # noqa: BLE001 - the other ranks wait for this counter all the same
                why = type(error).__qualname__
            with self.in_flight.lock:
                if self.state == "open" and self.in_flight.counter == counter:
                    self._use_up_counter(step, why)
            raise

    def fail_checkpoint(self, step: int | None, why: str) -> None:
        """Take part in a checkpoint that cannot be made here: it fails on all ranks, and they go on counting alike."""
        with self.in_flight.lock:
            if self.state == "open":
                self._use_up_counter(step, why)

    def _use_up_counter(self, step: int | None, why: str) -> None:
        self.in_flight.counter += 1
        number = counted = self.in_flight.counter
        with suppress(TypeError, ValueError):  # it may be the step that is wrong
            counted = number if step is None else new_step(step)
        self.loop.post(self.run.request_failed, number, counted, why)

    def wait_prepared(self, pending: PendingCheckpoint) -> None:
        """Block until this rank's durable record names its part of a checkpoint, which the group then decides about.

        Raises its error if it fails before that.
        """
        if not self.loop.call(self.run.prepared(pending.counter)):
            pending.result()

    @property
    def stopped(self) -> str | None:
        """Why no checkpoint of this opening can succeed any more; None while they can."""
        return None if (broken := self.run.member.stopped) is None else broken.why

    # -- restoring

    async def _restore(
        self,
        caller: Caller,
        assembly: Assembly,
        state: Mapping[str, Any],
        which: Which,
        progress: ReadProgress | None,
        *,
        strict: bool,
        dtype: torch.dtype | None,
        private: Private,
    ) -> Restored | None:
        """Restore the same checkpoint on every rank, or none and raise the same error on every rank.

        The live arrays are filled while their chunks are verified, as by :func:`pccheck_async.engine.restore.restore`;
        objects and plain values change only once all ranks found all of theirs whole (G5). After damage an older
        checkpoint has to fill every array that was begun.
        """
        start, run, pickles = time.perf_counter(), self.run, self.config.allow_pickle
        reading: Reading | None = None
        mismatch: Exception | None = None
        begun: list[str] = []  # paths of live arrays that a damaged checkpoint may have filled
        differing: Collection[int] = ()
        agreed = False
        await caller.run(run.ask_restore(which))
        try:
            while True:
                action = await caller.run(run.restoring.get())
                match action:
                    case MatchManifest(key):
                        if reading is not None:
                            reading.release()
                        reading = self._reading(assembly, key, progress)
                        other_world = None if run.has_world_of(key) else _OtherWorld(self.group, private)
                        outcome, why, mismatch = await _match(
                            caller, reading, state, begun, other_world,
                            strict=strict, dtype=dtype, allow_pickle=pickles,
                        )  # fmt: skip
                        await caller.run(run.tell_matched(outcome, why))
                    case FillArrays():
                        assert reading is not None
                        begun += [*reading.restoration.filled, *(one.path for one in reading.restoration.resharded)]
                        damage, differing = await self._fill(caller, reading, state)
                        await caller.run(run.tell_verified(damage))
                    case ChangeState(key):
                        agreed = True
                        assert reading is not None
                        restored = reading.finish()
                        await caller.run(run.note_differing(differing))
                        seconds = time.perf_counter() - start
                        told = {"step": restored.step, "counter": key.counter, "nbytes": restored.nbytes}
                        self.reporter.tell(events.Restored, **told, seconds=seconds)
                        return restored
                    case EndRestore(reason, why):
                        agreed = True
                        if reason == "none":
                            return None
                        error = mismatch or _error(reason, why)
                        if begun:
                            error.add_note(HOLDS_PARTS)
                        raise error
        except BaseException as error:
            if not agreed:  # the others wait for an answer
                await caller.run(run.tell_ended(f"the restore ended: {error!r}"))
            raise
        finally:
            if reading is not None:
                reading.release()

    async def _fill(
        self, caller: Caller, reading: Reading, state: Mapping[str, Any]
    ) -> tuple[str | None, Collection[int]]:
        """Fill the live arrays; return the damage or None, and hashes of ranks that saved different replicas.

        These are not believed to have them alike again: else the first checkpoint of every run would be aborted. Ranks
        that see other parts, or share replicas with other ranks, find others: the first checkpoint unites all of them.
        """
        assert self.captures.owners is not None
        checkpoint = reading.checkpoint
        apart = self.captures.owners.saved_apart(state, checkpoint.manifest)
        try:
            reading.begin()
            await caller.run(reading.fill())
            with unreadable_errors():
                found = await caller.run(checkpoint.differing(apart.__contains__)) if apart else ()
        except UnreadableError as error:
            if is_exhausted(error.error):  # the checkpoint is whole, and must not be dropped for it
                raise error.error from None
            return str(error), ()
        return None, {apart[path] for path in found}

    def _reading(self, assembly: Assembly, key: Key, progress: ReadProgress | None) -> Reading | None:
        """Return the reader of a checkpoint, of which this rank restores one part; None if that is gone."""
        source = self.run.source(key)
        if source is None:
            return None
        own, (sources, elsewhere) = self.run.own_part(key), self.run.sources(key)
        staging = Staging(assembly.pool)
        parts = {rank: PartReader(each, assembly.backend, staging) for rank, each in {**sources, own: source}.items()}
        return Reading(assembly, CheckpointReader(parts, own, elsewhere), progress)


async def _match(
    caller: Caller,
    reading: Reading | None,
    state: Mapping[str, Any],
    begun: Sequence[str],
    other_world: _OtherWorld | None,
    *,
    strict: bool,
    dtype: torch.dtype | None,
    allow_pickle: bool,
) -> tuple[Literal["ok", "mismatch", "damaged"], str, Exception | None]:
    """Return how this rank's part compares with its state, why, and the error for it."""
    if reading is None:
        return "damaged", "its part is not in its store", None
    checkpoint = reading.checkpoint
    match_state = partial(
        reading.match, state, strict=strict, dtype=dtype, allow_pickle=allow_pickle, generators=other_world is None
    )
    try:
        await caller.run(reading.hold())
        try:
            match_state()
            lacks = reading.restoration.missing
        except StateMismatchError as error:
            if not (lacks := error.missing):
                raise
        if lacks:  # another stage of a pipeline may have it
            with unreadable_errors():
                manifests = await caller.run(checkpoint.manifests())
            match_state(merged=merge_parts(checkpoint.own_rank, manifests))
        if other_world is not None:
            await other_world.check(caller, checkpoint, state, reading.restoration.unexpected)
        refuse_parts(checkpoint.entry.step, reading.restoration, begun)
        if reading.restoration.resharded:
            with unreadable_errors():
                await caller.run(checkpoint.match(reading.restoration.resharded))
    except UnreadableError as error:
        if is_exhausted(error.error):  # the checkpoint is whole, and must not be dropped for it
            return "mismatch", str(error), error.error
        return "damaged", str(error), None
    except (CheckpointError, TypeError, ValueError) as error:
        return "mismatch", str(error), error
    return "ok", "", None


def _error(reason: str, why: str) -> Exception:
    kind = {
        "incomplete": IncompleteCheckpointError,
        "no step": NoCheckpointError,
        "mismatch": StateMismatchError,
        "damaged": DamagedError,
        "rejected": StoreError,
    }.get(reason, GroupError)
    error: Exception = kind(why)
    return error
