# SPDX-License-Identifier: Apache-2.0
"""``pccheck watch``: a live view of an engine that runs in another process."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pccheck_async.cli.output import (
    DIFFERENT,
    AnyFolder,
    complain,
    dump,
    duration,
    printable,
    reporting,
    seconds,
    size,
    status_of,
    table,
    terminal,
)
from pccheck_async.cli.ranks import describe_slowest, problems, read_place, slowest, stage_table, stage_times

if TYPE_CHECKING:
    from pccheck_async.medium.status_file import CommittedStatus, InFlightStatus, Published, Status

_NOBODY = "no engine runs here, or it began to save a moment ago"
_MOST_COMMITTED = 8
_WIDE = 75
_VERY_WIDE = 100
"""Widths of a terminal from which on the sizes of checkpoints in flight are shown, and progress bars."""
_SILENT_SECONDS = 3.0
"""Seconds without a new status after which an engine is called silent: engines publish one twice a second."""


@dataclass(frozen=True, slots=True)
class WatchView:
    """The state of a store at one moment.

    Attributes:
        path: Folder of the store.
        published: The status that the engine has published; None without one.
        committed: The durable checkpoints, newest first.
        before: An earlier status of the same engine, to compute rates; the last one if none is published any more.
        lost: The faults of lost slots, by the counters of their checkpoints; only known if no engine runs.
        problems: Other notes of `pccheck ls`; only known if no engine runs.
        is_bad: Whether the problems mean that something is lost.
    """

    path: Path
    published: Published | None
    committed: Sequence[CommittedStatus]
    before: Status | None
    lost: Mapping[int, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    is_bad: bool = False

    @property
    def status(self) -> Status | None:
        """The status that the engine published last; None without one."""
        return None if self.published is None else self.published.status

    @property
    def state(self) -> str:
        """State of the engine: "running", "silent" (alive, not publishing), "closed" (ran before), "died" or "none"."""
        if self.published is None:
            return "none" if self.before is None else "closed"
        if not self.published.alive:
            return "died"
        return "silent" if self.age > _SILENT_SECONDS else "running"

    @property
    def age(self) -> float:
        """Seconds since the engine published its status."""
        return 0.0 if self.status is None else max(0.0, time.time() - self.status.time)

    def rate(self, stage: str) -> float | None:
        """Return the bytes per second of a stage since the earlier status; None without two statuses."""
        now, before = self.status, self.before
        if now is None or before is None or before.time >= now.time:
            return None
        return (now.stage_bytes.get(stage, 0) - before.stage_bytes.get(stage, 0)) / (now.time - before.time)

    @property
    def stall_share(self) -> float | None:
        """Share of the time in which training waited: since the earlier status, or else since the engine was opened."""
        now, before = self.status, self.before
        if now is None:
            return None
        since, stalled = now.started, 0.0
        if before is not None and before.time < now.time:
            since, stalled = before.time, before.stall_seconds
        return (now.stall_seconds - stalled) / (now.time - since) if now.time > since else None

    @property
    def losses(self) -> list[str]:
        """Sentences on the lost checkpoints, and on other problems."""
        lost = [each for each in self.committed if each.counter in self.lost]
        return [*(f"LOST: step {each.step}: {self.lost[each.counter]}" for each in lost), *self.problems]

    @property
    def facts(self) -> tuple[object, ...]:
        """The facts that make another line when they change: all but clocks, rates and shares."""
        status, committed = self.status, [(each.counter, each.pinned) for each in self.committed]
        if status is None:
            return self.state, committed, self.losses
        in_flight = [(each.counter, each.phase) for each in status.in_flight]
        return self.state, committed, status.pid, status.step, status.counts, in_flight, status.failure

    def document(self) -> dict[str, object]:
        """Return the view as the document for ``--json``."""
        return {
            "state": self.state,
            "age_seconds": None if self.status is None else self.age,
            "write_bytes_per_second": self.rate("write"),
            "stall_share": self.stall_share,
            "committed": _as_json(self.committed, self.lost),
            "problems": [*self.problems],
            "status": msgspec.to_builtins(self.status),
        }

    def line(self) -> str:
        """Return the view as one line."""
        clock = time.strftime("%H:%M:%S")
        whole = [each for each in self.committed if each.counter not in self.lost]
        newest = "; ".join([f"durable: step {whole[0].step}" if whole else "nothing durable", *self.losses])
        if (status := self.status) is None:
            if self.before is not None:
                return f"{clock} the engine of process {self.before.pid} was closed; {newest}"
            return f"{clock} {_NOBODY}; {newest}"
        in_flight = [f"{each.step} {_phase(each)}" for each in status.in_flight]
        if self.state == "died":
            left = ", ".join(f"step {each}" for each in in_flight) or "nothing"
            return f"{clock} the engine of process {status.pid} died; in flight was {left}; {newest}"
        parts = [] if status.step is None else [f"step {status.step}"]
        parts += [newest, f"in flight: {', '.join(in_flight) or 'nothing'}"]
        if (rate := self.rate("write")) is not None:
            parts.append(f"writes {size(round(rate))}/s")
        if (share := self.stall_share) is not None:
            parts.append(f"stall {share:.1%}")
        if next_due := _next(status):
            parts.append(f"next {next_due}")
        if self.state == "silent":
            parts.insert(0, f"silent for {self.age:.0f} s")
        if status.failure:
            parts.insert(0, f"takes no more commits ({printable(status.failure)})")
        return f"{clock} " + "; ".join(parts)

    def parts(self, width: int) -> list[RenderableType]:
        """Return the lines and tables on the engine, for a panel of ``width`` characters."""
        parts: list[RenderableType] = [self._headline()]
        if self.status is not None:
            if self.status.in_flight:
                parts.append(_in_flight_table(self.status.in_flight, width))
            parts.append(self._facts(self.status))
        return parts

    def _headline(self) -> Text:
        headline = Text(str(self.path), style="bold")
        if (status := self.status or self.before) is None:
            return headline.append(f"  {_NOBODY}", style="yellow")
        who, age = f"process {status.pid} on {printable(status.host)}", duration(self.age)
        said, style = {
            "closed": (f"the engine of {who} was closed", "green"),
            "running": (f"{who}, open for {duration(status.time - status.started)}", "green"),
            "silent": (f"{who}: silent for {age}", "yellow"),
            "died": (f"{who} died {age} ago; what was last known:", "red"),
        }[self.state]
        headline.append(f"  {said}", style=style)
        if status.failure and self.state != "closed":
            headline.append(f"\ntakes no more commits: {printable(status.failure)}", style="red")
        return headline

    def _facts(self, status: Status) -> Table:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        named = ((count, printable(name.replace("_", " "))) for name, count in status.counts.items() if count)
        counts = ", ".join(f"{count} {name}" for count, name in named)
        rows.add_row("checkpoints", f"{counts or 'none yet'}; {size(status.durable_bytes)} durable")
        if status.save_seconds is not None:
            rows.add_row("durable after", f"{duration(status.save_seconds)} on average")
        rates = {stage: rate for stage in ("capture", "write") if (rate := self.rate(stage)) is not None}
        if rates:
            rows.add_row("rates", ", ".join(f"{stage} {size(round(rate))}/s" for stage, rate in rates.items()))
        share = self.stall_share
        rows.add_row("stall", duration(status.stall_seconds) + ("" if share is None else f" in all, now {share:.2%}"))
        if status.step is not None:
            took = f", {duration(status.step_seconds)} a step" if status.step_seconds is not None else ""
            rows.add_row("training", f"step {status.step}{took}")
        rows.add_row("next", f"{_next(status) or 'not known'} ({printable(status.reason)})")
        used, ever, most = map(size, (status.pool_in_use_bytes, status.pool_bytes, status.host_memory))
        rows.add_row("staging", f"{used} in use, {ever} ever, {most} at most")
        rows.add_row("slots", f"{status.slots}, {size(status.slot_bytes)}")
        rows.add_row("I/O", printable(status.io))
        return rows


@dataclass(frozen=True, slots=True)
class GroupView:
    """The state of a group at one moment: a :class:`WatchView` for each rank, and the complete checkpoints."""

    path: Path
    ranks: dict[int, WatchView]
    committed: Sequence[CommittedStatus]
    lost: Mapping[int, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    is_bad: bool = False

    @property
    def state(self) -> str:
        """The worst state of the ranks: the first of "died", "silent", "running", "closed" that one has; or "none"."""
        states = {view.state for view in self.ranks.values()}
        return next((state for state in ("died", "silent", "running", "closed") if state in states), "none")

    @property
    def published(self) -> Published | None:
        """A status that some rank's engine published; None without one."""
        return next((view.published for view in self.ranks.values() if view.published is not None), None)

    @property
    def times(self) -> dict[int, dict[str, float]]:
        """Seconds of each stage per checkpoint, by rank."""
        return {rank: stage_times(view.status) for rank, view in self.ranks.items() if view.status is not None}

    @property
    def waited_for(self) -> tuple[int, dict[int, str]]:
        """The step of the oldest checkpoint that some ranks have flushed, and the phase of each rank that has not."""
        statuses = {rank: view.status for rank, view in self.ranks.items() if view.status is not None}
        parts = {rank: {each.counter: each for each in status.in_flight} for rank, status in statuses.items()}
        flushed = [each for own in parts.values() for each in own.values() if each.phase == "committing"]
        if not flushed:
            return 0, {}
        oldest = min(flushed, key=lambda each: each.counter)
        late: dict[int, str] = {}
        for rank, view in self.ranks.items():
            part, status = parts.get(rank, {}).get(oldest.counter), statuses.get(rank)
            ended = status is not None and any(each.counter >= oldest.counter for each in status.committed)
            if not ended and (part is None or part.phase != "committing"):
                late[rank] = "died" if view.state == "died" else "not begun" if part is None else _phase(part)
        return oldest.step, late

    @property
    def facts(self) -> tuple[object, ...]:
        """The facts that make new lines when they change."""
        return *((rank, view.facts) for rank, view in self.ranks.items()), *self.problems

    def document(self) -> dict[str, object]:
        """Return the view as the document for ``--json``."""
        return {
            "state": self.state,
            "committed": _as_json(self.committed, self.lost),
            "problems": [*self.problems],
            "ranks": {str(rank): view.document() for rank, view in self.ranks.items()},
            "stage_seconds": {str(rank): seconds for rank, seconds in self.times.items()},
            "slowest": slowest(self.times),
            "waited_for": {str(rank): doing for rank, doing in self.waited_for[1].items()},
        }

    def line(self) -> str:
        """Return the view as text: a line for each rank, and lines on slow ranks and problems."""
        lines = [f"rank {rank}: {view.line()}" for rank, view in self.ranks.items()]
        return "\n".join(filter(None, [*lines, self._waits(), describe_slowest(self.times), *self.problems]))

    def _waits(self) -> str:
        step, late = self.waited_for
        ranks = ", ".join(f"rank {rank} ({doing})" for rank, doing in late.items())
        return f"Step {step} waits for {ranks}." if late else ""

    def parts(self, width: int) -> list[RenderableType]:
        """Return the lines and tables on the ranks, for a panel."""
        parts: list[RenderableType] = [Text(str(self.path), style="bold")]
        parts += [Text(f"rank {rank}: {view.line()}") for rank, view in self.ranks.items()]
        parts += [Text(waits)] if (waits := self._waits()) else []
        if times := self.times:
            parts += [stage_table(times), Text(describe_slowest(times))]
        return parts


