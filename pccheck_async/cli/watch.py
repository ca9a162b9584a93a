"""``pccheck watch``: a live view of an engine that runs in another process."""

from __future__ import annotations

import json as jsonlib
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pccheck_async import CheckpointError, CheckpointInfo
from pccheck_async.cli.show import complain, size
from pccheck_async.medium.status_file import Committed, InFlight, Published, Status, read_status

__all__ = ["EMPTY", "NOT_RUNNING", "UNREADABLE", "run"]

UNREADABLE = 1
EMPTY = 3
NOT_RUNNING = 4

_MOST_COMMITTED = 8
_WIDE = 75
_VERY_WIDE = 100
"""Columns of a terminal from which on there is room for the sizes of what is in flight, and for bars."""
_SILENT_SECONDS = 3.0
"""An engine publishes twice a second: one that has not for so long is stopped, or its machine is."""


@dataclass(frozen=True, slots=True)
class View:
    """What there is to see at one moment.

    Attributes:
        path: Folder of the store.
        published: What an engine published, None where there is nothing.
        committed: Durable checkpoints, newest first.
        before: An earlier status of the same engine, to take rates from; None at first. Where nothing is published any
            more, the last one.
    """

    path: Path
    published: Published | None
    committed: Sequence[Committed]
    before: Status | None

    @property
    def state(self) -> str:
        """One of "running", "silent" (running and not publishing), "closed" (seen to run before), "died" and "none"."""
        if self.published is None:
            return "none" if self.before is None else "closed"
        if not self.published.alive:
            return "died"
        return "silent" if self.age > _SILENT_SECONDS else "running"

    @property
    def age(self) -> float:
        """Seconds since the engine published."""
        return 0.0 if self.published is None else max(0.0, time.time() - self.published.status.time)

    def rate(self, stage: str) -> float | None:
        """Bytes per second of a stage since the earlier status."""
        now, before = self._pair()
        if now is None or before is None:
            return None
        return (now.stage_bytes.get(stage, 0) - before.stage_bytes.get(stage, 0)) / (now.time - before.time)

    @property
    def stall_share(self) -> float | None:
        """Share of the time since the earlier status in which training waited; of all the time without one."""
        now, before = self._pair()
        if now is None:
            return None
        if before is None:
            return now.stall_seconds / (now.time - now.started) if now.time > now.started else None
        return (now.stall_seconds - before.stall_seconds) / (now.time - before.time)

    @property
    def facts(self) -> tuple[object, ...]:
        """What is worth another line; clocks, rates and shares change with every look."""
        status = None if self.published is None else self.published.status
        committed = [(each.counter, each.pinned) for each in self.committed]
        if status is None:
            return self.state, committed
        in_flight = [(each.counter, each.phase) for each in status.in_flight]
        return self.state, committed, status.pid, status.step, status.counts, in_flight, status.failure

    def _pair(self) -> tuple[Status | None, Status | None]:
        now = None if self.published is None else self.published.status
        return now, self.before if now is not None and self.before is not None and self.before.time < now.time else None


