"""Runs examples/ray_train.py, of whose workers one kills itself once: ``python -m tests.support.killed_ray STEPS``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from examples import ray_train

KILLED = Path("killed").absolute()
train = ray_train.train


def killed(config: dict[str, Any]) -> None:
    """Train; rank 1 dies after its tenth step, in the first life only."""
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 10 and dist.get_rank() == 1 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    train(config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ray_train.train = killed
    ray_train.main()
