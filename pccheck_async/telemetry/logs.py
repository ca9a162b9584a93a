# SPDX-License-Identifier: Apache-2.0
"""The log: one logger, ``pccheck_async``, whose records have fields.

No handler is installed. Every record has the attributes of :data:`FIELDS` (None if they do not apply), so a
formatter that writes JSON, or one with ``%(event)s %(step)s`` in its format, gets them; events add fields of their own.
A run without trouble writes a line when it opens, one for every interval that the policy decides on, a summary every
ten minutes and one when it closes. Each checkpoint writes a line at DEBUG, or at WARNING if it fails.
:data:`TABLE` has all events.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
from types import FrameType
from typing import Any, NamedTuple

from pccheck_async.telemetry.tracing import work

__all__ = ["FIELDS", "LEVELS", "TABLE", "UsersLine", "log", "warn_user", "work_for", "write", "write_and_warn"]

FIELDS = ("event", "store", "step", "counter", "nbytes", "seconds")
"""Name of the event, path of the store, the user's and the engine's number of the checkpoint, its bytes, seconds."""

TABLE = """\
opened              INFO     a store was opened: checkpoints, io; step is that of the newest
closed              INFO     an engine was closed: durable, superseded, failed, skipped, stall; nbytes and seconds are
                             those of all durable checkpoints and of the engine's life
durable             DEBUG    a checkpoint was committed: stall, capture_seconds
superseded          DEBUG    newer ones made a checkpoint pointless
superseded_burst    WARNING  most of the last checkpoints were: more are in flight than the storage can take; once,
                             until that is over
failed              WARNING  a checkpoint failed: error
skipped             WARNING  ``on_busy="skip"`` and all places in flight; counter is that of the newest in flight
abandoned           WARNING  a capture held an optimizer's step up for longer than ``max_stall``, which seconds is
held_up             WARNING  training waited for longer than a second: where; at most once in ten minutes
summary             INFO     every ten minutes in which checkpoints ended: durable, superseded, failed, stall;
                             nbytes and seconds since the last summary
interval            INFO     the policy has decided: interval (steps)
restored            INFO     a checkpoint was restored
cleared_gradients   WARNING  a restore set gradients of restored parameters to None: of an interrupted step
lost_gradients      WARNING  the restored checkpoint was saved inside a window of gradient accumulation
restored_in_part    WARNING  with ``strict=False``, a checkpoint that lacks paths, or has others
fell_back           WARNING  a damaged checkpoint was passed over; step, counter and error are its; a Python warning
                             says it, too, and alone where no log is set up
preemption          WARNING  a signal requested the end of the process, and the outcome
event_hook          WARNING  a hook of ``on_event`` raised (once for each hook), or was so slow that events were dropped
status              WARNING  the status file for ``pccheck watch`` cannot be written; once
progress            WARNING  a progress callback raised, and is not called any more
memory_off          WARNING  nothing more is saved in memory: error; the disk goes on
memory_skipped      WARNING  a checkpoint that was due in memory alone is not there: a rank could not save it
memory_ignored      WARNING  checkpoints in memory are not of the line of the store on disk, or of its files as they are
                             now, or the engine has no ``memory``; when it is opened
memory_unreadable   WARNING  a checkpoint's copy in memory cannot be read, and that on disk, or an older one, is taken
copy_unreadable     WARNING  a checkpoint's copy on disk, or in a bucket, cannot be read, and another one is taken
memory_unsaved      WARNING  closing could not write the newest checkpoint in memory to disk: it stays in memory; error
memory_damaged      WARNING  the store in memory is damaged, and was begun anew: error
replicas_degraded   WARNING  the newest checkpoint is not in the memory of as many other hosts as it should be: a rank
                             could not send its part, or there are fewer hosts: step, error; or ranks of one host
                             have different folders in memory, so that copies are on the same one
