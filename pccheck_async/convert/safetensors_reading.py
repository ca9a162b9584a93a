# SPDX-License-Identifier: Apache-2.0
"""Reads files of safetensors: the whole state if this package exported it, or the tensors by their names."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from pccheck_async.convert.model_files import Index, is_index, listed, read_index, refuse_other_things
from pccheck_async.convert.safetensors_file import STATE, TAKEN, StoredArray, StoredStructure
from pccheck_async.convert.selection import Saved
from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import Metadata, check_metadata
from pccheck_async.state.restore.tree import rebuild

__all__ = ["read"]


def read(place: Path, missing: list[str]) -> tuple[Mapping[str, Any], Saved | None, Metadata]:
    """Map a file, or the files that an index names; return the state, the exported checkpoint's facts, and metadata.

    Tensors of the files that are not in the index are included, as in transformers. Metadata that do not fit into a
    checkpoint's are named in ``missing``.

    Raises:
        FileNotFoundError: a file that the index names is missing.
        CorruptStoreError: a file is damaged, or lacks a tensor that the index or the metadata names.
        UnsupportedStateError: a file is of ``torch.save``, or no file of tensors.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("importing from safetensors needs that package: pip install safetensors") from error
    index = read_index(place) if is_index(place, "safetensors") else None
    files = [place.parent / name for name in sorted(set(index.weight_map.values()))] if index else [place]
    opened: dict[str, Any] = {}
    try:
        with ExitStack() as stack:
            for file in files:
                refuse_other_things(file)
                _refuse_torch(file)
                opened[file.name] = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            return _read(place, index, opened, missing)
    except SafetensorError as error:
        file = files[min(len(opened), len(files) - 1)]  # the one after those that could be opened
        raise CorruptStoreError(f"{file} is no whole file of safetensors: {error}") from error


def _read(
    place: Path, index: Index | None, opened: dict[str, Any], missing: list[str]
) -> tuple[Mapping[str, Any], Saved | None, Metadata]:
    found: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for file in opened.values():
        about |= file.metadata() or {}
    if index is not None:
        about = about | index.metadata
        names = {title: set(file.keys()) for title, file in opened.items()}
        if lost := [f"{name} (in {title})" for name, title in index.weight_map.items() if name not in names[title]]:
            raise CorruptStoreError(f"the files beside {place} lack {listed(lost)}, which it names")
        found = {name: opened[title] for name, title in index.weight_map.items()}
    for file in opened.values():
        found = {**dict.fromkeys(file.keys(), file), **found}
    structure = _structure((about if index is None else index.metadata).get(STATE))
    facts = _facts(about, structure, missing)
    if structure is None:
        return {name: file.get_tensor(name) for name, file in found.items()}, None, facts
    if lacking := sorted({array.name for array in structure.arrays} - found.keys()):
        raise CorruptStoreError(f"{place} lacks {listed(lacking)}, which its metadata names")
    return _state(structure, lambda name: found[name].get_tensor(name)), structure, facts


def _facts(about: Mapping[str, Any], saved: Saved | None, missing: list[str]) -> Metadata:
    """Return the metadata of the exported checkpoint, and as many of the file's others as fit; rest to ``missing``."""
    own: Metadata = {} if saved is None else saved.metadata
    facts, name = dict(own), None if saved is None else saved.name
    for key, value in sorted(about.items()):  # safetensors gives them in any order
        if key not in TAKEN and key not in own:
            try:
                check_metadata({**facts, key: value}, name)
                facts[key] = value
            except UnsupportedStateError as error:
                missing.append(f"the metadata {key} ({str(error).partition(';')[0]})")
    return facts


def _refuse_torch(file: Path) -> None:
    with file.open("rb") as opened:
        head = opened.read(9)
    if head.startswith((b"PK\3\4", b"\x80")) and head[8:] != b"{":  # the header of one may be 128 bytes long
        raise UnsupportedStateError(
            f"{file} is a file of torch.save, whatever it is called: import it alone (--from torch, source='torch')"
        )


def _structure(text: object) -> StoredStructure | None:
    if text is None:
        return None
    try:
        if not isinstance(text, str):
            raise ValueError("it is no text")
        structure = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=StoredStructure)
    except (msgspec.MsgspecError, binascii.Error, RecursionError, ValueError) as error:
        raise CorruptStoreError(f"the metadata {STATE} cannot be read: {error}") from error
    if structure.version != 1:
        raise CorruptStoreError(f"the metadata {STATE} has format {structure.version}; this package reads format 1")
    return structure


def _state(structure: StoredStructure, read: Callable[[str], torch.Tensor]) -> Mapping[str, Any]:
    tensors: dict[int, torch.Tensor] = {}

    def array(index: int) -> Any:
        if not 0 <= index < len(structure.arrays):
            raise CorruptStoreError(f"the state names array {index} of {len(structure.arrays)}")
        about = structure.arrays[index]
        if about.tied_to not in tensors:
            if not 0 <= about.tied_to <= index:
                raise CorruptStoreError(f"array {about.name!r} is tied to one that is none")
            tensors[about.tied_to] = read(structure.arrays[about.tied_to].name)
        return _as_it_was(about, tensors[about.tied_to])

    state = rebuild(structure.skeleton, array)
    if not isinstance(state, Mapping):
        raise CorruptStoreError("the state in the metadata is no mapping")
    return state


def _as_it_was(about: StoredArray, tensor: torch.Tensor) -> Any:
    try:
        match about.kind:
            case "ndarray":
                return tensor.numpy()
            case "parameter":
                return torch.nn.Parameter(tensor, about.requires_grad)
            case _:
                return tensor.detach().requires_grad_(about.requires_grad)
    except (RuntimeError, TypeError) as error:
        raise CorruptStoreError(f"array {about.name!r} cannot be made: {error}") from error
