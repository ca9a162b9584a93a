# SPDX-License-Identifier: Apache-2.0
"""Converts a folder ``checkpoint-N`` of Hugging Face's Trainer to the state of ``integrations.transformers``, and back.

Only files are needed: transformers need not be installed, so this is not a part of that adapter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pccheck_async.api import Connection
from pccheck_async.convert import model_files, safetensors_file, safetensors_reading, torch_file
from pccheck_async.convert.pickled_values import Reading, read_file
from pccheck_async.convert.selection import Selection, select_part
from pccheck_async.convert.target import new_folder
from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.state.restore.tree import below

__all__ = ["TRAINER_STATE", "WRITTEN", "lies_in", "read", "read_bins", "write"]

TRAINER_STATE: Final = "trainer_state.json"
_RNG: Final = "rng_state.pth"
_FILES: Final = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
"""Parts of the state, and the files of ``torch.save`` that hold them."""
_KNOWN: Final = ("model", *_FILES, "rng", "trainer", "state")
_BIN: Final = "pytorch_model.bin"
_BIN_INDEX: Final = f"{_BIN}.index.json"
_MODELS: Final = (safetensors_file.WHOLE, _BIN, safetensors_file.INDEX, _BIN_INDEX)
"""Files of the model, in the order in which the Trainer looks for them."""
WRITTEN: Final = (safetensors_file.WHOLE, *_FILES.values(), _RNG, TRAINER_STATE)
"""The files that :func:`write` makes."""


# -- reading


def lies_in(folder: Path) -> bool:
    """Return whether a folder is one that the Trainer saved, even if ``trainer_state.json`` was removed from it."""
    return (folder / TRAINER_STATE).is_file() or (
        any(any(folder.glob(title)) for title in ("optimizer.pt", "scheduler.pt", "rng_state*.pth"))
        and any((folder / title).is_file() for title in _MODELS)
    )


def read(folder: Path, reading: Reading) -> tuple[dict[str, Any], int | None]:
    """Return the state and its step: the one in the Trainer's file, or in the folder's name, or None.

    Tensors are mapped. Missing parts are added to ``reading.missing``.

    Raises:
        FileNotFoundError: a file that the model's index names is missing.
        UnsupportedStateError: a value cannot be read without running code, a link leads out of the folder, or the
            model is saved in a way that only the Trainer reads.
        CorruptStoreError: a file is damaged.
    """
    if outside := [file for file in folder.iterdir() if file.resolve().parent != folder.resolve() and file.is_file()]:
        raise UnsupportedStateError(f"{outside[0]} is a link to {outside[0].resolve()}, outside the checkpoint")
    state: dict[str, Any] = {"model": _read_model(folder, reading)}
    missing = reading.missing
    step: int | None
    if (folder / TRAINER_STATE).is_file():
        text, step = _read_json(folder / TRAINER_STATE)
        state["trainer"] = {"state": text}
    else:
        named = re.fullmatch(r"checkpoint-(\d{1,18})", folder.name)
        step = None if named is None else int(named[1])
        what = "the step is counted on from the store" if named is None else "the step is that of the folder's name"
        missing.append(f"trainer (there is no {TRAINER_STATE}; {what})")
    for part, title in _FILES.items():
        if (folder / title).is_file():
            state[part] = read_file(folder / title, reading)
        elif part != "scaler":  # only where float16 was trained
            missing.append(f"{part} (there is no {title})")
    if (folder / _RNG).is_file():
        state["rng"] = _rng(folder / _RNG, reading)
    else:
        others = len([*folder.glob("rng_state_*.pth")])
        missing.append(f"rng ({f'of {others} ranks, each its own' if others else f'there is no {_RNG}'})")
    return state, step


def _read_json(file: Path) -> tuple[str, int]:
    try:
        text = file.read_text("utf-8")
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{file} is no JSON: {error}") from error
    step = found.get("global_step") if isinstance(found, dict) else None
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise CorruptStoreError(f"{file} is no state of a Trainer: it has no global_step")
    return text, step


def _read_model(folder: Path, reading: Reading) -> Mapping[str, Any]:
    """Return the tensors of the model; if there are several files of it, from the one that the Trainer would read."""
    found = [title for title in _MODELS if (folder / title).is_file()]
    if not found:
        raise UnsupportedStateError(
            f"{folder} has no {safetensors_file.WHOLE}, {_BIN} or index of several (PEFT, FSDP and DeepSpeed save "
            "otherwise): attach PCcheckCallback and let the Trainer read it, train(resume_from_checkpoint=...)"
        )
    reading.missing += [f"{title} (left out: the Trainer takes {found[0]})" for title in found[1:]]
    file = folder / found[0]
    if found[0] in (safetensors_file.WHOLE, safetensors_file.INDEX):
        return safetensors_reading.read(file, reading.missing)[0]
    return read_bins(file, reading) if found[0] == _BIN_INDEX else _mapping(read_file(file, reading), file)


def read_bins(index: Path, reading: Reading) -> dict[str, Any]:
    """Return the tensors of the files of torch.save that an index names. Raises the errors of :func:`read`."""
    files = [index.parent / title for title in sorted(set(model_files.read_index(index).weight_map.values()))]
    return {name: value for file in files for name, value in _mapping(read_file(file, reading), file).items()}


def _mapping(held: Any, file: Path) -> Mapping[str, Any]:
    if not isinstance(held, Mapping):
        raise CorruptStoreError(f"{file} holds a {type(held).__name__}, not the tensors of a model")
    return held


def _rng(file: Path, reading: Reading) -> dict[str, Any]:
    """Return the generators' states in a file of the Trainer, in the form of :class:`pccheck_async.RNGState`."""
    held = read_file(file, reading)
    try:
        version, words, gauss = held["python"]
        bit_generator, key, position, has_gauss, normal = held["numpy"]
        cuda = held.get("cuda")
        return {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
            "numpy": {
                "bit_generator": bit_generator,
                "state": {"key": key, "pos": position},
                "has_gauss": has_gauss,
                "gauss": normal,
            },
            "torch": held["cpu"],
            "cuda": [cuda] if isinstance(cuda, torch.Tensor) else cuda,  # of the current device only, or of all
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"{file} holds no states of generators: {type(error).__name__}: {error}") from error


