# SPDX-License-Identifier: Apache-2.0
"""``pccheck bench``: ways of saving, compared on the user's own disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pccheck_async.cli.output import (
    FAILED,
    at_least,
    complain,
    no_file,
    no_plot,
    parse_size,
    path_argument,
    reporting,
    size,
    terminal,
)

_USAGE, _INTERRUPTED = 2, 130
_SIZE_HELP = "Size of the state, such as 500MB (default: 1GiB)."


@reporting
def bench(
    folder: Annotated[Path, path_argument("FOLDER", "On the disk to measure; left as it was.")],
    nbytes: Annotated[int | None, typer.Option("--size", parser=parse_size, metavar="SIZE", help=_SIZE_HELP)] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="Of torch, safetensors, dcp, dcp-async (default: all that can run).",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            parser=at_least(1),
            metavar="N",
            help="How often each method saves and loads (default: 5).",
            show_default=False,
        ),
    ] = 5,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every sample to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a bar chart (needs matplotlib).")] = None,
) -> int:
    """Compare ways of saving on your disk.

    Measures, on the disk under FOLDER, how long the call to save takes, and how long until the checkpoint is durable.
    Methods take turns in a new random order every round; before each save every tensor changes, and after it the
    checkpoint is loaded with a cold page cache and compared bit by bit. Shows medians and quartiles, and the time in
    which the disk itself takes the bytes (O_DIRECT), measured between the rounds. Nothing else should use the disk and
    the cores meanwhile. All files are removed at the end, after Ctrl-C too.

    Exit status: 0 all measured, 1 a method failed, a checkpoint did not load as it was saved, or disk or memory do not
    suffice, 2 wrong usage, 130 interrupted.
    """
    from pccheck_async import bench

    names = [name.strip() for text in against or [] for name in text.split(",") if name.strip()]
    nbytes = nbytes or 1 << 30
    try:
        kinds = bench.find_methods(names)
    except bench.UnknownMethodError as error:
        complain(str(error))
        return _USAGE
    problem = no_file("--json", json) or no_plot(plot)  # before anything is written
    if not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif nbytes < bench.LEAST_BYTES:
        problem = f"--size is at least {bench.LEAST_BYTES} bytes, not {nbytes}"
    elif plot is not None and plot.suffix not in (".png", ".pdf", ".svg"):
        problem = problem or f"--plot: {plot} is not named .png, .pdf or .svg"
    if problem:
        complain(problem)
        return _USAGE
    stderr = terminal(stderr=True)
    try:
        with stderr.status("starting") as status:

            def tell(what: str) -> None:
                status.update(what)
                if not stderr.is_terminal:
                    print(what, file=sys.stderr)

            found = bench.compare(kinds, folder, nbytes, rounds, progress=tell)
    except KeyboardInterrupt:
        complain("interrupted; everything that was written has been removed")
        return _INTERRUPTED
    except bench.NoRoomError as error:
        complain(str(error))
        return FAILED
    stdout = terminal()
    stdout.print(
        f"{size(found.nbytes)} in {len(found.outcomes)} ways, {rounds} rounds; {found.place.filesystem}, direct I/O "
        f"{found.place.direct}; {found.place.machine}; median [quartiles]"
    )
    stdout.print(bench.table(found))
    for name, kind in bench.METHODS.items():
        if not names and (reason := kind.why_not()):
            stdout.print(f"{name}: not measured: {reason}")
    if json is not None:
        json.write_text(bench.as_json(found))
    if plot is not None and any(not outcome.problem for outcome in found.outcomes):
        bench.draw(found, plot)
    failed = [outcome for outcome in found.outcomes if outcome.problem]
    for outcome in failed:
        complain(f"{outcome.method} failed: {outcome.problem}")
    return FAILED if failed else 0
