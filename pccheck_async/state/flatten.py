"""The app state taken apart: a skeleton of nodes and a table of tensors and arrays. No byte of an array is copied."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import pathlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import dtypes, paths, values
from pccheck_async.state.nodes import (
    MAX_DEPTH,
    ArrayNode,
    CounterNode,
    DictNode,
    FrozenSetNode,
    ListNode,
    Node,
    OrderedDictNode,
    SetNode,
    StatefulNode,
    TupleNode,
)

__all__ = ["Array", "ArrayLeaf", "FlatState", "Kind", "Stateful", "check_outermost", "flatten", "is_stateful", "noting"]

Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
Kind: TypeAlias = Literal["tensor", "parameter", "ndarray"]


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and loads itself: modules, optimizers, schedulers, loaders, and whatever users write."""

    def state_dict(self) -> Any:
        """Return the state, made of anything that can be saved."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state that ``state_dict`` returned."""


class ArrayLeaf(NamedTuple):
    """One tensor or array of the state.

    Attributes:
        path: Where it is, see :mod:`pccheck_async.state.paths`.
        value: The live object itself.
        kind: What it comes back as.
        requires_grad: Whether it comes back with autograd switched on.
    """

    path: str
    value: Array
    kind: Kind
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FlatState:
    """A state taken apart; ``ArrayNode.index`` counts into ``leaves``."""

    skeleton: Node
    leaves: tuple[ArrayLeaf, ...]


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Take ``state`` apart on the calling thread, asking every Stateful in it for its ``state_dict()``.

    Args:
        state: The app state. Keys of this outermost mapping are strings.

    Returns:
        The skeleton, in which plain values are already copied, and the live tensors and arrays.

    Raises:
        UnsupportedStateError: A value cannot be saved as it is; names its path and says what to do.
    """
    check_outermost(state)
    flattener = _Flattener()
    try:
        skeleton = flattener.mapping(DictNode, state, "", 1)
    except RecursionError:
        raise UnsupportedStateError("the state is nested too deeply for Python's stack") from None
    return FlatState(skeleton, tuple(flattener.leaves))


def check_outermost(state: object) -> None:
    """Raise UnsupportedStateError for anything but a mapping whose keys are strings."""
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"the state is a {type(state).__qualname__}; give a mapping from names to objects and values"
        )
    for key in state:
        if type(key) is not str:
            raise UnsupportedStateError(f"the state has the key {key!r}; the keys of the outermost mapping are strings")


@contextmanager
def noting(call: str, path: str, value: object, consequence: str = "") -> Iterator[None]:
    """Let an exception of a Stateful's own code pass, with a note on whose it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {call}() of {path}, a {_full_name(value)}{consequence}")
        raise


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object (not a class) that saves and loads itself."""
    kind = type(value)
    return not isinstance(value, type) and hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


class _Flattener:
    def __init__(self) -> None:
        self.leaves: list[ArrayLeaf] = []
        self._open: set[int] = set()  # identities of the containers between the root and here

    def node(self, value: Any, path: str, depth: int) -> Node:
        kind = type(value)
        convert = values.ATOMS.get(kind)
        if convert is not None:
            return convert(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter or kind is np.ndarray:
            return self.array(value, path)
        if isinstance(value, (np.generic, np.dtype)):
            return values.numpy_value(value, path)
        return self.container(value, path, depth)

    def container(self, value: Any, path: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise UnsupportedStateError(f"{path}: nested more than {MAX_DEPTH} levels deep; flatten it")
        if id(value) in self._open:
            raise UnsupportedStateError(f"{path}: a {type(value).__qualname__} that contains itself cannot be saved")
        self._open.add(id(value))
        try:
            kind = type(value)
            if kind is dict:
                return self.mapping(DictNode, value, path, depth)
            if kind is list:
                return ListNode(self.items(value, path, depth))
            if kind is tuple:
                return TupleNode(self.items(value, path, depth))
            if kind is OrderedDict:
                return self.ordered(value, path, depth)
            if kind is Counter:
                _refuse_attributes(value, path, allowed=())
                return self.mapping(CounterNode, value, path, depth)
            if kind is set:
                return SetNode(_set(value, path, depth))
            if kind is frozenset:
                return FrozenSetNode(_set(value, path, depth))
            if is_stateful(value):
                with noting("state_dict", path, value):
                    state = value.state_dict()
                return StatefulNode(self.node(state, path, depth + 1))
            raise _unsupported(value, path)
        finally:
            self._open.discard(id(value))

    def mapping(
        self, make: Callable[[list[Node], list[Node]], Node], value: Mapping[Any, Any], path: str, depth: int
    ) -> Node:
        keys = list(value)
        key_nodes = [key if type(key) is str and key.isascii() else _key(key, path, depth) for key in keys]
        return make(key_nodes, self.each(paths.components(keys), value.values(), path, depth))

    def ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Node:
        _refuse_attributes(value, path, allowed=("_metadata",))
        metadata = [
            self.node(item, paths.child(path, "<_metadata>"), depth + 1)
            for name, item in vars(value).items()
            if name == "_metadata"
        ]
        return self.mapping(lambda keys, items: OrderedDictNode(keys, items, metadata), value, path, depth)

    def items(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> list[Node]:
        kinds = set(map(type, value))
        if kinds <= values.VERBATIM and (int not in kinds or (kinds == {int} and values.all_small(value))):
            return list(value)  # a loader's permutation may have millions of numbers
        return self.each(map(str, range(len(value))), value, path, depth)

    def each(self, names: Iterable[str], items: Iterable[Any], path: str, depth: int) -> list[Node]:
        nodes: list[Node] = []
        atoms = values.ATOMS
        prefix = path + "." if path else ""
        for name, item in zip(names, items, strict=True):
            convert = atoms.get(type(item))
            nodes.append(convert(item) if convert is not None else self.node(item, prefix + name, depth + 1))
        return nodes

    def array(self, value: Array, path: str) -> Node:
        kind: Kind
        if isinstance(value, torch.Tensor):
            reason = _tensor_trouble(value)
            kind, requires_grad = "parameter" if type(value) is torch.nn.Parameter else "tensor", value.requires_grad
        else:
            reason = _array_trouble(value)
            kind, requires_grad = "ndarray", False
        if reason:
            raise UnsupportedStateError(f"{path}: {reason}")
        self.leaves.append(ArrayLeaf(path, value, kind, requires_grad))
        return ArrayNode(len(self.leaves) - 1)


def _key(key: Any, path: str, depth: int) -> Node:
    """The node of a dict's key or a set's item: hashable, without arrays, equal to itself."""
    if depth > MAX_DEPTH:
        raise UnsupportedStateError(f"{path}: a key nested more than {MAX_DEPTH} levels deep")
    kind = type(key)
    if kind is tuple:
        return TupleNode([_key(item, path, depth + 1) for item in key])
    if kind is frozenset:
        return FrozenSetNode(_set(key, path, depth + 1))
    if kind in values.ATOMS or (isinstance(key, (np.generic, np.dtype)) and not isinstance(key, np.void)):
        if not key == key:  # noqa: PLR0124 - NaN, of whatever type
            raise UnsupportedStateError(f"{path}: NaN as a key or in a set cannot be saved: it never equals itself")
        return values.atom(key, path)
    raise UnsupportedStateError(
        f"{path}: a {kind.__qualname__} as a key or in a set cannot be saved; use a plain value, or a list for tensors"
    )


def _set(items: Iterable[Any], path: str, depth: int) -> list[Node]:
    """The items of a set, in an order that does not change from process to process."""
    return sorted((_key(item, path, depth) for item in items), key=msgspec.msgpack.encode)


def _tensor_trouble(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be saved by its bytes, and what to do; empty where it can."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be saved; save its indices and values, or x.to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor cannot be saved; save x.int_repr() with its scale and zero point"
    if tensor.is_meta:
        return "a tensor on the meta device has no bytes; materialise it first (module.to_empty(device=...))"
    if tensor.is_nested:
        return "a nested tensor cannot be saved; save list(x.unbind())"
    if tensor.dtype not in dtypes.TORCH_NAMES:
        return f"a tensor of dtype {tensor.dtype} cannot be saved"
    return ""


def _array_trouble(array: np.ndarray[Any, Any]) -> str:
    if dtypes.numpy_name(array.dtype) is not None:
        return ""
    if array.dtype.hasobject:
        return f"an array of {array.dtype} holds Python objects, not bytes; save x.tolist()"
    return f"an array of dtype {array.dtype} cannot be saved; save each of its fields as an array"


def _refuse_attributes(value: object, path: str, allowed: tuple[str, ...]) -> None:
    for name in vars(value):
        if name not in allowed:
            raise UnsupportedStateError(
                f"{path}: the attribute {name!r} on a {type(value).__qualname__} would be lost; store it under a key"
            )


_ADVICE: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((torch.Tensor,), "save a plain tensor (x.to_local(), x.as_subclass(torch.Tensor)); run lazy modules once first"),
    ((np.ma.MaskedArray,), "save numpy.ma.getdata(x) and numpy.ma.getmaskarray(x)"),
    ((np.ndarray,), "save numpy.asarray(x)"),
    ((torch.Generator,), "save x.get_state()"),
    ((np.random.Generator,), "save x.bit_generator.state"),
    ((np.random.RandomState,), "save x.get_state(legacy=False)"),
    ((random.Random,), "save x.getstate()"),
    ((enum.Enum,), "save its name or its value"),
    ((tuple,), "save tuple(x)"),
    ((Mapping,), "save dict(x)"),
    ((AbstractSet,), "save set(x)"),
    ((pathlib.PurePath, decimal.Decimal), "save str(x)"),
    ((argparse.Namespace,), "save vars(x)"),
    ((datetime.date, datetime.time), "save x.isoformat()"),
    ((datetime.timedelta,), "save x.total_seconds()"),
    ((memoryview,), "save bytes(x)"),
)
"""What to save instead of a value of these types; the first that fits."""


def _advice(value: Any) -> str:
    for kinds, advice in _ADVICE:
        if isinstance(value, kinds):
            return advice
    plain = next((base for base in type(value).__mro__ if base in values.ATOMS), None)
    if plain is not None:
        return f"save it as a plain {plain.__name__}"
    if not isinstance(value, type):
        if dataclasses.is_dataclass(value):
            return "save dataclasses.asdict(x)"
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return "define state_dict and load_state_dict on its class, not on the instance"
    if isinstance(value, Iterable):
        return "save list(x)"
    if callable(value):
        return "leave it out: code is never saved"
    return "give it state_dict() and load_state_dict(), save what it consists of, or leave it out"


def _unsupported(value: Any, path: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{path}: a {_full_name(value)} cannot be saved; {_advice(value)}")


def _full_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
