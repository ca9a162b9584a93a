# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a model in a folder of Hugging Face's libraries, and recognises files that are no checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from pccheck_async.errors import CorruptStoreError, UnsupportedStateError

__all__ = ["Index", "Suffix", "find", "find_all", "is_index", "left_out", "listed", "read_index", "refuse_other_things"]

Suffix: TypeAlias = Literal["safetensors", "bin"]

_KINDS: Final = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors")
_STEMS: Final[Mapping[Suffix, str]] = {"safetensors": "model", "bin": "pytorch_model"}


class Index(msgspec.Struct, frozen=True):
    """The index of a model in several files: the file of each tensor, and metadata of all files."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}  # msgspec copies it


def is_index(file: Path, suffix: Suffix) -> bool:
    """Return whether a file has the name of an index of several files, with any word before and perhaps a variant."""
    return re.search(rf"\.{suffix}\.index(\.[\w-]+)?\.json$", file.name) is not None


def find_all(folder: Path, suffix: Suffix) -> list[Path]:
    """Return, in order of preference, the files in a folder that hold a whole model, and indexes of several files.

    Names without a variant ("fp16") come before names with one, and a single file before an index.
    """
    stem = _STEMS[suffix]
    whole = re.compile(rf"{stem}(\.(?!.*-of-)[\w-]+)?\.{suffix}")
    found = []
    for file in folder.iterdir():
        if not file.is_file():
            continue
        if match := whole.fullmatch(file.name):
            found.append((match[1] is not None, 0, file.name, file))
        elif is_index(file, suffix):
            found.append((not file.name.endswith(".index.json"), 1, file.name, file))
    return [file for *_, file in sorted(found)]


def find(folder: Path, suffix: Suffix) -> Path:
    """Return the file of a model in a folder, or the index of several files, as transformers chooses it.

    Raises FileNotFoundError without one; UnsupportedStateError if there are only several indexes or variants.
    """
    stem, found = _STEMS[suffix], find_all(folder, suffix)
    if not found:
        names = f"{stem}.{suffix} and {stem}.{suffix}.index.json"
        raise FileNotFoundError(f"{folder} is a folder without {names}; give a file")
    if found[0].name == f"{stem}.{suffix}":
        return found[0]
    plain = [file for file in found if file.name.endswith(f".{suffix}.index.json")]
    if len(several := plain or found) > 1:
        names = ", ".join(file.name for file in several)
        raise UnsupportedStateError(f"{folder} has several models or variants of one, {names}; give one of them")
    return several[0]


def left_out(folder: Path, taken: Path) -> list[str]:
    """Return a remark on each file of tensors or pickles in a folder that is no part of the model in ``taken``."""
    titles = {taken.name}
    if any(is_index(taken, suffix) for suffix in _STEMS):
        titles.update(read_index(taken).weight_map.values())
    there = sorted(file.name for file in folder.iterdir() if file.suffix in _KINDS and file.is_file())
    return [f"{title} (left out: it is no part of {taken.name})" for title in there if title not in titles]


def read_index(place: Path) -> Index:
    """Return the contents of an index file. Raises CorruptStoreError; FileNotFoundError if a named file is missing."""
    refuse_other_things(place)
    try:
        index = msgspec.json.decode(place.read_bytes(), type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptStoreError(f"{place} is no index of the files of a model: {error}") from error
    titles = sorted(set(index.weight_map.values()))
    if outside := [title for title in titles if Path(title).name != title or "\0" in title]:
        raise CorruptStoreError(f"{place} names {listed(outside)}, which cannot be files beside it")
    if lost := [title for title in titles if not (place.parent / title).is_file()]:
        raise FileNotFoundError(f"{place} names files that are not there: {listed(lost)}")
    return index


def listed(names: list[str]) -> str:
    """Return the first 20 names, and the number of the others, as text."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


_OTHER_THINGS: Final = (
    (rb"version https://git-lfs", "is a pointer of Git LFS, not the file itself, which `git lfs pull` fetches"),
    (rb"\s*<(!doctype\s+html|html|head)\b", "is a page of HTML, not a checkpoint: a server sent it in its place"),
)
"""The first bytes of files that are no checkpoint, and a description of each."""


def refuse_other_things(file: Path) -> None:
    """Raise CorruptStoreError for an empty file, UnsupportedStateError for a pointer of Git LFS or a page of HTML."""
    with file.open("rb") as opened:
        head = opened.read(512)
    if not head:
        raise CorruptStoreError(f"{file} is empty, and no checkpoint")
    for beginning, what in _OTHER_THINGS:
        if re.match(beginning, head, re.IGNORECASE):
            raise UnsupportedStateError(f"{file} {what}")
