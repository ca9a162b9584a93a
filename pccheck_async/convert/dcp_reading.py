# SPDX-License-Identifier: Apache-2.0
"""Reads a folder of ``torch.distributed.checkpoint``, saved by any number of ranks, with tensors in full.

The file ``.metadata`` is a pickle. It is not unpickled, but parsed into a description: no class or function that it
names is looked up. All contents are checked before they are used.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from pccheck_async.convert.mapped_memory import give_back, tensors_in_a_file
from pccheck_async.convert.model_files import listed
from pccheck_async.convert.pickled_values import NotReadableError, Reading, Section, read_value
from pccheck_async.convert.selection import SAVED, Saved
from pccheck_async.errors import CheckpointError, CorruptStoreError, UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.state import as_bits

__all__ = ["METADATA", "read"]

METADATA: Final = ".metadata"
_MOST_ITEMS: Final = 1 << 20
"""Most items of a list: a path may name any index, and the places before it are filled with None."""
_MOST_KEYS: Final = 100
"""Most keys of a path: no state is nested more deeply."""

_Sizes: TypeAlias = tuple[int, ...]


def read(folder: Path, scratch: Path, reading: Reading) -> dict[str, Any]:
    """Return the state in a folder, with its tensors in a mapped file in ``scratch``; one part is read at a time.

    Raises:
        UnsupportedStateError: a value cannot be read without running code, or was saved through an extension.
        CorruptStoreError: a file is damaged or missing.
    """
    file = folder / METADATA
    try:
        content = _Content.of(_objects(file.read_bytes()))
        _nested(content.entries, content.paths)  # else it would raise after all was read
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        what = str(error) if isinstance(error, _BadError) else f"{type(error).__name__}: {error}"
        raise CorruptStoreError(f"{file} is damaged: {what}") from error
    content.check_files(folder)
    if (about := folder / SAVED).is_file():
        reading.saved = Saved.decode(about.read_bytes(), str(folder))
    return _nested(_read(folder, content, scratch, reading), content.paths)


class _BadError(Exception):
    """The metadata is invalid; the text gives the reason."""


# -- the pickle


@dataclass(slots=True, eq=False)
class _Object:
    """The description of an object in a pickle: its constructor's name, the arguments, and its state."""

    kind: str
    arguments: Any
    state: Any = None


class _Name(str):
    """The name of a class or function in a pickle."""

    __slots__ = ()


