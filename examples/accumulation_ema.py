"""Gradient accumulation and averaged weights. A checkpoint that is due inside a window waits for the window's end.

python examples/accumulation_ema.py [MICRO_STEPS]    # trains 40 micro-batches more; the second run resumes
"""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pccheck_async import RNGState, SyncCheckpointEngine

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
WINDOW = 4  # micro-batches to one step of the optimizer

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "average": average, "optimizer": optimizer, "rng": RNGState()}

with SyncCheckpointEngine("checkpoints/accumulation_ema", interval=10) as engine:
    engine.attach(optimizer)  # its steps tell where windows end
    restored = engine.restore(state)
    first = restored.step + 1 if restored else 0  # the beginning of a window
    print(f"resumed after micro-batch {restored.step}" if restored else "starting from scratch")
    for micro in range(first, first + STEPS):
        with engine.step(state, micro) as this:
            inputs = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)) / WINDOW
            loss.backward()
            if micro % WINDOW == WINDOW - 1:
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)  # inside the block: belongs to this step's checkpoint
        if this.pending is not None:
            print(f"saved after micro-batch {micro}, step {micro // WINDOW} of the optimizer")

    # Weights that are swapped for an evaluation: through `.data` the swap waits for a capture that still reads them;
    # other code that changes parameters outside of a step calls `engine.wait_captured()` first.
    engine.wait_captured()
    print(f"loss {loss.item() * WINDOW:.4f}")
