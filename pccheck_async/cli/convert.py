"""``pccheck export`` and ``pccheck import``: checkpoints as the files of others, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pccheck_async import CheckpointError, export_checkpoint, import_checkpoint
from pccheck_async.cli.output import as_json, dump, refuse
from pccheck_async.cli.show import complain, printable, size

__all__ = ["run_export", "run_import"]

T = TypeVar("T")
_SHOWN = 20


def run_export(
    path: Path,
    out: Path,
    *,
    to: str,
    step: int | None,
    keys: Sequence[str] | None,
    root: str | None,
    json: bool,
) -> int:
    """Export, say what came out as something else, and return the exit status."""
    format_: Any = to
    exported, status = _told(lambda: export_checkpoint(path, out, to=format_, step=step, keys=keys or None, root=root))
    if exported is None:
        return status
    if json:
        found = {name: getattr(exported, name) for name in ("nbytes", "tensors", "values")}
        changed = [printable(line) for line in exported.changed]
        dump({"checkpoint": as_json(exported.info), "path": str(exported.path), **found, "changed": changed})
        return 0
    counted = f"{exported.tensors} tensors and {exported.values} plain values"
    print(f"step {exported.info.step}: {counted}, {size(exported.nbytes)}, in {exported.path}")
    for line in exported.changed[:_SHOWN]:
        complain(f"changed: {line}")
    if len(exported.changed) > _SHOWN:
        complain(f"changed: {len(exported.changed) - _SHOWN} more")
    return 0


def run_import(file: Path, path: Path, *, source: str, step: int | None, root: str | None, json: bool) -> int:
    """Import, say which checkpoint that is, and return the exit status."""
    format_: Any = source
    info, status = _told(lambda: import_checkpoint(file, path, source=format_, step=step, root=root))
    if info is None:
        return status
    if json:
        dump(as_json(info))
        return 0
    print(f"{file}: step {info.step}, {size(info.nbytes)}, the newest checkpoint in {path}")
    return 0


def _told(work: Callable[[], T]) -> tuple[T | None, int]:
    try:
        return work(), 0
    except (CheckpointError, ImportError, OSError, ValueError, MemoryError, RecursionError) as error:
        return None, refuse(error)
