"""Restoring from the engine's own store: the choice of the checkpoint, and the way on if it is damaged."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from pccheck_async.engine.assembly import Assembly
from pccheck_async.engine.caller import Caller
from pccheck_async.errors import DamagedError, StateMismatchError
from pccheck_async.format import Entry, Restored, Which
from pccheck_async.format.manifest import Manifest
from pccheck_async.state import JointTargets, Restoration, Targets, clear_gradients, match
from pccheck_async.store import (
    CheckpointReader,
    Fallback,
    OwnSlot,
    PartReader,
    Staging,
    UnreadableError,
    choose,
    unreadable_errors,
)
from pccheck_async.telemetry import ReadProgress, events, reading_progress, write

__all__ = ["HOLDS_PARTS", "Private", "Reading", "refuse_parts", "restore"]

HOLDS_PARTS = "reading a damaged checkpoint filled arrays: the state may hold parts of it"
"""A note on errors."""
Private: TypeAlias = Literal["modulo"] | Sequence[str]
"""Tensors that a rank of another world may restore of rank r modulo the old number: all, or globs over their paths."""
_NAMED = 5
"""Paths that the warning of a partial restore names."""


async def restore(
    caller: Caller,
    assembly: Assembly,
    state: Mapping[str, Any],
    which: Which,
    progress: ReadProgress | None,
    *,
    strict: bool,
    dtype: torch.dtype | None,
    allow_pickle: bool,
) -> Restored | None:
    """Restore the newest checkpoint (or the requested one), falling back if one is damaged; None: there is none.

    The arguments after ``progress`` are for :func:`pccheck_async.state.match`.
    """
    start = time.perf_counter()
    begun: list[str] = []  # paths of live arrays that a damaged checkpoint may have filled
    fallback, committed = Fallback(which), assembly.store.committed

    def find() -> tuple[Entry, bool] | None:
        """Return the checkpoint to read, and whether it was superseded; damaged ones come last, for their error."""
        entries, record = committed.entries, committed.record
        if (entry := choose(entries, which, fallback.unreadable, record.superseded)) is not None:
            return entry, entry not in entries
        damaged = choose(record.entries, which, fallback.unreadable)
        return None if damaged is None else (damaged, False)

    while (found := find()) is not None:
        entry, superseded = found
        if superseded and fallback.failure is None:
            fallback.failure = committed.record.entries[0], DamagedError("found damaged by an earlier restore")
        with fallback.trying(entry, superseded, find):
            try:
                restored = await _restore_one(
                    caller, assembly, state, entry, superseded, progress, begun,
                    strict=strict, dtype=dtype, allow_pickle=allow_pickle,
                )  # fmt: skip
            except UnreadableError as unreadable:
                if isinstance(unreadable.error, DamagedError) and not superseded:  # else it may be read the next time
                    assembly.loop.post(assembly.store.note_damaged, entry)
                raise
            except StateMismatchError as error:
                if begun:
                    error.add_note(HOLDS_PARTS)
                raise
            break
    else:
        return None
    told = {"step": entry.step, "counter": entry.counter, "nbytes": entry.nbytes}
    assembly.reporter.tell(events.Restored, **told, seconds=time.perf_counter() - start)
    return restored


class Reading:
    """One checkpoint on its way into a state: the steps of a restore, in their order.

    :meth:`match`, :meth:`begin` and :meth:`finish` run on the caller's thread, :meth:`release` on any, the others on
    the engine's loop.

    Attributes:
        checkpoint: Reads it.
        restoration: The match with the state: missing paths, arrays to fill; from :meth:`match` on.
    """

    restoration: Restoration
    _targets: Targets | JointTargets

    def __init__(self, assembly: Assembly, checkpoint: CheckpointReader, progress: ReadProgress | None = None) -> None:
        self._assembly = assembly
        self.checkpoint = checkpoint
        self._progress = progress

    async def hold(self) -> None:
        """Keep its slot from being reused, and read its manifest. Raises UnreadableError."""
        with unreadable_errors():
            await self.checkpoint.hold()

    async def verify(self) -> None:
        """Read every chunk, and fill nothing. Raises UnreadableError."""
        with unreadable_errors():
            await self.checkpoint.own.verify()

    def match(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool,
        dtype: torch.dtype | None,
        allow_pickle: bool,
        generators: bool = True,
        merged: tuple[Manifest, Collection[str]] | None = None,
    ) -> None:
        """Compare it with the live state, changing nothing. Raises StateMismatchError.

        ``merged`` is the result of :func:`merge_parts`; the rest is for :func:`pccheck_async.state.match`.
        """
        manifest, added = (self.checkpoint.manifest, ()) if merged is None else merged
        self.restoration = match(
            state,
            manifest,
            self._assembly.backend.by_address,
            strict=strict,
            dtype=dtype,
            allow_pickle=allow_pickle,
            generators=generators,
            added=added,
        )

    def begin(self) -> None:
        """Mark the work queued on devices by now: the targets are filled after that, with the boxes in the own part."""
        targets, boxes = self.restoration.targets, self.checkpoint.begin_boxes()
        self._targets = targets if boxes is None else JointTargets(targets, boxes)
        self._marks = self._assembly.backend.mark_queued_work(self._targets.devices)

    async def fill(self) -> None:
        """Fill the targets; :meth:`finish` copies those not read in place to their live arrays.

        Raises UnreadableError; some targets are filled then.
        """
        own = self.checkpoint.own
        advance = reading_progress(self._progress, sum(chunk.nbytes for chunk in own.manifest.chunks))
        with unreadable_errors():
            with self._assembly.clock.timed("restore", own.manifest.payload_nbytes):
                await own.fill(self._targets, self._marks, advance)
            await self.checkpoint.fill_boxes()

    def release(self) -> None:
        """Release its slots. Idempotent."""
        self._assembly.loop.post(self.checkpoint.release)

    def finish(self) -> Restored:
        """Give every object its state, and return a summary."""
        restoration, entry = self.restoration, self.checkpoint.entry
        self.checkpoint.finish()
        restoration.finish()
        if cleared := clear_gradients(restoration.trained):
            text = (
                "restore cleared the gradients of %d tensors: they were computed before it, and would have been added "
                "to those of the next step"
            )
            fields = {"step": entry.step, "counter": entry.counter}
            write(logging.WARNING, "cleared_gradients", text, cleared, **fields)
        if restoration.missing or restoration.unexpected:
            _warn_of_parts(entry, restoration)
        if entry.info.inside_window:
            text = (
                "step %d was saved inside a window of gradient accumulation, or the engine could not know better: "
                "gradients that had been computed for the next step of an optimizer are lost"
            )
            write(logging.WARNING, "lost_gradients", text, entry.step, step=entry.step, counter=entry.counter)
        filled = sum(number for number, _ in restoration.counts.values())
        return Restored.of(entry.info, restoration.missing, restoration.unexpected, filled)


async def _restore_one(
    caller: Caller,
    assembly: Assembly,
    state: Mapping[str, Any],
    entry: Entry,
    superseded: bool,
    progress: ReadProgress | None,
    begun: list[str],
    *,
    strict: bool,
    dtype: torch.dtype | None,
    allow_pickle: bool,
) -> Restored:
    """Restore one checkpoint; to ``begun`` go the paths of live arrays that it may fill before it fails."""
    slot = OwnSlot(assembly.store, entry, superseded=superseded)
    checkpoint = CheckpointReader({0: PartReader(slot, assembly.backend, Staging(assembly.pool))})
    one = Reading(assembly, checkpoint, progress)

    async def hold() -> None:
        await one.hold()
        if superseded:
            await one.verify()
            await assembly.store.adopt(entry)

    try:
        await caller.run(hold())
        one.match(state, strict=strict, dtype=dtype, allow_pickle=allow_pickle)
        refuse_parts(entry.step, one.restoration, begun)
        begun += one.restoration.filled
        one.begin()
        await caller.run(one.fill())
    finally:
        one.release()
    return one.finish()


def _warn_of_parts(entry: Entry, restoration: Restoration) -> None:
    counts = [f"{number} of {all_} leaves of {name}" for name, (number, all_) in restoration.counts.items()]
    texts = _first_few(restoration.missing), _first_few(restoration.unexpected), _first_few(counts)
    text = "restored step %d in part: the checkpoint lacks %s; the state lacks %s; restored were %s"
    write(logging.WARNING, "restored_in_part", text, entry.step, *texts, step=entry.step, counter=entry.counter)


def _first_few(names: Sequence[str]) -> str:
    """Return the first few paths for a line of a log, and how many there are."""
    few = ", ".join(names[:_NAMED]) or "nothing"
    return few if len(names) <= _NAMED else f"{few}, ... ({len(names)} paths)"


def refuse_parts(step: int, restoration: Restoration, begun: Sequence[str]) -> None:
    """Raise StateMismatchError if arrays that stay as they are may have been filled from a damaged checkpoint."""
    kept = tuple(f"{path}." for path in restoration.missing)
    if paths := sorted({path for path in begun if f"{path}.".startswith(kept)}):
        raise StateMismatchError(
            f"the checkpoint of step {step} lacks what a damaged one had begun to fill: {', '.join(paths[:20])}"
            f"{', ...' if len(paths) > 20 else ''}; make the state anew, then restore(state, step={step}, "
            "strict=False)",
            missing=paths,
        )
