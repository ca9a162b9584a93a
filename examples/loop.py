"""A training loop that is saved while it runs. Kill it at any moment and start it again: it continues.

python examples/loop.py [STEPS]    # trains 40 steps more; the second run resumes
"""

import sys

import torch
from torch import nn

from pccheck_async import RNGState, SyncCheckpointEngine

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RNGState()}

with SyncCheckpointEngine("checkpoints/loop", keep_last=2, interval=10) as engine:
    engine.attach(optimizer)  # parameters are copied during the next step; only optimizer.step() waits
    restored = engine.restore(state)  # in place; None where nothing is saved yet
    first = restored.step + 1 if restored else 0
    print(f"resumed after step {restored.step}" if restored else "starting from scratch")
    for step in range(first, first + STEPS):
        with engine.step(state, step) as this:  # all that belongs to a step goes inside
            inputs = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            this.metadata["loss"] = loss.item()  # `pccheck ls checkpoints/loop` shows it
    print(f"step {step}: loss {loss.item():.4f}")
print(f"saved: {engine.latest}")  # leaving the block saved the last step
