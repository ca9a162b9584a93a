# SPDX-License-Identifier: Apache-2.0
"""The trainer of ``pccheck demo``: a byte-level GPT on the sources of Python's standard library.

The whole training state (model, AdamW, learning rate schedule, random numbers, position in the data) is one checkpoint,
so a run that was killed and resumed computes the same losses as one that was never interrupted, bit for bit::

    python -m pccheck_async.cli.demo_trainer --store run --loss-file loss.csv --crash-at 40   # dies by SIGKILL
    python -m pccheck_async.cli.demo_trainer --store run --loss-file loss.csv --resume        # goes on

Under torchrun it trains data-parallel, and all ranks save one checkpoint together; the last rank is the one that dies::

    torchrun --nproc-per-node 2 -m pccheck_async.cli.demo_trainer --store run --loss-file loss.csv --device cpu
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import struct
import sys
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pccheck_async import CheckpointEngine, CheckpointError, RNGState, list_checkpoints


class GPT(nn.Module):
    """A transformer decoder over bytes whose output layer shares its weights with the input embedding."""

    def __init__(self, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes (batch, length) to logits of the next byte (batch, length, 256)."""
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(hidden, future, is_causal=True)))
        return logits


class Windows:
    """Batches of text windows, each window once per epoch; the position is saved as epoch and number of windows.

    The order of an epoch is a function of seed and epoch, so resuming replays nothing.
    """

    def __init__(self, text: bytes, context: int, batch: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context, self.batch, self.seed = context, batch, seed
        self.identity = f"crc32 {zlib.crc32(text):08x}, {len(text)} bytes, windows of {context}, batches of {batch}"
        self._enter(epoch=0, position=0)

    def _enter(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        self.order = torch.randperm((len(self.text) - 1) // self.context, generator=shuffle)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each of shape (batch, context); targets are the inputs shifted by one byte."""
        if self.position + self.batch > len(self.order):
            self._enter(self.epoch + 1, 0)
        starts = self.order[self.position : self.position + self.batch] * self.context
        self.position += self.batch
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the identity of the data that it is valid for."""
        return {"data": self.identity, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises ValueError if it belongs to other data."""
        if state["data"] != self.identity:
            raise ValueError(f"the checkpoint was trained on other data ({state['data']}) than this ({self.identity})")
        self.seed = state["seed"]
        self._enter(state["epoch"], state["position"])


class LossFile:
    """A CSV file of step, loss and the loss's float32 bits; keeps rows of an earlier run up to ``last_step``."""

    def __init__(self, path: Path | None, last_step: int) -> None:
        self.path = path
        if path is not None:
            lines = path.read_text().splitlines()[1:] if last_step and path.exists() else []
            kept = [f"{line}\n" for line in lines if line.count(",") == 2 and int(line.split(",")[0]) <= last_step]
            path.write_text("step,loss,bits\n" + "".join(kept))

    def add(self, step: int, loss: float) -> None:
        """Append one row."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{step},{loss:.6f},{struct.pack('>f', loss).hex()}\n")


def standard_library() -> bytes:
    """Return the sources of Python's standard library (its top folder), in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        sys.exit(f"no Python sources in {folder}: this Python comes without the text that the example trains on")
    return text


def make_deterministic(seed: int, threads: int) -> None:
    """Make every run with the same seed compute the same bits on the same machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)  # the order of summation depends on it
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def learning_rate(steps: int) -> Callable[[int], float]:
    """Return a function from the step to the factor of the learning rate: linear warm-up, then cosine to a tenth."""
    warmup = max(1, steps // 10)
    return lambda step: min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


async def train(args: argparse.Namespace) -> None:
    """Train and save every ``args.interval`` steps; resume, or die at ``args.crash_at``, if requested."""
    parallel = dist.is_available() and dist.is_torchelastic_launched()
    if parallel:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    make_deterministic(args.seed + rank, args.threads)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    data = Windows(standard_library(), args.context, args.batch * world, args.seed)
    model = GPT(args.context, args.layers, args.width, args.heads, args.dropout).to(device)
    # Without find_unused_parameters each process moves gradients to other places in their buckets after its first step,
    # and from three ranks on the rounding of a sum depends on its place: a resumed run would not have the same bits.
    trained = DistributedDataParallel(model, find_unused_parameters=True) if parallel else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(args.steps))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RNGState(), "data": data}

    async with CheckpointEngine(args.store, group=dist.group.WORLD if parallel else None, max_in_flight=2) as engine:
        restored = await engine.restore(state) if args.resume else None
        last_step = restored.step if restored else 0
        say(f"resumed from step {last_step}" if restored else "starting from scratch")
        file = args.loss_file
        losses = LossFile(file.with_stem(f"{file.stem}-rank{rank}") if file and parallel else file, last_step)

        for step in range(last_step + 1, args.steps + 1):
            x, y = (part[rank::world] for part in data.next_batch())
            logits = trained(x.to(device))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            losses.add(step, loss.item())

            if step % args.interval == 0 or step in (args.crash_at, args.steps):
                say(f"step {step}: loss {loss.item():.4f}, saving")
                if step == args.crash_at and parallel:
                    dist.barrier()  # no rank is ended before it has written its loss
                await engine.checkpoint(state, step=step, metadata={"loss": loss.item()})
                # The state is captured and is being written in the background: training may go on.
                if step == args.crash_at and rank == world - 1:
                    print(f"rank {rank} dies in the save of step {step}", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the save, with no chance to clean up
    say(f"done: {engine.latest}")
    if parallel:
        dist.destroy_process_group()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint where there is one")
    parser.add_argument("--crash-at", type=int, metavar="STEP", help="die by SIGKILL in the middle of the save of STEP")
    parser.add_argument(
        "--loss-file", type=Path, help="CSV to write: step, loss, raw float32 bits; of several ranks, FILE-rankN.csv"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: CUDA where present (default)")
    sizes = {"steps": 60, "interval": 10, "seed": 1337, "threads": 2}  # the bits of a loss depend on the threads
    sizes |= {"layers": 4, "width": 256, "heads": 4, "context": 128, "batch": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    try:
        if not args.resume and list_checkpoints(args.store):
            parser.error(f"{args.store} holds checkpoints already: continue with --resume, or choose another --store")
        asyncio.run(train(args))
    except CheckpointError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
