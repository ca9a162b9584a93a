# SPDX-License-Identifier: Apache-2.0
"""Advice for values that cannot be saved."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import random
import types
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import numpy as np
import torch
import torch.utils.data

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import values
from pccheck_async.state.boxes import FlatShard


def _through(state: str, load: str) -> str:
    """Return advice for a generator: to save it through an object. A plain value in the state would stay unchanged."""
    return f"save an object whose state_dict() returns {state}, and whose load_state_dict(state) does {load}"


_ADVICE: Final[tuple[tuple[type | types.UnionType, str], ...]] = (
    (torch.Tensor, "save a plain tensor (x.as_subclass(torch.Tensor)); run lazy modules once first"),
    (np.ma.MaskedArray, "save numpy.ma.getdata(x) and numpy.ma.getmaskarray(x)"),
    (np.ndarray, "save numpy.asarray(x)"),
    (torch.utils.data.DataLoader, "use pccheck_async.ResumableLoader(dataset, batch_size=...) instead of it"),
    (torch.utils.data.Sampler, "save where it is: with pccheck_async.ResumableSampler or ResumableLoader"),
    (torch.utils.data.Dataset, "leave it out: data is no state; the position in it is, of a ResumableLoader"),
    (torch.Generator, _through("x.get_state()", "x.set_state(state)")),
    (np.random.Generator, _through("x.bit_generator.state", "x.bit_generator.state = state")),
    (np.random.RandomState, _through("x.get_state(legacy=False)", "x.set_state(state)")),
    (np.random.BitGenerator, _through("x.state", "x.state = state")),
    (random.SystemRandom, "leave it out: it has no state"),
    (random.Random, _through("x.getstate()", "x.setstate(state)")),
    (enum.Enum, "save its name or its value"),
    (tuple, "save tuple(x)"),
    (Mapping, "save dict(x)"),
    (AbstractSet, "save set(x)"),
    (pathlib.PurePath | decimal.Decimal, "save str(x)"),
    (argparse.Namespace, "save vars(x)"),
    (datetime.date | datetime.time, "save x.isoformat()"),
    (datetime.timedelta, "save x.total_seconds()"),
    (memoryview, "save bytes(x)"),
    (types.CoroutineType, "await it, and save what that gives"),
    (io.IOBase, "save its path, and the position (x.tell())"),
    (Iterator, "save what it comes from (the loader, the module), not an iterator over it, which reading uses up"),
)
"""Advice by type of the value; the first type that fits counts."""


_COMPOSED: Final = (
    "it consists of other tensors, and its class is torch's own or lacks __tensor_unflatten__: save those tensors"
)
_LOADER_ITERATOR: Final = "torch.utils.data.dataloader"
"""The module of a DataLoader's iterators, whose class has no public name."""
_SHARD: Final = (
    "it is a part of a tensor that lies on several ranks: open the engine with group=torch.distributed.group.WORLD on "
    "all of them, or save x.full_tensor()"
)


def _advice(value: Any) -> str:
    # The module's name: importing DTensor takes a second.
    sharded = isinstance(value, torch.Tensor) and type(value).__module__.startswith("torch.distributed")
    if sharded or isinstance(value, FlatShard):
        return _SHARD
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        return _COMPOSED
    if isinstance(value, Iterator) and any(base.__module__ == _LOADER_ITERATOR for base in type(value).__mro__):
        return "save the loader, not its iterator: pccheck_async.ResumableLoader, or torchdata's StatefulDataLoader"
    for kind, advice in _ADVICE:
        if isinstance(value, kind):
            return advice
    plain = next((base for base in type(value).__mro__ if base in values.ATOMS), None)
    if plain is not None:
        return f"save it as a plain {plain.__name__}"
    if not isinstance(value, type):
        if dataclasses.is_dataclass(value):
            return "save dataclasses.asdict(x)"
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return "define state_dict and load_state_dict on its class, not on the instance"
    elif _is_class_with_state(value):
        return f"give an instance: {value.__name__}()"
    if isinstance(value, Collection):
        return "save list(x)"
    if (owner := _owner_of_method(value)) is not None:
        return f"put the {type(owner).__qualname__} itself there, not its method {value.__name__}"
    if callable(value):
        return "leave it out: code is never saved"
    return "give it state_dict() and load_state_dict(), save what it consists of, or leave it out"


def _owner_of_method(value: Any) -> Any:
    """Return the object of a bound method if it has a ``state_dict``, else None."""
    owner = getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None
    return owner if hasattr(owner, "state_dict") else None


def _is_class_with_state(value: Any) -> bool:
    return isinstance(value, type) and hasattr(value, "state_dict")


def unsupported(value: Any, path: str) -> UnsupportedStateError:
    """Return the error, with advice, for a value that cannot be saved."""
    text = f"{path}: {values.with_article(full_name(value))} cannot be saved; {_advice(value)}"
    # A pickled loader would not keep its position, a method would bring a copy of its object, a class has no state.
    whole = isinstance(value, torch.utils.data.DataLoader) or _owner_of_method(value) is not None
    if not whole and not _is_class_with_state(value):
        text += " (an engine with allow_pickle=True pickles it, if pickle can)"
    return UnsupportedStateError(text)


def full_name(value: object) -> str:
    """Return the name of a value's type, with its module."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
