# SPDX-License-Identifier: Apache-2.0
"""Saves under one root by this process, with an engine that is opened at the first save and stays open."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pccheck_async.engine import EngineConfig, EngineCore, PendingCheckpoint, block_on, flight_of
from pccheck_async.errors import CheckpointError, GroupError
from pccheck_async.format import Metadata
from pccheck_async.group import Address, Group, Meeting, Ranks, reach
from pccheck_async.integrations.dcp.ids import ID_KEY, step_of
from pccheck_async.state import Owners
from pccheck_async.store import is_group_folder

__all__ = ["SavePlace", "Saves", "place_for", "saves_of"]


@dataclass(frozen=True, slots=True)
class SavePlace:
    """Address of the TCP store that connects the ranks of a save (None: one rank without a group), and their number."""

    address: Address | None
    world: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the engine, and the seconds within which all ranks must open theirs."""

    config: EngineConfig
    timeout: float


class Saves:
    """The saves under one root, one after the other. Each save of DCP is a *round*, the same on all ranks.

    Each round uses up one counter of the group on every rank. If DCP fails on a rank before it writes, that rank fails
    the round's checkpoint at its next round or on closing: others cannot know otherwise, and counters must stay equal.

    Attributes:
        step: Step of the round.
        name: Name of the round's checkpoint.
        alone: Whether no other rank saves; only set while the engine is open.
    """

    alone: bool

    def __init__(self, root: str, settings: Settings) -> None:
        self._root = root
        self.settings = settings
        self._core: EngineCore | None = None
        self._round = 0
        self._writing = True  # the last round came to the writing
        self._pending: PendingCheckpoint | None = None
        self._last = -1  # step
        self.name: str | None = None

    @property
    def step(self) -> int:
        """The step of the round: the number at the end of its name, or one more than the last step."""
        return self._step

    def begin(self, name: str | None) -> None:
        """Begin a round; if the last one did not come to writing on this rank, fail its checkpoint first."""
        self._round += 1
        self._give_up_round()
        self._writing = False
        self.name = name
        self._count()

    def _give_up_round(self) -> None:
        if not self._writing:
            self.fail(GroupError("torch.distributed.checkpoint did not come to the writing on this rank"))
        self._writing = True

    def fail(self, error: BaseException) -> None:
        """Fail the round's checkpoint on all ranks. To be called if nothing of it was written on this rank."""
        if self._core is not None:
            self._core.fail_checkpoint(self._step, error)

    def _count(self) -> None:
        named = step_of(self.name)
        self._last = self._step = self._last + 1 if named is None else named

    def open(self, place: object, rank: int) -> None:
        """Open an engine unless one is open that has not failed. Raises GroupError, and the errors of opening one."""
        self._writing = True
        if (core := self._core) is not None and not _ended(core):
            return
        self._core = None
        if core is not None:
            _close(core)
        if not isinstance(place, SavePlace):
            raise GroupError(
                "the plan of this save was made for another StorageWriter, and enable_plan_caching reuses it: "
                "use planners of different classes for different writers, or none that cache"
            )
        self.alone, peers = place.address is None, None
        if place.address is not None:
            store = PrefixStore(f"{self._root}/{self._round}", reach(place.address))
            peers = Ranks(Group(rank, place.world, store, timeout=self.settings.timeout))
        core = EngineCore(self._root, self.settings.config, peers)
        block_on(core, core.open)
        if self.alone:
            core.captures.owners = Owners(0, (0,), (0,), ())  # a plan may have boxes of tensors here, too
        self._core = core
        newest = core.newest_step
        self._last = -1 if newest is None else newest
        self._count()

    def save(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Save the state that ``make`` returns; return when this rank's part of it is durable.

        Raises the error of ``make``, or of the save.
        """
        core = self._core
        metadata: Metadata = {} if self.name is None else {ID_KEY: self.name}
        assert core is not None
        self._settle()
        try:
            state = make()
        except BaseException as error:
            self.fail(error)
            raise
        pending, start = core.start_checkpoint(state, self._step, metadata)
        flight = flight_of(pending)
        try:
            flight.wait_eager_captured()
            core.in_flight.note_waited(flight, start, "checkpoint")
            core.wait_prepared(flight)
        except Exception:
            raise
        except BaseException:  # KeyboardInterrupt
            block_on(core, core.abort, flight)
            raise
        self._pending = pending

    def finish(self) -> None:
        """Wait until the round's checkpoint is durable on all ranks. Raises the error of the save."""
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.result()

    def _settle(self, deadline: float | None = None) -> None:
        """Wait until the last round's checkpoint ended if DCP did not call ``finish``; its error is suppressed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with suppress(CheckpointError, TimeoutError):
                pending.result(deadline)

    def close(self, deadline: float | None = None) -> None:
        """Close the engine, once all checkpoints ended, or after ``deadline`` seconds."""
        if (core := self._core) is not None:
            self._give_up_round()
            self._core = None
            self._settle(deadline)
            block_on(core, core.close, deadline)


def _ended(core: EngineCore) -> bool:
    return not core.is_open or core.stopped is not None


def _close(core: EngineCore) -> None:
    with suppress(CheckpointError):  # it was raised already
        block_on(core, core.close)


_lock: Final = threading.Lock()
_saves: dict[tuple[int, str], Saves] = {}  # by process, which a fork changes, and root
_meetings: dict[int, Meeting] = {}


def saves_of(root: str, config: EngineConfig, timeout: float) -> Saves:
    """Return this process's :class:`Saves` for a root, made once; ValueError if that was with other settings."""
    settings = Settings(config, timeout)
    with _lock:
        saves = _saves.setdefault((os.getpid(), root), Saves(root, settings))
    if saves.settings != settings:
        raise ValueError(f"another StorageWriter of this process saves under {root} with other settings; close() it")
    return saves


def forget(root: str) -> Saves | None:
    """Remove and return this process's :class:`Saves` for a root, None without any; the next save makes new ones."""
    with _lock:
        return _saves.pop((os.getpid(), root), None)


def place_for(root: str, world: int) -> SavePlace:
    """Return the place of a save of ``world`` ranks: a TCP store that this process, DCP's coordinator, serves."""
    alone = world == 1 and not is_group_folder(root) and not (dist.is_initialized() and dist.get_world_size() == 1)
    if alone:
        return SavePlace(None, 1)
    with _lock:
        meeting = _meetings.get(os.getpid())
        if meeting is None:
            meeting = _meetings[os.getpid()] = Meeting(world)
    return SavePlace(meeting.address, world)


@atexit.register
def _close_at_exit() -> None:
    """Close all engines of writers that were not closed: users need not do it, and open engines warn at the exit."""
    for pid, root in list(_saves):
        saves = forget(root) if pid == os.getpid() else None
        if saves is not None:
            with suppress(Exception):
                saves.close(saves.settings.config.storage.exit_timeout)