class Watch:
    """Takes views of a place, one after the other: of the store of one process, or of the stores of a group's ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ranks: dict[int, Watch] = {}
        self._earlier: list[Status] = []

    def look(self) -> WatchView | GroupView:
        """Return the present view. Raises CheckpointError or OSError if it cannot be read.

        The durable checkpoints are those that a running engine publishes, or else those in the commit records (of the
        whole group, also in the view of a rank).
        """
        from pccheck_async.medium.status_file import CommittedStatus, copied, read_status

        published = read_status(self._path)
        if published is not None and published.alive:
            return self._view(published, (), {})
        from pccheck_async.upkeep import lost_slots  # and torch, which is not needed beside an engine

        place = read_place(self._path)
        lost = lost_slots(place)
        restorable = [info for info in place.infos if not info.rejected][:_MOST_COMMITTED]
        listed = [copied(CommittedStatus, info) for info in restorable]
        if (folders := place.rank_folders) is None:
            return self._view(published, listed, lost, *problems(place))
        self._ranks = {rank: self._ranks.get(rank) or Watch(folder) for rank, folder in folders.items()}
        views = {rank: watch._view(read_status(folders[rank]), listed, lost) for rank, watch in self._ranks.items()}
        running = any(view.state in ("running", "silent") for view in views.values())
        return GroupView(self._path, views, listed, lost, *problems(place, running=running))

    def _view(
        self,
        published: Published | None,
        listed: Sequence[CommittedStatus],
        lost: Mapping[int, str],
        notes: Sequence[str] = (),
        is_bad: bool = False,
    ) -> WatchView:
        if published is not None and published.alive:
            listed, lost = published.status.committed, {}
        return WatchView(self._path, published, listed, self._before(published), lost, notes, is_bad)

    def _before(self, published: Published | None) -> Status | None:
        """Return the engine's status of some five seconds ago: rates over shorter times change with every chunk."""
        if published is None:
            return self._earlier[-1] if self._earlier else None
        now = published.status
        self._earlier = [each for each in self._earlier if (each.pid, each.started) == (now.pid, now.started)]
        if not self._earlier or self._earlier[-1].time < now.time:
            self._earlier.append(now)
        while len(self._earlier) > 2 and now.time - self._earlier[1].time >= 5:
            del self._earlier[0]
        return self._earlier[0] if self._earlier[0].time < now.time else None


