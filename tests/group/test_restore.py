"""The restore agreement: every answer of every rank, in every order."""

from __future__ import annotations

import asyncio
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    Group,
    StateMismatchError,
    SyncCheckpointEngine,
    list_checkpoints,
    stores,
)
from pccheck_async.engine import RestoreCandidate
from pccheck_async.errors import GroupError, UnsupportedStateError
from pccheck_async.format import Entry
from pccheck_async.format.record import decode_identity, newest_record, slot_name
from pccheck_async.group import Key, Run, decode_decision, decode_message, encode
from pccheck_async.group.actions import Action, ChangeState, EndRestore, FillArrays, MatchManifest, Post
from pccheck_async.group.candidates import PartSources
from pccheck_async.group.messages import Candidate, MatchOutcome, NotRestored, Restored, Verify
from pccheck_async.group.restore import LeadRestore, Restore, There
from tests.support.group_explorer import cloned, frozen
from tests.support.ranks import run_ranks, wait_for

RUN = Run(1, 1, 1)
THERE = [(Key(5, RUN), 50, "best"), (Key(3, RUN), 30, None)]


class State(NamedTuple):
    ranks: tuple[Restore, ...]
    lead: LeadRestore
    log: tuple[bytes, ...]
    learned: tuple[int, ...]
    doing: tuple[str, ...]  # what each rank is asked to do: match, verify or nothing
    whole: tuple[tuple[int, Key | None], ...]  # who found all chunks of what whole
    ended: tuple[str, ...]  # how it ended for each rank


def explore(world: int, steps: Sequence[int | None], there: Sequence[There], lacking: str = "") -> set[str]:
    """Return what it may end as, all ranks alike; violations begin with G5."""
    first = State(
        tuple(map(Restore, range(world))), LeadRestore(world), (), (0,) * world, ("",) * world, (), ("",) * world
    )
    queue, seen, results = deque([first]), {frozen(first)}, set[str]()
    queue[0] = begin(first, steps, there, lacking)
    while queue:
        state = queue.popleft()
        after = list(successors(state, there, lacking))
        if not after:
            results.add(" | ".join(sorted(set(state.ended))))
        for one in after:
            results |= {how for how in one.ended if how.startswith("G5")}
            if (key := frozen(one)) not in seen:
                seen.add(key)
                queue.append(one)
    return results


OUTCOMES: tuple[MatchOutcome, ...] = ("ok", "mismatch", "damaged")


def begin(state: State, steps: Sequence[int | None], there: Any, lacking: str) -> State:
    for rank, step in enumerate(steps):
        state = act(state, rank, partial(Restore.request, which=step), there, lacking)
    return state


def successors(state: State, there: Any, lacking: str) -> Any:
    for rank, doing in enumerate(state.doing):
        if state.learned[rank] < len(state.log):
            decision = decode_decision(state.log[state.learned[rank]])
            assert isinstance(decision, Candidate | Verify | Restored | NotRestored)
            learned = put(state.learned, rank, state.learned[rank] + 1)
            yield act(state._replace(learned=learned), rank, partial(Restore.learn, decision=decision), there, lacking)
        idle = state._replace(doing=put(state.doing, rank, ""))
        if doing == "match":
            tried = state.ranks[rank].attempt > 1
            for outcome in ("ok", "mismatch", "damaged") if tried else OUTCOMES:
                yield act(idle, rank, partial(Restore.matched, outcome=outcome, why=f"{outcome} here"), there, lacking)
        if doing == "verify":
            yield act(idle, rank, lambda one: one.verified("a chunk is damaged"), there, lacking)
            if "elsewhere" in OUTCOMES and state.ranks[rank].attempt == 1:
                yield act(idle, rank, lambda one: one.verified("this copy", elsewhere=True), there, lacking)
            whole = (*idle.whole, (rank, state.ranks[rank].key))
            yield act(idle._replace(whole=whole), rank, lambda one: one.verified(), there, lacking)


def act(state: State, rank: int, call: Callable[[Restore], list[Action]], there: Any, lacking: str) -> State:
    one, lead = cloned(state.ranks[rank]), cloned(state.lead)
    doing, ended, log = state.doing[rank], state.ended[rank], state.log
    for action in call(one):
        match action:
            case Post():
                decisions = lead.receive(decode_message(encode(action.message)), there, lacking)
                log += tuple(map(encode, decisions))
            case MatchManifest():
                doing = "match"
            case FillArrays():
                doing = "verify"
            case ChangeState():
                agreed = {who for who, key in state.whole if key == action.key} == set(range(len(state.ranks)))
                ended = f"restored {action.key.counter}" if agreed else "G5: the state changes before all agreed"
            case EndRestore():
                ended = f"{action.reason}: {action.why}"
    return state._replace(
        ranks=put(state.ranks, rank, one), lead=lead, log=log, doing=put(state.doing, rank, doing),
        ended=put(state.ended, rank, ended),
    )  # fmt: skip


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_end_alike_and_change_nothing_before_all_agreed(world: int) -> None:
    results = explore(world, [None] * world, THERE[: 3 - world] or THERE[:1])
    assert not [one for one in results if "G5" in one or " | " in one]
    assert "restored 5" in results
    assert any(one.startswith("mismatch: rank 0: mismatch here") for one in results)
    assert any(one.startswith("damaged: ") for one in results)
    assert ("restored 3" in results) == (world < 2)


