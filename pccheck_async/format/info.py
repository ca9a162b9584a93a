# SPDX-License-Identifier: Apache-2.0
"""Facts about a committed checkpoint that are known without reading its data."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

from pccheck_async.errors import readable

WINDOW_KEY: Final = "pccheck.inside_window"
"""Metadata key, True for a checkpoint that could not wait for the end of a window of gradient accumulation."""

Metadata = Mapping[str, str | int | float | bool | None]
Which: TypeAlias = int | str | None
"""Choice of a checkpoint: the newest of a step (int), the one that has a name (str), or the newest of all (None)."""
Action: TypeAlias = Literal["fill", "replace", "load"]
"""The ways to restore a part of a state (see :class:`Restored`)."""
Tier: TypeAlias = Literal["memory", "disk"]
"""A place that holds whole checkpoints."""
Reach: TypeAlias = Literal["memory", "replicas", "disk", "remote"]
"""A place that a checkpoint reaches: a :data:`Tier`, the memory of other hosts, or object storage ("remote")."""


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointInfo:
    """A durable checkpoint, as its commit record describes it.

    Attributes:
        step: The user's step number.
        counter: The engine's number, larger than that of every checkpoint kept when this one was admitted.
        nbytes: Length of the payload in bytes (tensors and arrays, with padding).
        time: Time of the capture, seconds since the epoch (UTC).
        pinned: Whether it is kept until it is unpinned, even if the rules (``keep_last`` and others) would drop it.
        metadata: The user's ``checkpoint(metadata=...)``.
        name: The user's ``checkpoint(name=...)``, None for none.
        rejected: Whether ``restore`` and ``load`` pass it over, and no rule keeps it (``engine.reject``).
        tiers: The places that hold it, as far as the engine that lists it knows; one in memory alone is not durable.
    """

    step: int
    counter: int
    nbytes: int
    time: float
    pinned: bool = False
    metadata: Metadata = field(default_factory=dict, hash=False)
    name: str | None = None
    rejected: bool = False
    tiers: tuple[Reach, ...] = field(default=("disk",), compare=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self._facts())}>"

    def _facts(self) -> list[str]:
        """Return the facts that ``repr`` shows, in words."""
        facts = [f"step {self.step}" + ("" if self.name is None else f" {self.name!r}"), f"counter {self.counter}"]
        facts.append(f"{self.nbytes} bytes")
        with suppress(OverflowError, ValueError, OSError):  # a damaged store may claim a time that no calendar has
            facts.append(f"{self.created:%Y-%m-%d %H:%M:%S} UTC")
        facts += [mark for mark in ("pinned", "rejected") if getattr(self, mark)]
        facts += ["in memory" if "disk" in self.tiers else "in memory alone"] if "memory" in self.tiers else []
        facts += ["in a bucket"] if "remote" in self.tiers else []
        return facts + [f"{key}={value!r}" for key, value in self.metadata.items()]

    @property
    def created(self) -> datetime:
        """The capture time as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.time, UTC)

    @property
    def inside_window(self) -> bool:
        """Whether it was saved inside a window of gradient accumulation, without the gradients computed so far."""
        return self.metadata.get(WINDOW_KEY) is True


_FACTS: Final = tuple(fact.name for fact in fields(CheckpointInfo))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Restored(CheckpointInfo):
    """The checkpoint that was restored, and the differences between it and the state (``strict=False``).

    A Restored compares equal to the :class:`CheckpointInfo` of its checkpoint.

    Attributes:
        missing: Paths that the state has and the checkpoint lacks: they stayed as they were. For a subtree that the
            checkpoint lacks as a whole, only the path of its root.
        unexpected: Paths that the checkpoint has and the state lacks: they were not read.
        filled: Number of leaves of the checkpoint that were restored; all of them, if nothing is unexpected.
        mismatched: In a dry run, paths that both have and that cannot be restored, each with what was found.
        actions: In a dry run, what a restore does with the parts of the state, by their paths: "fill" (an array takes
            stored bytes), "replace" (a plain value), "load" (an object loads its state).
        error: In a dry run, the text of the StateMismatchError that a restore raises; None if it raises none.
        source: The tier that this process's part was read from; "replicas": the memory of another host;
            "remote": the bucket of the engine's drain.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    filled: int = 0
    mismatched: tuple[str, ...] = ()
    actions: Mapping[str, Action] = field(default_factory=dict)
    error: str | None = None
    source: Reach = "disk"

    def _facts(self) -> list[str]:
        counts = {"filled": self.filled, "missing": len(self.missing), "unexpected": len(self.unexpected)}
        facts = [f"{count} {what}" for what, count in counts.items() if count or what == "filled"]
        facts += [
            f"would {action} {list(self.actions.values()).count(action)}"
            for action in dict.fromkeys(self.actions.values())
        ]
        facts += {"memory": ["from memory"], "remote": ["from a bucket"]}.get(self.source, [])
        return [*CheckpointInfo._facts(self), *facts, *([] if self.error is None else [f"error: {self.error}"])]

    @classmethod
    def of(
        cls, info: CheckpointInfo, missing: tuple[str, ...], unexpected: tuple[str, ...], filled: int = 0, **more: Any
    ) -> Restored:
        """Return ``info`` as a Restored with these differences."""
        facts, names = {name: getattr(info, name) for name in _FACTS}, readable([*missing, *unexpected])
        missing, unexpected = tuple(names[: len(missing)]), tuple(names[len(missing) :])
        return cls(**facts, missing=missing, unexpected=unexpected, filled=filled, **more)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointInfo):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FACTS if name != "tiers")

    __hash__ = CheckpointInfo.__hash__
