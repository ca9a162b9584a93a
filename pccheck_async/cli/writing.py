"""The commands that write: ``copy``, ``rm``, ``pin``, ``unpin``, ``recover``, ``export`` and ``import``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

import pccheck_async as pccheck
from pccheck_async.cli.output import (
    DIFFERENT,
    FAILED,
    NOTHING,
    Json,
    Report,
    Step,
    StoreFolder,
    as_json,
    captured_at,
    complain,
    nothing_in,
    parse_path,
    printable,
    progress_bar,
    reporting,
    size,
    table,
)
from pccheck_async.errors import NoCheckpointError

__all__ = ["copy", "export", "import_", "pin", "recover", "rm", "unpin"]

_MOST_CHANGES = 20


def _numbers(infos: list[pccheck.CheckpointInfo] | tuple[pccheck.CheckpointInfo, ...]) -> str:
    return ", ".join(str(info.step) for info in infos)


@reporting
def copy(
    source: Annotated[Path, typer.Argument(parser=parse_path, metavar="SOURCE", help="Store that has the checkpoint.")],
    target: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="TARGET", help="Store that gets it; made where there is none.")
    ],
    step: Step = None,
    pin: Annotated[
        bool | None, typer.Option("--pin/--no-pin", help="Pin the copy, or do not (default: as in SOURCE).")
    ] = None,
    json: Json = False,
) -> Report:
    """Copy a checkpoint into another store, verified on the way; it becomes the newest one there, others stay.

    A trainer may write to SOURCE meanwhile, not to TARGET.

    Exit status: 0 the copy is durable, 1 it failed and nothing was committed, 2 wrong usage, 3 there is no such
    checkpoint.
    """
    start = time.perf_counter()
    with progress_bar("copying") as progress:
        info = pccheck.copy_checkpoint(source, target, step=step, pinned=pin, progress=progress)
    seconds = time.perf_counter() - start
    lines = [
        f"Step {info.step} ({size(info.nbytes)}) copied and verified in {seconds:.2f} s; it is the newest checkpoint "
        f"in {target}, counter {info.counter}{', pinned' if info.pinned else ''}."
    ]
    if later := [other for other in pccheck.list_checkpoints(target)[1:] if other.step > info.step]:
        lines.append(f"Older there now: step {_numbers(later)}. A trainer resumes from step {info.step}.")
    return Report(as_json(info), lines)


@reporting
def rm(
    path: StoreFolder,
    steps: Annotated[list[int], typer.Argument(help="Steps to remove, pinned or not.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where no checkpoint is left then.")] = False,
    json: Json = False,
) -> Report | int:
    """Remove checkpoints, all of these steps or none, in one commit, and free their space. No trainer has PATH open.

    Exit status: 0 removed, 1 nothing was removed, 2 wrong usage, 3 there is no checkpoint of one of the steps.
    """
    if not (infos := pccheck.list_checkpoints(path)):
        raise NoCheckpointError(nothing_in(path))
    if missing := sorted(set(steps) - {info.step for info in infos}):
        raise NoCheckpointError(f"{path} holds no checkpoint of step {', '.join(map(str, missing))}")
    doomed = [info for info in infos if info.step in steps]
    what = ", ".join(f"{info.step}{' (pinned)' if info.pinned else ''}" for info in doomed)
    nbytes = size(sum(info.nbytes for info in doomed))
    if not yes and not typer.confirm(f"Remove step {what} ({nbytes}) from {path}?", err=True):
        complain("nothing was removed")
        return FAILED
    removal = pccheck.remove_checkpoints(path, steps, force=force)
    return Report(
        {"removed": [as_json(info) for info in removal.removed], "freed_nbytes": removal.freed_nbytes},
        [f"Removed step {_numbers(removal.removed)}; {size(removal.freed_nbytes)} freed."],
    )


StepNumber = Annotated[int, typer.Argument(help="Step of the checkpoint.")]


@reporting
def pin(path: StoreFolder, step: StepNumber, json: Json = False) -> Report:
    """Keep the newest checkpoint of a step whatever a trainer's rules say. No trainer has PATH open.

    Exit status: 0 pinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint.
    """
    info = pccheck.pin_checkpoint(path, step)
    return Report(as_json(info), [f"Step {info.step} (counter {info.counter}) is kept whatever a trainer's rules say."])


@reporting
def unpin(path: StoreFolder, step: StepNumber, json: Json = False) -> Report:
    """Leave a pinned checkpoint to a trainer's rules again. No trainer has PATH open.

    Exit status: 0 unpinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint.
    """
    info = pccheck.pin_checkpoint(path, step, pinned=False)
    fate = "goes with a trainer's next commit unless a rule keeps it"
    return Report(as_json(info), [f"Step {info.step} (counter {info.counter}) {fate}."])


# -- recover


@reporting
def recover(
    path: StoreFolder,
    write: Annotated[
        bool, typer.Option("--write", help="Write a new commit record, and store.json where it is lost.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Search the slots also where a commit record is valid.")
    ] = False,
    slots: Annotated[
        list[int] | None, typer.Option("--slot", help="Name only the checkpoint in this slot; may be repeated.")
    ] = None,
    json: Json = False,
) -> Report:
    """Find what can be salvaged where the commit records or store.json are lost: checkpoints of which every byte holds.

    Writes nothing unless told to. Never changes a slot, and keeps the files that it replaces under other names.

    Exit status: 0 the store is in order, or written, 1 it failed, 2 wrong usage, 3 nothing whole was found, 4 there is
    something to write.
    """
    with progress_bar("searching") as progress:
        recovery = pccheck.recover_store(path, write=write, search=search, slots=slots or None, progress=progress)
    document = {
        "needed": recovery.needed,
        "identity": recovery.identity,
        "record": recovery.record,
        "slots": [
            {
                "slot": one.file,
                "checkpoint": as_json(one.info) if one.info else None,
                "chunks": one.chunks,
                "damaged_chunks": [{"offset": d.offset, "nbytes": d.nbytes, "reason": d.reason} for d in one.damage],
                "whole": one.whole,
                "note": one.note,
            }
            for one in recovery.found
        ],
        "names": [as_json(info) for info in recovery.named],
        "written": list(recovery.written),
        "kept": list(recovery.kept),
    }
    status = 0 if recovery.written or not recovery.needed else NOTHING
    if status and (recovery.named or recovery.record == "valid"):
        status = DIFFERENT
    return Report(document, _recovered(recovery, path), status)


def _recovered(recovery: pccheck.Recovery, path: Path) -> Iterator[str | Table]:
    if recovery.found:
        rows = table("slot", "step", "counter", "size", "captured (UTC)", "whole", "note", right=4)
        for one in recovery.found:
            info = one.info
            facts = (str(info.step), str(info.counter), size(info.nbytes), captured_at(info)) if info else [""] * 4
            rows.add_row(one.file, *facts, "yes" if one.whole else "no", one.note)
        yield rows
    yield f"store.json is {recovery.identity}, the commit records are {recovery.record}."
    steps = _numbers(recovery.named)
    if recovery.written:
        kept = f"; what was there is {', '.join(recovery.kept)} now" if recovery.kept else ""
        yield f"Written: {', '.join(recovery.written)}{kept}."
        names = f"The store names step {steps}, newest first" if recovery.named else "The store names no checkpoint"
        yield f"{names}. `pccheck verify {path}` checks them."
    elif not recovery.needed:
        yield "Nothing is missing: a trainer can open this store."
    elif recovery.named:
        yield f"Nothing was written. With --write the store names step {steps}, newest first."
    elif recovery.record == "valid":
        yield "Nothing was written. With --write the store is there again; it names no checkpoint."
    else:
        yield "No slot holds a whole checkpoint. Nothing was written."


# -- export and import


@reporting
def export(
    path: StoreFolder,
    out: Annotated[Path, typer.Argument(parser=parse_path, metavar="OUT", help="The new file, or folder (dcp).")],
    to: Annotated[Literal["safetensors", "torch", "dcp"], typer.Option(help="The format.")],
    step: Annotated[int | None, typer.Option(help="The step (default: the newest checkpoint).")] = None,
    keys: Annotated[
        list[str] | None, typer.Option(help="Paths or globs of what to export, such as 'model.*'; may be repeated.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="The part that becomes the whole, such as 'model'.")] = None,
    json: Json = False,
) -> Report:
    """Write a checkpoint, or a part of it, as a file that others read without this package.

    Exit status: 0 exported, 1 it failed or the format cannot express something, 2 wrong usage, 3 there is no such
    checkpoint.
    """
    exported = pccheck.export_checkpoint(path, out, to=to, step=step, keys=keys or None, root=root)
    document = {
        "checkpoint": as_json(exported.info),
        "path": str(exported.path),
        **{name: getattr(exported, name) for name in ("nbytes", "tensors", "values")},
        "changed": [printable(line) for line in exported.changed],
    }
    return Report(document, _exported(exported))


def _exported(exported: pccheck.Exported) -> Iterator[str]:
    counted = f"{exported.tensors} tensors and {exported.values} plain values"
    yield f"step {exported.info.step}: {counted}, {size(exported.nbytes)}, in {exported.path}"
    for line in exported.changed[:_MOST_CHANGES]:
        complain(f"changed: {line}")
    if len(exported.changed) > _MOST_CHANGES:
        complain(f"changed: {len(exported.changed) - _MOST_CHANGES} more")


@reporting
def import_(
    file: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="FILE", help="A file of torch.save or of safetensors.")
    ],
    path: Annotated[
        Path,
        typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store; nobody else may write to it."),
    ],
    source: Annotated[Literal["torch", "safetensors"], typer.Option("--from", help="The format.")],
    step: Annotated[
        int | None, typer.Option(help="The step of the new checkpoint (default: what the file says, or a count).")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Put it below this name, such as 'model'.")] = None,
    json: Json = False,
) -> Report:
    """Save what a file holds as the newest checkpoint of a store. Runs no code from the file.

    Exit status: 0 imported, 1 it failed, 2 wrong usage.
    """
    info = pccheck.import_checkpoint(file, path, source=source, step=step, root=root)
    return Report(as_json(info), [f"{file}: step {info.step}, {size(info.nbytes)}, the newest checkpoint in {path}"])
