# SPDX-License-Identifier: Apache-2.0
"""Texts about checkpoints, for tables, sentences and errors of several commands."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pccheck_async as pccheck
from pccheck_async.cli.output import printable, size
from pccheck_async.cli.ranks import group_fault, read_place
from pccheck_async.errors import DamagedError, first_few, in_shell

if TYPE_CHECKING:
    from pccheck_async.group import Place

BACKUP = "Put a backup of the folder back, or begin anew in another folder."


def steps_of(infos: Iterable[pccheck.CheckpointInfo]) -> str:
    """Return the steps of checkpoints, for a sentence: "3, 5"."""
    return ", ".join(str(info.step) for info in infos)


def noun_for(infos: Sized) -> str:
    """Return "step" or "steps", by the number of checkpoints."""
    return "step" if len(infos) == 1 else "steps"


def restart(place: Place, lost: Container[int], whole: Mapping[int, str] | None = None) -> str:
    """Return a sentence that names the checkpoint that a restart restores, or tries if it was not checked.

    Args:
        place: The place to restart from.
        lost: Counters of the checkpoints that are known to be lost or damaged.
        whole: Places of the checkpoints that were checked, by counter; None if nothing was checked.
    """
    from pccheck_async.upkeep import overwritten  # and torch

    gone = overwritten(place) if whole is None else ()
    superseded = [entry.info for entry in place.superseded if entry.counter not in gone]
    newest_first = sorted((*place.infos, *superseded), key=lambda info: -info.counter)
    found = [info for info in newest_first if not info.rejected and info.counter not in lost]
    if not found:
        text = "No checkpoint can be restored: all are rejected, lost or damaged."
        look = f" {in_shell('recover', place.name, '--search')} looks for whole ones that no record names."
        return f"{text} {BACKUP}" if place.of_group else text + look
    newest = found[0]
    what = ", which a newer one superseded and a save may have written over" if newest in superseded else ""
    if newest in superseded and whole is not None:
        return (
            f"A restart restores step {newest.step}, from {whole[newest.counter]}, which a newer one superseded: the "
            "next save may write over it."
        )
    if whole is None:
        look = f"no tensor was read here ({in_shell('verify', place.name, '--all')} checks all bytes)"
        text = f"A restart tries step {newest.step}{what}: {look}."
    elif newest.counter not in whole:
        text = f"A restart tries step {newest.step}, which was not checked (--all checks it)."
    else:
        text = f"A restart restores step {newest.step}, from {whole[newest.counter]}."
    return text + ("" if newest in superseded else _remedy(place, lost, newest))


def what_is_lost(place: Place) -> tuple[dict[int, str], list[str]]:
    """Return the faults of lost slots, by the checkpoints' counters; and sentences on these and on a restart."""
    from pccheck_async.upkeep import lost_slots  # and torch

    gone = lost_slots(place) and lost_slots(read_place(place.path))  # a writer may have removed one meanwhile
    lost = [f"LOST: step {info.step}: {gone[info.counter]}." for info in place.infos if info.counter in gone]
    return gone, lost if group_fault(place) else [*lost, restart(place, gone)]


def _remedy(place: Place, lost: Container[int], newest: pccheck.CheckpointInfo) -> str:
    """Return a sentence on how to drop damaged checkpoints, or find others; "" if there is nothing to advise."""
    kept = {info.step for info in place.infos if info.counter not in lost}
    damaged = [info for info in place.infos if info.counter in lost]
    if place.of_group and damaged and all(info.counter > newest.counter for info in damaged):
        return " What is damaged is dropped by training that goes on from there."
    if not damaged or place.is_part:
        return ""
    from pccheck_async.upkeep import replaced_slots  # and torch

    replaced = replaced_slots(place)
    if others := [info for info in damaged if info.counter in replaced]:
        return (
            f" The slots of {noun_for(others)} {steps_of(others)} hold other bytes than the record names: newer "
            "checkpoints, if the record is older, as in a backup that was put back in part. Copy the folder, and "
            f"{in_shell('recover', place.name, '--search')} says what is there."
        )
    steps = sorted({info.step for info in damaged} - kept)
    beside = [info for info in damaged if info.step in kept]  # a step would mean a whole one, too
    options = [part for step in steps for part in ("--step", str(step))]
    options += [part for info in beside for part in ("--counter", str(info.counter))]
    return f" {in_shell('remove', place.name, *options)} drops what is damaged."


def outcomes(verification: pccheck.stores.Verification) -> tuple[set[int], dict[int, str]]:
    """Return the counters of the damaged checkpoints, and the places of all checked ones by counter."""
    checked = (*verification.checkpoints, *verification.superseded)
    places = {each.info.counter: each.slot if each.rank is None else "the parts of all its ranks" for each in checked}
    return {each.info.counter for each in checked if each.damage}, places


@contextmanager
def naming_others(path: Path, step: int | None = None, name: str | None = None) -> Iterator[None]:
    """Return a context manager that adds the store's other steps to a DamagedError: none is taken automatically."""
    try:
        yield
    except DamagedError as error:
        infos = read_place(path).infos
        asked = [info for info in infos if (step is None or info.step == step) and (name is None or info.name == name)]
        if not (others := [str(info.step) for info in infos if info not in asked[:1]]):
            raise
        look = "" if "pccheck verify" in str(error) else f" ({in_shell('verify', path, '--all')} tells which are whole)"
        raise DamagedError(f"{error}; --step takes another one of {first_few(others)}{look}") from error


def marks_of(info: pccheck.CheckpointInfo) -> list[str]:
    """Return the marks of a checkpoint: "pinned", "rejected", both or none."""
    return [mark for mark in ("pinned", "rejected") if getattr(info, mark)]


def columns_of(info: pccheck.CheckpointInfo) -> tuple[str, str, str]:
    """Return step, counter and size of a checkpoint, for a table."""
    return str(info.step), str(info.counter), size(info.nbytes)


def in_words(info: pccheck.CheckpointInfo) -> str:
    """Return the step of a checkpoint as text, with its name and marks."""
    facts = [*([] if info.name is None else [f"named {printable(info.name)}"]), *marks_of(info)]
    return f"step {info.step} ({', '.join(facts)})" if facts else f"step {info.step}"
