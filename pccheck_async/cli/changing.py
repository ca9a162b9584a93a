# SPDX-License-Identifier: Apache-2.0
"""The commands that change a store that no trainer has open, and ``pccheck copy``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

import pccheck_async as pccheck
from pccheck_async.cli.checkpoints import marks_of, naming_others, noun_for, steps_of
from pccheck_async.cli.output import (
    FAILED,
    AnyFolder,
    AnyPlace,
    Json,
    Name,
    OneStep,
    Report,
    Step,
    StoreFolder,
    as_json,
    at_least,
    complain,
    place_argument,
    progress_bar,
    reporting,
    size,
)
from pccheck_async.cli.ranks import read_place
from pccheck_async.errors import StoreError

if TYPE_CHECKING:
    pass


@reporting
def copy(
    source: Annotated[Path, place_argument("SOURCE", "Store that has the checkpoint, a group's folder, or a bucket.")],
    target: Annotated[
        Path, place_argument("TARGET", "Store that gets it; made where there is none. Or an empty prefix of a bucket.")
    ],
    step: Step = None,
    name: Name = None,
    rank: Annotated[
        int | None,
        typer.Option(
            parser=at_least(0), metavar="RANK", help="Of a group: the part of this rank alone (default: all)."
        ),
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Pin the copy (default: as in SOURCE).")] = False,
    no_pin: Annotated[bool, typer.Option("--no-pin", help="Do not pin the copy.")] = False,
    compress: Annotated[bool, typer.Option("--compress", help="Compress the objects, in a bucket.")] = False,
    json: Json = False,
) -> Report:
    """Copy a checkpoint into another store.

    The copy is verified on the way, and becomes the newest checkpoint in TARGET; the others there stay. From a group,
    the parts of all ranks are copied, into the folder of a group. A trainer may write to SOURCE meanwhile, but not to
    TARGET.

    Exit status: 0 the copy is durable, 1 it failed and nothing was committed, 2 wrong usage, 3 there is no such
    checkpoint, 4 something is lost or damaged.
    """
    if pin and no_pin:
        raise typer.BadParameter("--pin excludes --no-pin")
    pinned = pin if pin or no_pin else None
    start = time.perf_counter()
    with progress_bar("copying") as progress, naming_others(source, step, name):
        info = pccheck.stores.copy(
            source,
            target,
            step=step,
            name=name,
            rank=rank,
            pinned=pinned,
            progress=progress,
            compression="zstd" if compress else None,
        )
    seconds = time.perf_counter() - start
    there = read_place(target)
    world = there.complete[0].world
    whose = f", the parts of {world} ranks" if world > 1 else ""
    lines = [
        f"Step {info.step} ({size(info.nbytes)}{whose}) copied and verified in {seconds:.2f} s; it is the newest "
        f"checkpoint in {target}, counter {info.counter}{', pinned' if info.pinned else ''}."
    ]
    if later := [other for other in there.infos[1:] if other.step > info.step]:
        lines.append(f"Older there now: {noun_for(later)} {steps_of(later)}. A trainer tries step {info.step} first.")
    return Report(as_json(info), lines)


@reporting
def remove(
    path: AnyPlace,
    old: Annotated[list[int] | None, typer.Argument(hidden=True)] = None,
    steps: Annotated[
        list[int] | None, typer.Option("--step", metavar="STEP", help="A step to remove; may be repeated.")
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--name", metavar="NAME", help="A name to remove; may be repeated.")
    ] = None,
    counters: Annotated[
        list[int] | None,
        typer.Option("--counter", metavar="N", help="A counter to remove, as `pccheck ls` shows it; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where no checkpoint is left then.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="For a bucket: the run that copied to it has ended.")
    ] = False,
    json: Json = False,
) -> Report | int:
    """Remove checkpoints, and free their space.

    Removes all checkpoints of the given steps, names and counters, pinned or not, in one commit: all or none. No
    trainer may have PATH open. In a group's folder they are removed on all ranks, also incomplete ones. A crash in
    between leaves incomplete checkpoints; run the same command again to remove them. PATH may be the URL of a bucket,
    with --take-over: a run that still copies to it copies nothing more then.

    Exit status: 0 removed, 1 failed or answered no (nothing was removed), 2 wrong usage, 3 no checkpoint has one of the
    steps, names or counters, 4 the store is damaged.
    """
    from pccheck_async.upkeep import removable, to_remove  # and torch

    if old:
        _note_old(*old)
    steps, names, counters = [*(steps or []), *(old or [])], names or [], counters or []
    if not steps and not names and not counters:
        raise typer.BadParameter(f"{_WHICH}, or --counter")
    place = read_place(path)
    if not (infos := list(removable(place))):
        raise place.nothing(None)
    doomed = to_remove(path, infos, steps, names, counters)
    what, nbytes = _told_apart(doomed, infos), size(sum(info.nbytes for info in doomed))
    if json and not yes:
        raise StoreError(_NOBODY)  # a question is no JSON
    try:
        if not yes and not typer.confirm(f"Remove {noun_for(doomed)} {what} ({nbytes}) from {path}?", err=True):
            complain("nothing was removed")
            return FAILED
    except typer.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise
        raise StoreError(_NOBODY) from None
    removal = pccheck.stores.remove(path, step=steps, name=names, counter=counters, force=force, take_over=take_over)
    return Report(
        {"removed": [as_json(info) for info in removal.removed], "freed_nbytes": removal.freed_nbytes},
        [f"Removed {noun_for(removal.removed)} {steps_of(removal.removed)}; {size(removal.freed_nbytes)} freed."],
    )


def _told_apart(infos: Iterable[pccheck.CheckpointInfo], there: Iterable[pccheck.CheckpointInfo]) -> str:
    """Return the steps of checkpoints as text, with marks, and with the counter if others have the same step."""
    times = Counter(info.step for info in there)
    facts = {info: [*marks_of(info), *[f"counter {info.counter}"] * (times[info.step] > 1)] for info in infos}
    return ", ".join(f"{info.step} ({', '.join(each)})" if each else str(info.step) for info, each in facts.items())


_WHICH = "give --step or --name"


_NOBODY = "nothing was removed: there is no terminal to ask; give --yes"


OldStep: TypeAlias = Annotated[int | None, typer.Argument(hidden=True)]
"""A step given as positional argument, as in version 0.1."""


def _note_old(*steps: int) -> None:
    options = " ".join(f"--step {step}" for step in steps)
    complain(f"write {options}; steps without --step go with version 1.1")


def _one(step: int | None, name: str | None, old: int | None) -> dict[str, Any]:
    """Return step and name as keyword arguments; BadParameter unless exactly one of the options is given."""
    if old is not None and step is None and name is None:
        _note_old(old)
        step = old
    elif old is not None or (step is None) == (name is None):
        raise typer.BadParameter(_WHICH)
    return {"step": step, "name": name}


@reporting
def pin(path: StoreFolder, old: OldStep = None, step: OneStep = None, name: Name = None, json: Json = False) -> Report:
    """Keep a checkpoint even if a trainer's rules would drop it.

    No trainer may have PATH open.

    Exit status: 0 pinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 the store is damaged.
    """
    info = pccheck.stores.pin(path, **_one(step, name, old))
    return _pinned(info, "is kept whatever a trainer's rules say")


@reporting
def unpin(
    path: StoreFolder, old: OldStep = None, step: OneStep = None, name: Name = None, json: Json = False
) -> Report:
    """Leave a pinned checkpoint to a trainer's rules again.

    Unpins all checkpoints of the step. No trainer may have PATH open.

    Exit status: 0 unpinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 the store is damaged.
    """
    info = pccheck.stores.unpin(path, **_one(step, name, old))
    return _pinned(info, "goes with a trainer's next commit unless a rule keeps it")


def _pinned(info: pccheck.CheckpointInfo, fate: str) -> Report:
    return Report(as_json(info), [f"Step {info.step} (counter {info.counter}) {fate}."])


@reporting
def reject(
    path: AnyFolder,
    old: OldStep = None,
    step: Annotated[int | None, typer.Option(metavar="STEP", help="The first bad step.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The name of the first bad checkpoint.")] = None,
    json: Json = False,
) -> Report:
    """Reject a checkpoint and every newer one.

    A restore passes rejected checkpoints over, and no rule keeps them. Rejecting cannot be undone. No trainer may have
    PATH open.

    Exit status: 0 rejected, 1 it failed, or no checkpoint to restore would be left, 2 wrong usage, 3 there is no such
    checkpoint, and none of a later step, 4 the store is damaged.
    """
    rejected = pccheck.stores.reject(path, **_one(step, name, old))
    newest = next(info for info in pccheck.list_checkpoints(path) if not info.rejected)
    return Report(
        {"rejected": [as_json(info) for info in rejected], "newest": as_json(newest)},
        [f"Rejected {noun_for(rejected)} {steps_of(rejected)}. A trainer tries step {newest.step} first."],
    )
