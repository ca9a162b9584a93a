# SPDX-License-Identifier: Apache-2.0
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

    Put one into the app state (``{"rng": RNGState(), ...}``). CUDA generators are saved only if CUDA was used.
    Generators of your own (``numpy.random.default_rng()``, ``torch.Generator()``) are not among them: save each through
    an object with ``state_dict()`` and ``load_state_dict()``.
    """

    def __repr__(self) -> str:
        return "RNGState()"

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
        """Set all generators. Raises StateMismatchError, before setting any, if :meth:`check_state_dict` does."""
        self.check_state_dict(state_dict)
        python, cuda = state_dict["python"], state_dict["cuda"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    def check_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Raise StateMismatchError if this is no state of generators, or the number of CUDA devices differs."""
        if not isinstance(state_dict, Mapping) or not {"python", "numpy", "torch", "cuda"} <= state_dict.keys():
            raise StateMismatchError("this is not the state of an RNGState")
        saved, available = state_dict["cuda"], torch.cuda.device_count() if torch.cuda.is_available() else 0
        if saved is not None and len(saved) != available:
            raise StateMismatchError(
                f"generators of {len(saved)} CUDA devices were saved, and this process sees {available}"
            )


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
