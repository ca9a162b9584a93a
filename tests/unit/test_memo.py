"""States that one engine saves in turn: each has its own memo."""

from __future__ import annotations

import gc
from typing import Any

import torch

from pccheck_async.engine.capture import StateReader
from pccheck_async.state import Memos
from pccheck_async.state.storages import Known
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.plan import Planner

BACKEND = CopyBackend(None)  # type: ignore[arg-type]  # asked about devices only: nothing is copied


class Wrapper:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> Any:
        return self.model.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.model.load_state_dict(state)


class Slotted:
    __slots__ = ()

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_states_with_other_objects_have_other_memos() -> None:
    learner, target, memos = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), Memos()
    first = memos.of({"model": learner, "step": 1})
    second = memos.of({"model": target, "step": 1})
    assert first is not second
    for step in range(3):
        assert memos.of({"model": learner, "step": step}) is first
        assert memos.of({"model": target, "step": step}) is second


def test_a_state_without_objects_does_not_take_the_place_of_those_with_its_keys() -> None:
    learner, target, memos = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), Memos()
    plain = memos.of({"model": {"weight": torch.ones(1)}})
    assert memos.of({"model": learner}) is plain
    second = memos.of({"model": target})
    assert second is not plain
    for _ in range(3):
        assert memos.of({"model": learner}) is plain
        assert memos.of({"model": target}) is second


def test_states_with_the_same_objects_have_one_memo_whatever_else_is_in_them() -> None:
    model, memos = torch.nn.Linear(1, 1), Memos()
    first = memos.of({"model": model})
    assert memos.of({"model": model, "step 1": 1}) is first
    assert memos.of({"model": model, "x": torch.ones(1)}) is first


def test_states_without_objects_are_known_by_their_keys() -> None:
    memos = Memos()
    one, other = memos.of({"a": torch.ones(1)}), memos.of({"b": torch.ones(1)})
    assert one is not other
    assert memos.of({"a": torch.ones(2)}) is one
    assert memos.of({"b": 3}) is other
    slotted = memos.of({"c": Slotted()})
    assert memos.of({"c": Slotted()}) is slotted


def test_an_object_that_is_wrapped_anew_for_each_checkpoint_keeps_its_memo() -> None:
    model, memos = torch.nn.Linear(1, 1), Memos()
    first = memos.of({"app": Wrapper(model)})
    gc.collect()
    for _ in range(3):
        assert memos.of({"app": Wrapper(model)}) is first


def test_the_memos_of_the_last_states_are_kept() -> None:
    models, memos = [torch.nn.Linear(1, 1) for _ in range(5)], Memos()
    found = [memos.of({"model": model}) for model in models]
    assert memos.of({"model": models[4]}) is found[4]
    assert memos.of({"model": models[1]}) is found[1]
    assert memos.of({"model": models[0]}) is not found[0]


def test_no_object_is_held() -> None:
    memos = Memos()
    memos.of({"model": torch.nn.Linear(1, 1)})
    gc.collect()
    assert not any(isinstance(each, torch.nn.Linear) for each in gc.get_referents(memos, *gc.get_referents(memos)))


def test_what_follows_from_others_is_known_while_they_are_the_same() -> None:
    known, one, equal = Known(), [1], [1]
    assert known.get("x", (one,)) is None
    assert known.set("x", (one, (1,), b"a"), 5) == 5
    assert known.get("x", (one, (int("1"),), bytes([97]))) == 5
    for of in ((equal, (1,), b"a"), (one, (2,), b"a"), (one, (1,), b"b"), (one, (1,)), (one, [1], b"a")):
        assert known.get("x", of) is None
    assert known.get("y", (one, (1,), b"a")) is None


def test_two_states_in_turn_are_planned_once_each() -> None:
    """Structure and memory stay: nothing is found out again, but for what the first save of a place remembers."""
    networks = [torch.nn.Linear(3, width) for width in (2, 4)]
    captures, planner = StateReader(), Planner(4096, 512)
    found: list[list[Any]] = [[], []]
    for step in range(3):
        for number, network in enumerate(networks):
            capture = captures.start({"network": network, "step": step}, BACKEND, [])
            found[number].append((planner.plan(capture.layout), capture.layout.tensors, capture.layout.known))
    for one in found:
        assert all(map(lambda then, now: then is now, one[0], each) for each in one)
        assert len({id(known) for _, _, known in one}) == 1
    assert (planner.hits, planner.misses) == (4, 2)


def test_which_leaves_were_torn_is_known_to_all_memos() -> None:
    """It says something about the code around the states, which may change their structure."""
    memos = Memos()
    first, other = memos.of({"a": 1}), memos.of({"b": 2})
    assert first is not other
    first.torn.note(["x"], ["x"])
    assert other.torn.sources(["x", "y"], [0, 1]) == [0]
