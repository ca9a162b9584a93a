"""Training in asyncio code, and an evaluation that reads each checkpoint from storage beside it.

python examples/async_loop.py [STEPS]    # trains 40 steps more; the second run resumes
"""

import asyncio
import copy
import sys

import torch
from torch import nn

from pccheck_async import CheckpointEngine, PendingCheckpoint, RNGState, load

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
FOLDER = "checkpoints/async_loop"


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.randn(32, 16)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


async def evaluate(pending: PendingCheckpoint, model: nn.Module) -> None:
    """Wait until a checkpoint is durable, and evaluate the newest one as a restart would find it."""
    info = await pending
    model.load_state_dict((await load(FOLDER, keys=["model.*"]))["model"])
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    print(f"step {info.step} is durable; loss of the newest checkpoint {loss.item():.4f}")


async def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    evaluated = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": RNGState()}
    async with CheckpointEngine(FOLDER, interval=10) as engine, asyncio.TaskGroup() as group:
        engine.attach(optimizer)
        restored = await engine.restore(state)
        first = restored.step + 1 if restored else 0
        print(f"resumed after step {restored.step}" if restored else "starting from scratch")
        for step in range(first, first + STEPS):
            async with engine.step(state, step) as this:
                await asyncio.to_thread(train_one_step, model, optimizer)  # other coroutines run meanwhile
            if this.pending is not None:  # this step was captured; training continues while it is written
                group.create_task(evaluate(this.pending, evaluated))
    print(f"saved: {engine.latest}")


asyncio.run(main())
