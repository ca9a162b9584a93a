# SPDX-License-Identifier: Apache-2.0
"""The choice of the checkpoint to read, and of the next one if that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from pccheck_async.errors import DamagedError, NoCheckpointError, ReadError, StoreError, in_shell, is_exhausted
from pccheck_async.format import Entry, Which, describe_which
from pccheck_async.telemetry import write_and_warn

__all__ = ["DroppedMeanwhileError", "Fallback", "UnreadableError", "choose", "only_rejected", "unreadable_errors"]


def choose(
    entries: Sequence[Entry], which: Which, unreadable: Collection[int] = (), superseded: Sequence[Entry] = ()
) -> Entry | None:
    """Return the newest checkpoint that matches ``which``, None for none; ``unreadable`` are counters to leave out.

    Superseded checkpoints are merged with ``entries``, newest first, and never chosen by step or name. Rejected ones
    are chosen only by step or name, if no other checkpoint has it.
    """
    if superseded and which is None:
        entries = sorted((*entries, *superseded), key=lambda entry: -entry.counter)
    wanted = [entry for entry in entries if entry.matches(which) and entry.counter not in unreadable]
    rejected = wanted[0] if wanted and which is not None else None
    return next((entry for entry in wanted if not entry.rejected), rejected)


def only_rejected(entries: Collection[Entry], which: Which, where: str | os.PathLike[str]) -> StoreError | None:
    """Return the error to raise if all checkpoints that match ``which`` are rejected; None if not, or none matches."""
    wanted = [entry for entry in entries if entry.matches(which)]
    if not wanted or not all(entry.rejected for entry in wanted):
        return None
    steps = ", ".join(sorted({str(entry.step) for entry in wanted}))
    return StoreError(
        f"{os.fspath(where)} holds none but rejected checkpoints{describe_which(which)} (steps {steps}): load() with a "
        "step reads one all the same; to begin anew, use another folder"
    )


class DroppedMeanwhileError(NoCheckpointError):
    """The checkpoint to read was replaced, removed or rejected before its slot could be held."""


class UnreadableError(Exception):
    """Wrapper of an error of reading the store: errors of the same class that a user's object raised have none."""

    def __init__(self, error: DamagedError | ReadError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def unreadable_errors() -> Iterator[None]:
    """Convert DamagedError and ReadError to UnreadableError; for code that only reads the checkpoint."""
    try:
        yield
    except (DamagedError, ReadError) as error:
        raise UnreadableError(error) from error


class Fallback:
    """The loop over checkpoints, newest first, until one can be read.

    ::

        while (found := find()) is not None:
            try:
                result = read(...)
            except (DroppedMeanwhileError, UnreadableError) as error:
                fallback.failed(*found, error, find)  # raises if there is nothing left to try
            else:
                fallback.succeeded(*found)
                return result

    ``find`` returns what :func:`choose` does, in an engine at the very end also checkpoints known to be damaged, and
    whether that was superseded; the caller verifies all of a superseded checkpoint. Before the first superseded one is
    tried, those that a device failed to read are tried once more: a failure that passes must not cost a checkpoint that
    is kept. If a step or a name was given, or without ``falls_back``, damage raises, and nothing else is read.

    Attributes:
        unreadable: Counters of the checkpoints that were tried in vain.
        failure: The last checkpoint that was tried in vain and not superseded, else the first one, and its error.
        warned: Whether the user was warned that a damaged checkpoint is passed over.
    """

    def __init__(self, which: Which, path: str | os.PathLike[str], falls_back: bool = True) -> None:
        self._path = os.fspath(path)
        self.unreadable: set[int] = set()
        self.failure: tuple[Entry, Exception] | None = None
        self.warned = False
        self._may_fall_back, self._falls_back = falls_back, falls_back and which is None
        self._unread: set[int] | None = set()  # by the device; None once all of them were tried again

    def succeeded(self, entry: Entry, superseded: bool) -> None:
        """Called when ``entry`` was read; warns if it was superseded, and is read in place of one that failed."""
        if superseded and self.failure is not None:
            self._warn_damaged(*self.failure, entry)

    def failed(
        self,
        entry: Entry,
        superseded: bool,
        failure: DroppedMeanwhileError | UnreadableError,
        older: Callable[[], tuple[Entry, bool] | None],
    ) -> None:
        """Called when ``entry`` could not be read; returns if the next checkpoint is to be tried, maybe with a warning.

        ``older`` returns the next checkpoint that is not ``unreadable``, and whether that was superseded. Raises the
        error of :attr:`failure` if nothing may be tried any more, and this one if the process ran out of a resource.
        """
        if isinstance(failure, DroppedMeanwhileError):
            return  # newer ones were committed
        error = failure.error
        if is_exhausted(error):
            raise error
        self.unreadable.add(entry.counter)
        if self.failure is None or not superseded:
            self.failure = entry, error
        chosen = older()
        if not self._falls_back or chosen is None:
            raise self._last() from None
        if self._unread is not None and isinstance(error, ReadError):
            self._unread.add(entry.counter)
        if chosen[1] and self._unread:
            self.unreadable -= self._unread
            self._unread = None
        elif chosen[0].counter < entry.counter and not chosen[1]:  # else only once that one proved whole
            self._warn_damaged(*self.failure, chosen[0])

    def _last(self) -> Exception:
        """Return the error of :attr:`failure`; the text of a DamagedError gets the checkpoint's step and a remedy."""
        assert self.failure is not None
        entry, error = self.failure
        if isinstance(error, DamagedError):
            todo = f"{in_shell('verify', self._path, '--all')} tells which are whole"
            if self._falls_back:
                search = in_shell("recover", self._path, "--search")
                todo = f"no other one can be read; {search} finds what no record names"
            elif self._may_fall_back:
                todo = f"without a step and a name the newest whole one is taken ({todo})"
            error.args = (f"{self._path}, checkpoint of step {entry.step}: {error}; {todo}",)
        return error

    def _warn_damaged(self, entry: Entry, error: Exception, older: Entry) -> None:
        """Warn that a checkpoint is passed over for an older one, and set :attr:`warned`."""
        self.warned = True
        which = f" (counters {entry.counter} and {older.counter})" if older.step == entry.step else ""
        what = f"checkpoint of step {entry.step} cannot be read ({error}); falling back to step {older.step}{which}"
        text = f"{what} of {self._path}"
        write_and_warn("fell_back", text, step=entry.step, counter=entry.counter, error=str(error))
