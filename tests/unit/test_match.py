from __future__ import annotations

import pickle
import random
from collections import Counter, OrderedDict
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pccheck_async import ResumableSampler
from pccheck_async.errors import CorruptStoreError, StateMismatchError, UnsupportedStateError
from pccheck_async.format.skeleton import ArrayNode, DictNode, StatefulNode
from pccheck_async.state import Owners, RNGState, allocate, as_bits, live_tree, match
from pccheck_async.state.restore.adapt import like_parameters
from tests.support import state_strategies
from tests.support.round_trip import save
from tests.support.state_strategies import Thing, array_bytes, difference, same


class Extra(nn.Linear):
    """With a state beside its tensors."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, *schedulers: Any) -> None:
    for step in range(steps):
        data = torch.linspace(-1, 1, 4 * 5).reshape(5, 4) + step

        def closure(data: torch.Tensor = data) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(data).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        for scheduler in schedulers:
            scheduler.step()


def mismatch(state: Any, saved: Any) -> StateMismatchError:
    with pytest.raises(StateMismatchError) as raised:
        match(state, saved.decoded)
    return raised.value


# -- allocate


def test_load_some_keys_reads_only_them() -> None:
    state = {"model": model(), "big": torch.zeros(5000), "steps": [1, 2, {"x": torch.ones(2)}], "step": 3}
    saved = save(state, 512)
    restoration = allocate(saved.decoded, ["model.*", "step"])
    assert sum(target.nbytes for target in restoration.targets) < 1000
    found = saved.fill(restoration)
    assert list(found) == ["model", "step"]
    assert same(found["model"], state["model"].state_dict())  # type: ignore[attr-defined]
    assert saved.load(["model.3.weight"])["model"].keys() == {"3.weight"}
    assert same(saved.load(["*.x"]), {"steps": {2: {"x": torch.ones(2)}}})
    assert saved.load(["steps"])["steps"][:2] == [1, 2]
    assert list(saved.load(["steps.2", "steps.0"])["steps"]) == [0, 2]
    assert saved.load("step") == {"step": 3}
    assert saved.load([]) == {}
    with pytest.raises(StateMismatchError) as raised:
        saved.load(["model.*", "modle.*"])
    assert raised.value.missing == ("modle.*",)
    assert str(raised.value) == "no leaf matches 'modle.*'; there are: model, big, steps, step"
    with pytest.raises(StateMismatchError, match="there are: none at all"):
        save({}).load("x")
    many = save({f"k{number}": 1 for number in range(30)})
    with pytest.raises(StateMismatchError, match=r"no leaf matches 'a', 'b'; there are: k0, .*, k19, \.\.\.$"):
        many.load(["b", "a", "k3"])


def test_keys_below_a_selected_key_do_not_count_as_missing() -> None:
    saved = save({"a": {"b": [1, {"c": 2}]}})
    assert saved.load(["a", "a.b.1.c"]) == {"a": {"b": [1, {"c": 2}]}}


def test_a_selected_view_does_not_bring_its_base() -> None:
    base = torch.arange(10_000.0)
    saved = save({"base": base, "view": base[5000:5010]})
    restoration = allocate(saved.decoded, ["view"])
    assert sum(target.nbytes for target in restoration.targets) == 40
    found = saved.fill(restoration)["view"]
    assert torch.equal(found, base[5000:5010])
    assert found.untyped_storage().nbytes() < 200


def test_statefuls_come_back_as_their_state() -> None:
    found = save({"thing": Thing(a=1, inner=Thing(t=torch.ones(2)))}).load()
    assert same(found, {"thing": {"a": 1, "inner": {"t": torch.ones(2)}}})


def test_autograd_and_parameters() -> None:
    state = {
        "p": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "t": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 2,
    }
    found = save(state).load()
    assert not difference(state, found)
    assert found["result"].is_leaf


def test_the_default_device_does_not_matter() -> None:
    state = {"t": torch.ones(3), "none": torch.empty(0)}
    saved = save(state)
    with torch.device("meta"):
        found = saved.load()
        saved.restore(state)
    assert same(found, state)


def test_numpy_only_memory_is_numpys() -> None:
    found = save({"a": np.arange(5)}).load()["a"]
    found.sort()
    assert found.flags.writeable


# -- plain containers


def test_tensors_and_arrays_are_filled_in_place() -> None:
    live: dict[str, Any] = {
        "t": torch.zeros(3, 4),
        "strided": torch.zeros(6, 4)[::2, 1:3],
        "transposed": torch.zeros(4, 3).t(),
        "array": np.zeros(5),
        "reversed": np.zeros(5)[::-1],
        "p": nn.Parameter(torch.zeros(2)),
        "list": [torch.zeros(()), 0],
        "tuple": (torch.zeros(2), {"x": 0}),
        "empty": torch.empty(0, 3),
    }
    stored = {
        "t": torch.rand(3, 4),
        "strided": torch.rand(3, 2),
        "transposed": torch.rand(3, 4),
        "array": np.arange(5.0),
        "reversed": np.arange(5.0),
        "p": torch.rand(2),
        "list": [torch.tensor(4.0), 9],
        "tuple": (torch.ones(2), {"x": 5}),
        "empty": torch.empty(0, 3),
    }
    before = dict(live)
    held, item = live["strided"], live["list"][0]
    save(stored).restore(live)
    assert all(live[key] is before[key] for key in live)
    assert live["list"][0] is item
    assert torch.equal(held, stored["strided"])  # type: ignore[arg-type]
    for key in ("t", "transposed", "p"):
        assert torch.equal(live[key], stored[key])  # type: ignore[arg-type]
    assert live["array"].tolist() == live["reversed"].tolist() == [0, 1, 2, 3, 4]
    assert live["list"][1] == 9
    assert live["tuple"][1] == {"x": 5}


def test_memory_between_the_items_of_a_view_is_left_alone() -> None:
    base = torch.zeros(4, 4)
    save({"v": torch.ones(4)}).restore({"v": base[:, 1]})
    assert base.tolist() == [[0, 1, 0, 0]] * 4
    base = torch.zeros(4, 4)
    other = torch.ones(4, 4)
    save({"v": other[:, 1], "w": other[1]}).restore({"v": base[:, 1], "w": base[1]})
    assert base[0].tolist() == [0, 1, 0, 0]


def test_plain_values_are_replaced_and_containers_refilled() -> None:
    history, names = [1], {"a": 1}
    ordered: OrderedDict[str, int] = OrderedDict()
    live: dict[str, Any] = {"step": 1, "history": history, "names": names, "o": ordered, "s": {1}, "same": (1, [2])}
    save(
        {"step": "seven", "history": [1, [2]], "names": {"b": None}, "o": OrderedDict(x=1), "s": {3}, "same": (1, [3])}
    ).restore(live)
    assert live["step"] == "seven"
    assert live["history"] is history == [1, [2]]
    assert live["names"] is names == {"b": None}
    assert live["o"] is ordered == OrderedDict(x=1)
    assert live["s"] == {3}
    assert live["same"] == (1, [3])


def test_an_empty_container_takes_whatever_was_stored() -> None:
    live: dict[str, Any] = {"state": {}, "list": [], "other": {}}
    inner, items = live["state"], live["list"]
    save({"state": {"t": torch.ones(2)}, "list": [np.ones(1)], "other": 5}).restore(live)
    assert live["state"] is inner
    assert live["list"] is items
    assert same(live, {"state": {"t": torch.ones(2)}, "list": [np.ones(1)], "other": 5})


@pytest.mark.parametrize("plain", [None, 3, float("inf"), np.float32(1), "x", (1, None), {1}, [1, 2], {"b": None}, {}])
def test_a_live_plain_value_is_a_placeholder(plain: Any) -> None:
    for stored in (torch.ones(2), np.ones(2), nn.Parameter(torch.ones(2)), [torch.ones(1), 2], (np.ones(1),)):
        live: dict[str, Any] = {"best": deepcopy(plain), "list": [torch.zeros(1), deepcopy(plain)]}
        save({"best": stored, "list": [torch.ones(1), stored]}).restore(live)
        assert not difference({"best": stored, "list": [torch.ones(1), stored]}, live)
    thing: dict[str, Any] = {"ema": deepcopy(plain)}
    save({"ema": Thing(w=torch.ones(2), inner=Thing(x=1))}).restore(thing)
    assert same(thing, {"ema": {"w": torch.ones(2), "inner": {"x": 1}}})


def test_a_placeholder_container_of_the_same_type_is_refilled() -> None:
    history, ema = [1.0, None], {"w": None}
    save({"history": [torch.ones(1)] * 3, "ema": {"w": torch.ones(2), "b": 1}}).restore(
        {"history": history, "ema": ema}
    )
    assert same([history, ema], [[torch.ones(1)] * 3, {"w": torch.ones(2), "b": 1}])


def test_a_placeholder_in_what_cannot_change() -> None:
    saved = save({"pair": (torch.ones(1), torch.ones(1))})
    assert mismatch({"pair": (torch.zeros(1), None)}, saved).mismatched == (
        "pair.1 (a NoneType here, a tensor float32 (1,) in the checkpoint)",
    )


@pytest.mark.parametrize(
    "live", [None, {}, {"loss": 9.0}, [], {"loss": 9.0, "nets": []}, {"loss": 0, "nets": {0: None}}]
)
def test_an_object_among_plain_values_wants_its_place(live: Any) -> None:
    stored = {"loss": 0.5, "nets": [1, nn.Linear(1, 1)], "names": ("a",)}
    error = mismatch({"best": live}, save({"best": stored}))
    assert error.mismatched == ("best.nets.1 (an object in the checkpoint: put one there, or None for its state)",)


def test_the_place_of_an_object_among_plain_values() -> None:
    net = nn.Linear(1, 1)
    saved = save({"best": {"loss": 0.5, "nets": [1, net]}})
    state: dict[str, Any] = {"best": {"nets": [0, None]}}
    saved.restore(state)
    assert same(state, saved.load())
    live = nn.Linear(1, 1)
    state = {"best": {"loss": 9.0, "nets": [0, live]}}
    saved.restore(state)
    assert state["best"]["nets"] == [1, live]
    assert same(live.state_dict(), net.state_dict())


def test_an_object_that_cannot_be_saved_is_no_placeholder() -> None:
    class Wrapper:
        pass

    live = {"model": Wrapper(), "sampler": Wrapper(), "tensor": Wrapper()}
    error = mismatch(live, save({"model": nn.Linear(1, 1), "sampler": Thing(x=1), "tensor": torch.ones(1)}))
    assert [text.split(" ")[0] for text in error.mismatched] == ["model", "sampler", "tensor"]


def test_none_takes_the_place_of_a_tensor() -> None:
    live: dict[str, Any] = {"best": torch.ones(2), "list": [np.ones(2), torch.ones(1)]}
    save({"best": None, "list": [None, torch.zeros(1)]}).restore(live)
    assert live == {"best": None, "list": [None, torch.zeros(1)]}
    assert mismatch({"best": torch.ones(2)}, save({"best": 3})).mismatched
    assert mismatch({"pair": (torch.ones(1),)}, save({"pair": (None,)})).mismatched


def test_values_in_what_cannot_change() -> None:
    tensor = torch.zeros(1)
    saved = save({"pair": (torch.ones(1), 3, float("nan"))})
    assert mismatch({"pair": (tensor, 4, float("nan"))}, saved).mismatched[0].startswith("pair.1 (another value")
    saved.restore({"pair": (tensor, 3, float("nan"))})
    assert tensor == 1
    save({"step": 3}).restore(MappingProxyType({"step": 3}))
    assert mismatch(MappingProxyType({"step": 4}), save({"step": 3})).mismatched
    assert mismatch(MappingProxyType({"step": object()}), save({"step": 3})).mismatched


def test_every_difference_is_listed_and_nothing_is_touched() -> None:
    live: dict[str, Any] = {
        "good": torch.zeros(2),
        "step": 0,
        "shape": torch.zeros(2),
        "dtype": torch.zeros(2),
        "kind": torch.zeros(2),
        "value": torch.zeros(2),
        "tensor": (torch.zeros(1), 3),
        "only": {"here": torch.zeros(1), "both": torch.zeros(1)},
        "items": [torch.zeros(1)],
        "container": {"x": torch.zeros(1)},
    }
    stored = {
        "good": torch.ones(2),
        "step": 9,
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.int32),
        "kind": np.ones(2, np.float32),
        "value": 1,
        "tensor": (torch.ones(1), torch.ones(1)),
        "only": {"the.re": torch.ones(1), "both": torch.ones(1)},
        "items": [torch.ones(1), torch.ones(1)],
        "container": OrderedDict(x=torch.ones(1)),
        "more": 1,
    }
    error = mismatch(live, save(stored))
    assert error.missing == ("only.here",)
    assert error.unexpected == ("more", r"only.the.re")
    assert [text.split(" ")[0] for text in error.mismatched] == [
        "shape", "dtype", "kind", "value", "tensor.1", "items", "container",
    ]  # fmt: skip
    assert "float32 (2,) here, float32 (3,) in the checkpoint" in str(error)
    assert "; to take only part of it: load(path, keys=[...]). missing" in str(error)
    assert "strict=False" not in str(error)  # which would not help
    assert not live["good"].any()
    assert live["step"] == 0


def test_arrays_that_cannot_be_written() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    assert "read-only" in mismatch({"a": array}, save({"a": np.ones(2)})).mismatched[0]
    meta = torch.zeros(2, device="meta")
    assert "materialise" in mismatch({"a": meta}, save({"a": torch.ones(2)})).mismatched[0]
    freed = torch.zeros(2)
    freed.untyped_storage().resize_(0)
    assert "freed" in mismatch({"a": freed}, save({"a": torch.ones(2)})).mismatched[0]
    nowhere = torch._efficientzerotensor((2,))
    assert "freed" in mismatch({"a": nowhere}, save({"a": torch.ones(2)})).mismatched[0]
    expanded = torch.zeros(1).expand(2)
    assert "expanded" in mismatch({"a": expanded}, save({"a": torch.ones(2)})).mismatched[0]
    windows = torch.zeros(4).unfold(0, 2, 1)
    assert "overlap" in mismatch({"a": windows}, save({"a": torch.ones(3, 2)})).mismatched[0]
    sparse = torch.zeros(2).to_sparse()
    assert "strided" in mismatch({"a": sparse}, save({"a": torch.ones(2)})).mismatched[0]


@pytest.mark.parametrize(
    "kind",
    [
        lambda: torch._efficientzerotensor((2,)),
        lambda: torch._efficientzerotensor((4,))[2:],
        lambda: torch._efficientzerotensor((1,)).expand(2),
        lambda: nn.Parameter(torch._efficientzerotensor((2,))),
        lambda: torch._to_functional_tensor(torch.ones(2)),
        lambda: escaped(torch.func.vmap, torch.ones(2, 2)),
        lambda: escaped(torch.func.grad, torch.ones(2)),
    ],
)
def test_tensors_without_memory(kind: Any) -> None:
    for state in ({"a": {"b": kind(), "c": torch.ones(2)}}, {"a": Thing(b=kind())}):
        with pytest.raises(UnsupportedStateError, match=r"^a\.b: this tensor has no memory of its own; save"):
            save(state)
    saved = save({"a": {"b": torch.ones(2)}})
    assert mismatch({"a": {"b": kind()}}, saved).mismatched[0].startswith("a.b (the storage of the tensor here was")
    thing = Thing(b=kind())
    saved.restore({"a": thing})
    assert thing.state["b"].tolist() == [1, 1]


def escaped(transform: Any, argument: torch.Tensor) -> torch.Tensor:
    """A tensor that left the transform of functions that made it."""
    found: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x.sum()

    transform(keep)(argument)
    return found[0]


def test_inference_tensors() -> None:
    with torch.inference_mode():
        live = [torch.zeros(3), torch.zeros(3, 2)[:, 0]]
        linear = nn.Linear(2, 2)
    stored = nn.Linear(2, 2)
    save({"t": [torch.ones(3), torch.ones(3)], "m": stored}).restore({"t": live, "m": linear})
    assert live[0].tolist() == live[1].tolist() == [1, 1, 1]
    assert torch.equal(linear.weight, stored.weight)


def test_what_is_made_beside_an_inference_tensor_can_be_trained() -> None:
    with torch.inference_mode():
        best = torch.zeros(1)
    net, live = model(), model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    fresh, thing = torch.optim.AdamW(live.parameters()), Thing()
    saved = save({"best": torch.ones(1), "net": net, "o": optimizer, "t": Thing(t=torch.ones(2)), "p": torch.ones(3)})
    state: dict[str, Any] = {"best": best, "net": live, "o": fresh, "t": thing, "p": None}
    saved.restore(state)
    assert best.tolist() == [1]
    assert not thing.state["t"].is_inference()
    assert not state["p"].is_inference()
    train(net, optimizer)
    train(live, fresh)
    assert same(net.state_dict(), live.state_dict())


def test_expanded_tensors_take_one_item() -> None:
    live = torch.zeros(3).expand(4, 3)
    save({"t": torch.arange(3.0).expand(4, 3)}).restore({"t": live})
    assert live.tolist() == [[0, 1, 2]] * 4
    holes = torch.zeros(3, 2)[:, 0].expand(4, 3)
    save({"t": torch.arange(3.0).expand(4, 3)}).restore({"t": holes})
    assert holes.tolist() == [[0, 1, 2]] * 4


def test_conjugated_tensors() -> None:
    live = torch.zeros(3, dtype=torch.complex64).conj()
    save({"t": torch.full((3,), 1 + 2j)}).restore({"t": live})
    assert live.resolve_conj().tolist() == [1 + 2j] * 3


def test_conjugated_views_of_one_memory_say_what_to_do() -> None:
    waves = torch.ones(3, dtype=torch.complex64)
    saved = save({"w": waves, "c": waves.conj()})
    error = mismatch({"w": waves, "c": waves.conj()}, saved)
    assert "c (a view of the memory of w here, conjugated or negated" in error.mismatched[0]
    assert "resolve_conj()" in error.mismatched[0]
    saved.restore({"w": waves, "c": waves.conj().resolve_conj()})


def test_autograd_sees_the_change() -> None:
    weight = torch.ones(2, requires_grad=True)
    result = (weight * weight).sum()
    version = weight._version
    save({"w": torch.zeros(2)}).restore({"w": weight})
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()  # type: ignore[no-untyped-call]


def test_aliases() -> None:
    tied, untied = torch.zeros(4), [torch.zeros(4), torch.zeros(2)]
    stored = torch.arange(4.0)
    alias = save({"a": stored, "b": stored[2:]})
    live: dict[str, Any] = {"a": untied[0], "b": untied[1]}
    alias.restore(live)
    assert untied[0].tolist() == [0, 1, 2, 3]
    assert untied[1].tolist() == [2, 3]
    alias.restore({"a": tied, "b": tied[2:]})
    assert tied.tolist() == [0, 1, 2, 3]
    apart = save({"a": torch.zeros(4), "b": torch.ones(2)})
    assert "shares memory with a" in mismatch({"a": tied, "b": tied[2:]}, apart).mismatched[0]
    columns = torch.zeros(4, 2)
    save({"a": torch.zeros(4), "b": torch.ones(4)}).restore({"a": columns[:, 0], "b": columns[:, 1]})
    assert columns.tolist() == [[0, 1]] * 4


def test_arrays_that_do_not_overlap_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views beside each other, and one of all their memory: with each other they would be many."""
    flat, count = torch.zeros(300), 100
    live = Thing(flat=flat, views=list(flat.reshape(count, 3)))
    saved = save({"x": Thing(flat=torch.ones(300), views=[torch.full((3,), 2.0) for _ in range(count)])})
    compared: Counter[bool] = Counter()
    share = np.shares_memory

    def counting(*memory: Any, **limit: Any) -> bool:
        compared[found := share(*memory, **limit)] += 1
        return found

    monkeypatch.setattr(np, "shares_memory", counting)
    saved.restore({"x": live})
    assert compared.total() <= count
    assert live.state["flat"].tolist() == [1] * 300
    assert all(view.tolist() == [2] * 3 for view in live.state["views"])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(state_strategies.states())
