"""The global random number generators as one Stateful object."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pccheck_async.errors import StateMismatchError


class RNGState:
    """The global generators of Python, numpy, torch on the CPU and torch on every CUDA device.

    Put one into the app state (``{"rng": RNGState(), ...}``). CUDA generators are saved only where CUDA was used.
    Generators of your own (``numpy.random.default_rng()``, ``torch.Generator()``) are not among them: save their state.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, as arrays and numbers."""
        version, words, gauss = random.getstate()
        return {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
            "numpy": dict(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if _cuda_devices() else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Set all generators. Raises StateMismatchError, before any is set, where numbers of CUDA devices differ."""
        cuda = state_dict["cuda"]
        trouble = self.mismatch(None if cuda is None else len(cuda))
        if trouble:
            raise StateMismatchError(mismatched=[trouble])
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    def mismatch(self, saved_devices: int | None) -> str:
        """Return why the generators of so many CUDA devices (None: CUDA was not used) do not fit; empty if they do."""
        available = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if saved_devices is None or saved_devices == available:
            return ""
        return f"cuda: generators of {saved_devices} CUDA devices were saved, and this process sees {available}"


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