class Watch:
    """Looks at a store again and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier: list[Status] = []

    def look(self) -> View:
        """Return what there is to see. Raises CheckpointError or OSError where the store cannot be read."""
        published = read_status(self._path)
        if published is not None and published.alive:
            committed: Sequence[Committed] = published.status.committed
        else:
            from pccheck_async import list_checkpoints  # torch takes a second, and is not needed beside an engine

            committed = [_committed(info) for info in list_checkpoints(self._path)[:_MOST_COMMITTED]]
        return View(self._path, published, committed, self._before(published))

    def _before(self, published: Published | None) -> Status | None:
        """The status of some five seconds ago: rates of less than that jump with every chunk."""
        if published is None:
            return self._earlier[-1] if self._earlier else None
        now = published.status
        self._earlier = [each for each in self._earlier if (each.pid, each.started) == (now.pid, now.started)]
        if not self._earlier or self._earlier[-1].time < now.time:
            self._earlier.append(now)
        while len(self._earlier) > 2 and now.time - self._earlier[1].time >= 5:
            del self._earlier[0]
        return self._earlier[0] if self._earlier[0].time < now.time else None


def run(path: Path, *, interval: float, once: bool, json: bool) -> int:
    """Show what an engine in another process does, and return the exit status.

    In a terminal until interrupted; elsewhere, where nobody may be there to interrupt it, until no engine runs.
    """
    watch = Watch(path)
    try:
        if once:
            return _show_once(watch, json=json)
        with suppress(KeyboardInterrupt):
            if json or not sys.stdout.isatty() or _console().is_dumb_terminal:
                return _show_changes(watch, interval, json=json)
            _show_live(watch, interval)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError) as error:
        complain(error)
        return UNREADABLE
    return 0


def _show_once(watch: Watch, *, json: bool) -> int:
    view = watch.look()
    if json:
        print(_as_json(view))
    else:
        console = _console(None if sys.stdout.isatty() else 160)
        console.print(_panel(view, console.width))
    return _status(view)


def _show_changes(watch: Watch, interval: float, *, json: bool) -> int:
    shown: object = None
    while True:
        view = watch.look()
        if (facts := view.facts) != shown:
            shown = facts
            print(_as_json(view) if json else _line(view), flush=True)
        if view.state not in ("running", "silent"):
            return _status(view)
        time.sleep(interval)


def _show_live(watch: Watch, interval: float) -> None:
    with Live(console=_console(), auto_refresh=False) as live:
        while True:
            live.update(_panel(watch.look(), live.console.width), refresh=True)
            time.sleep(interval)


def _status(view: View) -> int:
    """Return the exit status for what was seen last; say why where there is nothing."""
    if view.state in ("running", "silent", "closed"):
        return 0
    if view.committed or view.published is not None:
        return NOT_RUNNING
    from pccheck_async.cli.output import nothing_in  # which imports torch

    complain(nothing_in(view.path))
    return EMPTY


def _console(width: int | None = None) -> Console:
    return Console(width=width, markup=False, emoji=False, highlight=False)  # names and reasons are not markup


# -- as lines and JSON


def _line(view: View) -> str:
    clock = time.strftime("%H:%M:%S")
    newest = f"durable: step {view.committed[0].step}" if view.committed else "nothing durable"
    if view.published is None:
        if view.before is not None:
            return f"{clock} the engine of process {view.before.pid} was closed; {newest}"
        return f"{clock} no engine has published anything here; {newest}"
    status = view.published.status
    if view.state == "died":
        left = ", ".join(f"step {each.step} {_phase(each)}" for each in status.in_flight) or "nothing"
        return f"{clock} the engine of process {status.pid} died; in flight was {left}; {newest}"
    parts = [] if status.step is None else [f"step {status.step}"]
    parts.append(newest)
    parts.append("in flight: " + (", ".join(f"{each.step} {_phase(each)}" for each in status.in_flight) or "nothing"))
    if (rate := view.rate("write")) is not None:
        parts.append(f"writes {size(round(rate))}/s")
    if (share := view.stall_share) is not None:
        parts.append(f"stall {share:.1%}")
    if next_due := _next(status):
        parts.append(f"next {next_due}")
    if view.state == "silent":
        parts.insert(0, f"silent for {view.age:.0f} s")
    if status.failure:
        parts.insert(0, f"takes no more commits ({_plain(status.failure)})")
    return f"{clock} " + "; ".join(parts)


def _as_json(view: View) -> str:
    status = None if view.published is None else msgspec.to_builtins(view.published.status)
    document: dict[str, Any] = {
        "state": view.state,
        "age_seconds": None if status is None else view.age,
        "write_bytes_per_second": view.rate("write"),
        "stall_share": view.stall_share,
        "committed": [msgspec.to_builtins(each) for each in view.committed],
        "status": status,
    }
    return jsonlib.dumps(_finite(document), allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- as a panel


def _panel(view: View, width: int) -> RenderableType:
    parts: list[RenderableType] = [_headline(view)]
    if view.published is not None:
        status = view.published.status
        if status.in_flight:
            parts.append(_in_flight_table(status.in_flight, width))
        parts.append(_facts(view, status))
    if view.committed:
        parts.append(_committed_table(view.committed))
    else:
        parts.append(Text("no committed checkpoint"))
    return Group(*parts)


def _headline(view: View) -> Text:
    headline = Text(str(view.path), style="bold")
    if view.published is None:
        if view.before is not None:
            who = f"process {view.before.pid} on {_plain(view.before.host)}"
            return headline.append(f"  the engine of {who} was closed", style="green")
        return headline.append("  no engine has published anything here", style="yellow")
    status = view.published.status
    who = f"process {status.pid} on {_plain(status.host)}"
    match view.state:
        case "running":
            headline.append(f"  {who}, open for {_duration(status.time - status.started)}", style="green")
        case "silent":
            headline.append(f"  {who}: silent for {_duration(view.age)}", style="yellow")
        case _:
            headline.append(f"  {who} died {_duration(view.age)} ago; what was last known:", style="red")
    if status.failure:
        headline.append(f"\ntakes no more commits: {_plain(status.failure)}", style="red")
    return headline


def _in_flight_table(in_flight: Sequence[InFlight], width: int) -> Table:
    """Return as much as has room, the bars last."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("in flight", justify="right")
    table.add_column("phase")
    for heading in ("for", "captured", "written") if width < _WIDE else ("for", "captured", "written", "of"):
        table.add_column(heading, justify="right")
    if width >= _VERY_WIDE:
        table.add_column("", width=20)
    for each in in_flight:
        cells: list[RenderableType] = [f"step {each.step}", _plain(each.phase), _duration(each.seconds)]
        cells += [size(each.captured), size(each.written), size(each.nbytes) if each.nbytes else ""]
        cells.append(ProgressBar(total=max(1, each.nbytes), completed=each.written, width=20))
        table.add_row(*cells[: len(table.columns)])
    return table


