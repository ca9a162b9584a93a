"""What saving costs: every method on states of several sizes, beside what the disk can do at all."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from examples.paper.lab import result as found
from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.measure import measure
from examples.paper.lab.methods import METHODS, find_method
from examples.paper.lab.table import Row
from examples.paper.lab.workloads import Sleeping
from pccheck_async.transfer import available_memory

__all__ = ["Costs"]

MIB, GIB = 1 << 20, 1 << 30
_SIZES = (GIB // 2, GIB, 2 * GIB)
_TENSORS = 100
_STEP_SECONDS = 0.25
_BASELINE = "pccheck"
_UNITS = {"durable": "s", "processor": "s/GiB", "stall": "s", "step_stall": "s", "restore": "s", "memory": "MiB"}
_SECONDS_PER_GIB, _SECONDS = 25.0, 8.0
"""A method's time on a state: the slow ones measure fewer rounds, and the whole is over in less than half an hour."""
_OWN_COPIES = 3
"""Of the state, in memory while methods are measured: itself, what is restored into, what the disk is measured with."""
_SHARE = 0.8
"""Of the memory and of the disk that are free."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a method takes at most, in bytes for each byte of the state."""

    memory: float = 1.5
    disk: float = 4.0

    @classmethod
    def of(cls, row: found.Row, nbytes: int) -> Need:
        """Return what a smaller state took; while it saves, a method may have the last checkpoint and a new one."""
        return cls(1.1 * row.memory_bytes / nbytes, 1.1 * row.stored_bytes / nbytes + 1)


class Costs(Experiment):
    """Time to durable, processor time, stall, restore and memory of every method."""

    name = "costs"
    title = "What does saving cost, with which method?"

    def __init__(self, sizes: Sequence[int] | None = None) -> None:
        self._sizes = sizes

    def run(self, settings: Settings) -> Findings:
        """Measure every size, each with groups of methods that fit into memory and on the disk together."""
        names = list(settings.methods or METHODS)
        for name in names:
            find_method(name)
        findings, needs = Findings(), {name: Need() for name in names}
        for nbytes in self._sizes or ((32 * MIB,) if settings.quick else _SIZES):
            groups, outside = grouped(
                needs, _free_memory(nbytes), _SHARE * shutil.disk_usage(settings.folder).free, nbytes
            )
            for name in outside:
                findings.notes.append(f"{_text(nbytes)}: {name} was not measured: too little memory or disk is free.")
            for number, group in enumerate(groups, 1):
                result = self._measure(group, nbytes, settings, f"{_text(nbytes)}, group {number} of {len(groups)}")
                # Rounds of one number were measured beside each other, and are compared.
                findings.rows += rows_of(result, first_round=(number - 1) * result.rounds)
                findings.notes += notes_of(result, first=number == 1)
                for row in result.rows:
                    if row.figures and row.memory_bytes:
                        needs[row.method] = Need.of(row, nbytes)
        findings.notes += _flags(names)
        return findings

    def _measure(self, group: Sequence[str], nbytes: int, settings: Settings, title: str) -> found.Result:
        return measure(
            group,
            Sleeping(nbytes, _TENSORS, 0.01 if settings.quick else _STEP_SECONDS),
            settings.folder,
            settings.rounds(9),
            baseline=_BASELINE,
            seconds=math.inf if settings.repetitions else _SECONDS + _SECONDS_PER_GIB * nbytes / GIB,
            limits=True,
            progress=lambda text: settings.progress(f"{title}: {text}"),
        )


def grouped(needs: dict[str, Need], memory: float, disk: float, nbytes: int) -> tuple[list[list[str]], list[str]]:
    """Return groups of methods that fit together, and those that do not fit at all.

    The baseline is in every group: what is measured minutes apart is not compared.

    Args:
        needs: By the method's name.
        memory: Bytes that there are for all methods of a group.
        disk: The same of the disk.
        nbytes: Of the state.
    """
    base = [_BASELINE] if _BASELINE in needs else []
    groups: list[list[str]] = []
    outside = [name for name in needs if not _fit(needs, {*base, name}, memory / nbytes, disk / nbytes)]
    for name in needs:
        if name in base or name in outside:
            continue
        for group in groups:
            if _fit(needs, {*group, name}, memory / nbytes, disk / nbytes):
                group.append(name)
                break
        else:
            groups.append([*base, name])
    return groups or [base] * bool(set(base) - set(outside)), outside


def _fit(needs: dict[str, Need], names: Iterable[str], memory: float, disk: float) -> bool:
    chosen = [needs[name] for name in names]
    return sum(need.memory for need in chosen) <= memory and sum(need.disk for need in chosen) <= disk


def rows_of(result: found.Result, first_round: int = 0) -> list[Row]:
    """Return the rows of a measurement, of which the first round is counted as number ``first_round``."""
    rows = []
    for row in result.rows:
        values = found.series(row, result.state_bytes) if row.verified else {}
        if values:
            values["memory"] = [row.memory_bytes / MIB]
        for figure, many in values.items():
            limits = result.limits.get(figure, [])
            rows += [
                Row(
                    figure=figure,
                    method=row.method,
                    x=result.state_bytes,
                    repetition=first_round + at,
                    value=value,
                    unit=_UNITS[figure],
                    floor=limits[at] if limits else None,
                )
                for at, value in enumerate(many)
            ]
    return rows


def notes_of(result: found.Result, *, first: bool) -> list[str]:
    """Return what a reader must know of a measurement."""
    size = _text(result.state_bytes)
    notes = []
    if first:
        ways = " and ".join(f"{name} by {way}" for name, way in result.limit_ways.items())
        limit = f"the disk itself is fastest with {ways}" if ways else "the disk was not measured: no direct I/O"
        notes.append(
            f"{size}: {_TENSORS} tensors of float32, every one changed before each save; {result.rounds} rounds; "
            f"{limit}."
        )
    for row in result.rows:
        if row.problem and (first or row.method != _BASELINE):
            notes.append(f"{size}: {row.method} {row.problem}")
        elif len(row.samples) < result.rounds or len(row.restores) < result.rounds:
            notes.append(
                f"{size}: {row.method} used up its time: {len(row.samples)} saves and {len(row.restores)} restores "
                f"in {result.rounds} rounds."
            )
        if row.dirty_bytes and (first or row.method != _BASELINE):
            share = row.dirty_bytes / result.state_bytes
            notes.append(f"{size}: {row.method} calls a checkpoint saved with {share:.0%} of it not on the device.")
    return notes


def _flags(names: Sequence[str]) -> list[str]:
    kinds = [find_method(name) for name in names]
    lacking = {
        "a power failure can take back or tear what it calls saved": [k.name for k in kinds if not k.durable],
        "a kill inside a save can leave no whole checkpoint": [k.name for k in kinds if not k.atomic],
        "not all of a training state comes back": [k.name for k in kinds if not k.resumable],
    }
    return [f"{what[0].upper()}{what[1:]}: {', '.join(which)}." for what, which in lacking.items() if which]


def _free_memory(nbytes: int) -> float:
    return _SHARE * available_memory() - _OWN_COPIES * nbytes


def _text(nbytes: int) -> str:
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= GIB // 2 else f"{nbytes / MIB:.3g} MiB"
