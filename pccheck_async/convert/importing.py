"""Import: a file or folder of others as a new checkpoint of a store."""

from __future__ import annotations

import errno
import os
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch

from pccheck_async.api import SyncCheckpointEngine, list_checkpoints
from pccheck_async.convert import dcp_reading, safetensors_reading
from pccheck_async.errors import CheckpointError, CorruptStoreError, StoreFullError, UnsupportedStateError
from pccheck_async.format import CheckpointInfo, Metadata, check_metadata, new_step
from pccheck_async.format.record import GROUP_NAME, IDENTITY_NAME, MOST_ENTRIES
from pccheck_async.medium.open_medium import IO
from pccheck_async.state import arrange, flatten

__all__ = ["import_checkpoint", "read_torch"]


def import_checkpoint(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    source: Literal["torch", "safetensors", "dcp"],
    step: int | None = None,
    root: str | None = None,
    metadata: Metadata | None = None,
    host_memory: int = 128 << 20,
    io: IO = "auto",
) -> CheckpointInfo:
    """Save what a file or folder holds as the newest checkpoint of a store. Checkpoints that are there stay.

    No code in it runs. Files of "torch" and "safetensors" are mapped, not read as a whole.

    "torch"
        A file of ``torch.save``, read with ``weights_only=True``.
    "safetensors"
        A file; or a folder of several with ``model.safetensors.index.json``, or that index itself. Gives the tensors
        under their names, and the whole state where :func:`export_checkpoint` made it.
    "dcp"
        A folder that ``torch.distributed.checkpoint`` saved to files, from any number of ranks; tensors that lay on
        several are put together. Keys and lists are as that package tells them: numbers as keys are strings. Takes the
        memory of the whole state, and of its largest part once more. Pickled values are read with
        ``weights_only=True``; arrays and scalars of numpy are made without numpy's unpickling functions.

    Args:
        file: The file or folder, or a symbolic link to one; pipes and devices cannot be mapped, and are refused.
        path: Folder of the store; created where it does not exist. Nobody else may write to it.
        source: The format.
        step: The step of the new checkpoint; by default that which the file names, if it was exported from here, else
            the engine's counter.
        root: Put what the file holds below this name in the state (``"model"``); what is no mapping needs one.
        metadata: Small facts, as for ``checkpoint``; by default those that an exported file names.
        host_memory: Most staging memory in bytes.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Returns:
        The new checkpoint.

    Durability: durable when this returns.

    Raises:
        FileNotFoundError: there is no such file, or an index names one that is not there.
        UnsupportedStateError: the file holds what cannot be saved, or what cannot be read without running code; names
            it. Or it is of another format; says of which.
        CorruptStoreError: the file is damaged, or one lacks a tensor that an index names.
        StoreLockedError: a trainer writes to the store.
        StoreFullError: there is no space, or the store holds as many checkpoints as it can.
        ImportError: ``source="safetensors"``, and that package is not there.
        ValueError: there is no such format.
    """
    name = Path(file)
    if source not in ("torch", "safetensors", "dcp"):
        raise ValueError(f"source is 'torch', 'safetensors' or 'dcp', not {source!r}")
    place = _find(name, source)
    known, facts = None, None
    if source == "safetensors":
        held, known, facts = safetensors_reading.read(place)
    else:
        held = read_torch(place) if source == "torch" else dcp_reading.read(place)
    state = held if root is None else {root: held}
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"{name} holds a {type(state).__name__}, not a mapping; give the name that it shall have as root"
        )
    step = known if step is None else step
    step, metadata = None if step is None else new_step(step), facts if metadata is None else metadata
    arrange(flatten(state).leaves)  # what cannot be saved is refused before a store is made for it
    check_metadata(metadata or {})
    there = list_checkpoints(path)
    while True:
        keep = _keep(there, path)
        with SyncCheckpointEngine(path, max_in_flight=1, keep_last=keep, host_memory=host_memory, io=io) as engine:
            there = engine.checkpoints()
            if _keep(there, path) <= keep:  # else another process committed before this one had the store to itself
                return engine.checkpoint(state, step=step, metadata=metadata).result()


def _find(name: Path, source: str) -> Path:
    """Return the file to read. Raise where it is of another format: what would fail to read it could not say so."""
    if (name / dcp_reading.METADATA).is_file():
        if source == "dcp":
            return name
        raise UnsupportedStateError(
            f"{name} is a folder of torch.distributed.checkpoint: import it as such (--from dcp, source='dcp')"
        )
    if (name / IDENTITY_NAME).is_file() or (name / GROUP_NAME).is_file():
        raise UnsupportedStateError(f"{name} is a store of this package: copy its checkpoint (`pccheck copy`)")
    if name.is_dir():
        if source == "safetensors":
            return safetensors_reading.find_in_folder(name)
        if source == "torch":
            raise FileNotFoundError(f"{name} is a folder; give a file")
        if any(name.glob(f"__*{dcp_reading.METADATA}")):
            text = f"{name} was saved with use_collectives=False: nothing in it says what belongs together"
            raise UnsupportedStateError(text)
        raise FileNotFoundError(f"{name} is a folder without {dcp_reading.METADATA}, which such a save writes last")
    if not name.is_file():
        raise FileNotFoundError(f"there is no file {name}, or it is none that can be mapped")
    with name.open("rb") as file:
        head = file.read(9)
    begins = "torch" if head.startswith(b"PK") else "safetensors" if head[5:] == b"\0\0\0{" else source
    if safetensors_reading.is_index(name):
        begins = "safetensors"
    if begins != source:
        raise UnsupportedStateError(
            f"{name} begins like a file of {begins}, not of {source}: import it as such (--from {begins}, "
            f"source={begins!r})"
        )
    if source == "dcp":
        raise FileNotFoundError(f"{name} is a file; give the folder that torch.distributed.checkpoint saved to")
    return name


def _keep(there: Sequence[CheckpointInfo], path: str | os.PathLike[str]) -> int:
    """Return the ``keep_last`` that drops none of the checkpoints that are there. Raises StoreFullError."""
    if len(there) >= MOST_ENTRIES:
        full = (
            f"the store names {len(there)} checkpoints, and its record has no room for more; import into another folder"
        )
        raise StoreFullError(errno.ENOSPC, full, os.fspath(path))
    # Pinned ones stay whatever the rules say, and would need their room twice.
    return 1 + max((place for place, info in enumerate(there, 1) if not info.pinned), default=0)


def read_torch(file: Path) -> Any:
    """Read a file of ``torch.save`` without running code in it. Raises UnsupportedStateError, CorruptStoreError."""
    try:
        mapped = zipfile.is_zipfile(file)  # files from before torch 1.6 are not, and cannot be mapped
        if not mapped and tarfile.is_tarfile(file):
            raise UnsupportedStateError(  # up to torch 2.5 weights_only lets such a file run code (CVE-2025-32434)
                f"{file} is a tar archive, as very old versions of torch saved; reading one may run code in it"
            )
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        raise UnsupportedStateError(f"{file} cannot be read without running code in it: {error}") from error
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:  # torch and zipfile let anything through that damaged bytes lead to
        raise CorruptStoreError(f"{file} is no whole file of torch.save: {type(error).__name__}: {error}") from error
