# SPDX-License-Identifier: Apache-2.0
"""Output of the commands for a group's folder: lacking parts, placement, stage times and the slowest rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from pccheck_async.cli.output import as_json, duration, table
from pccheck_async.errors import CorruptStoreError, ReadError, first_few, in_shell

if TYPE_CHECKING:
    from pccheck_async.group import Place
    from pccheck_async.medium.status_file import Status
    from pccheck_async.upkeep import ShardBox, ShardedLeaf

STAGES = ("capture", "write", "flush")
"""Those that a rank does by itself. In ``commit`` all wait for the slowest one."""
_FILLS = dict(zip(STAGES, "▒█░", strict=True))
_STYLES = dict(zip(STAGES, ("cyan", "green", "magenta"), strict=True))
_BAR = 30
"""Columns of the bar of the slowest rank."""
_MOST_BOXES = 8


def read_place(path: Path) -> Place:
    """Return the contents of the records in a folder. Imports torch, which ``pccheck --help`` does not wait for."""
    from pccheck_async.group import read_place as read

    return read(path)


def rank_of_store(place: Place) -> str:
    """Return a sentence on the group's parts that the store of one rank holds; empty for other places."""
    if not place.is_part:
        return ""
    return (
        "One rank's parts of a group's checkpoints, prepared ones too: "
        f"{in_shell('ls', os.path.normpath(place.path / '..'))} says which of them are complete."
    )


def group_fault(place: Place) -> str:
    """Return why no rank can open a group's folder, though it can be read; empty for other places."""
    from pccheck_async.group import stored_domain
    from pccheck_async.medium.filesystem import slot_sizes

    if place.is_bucket:
        return ""
    try:
        if place.of_group:
            stored_domain(place.path)
    except (CorruptStoreError, ReadError) as error:
        return f"No trainer can open this group: {error}"
    unnamed = [path.name for rank, path in (place.rank_folders or {}).items() if rank not in place.stores]
    if lost := [name for name in unnamed if slot_sizes(place.path / name)]:
        todo = f"{in_shell('recover', place.path, '--write')} makes it again"
        return f"store.json of {first_few(lost, 5)} is missing: {todo}"
    return ""


def on_disk(place: Place) -> dict[str, int]:
    """Return what the slots of a place take, and how many of them the records name."""
    from pccheck_async.medium.filesystem import slot_sizes

    sizes = [nbytes for rank in place.stores for nbytes in slot_sizes(place.path / place.folder(rank))]
    in_use = sum(len(record.entries) for _, record in place.stores.values())
    return {"nbytes": sum(sizes), "slots": len(sizes), "slots_in_use": in_use}


def place_as_json(place: Place) -> list[dict[str, Any]] | dict[str, Any]:
    """Return the JSON of ``ls``: a list of checkpoints; for a group a dict, with incomplete ones and disk use."""
    if not place.of_group:
        return [as_json(info) for info in place.infos]
    complete = [as_json(place.info(one)) | {"world_size": one.world} for one in place.complete]
    incomplete = [
        {
            "step": one.step,
            "counter": one.key.counter,
            "missing_ranks": list(one.ranks),
            "missing_count": one.missing,
            "was_complete": one.committed,
        }
        for one in place.incomplete
    ]
    fault = group_fault(place)
    found = {"checkpoints": complete, "incomplete": incomplete, "on_disk": on_disk(place)}
    return found | ({"problem": fault} if fault else {})


def describe_incomplete(place: Place) -> Iterator[str]:
    """Yield for each checkpoint that is not complete the ranks that lack their parts, and its fate; then advice."""
    advice = dict[str, None]()  # the same for many of them
    newest = max((one.key for one in place.complete), default=None)
    for one in place.incomplete:
        fate = "it is being saved, or was when the ranks ended"
        if one.committed and newest is not None and one.key < newest:
            fate = "it was complete once, and a newer one is: no loss, a rank that was killed had not dropped it yet"
        elif one.committed:
            fate = "it was complete once"
            advice.update(dict.fromkeys(place.put_back(one.ranks)))
        elif one.proven:
            fate += ": the next run of the group drops it"
        yield f"Incomplete: step {one.step} (counter {one.key.counter}) lacks the parts of {one.lacking}; {fate}."
    if place.complete and newer_lost(place) and place.stores.keys() >= {*place.incomplete[0].ranks}:
        advice[place.look_for_parts] = None
    yield from (f"To do: {each}." for each in advice)


def newer_lost(place: Place) -> bool:
    """Whether checkpoints that were complete once, and are newer than all complete ones, lack parts."""
    newest = max((one.key for one in place.complete), default=None)
    return any(one.committed and (newest is None or one.key > newest) for one in place.incomplete)


def problems(place: Place, *, running: bool = False) -> tuple[list[str], bool]:
    """Return sentences on what a place lacks beside the slots of its checkpoints, and whether something is lost.

    Where ranks run, none on incomplete checkpoints: these come and go with every save.
    """
    from pccheck_async.upkeep import lost_records  # and torch

    notes = [] if running else [*describe_incomplete(place)]
    if fault := group_fault(place):
        notes.append(f"{fault}.")
    for folder in (torn := lost_records(place)):
        whose = "" if folder == "." else f"{folder}: "
        notes.append(
            f"LOST?: {whose}both copies of a commit record are damaged, or were cut short by a power failure. It may "
            "have named a newer checkpoint: before the next save, copy the folder and see "
            f"{in_shell('recover', place.path, '--search')}."
        )
    newer, is_older = newer_notes(place)
    return [*notes, *newer], bool(fault or torn or is_older) or (newer_lost(place) and not running)


