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
    from pccheck_async.bucket import Stored
    from pccheck_async.group import Place
    from pccheck_async.medium.status_file import Status
    from pccheck_async.upkeep import ShardBox, ShardedLeaf

STAGES = ("capture", "write", "flush")
"""Stages that each rank does by itself; in the stage ``commit`` all ranks wait for the slowest one."""
_FILLS = dict(zip(STAGES, "▒█░", strict=True))
_STYLES = dict(zip(STAGES, ("cyan", "green", "magenta"), strict=True))
_BAR = 30
"""Width in characters of the bar of the slowest rank."""
_MOST_BOXES = 8


def read_place(path: Path) -> Place:
    """Return a folder's (or bucket's) contents by its commit records. Imports torch, which takes a second or more."""
    from pccheck_async.group import read_place as read

    return read(path)


def rank_of_store(place: Place) -> str:
    """Return a note that a place is the store of one rank of a group; "" for other places."""
    if not place.is_part:
        return ""
    return (
        "One rank's parts of a group's checkpoints, prepared ones too: "
        f"{in_shell('ls', os.path.normpath(place.path / '..'))} says which of them are complete."
    )


def group_fault(place: Place) -> str:
    """Return why no trainer can open a group's folder, though it can be read; "" if there is no such reason."""
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


def in_bucket(path: Path) -> Stored:
    """Return how many bytes checkpoints take in a bucket."""
    from pccheck_async.bucket import BucketMedium, open_objects
    from pccheck_async.engine import call_once

    async def stored() -> Stored:
        return await BucketMedium(open_objects(path)).stored()

    return call_once(stored())


def on_disk(place: Place) -> dict[str, int]:
    """Return the bytes and the number of a place's slots, and how many of them the records name."""
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
    found: dict[str, Any] = {"checkpoints": complete, "incomplete": incomplete}
    found |= {} if place.is_bucket else {"on_disk": on_disk(place)}
    return found | ({"problem": fault} if fault else {})


def describe_incomplete(place: Place) -> Iterator[str]:
    """Yield a sentence on each incomplete checkpoint, with the ranks that lack parts and the reason; then advice."""
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
    """Return whether a checkpoint that is newer than all complete ones was complete once and now lacks parts."""
    newest = max((one.key for one in place.complete), default=None)
    return any(one.committed and (newest is None or one.key > newest) for one in place.incomplete)


def problems(place: Place, *, running: bool = False) -> tuple[list[str], bool]:
    """Return sentences on everything that is wrong with a place but lost slots, and whether something is lost.

    If ranks are ``running``, incomplete checkpoints are not mentioned: every save makes one for a while.
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
    """Return a note on slots with newer checkpoints than the record names, if any; and whether the record is outdated.

    A record is outdated if such a slot is one that it names. Otherwise a save was killed just before it wrote its
    record, and nothing is damaged.
    """
    from pccheck_async.store import newer_in_words  # and torch
    from pccheck_async.upkeep import newer_in_slots

    found = newer_in_slots(place)
    notes = [f"NEWER: {newer_in_words(found, place.path)}."] if found else []
    return notes, any(one.is_named for one in found)


# -- which rank has which box


def placement(leaf: ShardedLeaf) -> str:
    """Return a text on which ranks saved which boxes of a tensor; a short one if the tensor is divided regularly."""
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
    """Return a box as text in the notation of slices: "[0:4, 8:16]"."""
    return f"[{', '.join(f'{low}:{low + length}' for low, length in zip(*box, strict=True))}]"


def _numbers(numbers: list[int]) -> str:
    """Return numbers as text, in their order; consecutive ones become a range: "0-3, 7"."""
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
    """Return the seconds of each of a rank's :data:`STAGES` per durable checkpoint."""
    count = max(1, status.counts.get("durable", 0))
    return {stage: status.stage_seconds.get(stage, 0.0) / count for stage in STAGES}


def slowest(times: Mapping[int, Mapping[str, float]]) -> int | None:
    """Return the rank whose stages take longest in all; None for fewer than two ranks."""
    return max(times, key=lambda rank: sum(times[rank].values())) if len(times) > 1 else None


def describe_slowest(times: Mapping[int, Mapping[str, float]]) -> str:
    """Return a sentence that compares the slowest rank with the median of all ranks; "" for fewer than two ranks."""
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
    """Return a table of the ranks' stage times per checkpoint, the longest of each stage marked, with bars of sums."""
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
