# SPDX-License-Identifier: Apache-2.0
"""A wrapper for a ResumableLoader in loops of Accelerate and in Hugging Face's Trainer, which support torch's loaders.

``prepare`` rebuilds torch's DataLoader: the new one divides the batches among the ranks, and fetches one batch ahead of
the loop to recognise the last one. A ResumableLoader divides batches itself, and recognises the last one without
fetching ahead, which would make its position wrong. So it is not passed through ``prepare``, but wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from pccheck_async.integrations.versions import require
from pccheck_async.training.data import Epoch, ResumableLoader

require("accelerate", "1.15")

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import DataLoaderStateMixin, IterableDatasetShard  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import send_to_device  # noqa: E402

__all__ = ["AcceleratedLoader", "sizes"]


def sizes(loader: Any) -> dict[str, int | None]:
    """Return the sizes on which the meaning of a position in batches depends; None for one that is unknown.

    ``"batch"``: samples in one batch of all ranks together. ``"samples"``: samples in the dataset.
    """
    if isinstance(loader, AcceleratedLoader):
        loader = loader.loader
    if isinstance(loader, ResumableLoader):
        return {"batch": loader.batch_size * loader.sampler.world_size, "samples": loader.sampler.size}
    found: dict[str, int | None] = {"batch": None, "samples": None}
    with suppress(AttributeError, TypeError):  # a batch sampler without a size, batch_size=None
        shard = loader.dataset
        ranks = shard.num_processes if isinstance(shard, IterableDatasetShard) and not shard.split_batches else 1
        found["batch"] = loader.total_batch_size * ranks
    with suppress(AttributeError, TypeError):  # an iterable dataset
        found["samples"] = loader.total_dataset_length
    return found


class AcceleratedLoader(DataLoaderStateMixin):
    """A :class:`~pccheck_async.ResumableLoader` with the interface of a prepared loader; put it into the state.

    Batches are moved to the accelerator's device, and ``accelerator.accumulate`` learns of the end of the data, so that
    the last, partial window of an epoch ends with a step. No sample is repeated to give all ranks equal batches, so
    ``gather_for_metrics`` drops none.

    A loader whose position was restored continues there by itself. ``skip_first_batches(loader, n)``, which the Trainer
    of Hugging Face calls, goes to the ``n``-th batch of the epoch without loading the batches before it. If the
    restored position is that batch, it changes nothing.

    Args:
        loader: The loader, not passed through ``prepare``.
        accelerator: The accelerator to whose device the batches are moved.
    """

    prefetch_factor = None  # of the DataLoader that skip_first_batches makes

    def __init__(self, loader: ResumableLoader, accelerator: Accelerator) -> None:
        self.loader = loader
        self.device = accelerator.device if accelerator.device_placement else None
        self.gradient_state = GradientState()
        self.batch_sampler = _Numbers(loader)
        self.dataset = _Numbered(self)
        self.generator = torch.Generator("cpu")  # else that DataLoader draws from the global one
        self._non_blocking = bool(accelerator.non_blocking)

    @property
    def epoch(self) -> int:
        """Number of the epoch underway, from 0."""
        return self.loader.epoch

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self.loader.batch_size

    @property
    def sampler(self) -> Any:
        """The sampler of the loader, for callers of its ``set_epoch``."""
        return self.loader.sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self._on_device(enumerate(self.loader)))

    def epochs(self, epochs: int, *, steps: int | None = None) -> Iterator[Epoch[Any]]:
        """Yield those of ``epochs`` epochs that are not done (see :meth:`~pccheck_async.ResumableLoader.epochs`)."""

        def begin(epoch: Epoch[Any]) -> Iterator[tuple[int, Any]]:
            return self._on_device(epoch.enumerate())

        for epoch in self.loader.epochs(epochs, steps=steps):
            yield Epoch(epoch.number, len(epoch), partial(begin, epoch))

    def _on_device(self, numbered: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        self.begin()
        self.remainder = 0
        try:
            for number, batch in numbered:
                self.end_of_dataloader = self.loader.at_end
                there = batch if self.device is None else send_to_device(batch, self.device, self._non_blocking)
                yield number, there
        finally:
            self.end()

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` a pass of ``epoch`` (see :meth:`~pccheck_async.ResumableSampler.set_epoch`)."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position (see :meth:`~pccheck_async.ResumableSampler.state_dict`)."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to a saved position (see :meth:`~pccheck_async.ResumableSampler.load_state_dict`)."""
        self.loader.load_state_dict(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Raise ValueError if it does not fit (see :meth:`~pccheck_async.ResumableSampler.check_state_dict`)."""
        self.loader.check_state_dict(state_dict)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch as it is."""
        return batch

    def continue_at(self, number: int) -> Iterator[Any]:
        """Move the position to batch ``number`` of the epoch; return an iterator from there on.

        Raises:
            ValueError: A part of the epoch was delivered already, and another batch is next.
        """
        state = self.loader.state_dict()
        step = state["batch_size"] * state["world_size"]
        if state["position"] not in (0, number * step):
            raise ValueError(
                f"skip_first_batches would continue at batch {number} of epoch {state['epoch']}, and the position of "
                f"the loader is at {state['position']} of its samples, {step} per step: skip what was trained on, "
                "or nothing where the position was restored"
            )
        self.loader.load_state_dict(state | {"position": number * step})
        return iter(self)


class _Numbers:
    """Batch sampler of batch numbers instead of indices, in which ``skip_first_batches`` can skip without loading."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self.batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[int]:
        self.batches = None
        yield from range(len(self))
        if self.batches is not None:
            next(self.batches, None)  # the epoch ends

    def set_epoch(self, epoch: int) -> None:
        """Call the loader's ``set_epoch``."""
        self._loader.set_epoch(epoch)


class _Numbered(Dataset[Any]):
    """Dataset of whole batches by number, for ``skip_first_batches``; ``len`` gives the samples of the real dataset."""

    def __init__(self, prepared: AcceleratedLoader) -> None:
        self._prepared = prepared

    def __len__(self) -> int:
        return self._prepared.loader.sampler.size

    def __getitems__(self, number: int) -> Any:
        numbers = self._prepared.batch_sampler
        if numbers.batches is None:
            numbers.batches = self._prepared.continue_at(number)
        return next(numbers.batches)
