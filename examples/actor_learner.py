"""Actors and a learner on one event loop. While it trains, they gather with the weights from before the last update.

A process beside them evaluates the newest policy in the memory that the learner saved it into, without a copy.

python examples/actor_learner.py [UPDATES]    # makes 20 updates more; the second run resumes, and learns the same
"""

import asyncio
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import nn

from pccheck_async import CheckpointEngine, MemoryTier, open_checkpoint

FOLDER = "checkpoints/actor_learner"
UPDATES = int(sys.argv[1]) if len(sys.argv) > 1 else 20


class Actor:
    """Tries actions in an environment. It saves where its present fragment began: resumed, it gathers that again."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.began = self.random.bit_generator.state

    async def gather(self, policy: nn.Module) -> torch.Tensor:
        self.began = self.random.bit_generator.state
        await asyncio.sleep(random.uniform(0, 0.002))  # the environment's time: nothing depends on it
        places, noise = torch.from_numpy(self.random.normal(size=(32, 5))).float().split([4, 1], 1)
        actions = policy(places).detach() + noise
        return torch.cat([places, actions, -((actions - places.sum(1, keepdim=True)) ** 2)], 1)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = self.began = state["began"]


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, fragments: torch.Tensor) -> float:
    places, actions, rewards = fragments.split([4, 1, 1], 1)
    optimizer.zero_grad()
    ((actions - policy(places)) ** 2 * (rewards - rewards.mean())).mean().backward()
    optimizer.step()
    return float(rewards.mean())


def evaluate() -> str:
    """Return a score of the newest policy; called in another process."""
    with open_checkpoint(FOLDER, tier="memory") as newest:
        weight, bias = newest["policy.weight"], newest["policy.bias"]
        places = torch.randn(1000, 4)
        score = -(places @ weight.T + bias - places.sum(1, keepdim=True)).square().mean()
        return f"update {newest.info.step}: score {score:.4f}, evaluated from memory"


async def main() -> None:
    torch.manual_seed(0)
    policy, acting, actors = nn.Linear(4, 1), nn.Linear(4, 1), [Actor(seed) for seed in range(4)]
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    state = {"policy": policy, "acting": acting, "optimizer": optimizer, "actors": actors}
    async with CheckpointEngine(FOLDER, memory=MemoryTier(interval=1)) as engine:
        restored = await engine.restore(state)
        first = restored.step + 1 if restored else 0
        print(f"resumed after update {restored.step}" if restored else "starting from scratch")
        gathering = asyncio.gather(*(actor.gather(acting) for actor in actors))
        for update in range(first, first + UPDATES):
            fragments = torch.cat(await gathering)
            acting.load_state_dict(policy.state_dict())
            gathering = asyncio.gather(*(actor.gather(acting) for actor in actors))  # for the next update
            reward = await asyncio.to_thread(learn, policy, optimizer, fragments)
            await engine.checkpoint(state, step=update, metadata={"reward": reward})
        await gathering
        print(f"update {update}: mean reward {reward:.3f}")
        with ProcessPoolExecutor(1, get_context("spawn")) as evaluator:
            print(await asyncio.get_running_loop().run_in_executor(evaluator, evaluate))


if __name__ == "__main__":
    asyncio.run(main())