def _facts(view: View, status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    counts = ", ".join(f"{count} {_plain(name)}" for name, count in status.counts.items() if count)
    table.add_row("checkpoints", f"{counts or 'none yet'}; {size(status.durable_bytes)} durable")
    if status.save_seconds is not None:
        table.add_row("durable after", f"{_duration(status.save_seconds)} on average")
    rates = [
        f"{stage} {size(round(rate))}/s" for stage in ("capture", "write") if (rate := view.rate(stage)) is not None
    ]
    if rates:
        table.add_row("rates", ", ".join(rates))
    share = view.stall_share
    table.add_row("stall", _duration(status.stall_seconds) + ("" if share is None else f" in all, now {share:.2%}"))
    if status.step is not None:
        took = f", {_duration(status.step_seconds)} a step" if status.step_seconds is not None else ""
        table.add_row("training", f"step {status.step}{took}")
    next_due = _next(status)
    table.add_row("next", f"{next_due or 'not known'} ({_plain(status.reason)})")
    pool = (
        f"{size(status.pool_in_use_bytes)} in use, {size(status.pool_bytes)} ever, {size(status.host_memory)} at most"
    )
    table.add_row("staging", pool)
    table.add_row("slots", f"{status.slots}, {size(status.slot_bytes)}")
    table.add_row("I/O", _plain(status.io))
    return table


def _committed_table(committed: Sequence[Committed]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("durable", "size", "age"):
        table.add_column(heading, justify="right")
    table.add_column("")
    now = time.time()
    for each in committed:
        age = _duration(max(0.0, now - each.time))
        table.add_row(f"step {each.step}", size(each.nbytes), age, "pinned" if each.pinned else "")
    return table


# -- words


def _committed(info: CheckpointInfo) -> Committed:
    return Committed(step=info.step, counter=info.counter, nbytes=info.nbytes, time=info.time, pinned=info.pinned)


def _phase(each: InFlight) -> str:
    done = each.captured if each.phase == "capturing" else each.written
    share = f" {done / each.nbytes:.0%}" if each.nbytes and each.phase in ("capturing", "writing") else ""
    return _plain(each.phase) + share


def _next(status: Status) -> str:
    """When the next checkpoint is due, empty where nobody knows."""
    if status.next_step is not None:
        text = f"after step {status.next_step}"
        if status.step is not None and status.step_seconds is not None and status.next_step >= status.step:
            text += f", in about {_duration((status.next_step - status.step) * status.step_seconds)}"
        return text
    if status.next_time is not None:
        return f"in {_duration(max(0.0, status.next_time - status.time))}"
    return ""


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 60 else f"{hours:.1f} h"


def _plain(text: str) -> str:
    """No string from a file reaches the terminal as a control sequence."""
    return "".join(each if each.isprintable() else "?" for each in text)
