"""Actors and a learner on one event loop: coroutines balance poles, a policy learns, and a crash loses nothing.

Several actors wait for their (simulated) environments at the same time, and go on while the learner trains in a thread
and while ``await engine.checkpoint(...)`` captures. The run that was killed and resumed learns the same, bit for bit::

    python -m examples.paper.actor_learner --store run --loss-file loss.csv --crash-at 40   # dies by SIGKILL
    python -m examples.paper.actor_learner --store run --loss-file loss.csv --resume        # goes on

Actors run ahead: update ``n`` trains on experience gathered with the weights after update ``n - 2``. Which weights an
actor uses follows from that number, not from who was faster, and the learner takes the actors in turn. So a fragment of
experience is a function of the actor's state where it begins and of the weights. That is why the queues are not saved:
with the actors as they were where the last learned fragment ended, and two generations of weights, the resumed actors
gather again what was in the queues or under way.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pccheck_async import CheckpointEngine, CheckpointError, RNGState, list_checkpoints

sys.path.append(str(Path(__file__).parents[2]))  # where `examples` lies, when this runs as a file

from examples.paper.cart_pole import CartPole
from pccheck_async.cli.demo_trainer import LossFile, make_deterministic

AHEAD = 1
"""Updates that an actor's weights are behind those of the learner: its time to gather while the learner trains."""

DISCOUNT, TRACE, CLIP, EPOCHS, BATCH = 0.99, 0.95, 0.2, 8, 128
REWARD = 1 - DISCOUNT  # per step, so that values lie between 0 and 1
INTERRUPTED = 130
WAITING = random.Random()  # timing is free to differ from run to run: nothing follows from it


