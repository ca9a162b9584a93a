# SPDX-License-Identifier: Apache-2.0
"""Saves and restores the generators from which loaders without a position of their own draw the order of batches.

To resume inside an epoch these loaders are iterated over again, up to the batch, with all generators as they were when
the epoch began: the global ones, and those that loaders and samplers were given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.utilities import rank_zero_warn

from pccheck_async.errors import StateMismatchError
from pccheck_async.integrations.mismatch import SAME_AGAIN
from pccheck_async.state import RNGState

__all__ = ["Draws", "flat", "skip"]


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that loaders without a state of their own, and their samplers, were given."""
    found = dict[int, torch.Generator]()
    for loader in loaders:
        if hasattr(loader, "load_state_dict"):
            continue
        batches = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            if isinstance(each := getattr(owner, "generator", None), torch.Generator):
                found[id(each)] = each
    return [*found.values()]


def _set_generators(loaders: Iterable[Any], states: Sequence[torch.Tensor]) -> None:
    generators = _generators(loaders)
    if len(generators) != len(states):
        text = "the loaders have %d generators of their own, and had %d in the checkpoint: their order is another one"
        rank_zero_warn(text % (len(generators), len(states)))
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


def _states(loaders: Iterable[Any]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(loaders)]


def _random_state(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the states of all generators that these loaders draw from: the global ones and their own."""
    return RNGState().state_dict() | {"loaders": _states(loaders)}


def _set_random_state(loaders: Iterable[Any], state: Mapping[str, Any]) -> None:
    RNGState().load_state_dict(state)
    _set_generators(loaders, state.get("loaders", ()))


def flat(loop: Any) -> list[Any]:
    """Return the loaders of a loop as a list; [] before they are set up."""
    return [] if loop._combined_loader is None else [*loop._combined_loader.flattened]


class Draws:
    """The states of the generators when the epoch's iterator was created, and when its first batch was fetched.

    At these two moments a loader of torch draws its order and the seeds of its workers. The loaders themselves are
    created by hooks of the user, which may also draw random numbers, and read the epoch: so the epoch and the
    generators at that moment are recorded, too.
    """

    def __init__(self, trainer: Any) -> None:
        self._loop = trainer.fit_loop
        self._states: dict[str, Any] = {}
        self._saved: Mapping[str, Any] = {}
        self._made: dict[str, Any] = {}

    def make_again(self, loop: Any, kind: str) -> None:
        """Wrap a loop's ``setup_data``, which creates its loaders (``kind`` is "train" or "val").

        Its first call after a restore runs with the epoch and generators with which the saved run created the loaders.
        Later calls that create loaders record these.
        """
        setup, progress = loop.setup_data, loop.trainer.fit_loop.epoch_progress.current
        is_due, last = f"_should_reload_{kind}_dl", f"_last_{kind}_dl_reload_epoch"
        to_make = self._made.get(kind)

        def setup_data() -> None:
            nonlocal to_make
            if loop._combined_loader is not None and not getattr(loop, is_due):
                return
            made, to_make = to_make, None
            epoch, rng = progress.completed, RNGState().state_dict()
            if made is None:
                setup()
                self._made[kind] = {"epoch": epoch, "last": getattr(loop, last), "rng": rng}
                return
            progress.completed = made["epoch"]
            RNGState().load_state_dict(made["rng"])
            try:
                setup()
                setattr(loop, last, made["last"])
            finally:
                progress.completed = epoch
                RNGState().load_state_dict(rng)

        loop.setup_data = setup_data

    @property
    def _training(self) -> list[Any]:
        return flat(self._loop)

    @property
    def _all(self) -> list[Any]:
        """The training loaders and the validation loaders."""
        return [*flat(self._loop), *flat(self._loop.epoch_loop.val_loop)]

    def note_iter(self) -> None:
        """Called right before the iterator of an epoch is created; records the generators."""
        self._states = {"iter": _random_state(self._training)}

    def note_fetch(self, loaders: Any) -> None:
        """Called before each batch is fetched; records the generators before the first, which draws the order."""
        if "fetch" not in self._states:
            self._states["fetch"] = _random_state(self._training)
        self._watch(loaders, {})

    def go_on(self) -> None:
        """Set the loaders' own generators to their states at the checkpoint, from which the next epochs draw."""
        if "now" in self._saved:
            _set_generators(self._all, self._saved["now"])

    def _watch(self, loaders: Any, saved: Mapping[str, Any]) -> None:
        """Wrap each of several loaders, to record the generators when one has ended and is iterated over again."""
        iterator, cycles = loaders._iterator, self._states.setdefault("cycles", {})
        if len(iterator.iterables) > 1 and not isinstance(iterator.iterables[0], _Cycled):
            names = map(str, range(len(iterator.iterables)))
            iterator.iterables = [
                _Cycled(loader, cycles.setdefault(name, {"number": 0}), saved.get(name, {}))
                for name, loader in zip(names, iterator.iterables, strict=True)
            ]

    def go_back(self, loop: Any) -> Any:
        """Create and return the iterator of the saved epoch, at its start, with the generators as in the saved run."""
        self._states = {name: state for name, state in self._saved.items() if name in ("iter", "fetch")}
        if "iter" in self._states:
            _set_random_state(self._training, self._states["iter"])
        batches: Any = iter(loop._data_fetcher)
        self._watch(loop._combined_loader, self._saved.get("cycles", {}))
        if "fetch" in self._states:
            _set_random_state(self._training, self._states["fetch"])
        return getattr(batches, "iterator_wrapper", batches)  # of a training_step(dataloader_iter)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded states for :meth:`go_back`, and the present ones of the loaders' own generators."""
        return self._states | {"made": self._made, "now": _states(self._all)}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Keep the state for :meth:`go_back` and :meth:`go_on`, because the loaders do not exist yet."""
        self._saved = state
        self._made = dict(state.get("made", {}))


class _Cycled:
    """Wraps one of several loaders, which is iterated over again if it ends before the others (``max_size_cycle``).

    Args:
        loader: The loader.
        noted: A dict that is updated: how often the loader was iterated over, and the generators' states at the last
            time, when its iterator was created and when the first batch was fetched.
        saved: The ``noted`` of the saved run; the pass with the same number is repeated with these states.
    """

    def __init__(self, loader: Any, noted: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self._loader, self._noted, self._saved = loader, noted, saved

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._noted["number"] += 1
        self._note("iter")
        return self._from_first(iter(self._loader))

    def _from_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._note("fetch")
        yield from batches

    def _note(self, name: str) -> None:
        if self._saved.get("number") == self._noted["number"]:
            _set_random_state([self._loader], self._saved[name])
        self._noted[name] = _random_state([self._loader])


def skip(loop: Any, epoch: int, batches: int, draws: Draws) -> None:
    """Iterate over loaders without a position up to ``batches`` of an epoch. Raises StateMismatchError."""
    for loader in loop._combined_loader.flattened:
        _set_sampler_epoch(loader, epoch)
    again = draws.go_back(loop)
    for done in range(batches):
        if next(again, None) is None:
            raise StateMismatchError(
                f"the checkpoint was made after {batches} batches of an epoch, and the loaders end after {done}: "
                f"{SAME_AGAIN}"
            )
    loop._data_fetcher.fetched = 0  # the loop adds the epoch's batches so far