def test_a_state_restored_into_its_like_is_the_stored_one(state: dict[str, Any]) -> None:
    saved = save(state)
    live = saved.load()
    for array in state_strategies.arrays_of(live):
        if isinstance(array, np.ndarray):
            array.reshape(-1).view(np.uint8)[...] = 0 if array.flags.c_contiguous else 1
        elif array.is_contiguous():
            as_bits(array).zero_()
    saved.restore(live)
    assert not difference(saved.load(), live)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(state_strategies.tied(), state_strategies.tied())
def test_arrays_that_share_memory_in_another_way(live: list[Any], stored: list[Any]) -> None:
    before = [array_bytes(array) for array in live]
    saved = save({"v": stored})
    try:
        saved.restore({"v": live})
    except StateMismatchError:
        assert [array_bytes(array) for array in live] == before
    else:
        assert [array_bytes(array) for array in live] == [array_bytes(array) for array in stored]


# -- Statefuls


def test_modules_keep_their_parameters() -> None:
    torch.manual_seed(1)
    one, two = model(), model()
    train(one, torch.optim.SGD(one.parameters(), 0.1))
    parameters = list(two.parameters())
    pointers = [parameter.data_ptr() for parameter in parameters]
    save({"m": one}).restore({"m": two})
    assert same(one.state_dict(), two.state_dict())
    assert all(a is b for a, b in zip(two.parameters(), parameters, strict=True))
    assert [parameter.data_ptr() for parameter in parameters] == pointers
    assert all(parameter.requires_grad for parameter in parameters)