class Policy(nn.Module):
    """Logits of the two pushes, and the value of the place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(places)
        value: Tensor = self.critic(hidden)
        return self.actor(hidden), value.squeeze(-1)


@dataclass
class Fragment:
    """Some steps of one actor, gathered with one generation of weights."""

    places: list[list[float]] = field(default_factory=list)  # one more than pushes: where it led to
    pushes: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # as the gathering weights saw them, one more than pushes
    ends: list[float] = field(default_factory=list)  # value beyond an episode's end, nan inside one
    returns: list[int] = field(default_factory=list)  # of the episodes that ended
    after: dict[str, Any] = field(default_factory=dict)  # the actor's state where the fragment ends


class Generations:
    """The weights after the last updates, for actors to wait for and to gather with."""

    def __init__(self, policy: Policy) -> None:
        self.policies = {0: copy.deepcopy(policy)}
        self.arrived = asyncio.Condition()

    async def publish(self, update: int, policy: Policy) -> None:
        async with self.arrived:
            self.policies[update] = copy.deepcopy(policy)
            for old in [number for number in self.policies if number < update - AHEAD]:
                del self.policies[old]
            self.arrived.notify_all()

    async def wait_for(self, update: int) -> Policy:
        async with self.arrived:
            await self.arrived.wait_for(lambda: update in self.policies)
            return self.policies[update]

    def state_dict(self) -> dict[int, dict[str, Any]]:
        return {update: policy.state_dict() for update, policy in self.policies.items()}

    def load_state_dict(self, state: Mapping[int, dict[str, Any]]) -> None:
        policy = next(iter(self.policies.values()))
        self.policies = {}
        for update, weights in state.items():
            self.policies[update] = copy.deepcopy(policy)
            self.policies[update].load_state_dict(weights)


class Progress:
    """How far the learner is: its updates, the returns of the last episodes, and the actors where it took them."""

    def __init__(self, actors: list[CartPole]) -> None:
        self.update = 0
        self.returns: list[int] = []
        self.actors = [actor.state_dict() for actor in actors]

    def note(self, fragments: list[Fragment]) -> None:
        self.update += 1
        self.actors = [fragment.after for fragment in fragments]
        self.returns = [*self.returns, *itertools.chain(*(fragment.returns for fragment in fragments))][-50:]

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / max(1, len(self.returns))

    def state_dict(self) -> dict[str, Any]:
        return {"update": self.update, "returns": self.returns, "actors": self.actors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update, self.returns, self.actors = state["update"], state["returns"], state["actors"]


async def gather(actor: CartPole, policy: Policy, length: int, latency: float) -> Fragment:
    """Let the policy push for so many steps; each waits up to ``latency`` seconds for its environment."""
    fragment = Fragment()

    def look() -> tuple[float, float]:
        with torch.no_grad():
            logits, value = policy(torch.tensor(actor.place))
        fragment.places.append(actor.place)
        fragment.values.append(value.item())
        left, right = logits.log_softmax(-1).tolist()
        return left, right

    for _ in range(length):
        logs = look()
        push = int(actor.random.random() < np.exp(logs[1]))
        await asyncio.sleep(WAITING.uniform(0, latency))
        fell, over = actor.push(push == 1)
        fragment.pushes.append(push)
        fragment.log_probabilities.append(logs[push])
        fragment.ends.append(0.0 if fell else np.nan)
        if fell or over:
            if not fell:  # time was up, so there was more to come: as much as the policy thinks of this place
                with torch.no_grad():
                    fragment.ends[-1] = policy(torch.tensor(actor.place))[1].item()
            fragment.returns.append(actor.steps)
            actor.reset()
    look()
    fragment.after = actor.state_dict()
    return fragment


async def act(
    actor: CartPole, generations: Generations, queue: asyncio.Queue[Fragment], first: int, args: argparse.Namespace
) -> None:
    """Gather fragment after fragment, each with the weights that its number says."""
    for number in itertools.count(first):
        policy = await generations.wait_for(max(0, number - 1 - AHEAD))
        await queue.put(await gather(actor, policy, args.length, args.latency))


def advantages(fragment: Fragment) -> Tensor:
    """Return the generalised advantage of every push (Schulman et al., 2016), shape (pushes,)."""
    result, ahead = [0.0] * len(fragment.pushes), 0.0
    for i in reversed(range(len(result))):
        end = fragment.ends[i]
        inside = np.isnan(end)
        beyond = fragment.values[i + 1] if inside else end
        ahead = REWARD + DISCOUNT * beyond - fragment.values[i] + (DISCOUNT * TRACE * ahead if inside else 0.0)
        result[i] = ahead
    return torch.tensor(result)


def learn(policy: Policy, optimizer: torch.optim.Optimizer, fragments: list[Fragment]) -> float:
    """Improve the policy by clipped ratios (PPO; Schulman et al., 2017), since the experience is of older weights."""
    places = torch.cat([torch.tensor(fragment.places[:-1]) for fragment in fragments])
    pushes = torch.cat([torch.tensor(fragment.pushes) for fragment in fragments])
    before = torch.cat([torch.tensor(fragment.log_probabilities) for fragment in fragments])
    gained = torch.cat([advantages(fragment) for fragment in fragments])
    targets = gained + torch.cat([torch.tensor(fragment.values[:-1]) for fragment in fragments])
    gained = (gained - gained.mean()) / (gained.std() + 1e-6)
    for _ in range(max(1, EPOCHS * len(pushes) // BATCH)):
        some = torch.randint(len(pushes), (BATCH,))
        logits, values = policy(places[some])
        logs = logits.log_softmax(-1)
        ratio = (logs.gather(-1, pushes[some, None]).squeeze(-1) - before[some]).exp()
        gain = torch.minimum(ratio * gained[some], ratio.clamp(1 - CLIP, 1 + CLIP) * gained[some]).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        loss = -gain + nn.functional.mse_loss(values, targets[some]) - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    final: float = loss.item()
    return final


async def run(args: argparse.Namespace) -> int:
    """Gather and learn until done, or until SIGINT; return the exit status."""
    make_deterministic(args.seed, threads=1)
    actors = [CartPole(args.seed * 1_000_003 + number) for number in range(args.actors)]
    policy = Policy(args.width)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    generations, progress = Generations(policy), Progress(actors)
    state = {
        "policy": policy,
        "optimizer": optimizer,
        "generations": generations,
        "progress": progress,
        "rng": RNGState(),
    }
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)

    async with CheckpointEngine(args.store, max_in_flight=2) as engine:
        restored = await engine.restore(state) if args.resume else None
        print(f"resumed from update {restored.step}" if restored else "starting from scratch", flush=True)
        losses = LossFile(args.loss_file, progress.update)
        for actor, saved in zip(actors, progress.actors, strict=True):
            actor.load_state_dict(saved)
        queues = [asyncio.Queue[Fragment](maxsize=1) for _ in actors]

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(act(actor, generations, queue, progress.update + 1, args))
                for actor, queue in zip(actors, queues, strict=True)
            ]
            last = progress.update >= args.updates
            while not last:
                fragments = [await queue.get() for queue in queues]  # in turn, whoever was faster
                loss = await asyncio.to_thread(learn, policy, optimizer, fragments)
                progress.note(fragments)
                await generations.publish(progress.update, policy)
                update, mean = progress.update, progress.mean_return
                losses.add(update, loss)

                last = update >= args.updates or interrupted.is_set()
                if update % args.interval == 0 or update == args.crash_at or last:
                    print(f"update {update}: mean return {mean:.1f} of the last episodes, saving", flush=True)
                    # The actors go on meanwhile: what is saved of them is what their fragments brought along.
                    await engine.checkpoint(state, step=update, metadata={"mean_return": mean})
                    if update == args.crash_at:
                        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the save, with no chance to clean up
            for task in tasks:
                task.cancel()
    done = progress.update == args.updates
    print(f"{'done' if done else 'interrupted, continue with --resume'}: {engine.latest}", flush=True)
    return 0 if done else INTERRUPTED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--store", type=Path, required=True, help="folder of the checkpoints")
    add("--resume", action="store_true", help="continue from the newest checkpoint, from scratch where there is none")
    add("--updates", type=int, default=60, help="updates of the policy in all (default %(default)s)")
    add("--interval", type=int, default=5, help="updates between checkpoints (default %(default)s)")
    add("--crash-at", type=int, metavar="UPDATE", help="die by SIGKILL in the middle of the save of this update")
    add("--loss-file", type=Path, help="CSV to write: update, loss, raw float32 bits")
    add("--seed", type=int, default=4)
    add("--actors", type=int, default=8)
    add("--length", type=int, default=64, help="steps that an actor makes per update (default %(default)s)")
    add("--latency", type=float, default=0.002, help="most seconds that a step of an environment takes (%(default)s)")
    add("--width", type=int, default=64)
    add("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    status: int | str = 0
    try:
        if not args.resume and list_checkpoints(args.store):
            parser.error(f"{args.store} holds checkpoints already: continue with --resume, or choose another --store")
        status = asyncio.run(run(args))
    except* CheckpointError as group:  # the actors' task group puts an error of the learner into a group of its own
        status = "; ".join(f"{type(error).__name__}: {error}" for error in group.exceptions)
    sys.exit(status)


if __name__ == "__main__":
    main()