def _objects(data: bytes) -> Any:
    """Return the contents of a pickle, with descriptions of all objects but plain values.

    Supports the part of pickle's protocols 2 to 5 for dataclasses, containers, numbers and strings. A damaged pickle
    may raise any Exception.
    """
    stack: list[Any] = []
    marked: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    for code, argument, _ in pickletools.genops(data):
        name = code.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, marked.pop()
            if name == "TUPLE":
                stack.append(tuple(items))
            elif name == "APPENDS":
                stack[-1].extend(items)
            else:
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif name == "SETITEM":
            item, key = stack.pop(), stack.pop()
            stack[-1].update({key: item})
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            known = str(argument).replace(" ", ".") if name == "GLOBAL" else f"{stack.pop(-2)}.{stack.pop()}"
            stack.append(dtypes.TORCH_DTYPES.get(known.removeprefix("torch."), _Name(known)))
        elif name in ("NEWOBJ", "REDUCE"):
            arguments, kind = stack.pop(), stack.pop()
            stack.append(_Object(kind if isinstance(kind, _Name) else "?", arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the opcode {name}")
    raise ValueError("it has no end")


_VALUES: Final = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
)
_CONSTANTS: Final[dict[str, Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_CHECKPOINT: Final = "torch.distributed.checkpoint"


def _state(thing: Any, name: str) -> Mapping[str, Any]:
    """Return the attributes of the described object. Raises _BadError unless it is of DCP's class ``name``."""
    if not isinstance(thing, _Object) or thing.kind != f"{_CHECKPOINT}.{name}":
        raise _BadError(f"a {thing.kind if isinstance(thing, _Object) else type(thing).__name__} is no {name}")
    if not isinstance(thing.state, dict | None):
        raise _BadError(f"the attributes of a {name} are none")
    return thing.state or {}


def _sizes(thing: Any) -> _Sizes:
    items = (
        thing.arguments[0] if isinstance(thing, _Object) and thing.kind == "torch.Size" and thing.arguments else None
    )
    if isinstance(items, tuple) and len(items) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in items):
        return items
    raise _BadError(f"{short(items)} are no sizes")


# -- the contents of the metadata


@dataclass(slots=True)
class _Tensor:
    """A whole tensor, and the boxes in which it is stored: sizes by offsets, without empty ones."""

    dtype: torch.dtype
    shape: _Sizes
    requires_grad: bool
    boxes: dict[_Sizes, _Sizes]

    @classmethod
    def of(cls, thing: Any) -> _Tensor:
        state = _state(thing, "metadata.TensorStorageMetadata")
        properties = getattr(state.get("properties"), "state", None)  # a tuple, of TensorProperties
        chunks = state.get("chunks")
        if not isinstance(properties, tuple) or len(properties) < 3 or not isinstance(properties[0], torch.dtype):
            raise _BadError("the properties of a tensor are none")
        if not isinstance(chunks, list):
            raise _BadError("a tensor has no chunks")
        each = [_state(chunk, "metadata.ChunkStorageMetadata") for chunk in chunks]
        pairs = [(_sizes(box.get("offsets")), _sizes(box.get("sizes"))) for box in each]
        pairs = [(offsets, sizes) for offsets, sizes in pairs if prod(sizes)]
        tensor = cls(properties[0], _sizes(state.get("size")), properties[2] is True, dict(pairs))
        if trouble := tensor._trouble(len(pairs)):
            raise _BadError(f"a tensor of shape {tensor.shape} {trouble}")
        return tensor

    def _trouble(self, count: int) -> str:
        """Return why the boxes do not cover the tensor exactly once; "" if they do."""
        dims = len(self.shape)
        if any(len(offsets) != dims or len(sizes) != dims for offsets, sizes in self.boxes.items()):
            return "has chunks of other dimensions"
        low = np.array([*self.boxes], np.int64).reshape(len(self.boxes), dims)
        high = low + np.array([*self.boxes.values()], np.int64).reshape(len(self.boxes), dims)
        if (high > np.array(self.shape, np.int64)).any():
            return "has a chunk that reaches outside"
        if count != len(self.boxes) or sum(map(prod, self.boxes.values())) != prod(self.shape):
            return "is not all there, or some of it twice"
        for at in range(count - 1):
            if ((low[at] < high[at + 1 :]) & (low[at + 1 :] < high[at])).all(axis=1).any():
                return "is not all there, and some of it twice"
        return ""


class _Place(NamedTuple):
    """The place in a file of a tensor's box, or of a value, for which ``offsets`` is None."""

    file: str
    start: int
    nbytes: int
    name: str
    offsets: _Sizes | None


@dataclass(slots=True)
class _Content:
    """The contents of a folder according to its metadata, by flat names.

    Attributes:
        entries: The tensors, and None for other values, in the order of the state.
        paths: The keys from the root to each entry; a name that is not in it is a key of the root.
        places: The places of all boxes and values, in the order of files and offsets.
    """

    entries: dict[str, _Tensor | None]
    paths: dict[str, tuple[str | int, ...]]
    places: list[_Place] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: Any) -> _Content:
        state = _state(metadata, "metadata.Metadata")
        about, paths = _mapping(state.get("state_dict_metadata")), _mapping(state.get("planner_data"))
        entries: dict[str, _Tensor | None] = {}
        for name in (*(name for name in paths if name in about), *(name for name in about if name not in paths)):
            kind = getattr(about[name], "kind", "")
            entries[name] = None if kind == f"{_CHECKPOINT}.metadata.BytesStorageMetadata" else _Tensor.of(about[name])
        content = cls(entries, {name: _path(paths[name]) for name in entries if name in paths})
        stored: dict[tuple[str, _Sizes | None], Mapping[str, Any]] = {}
        if not isinstance(state.get("storage_data"), dict):
            raise _BadError("it does not say where anything is stored")
        for key, info in state["storage_data"].items():
            index = _state(key, "metadata.MetadataIndex")
            offsets = None if index.get("offset") is None else _sizes(index["offset"])
            if type(fqn := index.get("fqn")) is str:
                stored[fqn, offsets] = _state(info, "filesystem._StorageInfo")
        for name, entry in entries.items():
            for offsets in (None,) if entry is None else entry.boxes:
                if (name, offsets) not in stored:
                    raise _BadError(f"it does not say where {name} is stored")
                content.places.append(_place(stored[name, offsets], name, offsets))
        content.places.sort(key=lambda place: place[:3])
        return content

    def check_files(self, folder: Path) -> None:
        """Raise CorruptStoreError if a file is missing or too short."""
        titles = sorted({place.file for place in self.places})
        if lost := [title for title in titles if not (folder / title).is_file()]:
            raise CorruptStoreError(f"{folder} lacks the files {listed(lost)}, which its metadata names")
        sizes = {title: (folder / title).stat().st_size for title in titles}
        for place in self.places:
            entry, least = self.entries[place.name], 0
            if entry is not None and place.offsets is not None:
                least = prod(entry.boxes[place.offsets]) * entry.dtype.itemsize
            if place.start + place.nbytes > sizes[place.file] or place.nbytes < least:
                raise CorruptStoreError(f"{folder / place.file} is too short: it lacks some of {place.name}")


def _mapping(thing: Any) -> dict[str, Any]:
    thing = {} if thing is None else thing
    if not isinstance(thing, dict) or not all(type(name) is str for name in thing):
        raise _BadError(f"a {type(thing).__name__} is no mapping from names")
    return thing


def _path(keys: Any) -> tuple[str | int, ...]:
    if (
        isinstance(keys, tuple)
        and 0 < len(keys) <= _MOST_KEYS
        and all(type(key) is str or (type(key) is int and 0 <= key < _MOST_ITEMS) for key in keys)
        and type(keys[0]) is str
    ):
        return keys
    raise _BadError(f"{short(keys)} is no path")


def _place(info: Mapping[str, Any], name: str, offsets: _Sizes | None) -> _Place:
    file, start, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
    if info.get("transform_descriptors"):
        raise UnsupportedStateError(
            f"{name} was saved through an extension, {short(info['transform_descriptors'])}; load it with that"
        )
    if type(file) is not str or Path(file).name != file or "\0" in file:
        raise _BadError(f"{short(file)} is no name of a file in the folder")
    if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
        raise _BadError(f"{name} is stored at no place")
    return _Place(file, start, nbytes, name, offsets)


# -- the files


def _read(folder: Path, content: _Content, scratch: Path, reading: Reading) -> dict[str, Any]:
    """Read every box and value once, in the order of the files; return tensors and values by flat names."""
    values: dict[str, Any] = dict.fromkeys(content.entries)
    tensors = {name: entry for name, entry in content.entries.items() if entry is not None}
    wanted = [(entry.shape, entry.dtype) for entry in tensors.values()]
    values |= zip(tensors, tensors_in_a_file(scratch, wanted), strict=True)
    refused: dict[str, NotReadableError] = {}
    for title, places in groupby(content.places, key=lambda place: place.file):
        with (folder / title).open("rb") as file:
            for place in places:
                try:
                    part = read_value(Section(file, place.start, place.nbytes), reading)
                    entry = content.entries[place.name]
                    if entry is None:
                        values[place.name] = part
                    else:
                        _put(part, entry, place, values[place.name])
                        give_back([values[place.name]])
                except NotReadableError as error:
                    refused[place.name] = error
                except CorruptStoreError as error:
                    raise CorruptStoreError(f"{folder / title}: {place.name} is damaged: {error}") from error
    for name, entry in tensors.items():
        if entry.requires_grad and (entry.dtype.is_floating_point or entry.dtype.is_complex):
            values[name].requires_grad_()
    if refused and reading.skips:
        reading.missing += [f"{name} (cannot be read without running code: {error})" for name, error in refused.items()]
        return {name: value for name, value in values.items() if name not in refused}
    if refused:
        each = [f"{name} ({error})" for name, error in refused.items()]
        listed = "; ".join(each[:50]) + ("; ..." if len(each) > 50 else "")
        raise UnsupportedStateError(
            f"{folder} holds values that cannot be read without running code: {listed}. If you trust what is named, "
            "allow it (torch.serialization.add_safe_globals); or leave it out: skip_unreadable=True (--skip-unreadable)"
        )
    return values


def _put(part: Any, entry: _Tensor, place: _Place, whole: torch.Tensor) -> None:
    """Copy one box of a tensor into the whole tensor. Raises CorruptStoreError, NotReadableError."""
    assert place.offsets is not None
    sizes = entry.boxes[place.offsets]
    if not isinstance(part, torch.Tensor) or part.dtype != entry.dtype or tuple(part.shape) != sizes:
        what = f"{part.dtype}, {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
        raise CorruptStoreError(f"it is {what}, not {entry.dtype}, {sizes}, as the metadata says")
    if part.layout is not torch.strided or part.is_quantized or part.is_meta:
        raise NotReadableError(f"a part of a tensor of layout {part.layout}, on {part.device}")
    box = tuple(slice(low, low + size) for low, size in zip(place.offsets, sizes, strict=True))
    as_bits(whole)[box] = as_bits(part.resolve_conj().resolve_neg())


# -- the state


class _List(dict[int, Any]):
    """A list of which some items may be missing."""


class _Dict(dict[str, Any]):
    """A container of the state, to distinguish it from a dict that is a value in it."""


def _nested(values: Mapping[str, Any], paths: Mapping[str, Sequence[str | int]]) -> dict[str, Any]:
    """Return the nested state of values by flat names, as DCP makes it: a list's missing items are None."""
    root = _Dict()
    for name, value in values.items():
        path = paths.get(name, (name,))
        container: dict[Any, Any] = root
        for key, following in pairwise(path):
            kind = _List if isinstance(following, int) else _Dict
            container = container.setdefault(key, kind())
            if type(container) is not kind:
                raise _BadError(f"{name} lies in what is no container of it")
        if path[-1] in container:
            raise _BadError(f"two values have the path of {name}")
        container[path[-1]] = value
    nested: dict[str, Any] = _plain(root)
    return nested


def _plain(value: Any) -> Any:
    if type(value) is _List:
        return [_plain(value.get(index)) for index in range(max(value) + 1)]
    return {key: _plain(item) for key, item in value.items()} if type(value) is _Dict else value
