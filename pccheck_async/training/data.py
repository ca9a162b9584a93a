# SPDX-License-Identifier: Apache-2.0
"""A sampler and a loader whose position is a few numbers, saved in the app state and resumed without replay."""

from __future__ import annotations

import hashlib
import math
import operator
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from pccheck_async.state.values import with_article
from pccheck_async.training.epochs import Course, Epoch, EpochPlace, unnumbered

__all__ = ["Epoch", "KeyedPermutation", "Order", "ResumableLoader", "ResumableSampler", "mix"]

T = TypeVar("T")
Shuffle = bool | Literal["keyed"]
Positions = npt.NDArray[np.uint64]

_SAME = ("size", "seed", "shuffle", "drop_last")
"""The arguments that are saved with a position, and that must be the same when it is restored."""


def mix(*parts: int | str) -> int:
    """Return a 64-bit hash of all parts, so that neighbouring seeds and epochs give unrelated numbers."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Order:
    """The order of the samples in each epoch (see :class:`ResumableSampler` for the arguments)."""

    def __init__(self, size: int, seed: int, shuffle: Shuffle) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._epoch = -1
        self._drawn: KeyedPermutation | npt.NDArray[np.int64]  # for that epoch

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices of the samples at the positions from ``start`` up to ``stop`` of an epoch."""
        if self.shuffle is False:
            return list(range(start, stop))
        if self._epoch != epoch:
            self._drawn, self._epoch = self._draw(epoch), epoch
        return cast(list[int], self._drawn[np.arange(start, stop, dtype=np.uint64)].tolist())

    def _draw(self, epoch: int) -> KeyedPermutation | npt.NDArray[np.int64]:
        key = mix("order", self.seed, epoch)
        if self.shuffle == "keyed":
            return KeyedPermutation(self.size, key)
        generator = torch.Generator("cpu").manual_seed(key)
        return torch.randperm(self.size, generator=generator, device="cpu").numpy()  # under any default device


class KeyedPermutation:
    """A permutation of ``range(size)`` in constant memory, each value computed on demand.

    A Feistel network on pairs of digits, one below ``a`` and one below ``b``, where ``a b`` is at least ``size`` and
    little more; results from ``size`` on are permuted again (cycle walking: Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002). For shuffling, not for cryptography.
    """

    ROUNDS = 8

    def __init__(self, size: int, key: int) -> None:
        self.size = np.uint64(size)
        a = math.isqrt(size - 1) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-size // a))
        self._keys = [
            (np.uint64(mix(key, number, "left")), np.uint64(mix(key, number, "right"))) for number in range(self.ROUNDS)
        ]

    def __getitem__(self, positions: Positions) -> Positions:
        """Return the permuted values of these positions; all positions must be below ``size``."""
        found = self._permute(positions)
        while len(beyond := np.flatnonzero(found >= self.size)):
            found[beyond] = self._permute(found[beyond])
        return found

    def _permute(self, positions: Positions) -> Positions:
        left, right = np.divmod(positions, self._b)
        for left_key, right_key in self._keys:
            # The summands stay below 2**63, so that no sum wraps before it is reduced.
            left = (left + _scramble(right ^ left_key)) % self._a
            right = (right + _scramble(left ^ right_key)) % self._b
        return left * self._b + right