def test_modules_compare_strictly() -> None:
    saved = save({"m": model()})
    error = mismatch({"m": model(6)}, saved)
    assert len(error.mismatched) == 7
    error = mismatch(
        {"m": nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Identity(), nn.Linear(8, 1, bias=False))}, saved
    )
    assert error.unexpected[0] == r"m.1.weight"
    assert r"m.3.bias" in error.unexpected
    assert mismatch({"m": model().to(torch.bfloat16)}, saved).mismatched
    assert mismatch({"m": nn.Linear(1, 1)}, save({"m": nn.Identity()})).missing == ("m.weight", "m.bias")
    assert mismatch({"m": nn.Linear(1, 1)}, save({"m": 3})).mismatched == (
        "m (a Linear here, an int in the checkpoint)",
    )


def test_tied_modules() -> None:
    def tied() -> nn.Module:
        net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        net[1].weight = net[0].weight
        return net

    saved = save({"m": tied()})
    live = tied()
    saved.restore({"m": live})
    assert live[0].weight is live[1].weight  # type: ignore[index]
    untied = save({"m": nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))})
    assert "shares memory" in mismatch({"m": tied()}, untied).mismatched[0]


@pytest.mark.parametrize("left_out", ["0.weight", "1.weight"])
def test_a_tied_parameter_may_be_saved_under_one_name(left_out: str) -> None:
    """As Hugging Face saves it."""
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False))
    stored = {key: value.clone() for key, value in net.state_dict().items() if key != left_out}
    assert mismatch({"m": net}, save({"m": stored})).missing == ("m." + left_out,)
    net[1].weight = net[0].weight
    stored["2.weight"] = torch.ones(3, 5)
    save({"m": stored}).restore({"m": net})
    other = {"0.weight": "1.weight", "1.weight": "0.weight"}[left_out]
    assert net[0].weight is net[1].weight
    assert all(same(value, (stored | {left_out: stored[other]})[key]) for key, value in net.state_dict().items())
    del stored["2.weight"]
    assert mismatch({"m": net}, save({"m": stored})).missing == (r"m.2.weight",)


