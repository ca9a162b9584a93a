"""The order of an epoch: a function of size, seed and epoch alone."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["KeyedPermutation", "Order", "Shuffle", "mix"]

Shuffle = bool | Literal["keyed"]
Positions = npt.NDArray[np.uint64]


def mix(*parts: int | str) -> int:
    """Return 64 bits that depend on every part: neighbouring seeds and epochs have nothing in common."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Order:
    """The samples of every epoch in order, one slice at a time.

    Args:
        size: Samples in an epoch.
        seed: What the orders are drawn from, together with the epoch.
        shuffle: True draws ``torch.randperm``: 8 bytes per sample are kept, and the first slice of an epoch takes time
            in proportion to ``size``. "keyed" keeps nothing and takes that time for no slice. False counts.
    """

    def __init__(self, size: int, seed: int, shuffle: Shuffle) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._epoch = -1
        self._drawn: torch.Tensor | KeyedPermutation

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the samples at the positions from ``start`` up to ``stop`` of an epoch."""
        if self.shuffle is False:
            return list(range(start, stop))
        if self._epoch != epoch:
            self._drawn, self._epoch = self._draw(epoch), epoch
        if isinstance(self._drawn, KeyedPermutation):
            samples: list[int] = self._drawn(np.arange(start, stop, dtype=np.uint64)).tolist()
            return samples
        drawn: list[int] = self._drawn[start:stop].tolist()
        return drawn

    def _draw(self, epoch: int) -> torch.Tensor | KeyedPermutation:
        key = mix("order", self.seed, epoch)
        if self.shuffle == "keyed":
            return KeyedPermutation(self.size, key)
        generator = torch.Generator("cpu").manual_seed(key)
        return torch.randperm(self.size, generator=generator, device="cpu")  # whatever the default device


class KeyedPermutation:
    """A permutation of ``range(size)`` in constant memory, each place computed when it is asked for.

    A Feistel network on pairs of digits, one below ``a``, one below ``b``, where ``a b`` is just large enough; what
    falls beyond ``size`` is permuted again (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002). It shuffles well and keeps no secrets.
    """

    ROUNDS = 8

    def __init__(self, size: int, key: int) -> None:
        self.size = np.uint64(size)
        a = math.isqrt(size - 1) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-size // a))
        self._keys = [
            (np.uint64(mix(key, number, "left")), np.uint64(mix(key, number, "right"))) for number in range(self.ROUNDS)
        ]

    def __call__(self, positions: Positions) -> Positions:
        """Return what stands at these positions, all of them below ``size``."""
        found = self._permute(positions)
        while len(beyond := np.flatnonzero(found >= self.size)):
            found[beyond] = self._permute(found[beyond])
        return found

    def _permute(self, positions: Positions) -> Positions:
        left, right = np.divmod(positions, self._b)
        for left_key, right_key in self._keys:
            # What is added stays below 2**63, so that no sum wraps before it is reduced.
            left = (left + _scramble(right ^ left_key)) % self._a
            right = (right + _scramble(left ^ right_key)) % self._b
        return left * self._b + right


def _scramble(numbers: Positions) -> Positions:
    """Return 63 bits that each depend on all bits of the number (the finaliser of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) >> np.uint64(1)
