# SPDX-License-Identifier: Apache-2.0
"""One stream of events for each engine: sums for statistics, lines of the log, spans and users' hooks follow from it.

Primitives without an engine or a store, which import ``errors`` only. :mod:`.events` lists the events, and
:mod:`.logs` the log lines and their fields. Modules without an engine write their lines, and time their operations,
by themselves; :data:`.tracing.work` says for which checkpoint.
"""

from pccheck_async.telemetry.events import Event
from pccheck_async.telemetry.logs import UsersLine, warn_user, work_for, write, write_and_warn
from pccheck_async.telemetry.standard_files import fill_standard_files
from pccheck_async.telemetry.stream import Hook, ReadProgress, Stream, reading_progress
from pccheck_async.telemetry.totals import COUNTED, Distribution
from pccheck_async.telemetry.tracing import Sink, Span, Stage, StageClock, Work, enter_chunk, work

__all__ = [
    "COUNTED", "Distribution", "Event", "Hook", "ReadProgress", "Sink", "Span", "Stage", "StageClock", "Stream",
    "UsersLine", "Work", "enter_chunk", "fill_standard_files", "reading_progress", "warn_user", "work", "work_for",
    "write", "write_and_warn",
]  # fmt: skip
