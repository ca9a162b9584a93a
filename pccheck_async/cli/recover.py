"""``pccheck recover``: what a damaged store still holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from pccheck_async import CheckpointError, Recovery, recover_store
from pccheck_async.cli.output import (
    DIFFERENT,
    NOTHING,
    as_json,
    console,
    created,
    dump,
    print_table,
    progress_bar,
    refuse,
    table,
)
from pccheck_async.cli.show import size
from pccheck_async.upkeep.salvage import FoundCheckpoint

__all__ = ["run"]


def run(path: Path, *, write: bool, search: bool, slots: list[int] | None, json: bool) -> int:
    """Look (and write, where asked to) and return the exit status."""
    try:
        with progress_bar("searching") as progress:
            found = recover_store(path, write=write, search=search, slots=slots or None, progress=progress)
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        return refuse(error)
    if json:
        dump(_as_json(found))
    else:
        _print(found, path)
    if found.written or not found.needed:
        return 0
    return DIFFERENT if found.named or found.record == "valid" else NOTHING


def _as_json(found: Recovery) -> dict[str, Any]:
    return {
        "needed": found.needed,
        "identity": found.identity,
        "record": found.record,
        "slots": [
            {
                "slot": one.file,
                "checkpoint": as_json(one.info) if one.info else None,
                "chunks": one.chunks,
                "damaged_chunks": [{"offset": d.offset, "nbytes": d.nbytes, "reason": d.reason} for d in one.damage],
                "whole": one.whole,
                "note": one.note,
            }
            for one in found.found
        ],
        "names": [as_json(info) for info in found.named],
        "written": list(found.written),
        "kept": list(found.kept),
    }


def _print(found: Recovery, path: Path) -> None:
    screen = console()
    if found.found:
        rows = table("slot", "step", "counter", "size", "captured (UTC)", "whole", "note", right=4)
        for one in found.found:
            rows.add_row(*_row(one))
        print_table(screen, rows)
    for line in _lines(found, path):
        screen.print(Text(line), soft_wrap=True)


def _row(one: FoundCheckpoint) -> tuple[str, ...]:
    if one.info is None:
        return one.file, "", "", "", "", "no", one.note
    info = one.info
    facts = (one.file, str(info.step), str(info.counter), size(info.nbytes), created(info) or "?")
    return (*facts, "yes" if one.whole else "no", one.note)


def _lines(found: Recovery, path: Path) -> list[str]:
    steps = ", ".join(str(info.step) for info in found.named)
    states = f"store.json is {found.identity}, the commit records are {found.record}."
    if found.written:
        kept = f"; what was there is {', '.join(found.kept)} now" if found.kept else ""
        names = f"The store names step {steps}, newest first" if found.named else "The store names no checkpoint"
        return [states, f"Written: {', '.join(found.written)}{kept}.", f"{names}. `pccheck verify {path}` checks them."]
    if not found.needed:
        return [states, "Nothing is missing: a trainer can open this store."]
    if not found.named and found.record != "valid":
        return [states, "No slot holds a whole checkpoint. Nothing was written."]
    return [
        states,
        f"Nothing was written. With --write the store names step {steps}, newest first."
        if found.named
        else "Nothing was written. With --write the store is there again; it names no checkpoint.",
    ]
