"""Small datasets for the tests of data that resumes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from pccheck_async import ResumableLoader

SHUFFLES: list[Any] = [True, False, "keyed"]


class Numbers(Dataset[int]):
    """Counts how often it is asked."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return index


class Augmented(Dataset[torch.Tensor]):
    """Each sample with a number from every global generator."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [
            index,
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.normal(),
            torch.rand(()).item(),
        ]
        return torch.tensor(draws, dtype=torch.float64)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class AugmentedInBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def values(batches: Iterator[Any] | ResumableLoader) -> list[Any]:
    return [batch.tolist() for batch in batches]


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Scikit-learn's handwritten digits, shifted and dimmed at random."""

    def __init__(self) -> None:
        found = pytest.importorskip("sklearn.datasets").load_digits()
        self.images, self.labels = torch.tensor(found.images, dtype=torch.float32) / 16, found.target.tolist()

    def __len__(self) -> int:
        return 1440  # the other 357 are for testing

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].roll(random.randint(-1, 1), 1) * np.random.uniform(0.8, 1)
        return image + 0.1 * torch.rand(8, 8), self.labels[index]
