# SPDX-License-Identifier: Apache-2.0
"""Import of a file or folder of another format as a new checkpoint of a store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pccheck_async.api import SyncCheckpointEngine, open_checkpoint
from pccheck_async.convert import (
    dcp_reading,
    lightning_file,
    mapped_memory,
    model_files,
    safetensors_reading,
    transformers_folder,
)
from pccheck_async.convert.pickled_values import Reading, read_file
from pccheck_async.engine import StorageOptions
from pccheck_async.errors import CheckpointError, StoreError, UnsupportedStateError, first_few
from pccheck_async.format import CheckpointInfo, Metadata, Restored, check_metadata, new_step
from pccheck_async.format.record import COMMIT_NAME, GROUP_NAME, IDENTITY_NAME, slot_number
from pccheck_async.medium.open_medium import IO
from pccheck_async.state import arrange, flatten
from pccheck_async.state.values import with_article

__all__ = ["Imported", "Source", "import_checkpoint"]

Source = Literal["lightning", "transformers", "torch", "safetensors", "dcp"]
_SOURCES: Final[tuple[Source, ...]] = get_args(Source)


@dataclass(frozen=True, slots=True, eq=False)
class Imported(CheckpointInfo):
    """The result of an import; compares equal to the :class:`CheckpointInfo` of the new checkpoint.

    Attributes:
        source: The format that was read.
        missing: Parts that were left out, or that a run resumed from the checkpoint will lack, each with the reason.
    """

    source: Source = "torch"
    missing: tuple[str, ...] = ()

    __eq__ = Restored.__eq__
    __hash__ = CheckpointInfo.__hash__


def import_checkpoint(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    source: Source | None = None,
    step: int | None = None,
    root: str | None = None,
    metadata: Metadata | None = None,
    skip_unreadable: bool = False,
    host_memory: int = 128 << 20,
    io: IO = "auto",
) -> Imported:
    """Save the contents of a file or folder as the newest checkpoint of a store. Older checkpoints stay.

    No code in the file runs. Files of "torch" and "safetensors" are mapped, not read as a whole. Checksums are verified
    first, if there are any. (Files of safetensors have none; if a file of torch has none, ``missing`` says so.)

    "torch"
        A file of ``torch.save``, read with ``weights_only=True``. A compressed file is read into memory. Or a folder
        with ``pytorch_model.bin``, or with several such files and an index, or that index itself.
    "safetensors"
        A file; or a folder of several with ``model.safetensors.index.json``, or that index itself. If a folder has
        only one variant (``model.fp16.safetensors``), that is read. The state has the tensors under their names, or is
        the whole state if :func:`export_checkpoint` made the file. The file's metadata become the checkpoint's, as far
        as they fit (512 bytes).
    "dcp"
        A folder that ``torch.distributed.checkpoint`` saved to files, from any number of ranks; tensors that lay on
        several are put together. Keys and lists have that package's form: numbers as keys are strings. The tensors are
        put into a temporary file in the store's folder, so this takes disk space for the whole state, and memory for
        its largest part. Pickled values are read with ``weights_only=True``; arrays and scalars of numpy are made
        without numpy's unpickling functions.

    Args:
        file: The file or folder, or a symbolic link to one; pipes and devices cannot be mapped, and are refused.
        path: Folder of the store; created if it does not exist. Nobody else may write to it.
        source: The format; by default it is detected.
        step: The step of the new checkpoint. By default the step of the exported checkpoint, if the file was exported
            by this package, or the step that a file of Lightning or of the Trainer names, or one more than the step of
            the store's newest checkpoint. A step smaller than that must be given explicitly. The new checkpoint also
            has the name of the exported one, unless the store has a checkpoint of that name.
        root: Put the contents below this name in the state (``"model"``); required if they are no mapping.
        metadata: A few plain values, as for ``checkpoint``; by default those of the exported checkpoint, or of the file
            of safetensors.
        skip_unreadable: Leave out values of torch's files that cannot be read without running code in them (such as
            hyperparameters that omegaconf made), and name them in ``missing``; else they are refused.
        host_memory: Most staging memory in bytes.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Returns:
        The new checkpoint.

    Durability: durable when this returns.

    Raises:
        FileNotFoundError: there is no such file, or a file that an index names is missing. If the path is a folder with
            checkpoints further below, the message names these.
        UnsupportedStateError: a value of the file cannot be saved, or cannot be read without running code; or the file
            is of another format. The message names the values, or the format.
        CorruptStoreError: the file is damaged (it ends too early, or a checksum does not hold), or lacks a tensor that
            an index names.
        StoreLockedError: a trainer writes to the store.
        StoreError: the store has a checkpoint of a later step, and ``step`` is not given.
        StoreFullError: there is no space, or the store holds as many checkpoints as it can.
        ImportError: the format is "safetensors", and that package is not installed.
        ValueError: ``source`` is no format.
    """
    name = Path(file)
    if source not in (None, *_SOURCES):
        raise ValueError(f"source is {', '.join(map(repr, _SOURCES))} or None, not {source!r}")
    place, kind = _find(name, source)
    known: int | None = None
    facts: Metadata | None = None
    missing = (reading := Reading(skip_unreadable)).missing
    if kind == "safetensors":
        held, reading.saved, facts = safetensors_reading.read(place, missing)
    elif kind == "transformers":
        held, known = transformers_folder.read(place, reading)
    elif kind == "dcp":
        held = dcp_reading.read(place, Path(path), reading)
    else:
        read: Callable[[Path, Reading], Any] = (
            transformers_folder.read_bins if model_files.is_index(place, "bin") else read_file
        )
        held = read(place, reading)
    if kind == "lightning" or (source is None and lightning_file.is_checkpoint(held)):
        kind = "lightning"
        held, known = lightning_file.to_state(held, place, missing)
    missing += [f"checksums ({why}: whether it is damaged was not checked)" for why in sorted(reading.unchecked)]
    if name.is_dir() and place != name:
        missing += model_files.left_out(name, place)
    state = held if root is None else {root: held}
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"{name} holds {with_article(type(state).__name__)}, not a mapping; give the name that it shall have as "
            "root"
        )
    # A framework's checkpoint becomes another state: one that PCcheckIO marked in the metadata as its own is no more.
    saved = None if kind in ("lightning", "transformers") else reading.saved
    if saved is not None:
        known, facts = saved.step, saved.metadata if facts is None else facts
    if known is None and step is None and kind not in ("lightning", "transformers"):  # which say so, and why
        missing.append(f"the step ({name.name} has none; it is counted on from the store, unless one is given)")
    asked, step = step is not None, known if step is None else step
    step, metadata = None if step is None else new_step(step), facts if metadata is None else metadata
    own_name = None if saved is None else saved.name or None
    leaves = flatten(state).leaves
    arrange(leaves)  # refuse a bad state before a store is made for it
    check_metadata(metadata or {}, own_name)
    # "all": it takes one slot more than there are, and other processes' commits meanwhile stay, too.
    with SyncCheckpointEngine(
        path, max_in_flight=1, keep_last="all", overwrite=True, storage=StorageOptions(io=io, host_memory=host_memory)
    ) as engine:
        newest = engine.latest
        if newest is not None and step is None:
            step = newest.step + 1
        if newest is not None and step is not None and step < newest.step and not asked:
            raise StoreError(
                f"{path} holds step {newest.step}, and {name} is of step {step}: it would be the newest one, and a run "
                f"would go on from there. Nothing was saved; if that is meant, give the step (--step {step}, "
                f"step={step}), else another folder"
            )
        missing += [] if newest is None else _absent(path, newest.step, state, io)
        if own_name and own_name in [other.name for other in engine.checkpoints() if not other.rejected]:
            missing.append(f"the name {own_name!r} (the store has a checkpoint of that name)")
            own_name = None
        with mapped_memory.given_back(leaves.values):
            info = engine.checkpoint(state, step=step, metadata=metadata, name=own_name).result()
        known_facts: dict[str, Any] = {fact.name: getattr(info, fact.name) for fact in fields(info)}
        return Imported(**known_facts, source=kind, missing=tuple(missing))


def _absent(path: str | os.PathLike[str], step: int, state: Mapping[str, Any], io: IO) -> list[str]:
    """Return a remark on top-level parts that ``state`` lacks and the checkpoint of ``step`` has; [] without any."""
    absent, known = dict[str, None](), tuple(f"{name}." for name in state)
    with suppress(CheckpointError), open_checkpoint(path, step=step, io=io) as there:
        absent = {leaf.partition(".")[0]: None for leaf in there if not f"{leaf}.".startswith(known)}
    what = f"{first_few([*absent])} (which step {step} of {os.fspath(path)} has"
    return [f"{what}: a run that restores all of it cannot go on from this one)"] if absent else []


def _find(name: Path, source: Source | None) -> tuple[Path, Source]:
    """Return the file or folder to read, and its format; without ``source`` a checkpoint of Lightning is "torch".

    Raises UnsupportedStateError, FileNotFoundError with the format that it seems to have, if that is not ``source``.
    """
    if (name / IDENTITY_NAME).is_file() or (name / GROUP_NAME).is_file():
        among = _look(name)
        if source is None or among is None:
            other = f", or import what another program saved there (--from {among}, source={among!r})" if among else ""
            raise UnsupportedStateError(
                f"{name} is a store of this package: copy its checkpoint (`pccheck copy`){other}"
            )
    if not name.is_dir() and not name.is_file():
        there = name.exists()  # as a pipe, say
        raise FileNotFoundError(f"{name} is no regular file" if there else f"there is no file or folder {name}")
    looks = _look(name)
    if source is None and looks is None:
        if below := _below_in_words(name):
            raise UnsupportedStateError(f"{name} is a folder without a checkpoint of its own{below}")
        if slot_number(name.name) is not None or name.name in (COMMIT_NAME, IDENTITY_NAME):
            raise UnsupportedStateError(f"{name} is a file of a store: copy its folder with `pccheck copy`")
        raise UnsupportedStateError(f"the format of {name} is not recognised; give it (--from, source=...)")
    if looks is not None and source not in (None, looks, *_ALSO[name.is_dir()].get(looks, ())):
        what = (
            f"is a folder of {_FOLDERS[looks]}" if name.is_dir() else f"begins like a file of {looks}, not of {source}"
        )
        raise UnsupportedStateError(f"{name} {what}: import it as such (--from {looks}, source={looks!r})")
    kind = source or looks
    assert kind is not None
    if kind in ("safetensors", "torch") and name.is_dir():
        return model_files.find(name, "bin" if kind == "torch" else "safetensors"), kind
    if looks is None:
        _check_place(name, kind)
    return name, kind


_ALSO: Final[tuple[dict[Source, tuple[Source, ...]], ...]] = (
    {"torch": ("lightning",)},
    {
        "transformers": ("safetensors", "torch"),
        "safetensors": ("transformers", "torch"),
        "torch": ("transformers",),
    },
)
"""For a file, and for a folder: further formats that ``source`` may name, by the format that it looks like."""
_FOLDERS: Final[dict[Source, str]] = {
    "dcp": "torch.distributed.checkpoint",
    "transformers": "Hugging Face's Trainer",
    "safetensors": "files of safetensors",
    "torch": "a model's files of torch.save",
}


def _look(name: Path) -> Source | None:
    """Return the format that a file or folder looks like, or None. Raises the errors of ``refuse_other_things``."""
    if name.is_dir():
        if (name / dcp_reading.METADATA).is_file():
            return "dcp"
        if transformers_folder.lies_in(name):
            return "transformers"
        if model_files.find_all(name, "safetensors"):
            return "safetensors"
        return "torch" if model_files.find_all(name, "bin") else None
    model_files.refuse_other_things(name)
    with name.open("rb") as file:
        head = file.read(9)
    if head[5:] == b"\0\0\0{" or model_files.is_index(name, "safetensors"):
        return "safetensors"
    is_torch = head.startswith((b"PK", b"\x80")) or model_files.is_index(name, "bin")
    return "torch" if is_torch else None  # before torch 1.6 a file was but pickles


def _check_place(name: Path, kind: Source) -> None:
    """Raise FileNotFoundError or UnsupportedStateError if ``name``, of no recognised format, cannot be a ``kind``."""
    if kind in ("dcp", "transformers") and not name.is_dir():
        raise FileNotFoundError(f"{name} is a file; give the folder that {_FOLDERS[kind]} saved to")
    if kind == "dcp":
        if any(name.glob(f"__*{dcp_reading.METADATA}")):
            text = f"{name} was saved with use_collectives=False: nothing in it says what belongs together"
            raise UnsupportedStateError(text)
        text = f"{name} is a folder without {dcp_reading.METADATA}, which such a save writes last"
        raise FileNotFoundError(text + _below_in_words(name))
    if kind == "transformers":
        text = f"{name} is a folder without {transformers_folder.TRAINER_STATE}, and without a model"
        raise FileNotFoundError(text + _below_in_words(name))
    if name.is_dir():
        raise FileNotFoundError(f"{name} is a folder{_below_in_words(name) or '; give a file'}")


_DEPTH: Final = 3
"""Levels of folders that are searched for checkpoints: ``lightning_logs/version_0/checkpoints/last.ckpt`` has three."""


def _below_in_words(name: Path) -> str:
    """Return advice that names checkpoints below a folder; "" if there is none."""
    found = sorted((str(one.relative_to(name)) for one in _below(name, _DEPTH)), key=_by_numbers)
    return f"; it is one level too high or more: give {first_few(found, 5)}" if found else ""


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield folders and files below a folder that look like checkpoints; such a folder is not searched further."""
    if not folder.is_dir():
        return
    for one in folder.iterdir():
        with suppress(OSError, CheckpointError):  # what cannot be read is none
            if one.is_dir() and not one.is_symlink():
                if _look(one) is not None:
                    yield one
                elif depth > 1:
                    yield from _below(one, depth - 1)
            elif one.suffix in (".ckpt", ".pt", ".pth", ".safetensors") and _look(one) is not None:
                yield one


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which ``checkpoint-500`` comes before ``checkpoint-1000``."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
