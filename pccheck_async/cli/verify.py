"""``pccheck verify``: every checksum of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from pccheck_async import CheckpointError, Damage, Verification, verify_checkpoints
from pccheck_async.cli.output import (
    DIFFERENT,
    as_json,
    console,
    created,
    dump,
    print_table,
    progress_bar,
    refuse,
    table,
)
from pccheck_async.cli.show import printable, size

__all__ = ["run"]

_MOST_LEAVES = 8


def run(path: Path, *, step: int | None, every: bool, json: bool) -> int:
    """Verify and return the exit status."""
    try:
        with progress_bar("verifying") as progress:
            found = verify_checkpoints(path, step=step, every=every, progress=progress)
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        return refuse(error)
    if json:
        dump(_as_json(found))
    else:
        _print(found)
    return 0 if found.whole else DIFFERENT


def _as_json(found: Verification) -> dict[str, Any]:
    return {
        "whole": found.whole,
        "records": [
            {"copy": copy.name, "offset": copy.offset, "generation": copy.generation, "state": copy.state}
            for copy in found.records
        ],
        "checkpoints": [
            {
                **as_json(checkpoint.info),
                "slot": checkpoint.slot,
                "chunks": checkpoint.chunks,
                "checked_nbytes": checkpoint.nbytes,
                "whole": not checkpoint.damage,
                "damage": [_damage_as_json(damage) for damage in checkpoint.damage],
            }
            for checkpoint in found.checkpoints
        ],
        "nbytes": found.nbytes,
        "seconds": found.seconds,
        "direct": found.direct,
    }


def _damage_as_json(damage: Damage) -> dict[str, Any]:
    return {
        "file": damage.file,
        "what": damage.what,
        "offset": damage.offset,
        "nbytes": damage.nbytes,
        "reason": damage.reason,
        "leaves": list(damage.leaves),
    }


def _print(found: Verification) -> None:
    screen = console()
    rows = table("step", "counter", "size", "chunks", "captured (UTC)", "slot", "", right=4)
    for checkpoint in found.checkpoints:
        info = checkpoint.info
        verdict = f"{len(checkpoint.damage)} damaged" if checkpoint.damage else "whole"
        rows.add_row(
            str(info.step),
            str(info.counter),
            size(info.nbytes),
            str(checkpoint.chunks),
            created(info),
            checkpoint.slot,
            verdict,
        )
    print_table(screen, rows)
    lines = [_damage(damage) for checkpoint in found.checkpoints for damage in checkpoint.damage]
    for copy in found.records:
        if copy.state == "damaged":
            lines.append(
                f"commit: copy {copy.name} of a record, at byte {copy.offset}, is damaged, or was cut short by a power "
                "failure; the next two commits write it anew"
            )
        elif copy.state == "older":
            lines.append(f"commit: copy {copy.name} was not written when its twin was: a kill in between (harmless)")
    rate = f", {size(int(found.nbytes / found.seconds))}/s" if found.seconds > 0 else ""
    lines.append(
        f"{size(found.nbytes)} read in {found.seconds:.2f} s{rate}{'' if found.direct else ' through the page cache'}. "
        + ("Every checksum holds." if found.whole else "DAMAGED.")
    )
    for line in lines:
        screen.print(Text(line), soft_wrap=True)


def _damage(damage: Damage) -> str:
    leaves = ", ".join(printable(path) for path in damage.leaves[:_MOST_LEAVES])
    more = len(damage.leaves) - _MOST_LEAVES
    holds = f"; it holds {leaves}{f' and {more} more (--json names all)' if more > 0 else ''}" if leaves else ""
    where = f"bytes {damage.offset} to {damage.offset + damage.nbytes}"
    return f"{damage.file}: {damage.what} ({where}): {printable(damage.reason)}{holds}"