def test_damage_of_one_copy_is_of_no_consequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank may find once that its copy cannot be read, and that another host has one."""
    without = explore(2, [None, None], THERE)
    monkeypatch.setattr("tests.group.test_restore.OUTCOMES", (*OUTCOMES, "elsewhere"))
    assert explore(2, [None, None], THERE) == without
    monkeypatch.setattr(LeadRestore, "_try_again", lambda self, key, _: [Restored(self.index, key, ())])
    assert any("G5" in one for one in explore(2, [None, None], THERE))


def test_damage_on_any_rank_takes_all_to_the_next_older_one() -> None:
    results = explore(2, [None, None], THERE)
    assert {"restored 5", "restored 3"} <= results
    assert not [one for one in results if "G5" in one or " | " in one]


def test_damage_of_what_was_asked_for_is_an_error() -> None:
    results = explore(2, [50, 50], THERE)
    assert "restored 5" in results
    assert "restored 3" not in results
    assert any(one.startswith("damaged: rank 1: a chunk is damaged") for one in results)


def test_what_there_is_not() -> None:
    assert explore(2, [None, None], []) == {"none: "}
    assert explore(2, [None, None], [], "rank 1 lacks") == {"incomplete: rank 1 lacks"}
    assert explore(2, [7, 7], THERE) == {"no step: there is no complete checkpoint of step 7"}
    assert explore(2, [7, 7], [], "rank 1 lacks") == {
        "no step: there is no complete checkpoint of step 7; rank 1 lacks"
    }
    assert explore(2, [None, 50], THERE) == {"disagreement: rank 0: asked for the newest; rank 1: asked for step 50"}


def test_known_damage_is_not_tried_again() -> None:
    lead = LeadRestore(1, damaged={5})
    (first,) = lead.receive(Restore(0).request(None)[0].message, THERE, "")  # type: ignore[attr-defined]
    assert isinstance(first, Candidate)
    assert first.key.counter == 3
    lead = LeadRestore(1, damaged={5, 3})
    (ended,) = lead.receive(Restore(0).request(None)[0].message, THERE, "")  # type: ignore[attr-defined]
    assert isinstance(ended, NotRestored)
    assert ended.reason == "damaged"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_all_in", lambda self, answers: len(answers) >= self.world - 1),
        ("_conclude_match", lambda self, there: [self._conclude(self.candidate, there)[0]]),  # nothing is verified
        ("_fall_back", lambda self, damage, *_: [Restored(self.index, self.candidate, ())]),  # damage is ignored
    ],
)
def test_changing_the_state_too_early_is_found(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeadRestore, name, wrong)
    assert any("G5" in one for one in explore(2, [None, None], THERE[:1]))


def cancelled(folder: Path, group: Group) -> list[str]:
    """Rank 1 gives up before rank 0 asks, which ends alike at once; the next restore is one of both again."""

    async def main() -> list[str]:
        state, told = {"x": torch.ones(1)}, []
        async with CheckpointEngine(folder, group=group) as engine:
            await (await engine.checkpoint(state, step=1)).durable()
            if group.rank:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.restore(state), 0.2)
                (folder / "gave up").touch()
            else:
                await asyncio.to_thread(wait_for, folder / "gave up")
                with pytest.raises(StateMismatchError) as caught:
                    await asyncio.wait_for(engine.restore(state), 5)
                told.append(str(caught.value))
            restored = await asyncio.wait_for(engine.restore(state), 5)
            assert restored is not None
        return told

    return asyncio.run(main())


@pytest.mark.slow
def test_a_rank_that_gives_up_before_others_ask_stops_nobody(tmp_path: Path) -> None:
    (told,), nothing = run_ranks(2, partial(cancelled, tmp_path))
    assert "rank 1: the restore ended" in told
    assert nothing == []


def refused(folder: Path, group: Group) -> None:
    """Rank 1's call raises a failure that nobody awaited there: rank 0's ends, too. The next one restores."""
    state = {"x": torch.ones(1)}
    with SyncCheckpointEngine(folder, group=group) as engine:
        engine.checkpoint(state, step=1).result(20)
        if group.rank:
            pending = engine.checkpoint(state, step=2)
            while not pending.done():
                time.sleep(0.001)
            with pytest.raises(GroupError, match="rank 0: UnsupportedStateError"):
                engine.restore(state)
            (folder / "raised").touch()
        else:
            with pytest.raises(UnsupportedStateError):
                engine.checkpoint({"x": object()}, step=2)
            wait_for(folder / "raised")
            with pytest.raises(StateMismatchError, match="rank 1: the restore ended: GroupError"):
                engine.restore(state)
        restored = engine.restore(state)
        assert restored is not None
        assert restored.step == 1


def test_a_failure_that_one_rank_gets_first_ends_the_restore_of_all(tmp_path: Path) -> None:
    run_ranks(2, partial(refused, tmp_path))


def restored_beside(folder: Path, meanwhile: Callable[[SyncCheckpointEngine], object], group: Group) -> int:
    """Restore the newest of two checkpoints; all ranks do something else after it was proposed."""
    state: dict[str, Any] = {"x": torch.zeros(5000), "step": 0}
    with SyncCheckpointEngine(folder, group=group, keep_last=2) as engine:
        for step in (3, 7):
            engine.checkpoint({"x": torch.arange(5000.0) + step, "step": step}, step=step).result(20)
        find = PartSources.candidates

        def find_too_early(self: PartSources, key: Key, passed: Sequence[int]) -> list[RestoreCandidate]:
            patched.undo()
            found = find(self, key, passed)
            meanwhile(engine)
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(PartSources, "candidates", find_too_early)
            restored = engine.restore(state)
    assert restored is not None
    assert torch.equal(state["x"], torch.arange(5000.0) + restored.step)
    return restored.step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the checkpoint of step 7 cannot be read")
@pytest.mark.parametrize(
    ("meanwhile", "step"),
    [
        (lambda engine: engine.pin(step=7), 7),
        (lambda engine: engine.reject(step=7), 3),
        (lambda engine: engine.remove(step=7), 3),
    ],
    ids=["pinned", "rejected", "removed"],
)
def test_a_candidate_that_is_changed_before_it_is_held(
    tmp_path: Path, meanwhile: Callable[[SyncCheckpointEngine], object], step: int
) -> None:
    assert run_ranks(2, partial(restored_beside, tmp_path, meanwhile)) == [step, step]


def save_two(folder: Path, group: Group) -> None:
    with SyncCheckpointEngine(folder, group=group, keep_last=2) as engine:
        for step in (3, 7):
            engine.checkpoint({"x": torch.arange(5000.0) + step, "step": step}, step=step).result(60)


def restore_and_listen(folder: Path, group: Group) -> tuple[Any, list[str]]:
    state: dict[str, Any] = {"x": torch.zeros(5000), "step": 0}
    with warnings.catch_warnings(record=True) as caught, SyncCheckpointEngine(folder, group=group) as engine:
        warnings.simplefilter("always")
        restored = engine.restore(state)
        engine.wait_captured()
    assert restored is not None
    assert torch.equal(state["x"], torch.arange(5000.0) + restored.step)
    return restored.step, [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


def test_a_fall_back_is_warned_of_on_rank_0_and_where_the_damage_is(tmp_path: Path) -> None:
    run_ranks(3, partial(save_two, tmp_path))
    (newest, *_) = newest_of(tmp_path / "rank-00001")
    with open(tmp_path / "rank-00001" / slot_name(newest.slot), "r+b") as slot:
        slot.write(b"?" * 100)
    first, second, third = run_ranks(3, partial(restore_and_listen, tmp_path))
    assert first[0] == second[0] == third[0] == 3
    for _, said in (first, second):
        (text,) = said
        assert re.fullmatch(
            r"the checkpoint of step 7 cannot be read \(rank 1: .*slot-\d+.*damaged.*\); all ranks fall back to step 3",
            text,
        )
    assert third[1] == []  # one line for each of a thousand ranks would be too many


def newest_of(store: Path) -> tuple[Entry, ...]:
    identity = decode_identity((store / "store.json").read_bytes())
    record = newest_record((store / "commit").read_bytes(), identity.id_bytes)
    assert record is not None
    return record.entries


def save_named(folder: Path, *steps: int, group: Group) -> int:
    """Restore, and save these steps under the names that they always have; return the step that was restored."""
    state: dict[str, Any] = {"x": torch.zeros(5000), "step": 0}
    with SyncCheckpointEngine(folder, group=group, keep_last=4) as engine:
        restored = engine.restore(state)
        for step in steps:
            engine.checkpoint({"x": torch.full((5000,), float(step)), "step": step}, step=step, name=f"n{step}").result(
                60
            )
    return 0 if restored is None else restored.step


@pytest.mark.filterwarnings("ignore:the checkpoint of step 2 cannot be read")
def test_the_name_of_a_checkpoint_that_was_passed_over_is_free(tmp_path: Path) -> None:
    """The resumed program gives its names again, on all ranks, also on those whose parts are whole."""
    run_ranks(2, partial(save_first, tmp_path))
    (newest, *_) = newest_of(tmp_path / "rank-00001")
    with open(tmp_path / "rank-00001" / slot_name(newest.slot), "r+b") as slot:
        slot.write(b"?" * 100)
    assert run_ranks(2, partial(save_again, tmp_path)) == [1, 1]
    assert [(one.step, one.name) for one in list_checkpoints(tmp_path)] == [(3, "n3"), (2, "n2"), (1, "n1")]
    assert stores.verify(tmp_path, every=True).whole


def save_first(folder: Path, group: Group) -> int:
    return save_named(folder, 1, 2, group=group)


def save_again(folder: Path, group: Group) -> int:
    return save_named(folder, 2, 3, group=group)
