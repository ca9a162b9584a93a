"""What a benchmark saves: a state, how it changes, and how long training takes to change it."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch

from examples.paper.lab.methods.base import State

__all__ = ["Workload", "state_bytes"]


class Workload(abc.ABC):
    """A training state and its steps, the same for every method: all follows from the seed."""

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    """Whether :meth:`compute` takes time, beside which a method can work."""
    optimizer: torch.optim.Optimizer
    """Changes every parameter in its ``step``."""

    @classmethod
    def why_not(cls) -> str | None:
        """Return why it cannot run here, None where it can."""
        return None

    @abc.abstractmethod
    def state(self) -> State:
        """Return the live state: a call that methods' users pay for too."""

    @abc.abstractmethod
    def twin(self) -> Workload:
        """Return one of the same structure and other values, to restore into."""

    @abc.abstractmethod
    def compute(self) -> None:
        """Run forward and backward: what comes before the optimizer's step."""

    def update(self) -> None:
        """Run the optimizer's step."""
        self.optimizer.step()

    def step(self) -> None:
        """Take one training step; every tensor that training changes is another one after it."""
        self.compute()
        self.update()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the state."""
        return state_bytes(self.state())


def state_bytes(state: Any) -> int:
    """Return the bytes of the tensors in a state, those of several names once."""
    return sum(dict(_tensors(state)).values())


def _tensors(value: Any) -> list[tuple[int, int]]:
    if isinstance(value, torch.Tensor):
        return [(value.data_ptr(), value.nbytes)]
    if isinstance(value, dict):
        return [each for item in value.values() for each in _tensors(item)]
    if isinstance(value, list | tuple):
        return [each for item in value for each in _tensors(item)]
    return []
