# SPDX-License-Identifier: Apache-2.0
"""Restoring: one loop over the candidates of this process, or of its group, until one fills the state."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from pccheck_async.engine.assembly import EngineParts
from pccheck_async.engine.caller import Caller
from pccheck_async.engine.peers import Private, RestoreCandidate, RestoreCandidates
from pccheck_async.errors import CheckpointError, StateMismatchError, first_few, is_exhausted, readable
from pccheck_async.format import Entry, Restored
from pccheck_async.format.manifest import Manifest
from pccheck_async.state import LiveTree, Owners, Restoration, Targets, broadcast_buffers, live_tree, match, paths
from pccheck_async.state.restore.parts import merge_parts
from pccheck_async.store import (
    CheckpointReader,
    PartReader,
    Staging,
    UnreadableError,
    ranks_in_words,
    unreadable_errors,
)
from pccheck_async.telemetry import ReadProgress, events, reading_progress, write

__all__ = ["restore"]

_HOLDS_PARTS = "arrays were being filled when this failed: the state may hold parts of a checkpoint"
"""The note on an error that may have left the state partly filled."""
_NAMED = 5
"""Most paths that the warning of a partial restore names."""


async def restore(
    caller: Caller,
    assembly: EngineParts,
    owners: Owners | None,
    candidates: RestoreCandidates,
    state: Mapping[str, Any],
    progress: ReadProgress | None,
    *,
    strict: bool,
    dtype: torch.dtype | None,
    allow_pickle: bool,
    private: Private,
    dry_run: bool = False,
) -> Restored | None:
    """Restore the first candidate that is whole; None: there is none. Raises StateMismatchError if it does not match.

    The live arrays are filled while their chunks are verified. Objects and plain values change only once all chunks are
    found whole, on every rank. After damage another checkpoint has to fill every array that was begun.

    ``strict``, ``dtype`` and ``allow_pickle`` are for :func:`pccheck_async.state.match`; ``private`` is for values that
    each rank had for itself, if another number of ranks saved them. A dry run only compares the first candidate that
    can be read, fills nothing, and returns what a restore would do.
    """
    start = time.perf_counter()
    begun: list[str] = []  # paths of live arrays that a damaged checkpoint may have filled
    damaged = False  # whether that may be so
    tree = cache(partial(live_tree, state))  # for all candidates: state_dict() may communicate
    try:
        while (candidate := await candidates.next(caller)) is not None:
            one = Reading(assembly, candidate, progress)
            try:
                error: Exception | None = None
                try:
                    await one.match(
                        caller, tree, begun,
                        strict=strict, dtype=dtype, allow_pickle=allow_pickle, private=private, dry_run=dry_run,
                    )  # fmt: skip
                except (UnreadableError, CheckpointError, TypeError, ValueError) as failure:
                    error = failure
                if dry_run and isinstance(error, StateMismatchError | None):
                    compared = _ComparedError(one.plan(error))
                    compared.parts_unseen = error is not None and error.parts_unseen
                    error = compared
                if not await candidates.matched(caller, error):
                    continue
                begun += one.restoration.filled
                begun += [each.path for each in one.restoration.resharded]
                error = None
                differing: Collection[int] = ()
                damaged = bool(begun)  # until all chunks, on every rank, are known to be whole
                try:
                    differing = await one.fill(caller, state, owners)
                except UnreadableError as failure:
                    error = failure
                if not await candidates.filled(caller, error, differing):
                    continue
                damaged = False
                restored = one.finish()
            finally:
                one.release()
            told = {"step": restored.step, "counter": one.checkpoint.entry.counter, "nbytes": restored.nbytes}
            seconds, fell_back = time.perf_counter() - start, candidates.fell_back
            assembly.stream.emit(events.Restored(**told, seconds=seconds, fell_back=fell_back))
            return restored
    except BaseException as error:
        if damaged:
            error.add_note(_HOLDS_PARTS)
        if isinstance(error, _ComparedError):
            return error.plan
        raise
    return None


class _ComparedError(StateMismatchError):
    """The error that ends a dry run, on all ranks alike; it carries the result."""

    def __init__(self, plan: Restored) -> None:
        super().__init__("this was a dry run")
        self.plan = plan


class Reading:
    """One candidate on its way into a state: the steps of a restore, in their order.

    Attributes:
        checkpoint: The reader of the candidate.
        restoration: The match with the state: missing paths, arrays to fill; set by :meth:`match`.
    """

    restoration: Restoration

    def __init__(self, assembly: EngineParts, candidate: RestoreCandidate, progress: ReadProgress | None) -> None:
        self._assembly = assembly
        self._candidate = candidate
        self._progress = progress
        staging = Staging(assembly.pool)
        parts = {rank: PartReader(each, assembly.backend, staging) for rank, each in candidate.sources.items()}
        self.checkpoint = CheckpointReader(parts, candidate.own, candidate.elsewhere)

    async def match(
        self,
        caller: Caller,
        tree: Callable[[], LiveTree],
        begun: Sequence[str],
        *,
        strict: bool,
        dtype: torch.dtype | None,
        allow_pickle: bool,
        private: Private,
        dry_run: bool,
    ) -> None:
        """Keep the slots from being reused, and compare the candidate with the live state, which is not changed.

        A superseded candidate is first verified as a whole, and, except in a dry run, adopted: it counts as committed
        again. Raises UnreadableError, StateMismatchError.
        """
        candidate, checkpoint = self._candidate, self.checkpoint
        generators = candidate.other_world is None

        def match_state(manifest: Manifest, added: Collection[str] = ()) -> None:
            self.restoration = match(
                tree(),
                manifest,
                self._assembly.backend.by_address,
                strict=strict,
                dtype=dtype,
                allow_pickle=allow_pickle,
                generators=generators,
                added=added,
                dry_run=dry_run,
            )

        await caller.run(self._hold(adopt=not dry_run))
        try:
            match_state(checkpoint.manifest)
            lacks = self.restoration.missing
        except StateMismatchError as error:
            if len(candidate.sources) == 1 or not (lacks := error.missing):
                raise
        if lacks and len(candidate.sources) > 1:  # another stage of a pipeline may have it
            with unreadable_errors():
                manifests = await caller.run(checkpoint.manifests())
            match_state(*merge_parts(candidate.own, manifests))
        if candidate.other_world is not None:
            await self._check_private(caller, tree().state, candidate.other_world, private)
        _refuse_parts(checkpoint.entry.step, self.restoration, begun)
        if self.restoration.resharded:
            with unreadable_errors():
                await caller.run(checkpoint.match(self.restoration.resharded))

    async def _hold(self, *, adopt: bool) -> None:
        with unreadable_errors():
            await self.checkpoint.hold()
            if self._candidate.must_verify:
                await self.checkpoint.own.verify()
                if adopt:
                    await self._assembly.store.adopt(self.checkpoint.entry)

    async def _check_private(
        self, caller: Caller, state: Mapping[str, Any], ranks: tuple[int, int], private: Private
    ) -> None:
        """Raise StateMismatchError if parts have different tensors under one name, unless ``private`` allows that.

        It is undefined then which of them a rank of this world restores. Two kinds of paths are not compared: buffers
        that DistributedDataParallel makes alike at the next forward, and paths that the state lacks. Raises
        UnreadableError if a part cannot be read.
        """
        if private == "modulo":
            return
        unexpected = tuple(f"{path}." for path in self.restoration.unexpected)
        allowed = broadcast_buffers(state)
        matchers = [paths.matcher(glob) for glob in private]

        def among(path: str) -> bool:
            return not (path in allowed or f"{path}.".startswith(unexpected) or any(match(path) for match in matchers))

        with unreadable_errors():
            found = await caller.run(self.checkpoint.differing(among, ranks))
        if found:
            elsewhere = self.checkpoint.elsewhere
            named = ranks_in_words(tuple(elsewhere), len(elsewhere))
            unseen = f" (those of {named} are not seen here)" if elsewhere else ""
            error = StateMismatchError(
                f"this checkpoint is of another number of ranks, which had different tensors{unseen} under one name: "
                f'{first_few(found)}; restore(state, private="modulo") gives rank r those of rank r modulo the old '
                "number, private=[...] does for the paths that match its globs",
                mismatched=found,
            )
            error.parts_unseen = bool(elsewhere)
            raise error

    async def fill(self, caller: Caller, state: Mapping[str, Any], owners: Owners | None) -> Collection[int]:
        """Fill the live arrays, except the targets that :meth:`finish` copies; return hashes of ranks that differ.

        These ranks saved different replicas, and are not assumed to have equal ones in this run: else its first
        checkpoint would be aborted. Each rank finds only those whose parts it sees, and with which it shares replicas.

        Raises UnreadableError; some targets are filled then.
        """
        checkpoint = self.checkpoint
        apart = {} if owners is None else owners.saved_apart(state, checkpoint.manifest)
        targets = Targets([*self.restoration.targets, *checkpoint.begin_boxes()])
        marks = self._assembly.backend.mark_queued_work(targets.devices)  # they are filled after the work queued by now

        async def fill() -> list[str]:
            own = checkpoint.own
            advance = reading_progress(self._progress, own.manifest.payload_nbytes)
            with unreadable_errors():
                with self._assembly.stream.clock.timed("restore", own.manifest.payload_nbytes):
                    await own.fill(targets, marks, advance)
                await checkpoint.fill_boxes()
                return await checkpoint.differing(apart.__contains__) if apart else []

        try:
            return {apart[path] for path in await caller.run(fill())}
        except UnreadableError as error:
            if is_exhausted(error.error):  # the checkpoint is whole, and must not be dropped for it
                raise error.error from None
            raise

    def plan(self, error: StateMismatchError | None) -> Restored:
        """Return what a restore would do, after a dry run. ``error``: raised by :meth:`match`, None: nothing was."""
        restoration, error = self.restoration, error or self.restoration.error
        return Restored.of(
            self.checkpoint.entry.info,
            restoration.missing,
            restoration.unexpected,
            sum(number for number, _ in restoration.counts.values()),
            mismatched=() if error is None else error.mismatched,
            actions=dict(zip(readable(restoration.actions), restoration.actions.values(), strict=True)),
            error=None if error is None else str(error),
            source=self._candidate.source,
        )

    def release(self) -> None:
        """Release the candidate's slots, soon, on the engine's loop. Idempotent."""
        self._assembly.loop.post(self.checkpoint.release)

    def finish(self) -> Restored:
        """Give every object its state, log what was left out or lost, and return a summary."""
        restoration, entry = self.restoration, self.checkpoint.entry
        restoration.finish()
        if cleared := restoration.clear_gradients():
            text = (
                "restore cleared the gradients of %d tensors: they were computed before it, and would have been added "
                "to those of the next step"
            )
            fields = {"step": entry.step, "counter": entry.counter}
            write("cleared_gradients", text, cleared, **fields)
        if restoration.missing or restoration.unexpected:
            _warn_of_parts(entry, restoration)
        if entry.info.inside_window:
            text = (
                "step %d was saved inside a window of gradient accumulation, or the engine could not know better: "
                "gradients that had been computed for the next step of an optimizer are lost"
            )
            write("lost_gradients", text, entry.step, step=entry.step, counter=entry.counter)
        filled = sum(number for number, _ in restoration.counts.values())
        source = self._candidate.source
        return Restored.of(entry.info, restoration.missing, restoration.unexpected, filled, source=source)


def _warn_of_parts(entry: Entry, restoration: Restoration) -> None:
    counts = [f"{number} of {all_} leaves of {name}" for name, (number, all_) in restoration.counts.items()]
    texts = _first_few(restoration.missing), _first_few(restoration.unexpected), _first_few(counts)
    text = "restored step %d in part: the checkpoint lacks %s; the state lacks %s; restored were %s"
    write("restored_in_part", text, entry.step, *texts, step=entry.step, counter=entry.counter)


def _first_few(names: Sequence[str]) -> str:
    """Return the first few paths for a line of a log, and, if there are more, how many there are."""
    few = ", ".join(readable(names[:_NAMED])) or "nothing"
    return few if len(names) <= _NAMED else f"{few}, ... ({len(names)} paths)"


def _refuse_parts(step: int, restoration: Restoration, begun: Sequence[str]) -> None:
    """Raise StateMismatchError if arrays that stay as they are may have been filled from a damaged checkpoint."""
    kept = tuple(f"{path}." for path in restoration.missing)
    if paths := sorted({path for path in begun if f"{path}.".startswith(kept)}):
        raise StateMismatchError(
            f"the checkpoint of step {step} lacks what a damaged one had begun to fill: {first_few(paths)}",
            missing=paths,
            advice=f"make the state anew, then restore(state, step={step}, strict=False)",
        )
