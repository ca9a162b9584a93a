# SPDX-License-Identifier: Apache-2.0
"""``pccheck export`` and ``pccheck import``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import pccheck_async as pccheck
from pccheck_async.cli.checkpoints import naming_others
from pccheck_async.cli.output import (
    DIFFERENT,
    AnyPlace,
    Json,
    Name,
    Rank,
    Report,
    Step,
    as_json,
    complain,
    one_of,
    parse_size,
    path_argument,
    pick,
    printable,
    reporting,
    size,
)
from pccheck_async.cli.ranks import read_place

if TYPE_CHECKING:
    pass


_MOST_CHANGES = 20
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""The files by which ``from_pretrained`` finds the weights in a folder."""


@reporting
def export(
    path: AnyPlace,
    out: Annotated[Path, path_argument("OUT", "The new file, or folder.")],
    to: Annotated[
        Literal["safetensors", "torch", "dcp", "lightning", "transformers"],
        typer.Option(
            parser=one_of("safetensors", "torch", "dcp", "lightning", "transformers"),
            metavar="FORMAT",
            help="safetensors, torch, dcp, lightning or transformers.",
        ),
    ],
    step: Step = None,
    name: Name = None,
    rank: Rank = None,
    keys: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="What to export, such as 'model.*'; may be repeated.")
    ] = None,
    root: Annotated[
        str | None, typer.Option(metavar="PART", help="The part that becomes the whole, such as 'model'.")
    ] = None,
    max_file_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="safetensors: a folder of files of at most this size, and an index."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT in one step if it is an earlier export.")
    ] = False,
    json: Json = False,
) -> Report:
    """Write a checkpoint, or a part of it, in another format.

    The file or folder can be read without this package.

    If the slot or manifest of the newest checkpoint is damaged, and neither --step nor --name is given, the next older
    one is written, with a warning. A damaged tensor is an error, because it is found only while the file is written.

    Exit status: 0 exported, 1 it failed or the format cannot express something, 2 wrong usage, 3 there is no such
    checkpoint, 4 something is lost or damaged: after an error nothing was written, after a warning an older checkpoint.
    """
    most = None if max_file_size is None else parse_size(max_file_size)
    if most is not None and to != "safetensors":
        raise typer.BadParameter("--max-file-size is for --to safetensors")
    newest = [info.counter for info in read_place(path).infos if not info.rejected][:1]
    with naming_others(path, step, name):
        exported = pccheck.stores.export(
            path,
            out,
            to=to,
            step=step,
            name=name,
            rank=rank,
            keys=keys or None,
            root=root,
            max_file_size=most,
            overwrite=overwrite,
        )
    fell_back = step is None and name is None and [exported.info.counter] < newest
    document = {
        "checkpoint": as_json(exported.info),
        "path": str(exported.path),
        **pick(exported, "nbytes", "tensors", "values"),
        "fell_back": fell_back,
        "changed": [printable(line) for line in exported.changed],
    }
    return Report(document, _exported(exported), DIFFERENT if fell_back else 0)


def _exported(exported: pccheck.stores.Exported) -> Iterator[str]:
    counted = f"{exported.tensors} tensors and {exported.values} plain values"
    yield f"step {exported.info.step}: {counted}, {size(exported.nbytes)}, in {exported.path}"
    for line in exported.changed[:_MOST_CHANGES]:
        complain(f"changed: {line}")
    if len(exported.changed) > _MOST_CHANGES:
        complain(f"changed: {len(exported.changed) - _MOST_CHANGES} more")
    folder = exported.path if exported.path.is_dir() else exported.path.parent
    weights = any(exported.path in (folder, folder / each) and (folder / each).is_file() for each in _WEIGHTS)
    if weights and not (folder / "config.json").exists():
        complain(
            f"from_pretrained needs a config.json beside the weights: model.config.save_pretrained({str(folder)!r})"
        )


@reporting
def import_(
    file: Annotated[
        Path,
        path_argument(
            "FILE",
            "A .ckpt of Lightning, a file of torch.save or safetensors; or a folder: checkpoint-N of transformers, "
            "safetensors, dcp.",
        ),
    ],
    path: Annotated[Path, path_argument("PATH", "Folder of the store; nobody else may write to it.")],
    source: Annotated[
        Literal["lightning", "transformers", "torch", "safetensors", "dcp"] | None,
        typer.Option(
            "--from",
            parser=one_of("lightning", "transformers", "torch", "safetensors", "dcp"),
            metavar="FORMAT",
            help="lightning, transformers, torch, safetensors or dcp (default: as detected).",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="STEP", help="Step of the new checkpoint (default: the file's, or a count).")
    ] = None,
    root: Annotated[str | None, typer.Option(metavar="PART", help="Put it below this name, such as 'model'.")] = None,
    skip_unreadable: Annotated[
        bool,
        typer.Option("--skip-unreadable", help="Leave out values that only running code could read."),
    ] = False,
    json: Json = False,
) -> Report:
    """Save a file or folder of another format as a checkpoint.

    The new checkpoint becomes the newest one of the store. Runs no code from the file. Prints the format that the file
    was read as, and the parts that a run resumed from the checkpoint will lack.

    Exit status: 0 imported, 1 it failed, 2 wrong usage, 3 there is nothing to import, 4 it is damaged.
    """
    info = pccheck.stores.import_(file, path, source=source, step=step, root=root, skip_unreadable=skip_unreadable)
    document = as_json(info) | {"source": info.source, "missing": [printable(line) for line in info.missing]}
    return Report(document, _imported(info, file, path))


def _imported(info: pccheck.stores.Imported, file: Path, path: Path) -> Iterator[str]:
    yield f"{file} ({info.source}): step {info.step}, {size(info.nbytes)}, the newest checkpoint in {path}"
    for line in info.missing:
        complain(f"missing: {line}")
