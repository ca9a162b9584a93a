# SPDX-License-Identifier: Apache-2.0
"""Detects that a training loop is in the middle of a pass over a plain DataLoader, whose position is not saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from pccheck_async.training.data import _Feed

__all__ = ["PassesUnderway"]


class PassesUnderway:
    """All DataLoader iterators of the process that have given batches when this object is made.

    Iterators of a ResumableLoader are left out.
    """

    def __init__(self) -> None:
        # With what the pass draws its indices from: persistent workers keep one iterator for pass after pass.
        self._found = [
            (weakref.ref(each), each._sampler_iter, each._num_yielded)
            for each in _iterators()
            if each._num_yielded and not isinstance(each._index_sampler, _Feed)
        ]

    def one_went_on(self) -> bool:
        """Return whether one of the iterators has given more batches of the same pass since.

        An iterator that has not is not the training loop's, but that of a look at the data or of a validation that
        was left.
        """
        now = ((reference(), indices, before) for reference, indices, before in self._found)
        return any(
            each is not None and each._sampler_iter is indices and each._num_yielded > before
            for each, indices, before in now
        )


def _iterators() -> Iterator[Any]:
    # A for statement holds its iterator where no code gets at it, and the loader does not know it. On this machine
    # this takes 0.2 us for each object: 0.04 s with torch imported, 0.1 s with transformers, 0.6 s with 3 million
    # objects. The type is asked for, not isinstance, which runs code of proxies.
    return (each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter))
