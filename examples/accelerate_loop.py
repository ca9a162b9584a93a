"""A loop of Hugging Face Accelerate on a store. Kill it at any moment and start it again: it continues.

python examples/accelerate_loop.py [STEPS]    # trains 20 micro-batches more, two epochs; the second run resumes
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

from pccheck_async import ResumableLoader, SyncCheckpointEngine
from pccheck_async.integrations.accelerate import AcceleratedLoader, training_state

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

torch.manual_seed(0)
inputs = torch.randn(80, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model, optimizer = accelerator.prepare(model, optimizer)
loader = AcceleratedLoader(ResumableLoader(dataset, batch_size=8, seed=3), accelerator)  # or one that prepare returned
state = training_state(accelerator, loader)

with SyncCheckpointEngine("checkpoints/accelerate_loop", interval=5) as engine:
    engine.attach(optimizer)  # its steps tell where windows of accumulation end
    restored = engine.restore(state)
    step = restored.step + 1 if restored else 0
    end = step + STEPS
    print(f"resumed after micro-batch {restored.step}" if restored else "starting from scratch")
    while step < end:
        for features, labels in state["loader"]:
            with engine.step(state, step) as this, accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if this.pending is not None:
                print(f"saved after micro-batch {step}")
            step += 1
    print(f"loss {loss.item():.4f}")
