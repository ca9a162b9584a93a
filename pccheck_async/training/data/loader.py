"""A DataLoader whose position is what the trainer got, not what its workers fetched ahead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from pccheck_async.training.data.order import Shuffle, mix
from pccheck_async.training.data.sampler import ResumableSampler

__all__ = ["ResumableLoader"]


class ResumableLoader:
    """``torch.utils.data.DataLoader`` with a position in the app state; resuming gives exactly the missing batches.

    Each ``for`` yields the rest of an epoch, the next one the next epoch; :meth:`forever` crosses epochs. Order, ranks,
    ``break`` and what happens to a live iterator: see :class:`ResumableSampler`. A batch counts from the moment the
    loop gets it, so save after the step that used it.

    Random augmentations come out the same after a resume, whatever ``num_workers`` is: Python's, numpy's and torch's
    global generators are seeded from (seed, epoch, index) before each sample is fetched, and ``collate_fn`` goes on
    from where the last sample of its batch left them. The state of a worker's generators would depend on what the
    worker fetched before, which is not saved. In the process of the trainer (``num_workers=0``) the generators are put
    back afterwards; loading never moves them, so ``RNGState`` stays in step. A dataset with ``__getitems__`` (torch's
    ``Subset``, too) is seeded per batch. Generators that the dataset owns (``default_rng``) and those of GPUs are not
    seeded.

    Args:
        dataset: Map-style: it has a length and ``[index]``.
        batch_size: Samples per batch and rank.
        seed: For the orders, and for what is random in the samples.
        shuffle: See :class:`ResumableSampler`.
        drop_last: See :class:`ResumableSampler`.
        num_workers: Worker processes; 0 loads in this one.
        rank: See :class:`ResumableSampler`.
        world_size: See :class:`ResumableSampler`.
        seed_samples: Seed before each sample (some 20 microseconds). False: in this process samples and ``collate_fn``
            draw from the global generators, and those of workers are seeded when they start, from (seed, epoch,
            worker), which no resume in mid-epoch can repeat. Right for datasets where nothing is random.
        dataloader_kwargs: Anything else that DataLoader takes (``collate_fn``, ``pin_memory``, ``prefetch_factor``,
            ``persistent_workers``...), except for what decides the order.

    Raises:
        TypeError: The dataset is iterable-style, or an argument is one that this class decides.
        ValueError: See :class:`ResumableSampler`; also ``in_order=False``.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = True,
        drop_last: bool = False,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        seed_samples: bool = True,
        **dataloader_kwargs: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                "an iterable-style dataset has no positions to go to; give it a __getitem__ and a __len__, or save one "
                "that keeps its own position with torchdata's StatefulDataLoader"
            )
        decided = {"sampler", "batch_sampler", "generator"} & dataloader_kwargs.keys()
        if decided:
            raise TypeError(f"{', '.join(sorted(decided))}: the loader decides this from seed, epoch and position")
        if not dataloader_kwargs.get("in_order", True):
            raise ValueError("in_order=False delivers batches in another order each time, which no position can resume")
        self.dataset = dataset
        self.sampler = ResumableSampler(
            dataset,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._generator = torch.Generator("cpu")  # the global one would be drawn from by every new iterator
        if seed_samples:
            collate = dataloader_kwargs.get("collate_fn") or default_collate
            dataset = _Seeded(dataset, self.sampler.seed, collate)
            dataloader_kwargs["collate_fn"] = _as_it_is
            dataloader_kwargs["worker_init_fn"] = _Introduce(dataloader_kwargs.get("worker_init_fn"))
        self._loader: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], dataset),  # a list will do
            batch_sampler=_Feed(self.sampler, seed_samples),
            num_workers=num_workers,
            generator=self._generator,
            **dataloader_kwargs,
        )

    @property
    def epoch(self) -> int:
        """The epoch underway, from 0; it ends when an iterator is exhausted."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on every rank."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.sampler.deliver(self._batches)

    def forever(self) -> Iterator[Any]:
        """Yield batches from the position on, epoch after epoch: for training that counts steps."""
        while True:
            yield from self

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless it is underway already: then its position stays."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position (see :meth:`ResumableSampler.state_dict`)."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to a saved position, or raise ValueError (see :meth:`ResumableSampler.load_state_dict`)."""
        self.sampler.load_state_dict(state_dict)

    def _batches(self) -> Iterator[Any]:
        self._generator.manual_seed(mix("workers", self.sampler.seed, self.sampler.epoch))
        return iter(self._loader)


class _Feed:
    """What the DataLoader draws from. It may run ahead: the position moves when a batch is delivered."""

    def __init__(self, sampler: ResumableSampler, with_epoch: bool) -> None:
        self._sampler, self._with_epoch = sampler, with_epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._sampler.epoch
        # Persistent workers outlive the epoch that they were started in, so the epoch travels with the indices.
        return ((epoch, indices) if self._with_epoch else indices for indices in self._sampler.rest())


class _Seeded(Dataset[Any]):
    """The dataset in batches that are collated, with the global generators seeded before each sample."""

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._seed, self._collate = dataset, seed, collate

    def __getitems__(self, batch: tuple[int, list[int]]) -> Any:
        if get_worker_info() is not None:
            return self._collate(self._samples(*batch))
        with _generators_kept():
            return self._collate(self._samples(*batch))

    def _samples(self, epoch: int, indices: list[int]) -> list[Any]:
        whole = getattr(self.dataset, "__getitems__", None)  # torch allows None for "has none"
        if whole:
            self._seed_generators(epoch, indices[0])
            samples: list[Any] = whole(indices)
            return samples
        samples = []
        for index in indices:
            self._seed_generators(epoch, index)
            samples.append(self.dataset[index])
        return samples

    def _seed_generators(self, epoch: int, index: int) -> None:
        # The same number for numpy's and torch's generators, which are of one kind, would make them draw the same.
        random.seed(mix("python", self._seed, epoch, index))
        np.random.seed(mix("numpy", self._seed, epoch, index) & 0xFFFFFFFF)  # an array would take ten times as long
        torch.default_generator.manual_seed(mix("torch", self._seed, epoch, index))  # not those of GPUs


def _as_it_is(batch: Any) -> Any:
    return batch


class _Introduce:
    """Lets code in a worker find the user's own dataset, not its wrapper, in ``get_worker_info()``."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, _Seeded)
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses plain assignments
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)


@contextmanager
def _generators_kept() -> Iterator[None]:
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