def test_a_transposed_view_is_not_tied_to_what_it_views() -> None:
    one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    other.weight = nn.Parameter(one.weight.detach().t())
    net = nn.Sequential(one, other)
    assert mismatch({"m": net}, save({"m": {"0.weight": torch.rand(3, 3)}})).missing == ("m.1.weight",)


def test_extra_state_and_hooks() -> None:
    one, two = Extra(2, 2), Extra(2, 2)
    one.extra = {"scale": torch.ones(3), "names": ["a"]}
    called = []
    two.register_load_state_dict_post_hook(lambda *_: called.append(1))  # type: ignore[no-untyped-call]
    save({"m": one}).restore({"m": two})
    assert same(two.extra, one.extra)
    assert called == [1]


@pytest.mark.parametrize("before", [None, torch.zeros(0), torch.zeros(3), 1, {"x": torch.zeros(1)}])
@pytest.mark.parametrize("after", [None, torch.arange(3.0), torch.arange(5), 2, {"x": torch.ones(2)}])
def test_extra_state_of_any_type_and_size(before: Any, after: Any) -> None:
    one, two = nn.Sequential(Extra(2, 2)), nn.Sequential(Extra(2, 2))
    one[0].extra, two[0].extra = after, before
    save({"m": one}).restore({"m": two})
    assert same(two[0].extra, after)
    assert torch.equal(two[0].weight, one[0].weight)  # type: ignore[arg-type]
    assert mismatch({"m": two}, save({"m": nn.Sequential(nn.Linear(2, 2))})).missing == (r"m.0._extra_state",)