# -- writing


def write(selection: Selection, connection: Connection, path: Path) -> None:
    """Write the parts of the state that exist as files from which the Trainer resumes, into a new folder ``path``.

    Raises UnsupportedStateError if it is no state of that adapter, or a file's format cannot express a value.
    """
    there = selection.saved_by("transformers")
    for part, names in (("", there), ("trainer.", dict(below(there["trainer"])))):
        others = [f"{part}{name} (left out: the Trainer has no place for it)" for name in names if name not in _KNOWN]
        selection.changed += others
    trainer, rng = (connection.rebuild(there.get(part)) for part in ("trainer", "rng"))
    try:
        progress = json.loads(trainer["state"])
        generators = None if rng is None else _rng_file(rng)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedStateError(
            f"PCcheckCallback of integrations.transformers saved no such checkpoint: {type(error).__name__}: {error}"
        ) from error
    with new_folder(path) as folder:
        for part, title in {"model": safetensors_file.WHOLE, **_FILES}.items():
            if part not in there:
                continue
            chosen = select_part(connection, None, part)
            if part == "model":
                safetensors_file.write(chosen, connection, folder / title, {})
            else:
                torch_file.write(chosen, connection, folder / title)
            selection.changed += [f"{part}.{line}" for line in chosen.changed]
        if generators is not None:
            torch.save(generators, folder / _RNG)
        (folder / TRAINER_STATE).write_text(json.dumps(progress, indent=2, sort_keys=True) + "\n")


def _rng_file(state: Mapping[str, Any]) -> dict[str, Any]:
    python, numpy = state["python"], state["numpy"]
    held = {
        "python": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        "numpy": (
            numpy["bit_generator"],
            numpy["state"]["key"],
            numpy["state"]["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ),
        "cpu": state["torch"],
    }
    if state["cuda"] is not None:
        held["cuda"] = state["cuda"][0] if len(state["cuda"]) == 1 else state["cuda"]
    return held