@reporting
def watch(
    path: AnyFolder,
    interval: Annotated[
        float,
        typer.Option(
            parser=seconds(0.1, 86_400),
            metavar="SECONDS",
            help="Time between two looks (default: 1).",
            show_default=False,
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON objects instead, one a line.")] = False,
) -> int:
    """Watch an engine of another process, without disturbing it.

    Shows checkpoints in flight, rates, waiting times and when the next checkpoint is due, from the engine's first
    checkpoint on. On a terminal this is a live view until Ctrl-C. Otherwise, and with --json, a line is printed
    whenever something has changed, until the engine ends; if none runs, one line. For a group's folder each rank has a
    line, and the slowest rank is named, and those that the others wait for.

    Exit status: 0 ended by Ctrl-C, the engine that was watched was closed, or with --once an engine runs there; 1 it
    failed; 2 wrong usage; 3 there is nothing in this folder; 4 no engine runs there (it died, was closed before, or has
    not saved yet), or something is lost or damaged.
    """
    watching = Watch(path)
    if once:
        view = watching.look()
        if json:
            dump(view.document(), one_line=True)
        else:
            screen = terminal()
            screen.print(panel(view, screen.width))
        return _status(view)
    with suppress(KeyboardInterrupt):
        if json or not sys.stdout.isatty() or terminal().is_dumb_terminal:
            return _show_changes(watching, interval, json=json)
        from rich.live import Live

        with Live(console=terminal(), auto_refresh=False) as live:
            while True:
                live.update(panel(watching.look(), live.console.width), refresh=True)
                time.sleep(interval)
    return 0


def _show_changes(watching: Watch, interval: float, *, json: bool) -> int:
    shown: object = None
    while True:
        view = watching.look()
        if (facts := view.facts) != shown:
            shown = facts
            if json:
                dump(view.document(), one_line=True)
            else:
                print(view.line(), flush=True)
        if view.state not in ("running", "silent"):
            return _status(view)
        time.sleep(interval)


def _status(view: WatchView | GroupView) -> int:
    """Return the exit status for the last view; print the reason on stderr if there is nothing in the folder."""
    if view.state in ("running", "silent", "closed"):
        return DIFFERENT if view.lost or view.is_bad else 0
    if view.committed or view.published is not None:
        return DIFFERENT
    why = read_place(view.path).nothing(None)
    complain(str(why))
    return status_of(why)


def _as_json(committed: Sequence[CommittedStatus], lost: Mapping[int, str]) -> list[dict[str, object]]:
    return [
        msgspec.to_builtins(each) | ({"lost": lost[each.counter]} if each.counter in lost else {}) for each in committed
    ]


def panel(view: WatchView | GroupView, width: int) -> RenderableType:
    """Return the view as a panel of ``width`` characters."""
    parts = view.parts(width)
    if view.committed:
        durable = table("durable", "size", "age", "", right=3)
        for each in view.committed:
            age = duration(max(0.0, time.time() - each.time))
            mark = "LOST" if each.counter in view.lost else "pinned" if each.pinned else ""
            durable.add_row(f"step {each.step}", size(each.nbytes), age, mark)
        parts += [durable, *(Text(f"LOST: {printable(what)}", style="red") for what in view.lost.values())]
    else:
        parts.append(Text("no committed checkpoint"))
    parts += [Text(printable(problem), style="red") for problem in view.problems]
    return Group(*parts)


def _in_flight_table(in_flight: Sequence[InFlightStatus], width: int) -> Table:
    """Return a table of the checkpoints in flight, with as many columns as ``width`` has room for."""
    headings = ["in flight", "phase", "for", "captured", "written"]
    headings += ["of"] * (width >= _WIDE) + [""] * (width >= _VERY_WIDE)
    rows = table(*headings, right=len(headings))
    for each in in_flight:
        cells: list[RenderableType] = [f"step {each.step}", printable(each.phase), duration(each.seconds)]
        cells += [size(each.captured), size(each.written), size(each.nbytes) if each.nbytes else ""]
        cells.append(ProgressBar(total=max(1, each.nbytes), completed=each.written, width=20))
        rows.add_row(*cells[: len(headings)])
    return rows


def _phase(each: InFlightStatus) -> str:
    done = each.captured if each.phase == "capturing" else each.written
    share = f" {done / each.nbytes:.0%}" if each.nbytes and each.phase in ("capturing", "writing") else ""
    return printable(each.phase) + share


def _next(status: Status) -> str:
    """Return when the next checkpoint is due, in words; "" if that is not known."""
    if status.next_step is not None:
        text = f"after step {status.next_step}"
        if status.step is not None and status.step_seconds is not None and status.next_step >= status.step:
            text += f", in about {duration((status.next_step - status.step) * status.step_seconds)}"
        return text
    if status.next_time is not None:
        return f"in {duration(max(0.0, status.next_time - status.time))}"
    return ""
