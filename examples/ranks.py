"""Data-parallel training whose ranks save one checkpoint together. Kill any rank, start all again: they continue.

torchrun --nproc-per-node 2 examples/ranks.py [STEPS]    # trains 40 steps more; the second run resumes
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pccheck_async import RNGState, SyncCheckpointEngine

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:  # without torchrun it is the only rank
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
rank = dist.get_rank()
torch.manual_seed(rank)  # every rank draws its own batches
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer, "rng": RNGState()}

with SyncCheckpointEngine("checkpoints/ranks", group=dist.group.WORLD, interval=10) as engine:  # on every rank
    engine.attach(optimizer)
    restored = engine.restore(state)  # the same checkpoint on every rank, or the same error
    first = restored.step + 1 if restored else 0
    print(f"resumed after step {restored.step}" if restored else "starting from scratch")
    for step in range(first, first + STEPS):
        with engine.step(state, step):
            inputs = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank}, step {step}: loss {loss.item():.4f}")
if rank == 0:
    print(f"saved by all ranks: {engine.latest}")  # leaving the block saved the last step
dist.destroy_process_group()
