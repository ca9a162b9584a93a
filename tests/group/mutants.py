"""Wrong protocols: each has one rule replaced by a plausible wrong one, and a scenario in which that does harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pccheck_async.group import Applied, Complete, Coordinator, Key, Member, Part, Run, SeenStore, member, view
from pccheck_async.group.actions import Action, Free, Post, Resolve, ResolveChange, TakeOver, WriteRecord
from pccheck_async.group.messages import AnyDecision, Change, Ok, Start, WantedStep
from pccheck_async.store import Retention
from tests.support.group_explorer import Scenario

Patch = tuple[Any, str, Callable[..., Any]]


@dataclass(frozen=True)
class Mutant:
    name: str
    breaks: str  # the kind of violation
    patches: tuple[Patch, ...]
    scenario: Scenario
    seed: int = 0  # of random histories that get there soon


_reachable, _error_in, _hello = view.reachable, view.error_in, Member.hello
_advance, _learn, _settle, _start = Member._advance, Member.learn, Member._settle, Coordinator._start
_change, _learn_change, _reject = Member._change, Member._learn_change, Retention.reject


def own_folders_only(stores: Sequence[SeenStore], homes: Sequence[int]) -> list[SeenStore]:
    return [one for one in _reachable(stores, homes) if one.rank < len(homes) and homes[one.rank] == one.domain]


def by_step(stores: Sequence[SeenStore]) -> dict[Key, list[tuple[SeenStore, Part]]]:
    found: dict[tuple[Run, int], list[tuple[SeenStore, Part]]] = {}
    for store in stores:
        for part in store.parts:
            found.setdefault((part.run, part.entry.step), []).append((store, part))
    return {min(parts, key=lambda one: one[1].rank)[1].key: parts for parts in found.values()}


def one_run_of_each_number(stores: Sequence[SeenStore], complete: Sequence[Complete]) -> str | None:
    runs = {part.run for store in stores for part in store.parts}
    return _error_in(stores, complete) if len({run.number for run in runs}) == len(runs) else "two runs of one number"


def newest_complete(stores: Sequence[SeenStore], complete: Sequence[Complete]) -> int:
    return max((one.entry.counter for one in complete), default=-1)


def pins_of_rank_0(stores: Sequence[SeenStore]) -> frozenset[Key]:
    return frozenset(key for one in stores if one.rank == 0 and one.applied is not None for key in one.applied.pinned)


def pins_of_own_parts(self: Member, run: Run) -> Any:
    return Applied(run, self.learned, tuple(key for key, part in self.parts.items() if part.entry.pinned))


def start_without_pins(self: Member, decision: AnyDecision) -> list[Action]:
    actions = _learn(self, decision)
    if isinstance(decision, Start):
        self.keep = {key: key in self.parts and self.parts[key].entry.pinned for key in self.keep}
    return actions


def join_without_orphans(self: Member) -> list[Action]:
    first, self._joining = not self._joining, True
    return [TakeOver(())] if first else []


def sweep_at_once(self: Member, decision: AnyDecision) -> list[Action]:
    actions = _learn(self, decision)
    return [*actions, *self._remove_orphans()] if isinstance(decision, Start) else actions


def vote_before_the_flush(self: Member) -> list[Action]:
    actions = _advance(self)
    if any(isinstance(action, WriteRecord) for action in actions):
        assert self._writing is not None
        assert self.run is not None
        for counter in self._writing.prepares:
            job = self._jobs[counter]
            actions.append(Post(Ok(self.rank, self.run, counter, job.step, job.entry if self.rank == 0 else None)))
    return actions


def free_before_the_flush(self: Member) -> list[Action]:
    actions = _advance(self)
    for action in list(actions):
        if isinstance(action, WriteRecord):
            actions.append(Free(tuple(part for key, part in self.parts.items() if part not in action.parts)))
    return actions


def superseded_for_others(self: Member, counter: int, outcome: Any, why: str = "", rank: int = -1) -> list[Action]:
    actions = _settle(self, counter, outcome, why, rank)
    if outcome == "failed" and rank != self.rank:
        return [Resolve(counter, "superseded") if isinstance(one, Resolve) else one for one in actions]
    return actions


def start_when_one_took_over(self: Coordinator) -> bool:
    assert self._view is not None
    for message in self._found.values():
        for store in message.stores:
            self._stores.setdefault(store.rank, store.store_id)
    return self.run is None and len(self._stores) == self.world


def keep_dead_parts(self: Coordinator) -> list[AnyDecision]:
    assert self._view is not None
    (start,) = _start(self)
    assert isinstance(start, Start)
    return [replace(start, unproven=tuple(one.key for one in self._view.incomplete))]


def write_at_opening(self: Member, **about: Any) -> list[Action]:
    return [TakeOver(()), *_hello(self, **about)]


def rejected_on_this_rank(self: Member, step: int, until: int) -> list[Action]:
    *actions, post = _change(self, WantedStep("was rejected", step, until))
    return [*actions, post, ResolveChange(self.changes_asked - 1, None)]


def marked_in_two_records(self: Member, decision: Change) -> list[Action]:
    later = vars(self).pop("later", ())
    if decision.why is None:
        self.later = decision.rejected[1:]  # type: ignore[attr-defined]
        decision = replace(decision, rejected=(*decision.rejected[:1], *later))
    return _learn_change(self, decision)


def complete_ones_rejected(entries: Any, step: int, in_flight: Any, until: int) -> set[int]:
    return _reject(entries, step, {}, until)


OWN = (view, "reachable", own_folders_only)
SHARED = Scenario("shared", ("ss", "s"))
QUORUM = (Coordinator, "_is_complete", lambda self, one: one.entry is not None and len(one.prepared) >= self.world - 1)
ALL_REFUSE = (Coordinator, "_lacking", lambda self: " ".join(map(str, self._view.incomplete)))
FEWER_SLOTS = (Member, "_capacity", lambda self: self.max_in_flight + self.reserved)
PIN_LEARNT = (Member, "_note_change", lambda self, index: self._resolve_changes((index,)))
LOCAL: dict[str, Any] = {"nodes": 3, "power": False, "force": True}
AB, AC, BA = (0, 1), (0, 2), (1, 0)

MUTANTS = [
    # who has what
    Mutant("only own folders are read", "G4", (OWN,), Scenario("swap", ("s", "s"), nodes=2, power=False)),
    Mutant("only own folders are read, and ranks swap back", "G4", (OWN,),
           Scenario("swap", ("ss", "s", "s"), nodes=2, power=False)),
    Mutant("decision 0 drops what is incomplete in sight", "G1",
           ((view, "is_provably_incomplete", lambda proofs, parts: True),),
           Scenario("AB AC AB", ("s", "s", "s"), route=(AB, AC, AB), **LOCAL)),
    Mutant("two runs of one number are an error", "L", ((view, "error_in", one_run_of_each_number),),
           Scenario("AB AB AC AB", ("s", "s", "s", "s"), route=(AB, AB, AC, AB), **LOCAL), seed=23),
    Mutant("a run counts on from the newest complete one", "G1", ((view, "base_counter", newest_complete),),
           Scenario("AB AC AB", ("s", "s", "s"), route=(AB, AC, AB), **LOCAL)),
    Mutant("an entry of whatever kind is a reason to refuse", "L", (ALL_REFUSE,),
           Scenario("none", ("s", "s"), power=False)),
    Mutant("a step makes parts one checkpoint", "G3", ((view, "parts_by_key", by_step),),
           Scenario("a step saved twice", ("ss", "s"), steps=(7, 7), power=False)),
    # taking over, and what dead runs left
    Mutant("orphan stores are not taken over", "G1", ((Member, "join", join_without_orphans),),
           Scenario("swap", ("s", "s", "s"), nodes=2), seed=28),
    Mutant("orphans go with decision 0", "G1",
           ((Member, "learn", sweep_at_once), (Coordinator, "_keep_list", lambda self: ())),
           Scenario("3 or 2", ("s", "s", "s"), worlds=(3, 2), power=False)),
    Mutant("decision 0 before all took over", "G1", ((Coordinator, "_may_start", start_when_one_took_over),),
           Scenario("shared", ("ss", "s", "s"))),
    Mutant("as many slots as without dead runs", "L", (FEWER_SLOTS,),
           Scenario("AB AC", ("sss", "s"), route=(AB, AC), **LOCAL), seed=11),
    Mutant("what dead runs left stays", "G10", ((Coordinator, "_start", keep_dead_parts),),
           Scenario("loop", ("ss", "ss"), power=False), seed=27),
    Mutant("opening takes over", "G6", ((Member, "hello", write_at_opening),), SHARED),
    # commits
    Mutant("ok before the flush", "G2", ((Member, "_advance", vote_before_the_flush),), SHARED),
    Mutant("all oks but one decide", "G3", (QUORUM,), SHARED),
    Mutant("a record is what the keep-list says", "G1",
           ((member, "is_undecided", lambda key, run, settled: False),), Scenario("shared", ("sss",), power=False)),
    Mutant("decisions are applied with the next prepare only", "L",
           ((Member, "_apply_is_due", lambda self: False),), Scenario("shared", ("sss",), power=False)),
    Mutant("slots are free before the flush", "G1", ((Member, "_advance", free_before_the_flush),), SHARED),
    Mutant("steps are not compared", "G7", ((Coordinator, "_check_step", lambda self, ballot, message: []),),
           Scenario("diverging", ("ss",), steps=(7, 8), diverges=True, power=False)),
    Mutant("a failure fails the handle of its own rank", "G8", ((Member, "_settle", superseded_for_others),),
           Scenario("failing", ("ss",), fails=1, power=False)),
    # replicas
    Mutant("digests of replicas are not compared", "G11", ((Coordinator, "_differing", lambda self, ballot: ()),),
           Scenario("differing", ("s",), differs=True, power=False)),
    Mutant("a checkpoint has parts of before and after replicas differed", "G11",
           ((Coordinator, "_is_mixed", lambda self, ballot: False),),
           Scenario("differing", ("sss",), differs=True, power=False)),
    # pins
    Mutant("pin() returns when the decision is learnt", "PIN", (PIN_LEARNT,), Scenario("pin", ("sp", "s"), pins=1),
           seed=17),
    Mutant("pins are those in rank 0's record", "PIN", ((view, "pinned_keys", pins_of_rank_0),),
           Scenario("pin", ("sp", "s"), pins=1), seed=3),
    Mutant("pins are kept with the parts that they are of", "PIN", ((Member, "_applied", pins_of_own_parts),),
           Scenario("pin", ("sp", "s", "s"), nodes=2, power=False, pins=1, route=(AB, BA, AB))),
    Mutant("a run's first record does not say what decision 0 pins", "PIN", ((Member, "learn", start_without_pins),),
           Scenario("pin", ("sp", "s", "s"), pins=1, max_in_flight=1, power=False), seed=133),
    # rejections
    Mutant("reject() returns when the decision is learnt", "REJECT", (PIN_LEARNT,),
           Scenario("reject", ("ssr", "s"), keep=2), seed=7),
    Mutant("reject() returns when this rank's record has the marks", "REJECT",
           ((Member, "was_rejected", rejected_on_this_rank),),
           Scenario("one rank more rejects", ("ss", "r", "s"), keep=2, worlds=(2, 3)), seed=1),
    Mutant("the marks of one rejection come with two records", "REJECT",
           ((Member, "_learn_change", marked_in_two_records),),
           Scenario("reject two", ("sssr", "s"), keep=3, rejects_from=1), seed=7),
    Mutant("those in flight are not rejected", "REJECT", ((Retention, "reject", staticmethod(complete_ones_rejected)),),
           Scenario("reject two", ("sssr", "s"), keep=3, rejects_from=1)),
]  # fmt: skip
"""Those of the model (``mutants.py`` and ``text.py`` there), and one for each invariant that the protocol can break."""
