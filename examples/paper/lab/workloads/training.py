"""Real training: a GPT on real text, and a convolutional net with BatchNorm on handwritten digits."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from examples.paper.lab.methods.base import State
from examples.paper.lab.workloads.base import Workload
from pccheck_async import RNGState

__all__ = ["GPT", "Digits"]


class _Training(Workload):
    """A model, AdamW and a schedule; the whole training state, random numbers and position in the data included."""

    def __init__(self, seed: int, model: nn.Module, lr: float, device: str) -> None:
        self.seed, self.device = seed, torch.device(device)
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.rng = RNGState()
        self.losses: list[float] = []

    @abstractmethod
    def data_state(self) -> State:
        """Return the place in the data."""

    @abstractmethod
    def loss(self) -> torch.Tensor:
        """Return the loss of the next batch."""

    def state(self) -> State:
        """Return all that a run needs to go on with the same bits."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": self.rng.state_dict(),
            "data": self.data_state(),
        }

    def compute(self) -> None:
        """Run forward and backward on the next batch."""
        loss = self.loss()
        self.losses.append(loss.item())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)

    def update(self) -> None:
        """Run the steps of the optimizer and of the schedule."""
        self.optimizer.step()
        self.scheduler.step()


class GPT(_Training):
    """The GPT of ``pccheck_async.cli.demo_trainer``, on the sources of Python's standard library.

    Args:
        width: Of the residual stream; parameters, and so the state, grow with its square.
        layers: Blocks.
        context: Bytes that it sees.
        batch: Windows of a step.
        seed: Everything follows from it.
        device: Where it trains.
    """

    name = "gpt"

    def __init__(
        self,
        width: int = 256,
        layers: int = 4,
        context: int = 64,
        batch: int = 4,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        example: Any = importlib.import_module("pccheck_async.cli.demo_trainer")
        self._arguments = width, layers, context, batch
        torch.manual_seed(seed)
        super().__init__(seed, example.GPT(context, layers, width, 4, 0.1), 1e-3, device)
        self.data = example.Windows(example.standard_library(), context, batch, seed)
        self.step()  # AdamW makes its state in the first one

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether the example is there: a checkout that is not installed has it elsewhere."""
        found = find_spec("examples.paper")
        return None if found else "examples.paper is not here: this runs in a clone of the repository"

    def data_state(self) -> State:
        """Return the position in the text."""
        state: State = self.data.state_dict()
        return state

    def loss(self) -> torch.Tensor:
        """Return the loss of the next windows."""
        x, y = self.data.next_batch()
        logits = self.model(x.to(self.device))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.to(self.device).flatten())

    def twin(self) -> GPT:
        """Return one of another seed."""
        return GPT(*self._arguments, seed=self.seed + 1, device=str(self.device))


class Digits(_Training):
    """A convolutional net with BatchNorm, whose statistics change in forward, on scikit-learn's handwritten digits.

    Args:
        width: Channels of the first layer.
        batch: Images of a step.
        seed: Everything follows from it.
        device: Where it trains.
    """

    name = "digits"

    def __init__(self, width: int = 64, batch: int = 64, seed: int = 0, device: str = "cpu") -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        self._arguments = width, batch
        torch.manual_seed(seed)
        super().__init__(seed, _convolutional(width), 1e-3, device)
        self.images = torch.tensor(found.images, dtype=torch.float32, device=self.device).unsqueeze(1) / 16
        self.labels = torch.tensor(found.target, device=self.device)
        self.batch, self.position = batch, 0
        self.step()

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether scikit-learn is installed."""
        return None if find_spec("sklearn") else "scikit-learn: not installed (pip install 'pccheck-async[bench]')"

    def data_state(self) -> State:
        """Return the position in the images."""
        return {"position": self.position}

    def loss(self) -> torch.Tensor:
        """Return the loss of the next images."""
        at = torch.arange(self.position, self.position + self.batch, device=self.device) % len(self.images)
        self.position = (self.position + self.batch) % len(self.images)
        return nn.functional.cross_entropy(self.model(self.images[at]), self.labels[at])

    def twin(self) -> Digits:
        """Return one of another seed."""
        return Digits(*self._arguments, seed=self.seed + 1, device=str(self.device))


def _convolutional(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width, 10)),
    )
