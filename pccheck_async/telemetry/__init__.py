# SPDX-License-Identifier: Apache-2.0
"""One stream of events for each engine, which feeds the statistics, the log, the spans and users' hooks.

These modules know neither engine nor store, and import ``errors`` only. :mod:`.events` defines the events, and
:mod:`.logs` the log lines and their fields. Modules without access to an engine write their log lines, and time their
operations, directly; :data:`.tracing.work` has the checkpoint that they work for.
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