def _scramble(numbers: Positions) -> Positions:
    """Return 63-bit hashes, each bit of which depends on all bits of the number (the finaliser of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) >> np.uint64(1)


class _Shares(NamedTuple):
    """How an epoch is shared out to the ranks: ``step`` samples per step of all ranks, ``total`` samples per epoch."""

    rank: int
    world_size: int
    step: int
    total: int

    def stop(self, position: int) -> int:
        """Return the position at which the step ends that begins at ``position``."""
        stop = position + self.step
        return stop if self.total - stop >= self.world_size else self.total


class ResumableSampler(Sampler[list[int]]):
    """Yields batches of indices, every sample once per epoch, resumable at any batch; put it into the app state.

    ``for epoch in sampler.epochs(n)`` counts the epochs of a training. A ``for`` over the sampler itself is a new pass
    over the data, except for the first one after a restore or ``set_epoch``: that one yields the rest of the restored
    pass, which is empty if the whole pass was delivered. The position is read when the iterator is made.

    Only one iterator may be in use: making another one, ``load_state_dict`` and ``set_epoch`` of another epoch make the
    next ``next`` of the old one raise RuntimeError, because ending it would look like the end of the data. An iterator
    whose ``next`` was not called yet follows ``load_state_dict`` and ``set_epoch`` instead.

    The order is a function of ``seed`` and the number of the pass. Resuming skips to the position: no batch is
    replayed, and no sample is loaded for that.

    With several ranks, step i takes the samples from position ``i * batch_size * world_size`` of the order on, and each
    rank gets a slice of them; all ranks take the same number of steps and no sample is repeated. The last, smaller step
    is shared out as evenly as possible. If it has fewer samples than there are ranks, some rank would have an empty
    batch: then they are added to the step before, and the first ranks get one more than ``batch_size`` there.

    As ``DataLoader(batch_sampler=...)`` it counts the batches that the loader drew, and with worker processes that is
    ahead of the trainer: use :class:`ResumableLoader` there.

    Args:
        data: The number of samples, or a dataset that has a length.
        batch_size: Samples per batch and rank.
        seed: Determines the order of every pass.
        shuffle: True: by ``torch.randperm``, which takes time and 8 bytes of memory per sample, once per epoch, and
            may differ between releases of torch. "keyed": computed batch by batch in constant memory, the same
            everywhere, for billions of samples. False: not shuffled.
        drop_last: Leave out the samples at the end of an epoch that do not fill a step of all ranks.
        rank: Rank of this process. None: its rank in ``torch.distributed`` at first use (``len``, the first ``next``,
            ``state_dict`` and so on), or 0 if that is not initialised by then.
        world_size: Number of ranks. None: that of ``torch.distributed`` at first use, or 1.

    Raises:
        TypeError: ``data`` is neither a number nor has a length, or is a ``DataLoader``.
        ValueError: Arguments are out of range or do not fit together, or an epoch would have no step.
        RuntimeError: At a later use: ``torch.distributed`` has other ranks than at the first use.
    """

    def __init__(
        self,
        data: int | Sized | Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.size = _size(data)
        self.batch_size, self.seed = operator.index(batch_size), operator.index(seed)
        if shuffle not in (True, False, "keyed"):
            raise ValueError(f"shuffle is {shuffle!r}; use True, False or 'keyed'")
        # A value that only equals a bool, such as 0 or one of numpy's, could not be distinguished later, or saved.
        self.shuffle: Shuffle = "keyed" if shuffle == "keyed" else bool(shuffle)
        self.drop_last = bool(drop_last)
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it is at least 1")
        given = _given(rank, world_size)
        self._follows = given is None  # torch.distributed
        shares = self._divide(*(given or _distributed() or (0, 1)))  # refuse early if possible
        self._resolved = shares if given else None
        self._order = Order(self.size, self.seed, self.shuffle)
        self.course = Course()

    def __repr__(self) -> str:
        return f"<ResumableSampler{f' {self.place_in_words}' if 'course' in vars(self) else ''}>"

    @property
    def place_in_words(self) -> str:
        """A text with epoch, position and, if already determined, rank; does not determine it."""
        place, shares = self.course.state, self._resolved
        rank = "" if shares is None else f", rank {shares.rank} of {shares.world_size}"
        return f"epoch {place.epoch}, {place.position} of {self.size} samples, batches of {self.batch_size}{rank}"

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._shares().rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._shares().world_size

    @property
    def epoch(self) -> int:
        """Number of the epoch underway, from 0: counted by :meth:`epochs` or :meth:`set_epoch`, else one per pass."""
        return self.course.epoch

    @property
    def position(self) -> int:
        """Samples of the pass that were delivered so far, to all ranks together."""
        return self.course.state.position

    @property
    def at_end(self) -> bool:
        """Whether the last batch of the epoch was delivered; already true while the loop works on that batch."""
        return self.course.complete or self.course.place.position == self._shares().total

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch, the same on every rank."""
        shares = self._shares()
        full, rest = divmod(shares.total, shares.step)
        return max(full + (rest >= shares.world_size), 1)

    def __iter__(self) -> Iterator[list[int]]:
        return unnumbered(self.deliver(self.rest))

    def epochs(self, epochs: int, *, steps: int | None = None) -> Iterator[Epoch[list[int]]]:
        """Yield those of ``epochs`` epochs that are not done yet (see :meth:`ResumableLoader.epochs`)."""
        return self.course.epochs(epochs, steps, self.__len__, lambda epoch: self.deliver(self.rest, epoch=epoch))

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` a pass of ``epoch``, if the caller (a trainer) counts the epochs.

        That ``for`` starts at the restored position if that lies in this epoch and no batch was loaded since, and else
        at the epoch's beginning. Each further ``for`` is another pass of the same epoch. Inside a loop over
        :meth:`epochs` this changes nothing, and ``epoch`` must be the epoch underway.

        Raises:
            ValueError: ``epoch`` is negative.
            RuntimeError: a loop over :meth:`epochs` is in another epoch.
        """
        self.course.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the arguments that it is valid for, as plain values, the same on every rank."""
        valid_for = {name: getattr(self, name) for name in (*_SAME, "batch_size", "world_size")}
        epoch, number, position, earlier = self.course.save()
        # Where loops over epochs were not counted, every pass was an epoch: older versions go on with this pass.
        return {"epoch": number, "position": position, "outer": epoch, "earlier": [*earlier], **valid_for}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to a saved position; the next iterator starts there.

        The world size may differ from the saved one if ``batch_size * world_size`` is the same.

        Raises:
            ValueError: As :meth:`check_state_dict`; nothing was changed.
        """
        self.check_state_dict(state_dict)
        number = state_dict["epoch"]
        epoch, number, position = map(operator.index, (state_dict.get("outer", number), number, state_dict["position"]))
        self.course.load(EpochPlace(epoch, number, position, tuple(map(bool, state_dict.get("earlier", ())))))

    def check_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Check a saved position without going there; ``engine.restore`` calls this before it changes anything.

        Raises:
            ValueError: This is no state of such a sampler, or it was saved with other arguments, which the message
                names, or there is no step of this sampler at the position.
        """
        numbers = ("epoch", "position", "batch_size", "world_size")
        try:
            epoch, position, batch_size, world_size = (operator.index(state_dict[name]) for name in numbers)
            outer, _ = operator.index(state_dict.get("outer", 0)), [*state_dict.get("earlier", ())]
            known = {name: state_dict[name] for name in _SAME}
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not the state of a ResumableSampler or ResumableLoader: {error!r}") from error
        shares = self._shares()
        now = {name: getattr(self, name) for name in _SAME}
        differing = [f"{name}={saved!r} (now {now[name]!r})" for name, saved in known.items() if saved != now[name]]
        if batch_size * world_size != shares.step:
            differing.append(
                f"batch_size={batch_size} on {world_size} ranks (now {self.batch_size} on {shares.world_size}; "
                f"the product must stay {batch_size * world_size})"
            )
        if differing:
            raise ValueError(
                f"the data position was saved with {', '.join(differing)}: resume with the same data and arguments, or "
                "without the position, which begins an epoch anew"
            )
        total = shares.total
        if min(epoch, outer) < 0 or not (position == total or (0 <= position < total and position % shares.step == 0)):
            raise ValueError(f"epoch {epoch}, position {position} is not the start of a step of {shares.step} samples")
        if 0 < total - position < shares.world_size:
            raise ValueError(
                f"the epoch has {total - position} samples left, fewer than the {shares.world_size} ranks; "
                f"resume on {world_size} ranks, or from another checkpoint"
            )

    def rest(self, place: EpochPlace, end: int) -> Iterator[list[int]]:
        """Yield this rank's batches of a pass from a place up to ``end``, without moving the sampler's position."""
        shares, position = self._shares(), place.position
        while position < end:
            stop = shares.stop(position)
            share, extra = divmod(stop - position, shares.world_size)
            start = position + shares.rank * share + min(shares.rank, extra)
            yield self._order.indices(place.number, start, start + share + (shares.rank < extra))
            position = stop

    def deliver(
        self, batches: Callable[[EpochPlace, int], Iterable[T]], *, epoch: int | None = None, on: bool = False
    ) -> Iterator[tuple[int, T]]:
        """Return an iterator of one ``for``: pairs of number and batch. Each moves the sampler's position.

        ``batches`` returns the batches of a pass, one for each batch of indices of :meth:`rest`. ``epoch`` and ``on``
        are as for :meth:`Course.iterate`.
        """

        def passing(place: EpochPlace, steps: int | None, _: bool) -> Iterator[tuple[int, bool, tuple[int, T]]]:
            shares, position = self._shares(), place.position
            end = shares.total if steps is None else min(shares.total, steps * shares.step)
            if shares.total - end < shares.world_size:  # too few samples for a step of their own
                end = shares.total
            for batch in batches(place, end) if position < end else ():
                number, position = position // shares.step, self._shares().stop(position)
                yield position, position >= end, (number, batch)

        return self.course.iterate(passing, epoch=epoch, on=on)

    def _shares(self) -> _Shares:
        """Return how the ranks share the samples; the first call decides. Raises RuntimeError if the ranks changed."""
        now = _distributed() if self._follows else None
        if self._resolved is None:
            self._resolved = self._divide(*(now or (0, 1)))
        elif now is not None and now != self._resolved[:2]:
            raise RuntimeError(
                f"the data was shared out for rank {self._resolved.rank} of {self._resolved.world_size} at its first "
                f"use, and torch.distributed now says rank {now[0]} of {now[1]}: use it (len, iteration, state_dict) "
                "only after init_process_group, or give rank= and world_size="
            )
        return self._resolved

    def _divide(self, rank: int, world_size: int) -> _Shares:
        step = self.batch_size * world_size
        total = self.size - self.size % step if self.drop_last else self.size
        if total < world_size or total == 0:
            raise ValueError(
                f"{self.size} samples are no step for {world_size} ranks with batch_size={self.batch_size} and "
                f"drop_last={self.drop_last}; use more data, fewer ranks or smaller batches"
            )
        return _Shares(rank, world_size, step, total)


def _size(data: int | Sized | Dataset[Any]) -> int:
    if isinstance(data, DataLoader):  # its length is that of its batches
        raise TypeError("this takes the dataset, not a DataLoader: ResumableLoader(dataset, batch_size=...)")
    if isinstance(data, Sized):
        return len(data)
    if hasattr(data, "__index__"):
        return operator.index(data)
    kind = with_article(type(data).__qualname__)
    if isinstance(data, Iterator):
        raise TypeError(f"{kind} has neither a length nor samples by index: give a dataset, or list(...) of it")
    raise TypeError(f"{kind} has no length; give its class a __len__ (a ResumableSampler takes the number, too)")


def _given(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        return None
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}; ranks count from 0")
    return operator.index(rank), operator.index(world_size)


def _distributed() -> tuple[int, int] | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


iterated: weakref.WeakKeyDictionary[ResumableLoader, float] = weakref.WeakKeyDictionary()
"""Time at which each loader of this process last began a pass, of the monotonic clock."""


class ResumableLoader:
    """``torch.utils.data.DataLoader`` with a position in the app state; resuming gives exactly the missing batches.

    Write ``for epoch in loader.epochs(n): for batch in epoch:``. For training that counts steps, use :meth:`forever`,
    or a ``for`` over the loader itself: each such ``for`` is a new pass, but the first one after a restore finishes the
    interrupted pass. A UserWarning tells of loops that resume wrongly, if the loader can detect them: over the loader
    itself after a ``break``; in a ``for epoch in range(3)``, which makes three passes at each start; and with
    ``enumerate``, which begins at 0 in the rest of a pass (use ``epoch.enumerate()``). See :class:`ResumableSampler` on
    the order, ranks, and several iterators. A batch is counted when the loop gets it, so save after the step that used
    it. Unlike a ``DataLoader`` it shuffles by default, and the order comes from ``seed``, not from
    ``torch.manual_seed``.

    Random augmentations are the same after a resume, with any ``num_workers``: Python's, numpy's and torch's global
    generators are seeded from (seed, epoch, index) before each sample is fetched, and ``collate_fn`` uses them in the
    state that the last sample of its batch left. (A worker's generators depend on the samples that it fetched before,
    and are not saved.) With ``num_workers=0`` the trainer's generators are put back afterwards, so that loading never
    changes what ``RNGState`` saves. A dataset with ``__getitems__`` (torch's ``Subset``, too) is seeded once per batch.
    Generators that the dataset owns (``default_rng``) and those of GPUs are not seeded.

    Args:
        dataset: A map-style dataset: it has a length and ``[index]``.
        batch_size, shuffle, drop_last, rank, world_size: See :class:`ResumableSampler`; ``batch_size`` is 1 by default,
            as in ``DataLoader``.
        seed: Determines the order of every pass, and random numbers in the samples.
        num_workers: Worker processes; 0 loads in this process.
        seed_samples: Seed before each sample (some 20 microseconds). False: in this process samples and ``collate_fn``
            draw from the global generators; workers are seeded from (seed, epoch, worker) when they start, so that
            random samples cannot be repeated after a resume in mid-epoch. Use False for datasets without randomness.
        dataloader_kwargs: Anything else that DataLoader takes (``collate_fn``, ``pin_memory``, ``prefetch_factor``,
            ``persistent_workers``...), except for arguments that determine the order.

    Raises:
        TypeError: The dataset is iterable-style, or a ``DataLoader``, or an argument would determine the order.
        ValueError: See :class:`ResumableSampler`; also ``in_order=False``.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int = 1,
        *,
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
            dataloader_kwargs["worker_init_fn"] = partial(_introduce, dataloader_kwargs.get("worker_init_fn"))
        self._feed = _Feed(self.sampler, seed_samples)
        self._loader: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], dataset),  # a list will do
            batch_sampler=self._feed,
            num_workers=num_workers,
            generator=self._generator,
            **dataloader_kwargs,
        )

    def __repr__(self) -> str:
        sampler: ResumableSampler | None = vars(self).get("sampler")  # none yet, in the traceback of wrong arguments
        return f"<ResumableLoader{'' if sampler is None else f' {sampler.place_in_words}'}>"

    @property
    def epoch(self) -> int:
        """Number of the epoch underway, from 0: counted by :meth:`epochs` or :meth:`set_epoch`, else one per pass."""
        return self.sampler.epoch

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self.sampler.batch_size

    @property
    def at_end(self) -> bool:
        """Whether the last batch of the epoch was delivered; already true while the loop works on that batch."""
        return self.sampler.at_end

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch, the same on every rank."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return unnumbered(self.sampler.deliver(self._batches))

    def epochs(self, epochs: int, *, steps: int | None = None) -> Iterator[Epoch[Any]]:
        """Yield those of ``epochs`` epochs that are not done yet, each to iterate over: ``for batch in epoch``.

        After a restore the first one is the epoch that was underway, with its remaining batches. It may have none,
        because the loop's work at the end of an epoch may not have been done. Inside an epoch, after its batches, a
        ``for`` over the loader itself (``update_bn``, the accuracy on the training data) is a whole pass that does not
        move the position. A loop over epochs that was left by ``break`` goes on at its position when this is called
        again.

        Args:
            epochs: Number of epochs of the whole training.
            steps: Batches of each epoch, if fewer than the data gives; the next epoch shuffles anew.

        Raises:
            ValueError: ``epochs`` is negative or ``steps`` below 1.
        """
        return self.sampler.course.epochs(
            epochs, steps, self.__len__, lambda epoch: self.sampler.deliver(self._batches, epoch=epoch)
        )

    def forever(self) -> Iterator[Any]:
        """Yield batches from the position on, pass after pass without end: for training that counts steps."""
        while True:
            yield from unnumbered(self.sampler.deliver(self._batches, on=True))

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` a pass of ``epoch`` (see :meth:`ResumableSampler.set_epoch`)."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position (see :meth:`ResumableSampler.state_dict`)."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to a saved position, or raise ValueError (see :meth:`ResumableSampler.load_state_dict`)."""
        self.sampler.load_state_dict(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Check a saved position without going there; raise ValueError if ``load_state_dict`` would refuse it."""
        self.sampler.check_state_dict(state_dict)

    def _batches(self, place: EpochPlace, end: int) -> Iterator[Any]:
        iterated[self] = time.monotonic()
        self._feed.place, self._feed.end = place, end
        self._generator.manual_seed(mix("workers", self.sampler.seed, place.number))
        return iter(self._loader)


