"""Figure 8 of PCcheck: training throughput by checkpoint interval, beside none and beside the floor."""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.experiments.goodput import GOODPUT_NOTE, predict_goodput
from examples.paper.lab.experiments.race import Alone, Block, Race, chosen, plain_block
from examples.paper.lab.medians import median_interval
from examples.paper.lab.methods import METHODS
from examples.paper.lab.table import Row
from examples.paper.lab.workloads import GPT

__all__ = ["Throughput"]

_METHODS = (
    "pccheck",
    "pccheck overlapped",
    "torch.save + fsync",
    "CheckFreq",
    "GPM",
    "dcp.async_save thread",
    "dcp.async_save process",
    "torch_checkpointing",
    "torchsnapshot async",
    "Lightning AsyncCheckpointIO",
)


@dataclass(frozen=True, slots=True)
class _Size:
    """Attributes: arguments of the GPT, periods of a block by interval, steps of a plain block, saves alone a round."""

    arguments: tuple[int, int, int, int]
    periods: dict[int, int]
    plain_steps: int
    alone: int


_FULL = (
    # A state that is large against its step: at interval 1 the storage takes longer for it than training for a step.
    _Size((448, 8, 16, 1), {1: 8, 5: 3, 10: 2, 25: 1, 50: 1}, 10, 5),
    _Size((128, 4, 64, 8), {1: 16, 5: 4, 10: 2, 25: 1, 50: 1}, 16, 24),
)
_QUICK = (_Size((64, 2, 32, 2), {1: 4, 10: 1}, 8, 4),)
_FULL_ROUNDS = 3


@dataclass(slots=True)
class _Taken:
    """A block and what is beside it. Attributes: its round, step without checkpoints, the block, its floor."""

    number: int
    plain: float
    block: Block
    floor: float

    @property
    def throughput(self) -> float:
        """Of training, in parts of that without checkpoints."""
        return self.plain / self.block.seconds


@dataclass(slots=True)
class _Measured:
    """What was found about one size."""

    label: str
    alone: list[Alone] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    blocks: dict[tuple[str, int], list[_Taken]] = field(default_factory=dict)
    loads: dict[str, float] = field(default_factory=dict)


class Throughput(Experiment):
    """Blocks of steps by turns: none, then every method and interval in a new order each round, the same model.

    The floor is that of :meth:`Alone.floor`, with the step time of the plain blocks before and after a block; a block's
    throughput is that of its round's plain blocks times its ratio to those two. Timed is the steady state; the drain
    after a block has a figure of its own. Goodput under failures follows from both.
    """

    name: ClassVar[str] = "throughput"
    title: ClassVar[str] = "Training throughput by checkpoint interval"

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether the GPT is there."""
        return GPT.why_not()

    def run(self, settings: Settings) -> Findings:
        """Measure both sizes, and predict goodput."""
        names = chosen(settings.methods, _METHODS)
        found = Findings()
        with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=settings.folder) as folder:
            for number, size in enumerate(_QUICK if settings.quick else _FULL):
                measured = _measure(size, names, Path(folder) / str(number), settings, found)
                _report(measured, found)
        return found


def _measure(size: _Size, names: list[str], folder: Path, settings: Settings, found: Findings) -> _Measured:
    workload = GPT(*size.arguments)
    measured = _Measured(f"GPT, {workload.nbytes / 2**20:.3g} MiB")
    race = Race(names, workload, folder, lambda text: settings.progress(f"{measured.label}: {text}"))
    try:
        for number in range(settings.rounds(_FULL_ROUNDS)):
            alone = race.yardstick.alone(size.alone)
            measured.alone.append(alone)
            turns = [(name, interval) for name in race.running for interval in size.periods]
            random.Random(number).shuffle(turns)  # who comes after whom matters on a shared disk
            before = plain_block(workload, size.plain_steps)
            plain = [before]
            for name, interval in turns:
                if name not in race.running:
                    continue
                block = race.block(name, interval, size.periods[interval], before)
                after = plain_block(workload, size.plain_steps)
                if block is not None:
                    step = (before + after) / 2
                    taken = _Taken(number, step, block, alone.floor(step, interval))
                    measured.blocks.setdefault((name, interval), []).append(taken)
                    plain.append(after)
                before = after
            measured.plain.append(statistics.median(plain))
        race.finish()
        measured.loads = dict(race.loads)
    finally:
        race.close()
    found.notes += [f"{measured.label}: {note}" for note in race.notes()]
    # What was not restored bit for bit is no result.
    measured.blocks = {key: taken for key, taken in measured.blocks.items() if key[0] in measured.loads}
    return measured


def _report(measured: _Measured, found: Findings) -> None:
    if not measured.blocks:
        return
    rows = [
        Row(figure="8", workload=measured.label, method="none", x=0, repetition=number, value=1 / plain, unit="steps/s")
        for number, plain in enumerate(measured.plain)
    ]
    for name, interval in sorted(measured.blocks, key=lambda key: (list(METHODS).index(key[0]), key[1])):
        for taken in measured.blocks[name, interval]:
            # The machine drifts more than methods differ: a block counts by its ratio to the plain ones around it, and
            # that is drawn from the round's own plain throughput. So is one floor for all methods of a round.
            plain = measured.plain[taken.number]
            floor = measured.alone[taken.number].floor(plain, interval)
            where = {"workload": measured.label, "method": name, "x": interval, "repetition": taken.number}
            rows.append(
                Row(figure="8", value=taken.throughput / plain, unit="steps/s", floor=1 / floor, **where)  # type: ignore[arg-type]
            )
            found.rows.append(Row(figure="8-drain", value=taken.block.drain, unit="s", **where))  # type: ignore[arg-type]
    found.rows += rows
    durable = {
        key: statistics.median(taken.block.durable for taken in blocks) for key, blocks in measured.blocks.items()
    }
    found.rows += predict_goodput(rows, measured.loads, durable)
    found.notes += [*_notes(measured), f"{measured.label}: {GOODPUT_NOTE}"]


def _notes(measured: _Measured) -> list[str]:
    step = statistics.median(measured.plain)
    nbytes = measured.alone[0].nbytes
    seconds = statistics.median(alone.seconds for alone in measured.alone)
    processor = statistics.mean(alone.processor for alone in measured.alone)
    label = measured.label
    intervals = sorted({interval for _, interval in measured.blocks})
    shares = ", ".join(f"{seconds / (interval * step):.3g} every {interval}" for interval in intervals)
    notes = [
        f"{label}: without checkpoints {step * 1e3:.1f} ms per step; saves alone reach "
        f"{nbytes / seconds / 1e9:.2f} GB/s and take {processor / nbytes * 2**30:.3f} processor seconds per GiB.",
        f"{label}: m / (B f t), the storage's share of the time between two checkpoints, is {shares}.",
    ]
    for (name, interval), blocks in sorted(measured.blocks.items(), key=lambda item: (item[0][1], item[0][0])):
        slower = median_interval([taken.block.seconds / taken.plain for taken in blocks])
        floor = statistics.median(taken.floor / taken.plain for taken in blocks)
        over = median_interval([taken.block.seconds / taken.floor for taken in blocks])
        notes.append(
            f"{label}: {name} every {interval}: {slower[0]:.3f} [{slower[1]:.3f}, {slower[2]:.3f}] of none, "
            f"floor {floor:.3f}, {over[0]:.3f} [{over[1]:.3f}, {over[2]:.3f}] of the floor, {len(blocks)} blocks."
        )
    return notes
