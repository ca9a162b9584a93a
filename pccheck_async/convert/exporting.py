# SPDX-License-Identifier: Apache-2.0
"""Export of one checkpoint, or a part of it, as a file or folder that can be read without this package."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch

from pccheck_async.api import Connection
from pccheck_async.convert import lightning_file, safetensors_file, torch_file, transformers_folder
from pccheck_async.convert.selection import SAVED, select_part
from pccheck_async.convert.target import replacing
from pccheck_async.errors import StateMismatchError, WriteError, first_few
from pccheck_async.format import CheckpointInfo, which_one
from pccheck_async.medium.open_medium import IO

__all__ = ["Exported", "export_checkpoint"]


_WHOLE: Final = ("lightning", "transformers")
_PARTS: Final = {
    "safetensors": ("model*.safetensors", safetensors_file.INDEX),
    "dcp": (".metadata", "*.distcp", SAVED),
    "transformers": transformers_folder.WRITTEN,
}
"""Patterns of the names in a folder that an export writes, by format."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        info: The checkpoint that was exported.
        path: The new file or folder.
        nbytes: Size of the new file or folder in bytes.
        tensors: Number of exported tensors and arrays.
        values: Number of exported plain values.
        changed: Values that were exported in another form, each with that form.
    """

    info: CheckpointInfo
    path: Path
    nbytes: int
    tensors: int
    values: int
    changed: tuple[str, ...]


def export_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Literal["torch", "safetensors", "dcp", "lightning", "transformers"],
    step: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    keys: Sequence[str] | None = None,
    root: str | None = None,
    max_file_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    host_memory: int = 64 << 20,
    io: IO = "auto",
) -> Exported:
    """Write a checkpoint, or a part of it, as a file or folder of another format.

    A writer, also an engine of this process, may run meanwhile. To export a checkpoint in flight, call
    ``pending.result()`` first, and see that it is kept (by ``keep_last="all"``, or a pin) until the export has begun.

    The step, the name and the metadata of the checkpoint are exported, too, for :func:`import_checkpoint`; not for
    "lightning" and "transformers", whose own files name the step.

    Every byte is verified. Memory stays within ``host_memory`` and a few dozen MiB, for checkpoints of any size, if
    tensors are contiguous; for "dcp" 128 MiB more. The result appears at ``out`` only when it is complete and flushed.

    "torch"
        A file for ``torch.load(out, weights_only=True)``, mapped or not: the nested state, with views, strides and
        ties. Numpy arrays and scalars become tensors and Python's values. Refused are frozensets, empty bytes, ints of
        more than 255 bytes, dtypes of numpy, arrays that no tensor can be, and integers of less than a byte.
    "safetensors"
        The tensors under the paths of their leaves, each in full, even if several share memory, and in C order. Plain
        values that JSON can express are in the metadata ``pccheck_async.values``. The structure with all plain values
        is in ``pccheck_async.state``, from which :func:`import_checkpoint` rebuilds the state, including ties between
        equal views. Dtypes that the format lacks (such as complex128) are refused. With
        ``max_file_size`` it is a folder in the layout of Hugging Face's libraries:
        ``model-00001-of-00003.safetensors`` and so on, each a whole file of the format, and
        ``model.safetensors.index.json``, whose ``weight_map`` assigns tensors to files and whose ``metadata`` has the
        metadata of a single file. A model that fits into one file is ``model.safetensors``, without an index.
    "dcp"
        A folder that ``torch.distributed.checkpoint`` loads, also resharded. Tensors of more than 32 MiB are stored in
        parts, and all tensors in files of about 64 MiB, because that package's writer keeps the tensors of a file in
        memory until it is complete. Plain values, numpy arrays and tuples are pickled, each as a whole, as that package
        does. Of tied tensors each is stored in full, and empty dicts are not stored. Refused are tensors of bits and of
        integers of less than a byte.

    For "safetensors" and "dcp", tensors that are not contiguous are read in parts of the first dimension, of 32 MiB or
    one item each; that takes as much memory as the part spans in the checkpoint.

    Args:
        path: Folder of a store, or of a group: then one rank's part of a complete checkpoint is exported, and
            tensors that lie on several ranks in full.
        out: The new file, or folder ("dcp", or with ``max_file_size``); without ``overwrite`` there must be nothing of
            that name, not even a symbolic link.
        to: The format.
        step: The step to export; by default the newest checkpoint, or the next older one if its manifest is damaged.
        name: The name of the checkpoint, as given to ``checkpoint(name=...)``, instead of its step.
        rank: The rank of a group whose part is exported. By default 0, if other ranks have no different tensors.
        keys: Globs over leaf paths (``"model.*"``); only matching leaves are exported, and read.
        root: Path of a container or object (``"model"``) to export as the whole state: names then begin below it.
        max_file_size: For "safetensors": most bytes of tensors in one file (``max_shard_size`` in transformers). A
            larger tensor has a file of its own.
        metadata: For "safetensors": strings for the metadata of the file (in several files, of the index).
        overwrite: Replace the export at ``out`` atomically: a file (or a link, not its target), or a folder with
            nothing but such an export. If a filesystem cannot exchange names (NFS), a folder is missing for a moment.
        host_memory: Most staging memory in bytes; at least one chunk of the checkpoint is used.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        UnsupportedStateError: the format cannot express some values; lists them all. Nothing was written.
        StateMismatchError: ``keys`` or ``root`` match nothing; or no ``rank`` is given, and ranks have different
            tensors under the same names.
        NoCheckpointError: there is no checkpoint, or not the requested one.
        IncompleteCheckpointError: ``path`` is the folder of one rank, and a tensor lies on several.
        CorruptStoreError: a checksum does not hold; nothing is left of the new file.
        FileExistsError: there is something at ``out``, or with ``overwrite`` something other than such an export.
        ReadError, WriteError: a device failed; WriteError also if the folder for ``out`` is missing.
        ValueError: ``to`` is no format, or another argument is out of range or not for this format.
    """
    formats = ("torch", "safetensors", "dcp", "lightning", "transformers")
    if to not in formats:
        raise ValueError(f"to is {', '.join(map(repr, formats))}, not {to!r}")
    if to in _WHOLE and (keys is not None or root is not None):
        raise ValueError(f"a trainer resumes from the whole checkpoint: no keys and no root for {to!r}")
    if max_file_size is not None and (to != "safetensors" or max_file_size < 1):
        raise ValueError(f"max_file_size is at least one byte, and for 'safetensors'; not {max_file_size} for {to!r}")
    if metadata is not None:
        if to != "safetensors":
            raise ValueError(f"metadata is for 'safetensors', not {to!r}")
        safetensors_file.check_metadata(metadata)
    target = Path(out)
    if not target.parent.is_dir():
        raise WriteError(errno.ENOENT, "there is no such folder to write into: make it first", str(target.parent))
    if overwrite:
        parts = () if to == "safetensors" and max_file_size is None else _PARTS.get(to, ())
        replaced: AbstractContextManager[Path] = replacing(target, parts)
    else:
        replaced = nullcontext(target)
    which = which_one(step, name)
    connecting = partial(Connection, path, which, torch.device("cpu"), host_memory, io, rank)
    with replaced as fresh, closing(connecting()) as connection:
        selection = select_part(connection, keys, root)
        if others := connection.differing(selection.stored_paths.__contains__):
            raise StateMismatchError(
                f"other ranks have different tensors than rank 0, and nothing was written: {first_few(others)}; name "
                "the rank whose tensors are meant (rank=0, --rank 0), or leave these out",
                mismatched=others,
            )
        if to == "lightning":
            selection = lightning_file.to_file(selection)
        if to in ("torch", "lightning"):
            torch_file.write(selection, connection, fresh)
        elif to == "transformers":
            transformers_folder.write(selection, connection, fresh)
        elif to == "safetensors":
            safetensors_file.write(selection, connection, fresh, metadata or {}, max_file_size)
        else:
            from pccheck_async.convert import dcp_folder  # torch.distributed takes as much memory as the export

            dcp_folder.write(selection, connection, fresh)
        nbytes = sum(part.stat().st_size for part in (fresh, *fresh.rglob("*")) if part.is_file())
        info = connection.entry.info
    tensors = len(selection.arrays)
    return Exported(info, target, nbytes, tensors, len(selection.leaves) - tensors, tuple(selection.changed))
