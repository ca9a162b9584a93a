"""The states in the recorded stores of tests/store/fixtures, and the program that wrote those stores.

The stores were written by commit 6f733b9 with ``python recorded_stores.py <folder>``: the oldest writer whose stores
every later version has to read. To record more, run this file with the package of the version that is to be kept.
"""

from __future__ import annotations

import random
import sys
import tarfile
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pccheck_async import Keep, RNGState, SyncCheckpointEngine, stores
from tests.support.settings import engine_settings


def values() -> dict[str, Any]:
    """One plain value of every type that can be saved."""
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**200)],
        "floats": [0.5, -0.0, float("inf"), float("nan"), 5e-324],
        "complex": 1 - 2j,
        "strings": ["", "plain", "żółw 🐢", "lone \ud800"],
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"ab"),
        "tuple": (1, (2, [3])),
        "sets": [{1, "a", None}, frozenset({(1, 2), b"k"}), set()],
        "dict": {1: "int", "1": "str", None: 0, (1, frozenset({2})): "tuple", 2.5: {}, "a.b": {"c": ()}},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("abracadabra"),
        "size": torch.Size((2, 3)),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "numpy": [np.float32(1.5), np.int64(-7), np.bool_(True), np.datetime64("2020-02-29", "D"), np.str_("é")],
        "numpy dtypes": [np.dtype(">i4"), np.dtype("M8[ns]")],
    }


def arrays() -> dict[str, Any]:
    """Tensors and arrays: dtypes, shapes, strides, and several that share memory."""
    byte_values = torch.arange(48, dtype=torch.uint8)
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn"
    tied = torch.arange(20, dtype=torch.int32)
    shared = np.arange(12, dtype=">i4").reshape(3, 4)
    return {
        "dtypes": {
            name: (byte_values % 2 if name == "bool" else byte_values.clone()).view(getattr(torch, name))
            for name in names.split()
        },
        "scalar": torch.tensor(7.25),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        "strided": torch.arange(16, dtype=torch.int16)[1::3],
        "expanded": torch.tensor([5.0]).expand(4),
        "gradient": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)),
        "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=False),
        "tied": [tied, tied, tied[4:], tied.view(4, 5)[:, 1]],
        "numpy": {
            name: np.frombuffer(bytes(range(48)), dtype).copy()
            for name, dtype in {"<f8": "<f8", ">i4": ">i4", "M8": "M8[s]", "S": "S6", "V": "V8"}.items()
        },
        "numpy text": np.array(["ab", "ç"], "<U3"),
        "numpy backwards": shared[::-1],
        "numpy shared": [shared, shared.T],
    }


def training() -> dict[str, Any]:
    """A model and AdamW after one step, with numbers that no arithmetic of torch's decides, and all generators."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            moments = [optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
            for factor, tensor in enumerate([parameter, *moments], start=number + 1):
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) * factor)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RNGState(), "epoch": 2}


def counted(step: int) -> dict[str, Any]:
    """The state of step ``step`` of a run of several checkpoints."""
    return {"step": step, "weights": torch.full((300,), float(step))}


class Recorded(NamedTuple):
    """A store to record: how it was opened, the state of each step in it, and what happened to it in the end."""

    options: Mapping[str, Any]
    steps: Mapping[int, Callable[[], dict[str, Any]]]
    pinned: int | None = None
    damaged: bool = False


def _counted(*steps: int) -> dict[int, Callable[[], dict[str, Any]]]:
    return {step: lambda step=step: counted(step) for step in steps}  # type: ignore[misc]


STORES = {
    "values": Recorded({}, {7: values}),
    "arrays": Recorded({"chunk_bytes": 4096}, {0: arrays}),
    "training": Recorded({}, {41: training}),
    "kept": Recorded({"keep_last": 2, "keep": Keep(every=10)}, _counted(5, 10, 20, 21, 22), pinned=5),
    "damaged": Recorded({"keep_last": 2}, _counted(1, 2), damaged=True),
    "superseded": Recorded({"keep_last": 1}, _counted(1, 2), damaged=True),
}


def write(recorded: Recorded, path: Path) -> None:
    """Write one of the stores."""
    with SyncCheckpointEngine(path, **engine_settings(io="python", **recorded.options)) as engine:
        for step, make in recorded.steps.items():
            engine.checkpoint(make(), step=step, metadata={"loss": step / 4}).result()
            if step == recorded.pinned:
                engine.pin(step=step)
    if recorded.damaged:  # a byte of the newest checkpoint's payload
        with (path / stores.describe(path).slot).open("r+b") as file:
            file.write(b"\xff")


def main(folder: Path) -> None:
    """Write every store as an archive."""
    for name, recorded in STORES.items():
        with tempfile.TemporaryDirectory() as scratch:
            write(recorded, Path(scratch, name))
            with tarfile.open(folder / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(Path(scratch, name), name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
