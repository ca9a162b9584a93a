# SPDX-License-Identifier: Apache-2.0
"""Events in the life of an engine's checkpoints, as frozen values: for ``engine.on_event`` and for the log.

The log has a line for those with a level (:mod:`pccheck_async.telemetry.logs` has the names and levels).
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
    """Something that happened.

    Attributes:
        name: In the log.
        level: Of its line in the log; None: it has none.
        text: That line.
        time: Seconds since the epoch.
    """

    name: ClassVar[str] = ""
    level: ClassVar[int | None] = None
    text: ClassVar[str] = ""
    time: float = msgspec.field(default_factory=time.time)

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        cls.level = LEVELS.get(cls.name)


class Opened(Event, frozen=True, kw_only=True):
    """The store was opened: the number of its checkpoints, the newest one's step, and the I/O backend."""

    text = "opened %(store)s with %(checkpoints)d checkpoint(s); %(io)s"
    checkpoints: int
    step: int | None
    io: str


class Closed(Event, frozen=True, kw_only=True):
    """The engine was closed: the outcomes of its checkpoints, the bytes of the durable ones, its seconds."""

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
    """Attributes: the user's and the engine's number of the checkpoint."""

    step: int
    counter: int


class Admitted(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint was given its counter; ``state_dict()`` and laying out the state took so many seconds."""

    state_seconds: float = 0.0


class Captured(_OfCheckpoint, frozen=True, kw_only=True):
    """Its bytes are out of the trainer's reach, so many seconds after it was admitted."""

    nbytes: int
    seconds: float


class Durable(_OfCheckpoint, frozen=True, kw_only=True):
    """It is committed, ``seconds`` after it was admitted; it was captured in the first ``capture_seconds`` of those.

    Training has waited for it for ``stall`` seconds so far.
    """

    text = "checkpoint of step %(step)d durable: %(nbytes)d bytes in %(seconds).3f s, training waited %(stall).3f s"
    nbytes: int
    seconds: float
    capture_seconds: float
    stall: float


class InMemory(_OfCheckpoint, frozen=True, kw_only=True):
    """It is committed in memory, so many seconds after it was admitted: it survives the process, not the machine."""

    nbytes: int
    seconds: float


class InReplicas(_OfCheckpoint, frozen=True, kw_only=True):
    """It, or a newer one, is in the memory of other hosts, so many seconds after it was admitted."""

    nbytes: int
    seconds: float


class Superseded(_OfCheckpoint, frozen=True, kw_only=True):
    """Newer ones became durable first and made it pointless, so many seconds after it was admitted."""

    text = "checkpoint of step %(step)d superseded by newer ones after %(seconds).3f s"
    seconds: float


class Failed(_OfCheckpoint, frozen=True, kw_only=True):
    """It failed, or was cancelled; nothing of it is committed."""

    text = "checkpoint of step %(step)d failed: %(error)s"
    error: Exception


class Skipped(Event, frozen=True, kw_only=True):
    """All places were in flight and ``on_busy="skip"``; ``counter`` is that of the newest one in flight."""

    text = "skipped the checkpoint of step %(step)s: %(in_flight)d are in flight"
    step: int | None
    counter: int
    in_flight: int


class Abandoned(_OfCheckpoint, frozen=True, kw_only=True):
    """Its capture held an optimizer's step up for longer than ``max_stall`` (seconds). A :class:`Failed` follows."""

    text = (
        "abandoned the checkpoint of step %(step)d: its capture held an optimizer's step up for longer than "
        "max_stall = %(seconds)s s"
    )
    seconds: float | None


class Waited(_OfCheckpoint, frozen=True, kw_only=True):
    """The training thread was kept waiting: in a call of ``checkpoint()`` ("checkpoint"), or for an overlapped capture.

    The latter is "optimizer": mostly an optimizer's step waits; ``engine.wait_captured()``, and code that reaches for
    memory that is being captured, count there, too.
    """

    seconds: float
    where: Literal["checkpoint", "optimizer"]


class Restored(_OfCheckpoint, frozen=True, kw_only=True):
    """A checkpoint was restored into a state; ``fell_back``: damaged ones that are newer were passed over."""

    text = "restored step %(step)d in %(seconds).3f s"
    nbytes: int
    seconds: float
    fell_back: bool = False