class _Feed:
    """The DataLoader's batch sampler, which may be ahead of the position: that moves when a batch is delivered."""

    place: EpochPlace
    end: int

    def __init__(self, sampler: ResumableSampler, with_pass: bool) -> None:
        self._sampler, self._with_pass = sampler, with_pass

    def __iter__(self) -> Iterator[Any]:
        number = self.place.number
        batches = self._sampler.rest(self.place, self.end)
        # Persistent workers outlive the pass that they were started in, so its number travels with the indices.
        return ((number, indices) if self._with_pass else indices for indices in batches)


class _Seeded(Dataset[Any]):
    """Wraps a dataset: gives whole, collated batches, and seeds the global generators before each sample."""

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._seed, self._collate = dataset, seed, collate

    def __getitems__(self, batch: tuple[int, list[int]]) -> Any:
        with _generators_kept() if get_worker_info() is None else nullcontext():
            return self._collate(self._samples(*batch))

    def _samples(self, epoch: int, indices: list[int]) -> Any:
        whole = getattr(self.dataset, "__getitems__", None)  # torch allows None for "has none"
        if whole:
            self._seed_generators(epoch, indices[0])
            return whole(indices)
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


def _introduce(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Make ``get_worker_info()`` in a worker give the user's own dataset, not its wrapper; call ``worker_init_fn``."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses plain assignments
    if worker_init_fn is not None:
        worker_init_fn(worker)


@contextmanager
def _generators_kept() -> Iterator[None]:
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
