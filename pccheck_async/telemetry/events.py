# SPDX-License-Identifier: Apache-2.0
"""Events of an engine and its checkpoints, as frozen values: for ``engine.on_event`` and for the log.

Events with a level have a line in the log (:mod:`pccheck_async.telemetry.logs` has the names and levels).
"""

from __future__ import annotations

import re
import time
from typing import ClassVar, Literal

import msgspec

from pccheck_async.telemetry.logs import LEVELS

__all__ = [
    "Abandoned", "Admitted", "Captured", "Closed", "Durable", "Event", "Failed", "InMemory", "InReplicas", "Opened",
    "Restored", "Skipped", "Superseded", "Waited",
]  # fmt: skip


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events.

    Attributes:
        name: Name of the event in the log.
        level: Level of the event's line in the log; None if it has no line.
        text: Format of that line.
        time: Time of the event, in seconds since the epoch.
    """

    name: ClassVar[str] = ""
    level: ClassVar[int | None] = None
    text: ClassVar[str] = ""
    time: float = msgspec.field(default_factory=time.time)

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        cls.level = LEVELS.get(cls.name)


class Opened(Event, frozen=True, kw_only=True):
    """The store was opened; with the number of its checkpoints, the newest one's step, and the I/O backend."""

    text = "opened %(store)s with %(checkpoints)d checkpoint(s); %(io)s"
    checkpoints: int
    step: int | None
    io: str


class Closed(Event, frozen=True, kw_only=True):
    """The engine was closed.

    Attributes: numbers of its checkpoints by outcome, bytes of the durable ones, seconds since the engine was opened,
    and seconds that training waited (``stall``).
    """

    text = (
        "closed %(store)s after %(seconds).1f s: %(durable)d checkpoint(s) durable (%(nbytes)d bytes), %(superseded)d "
        "superseded, %(failed)d failed, %(skipped)d skipped; training was kept waiting for %(stall).3f s"
    )
    durable: int
    superseded: int
    failed: int
    skipped: int
    nbytes: int
    seconds: float
    stall: float


class _OfCheckpoint(Event, frozen=True, kw_only=True):
    """Base of events of one checkpoint: ``step`` is the user's number of the checkpoint, ``counter`` the engine's."""

    step: int
    counter: int


class Admitted(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint got its counter; ``state_dict()`` and the layout of the state took ``state_seconds``."""

    state_seconds: float = 0.0


class Captured(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint's bytes were copied, ``seconds`` after it was admitted: training may change the state."""

    nbytes: int
    seconds: float


class Durable(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint was committed, ``seconds`` after it was admitted.

    The capture ended ``capture_seconds`` after it was admitted; training has waited for it for ``stall`` seconds so
    far.
    """

    text = "checkpoint of step %(step)d durable: %(nbytes)d bytes in %(seconds).3f s, training waited %(stall).3f s"
    nbytes: int
    seconds: float
    capture_seconds: float
    stall: float


class InMemory(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint was committed in memory, ``seconds`` after admission: it survives the process, but not the host."""

    nbytes: int
    seconds: float


class InReplicas(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint, or a newer one, is in the memory of other hosts, ``seconds`` after the checkpoint was admitted."""

    nbytes: int
    seconds: float


class Superseded(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint was dropped because newer ones became durable first, ``seconds`` after it was admitted."""

    text = "checkpoint of step %(step)d superseded by newer ones after %(seconds).3f s"
    seconds: float


class Failed(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint failed, or was cancelled; nothing of it is committed."""

    text = "checkpoint of step %(step)d failed: %(error)s"
    error: Exception


class Skipped(Event, frozen=True, kw_only=True):
    """A checkpoint was not begun: too many were in flight, and ``on_busy="skip"``; ``counter``: the newest of these."""

    text = "skipped the checkpoint of step %(step)s: %(in_flight)d are in flight"
    step: int | None
    counter: int
    in_flight: int


class Abandoned(_OfCheckpoint, frozen=True, kw_only=True):
    """A capture delayed an optimizer's step for longer than ``max_stall`` (``seconds``). A :class:`Failed` follows."""

    text = (
        "abandoned the checkpoint of step %(step)d: its capture held an optimizer's step up for longer than "
        "max_stall = %(seconds)s s"
    )
    seconds: float | None


class Waited(_OfCheckpoint, frozen=True, kw_only=True):
    """The training thread had to wait for ``seconds``.

    ``where``: "checkpoint" in a call of ``checkpoint()``; "optimizer" for an overlapped capture. In the latter case
    mostly an optimizer's step waits, but also ``engine.wait_captured()``, and code that accesses memory that is being
    captured.
    """

    seconds: float
    where: Literal["checkpoint", "optimizer"]


class Restored(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint was restored into a state; ``fell_back``: whether newer ones were skipped because of damage."""

    text = "restored step %(step)d in %(seconds).3f s"
    nbytes: int
    seconds: float
    fell_back: bool = False
