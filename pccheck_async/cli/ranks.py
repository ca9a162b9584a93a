# SPDX-License-Identifier: Apache-2.0
"""Output of the commands for a group's folder: lacking parts, ranks x checkpoints, and the slowest rank."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pccheck_async.cli.output import NOTHING, Report, as_json, complain, duration, size, table
from pccheck_async.errors import CorruptStoreError, ReadError, first_few, in_shell

if TYPE_CHECKING:
    from pccheck_async.group import Place
    from pccheck_async.medium.status_file import Status
    from pccheck_async.upkeep import ShardBox, ShardedLeaf

STAGES = ("capture", "write", "flush")
"""Those that a rank does by itself. In ``commit`` all wait for the slowest one."""
_SHADES = "░▒▓█"
_LACKING, _NOT_YET = "x", "·"
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
    """Return the output of ``ls``: a list of checkpoints, and of a group's folder those that lack parts beside it."""
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
    for one in place.incomplete:
        fate = "it is being saved, or was when the ranks ended"
        if one.committed:
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
    return notes, bool(fault or torn) or (newer_lost(place) and not running)


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


# -- ranks x checkpoints


def heat_map(path: Path) -> Report:
    """Return each rank's part of each checkpoint, and the times of its stages while its engine runs."""
    from pccheck_async.medium.status_file import read_status

    place = read_place(path)
    place.check_group("--ranks shows the ranks of a group")
    published = {rank: read_status(path / place.folder(rank)) for rank in place.stores}
    times = {rank: stage_times(one.status) for rank, one in published.items() if one is not None and one.alive}
    steps = {one.key: one.entry.step for one in place.complete} | {one.key: one.step for one in place.incomplete}
    nbytes = {
        key: {rank: part.entry.nbytes for rank, part in place.parts(key).items()} for key in sorted(steps)
    }  # oldest first
    document = {
        "checkpoints": [
            {"step": steps[key], "counter": key.counter, "nbytes": {str(rank): n for rank, n in parts.items()}}
            for key, parts in nbytes.items()
        ],
        "stage_seconds": {str(rank): seconds for rank, seconds in times.items()},
        "slowest": slowest(times),
    }
    if not nbytes:
        complain(place.nothing(None))
        return Report(document, (), NOTHING)
    columns = [(steps[key], parts) for key, parts in nbytes.items()]
    running = {rank for rank, one in published.items() if one is not None and one.alive}
    return Report(document, _drawn(columns, sorted(place.stores), running, times))


def _drawn(
    columns: list[tuple[int, dict[int, int]]],
    ranks: list[int],
    running: Collection[int],
    times: Mapping[int, Mapping[str, float]],
) -> Iterator[str | Table]:
    most = max((n for _, parts in columns for n in parts.values()), default=0)
    rows = table("rank", "newest", "bytes of each checkpoint, oldest first", right=2)
    for rank in ranks:
        last = max((number for number, (_, parts) in enumerate(columns) if rank in parts), default=-1)
        cells = "".join(
            _shade(parts[rank], most) if rank in parts else _NOT_YET if number > last and rank in running else _LACKING
            for number, (_, parts) in enumerate(columns)
        )
        newest = columns[-1][1].get(rank)
        rows.add_row(str(rank), "" if newest is None else size(newest), cells)
    yield rows
    steps = ", ".join(str(step) for step, _ in columns)
    not_yet = f"; {_NOT_YET}: not yet, the rank runs" if running else ""
    yield f"Steps {steps}. {_SHADES[-1]}: up to {size(most)}; {_LACKING}: no part{not_yet}."
    if times:
        yield stage_table(times)
        if text := describe_slowest(times):
            yield text
    else:
        yield "Stage times are shown only while the engines of the ranks run."


def _shade(value: float, most: float) -> str:
    return _SHADES[min(int(value / most * len(_SHADES)), len(_SHADES) - 1)] if most else _SHADES[0]


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
    """Return stage times of all ranks per checkpoint; in each column the darkest is the slowest."""
    rows = table("rank", *STAGES, right=1)
    most = {stage: max(one[stage] for one in times.values()) for stage in STAGES}
    for rank, one in sorted(times.items()):
        rows.add_row(str(rank), *(f"{_shade(one[stage], most[stage])} {duration(one[stage])}" for stage in STAGES))
    return rows
