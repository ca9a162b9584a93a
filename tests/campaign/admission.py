"""What the training thread pays to have many small tensors saved, beyond its own ``state_dict()`` calls.

Run: ``python -m tests.campaign.admission [--folder DIR] [--tensors 10000] [--saves 15]``. Milliseconds per save of the
same structure, with the garbage collector on: *admission* is what the calling thread does itself, *captured* the whole
time until it may go on.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pccheck_async import SyncCheckpointEngine

WARM_UP = 2
"""Saves that do not count: the first one meets the structure, the second one finds every slot new."""


class Timed:
    """A module or an optimizer, and the seconds that its own ``state_dict()`` took."""

    def __init__(self, inner: nn.Module | torch.optim.Optimizer) -> None:
        self.inner = inner
        self.seconds = 0.0

    def state_dict(self) -> Any:
        start = time.perf_counter()
        try:
            return self.inner.state_dict()
        finally:
            self.seconds += time.perf_counter() - start

    def load_state_dict(self, state_dict: Any, /) -> None:
        self.inner.load_state_dict(state_dict)


def trained(parameters: int) -> dict[str, Any]:
    """A model of small layers with this many parameters, and AdamW after a step."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(parameters // 2)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": Timed(model), "optimizer": Timed(optimizer), "epoch": 1}


def plain(tensors: int) -> dict[str, Any]:
    """A dict of tensors, and nothing to ask for a ``state_dict()``."""
    return {f"t{number:05d}": torch.rand(16) for number in range(tensors)}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "model of N parameters, and AdamW": trained,
    "dict of N tensors": plain,
    "model of N/4 parameters, and AdamW": lambda tensors: trained(tensors // 4),
}


def p90(values: list[float]) -> float:
    return sorted(values)[-(-9 * len(values) // 10) - 1]


def measure(folder: str, state: dict[str, Any], saves: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of admission and until captured, each beyond ``state_dict()``, of every save that counts."""
    statefuls = [value for value in state.values() if isinstance(value, Timed)]
    admission, captured = [], []
    with SyncCheckpointEngine(folder) as engine:
        for step in range(WARM_UP + saves):
            before = engine.statistics().state_seconds
            asked = sum(each.seconds for each in statefuls)
            engine.checkpoint({**state, "step": step}, step=step).result()
            asked = sum(each.seconds for each in statefuls) - asked
            found = engine.statistics()
            admission.append((found.state_seconds - before - asked) * 1e3)
            captured.append((found.last_stall_seconds - asked) * 1e3)
    return admission[WARM_UP:], captured[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--saves", type=int, default=15)
    args = parser.parse_args()
    assert gc.isenabled()
    print(f"N = {args.tensors}, {args.saves} saves each, milliseconds beyond state_dict()")
    for name, build in CASES.items():
        state = build(args.tensors)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for what, values in zip(("admission", "captured"), measure(folder, state, args.saves), strict=True):
                median = statistics.median(values)
                print(f"{name}: {what} median {median:.1f}, p90 {p90(values):.1f}, max {max(values):.1f}")


if __name__ == "__main__":
    main()
