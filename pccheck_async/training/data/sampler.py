"""A batch sampler whose position is saved with the state."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch.distributed
from torch.utils.data import Dataset, Sampler

from pccheck_async.training.data.order import Order, Shuffle

__all__ = ["ResumableSampler"]

T = TypeVar("T")


class ResumableSampler(Sampler[list[int]]):
    """Batches of indices, every sample once per epoch, resumable at any batch; put it into the app state.

    Iterating yields the rest of the current epoch; when that is exhausted, the next iteration is the next epoch. So
    after a ``break`` the next ``for`` goes on where the last one stopped, as a resumed process does: neither sees a
    sample twice. Once an epoch's last batch was delivered the next iteration is the next epoch, whether the one before
    was exhausted or left (``islice(sampler, len(sampler))``). Only a position after the last batch that was loaded
    yields nothing first and ends its epoch: the process that saved it may have died before what its loop does at the
    end of an epoch. One iterator lives at a time: another one, ``load_state_dict`` and ``set_epoch`` make its ``next``
    raise RuntimeError, because ending it would look like the end of the epoch.

    The order is a function of ``seed`` and epoch. Resuming skips to the position: no batch is replayed, no sample
    looked at.

    With several ranks, step i takes the global samples from ``i * batch_size * world_size`` on, and each rank a slice
    of them; all ranks take the same number of steps and no sample is padded. The last, smaller step is shared out as
    evenly as it goes. Fewer samples than ranks are no step of their own, because some rank would have an empty batch:
    they join the step before, and there the first ranks get one more than ``batch_size``.

    As ``DataLoader(batch_sampler=...)`` it counts the batches that the loader drew, and with worker processes that is
    ahead of the trainer: use :class:`ResumableLoader` there.

    Args:
        data: The number of samples, or a dataset that has a length.
        batch_size: Samples per batch and rank.
        seed: What the orders are drawn from.
        shuffle: True: ``torch.randperm``, which takes time and 8 bytes of memory per sample, once per epoch, and
            may differ between releases of torch. "keyed": computed batch by batch in constant memory, the same
            everywhere, for billions of samples. False: in order.
        drop_last: Leave out the samples of an epoch that do not fill a step of all ranks.
        rank: Of this process; taken from ``torch.distributed`` if it is initialised when this is made, else 0.
        world_size: Number of ranks; likewise, else 1.

    Raises:
        TypeError: ``data`` is neither a number nor has a length.
        ValueError: The arguments make no sense together, or leave an epoch without a step.
    """

    def __init__(
        self,
        data: int | Sized | Dataset[Any],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.size = _size(data)
        self.batch_size, self.seed = operator.index(batch_size), operator.index(seed)
        self.rank, self.world_size = _ranks(rank, world_size)
        if shuffle not in (True, False, "keyed"):
            raise ValueError(f"shuffle is {shuffle!r}; use True, False or 'keyed'")
        # What only equals a bool, such as 0 or one of numpy's, could not be told from it later, or saved.
        self.shuffle: Shuffle = "keyed" if shuffle == "keyed" else bool(shuffle)
        self.drop_last = bool(drop_last)
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it is at least 1")
        self._step = self.batch_size * self.world_size
        self._total = self.size - self.size % self._step if drop_last else self.size
        if self._total < self.world_size or self._total == 0:
            raise ValueError(
                f"{self.size} samples are no step for {self.world_size} ranks with batch_size={batch_size} and "
                f"drop_last={drop_last}; use more data, fewer ranks or smaller batches"
            )
        self._order = Order(self.size, self.seed, self.shuffle)
        self._epoch = self._position = 0
        self._delivered = False  # the last batch of this epoch, by this process
        self._iterators = 0

    @property
    def epoch(self) -> int:
        """The epoch underway, from 0; it ends when an iterator is exhausted."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that were delivered, over all ranks."""
        return self._position

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on every rank."""
        full, rest = divmod(self._total, self._step)
        return max(full + (rest >= self.world_size), 1)

    def __iter__(self) -> Iterator[list[int]]:
        return self.deliver(self.rest)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless it is underway already: then its position stays."""
        self._delivered = False  # whoever names an epoch gets no batch of another one
        if epoch != self._epoch:
            if epoch < 0:
                raise ValueError(f"epoch is {epoch}; the first one is 0")
            self._move(operator.index(epoch), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is valid for: plain values, the same on every rank."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to a saved position; the next iterator starts there.

        The world size may be another one if ``batch_size`` makes up for it, so that steps stay as they are.

        Raises:
            ValueError: The position is none of this sampler's, or was saved with other arguments; says which. Nothing
                has changed.
        """
        try:
            epoch, position = operator.index(state_dict["epoch"]), operator.index(state_dict["position"])
            batch_size, world_size = operator.index(state_dict["batch_size"]), operator.index(state_dict["world_size"])
            known = {name: state_dict[name] for name in ("size", "seed", "shuffle", "drop_last")}
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not the state of a ResumableSampler or ResumableLoader: {error!r}") from error
        differing = [
            f"{name}={saved!r} (now {getattr(self, name)!r})"
            for name, saved in known.items()
            if saved != getattr(self, name)
        ]
        if batch_size * world_size != self._step:
            differing.append(
                f"batch_size={batch_size} on {world_size} ranks (now {self.batch_size} on {self.world_size}; "
                f"the product must stay {batch_size * world_size})"
            )
        if differing:
            raise ValueError(
                f"the data position was saved with {', '.join(differing)}: resume with the same data and arguments, or "
                "leave the sampler out of the state to start an epoch anew"
            )
        if epoch < 0 or not (position == self._total or (0 <= position < self._total and position % self._step == 0)):
            raise ValueError(f"epoch {epoch}, position {position} is not the start of a step of {self._step} samples")
        if 0 < self._total - position < self.world_size:
            raise ValueError(
                f"the epoch has {self._total - position} samples left, fewer than the {self.world_size} ranks; "
                f"resume on {world_size} ranks, or from another checkpoint"
            )
        self._move(epoch, position)

    def rest(self) -> Iterator[list[int]]:
        """Yield what this rank still has to get of the epoch, without moving on (for loaders that fetch ahead)."""
        epoch, position = self._epoch, self._position
        while position < self._total:
            stop = self._stop(position)
            share, extra = divmod(stop - position, self.world_size)
            start = position + self.rank * share + min(self.rank, extra)
            yield self._order.indices(epoch, start, start + share + (self.rank < extra))
            position = stop

    def deliver(self, batches: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Hand out one batch per batch of :meth:`rest`, moving on with each (for loaders built on this sampler)."""
        if self._delivered:
            self._move(self._epoch + 1, 0)
        self._iterators += 1
        return self._deliver(self._iterators, batches)

    def _deliver(self, iterator: int, batches: Callable[[], Iterable[T]]) -> Iterator[T]:
        self._check(iterator)
        for batch in batches():
            self._position = self._stop(self._position)
            self._delivered = self._position == self._total
            yield batch
            self._check(iterator)
        self._move(self._epoch + 1, 0)

    def _check(self, iterator: int) -> None:
        if iterator != self._iterators:
            raise RuntimeError(
                "this iterator has ended: another one was started since, or load_state_dict or set_epoch moved the "
                "position; start a new for loop"
            )

    def _stop(self, position: int) -> int:
        """Where the step ends that begins at ``position``."""
        stop = position + self._step
        return stop if self._total - stop >= self.world_size else self._total

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._delivered = epoch, position, False
        self._iterators += 1


def _size(data: int | Sized | Dataset[Any]) -> int:
    if isinstance(data, Sized):
        return len(data)
    if hasattr(data, "__index__"):
        return operator.index(data)
    raise TypeError(f"a {type(data).__qualname__} has no length; give its class a __len__, or give the number")


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}; ranks count from 0")
    return operator.index(rank), operator.index(world_size)
