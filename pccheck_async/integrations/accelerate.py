# SPDX-License-Identifier: Apache-2.0
"""The training state of a Hugging Face Accelerator for a plain engine: ``state = training_state(accelerator, loader)``.

Accelerate's own ``register_save_state_pre_hook`` and ``register_load_state_pre_hook`` can replace weights only, and
leave optimizers, generators and the data position to its blocking files: they are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from pccheck_async.integrations.accelerate_loader import AcceleratedLoader, sizes  # first: reports a missing Accelerate
from pccheck_async.integrations.mismatch import SAME_AGAIN
from pccheck_async.state import RNGState
from pccheck_async.training.epochs import Course, Epoch, EpochPlace, unnumbered

# isort: split

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import DistributedType

__all__ = ["PRIVATE", "AcceleratedLoader", "TrackedLoader", "training_state"]

PRIVATE = ("_models", "_optimizers", "_schedulers", "_custom_objects")
"""Attributes of Accelerator that this module reads, and that Accelerate does not document."""
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def training_state(accelerator: Accelerator, loader: Any) -> dict[str, Any]:
    """Return the state of a training run, for ``engine.step``, ``engine.checkpoint`` and ``engine.restore``.

    Call it after ``accelerator.prepare`` and ``accelerator.register_for_checkpointing``, and iterate over
    ``state["loader"]``. Nothing may draw random numbers between ``engine.restore`` and the loop.

    Ranks save one checkpoint together with ``SyncCheckpointEngine(..., group=torch.distributed.group.WORLD)``. Each
    saves its whole state; with ``Group.of(..., replicated=["model.*.weight", "optimizer.state.*"])`` and the like,
    tensors that are the same on all ranks are saved once.

    Args:
        accelerator: The accelerator that has prepared the models and optimizers.
        loader: The loader of the training loop: the result of ``prepare``, or an :class:`AcceleratedLoader` around a
            ResumableLoader.

    Returns:
        A dict with ``model``, ``optimizer``, ``scheduler`` and ``custom`` (further ones: ``model_1``...), without the
        wrappers of Accelerate and DistributedDataParallel, ``scaler``, ``accelerator`` (its count of micro-batches),
        ``rng``, and ``loader``.

    Raises:
        ValueError: The accelerator has no models, or prepared a model or optimizer twice, or distributes in a way that
            is not supported; or the loader is neither of both.
    """
    if accelerator.distributed_type not in _SUPPORTED:
        raise ValueError(f"training_state does not support {accelerator.distributed_type}")
    if not accelerator._models:
        raise ValueError("the accelerator has no models: call training_state after accelerator.prepare(model, ...)")
    models = [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    optimizers = [each.optimizer for each in accelerator._optimizers]
    if len({*map(id, models), *map(id, optimizers)}) < len(models) + len(optimizers):
        raise ValueError("a model or an optimizer was prepared twice: call accelerator.free_memory(), and prepare once")
    tracked = loader if isinstance(loader, AcceleratedLoader) else TrackedLoader(loader)
    return {
        **_named("model", models),
        **_named("optimizer", optimizers),
        **_named("scheduler", [each.scheduler for each in accelerator._schedulers]),
        **_named("custom", accelerator._custom_objects),
        **({} if accelerator.scaler is None else {"scaler": accelerator.scaler}),
        "accelerator": _Count(accelerator),
        "loader": tracked,
        "rng": RNGState(),
    }


class TrackedLoader:
    """A loader that ``Accelerator.prepare`` returned, with a position that is saved.

    Loop over :meth:`epochs`; a ``for`` over the loader itself is for loops that count steps (see
    :class:`~pccheck_async.ResumableLoader`). If the last batch of an epoch had been delivered, the first pass after a
    restore is empty, so that the loop's work at the end of the epoch is done again.

    To resume in the middle of an epoch the loader is replayed: the generators are set to their state at the epoch's
    beginning, the loader draws its order and the seeds of its workers from them again, batches that the loop had are
    loaded and dropped, and the generators are set to their state at the save. So the orders of the default sampler and
    of a seedable one, and random samples of worker processes, are the same as before. Random samples without workers
    are not, because they share the generators with the training; nor are those of ``persistent_workers``. A
    ResumableLoader repeats these, too, and replays nothing.

    Args:
        loader: The result of ``accelerator.prepare(loader)``.

    Raises:
        ValueError: ``loader`` is something else, or was prepared with ``use_stateful_dataloader=True``.
    """

    def __init__(self, loader: Any) -> None:
        if not isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
            raise ValueError(
                f"{type(loader).__qualname__} is no loader that accelerator.prepare returned; "
                "wrap a ResumableLoader as AcceleratedLoader(loader, accelerator)"
            )
        if loader.use_stateful_dataloader:
            raise ValueError(
                "such a loader cannot be replayed: set use_stateful_dataloader=False, or use a ResumableLoader"
            )
        self._loader: Any = loader
        self._rng = RNGState()
        self._course = Course()
        self._end: int | None = None  # of the pass underway, once its last batch was delivered
        self._start: dict[str, Any] | None = None  # the generators when that pass began
        self._own = False  # whether the next iterator is this object's
        self._elsewhere: set[object] = set()  # loops over the loader itself that have come to a second batch
        inner = loader.base_dataloader
        inner.__iter__ = partial(self._watched, inner.__iter__)  # Accelerate calls it by this name

    @property
    def epoch(self) -> int:
        """Number of the epoch underway, from 0."""
        return self._course.epoch

    def __len__(self) -> int:
        """Return the number of batches in a whole pass."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return unnumbered(self._course.iterate(self._batches))

    def epochs(self, epochs: int, *, steps: int | None = None) -> Iterator[Epoch[Any]]:
        """Yield those of ``epochs`` epochs that are not done (see :meth:`~pccheck_async.ResumableLoader.epochs`)."""
        return self._course.epochs(
            epochs, steps, self.__len__, lambda epoch: self._course.iterate(self._batches, epoch=epoch)
        )

    def _batches(
        self, place: EpochPlace, steps: int | None, counted: bool
    ) -> Iterator[tuple[int, bool, tuple[int, Any]]]:
        position, saved = place.position, None
        if position and position in (self._end, steps):
            return
        if position and self._start is not None:
            saved = self._rng.state_dict()
            self._rng.load_state_dict(self._start["rng"])
            self._set_generator_state(self._start["sampler"])
        elif counted:
            self._start = {"rng": self._rng.state_dict(), "sampler": self._generator_state()}
        self._loader.iteration, self._loader.skip_batches = place.number, position
        self._own = True
        try:
            for batch in self._loader:
                if saved is not None:
                    self._rng.load_state_dict(saved)
                    saved = None
                position += 1
                if position == steps:
                    self._loader.end_of_dataloader = True  # accumulate() makes the step of a partial window
                ended = self._loader.end_of_dataloader
                if counted:
                    self._end = position if ended else None
                yield position, ended, (position - 1, batch)
                if position == steps:
                    return
        finally:
            self._loader.end()  # Accelerate does not call it for a loader that is left early

    def _watched(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the loader's batches; record a loop that is not this object's once it has come to its second batch.

        (A single batch may be a look at the data. Two batches are fetched then: the loader is one ahead of the loop.)
        """
        own, self._own = self._own, False
        loop = object()
        try:
            for fetched, batch in enumerate(begin(), start=1):
                if fetched > 2 and not own:
                    self._elsewhere.add(loop)
                yield batch
        finally:
            self._elsewhere.discard(loop)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, batches that the loop got, and the generators' state when the pass began.

        Raises:
            RuntimeError: A loop over the wrapped loader, whose position is unknown, is underway.
        """
        if self._elsewhere:
            raise RuntimeError(
                "the loop is over the loader that training_state was given, and the position that is saved is that of "
                'state["loader"]: loop over this, `for epoch in state["loader"].epochs(n): for batch in epoch:`'
            )
        sampler = self._loader.get_sampler()
        epoch, number, position, earlier = self._course.save()
        return {
            "epoch": number,  # the format of ResumableSampler
            "outer": epoch,
            "earlier": [*earlier],
            "delivered": position,
            "ended": position > 0 and position == self._end,
            "seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "start": self._start if position else None,
            "generator": self._generator_state(),
            "sizes": sizes(self._loader),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to a saved position. Raises ValueError (see :meth:`check_state_dict`)."""
        self.check_state_dict(state_dict)
        sampler, seed = self._loader.get_sampler(), state_dict["seed"]
        if seed is not None:
            sampler.initial_seed = seed
        number, position = state_dict["epoch"], state_dict["delivered"]
        earlier = tuple(state_dict.get("earlier", ()))
        self._course.load(EpochPlace(state_dict.get("outer", number), number, position, earlier))
        self._start, self._end = state_dict["start"], position if state_dict["ended"] else None
        self._set_generator_state(state_dict.get("generator"))  # for the next pass: this one may be over

    def check_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Check a saved position without going there; ``engine.restore`` calls this before it changes anything.

        Raises:
            ValueError: Only one of the two runs has a seedable sampler, or the position is inside an epoch of batches
                of another size, or of another dataset size.
        """
        if isinstance(self._loader.get_sampler(), SeedableRandomSampler) != (state_dict["seed"] is not None):
            raise ValueError("use_seedable_sampler differs from that of the run that saved the checkpoint")
        if not state_dict["delivered"] or state_dict["ended"]:
            return
        saved, now = state_dict.get("sizes", {}), sizes(self._loader)
        for name, what in {"batch": "samples in a batch of all ranks", "samples": "samples in the dataset"}.items():
            if None not in (before := saved.get(name), now[name]) and before != now[name]:
                raise ValueError(
                    f"saved after {state_dict['delivered']} batches of epoch {state_dict['epoch']} with {before} "
                    f"{what}, and there are {now[name]} now: {SAME_AGAIN}"
                )

    def _generator_state(self) -> Any:
        generator = getattr(self._loader, "synchronized_generator", None)
        return None if generator is None else generator.get_state()

    def _set_generator_state(self, state: Any) -> None:
        if state is not None and (generator := getattr(self._loader, "synchronized_generator", None)) is not None:
            generator.set_state(state)


class _Count:
    """Saves and restores the accelerator's count of micro-batches, which determines where a window ends."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step, "window": self._accelerator.gradient_accumulation_steps}

    def load_state_dict(self, state_dict: Mapping[str, int], /) -> None:
        self.check_state_dict(state_dict)
        self._accelerator.step = state_dict["step"]

    def check_state_dict(self, state_dict: Mapping[str, int], /) -> None:
        """Raise ValueError if the accumulation window has another size than in the checkpoint, inside an epoch."""
        now, step = self._accelerator.gradient_accumulation_steps, state_dict["step"]
        before = state_dict.get("window", now)
        if step and before != now:
            raise ValueError(
                f"saved after {step} batches of an epoch with gradient_accumulation_steps={before}, which is {now} "
                f"now: {SAME_AGAIN}"
            )


def _named(name: str, objects: Iterable[Any]) -> dict[str, Any]:
    return {f"{name}_{number}" if number else name: each for number, each in enumerate(objects)}
