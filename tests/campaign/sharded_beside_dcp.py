"""Sharded checkpoints beside torch's own: ``python -m tests.campaign.sharded_beside_dcp FOLDER [--size 1GiB] ...``.

Ranks (gloo, loopback, one torch thread each) train a model under FSDP2 with AdamW, about ``--size`` bytes in all. They
save it by this engine, by ``dcp.save`` and by ``dcp.async_save``, all with the settings and in the way that
:mod:`tests.campaign.group_beside_dcp` describes, where the columns are explained, too; "cpu" is the seconds that all
ranks' threads computed until the checkpoint was durable. Then as many ranks, and half as many, load the last one of
each, by ``engine.restore`` and by ``dcp.load``, in turns: "cold" after the files left the page cache, which the engine
does not use, "cached" right after they were read. Times are those of the slowest rank; ratios are to the engine in the
same round: above 1, the engine is faster.
"""

from __future__ import annotations

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
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard

from pccheck_async import StorageOptions, SyncCheckpointEngine
from pccheck_async.bench.machine import survey
from pccheck_async.bench.methods import flush_dcp
from tests.campaign.group_beside_dcp import arguments, figures, spread
from tests.campaign.stall import Trainer
from tests.support.commanded_ranks import commanded_ranks

SAVES = ("engine", "dcp.save", "dcp.async_save")
LOADS = ("engine", "dcp.load")
_WARM_ROUNDS = 3
"""Until the engine has written each of its slots once."""
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class Command(NamedTuple):
    """What all ranks do next."""

    method: str
    step: int
    target: Path
    """Of DCP; not there yet where it is saved to."""


class Sample(NamedTuple):
    """One save or load: seconds since the call (``cpu``: seconds of the processors)."""

    stall: float
    durable: float
    cpu: float


@contextmanager
def serve(folder: Path, world: int, nbytes: int, rank: int) -> Iterator[Callable[[Command], Sample]]:
    """One rank, as :func:`commanded_ranks` wants it."""
    warnings.filterwarnings("ignore", module=r"torch\b")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    torch.manual_seed(0)
    trainer = Trainer(nbytes)
    for layer in trainer.model:
        fully_shard(layer)
    fully_shard(trainer.model)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    trainer.compute()
    optimizer.step()
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def of_dcp() -> dict[str, Any]:
        return {"model": trainer.model.state_dict(), "optimizer": optimizer.state_dict()}

    with (
        closing(stager),
        SyncCheckpointEngine(
            folder / "run", group=dist.group.WORLD, storage=StorageOptions(skip_unchanged=False)
        ) as engine,
    ):
        state: dict[str, Any] = {"model": trainer.model, "optimizer": optimizer}

        def start(turn: Command) -> Callable[[], object]:
            if turn.method == "engine":
                return engine.checkpoint(state, step=turn.step).result
            if turn.method == "dcp.save":
                save(of_dcp(), storage_writer=FileSystemWriter(turn.target))
                return lambda: None
            saving = async_save(of_dcp(), storage_writer=FileSystemWriter(turn.target), async_stager=stager)
            assert isinstance(saving, Future)  # of the upload: staging is over
            return saving.result

        def obey(turn: Command) -> Sample:
            if turn.method in SAVES and turn.step >= 0:
                optimizer.step()
            dist.barrier()
            computed, begun = time.process_time(), time.perf_counter()
            if turn.step >= 0:
                wait = start(turn)
                stall = time.perf_counter() - begun
                wait()
                if turn.method != "engine" and rank == 0:
                    flush_dcp(turn.target)
            elif turn.method == "engine":
                assert engine.restore(state) is not None
                stall = time.perf_counter() - begun
            else:
                load(of_dcp(), storage_reader=FileSystemReader(turn.target))
                stall = time.perf_counter() - begun
            return Sample(stall, time.perf_counter() - begun, time.process_time() - computed)

        yield obey
    dist.destroy_process_group()


def _slowest(answers: Sequence[Sample]) -> Sample:
    stalls, ends, computed = zip(*answers, strict=True)
    return Sample(max(stalls), max(ends), sum(computed))


def saves(folder: Path, world: int, nbytes: int, rounds: int) -> dict[str, list[Sample]]:
    """Return a sample per round of each method; the last checkpoints stay."""
    found: dict[str, list[Sample]] = {method: [] for method in SAVES}
    with commanded_ranks(world, partial(serve, folder, world, nbytes)) as tell:
        for number in range(_WARM_ROUNDS + rounds):
            for method in random.sample(SAVES, len(SAVES)):
                shutil.rmtree(folder / method, ignore_errors=True)
                os.sync()
                sample = _slowest(tell(Command(method, number, folder / method)))
                if number >= _WARM_ROUNDS:
                    found[method].append(sample)
    return found


def loads(folder: Path, world: int, nbytes: int, rounds: int) -> dict[str, list[Sample]]:
    """Return a sample per round of each method, with and without the page cache."""
    turns = [(method, how) for method in LOADS for how in ("cold", "cached")]
    found: dict[str, list[Sample]] = {f"{method} {how}": [] for method, how in turns}
    with commanded_ranks(world, partial(serve, folder, world, nbytes)) as tell:
        for number in range(1 + rounds):
            for method in random.sample(LOADS, len(LOADS)):
                for how in ("cold", "cached"):
                    if how == "cold":
                        _forget(folder)
                    sample = _slowest(tell(Command(method, -1, folder / "dcp.save")))
                    if number:
                        found[f"{method} {how}"].append(sample)
    return found


def _forget(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def rows(what: str, found: dict[str, list[Sample]]) -> Iterator[dict[str, Any]]:
    """Give for each method what was measured, summed up, and its ratios to the engine."""
    for method, samples in found.items():
        beside = found[method.replace("dcp.load", "engine")] if what.startswith("load") else found["engine"]
        yield {"what": what, "method": method} | figures(samples, beside)


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [f"{row['what']:22} {row['method']:15}"]
    for figure in Sample._fields:
        cells += [f"{spread(row[figure], 1e3, 1):>26}", f"{spread(row[figure]['ratio'], 1, 2):>20}"]
    return "  ".join(cells)


def main() -> int:
    args = arguments(__doc__, 1 << 30)
    place, table, burden = survey(args.folder), list[dict[str, Any]](), os.getloadavg()[0]
    print(
        f"{args.size} bytes in all, {args.rounds} rounds, {place.filesystem}, {place.machine}; load {burden:.1f} before"
    )
    titles = (f"{title:>26}  {'x engine':>20}" for title in ("call, ms", "durable or loaded, ms", "cpu, ms"))
    print(f"{'':22} {'method':15}", *titles, sep="  ")
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        for world in args.worlds:
            folder = Path(work, str(world))
            folder.mkdir()
            table += rows(f"save, {world} ranks", saves(folder, world, args.size, args.rounds))
            for after in (world, world // 2):
                (folder / f"rendezvous{after}").unlink(missing_ok=True)
                what = f"load of {world}, {after} ranks"
                table += rows(what, loads(folder, after, args.size, args.rounds))
            for row in table[-(len(SAVES) + 4 * len(LOADS)) :]:
                print(line(row), flush=True)
            shutil.rmtree(folder)
    if args.json:
        told = {"bytes": args.size, "rounds": args.rounds, "place": asdict(place), "load": burden, "rows": table}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
