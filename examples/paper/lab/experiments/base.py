"""What every experiment is given, and what it finds."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from examples.paper.lab.table import Row
from examples.paper.lab.timeline import Timeline

__all__ = ["Experiment", "Findings", "Settings"]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run experiments.

    Attributes:
        folder: On the filesystem that is measured; an experiment makes a folder of its own in it and deletes that.
        quick: Small states and few rounds: minutes for all experiments together, to see that they run. What a machine
            reaches is found without it.
        repetitions: Rounds of everything, None for as many as the experiment takes by itself (at least 3, 9 in full).
        methods: Names of the methods to compare, None for all that can run here.
        progress: Is told what is being measured.
    """

    folder: Path
    quick: bool = False
    repetitions: int | None = None
    methods: Sequence[str] | None = None
    progress: Callable[[str], None] = _silent

    def rounds(self, full: int) -> int:
        """Return how often to repeat, where a whole run repeats ``full`` times."""
        return self.repetitions or (3 if self.quick else full)


@dataclass(slots=True)
class Findings:
    """What an experiment found.

    Attributes:
        rows: All measurements; several figures may be among them, each in a unit of its own.
        notes: What a reader must know, one sentence each: the state, what was skipped or failed and why.
        timelines: Recorded runs by their title.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timelines: dict[str, Timeline] = field(default_factory=dict)


class Experiment(abc.ABC):
    """One question about checkpointing, answered by a measurement on this machine."""

    name: ClassVar[str]
    """What command lines and files call it."""
    title: ClassVar[str]
    """The question, for a heading."""

    @classmethod
    def why_not(cls) -> str | None:
        """Return why it cannot run here, None where it can."""
        return None

    @abc.abstractmethod
    def run(self, settings: Settings) -> Findings:
        """Measure.

        Raises:
            ValueError: the settings name a method that there is not.
            OSError: the folder cannot be written.
        """