replicas_stranger   WARNING  something that is no rank of the run connected to the port for copies; once
drained             DEBUG    a checkpoint was copied to the bucket; seconds is how far that was behind
drain_restored      INFO     a checkpoint was restored from the bucket
drain_trouble       WARNING  nothing is copied to the bucket at the moment, or not this checkpoint: error
drain_stopped       WARNING  nothing is copied to the bucket any more: another run took it over, say: error
drain_left          WARNING  closing ended before the newest checkpoint was in the bucket
bucket_damaged      WARNING  the record of a checkpoint in a bucket is damaged, and passed over: error
store_failed        ERROR    a flush or a commit record failed, and nothing more is committed: error
dropping            WARNING  the store holds checkpoints that no rule of this engine keeps; once, when it is opened
crowded_out         WARNING  ``Keep(every=...)`` keeps more than a record names
last_not_saved      WARNING  leaving the context did not save the last step, because the state is not that of its end
last_unseen         INFO     leaving the context saves the last step, and no optimizer is attached: changes made past
                             torch's counters are not seen
state_dict          WARNING  the state of a first step has the ``state_dict()`` of a live object in the object's place
unrestored          WARNING  a checkpoint without a step, or of a step above the newest, is saved, which was not
                             restored; once
lost_engine         WARNING  an engine that nothing leads to any more was closed, as another one was opened on its store
stopped             WARNING  a Trainer trains nothing more: the restored training had been stopped early
inside_window       WARNING  a checkpoint that waited for the end of a window for 64 contexts or ten minutes was saved,
                             or the last step of a run, which is inside one
unawaited           WARNING  coroutine methods of the engine were called and never awaited; when it closes
unused_gradients    WARNING  step contexts in a row ended with unused gradients, which are ignored now
step_outside        WARNING  an optimizer makes its steps between the blocks of ``engine.step``: none is saved; once
captured_eagerly    WARNING  the next 100 checkpoints capture values torn again and again, before the step ends
pickled             WARNING  with ``allow_pickle``: values were pickled; which ones
unpickled           WARNING  with ``allow_pickle``: values are unpickled, which runs code; which ones
unseen_optimizer    WARNING  an optimizer in the state has no hooks, so that its windows of accumulation are not seen
step_went_back      WARNING  the first step after a restore is smaller than the restored one, or begins that again; or
                             a step is smaller than the one before, or began twice; once
not_in_state        WARNING  an optimizer that is attached, or a ResumableLoader that was iterated over, is not in the
                             state of the first save; or another optimizer trains a model that is; or one in it trains
                             nothing in it, or has parameters that are not, or there are none; or there is dropout, and
                             no RNGState; or the first two steps took batches of one pass of a plain DataLoader
no_gradients        WARNING  the first three steps of an optimizer found no gradient: it trains nothing
trained_before      WARNING  there is nothing to restore, and the optimizer has made steps with an engine closed before
stores_below        WARNING  a store was made in a folder that has stores in its folders: which
others_here         WARNING  a store without checkpoints is opened in a folder that has those of other programs: which
no_metric           WARNING  none of 16 checkpoints, or of all until the engine closes, has the number that
                             ``Keep(best=...)`` goes by in its metadata; once
metric_each_step    INFO     many steps in a row set the metric of ``Keep(best=...)``: none is saved for that any more
identity            WARNING  ``store.json`` cannot be read, and its content was taken from the records: error
record_lost         WARNING  no copy of a commit record is valid, and it may have been the newest; when it is opened
older_record        WARNING  slots hold newer checkpoints than the record names, also in the places of those: it is an
                             older one; step and counter are those of the newest; when it is opened