def newer_notes(place: Place) -> tuple[list[str], bool]:
    """Return a sentence on slots with newer checkpoints than the record names, if any, and whether it is an older one.

    Else that is no damage: a save that is killed just before its record leaves such a slot.
    """
    from pccheck_async.store import newer_in_words  # and torch
    from pccheck_async.upkeep import newer_in_slots

    found = newer_in_slots(place)
    notes = [f"NEWER: {newer_in_words(found, place.path)}."] if found else []
    return notes, any(one.is_named for one in found)


# -- which rank has which box


def placement(leaf: ShardedLeaf) -> str:
    """Return the ranks and the boxes of a tensor that they saved: in a few words if they are cut regularly."""
    boxes = [(box, rank) for rank, each in leaf.boxes.items() for box in each]
    if not boxes:
        return "of no elements"
    if len(boxes) == 1:
        return f"{'one of the replicas' if leaf.is_replica else 'whole'}, of rank {boxes[0][1]}"
    cuts = [sorted({(box.offsets[dim], box.sizes[dim]) for box, _ in boxes}) for dim in range(len(leaf.shape))]
    if max(map(len, leaf.boxes.values())) > 1 or prod(map(len, cuts)) != len(boxes):
        few = "; ".join(f"rank {rank} {_indices(box)}" for box, rank in boxes[:_MOST_BOXES])
        return few + (f"; {len(boxes) - _MOST_BOXES} boxes more (--json names all)" if len(boxes) > _MOST_BOXES else "")
    over = f"over ranks {_numbers([rank for _, rank in sorted(boxes)])}"
    dims = [dim for dim, cut in enumerate(cuts) if len(cut) > 1]
    if len(dims) > 1:
        return f"dims {', '.join(map(str, dims))} {over} ({' x '.join(str(len(cuts[dim])) for dim in dims)})"
    lengths = [length for _, length in cuts[dims[0]]]
    counted = [(len(list(alike)), length) for length, alike in groupby(lengths)]
    runs = [f"{count} x {length}" if count > 1 else str(length) for count, length in counted]
    return f"dim {dims[0]} {over} ({first_few(runs, _MOST_BOXES)})"


def _indices(box: ShardBox) -> str:
    """Write a box as one would index it."""
    return f"[{', '.join(f'{low}:{low + length}' for low, length in zip(*box, strict=True))}]"


def _numbers(numbers: list[int]) -> str:
    """Return numbers as text, in their order; those that count up become one range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    few = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:_MOST_BOXES])
    return few + (f" and {sum(map(len, runs[_MOST_BOXES:]))} more" if len(runs) > _MOST_BOXES else "")


# -- stage times


def stage_times(status: Status) -> dict[str, float]:
    """Return seconds of a rank's stages per durable checkpoint."""
    count = max(1, status.counts.get("durable", 0))
    return {stage: status.stage_seconds.get(stage, 0.0) / count for stage in STAGES}


def slowest(times: Mapping[int, Mapping[str, float]]) -> int | None:
    """Return the rank whose stages take longest, None for fewer than two ranks."""
    return max(times, key=lambda rank: sum(times[rank].values())) if len(times) > 1 else None


def describe_slowest(times: Mapping[int, Mapping[str, float]]) -> str:
    """Name the slowest rank and compare it with the median of all ranks; empty for fewer than two ranks."""
    rank = slowest(times)
    if rank is None:
        return ""
    middle = median(sum(one.values()) for one in times.values())
    stage = max(STAGES, key=lambda name: times[rank][name] - median(one[name] for one in times.values()))
    return (
        f"Slowest: rank {rank} with {duration(sum(times[rank].values()))} of {', '.join(STAGES)} per checkpoint "
        f"(median of all ranks {duration(middle)}), most of the difference in {stage}."
    )


def stage_table(times: Mapping[int, Mapping[str, float]]) -> Table:
    """Return stage times of all ranks per checkpoint, the slowest of each stage marked, and a bar of their sum."""
    rows = table("rank", *STAGES, "  ".join(f"{_FILLS[stage]} {stage}" for stage in STAGES), right=1 + len(STAGES))
    most = {stage: max(one[stage] for one in times.values()) for stage in STAGES}
    longest = max(sum(one.values()) for one in times.values())
    for rank, one in sorted(times.items()):
        bar, cells = Text(), list[Text]()
        for stage in STAGES:
            is_slowest = len(times) > 1 and one[stage] == most[stage]
            cells.append(Text(duration(one[stage]), style="bold yellow" if is_slowest else ""))
            bar.append(_FILLS[stage] * round(one[stage] / (longest or 1) * _BAR), style=_STYLES[stage])
        rows.add_row(str(rank), *cells, bar)
    return rows
