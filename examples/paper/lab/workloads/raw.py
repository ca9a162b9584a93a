"""Tensors of any number and size, and steps that take as long as they are told to."""

from __future__ import annotations

import time
from typing import Any

import torch

from examples.paper.lab.methods.base import State
from examples.paper.lab.workloads.base import Workload

__all__ = ["Raw", "Sleeping"]


class _Shift(torch.optim.Optimizer):
    """Adds one to every parameter: no gradients, no memory of its own, and every byte of a float's sum is exact."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add one."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1)


class Raw(Workload):
    """Equal float32 tensors, and no training between two changes.

    Args:
        nbytes: Bytes of all of them.
        tensors: How many they are.
        seed: Their values follow from it.
    """

    name = "raw"
    trains = False

    def __init__(self, nbytes: int = 1 << 29, tensors: int = 100, seed: int = 0) -> None:
        if tensors < 1 or nbytes < 4 * tensors:
            raise ValueError(f"{nbytes} bytes are not enough for {tensors} tensors of float32")
        self._arguments = nbytes, tensors, seed
        generator = torch.Generator().manual_seed(seed)
        parameters = [
            torch.nn.Parameter(torch.randint(0, 1 << 20, (nbytes // tensors // 4,), generator=generator).float())
            for _ in range(tensors)
        ]
        self._tensors = {f"t{number:05d}": each.detach() for number, each in enumerate(parameters)}
        self.optimizer = _Shift(parameters)

    def state(self) -> State:
        """Return the tensors by name."""
        return dict(self._tensors)

    def twin(self) -> Raw:
        """Return tensors of other values."""
        nbytes, tensors, seed = self._arguments
        return Raw(nbytes, tensors, seed + 1)

    def compute(self) -> None:
        """Do nothing."""


class Sleeping(Raw):
    """A trainer whose step takes so long, to the millisecond, and leaves the processor to the method.

    As a GPU's does that the host only waits for; whatever a method needs of the processor does not slow it.

    Args:
        nbytes: Bytes of the state.
        tensors: How many tensors it has.
        step_seconds: Time of forward and backward.
        seed: The values follow from it.
    """

    name = "sleeping"
    trains = True

    def __init__(self, nbytes: int = 1 << 29, tensors: int = 100, step_seconds: float = 0.25, seed: int = 0) -> None:
        super().__init__(nbytes, tensors, seed)
        self.step_seconds = step_seconds

    def twin(self) -> Sleeping:
        """Return one of other values."""
        nbytes, tensors, seed = self._arguments
        return Sleeping(nbytes, tensors, self.step_seconds, seed + 1)

    def compute(self) -> None:
        """Sleep until the step's time is over."""
        time.sleep(self.step_seconds)
