"""The last finished step is saved when the scheduler asks the process to exit.

python examples/preemption.py [STEPS]    # is preempted in step 25 of its own (exit status 143); the second run resumes
"""

import signal
import sys

import torch
from torch import nn

from pccheck_async import RNGState, SyncCheckpointEngine

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 25

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer, "rng": RNGState()}

with SyncCheckpointEngine("checkpoints/preemption", interval=1000) as engine:
    engine.attach(optimizer)
    # SLURM: --signal=USR1@120 and engine.on_preemption(signal.SIGUSR1, deadline=100). Kubernetes: SIGTERM, and
    # terminationGracePeriodSeconds greater than the deadline.
    engine.on_preemption(signal.SIGTERM, deadline=25.0)
    restored = engine.restore(state)
    first = restored.step + 1 if restored else 0
    print(f"resumed after step {restored.step}" if restored else "starting from scratch")
    for step in range(first, 1_000_000):
        with engine.step(state, step):
            inputs = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == first + STEPS - 1:
                print(f"preempted in step {step}, loss {loss.item():.4f}", flush=True)
                signal.raise_signal(signal.SIGTERM)  # the scheduler's part; leave it out
        # Nothing after this block runs for a preempted step: it is saved, durable, and the process exits with 143.