unrecorded_slots    INFO     the same, but only in other slots: a save was killed just before its record
best_model_gone     WARNING  a restored Trainer loads the best model at its end, and its folder is not there any more
unusable_slot       WARNING  a slot's file cannot be opened, and is left alone: error
readers             WARNING  a checkpoint waits for readers of other processes; in memory it is left out instead
incomplete          WARNING  a checkpoint of a group was complete once, and lacks parts now: which ranks, on which hosts
slow_ranks          WARNING  a checkpoint or restore of a group has waited for ranks for a minute: for which ones
group_left          WARNING  rank 0 of a group closed although other ranks have not left: which ones
other_world         WARNING  a group of another number of ranks saved the checkpoint: whose part a rank restores
other_ranks         WARNING  a group's checkpoint is read without naming a rank, and ranks have different tensors: which
not_compared        WARNING  tensors that ranks may have differently were not compared: another rank's part is damaged
surplus             WARNING  a slot, or a former rank's folder, that is not needed any more could not be removed
miscounted          ERROR    counting the end of a checkpoint failed; its waiters were woken all the same
buffered            INFO     the filesystem takes no direct I/O; once, when a store is opened
mapped              INFO     files are written through memory, and the kind of memory; when a store is opened
zeros               INFO     the filesystem reserves no space, so that zeros are written to new files; once
direct_refused      WARNING  it took the flag, and then refused a transfer: buffered from then on
no_cupy             WARNING  CuPy is missing, and torch's streams copy; slower for many small tensors; once
no_kernel           WARNING  the kernel that gathers small tensors cannot be compiled; once for each device
not_pinned          WARNING  CUDA does not take the staging memory as pinned; once
still_pinned        WARNING  CUDA does not give staging memory back
no_snapshot         INFO     a device has no memory for a snapshot, and is copied from piece by piece
no_scratch          DEBUG    a device has no memory in which to gather small tensors
no_table            DEBUG    a device has no memory for the list of small tensors that its kernel gathers
no_fence            DEBUG    the streams of a device cannot wait for copies, so the training thread does
"""
"""Table of all events: name, level of the lines, and when a line is written, with the event's own fields."""

LEVELS = {
    name: logging.getLevelNamesMapping()[level] for name, level in re.findall(r"^(\w+) +([A-Z]+) ", TABLE, re.MULTILINE)
}
"""Level of an event's lines, by the event's name."""

log = logging.getLogger("pccheck_async")


class UsersLine(NamedTuple):
    """A line of a user's program, in the form of arguments of ``warnings.warn_explicit``."""

    filename: str
    lineno: int
    module: str
    registry: dict[Any, Any]

    @classmethod
    def here(cls) -> UsersLine:
        """Return the innermost line outside this package on the calling thread's stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "pccheck_async":
            frame = frame.f_back
        if frame is None:
            return cls("an unknown place", 0, "", {})
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""), registry)

    @property
    def place(self) -> str:
        """Return the file and the line; in a notebook the cell and its line, as tracebacks show it."""
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # while it is imported it has none yet
        shell = None if get_ipython is None else get_ipython()
        cell = None if shell is None else shell.compile.format_code_name(self.filename)
        return f"{self.filename}:{self.lineno}" if cell is None else f"{' '.join(cell)}, line {self.lineno}"


_of_thread = threading.local()


def work_for(line: UsersLine) -> None:
    """Show warnings of the calling thread, which executes no user's code, at ``line`` from now on."""
    _of_thread.line = line


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the user's line: the one set by :func:`work_for` on the calling thread, else the one that it executes."""
    warnings.warn_explicit(text, category, *getattr(_of_thread, "line", None) or UsersLine.here())


def write(event: str, message: str, *arguments: Any, **fields: Any) -> None:
    """Write a record of an event of :data:`TABLE`, with ``fields``, if its level is enabled."""
    if log.isEnabledFor(level := LEVELS[event]):
        if not log.hasHandlers():  # then Python prints the message alone, which does not say whose it is
            message = f"pccheck_async: {message}"
        log.log(level, message, *arguments, extra={"event": event, **fields}, stacklevel=2)


def write_and_warn(event: str, text: str, **fields: Any) -> None:
    """Warn the user, and write a record with the same text if the log has handlers: else Python would print both."""
    if log.hasHandlers():
        write(event, "%s", text, **fields)
    warn_user(text, RuntimeWarning)


def _complete(record: logging.LogRecord) -> bool:
    """Add the missing fields to a record, from the work of the current task; return True, as a filter of the log."""
    known = work.get()
    for name in FIELDS:
        if getattr(record, name, None) is None:
            setattr(record, name, getattr(known, name, None))
    return True


log.addFilter(_complete)
