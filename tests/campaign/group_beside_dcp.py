"""Checkpoints of ranks beside torch's own: ``python -m tests.campaign.group_beside_dcp FOLDER [--size 64MiB] ...``.

Ranks (gloo, loopback, one torch thread each) hold the same module and AdamW state of about ``--size`` bytes, as under
DDP, and save it by three methods: this engine with ``group=dist.group.WORLD`` and else its defaults; ``dcp.save``; and
``dcp.async_save`` by a thread, with a stager that blocks and keeps its memory, as ``pccheck bench`` has it. DCP writes
by ``FileSystemWriter`` with its defaults: ``sync_files=True``, one writer thread per rank. Each method saves in two
arrangements. "replicated": every rank has the same names, and each tensor is written once, shared out among the ranks;
the engine is told so (``replicated=["*"]``). "private": names begin with the rank; every rank writes all of its own.

Methods and arrangements take turns, in an order drawn anew each round. Before each turn, and not timed, the last
checkpoint of DCP is removed, the page cache is written back, an optimizer step changes every tensor, and the ranks meet
at a barrier. Times are those of the slowest rank, from the call until

- stall: the call returned, after which training may change the state,
- ended: the method says that the checkpoint is complete: the engine's handle, the return of ``dcp.save``, the future,
- durable: it would survive a power failure. The engine's has ended then. DCP (torch 2.13, read and traced) has called
  fsync on every rank's file after its last byte, but on ``.metadata.tmp`` while what it wrote may still be in Python's
  buffer, and on no folder: neither the files' names nor the rename to ``.metadata`` are durable. Rank 0 flushes those.

Bytes written are the kernel's count (``/proc/self/io``) over all ranks: none in a filesystem in memory. Ratios are to
the engine in the same arrangement and round: above 1, the engine is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from pccheck_async import Group, StorageOptions, SyncCheckpointEngine
from pccheck_async.bench.machine import survey
from pccheck_async.bench.methods import flush_dcp
from pccheck_async.bench.report import quartiles
from pccheck_async.cli.output import parse_size
from tests.campaign.stall import Trainer
from tests.support.commanded_ranks import commanded_ranks

METHODS = ("engine", "dcp.save", "dcp.async_save")
ARRANGEMENTS = ("replicated", "private")
TURNS = [(arrangement, method) for arrangement in ARRANGEMENTS for method in METHODS]
_WARM_ROUNDS = 3
"""Until the engine has written each of its slots once."""
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class Command(NamedTuple):
    """What all ranks save next."""

    arrangement: str
    method: str
    step: int
    target: Path
    """Of DCP; not there yet."""


class Sample(NamedTuple):
    """One save: seconds since the call, and bytes."""

    stall: float
    ended: float
    durable: float
    written: int


@contextmanager
def serve(folder: Path, world: int, nbytes: int, rank: int) -> Iterator[Callable[[Command], Sample]]:
    """One rank, as :func:`commanded_ranks` wants it."""
    warnings.filterwarnings("ignore", module=r"torch\b")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.manual_seed(0)  # replicas
    trainer = Trainer(nbytes)
    trainer.compute()
    trainer.optimizer.step()
    replica = trainer.state()
    states: dict[str, dict[str, Any]] = {"replicated": replica, "private": {f"rank{rank}": replica}}
    blocking = StagingOptions(False, False, False, False)
    with ExitStack() as stack:
        engines, stagers = {}, {}
        for arrangement in ARRANGEMENTS:
            alike = ["*"] if arrangement == "replicated" else []
            engine = SyncCheckpointEngine(
                folder / arrangement,
                group=Group.of(dist.group.WORLD, replicated=alike),
                storage=StorageOptions(skip_unchanged=False),
            )
            engines[arrangement] = stack.enter_context(engine)
            stagers[arrangement] = stack.enter_context(closing(DefaultStager(blocking)))

        def start(turn: Command) -> Callable[[], object]:
            state = states[turn.arrangement]
            if turn.method == "engine":
                return engines[turn.arrangement].checkpoint(state, step=turn.step).result
            writer = FileSystemWriter(turn.target)
            if turn.method == "dcp.save":
                save(state, storage_writer=writer)
                return lambda: None
            saving = async_save(state, storage_writer=writer, async_stager=stagers[turn.arrangement])
            assert isinstance(saving, Future)  # of the upload: staging is over
            return saving.result

        def obey(turn: Command) -> Sample:
            trainer.optimizer.step()
            dist.barrier()
            before, begun = _written(), time.perf_counter()
            wait = start(turn)
            stall = time.perf_counter() - begun
            wait()
            ended = durable = time.perf_counter() - begun
            if turn.method != "engine" and rank == 0:
                flush_dcp(turn.target)
                durable = time.perf_counter() - begun
            return Sample(stall, ended, durable, _written() - before)

        yield obey
    dist.destroy_process_group()


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def measure(folder: Path, world: int, nbytes: int, rounds: int) -> dict[tuple[str, str], list[Sample]]:
    """Return a sample per round of each arrangement and method, in a new folder."""
    folder.mkdir()
    found: dict[tuple[str, str], list[Sample]] = {turn: [] for turn in TURNS}
    with commanded_ranks(world, partial(serve, folder, world, nbytes)) as tell:
        for number in range(_WARM_ROUNDS + rounds):
            for turn in random.sample(TURNS, len(TURNS)):
                target = folder / "dcp" / str(number)
                os.sync()
                answers = tell(Command(*turn, number, target))
                if target.exists():
                    shutil.rmtree(target)
                if number >= _WARM_ROUNDS:
                    stalls, ends, durables, written = zip(*answers, strict=True)
                    found[turn].append(Sample(max(stalls), max(ends), max(durables), sum(written)))
    return found


def rows(world: int, found: dict[tuple[str, str], list[Sample]]) -> Iterator[dict[str, Any]]:
    """Give for each arrangement and method what was measured, summed up, and its ratios to the engine."""
    for (arrangement, method), samples in found.items():
        about = {"ranks": world, "state": arrangement, "method": method}
        yield about | figures(samples, found[arrangement, "engine"])


def figures(samples: Sequence[Any], beside: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return each figure of the samples, summed up, and its ratios to those of the engine; of bytes there are none."""
    found: dict[str, dict[str, Any]] = {}
    for figure in samples[0]._fields:
        values, engine = ([getattr(sample, figure) for sample in each] for each in (samples, beside))
        found[figure] = summary(values) | {"samples": values}
        if figure != "written":
            found[figure]["ratio"] = summary([one / other for one, other in zip(values, engine, strict=True)])
    return found


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and the quartiles."""
    low, middle, high = quartiles(values)
    return {"median": middle, "quartiles": [low, high]}


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [f"{row['ranks']:>5}  {row['state']:10}  {row['method']:14}"]
    for figure in ("stall", "ended", "durable"):
        cells.append(f"{spread(row[figure], 1e3, 1):>22}")
        if figure != "ended":
            cells.append(f"{spread(row[figure]['ratio'], 1, 2):>19}")
    return "  ".join([*cells, f"{row['written']['median'] / (1 << 20):>7.1f}"])


def spread(of: dict[str, Any], unit: float, digits: int) -> str:
    """Return a cell of a table."""
    middle, low, high = (f"{value * unit:.{digits}f}" for value in (of["median"], *of["quartiles"]))
    return f"{middle} [{low}, {high}]"


def arguments(about: str | None, nbytes: int) -> argparse.Namespace:
    """Return the arguments of the command line; ``nbytes``: the size that is saved if none is given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=parse_size, default=nbytes)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--worlds", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments(__doc__, 64 << 20)
    place, table, load = survey(args.folder), list[dict[str, Any]](), os.getloadavg()[0]
    print(
        f"{args.size} bytes per rank, {args.rounds} rounds, {place.filesystem}, {place.machine}; load {load:.1f} before"
    )
    print("ranks  state       method                  stall, ms             x engine               ended, ms", end="")
    print("             durable, ms             x engine      MiB")
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        for world in args.worlds:
            for row in rows(world, measure(Path(work, str(world)), world, args.size, args.rounds)):
                print(line(row), flush=True)
                table.append(row)
    if args.json:
        what = {"bytes": args.size, "rounds": args.rounds, "place": asdict(place), "load": load, "rows": table}
        args.json.write_text(json.dumps(what, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
