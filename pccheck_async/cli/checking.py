# SPDX-License-Identifier: Apache-2.0
"""``pccheck verify`` and ``pccheck recover``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import pccheck_async as pccheck
from pccheck_async.cli.checkpoints import BACKUP, columns_of, in_words, noun_for, outcomes, restart, steps_of
from pccheck_async.cli.output import (
    DIFFERENT,
    FAILED,
    NOTHING,
    AnyFolder,
    AnyPlace,
    Json,
    Name,
    Report,
    Step,
    as_json,
    captured_at,
    pick,
    printable,
    progress_bar,
    reporting,
    size,
    table,
)
from pccheck_async.cli.ranks import describe_incomplete, group_fault, newer_lost, newer_notes, rank_of_store, read_place
from pccheck_async.errors import first_few, in_shell

if TYPE_CHECKING:
    from pccheck_async.upkeep import RecordCopy


_MOST_LEAVES = 8


@reporting
def verify(
    path: AnyPlace,
    step: Step = None,
    name: Name = None,
    every: Annotated[bool, typer.Option("--all", help="Check all committed checkpoints.")] = False,
    json: Json = False,
) -> Report:
    """Check every checksum, and name what is damaged.

    Checks all copies of the commit records, the manifest, and every chunk; in a group's folder the records and parts of
    all ranks. Writes nothing. Safe while a trainer writes to the store.

    Exit status: 0 no byte is damaged, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 something is lost or
    damaged.
    """
    if every and (step is not None or name is not None):
        raise typer.BadParameter("--all excludes --step and --name")
    with progress_bar("verifying") as progress:
        verification = pccheck.stores.verify(path, step=step, name=name, every=every, progress=progress)
    place = read_place(path)
    fault = group_fault(place)
    newer_slots, is_older = newer_notes(place)
    document = {
        "whole": verification.whole and not fault and not is_older,
        "records": [pick(copy, "offset", "generation", "state", "rank", copy="name") for copy in verification.records],
        "checkpoints": [
            as_json(each.info)
            | pick(each, "slot", "chunks", "rank", checked_nbytes="nbytes")
            | {"whole": not each.damage, "damage": [asdict(damage) for damage in each.damage]}
            for each in verification.checkpoints
        ],
        **pick(verification, "nbytes", "seconds", "direct"),
    }
    lines = [*_verified(verification, path), *newer_slots]
    if not rank_of_store(place):
        lines += describe_incomplete(place) if (newer := newer_lost(place)) else ()
        lines.append(f"{fault}." if fault else restart(place, *outcomes(verification)))
        fault = fault or ("newer ones are lost" if newer else "")
    elif not verification.whole:
        look = in_shell("verify", os.path.normpath(path / ".."), "--all")
        lines.append(f"One rank's parts of a group's checkpoints: {look} says what a restart restores, and what to do.")
    return Report(document, lines, 0 if document["whole"] and not fault else DIFFERENT)


def _verified(verification: pccheck.stores.Verification, path: Path) -> Iterator[str | Table]:
    rows = table("step", "counter", "size", "chunks", "captured (UTC)", "slot", "", right=4)
    for each in verification.checkpoints:
        verdict, chunks = f"{len(each.damage)} damaged" if each.damage else "whole", str(each.chunks)
        for damage in each.damage:
            if damage.what in ("slot", "manifest"):  # without a manifest no chunk is known
                verdict, chunks = f"{damage.what} {'missing' if damage.what == 'slot' else 'damaged'}", ""
        slot = _of_rank(each.rank) + each.slot
        rows.add_row(*columns_of(each.info), chunks, captured_at(each.info), slot, verdict)
    for each in verification.superseded:
        verdict = f"superseded, {'damaged or written over' if each.damage else 'whole'}"
        rows.add_row(*columns_of(each.info), str(each.chunks), captured_at(each.info), each.slot, verdict)
    yield rows
    for rank, damage in ((each.rank, damage) for each in verification.checkpoints for damage in each.damage):
        leaves = ", ".join(printable(path) for path in damage.leaves[:_MOST_LEAVES])
        more = len(damage.leaves) - _MOST_LEAVES
        holds = f"; it holds {leaves}{f' and {more} more (--json names all)' if more > 0 else ''}" if leaves else ""
        where = f"bytes {damage.offset} to {damage.offset + damage.nbytes}"
        yield f"{_of_rank(rank)}{damage.file}: {damage.what} ({where}): {printable(damage.reason)}{holds}"
    for copy in verification.records:
        name = f"{_of_rank(copy.rank)}commit: copy {copy.name}"
        if copy in verification.damaged_copies:
            yield _damaged_copy(copy, path)
        elif copy.state == "damaged":
            yield (
                f"{name} of a record, at byte {copy.offset}, is damaged, or was cut short by a power failure, and the "
                f"other copy, too: it may have named a newer checkpoint ({in_shell('recover', path, '--search')})"
            )
        elif copy.state == "older":
            yield f"{name} was not written when the other copy was: a kill in between (harmless)"
    rate = f", {size(int(verification.nbytes / verification.seconds))}/s" if verification.seconds > 0 else ""
    cached = "" if verification.direct else " through the page cache"
    damaged = [copy for copy in verification.records if copy.state == "damaged"]
    is_whole = verification.whole or damaged == [*verification.damaged_copies]
    if is_whole := is_whole and not any(each.damage for each in verification.checkpoints):
        verdict = "Every checksum of the checkpoints holds, and nothing is lost."
    verdict = "Every checksum holds." if verification.whole else verdict if is_whole else "DAMAGED."
    yield f"{size(verification.nbytes)} read in {verification.seconds:.2f} s{rate}{cached}. {verdict}"


def _damaged_copy(copy: RecordCopy, path: Path) -> str:
    return (
        f"{_of_rank(copy.rank)}commit: copy {copy.name} of a record, at byte {copy.offset}, is damaged, or was cut "
        "short by a power failure; the other copy is valid, so that nothing is lost. The next two saves write it anew, "
        f"or {in_shell('recover', path, '--write')}"
    )


def _of_rank(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


def _slot(text: str) -> int:
    """Return the number of a slot that is given as a number or as the name of its file."""
    number = text.removeprefix("slot-")
    if not number.isdecimal():
        raise typer.BadParameter(f"a slot is a number, or the name of its file, such as slot-003; not {text!r}")
    return int(number)


@reporting
def recover(
    path: AnyFolder,
    write: Annotated[
        bool, typer.Option("--write", help="Write a new commit record, and store.json if it is lost.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Search the slots even if a commit record is valid.")
    ] = False,
    slots: Annotated[
        list[int] | None,
        typer.Option("--slot", parser=_slot, metavar="SLOT", help="Name only the one in this slot; may be repeated."),
    ] = None,
    json: Json = False,
) -> Report:
    """Find whole checkpoints where the commit records are lost.

    If the commit records or store.json are lost, searches the slots for checkpoints whose checksums all hold. If both
    are there, checks every checksum, like verify --all; --write then writes a damaged copy of a record anew. Writes
    nothing without --write. Never changes a slot, and keeps the files that it replaces under other names. If no
    commit record is valid, pins and rejections are lost, so that a run that was rejected may be restored: look with
    `pccheck ls`, and reject it again.

    Exit status: 0 the store is in order (also on a read-only mount), or was written, 1 it failed, or this user may not
    write some files, 2 wrong usage, 3 no whole checkpoint was found, 4 there is something to write, or a record still
    names a checkpoint that is lost or damaged.
    """
    with progress_bar("searching") as progress:
        recovery = pccheck.stores.recover(path, write=write, search=search, slots=slots or None, progress=progress)
    document = {
        **pick(
            recovery,
            "needed",
            "missing",
            "lost",
            "problems",
            "identity",
            "record",
            "record_lost",
            "written",
            "kept",
            "unnamed",
            "unrecorded",
            "older",
        ),
        "dropped": [as_json(info) for info in recovery.dropped],
        "slots": [
            pick(one, "chunks", "whole", "note", slot="file")
            | {
                "checkpoint": as_json(one.info) if one.info else None,
                "damaged_chunks": [pick(damage, "offset", "nbytes", "reason") for damage in one.damage],
            }
            for one in recovery.found
        ],
        "names": [] if recovery.refusal else [as_json(info) for info in recovery.named],
        "refusal": recovery.refusal,
    }
    status = 0 if recovery.written or not recovery.needed else NOTHING
    if recovery.copies and not recovery.written:
        status = DIFFERENT
    if search and not write and not recovery.needed:  # else no record is valid, and all of it is to be written
        there, found = read_place(path).infos, {info.counter for info in recovery.named}
        newer = there and max(found, default=0) > there[0].counter  # older ones were dropped, as they should be
        status = DIFFERENT if newer or not {info.counter for info in there} <= found else status
    lost = (recovery.missing or recovery.problems) and not recovery.named_anew
    if lost or (status and (recovery.named or recovery.record == "valid")):
        status = DIFFERENT
    from pccheck_async.upkeep import forbidden_files  # and torch

    forbidden = [] if status else forbidden_files(read_place(path))
    options = [*["--search"] * search, *[part for each in slots or () for part in ("--slot", str(each))], "--write"]
    to_write = in_shell("recover", path, *options)
    refused = forbidden and not _is_read_only(path)  # else whoever mounted it so knows
    return Report(document, _recovered(recovery, path, forbidden, to_write), FAILED if refused else status)


def _found(recovery: pccheck.stores.Recovery) -> Table:
    rows = table("slot", "step", "counter", "size", "captured (UTC)", "whole", "note", right=4)
    for one in recovery.found:
        facts = (*columns_of(one.info), captured_at(one.info)) if one.info else [""] * 4
        rows.add_row(one.file, *facts, "yes" if one.whole else "no", one.note)
    return rows


def _records(recovery: pccheck.stores.Recovery) -> Iterator[str]:
    """Yield the states of the commit records in words; for a group, with the folders of the ranks concerned."""
    lost = [name for name in recovery.unrecorded if name not in recovery.older]
    of = f" of {first_few(lost, 5)}" if lost else ""
    if lost or not recovery.older:
        yield f"the commit records{of} are {recovery.record}{', but for one that is lost' * recovery.record_lost}"
    if recovery.older:
        yield f"the commit records of {first_few(recovery.older, 5)} are whole, and older than those of other ranks"


def _recovered(
    recovery: pccheck.stores.Recovery, path: Path, forbidden: Sequence[str], to_write: str
) -> Iterator[str | Table]:
    if recovery.found:
        yield _found(recovery)
    yield f"{recovery.identity_name} is {recovery.identity}, {', '.join(_records(recovery))}."
    if recovery.unnamed:
        yield f"store.json of {', '.join(recovery.unnamed)} is missing, damaged, or of a store of one process."
    steps = f"{noun_for(recovery.named)} {steps_of(recovery.named)}"
    dropped = ", ".join(map(in_words, recovery.dropped))
    if recovery.lost and not recovery.refusal:
        yield (
            "Pins and rejections are lost with the records: a run that was rejected may be restored "
            f"again. Look with {in_shell('ls', path)} after --write, and reject it again. Pin again what was pinned "
            "before a trainer starts: its first commit keeps only what its rules keep."
        )
    if recovery.missing:
        slots_lost, names = ", ".join(recovery.missing), "named" if recovery.named_anew else "names"
        yield f"LOST: {slots_lost}, which the newest record {names}: gone, cut short, or no regular file."
    openable = not (recovery.needed or recovery.found)
    yield from recovery.problems or (newer_notes(read_place(path))[0] if openable else ())
    if not recovery.written:
        yield from (_damaged_copy(copy, path) for copy in recovery.copies)
    if (recovery.missing or recovery.problems) and not recovery.named_anew:
        from pccheck_async.upkeep import lost_slots  # and torch

        if recovery.verification is not None:
            yield restart(read_place(path), *outcomes(recovery.verification))
        elif recovery.written:
            yield restart(place := read_place(path), lost_slots(place))
    if recovery.written:
        kept = f"; what was there is {', '.join(recovery.kept)} now" if recovery.kept else ""
        yield f"Written: {', '.join(recovery.written)}{kept}."
        names = f"The store names {steps}, newest first" if recovery.named else "The store names no checkpoint"
        yield f"{names}. {in_shell('verify', path, '--all')} checks them."
        if dropped:
            yield f"The old record named, too: {dropped}. No slot that was chosen holds them whole."
    elif recovery.refusal:
        yield f"--write refuses: {recovery.refusal}."
    elif recovery.named and (recovery.needed or recovery.found):
        yield f"Nothing was written. After {to_write} the store names {steps}, newest first."
        if dropped:
            yield f"It no longer names {dropped}: no slot that was chosen holds them whole."
    elif recovery.found and recovery.record == "valid":
        yield f"{recovery.none_named.capitalize()}: none can be restored. Nothing was written. {BACKUP}"
    elif not recovery.needed and (recovery.missing or recovery.problems):
        yield f"Nothing was written, as {recovery.identity_name} and a commit record are valid."
    elif not recovery.needed:
        can = "" if forbidden else ", and a trainer can open this store"
        some = recovery.verification is None or recovery.verification.checkpoints
        holds = "every checksum of the checkpoints holds" if some else "they name no checkpoint"
        yield f"Nothing is missing from the records, and {holds}{can}."
    elif recovery.record == "valid":
        yield f"Nothing was written. After {to_write} the store is there again; it names no checkpoint."
    else:
        yield f"{recovery.none_named.capitalize()}. Nothing was written. {BACKUP}"
    if forbidden:
        yield _forbidden(forbidden, path)


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _forbidden(files: Sequence[str], path: Path) -> str:
    if _is_read_only(path):
        return "The filesystem is mounted read-only, so that no trainer can open the store; that is no damage."
    return (
        f"This user may not read and write {first_few(files, 5)}, so that no trainer of this user can open the store; "
        "that is no damage: change the modes of these files."
    )
