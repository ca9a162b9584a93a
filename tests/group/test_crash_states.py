"""Power loss at every rank's own moment, on real engines of a group (G1, G3, G4); wrong commits are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pccheck_async.format import Record
from pccheck_async.group import Member, Run
from pccheck_async.group.actions import Action, WriteRecord
from pccheck_async.store import Store
from tests.group.mutants import QUORUM, vote_before_the_flush
from tests.support.group_crash import Life, Scenario, explore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_asked_once")]

Patch = tuple[Any, str, Callable[..., Any]]
_advance, _record_due = Member._advance, Member._record_due


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(2, lives=(Life(4, pin=1), Life(4, "killed", nodes=(1, 0), fails=1)), reopened=1),
        Scenario(3, keep_last=2),
        Scenario(2, keep_last=2, lives=(Life(4, reject=2), Life(4, "mixed", reject=3)), reopened=1),
    ],
    ids=("2 ranks that are killed, swap nodes, and one fails", "3 ranks", "2 ranks that reject"),
)
def test_no_power_loss_breaks_a_promise(scenario: Scenario, tmp_path: Path) -> None:
    found = explore(scenario, tmp_path)
    print(f"\n  {found.summary()}")
    assert not found.violations, "\n".join(found.violations)
    assert found.events["commits"] >= 3
    assert len(found.verdicts) > 400


async def write_without_flush(self: Store, lease: Any, rest: Any) -> None:
    for offset, data in rest:
        await self.medium.write(lease.file, offset, data)


async def free_before_the_flush(self: Store, make: Callable[[Record], Record]) -> None:
    async with self.lock:
        record = make(self.committed.record)
        self.publish(record)
        await self.write_record(record)


def admit_to_what_is_not_free(self: Member) -> list[Action]:
    return _advance(self) + _advance(self)


def end_with_the_record(self: Member, run: Run) -> WriteRecord | None:
    record = _record_due(self, run)
    if record is not None and self._writing is not None:  # what record_durable() does, but for the votes
        durable, self.parts = self.parts, self._writing.parts
        for key in durable:
            job = self._jobs.get(key.counter)
            if job is not None and job.decided is not None:
                del self._jobs[key.counter]
    return record


async def take_nothing_over(self: Store) -> None:
    self.took_over = True


MUTANTS: dict[str, tuple[tuple[Patch, ...], Scenario]] = {
    "data is not flushed": (((Store, "make_data_durable", write_without_flush),), Scenario(2)),
    "ok before the flush": (((Member, "_advance", vote_before_the_flush),), Scenario(2, 2)),
    "slots are free before the flush": (  # with the permit and the room of what the record drops, else nobody comes
        (
            (Store, "rewrite", free_before_the_flush),
            (Member, "_advance", admit_to_what_is_not_free),
            (Member, "_record_due", end_with_the_record),
        ),
        Scenario(2, lives=(Life(10),)),
    ),
    "all oks but one decide": ((QUORUM,), Scenario(2, 2, lives=(Life(8),))),
    "stores are not taken over": (  # harms after a process death that left a record in the page cache alone
        ((Store, "take_over", take_nothing_over),),
        Scenario(2, lives=(Life(3), Life(6, "flushing"), Life(6, "flushing"))),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_commits_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, scenario = MUTANTS[name]
    for owner, attribute, wrong in patches:
        monkeypatch.setattr(owner, attribute, wrong)
    # Threads keep no pace: where one does harm only if ranks meet in a certain way, that may take more lives.
    assert any(explore(replace(scenario, seed=seed), tmp_path / str(seed)).violations for seed in range(10))
