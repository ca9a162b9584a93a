"""What a checkpoint costs the training thread: engine.step and the guard, beside torch.save + fsync and DCP async_save.

Run: ``python -m tests.campaign.stall [--folder DIR] [--gib 1] [--rounds 20] [--per-round 10]``.

One process trains a module with AdamW (parameters and moments make up the state) and saves it by the methods in turn,
so that all of them meet the same machine. Ours is timed from outside: entering and leaving the bracket, and what passes
between two hooks of our own, one before and one after that of the guard. async_save is timed until the optimizer may
step: the call, and where staging is asynchronous the wait for it.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from examples.paper.lab.medians import median_interval
from pccheck_async import SyncCheckpointEngine

_WIDTH = 1024


class Trainer:
    """A stack of linear layers and AdamW: three times the parameters in bytes, all of it changed by every step."""

    def __init__(self, nbytes: int) -> None:
        width = min(_WIDTH, math.isqrt(nbytes // 48))  # four layers at least
        layers = nbytes // (12 * width * width)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(32, width)

    def compute(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(self.batch).square().mean())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Ours:
    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.trainer = trainer
        self.engine = SyncCheckpointEngine(folder, interval=1).open()
        self.times: list[float] = []
        trainer.optimizer.register_step_pre_hook(self._note)
        self.engine.attach(trainer.optimizer)
        trainer.optimizer.register_step_pre_hook(self._note)
        self.step = 0

    def _note(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """One step; how long the engine kept the thread."""
        self.times.clear()
        start = time.perf_counter()
        bracket = self.engine.step({"model": self.trainer.model, "optimizer": self.trainer.optimizer}, self.step)
        bracket.__enter__()
        entered = time.perf_counter()
        self.trainer.compute()
        self.trainer.optimizer.step()
        left = time.perf_counter()
        bracket.__exit__(None, None, None)
        self.step += 1
        return entered - start + self.times[1] - self.times[0] + time.perf_counter() - left


def torch_save(trainer: Trainer, path: Path) -> float:
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save(trainer.state(), file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


class Dcp:
    """``async_save`` with one of its stagers; how it was fastest where peers were compared: cached or shared memory."""

    def __init__(self, folder: Path, trainer: Trainer, kind: AsyncCheckpointerType, options: StagingOptions) -> None:
        self.folder, self.trainer, self.kind = folder, trainer, kind
        self.stager = DefaultStager(options)
        self.number = 0

    def seconds(self) -> float:
        self.number += 1
        target = self.folder / str(self.number)
        start = time.perf_counter()
        response: Any = async_save(
            self.trainer.state(),
            storage_writer=FileSystemWriter(target),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        staged, upload = getattr(response, "staging_completion", None), getattr(response, "upload_completion", response)
        if staged is not None:
            staged.result()
        seconds = time.perf_counter() - start
        upload.result()
        shutil.rmtree(target)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--per-round", type=int, default=10)
    args = parser.parse_args()
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    trainer = Trainer(int(args.gib * 2**30))
    trainer.compute()
    trainer.optimizer.step()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        ours = Ours(folder / "ours", trainer)
        peers: dict[str, Callable[[], float]] = {
            "torch.save + fsync": lambda: torch_save(trainer, folder / "torch.pt"),
            "DCP async_save, thread, cached stager": Dcp(
                folder / "dcp", trainer, AsyncCheckpointerType.THREAD,
                StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False,
                               use_non_blocking_copy=False),
            ).seconds,
            "DCP async_save, process, shared memory": Dcp(
                folder / "shm", trainer, AsyncCheckpointerType.PROCESS,
                StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
                               use_non_blocking_copy=False),
            ).seconds,
        }  # fmt: skip
        steps = []
        for turn in range(args.rounds + 1):
            for _ in range(args.per_round):
                start = time.perf_counter()
                seconds = ours.seconds()
                steps.append(time.perf_counter() - start)
                if turn:
                    found.setdefault("engine.step and guard", []).append(seconds)
            ours.engine.drain()
            for peer, save in peers.items():
                seconds = save()
                if turn:
                    found.setdefault(peer, []).append(seconds)
                trainer.compute()
                trainer.optimizer.step()
                gc.collect()
        print(f"a step: {statistics.median(steps):.3f} s; state {args.gib} GiB")
        print(ours.engine.statistics())
        ours.engine.close()
    for name, values in found.items():
        median, low, high = median_interval(values)
        p99 = sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]
        print(
            f"{name}: median {median * 1e3:.2f} ms [{low * 1e3:.2f}, {high * 1e3:.2f}], p99 {p99 * 1e3:.2f} ms, "
            f"most {max(values) * 1e3:.2f} ms, {len(values)} samples"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