def test_subclasses_of_parameter() -> None:
    class Special(nn.Parameter):
        pass

    class Net(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.w = Special(torch.full((3,), value))

    live = Net(0.0)
    held = live.w
    save({"m": Net(3.0)}).restore({"m": live})
    assert live.w is held
    assert held.tolist() == [3, 3, 3]

    class Other(torch.Tensor):
        pass

    error = mismatch({"t": torch.zeros(3).as_subclass(Other)}, save({"t": torch.zeros(3)}))
    assert "Other here, a plain tensor in the checkpoint" in str(error)


class Named(nn.Module):
    """Whose weights had other names, and a table of another size, when an older version saved them."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.bias = nn.Parameter(-torch.ones(4))
        self.register_buffer("table", torch.arange(float(size)))


class Hooked(Named):
    def __init__(self, size: int = 3) -> None:
        super().__init__(size)
        self._register_load_state_dict_pre_hook(self._upgrade)  # type: ignore[no-untyped-call]

    def _upgrade(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for old, new in (("w", "weight"), ("b", "bias")):
            if prefix + old in state:
                state[prefix + new] = state.pop(prefix + old)
        if prefix + "table" in state:
            self.table = torch.zeros_like(state[prefix + "table"])


class Overriding(Hooked):
    def __init__(self, size: int = 3) -> None:
        Named.__init__(self, size)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        self._upgrade(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Loading(Overriding):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        nn.Module._load_from_state_dict(self, *arguments)

    def load_state_dict(self, state_dict: Any, *arguments: Any) -> Any:
        self._upgrade(state := dict(state_dict), "")
        return super().load_state_dict(state, *arguments)


OLDER = {"w": torch.full((4,), 7.0), "b": torch.full((4,), 8.0), "table": torch.ones(5)}


@pytest.mark.parametrize("kind", [Hooked, Overriding, Loading])
def test_modules_that_rename_and_resize_what_they_load(kind: Any) -> None:
    live = kind()
    held = live.weight
    save({"m": Thing(**OLDER)}).restore({"m": live})
    assert live.weight is held
    assert same(list(live.state_dict().values()), list(OLDER.values()))
    if kind is Loading:  # of the outermost only
        return
    net = nn.Sequential(kind(), nn.Linear(1, 1))
    older = {f"0.{key}": value for key, value in OLDER.items()} | {
        "1.weight": torch.ones(1, 1),
        "1.bias": torch.ones(1),
    }
    error = mismatch({"m": net}, save({"m": Thing(**older | {"1.w": torch.ones(1), "1.bias": torch.ones(2)})}))
    assert (error.missing, error.unexpected, len(error.mismatched)) == ((), (r"m.1.w",), 1)
    save({"m": Thing(**older)}).restore({"m": net})
    assert same(list(net.state_dict().values()), list(older.values()))
    with torch.inference_mode():
        net = nn.Sequential(kind(), nn.Linear(1, 1))
    save({"m": Thing(**older)}).restore({"m": net})
    assert same(list(net.state_dict().values()), list(older.values()))


def test_what_modules_cannot_load_after_all_is_theirs_to_say() -> None:
    saved = save({"m": Thing(v=torch.ones(4))})
    with pytest.raises(RuntimeError, match="Missing key") as raised:
        saved.restore({"m": Hooked()})
    assert raised.value.__notes__[0].endswith("; the state may now be a mixture of what it was and of the checkpoint")
    mismatched = mismatch({"m": Named()}, saved)
    assert len(mismatched.missing) == 3


@pytest.mark.parametrize("strict", [True, False])
def test_hooks_that_move_what_they_find(strict: bool) -> None:
    """Would find in one place what was just put into another, if their own tensors held what is to be loaded."""

    class Turned(Named):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
            weight, bias = state_dict[prefix + "weight"], state_dict[prefix + "bias"]
            state_dict.update({prefix + "weight": bias.flip(0), prefix + "bias": weight})
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    saved, live = save({"m": Named()}), Turned()
    saved.fill(match({"m": live}, saved.decoded, strict=strict))
    assert live.weight.tolist() == [-1] * 4
    assert live.bias.tolist() == [0, 1, 2, 3]


def test_modules_of_torch_that_rename_what_they_load() -> None:
    one, two = (nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)) for _ in range(2))
    state = one.state_dict()
    older = {"bias": state["bias"], "weight_g": state["parametrizations.weight.original0"]}
    older["weight_v"] = state["parametrizations.weight.original1"]
    save({"m": Thing(**older)}).restore({"m": two})
    assert same(two.state_dict(), state)


def test_lazy_modules_that_did_not_run() -> None:
    one = nn.LazyLinear(3)
    one(torch.ones(1, 2))
    assert "run the module once" in str(mismatch({"m": nn.LazyLinear(3)}, save({"m": one})))


def test_optimizers_of_lazy_modules_that_did_not_run() -> None:
    one, two = nn.LazyLinear(3), nn.LazyLinear(3)
    fresh = save({"o": torch.optim.Adam(two.parameters())})
    optimizer, live = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters(), lr=0.5)
    one(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = save({"o": {"adam": optimizer}})
    with pytest.raises(UnsupportedStateError, match=r"^o\.adam\.state\.0: its parameter .* run the module once"):
        saved.restore({"o": {"adam": live}})
    fresh.restore({"o": live})
    assert live.param_groups[0]["lr"] == 1e-3
    two(torch.ones(1, 2))
    saved.restore({"o": {"adam": live}})
    assert same(live.state_dict(), optimizer.state_dict())


def test_a_module_saved_as_an_object_and_restored_as_a_state_and_back() -> None:
    one, two = model(), model()
    save({"m": one}).restore({"m": two.state_dict()})
    assert same(one.state_dict(), two.state_dict())
    three = model()
    save({"m": one.state_dict()}).restore({"m": three})
    assert same(one.state_dict(), three.state_dict())


def test_a_module_with_a_state_dict_of_its_own() -> None:
    class Old(nn.Linear):
        def state_dict(self) -> Any:  # type: ignore[override]
            return super().state_dict()

    one, two = Old(2, 2), Old(2, 2)
    save({"m": one}).restore({"m": two})
    assert torch.equal(one.weight, two.weight)


OPTIMIZERS: list[Any] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, history_size=2),
    torch.optim.Adagrad,
    lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.1),
    *([torch.optim.Adafactor] if hasattr(torch.optim, "Adafactor") else []),
]


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_go_on_exactly(make: Any, stepped: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(3)
        net = model()
        optimizer = make(net.parameters())
        return net, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], 0.5)

    one, two = build(), build()
    train(one[0], one[1], 3, one[2])
    saved = save({"net": one[0], "optimizer": one[1], "scheduler": one[2]})
    if stepped:
        train(two[0], two[1], 1, two[2])
    saved.restore({"net": two[0], "optimizer": two[1], "scheduler": two[2]})
    for _ in range(2):
        for a, b in zip(one, two, strict=True):
            assert not difference(a.state_dict(), b.state_dict())
        train(one[0], one[1], 2, one[2])
        train(two[0], two[1], 2, two[2])


def test_optimizer_state_is_filled_in_place() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    saved = save({"o": optimizer})
    train(net, optimizer)
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in net.parameters()]
    saved.restore({"o": optimizer})
    assert all(optimizer.state[p]["exp_avg"] is m for p, m in zip(net.parameters(), moments, strict=True))
    assert same(optimizer.state_dict(), saved.load()["o"])
    fresh = torch.optim.AdamW(net.parameters())
    before = save({"o": fresh})
    before.restore({"o": optimizer})
    assert optimizer.state_dict()["state"] == {}


def test_moments_are_wanted_where_their_parameters_are() -> None:
    """But not step counts, and not those of optimizers that may keep them elsewhere."""

    class Elsewhere(torch.optim.Adam):
        pass

    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    manifest = save({"o": optimizer}).decoded
    assert isinstance(manifest.skeleton, DictNode)
    node = manifest.skeleton.values[0]
    assert isinstance(node, StatefulNode)
    there = nn.Linear(3, 2, device="meta")
    for kind in (torch.optim.Adam, Elsewhere):
        fresh = kind(there.parameters())
        found = {
            manifest.tensors[value.index].shape: parameter.device
            for _, value, parameter in like_parameters(fresh, fresh.state_dict(), node.child)
            if isinstance(value, ArrayNode)
        }
        assert found == ({(2, 3): there.weight.device, (2,): there.bias.device} if kind is torch.optim.Adam else {})


def test_learning_rates_keep_their_type() -> None:
    net = model()
    save({"o": torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5))}).restore(
        {"o": (live := torch.optim.AdamW(net.parameters(), lr=0.1))}
    )
    assert isinstance(live.param_groups[0]["lr"], torch.Tensor)
    save({"o": torch.optim.AdamW(net.parameters(), lr=0.25)}).restore({"o": live})
    assert repr(live.param_groups[0]["lr"]) == "0.25"


@pytest.mark.parametrize("stepped", [False, True])
def test_moments_wider_than_their_parameter(stepped: bool) -> None:
    class Wide(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["sum"] = torch.full(parameter.shape, 1 / 3)
                state["counts"] = [torch.tensor(2**53 + 1), (torch.tensor(0.1, dtype=torch.float64),)]
                state["mode"] = "wide"

    def build() -> Wide:
        return Wide([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], 0.1)

    one, two = build(), build()
    one.step()
    if stepped:
        two.step()
    save({"o": one}).restore({"o": two})
    assert not difference(one.state_dict(), two.state_dict())


def test_hooks_decide_what_an_optimizer_loads() -> None:
    """Those before see the stored state and may put it in another order; those after have the last word."""

    def build(sizes: tuple[int, ...]) -> torch.optim.Optimizer:
        parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    def turn(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {0: state["state"][1], 1: state["state"][0]}}

    one, two = build((2, 3)), build((3, 2))
    for number, parameter in enumerate(one.param_groups[0]["params"]):
        one.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1.1 + number)
    two.register_load_state_dict_pre_hook(turn)
    saved = save({"o": one})
    for _ in range(2):  # a fresh one, then one with moments
        saved.restore({"o": two})
        found = [two.state[parameter]["momentum_buffer"] for parameter in two.param_groups[0]["params"]]
        assert [moment.dtype for moment in found] == [torch.float32] * 2
        assert [moment.tolist() for moment in found] == [torch.full((3,), 2.1).tolist(), torch.full((2,), 1.1).tolist()]

    def halve(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].half()

    after = build((2, 3))
    after.register_load_state_dict_post_hook(halve)
    saved.restore({"o": after})
    found = [state["momentum_buffer"] for state in after.state.values()]
    assert [moment.tolist() for moment in found] == [
        torch.full((n,), 1.1 + k).half().tolist() for k, n in ((0, 2), (1, 3))
    ]
    assert len(after._optimizer_load_state_dict_post_hooks) == 1
    assert not after._optimizer_load_state_dict_pre_hooks


def test_a_wrapper_of_an_optimizer_without_hooks() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inside: torch.optim.Optimizer) -> None:
            self.inside = inside

        def __getattr__(self, name: str) -> Any:
            if name in ("state", "param_groups", "defaults"):
                return getattr(self.inside, name)
            raise AttributeError(name)

        def state_dict(self) -> Any:
            return self.inside.state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            self.inside.load_state_dict(state_dict)

    net, live = model(), model()
    one, two = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(live.parameters())
    train(net, one)
    save({"o": Wrapper(one)}).restore({"o": Wrapper(two)})
    assert not difference(one.state_dict(), two.state_dict())


def test_optimizers_of_another_make_up() -> None:
    net = model()
    parameters = list(net.parameters())
    saved = save({"o": torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], 0.1)})
    error = mismatch({"o": torch.optim.SGD(parameters, 0.1)}, saved)
    assert error.mismatched == ("o.param_groups (1 groups here, 2 in the checkpoint)",)
    error = mismatch({"o": torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], 0.1)}, saved)
    assert error.mismatched == (
        "o.param_groups.0.params (1 parameters here, 2 in the checkpoint)",
        "o.param_groups.1.params (5 parameters here, 4 in the checkpoint)",
    )
    assert mismatch({"o": torch.optim.SGD(parameters, 0.1)}, save({"o": Thing(x=1)})).mismatched


def test_optimizers_of_other_shapes() -> None:
    one, two = nn.Linear(2, 3), nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(one.parameters())
    one(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    error = mismatch({"o": torch.optim.AdamW(two.parameters())}, save({"o": optimizer}))
    assert error.mismatched == (
        "o.state.0.exp_avg ((3, 2) in the checkpoint, of a parameter (3, 4) here)",
        "o.state.0.exp_avg_sq ((3, 2) in the checkpoint, of a parameter (3, 4) here)",
    )


def test_optimizers_of_another_kind() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    sgd, adam = torch.optim.SGD(parameters, 0.1), torch.optim.AdamW(parameters)
    text = (
        "o.param_groups.0 (another optimizer's: for AdamW it lacks betas, eps, and has dampening, momentum, nesterov)"
    )
    assert mismatch({"o": adam}, save({"o": sgd})).mismatched == (text,)
    assert "for SGD it lacks dampening, momentum, and has" in str(mismatch({"o": sgd}, save({"o": adam})))
    save({"o": torch.optim.Adam(parameters)}).restore({"o": adam})


def test_optimizers_of_an_older_torch() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    adam = torch.optim.Adam(parameters, lr=0.5)
    older = adam.state_dict()
    for flag in ("foreach", "maximize", "fused", "differentiable", "capturable"):
        del older["param_groups"][0][flag]
    older["param_groups"][0]["initial_lr"] = 0.5  # a scheduler's, which may not be there yet
    live = torch.optim.Adam(parameters)
    save({"o": Thing(**older)}).restore({"o": live})
    assert live.param_groups[0]["lr"] == 0.5
    assert live.param_groups[0]["maximize"] is False
    only_lacking = {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.25}]}
    save({"o": Thing(**only_lacking)}).restore({"o": live})
    assert live.param_groups[0]["lr"] == 0.25


def adam_and_state(net: nn.Module, names: bool = False) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """An optimizer that stepped, with other moments for every parameter, and its state."""
    optimizer = torch.optim.AdamW(net.named_parameters() if names else net.parameters(), lr=0.5)
    train(net, optimizer)
    return optimizer, optimizer.state_dict()


def by_names(state: dict[str, Any], net: nn.Module, prefix: str = "") -> dict[str, Any]:
    """As ``torch.distributed.checkpoint.state_dict`` and FSDP have it."""
    names = [prefix + name for name, _ in net.named_parameters()]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: moments for number, moments in state["state"].items()}, "param_groups": groups}


def in_text(state: dict[str, Any]) -> dict[str, Any]:
    """As it is read of a folder of ``torch.distributed.checkpoint`` without an optimizer."""
    return {**state, "state": {str(number): moments for number, moments in state["state"].items()}}


def have_same_moments(
    one: torch.optim.Optimizer, net: nn.Module, other: torch.optim.Optimizer, live: nn.Module
) -> bool:
    assert other.state.keys() == set(live.parameters())
    pairs = zip(net.parameters(), live.parameters(), strict=True)
    return all(same(one.state[mine], other.state[theirs]) for mine, theirs in pairs)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(
    ("form", "turned"), [("names", False), ("names", True), ("wrapped names", True), ("texts", False)]
)
def test_moments_under_other_keys(form: str, turned: bool, stepped: bool) -> None:
    net, live = model(), model()
    one, state = adam_and_state(net)
    stored = {
        "names": lambda: by_names(state, net),
        "wrapped names": lambda: by_names(state, net, "module._orig_mod."),
        "texts": lambda: in_text(state),
    }[form]()
    other = torch.optim.AdamW(reversed([*live.parameters()]) if turned else live.parameters())
    if stepped:
        train(live, other)
    save({"m": net, "o": {"adam": Thing(**stored)}}).restore({"m": live, "o": {"adam": other}})
    assert have_same_moments(one, net, other, live)
    assert other.param_groups[0]["lr"] == 0.5
    assert other.state_dict()["param_groups"][0]["params"] == [*range(6)]


def test_names_that_no_module_has() -> None:
    net, live = model(), model()
    _, state = adam_and_state(net)
    saved = save({"o": Thing(**by_names(state, net))})
    error = mismatch({"o": torch.optim.AdamW(live.parameters())}, saved)
    assert error.mismatched[0].startswith(
        "o.param_groups.0 (of these names no parameter here: 0.weight, 0.bias, 1.weight, 1.bias, 3.weight, ...; put the"
    )
    other = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    error = mismatch(
        {"o": torch.optim.AdamW(other.parameters()), "m": other}, save({"o": saved.load()["o"], "m": other})
    )
    assert "o.param_groups.0 (of these names no parameter here: 3.weight, 3.bias; put" in str(error)
    alone = {**state, "state": by_names(state, net)["state"]}
    error = mismatch({"o": torch.optim.AdamW(live.parameters())}, save({"o": Thing(**alone)}))
    assert error.mismatched[0].startswith("o.state (of no parameter here: 0.weight, ")
    with pytest.raises(StateMismatchError, match="of no parameter here"):
        match({"o": torch.optim.AdamW(live.parameters())}, save({"o": Thing(**alone)}).decoded, strict=False)
    fresh = torch.optim.AdamW(live.parameters())
    save({"o": Thing(**alone), "m": net}).restore({"o": fresh, "m": live})
    assert fresh.state.keys() == set(live.parameters())


def test_keys_of_an_optimizers_own() -> None:
    """Beside those of its parameters; left to it, also where a parameter is meant that has a state already."""
    net, live = model(), model()
    one, state = adam_and_state(net)
    stored = {**state, "state": {**state["state"], "seen": {"n": 5}, "3": {"step": torch.tensor(9.0)}}}
    other = torch.optim.AdamW(live.parameters())
    save({"o": Thing(**stored)}).restore({"o": other})
    assert other.state.pop("seen") == {"n": 5}  # type: ignore[call-overload]
    assert other.state.pop("3") == {"step": torch.tensor(9.0)}  # type: ignore[call-overload]
    assert have_same_moments(one, net, other, live)


def test_hooks_see_names_as_they_were_saved() -> None:
    net, live = model(), model()
    one, state = adam_and_state(net)
    other = torch.optim.AdamW(live.parameters())
    seen: list[Any] = []

    def numbered(_: Any, stored: dict[str, Any]) -> dict[str, Any]:
        seen.extend(stored["state"])
        return {**state, "state": dict(enumerate(stored["state"].values()))}

    other.register_load_state_dict_pre_hook(numbered)
    save({"o": Thing(**by_names(state, net))}).restore({"o": other})
    assert seen == [name for name, _ in net.named_parameters()]
    assert have_same_moments(one, net, other, live)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="optimizers take no names")
def test_saved_names_in_another_order() -> None:
    net, live = model(), model()
    one, _ = adam_and_state(net, names=True)
    saved = save({"o": one, "m": net})
    for there in ("names", "module"):  # one of them tells the names of the parameters here
        parameters: Any = [*live.named_parameters()][::-1]
        other = torch.optim.AdamW(parameters if there == "names" else [each for _, each in parameters])
        save({"o": one}).restore({"o": other}) if there == "names" else saved.restore({"o": other, "m": live})
        assert have_same_moments(one, net, other, live)
        assert other.param_groups[0]["param_names"] == [name for name, _ in parameters]
    renamed = torch.optim.AdamW((name.replace("3", "head"), each) for name, each in live.named_parameters())
    text = "o.param_groups.0 (of these names no parameter here: 3.weight, 3.bias; put the module"
    assert mismatch({"o": renamed}, save({"o": one})).mismatched[0].startswith(text)
    nameless = torch.optim.AdamW(live.parameters())
    save({"o": one}).restore({"o": nameless})  # by their numbers, as torch does
    assert have_same_moments(one, net, nameless, live)


def optimizer_of(net: nn.Module, stepped: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    if stepped:
        train(net, optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (lambda: optimizer_of(model()), "optimizer"),
        (lambda: optimizer_of(model(), stepped=True), "optimizer"),
        (lambda: torch.optim.SGD(model().parameters(), lr=torch.tensor(0.5)), "optimizer"),
        (lambda: torch.optim.lr_scheduler.StepLR(optimizer_of(model()), 3), "scheduler"),
        (lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer_of(model())), "scheduler"),
        (lambda: torch.amp.GradScaler("cpu"), "scaler"),
        (lambda: Extra(2, 2), "module"),
    ],
)
def test_the_state_dict_of_a_live_object_is_no_place_to_restore_into(make: Any, owner: str) -> None:
    thing = make()
    net = model()
    saved = save({"net": net, "x": {"thing": thing}})
    live = model()
    before = deepcopy(live.state_dict())
    says = rf"^x\.thing: this is the state_dict\(\) of a live {owner}, .*; put the {owner} itself there, or None to get"
    for strict in (True, False):
        with pytest.raises(UnsupportedStateError, match=says):
            match({"net": live, "x": {"thing": thing.state_dict()}}, saved.decoded, strict=strict)
    with pytest.raises(UnsupportedStateError, match=rf"^the state is the state_dict\(\) of a live {owner}"):
        match(thing.state_dict(), save({"state": 1}).decoded)
    assert same(live.state_dict(), before)
    for state in ({"net": live, "x": {"thing": thing}}, {"net": live, "x": {"thing": None}}):
        saved.restore(state)
    assert same(state["x"]["thing"], saved.load()["x"]["thing"])  # type: ignore[index]
    if owner != "module":  # what was loaded, or made by hand, is a dict like any other
        saved.restore(loaded := saved.load())
        assert same(loaded, saved.load())


def test_the_state_dict_of_an_optimizer_whose_settings_are_anybodys() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1)
    with pytest.raises(UnsupportedStateError, match=r"^o: this is the state_dict"):
        match({"o": optimizer.state_dict()}, save({"o": optimizer}).decoded)


def test_dicts_of_an_objects_own_tensors_are_filled() -> None:
    net, live = model(), model()
    averaged = torch.optim.swa_utils.AveragedModel(net)
    averaged.update_parameters(net)
    ema = torch.optim.swa_utils.AveragedModel(live)
    copies = {name: value.clone() for name, value in live.state_dict().items()}
    save({"ema": averaged, "p": dict(net.named_parameters()), "copies": dict(net.state_dict())}).restore(
        {"ema": ema.state_dict(), "p": dict(live.named_parameters()), "copies": copies}
    )
    assert same(ema.state_dict(), averaged.state_dict())
    assert same(list(live.parameters()), list(net.parameters()))
    assert same(copies, dict(net.state_dict()))


def test_generators_are_restored_last() -> None:
    class Drawing(Thing):
        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            torch.rand(5)

    state = {"rng": RNGState(), "drawing": Drawing()}
    saved = save(state)
    expected = torch.rand(3)
    saved.restore(state)
    assert torch.equal(torch.rand(3), expected)


def test_other_statefuls_decide_for_themselves() -> None:
    kept = torch.zeros(2)
    live = Thing(kept=kept, shape=torch.zeros(3), dropped=1, kind=3)
    stored = {"kept": torch.ones(2), "shape": torch.ones(4), "new": np.ones(1), "kind": torch.ones(1)}
    save({"thing": Thing(**stored)}).restore({"thing": live})
    assert same(live.state, stored)
    assert live.state["kept"] is kept
    live = Thing(a=kept, b=kept)
    save({"thing": Thing(a=torch.zeros(2), b=torch.ones(2))}).restore({"thing": live})
    assert same(live.state, {"a": torch.zeros(2), "b": torch.ones(2)})


def test_errors_of_load_state_dict_say_whose_they_are() -> None:
    error = KeyError("mine")

    class Broken(Thing):
        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            raise error

    with pytest.raises(KeyError) as raised:
        save({"a": [Thing(x=1)]}).restore({"a": [Broken(x=1)]})
    assert raised.value is error
    (note,) = error.__notes__
    assert note.startswith("raised by load_state_dict() of a.0, a tests.unit.test_match.")
    assert note.endswith("Broken; the state may now be a mixture of what it was and of the checkpoint")


def test_what_an_object_refuses_is_a_mismatch_of_its_path() -> None:
    class Checking(Thing):
        error: Exception = ValueError("another table")

        def check_state_dict(self, state_dict: dict[str, Any], /) -> None:
            if state_dict["table"] != self.state["table"]:
                raise self.error

    kept, live = torch.zeros(2), Checking(table=1, x=torch.zeros(3))
    saved = save({"a": kept + 1, "b": [Thing(table=2, x=torch.ones(3))]})
    error = mismatch({"a": kept, "b": [live]}, saved)
    assert error.mismatched == ("b.0 (another table)",)
    assert "to restore all but b.0: take it out" in str(error)
    live.error = KeyError("mine")
    with pytest.raises(KeyError) as raised:
        match({"a": kept, "b": [live]}, saved.decoded)
    assert raised.value.__notes__[0].startswith("raised by check_state_dict() of b.0, a tests.unit.test_match.")
    live.state["table"] = 2
    saved.restore({"a": kept, "b": [live]})
    assert (kept.tolist(), live.state["x"].tolist()) == ([1, 1], [1, 1, 1])


def test_a_module_may_have_a_method_of_that_name_for_itself() -> None:
    class Checked(nn.Linear):
        def check_state_dict(self, shapes: dict[str, Any]) -> None:
            raise AssertionError(shapes)

    stored, live = Checked(2, 3), Checked(2, 3)
    save({"model": stored}).restore({"model": live})
    assert torch.equal(live.weight, stored.weight)


def test_a_dict_of_generators_that_a_user_wrote_is_restored() -> None:
    state = {"python": random.getstate(), "numpy": 3, "torch": torch.get_rng_state(), "cuda": [1]}
    live: dict[str, Any] = {"rng": {**state, "numpy": 4}}
    save({"rng": state}).restore(live)
    assert live["rng"]["numpy"] == 3


def test_a_class_that_loads_in_its_own_way_is_not_checked_in_that_of_its_base() -> None:
    class Counted(ResumableSampler):
        def state_dict(self) -> dict[str, Any]:
            return {"position": super().state_dict(), "more": 1}

        def load_state_dict(self, state_dict: Any, /) -> None:
            super().load_state_dict(state_dict["position"])

    saved, live = Counted(10, batch_size=2), Counted(10, batch_size=2)
    next(iter(saved))
    save({"a": saved}).restore({"a": live})
    assert live.position == 2


def test_errors_of_a_live_state_dict_say_whose_they_are() -> None:
    class Broken(Thing):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("mine")

    with pytest.raises(KeyError) as raised:
        match({"a": Broken()}, save({"a": Thing(x=1)}).decoded)
    assert raised.value.__notes__[0].startswith("raised by state_dict() of a, a tests.unit.test_match.")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_is_loaded_can_be_trained_whatever_mode_the_caller_is_in(mode: Any) -> None:
    modes = []

    class Watching(Thing):
        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            super().load_state_dict(state_dict)

    net, live = model(), model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    fresh, watching = torch.optim.AdamW(live.parameters()), Watching()
    saved = save({"net": net, "o": optimizer, "t": Thing(t=torch.ones(2)), "best": torch.ones(1)})
    state: dict[str, Any] = {"net": live, "o": fresh, "t": watching, "best": None}
    with mode():
        saved.restore(state)
    assert modes == [(False, mode is torch.enable_grad)]
    assert not watching.state["t"].is_inference()
    assert not state["best"].is_inference()
    train(net, optimizer)
    train(live, fresh)
    assert same(net.state_dict(), live.state_dict())


def test_an_object_where_none_was_saved() -> None:
    tensor = torch.zeros(2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([tensor], 0.1), 3)
    saved = save({"t": torch.ones(2), "s": None})
    assert mismatch({"t": tensor, "s": scheduler}, saved).mismatched == (
        "s (a StepLR here, a NoneType in the checkpoint)",
    )
    with pytest.raises(StateMismatchError, match="a StepLR here"):
        match({"t": tensor, "s": scheduler}, saved.decoded, strict=False)


def test_a_stateful_inside_a_stateful_is_restored_itself() -> None:
    inner = Thing(t=torch.zeros(2))
    outer = Thing(inner=inner, n=0)
    save({"x": [Thing(inner=Thing(t=torch.ones(2)), n=5)]}).restore({"x": [outer]})
    assert outer.state["inner"] is inner
    assert outer.state["n"] == 5
    assert inner.state["t"].tolist() == [1, 1]


def test_a_stateful_whose_state_is_no_mapping() -> None:
    class Bare(Thing):
        def state_dict(self) -> Any:
            return self.state["t"]

        def load_state_dict(self, state_dict: Any, /) -> None:
            self.state["t"] = state_dict

    live = Bare(t=torch.zeros(2))
    save({"x": Bare(t=torch.ones(2))}).restore({"x": live})
    assert live.state["t"].tolist() == [1, 1]


def test_top_level_keys_match() -> None:
    error = mismatch({"a": 1, "b": 2}, save({"b": 1, "c": 3}))
    assert (error.missing, error.unexpected) == (("a",), ("c",))
    assert "to take only part of it: load(path, keys=[...])" in str(error)
    assert "to restore what both have: restore(state, strict=False)" in str(error)
    assert mismatch({}, save({"b": 1})).unexpected == ("b",)
    below = mismatch({"a": {"t": torch.ones(1)}}, save({"a": {"t": torch.ones(1), "u": 1}}))
    assert below.unexpected == ("a.u",)
    assert "only part" not in str(below)


@pytest.mark.parametrize("state", [nn.Linear(1, 1), [1], None, {1: 2}])
def test_the_state_is_a_mapping(state: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"the state (is|has)"):
        match(state, save({"a": 1}).decoded)


def test_a_mismatch_can_be_pickled() -> None:
    error = mismatch({"a": 1}, save({"b": 1}))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.missing, copy.unexpected) == (("a",), ("b",))


def test_a_skeleton_that_makes_no_sense_fails_before_anything_changed() -> None:
    import msgspec

    from pccheck_async.format.skeleton import DictNode, TorchDeviceNode

    manifest = save({"t": torch.ones(1), "x": 1}).decoded
    assert isinstance(manifest.skeleton, DictNode)
    broken = DictNode(["t", "x"], [manifest.skeleton.values[0], TorchDeviceNode("nonsense")])
    with pytest.raises(CorruptStoreError):
        match({"t": torch.zeros(1), "x": 1}, msgspec.structs.replace(manifest, skeleton=broken))


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the tensors with memory that torch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ and not made.is_meta:
            self.nbytes.append(made.nbytes)
        return made


def test_a_dry_run_makes_no_tensors_that_ranks_have_alike() -> None:
    saved = save({"saved": {"replica": torch.arange(4.0)}}, owners=Owners(0, [0], [0], ["saved.replica"]))
    state = {"saved": None}
    tree = live_tree(state)
    with Made() as made:
        plan = match(tree, saved.decoded, dry_run=True)
    assert plan.error is None
    assert plan.actions == {"saved.replica": "fill", "saved": "replace"}
    assert not made.nbytes
    with torch.inference_mode():
        restoration = match(tree, saved.decoded)
    saved.fill(restoration)
    assert state["saved"]["replica"].equal(torch.arange(4.0))  # type: ignore[index]
    assert not state["saved"]["replica"].is_inference()  # type: ignore[index]


def test_the_actions_of_a_dry_run_leave_out_a_tensor_of_several_ranks_that_differs() -> None:
    owners = Owners(0, [0], [0], ["a", "b", "c"])
    saved = save({name: torch.arange(4.0) for name in "abc"}, owners=owners)
    live = {"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.float64), "c": torch.zeros(4, device="meta")}
    plan = match(live, saved.decoded, dry_run=True)
    assert plan.error is not None
    assert [each.partition(" ")[0] for each in plan.error.mismatched] == ["b", "c"]
    assert plan.actions == {"a": "fill"}
