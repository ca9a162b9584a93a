"""An app state that changes in every way that may trouble whoever remembers how it was made at the last save."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from tests.support.state_strategies import TORCH_DTYPES, arrays_of, difference, tensor_of, values_differ
from tests.unit.test_flatten import Thing

Place: TypeAlias = tuple[Any, Any]
"""A container and a key or an index in it."""

PLAIN: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (0, 1, 2, True, False, None, 0.0, -0.0, 1.0, "", "a", "1", b"", b"a", 1j)),
    lambda: float("nan"),
    lambda: 2**64,
    lambda: -(2**63),
    lambda: "\ud800",
    lambda: bytearray(b"ab"),
    lambda: torch.Size([2]),
    lambda: torch.float32,
    lambda: torch.device("cpu"),
    lambda: np.dtype("<f4"),
    lambda: np.float32(1),
    lambda: np.bool_(True),
    lambda: np.void(b"ab"),
    lambda: {1, "a"},
    lambda: frozenset((1,)),
    lambda: [1, 2],
    lambda: (1, "a"),
    dict,
    list,
    lambda: Counter("aab"),
]
KEYS: list[Any] = ["a", "b", "a.b", "step", 0, 1, True, 1.0, -0.0, (1,), (True,), None, b"a", np.int64(1), "\ud800"]
DTYPES = [*TORCH_DTYPES, *[torch.float32] * len(TORCH_DTYPES)]
SHAPES = [(), (1,), (3,), (2, 3), (3, 2), (4, 1), (0,), (2, 0), (2, 2, 2), (9,), (80,)]
ARRAYS: list[Callable[[], Any]] = [
    lambda: np.arange(4),
    lambda: np.arange(4.0)[::-1],
    lambda: np.arange(6, dtype=">i4").reshape(2, 3).T,
    lambda: np.zeros((2, 0)),
    lambda: np.array("abc"),
    lambda: np.frombuffer(bytearray(16), "<c8"),
]


class Net(nn.Module):
    """A little of everything that shows in a module's state."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm, self.table = nn.BatchNorm1d(width), nn.Embedding(5, width)
        self.register_buffer("count", torch.zeros(1))


class ChangingState:
    """The state, the optimizers that are attached, and changes by chance.

    Args:
        seed: Decides everything.

    Attributes:
        state: What is saved.
        attached: Optimizers that wait for captures.
        log: Names of the changes so far.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.log: list[str] = []
        self._before: list[tuple[Any, Any, Any]] = []
        model = Net()
        self.state: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": 0}
        self.attached: list[torch.optim.Optimizer] = []
        self.train()
        self.state["tree"] = {"x": self.tensor(), "lr": 0.1}
        self.state["tree"] |= {"deep": self.container(), "more": self.container()}
        changes = {name[7:]: getattr(self, name) for name in dir(self) if name.startswith("change_")}
        self._changes: dict[str, Callable[[], object]] = changes

    # -- what is in it

    @property
    def model(self) -> Net:
        model: Net = self.state["model"]
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.state["optimizer"]
        return optimizer

    def places(self) -> Iterator[Place]:
        """Every place in the containers of the state, the outermost ones left out."""
        waiting = [self.state["tree"]]
        while waiting:
            container = waiting.pop()
            if isinstance(container, Thing):
                yield vars(container), "state"
                container = container.state
                waiting.append(container)
            elif isinstance(container, dict) and type(container) is not Counter:
                for key, value in container.items():
                    yield container, key
                    waiting.append(value)
            elif isinstance(container, list):
                for index, value in enumerate(container):
                    yield container, index
                    waiting.append(value)

    def place(self) -> Place:
        return self.rng.choice([*self.places()] or [(self.state["tree"], "x")])

    def containers(self, *kinds: type) -> list[Any]:
        found = [self.state["tree"], *(container[key] for container, key in self.places())]
        return [each for each in found if type(each) in kinds]

    def arrays(self) -> list[Any]:
        return [*arrays_of([container[key] for container, key in self.places()]), *self.model.parameters()]

    def tensor_place(self) -> Place | None:
        places = [place for place in self.places() if isinstance(place[0][place[1]], torch.Tensor)]
        return self.rng.choice(places) if places else None

    def tensor(self) -> torch.Tensor:
        return tensor_of(self.rng.choice(DTYPES), self.rng.choice(SHAPES), self.rng.randbytes(24))

    def leaf(self) -> Any:
        match self.rng.randrange(6):
            case 0 | 1:
                return self.rng.choice(PLAIN)()
            case 2:
                return self.rng.choice(ARRAYS)()
            case 3 if found := self.arrays():
                return self.rng.choice(found)
            case _:
                return self.tensor()

    def container(self) -> Any:
        rng = self.rng
        items = [self.rng.choice([self.leaf, self.row])() for _ in range(rng.randrange(4))]
        match rng.randrange(5):
            case 0:
                return items
            case 1:
                return tuple(items)
            case 2:
                return Thing(dict(zip("uvwx", items, strict=False)))
            case 3:
                return OrderedDict(zip("uvwx", items, strict=False))
            case _:
                return {n: self.row() for n in range(rng.randrange(4))}

    def row(self) -> dict[str, Any]:
        return {"step": self.rng.choice(PLAIN)(), "t": self.tensor(), "u": self.tensor()}

    # -- changes

    def change(self) -> None:
        """Make one."""
        name = self.rng.choice([*self._changes])
        self.log.append(name)
        try:
            with torch.no_grad():
                self._changes[name]()
        except (RuntimeError, TypeError, IndexError, ValueError, KeyError, AttributeError):
            self.log[-1] += " (not here)"

    def put(self, place: Place, value: Any) -> None:
        container, key = place
        self._before.append((container, key, container[key]))
        del self._before[:-20]
        container[key] = value

    def change_plain(self) -> None:
        self.put(self.place(), self.rng.choice(PLAIN)())

    def change_plain_of_plain(self) -> None:
        places = [place for place in self.places() if type(place[0][place[1]]) in (int, float, bool, str, type(None))]
        self.put(self.rng.choice(places), self.rng.choice([0, 1, 2, True, 1.0, 0.0, -0.0, "a", None]))

    def change_step(self) -> None:
        self.state["step"] = self.rng.randrange(3)

    def change_back(self) -> None:
        container, key, value = self.rng.choice(self._before)
        container[key] = value
        self._untie()

    def change_leaf(self) -> None:
        self.put(self.place(), self.leaf())

    def change_container(self) -> None:
        self.put(self.place(), self.container())

    def change_object(self) -> None:
        place = self.place()
        self.put(place, Thing(place[0][place[1]]))

    def change_less(self) -> None:
        container, key = self.place()
        if key != "state" and (container is not self.state["tree"] or len(container) > 2):
            del container[key]

    def change_more(self) -> None:
        container = self.rng.choice(self.containers(dict, OrderedDict, list))
        if len(container) > 8:
            container.clear()
        elif type(container) is list:
            container.insert(self.rng.randint(0, len(container)), self.leaf())
        else:
            container[self.rng.choice(KEYS)] = self.leaf()

    def change_order(self) -> None:
        container = self.rng.choice(self.containers(dict, OrderedDict, list))
        items = [*(container if type(container) is list else container.items())]
        self.rng.shuffle(items)
        container.clear()
        (container.extend if type(container) is list else container.update)(items)

    def change_key(self) -> None:
        container = self.rng.choice(self.containers(dict, OrderedDict))
        old, new = self.rng.choice([*container]), self.rng.choice(KEYS)
        items = [(new if key is old else key, value) for key, value in container.items()]
        container.clear()
        container.update(items)

    def change_swap(self) -> None:
        (one, key), (other, index) = self.place(), self.place()
        if copy.copy(one) is not other:
            one[key], other[index] = other[index], one[key]
            self._untie()

    def change_kind(self) -> None:
        place = self.place()
        value = place[0][place[1]]
        kinds: dict[Any, Any] = {dict: OrderedDict, OrderedDict: dict, list: tuple, tuple: list}
        self.put(place, kinds[type(value)](value))

    def change_copy(self) -> None:
        place = self.place()
        self.put(place, copy.deepcopy(place[0][place[1]]))

    def change_metadata(self) -> None:
        ordered = self.rng.choice(self.containers(OrderedDict))
        match self.rng.randrange(4):
            case 0:
                del ordered._metadata
            case 1:
                ordered._metadata = OrderedDict(a={"version": self.rng.randrange(2)})
            case 2:
                ordered._metadata["a"]["version"] = self.rng.randrange(2)
            case _:
                ordered._metadata = {"t": self.tensor(), "n": self.rng.randrange(2)}

    def change_bytes(self) -> None:
        found = [container[key] for container, key in self.places() if type(container[key]) is bytearray]
        array = self.rng.choice(found)
        array[self.rng.randrange(len(array))] ^= 1

    # -- of tensors

    def change_values(self) -> None:
        for array in self.arrays():
            if isinstance(array, torch.Tensor) and self.rng.random() < 0.5:
                array.detach().copy_(torch.ones(()) * self.rng.randrange(3))
            elif isinstance(array, np.ndarray) and array.dtype.kind in "if":
                array[...] = self.rng.randrange(3)

    def change_view(self) -> None:
        place = self.tensor_place()
        if place is None:
            return
        tensor = place[0][place[1]].detach()
        views: list[Callable[[], torch.Tensor]] = [
            tensor.t,
            lambda: tensor.reshape(-1)[1:],
            lambda: tensor[..., ::2],
            lambda: tensor[None].expand(3, *tensor.shape),
            tensor.conj,
            lambda: torch._neg_view(tensor),
            lambda: tensor.view(torch.int16),
            lambda: tensor.view(torch.float32),
            tensor.clone,
            lambda: tensor.t().contiguous().t(),
            lambda: tensor.reshape(-1),
            lambda: tensor[None],
            lambda: tensor.as_strided((1, *tensor.shape), (7, *tensor.stride())),
            lambda: torch.nn.Parameter(tensor, self.rng.random() < 0.5),
            lambda: tensor.to(self.rng.choice(DTYPES)),
        ]
        self.put(place, self.rng.choice(views)())

    def change_in_place(self) -> None:
        place = self.tensor_place()
        if place is None:
            return
        tensor = place[0][place[1]]
        other = self.rng.choice([array for array in self.arrays() if isinstance(array, torch.Tensor)])
        changes: list[Callable[[], object]] = [
            lambda: setattr(tensor, "data", tensor.data.clone()),
            lambda: setattr(tensor, "data", other.data),
            lambda: setattr(tensor, "data", self.tensor()),
            tensor.t_,
            lambda: tensor.unsqueeze_(0),
            tensor.squeeze_,
            lambda: tensor.requires_grad_(not tensor.requires_grad),
            lambda: tensor.set_(other.data.clone()),
        ]
        self.rng.choice(changes)()

    def change_memory(self) -> None:
        """Let a tensor's memory go, and have as much again, likely at the same address."""
        place = self.tensor_place()
        if place is None:
            return
        tensor = place[0][place[1]]
        shape, dtype = tensor.shape, tensor.dtype
        self._before.clear()
        place[0][place[1]] = tensor = None
        gc.collect()
        place[0][place[1]] = tensor_of(dtype, tuple(shape), self.rng.randbytes(24))

    def change_numpy(self) -> None:
        place = self.tensor_place()
        if place is not None:
            tensor = place[0][place[1]].detach()
            array = tensor.numpy()
            self.put(place, self.rng.choice([array, array.T, array.reshape(-1)[1:], torch.from_numpy(array)]))

    def change_torch(self) -> None:
        places = [place for place in self.places() if isinstance(place[0][place[1]], np.ndarray)]
        place = self.rng.choice(places)
        self.put(place, torch.from_numpy(place[0][place[1]]))

    # -- of modules and optimizers

    def train(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()

    def change_train(self) -> None:
        self.train()

    def change_optimizer(self) -> None:
        kinds: list[Any] = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
        self.state["optimizer"] = self.rng.choice(kinds)(self.model.parameters(), lr=0.1)

    def change_attached(self) -> None:
        self.attached = self.rng.choice([[], [self.optimizer], [*{*self.attached, self.optimizer}]])

    def change_group(self) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})

    def change_learning_rate(self) -> None:
        group = self.rng.choice(self.optimizer.param_groups)
        group["lr"] = self.rng.choice([0.1, 0.2, torch.tensor(0.1), 1])

    def change_optimizer_state(self) -> None:
        kept = self.rng.choice([*self.optimizer.state.values()])
        match self.rng.randrange(4):
            case 0:
                self.optimizer.state.clear()
            case 1:
                kept["note"] = self.rng.choice(PLAIN)()
            case 2:
                kept["step"] = self.rng.choice([1, 1.0, torch.tensor(1.0), torch.ones(1)])
            case _:
                kept.pop(self.rng.choice([*kept]))

    def change_frozen(self) -> None:
        parameter = self.rng.choice([*self.model.parameters()])
        parameter.requires_grad_(not parameter.requires_grad)

    def change_model(self) -> None:
        match self.rng.randrange(5):
            case 0:
                self.state["model"] = copy.deepcopy(self.model)
            case 1:
                self.state["model"] = Net(self.rng.choice([4, 5]))
            case 2:
                self.model.to(self.rng.choice([torch.float64, torch.bfloat16, torch.float32]))
            case 3:
                self.model.load_state_dict({k: v.clone() for k, v in self.model.state_dict().items()}, assign=True)
            case _:
                self.model.half().float()

    def change_module(self) -> None:
        self.model.first = nn.Linear(4, 4, bias=self.rng.random() < 0.7)
        if self.rng.random() < 0.5:
            self.change_optimizer()

    def change_norm(self) -> None:
        model: Any = self.model
        model.norm = self.rng.choice([nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Identity()])

    def change_buffer(self) -> None:
        model: Any = self.model
        model.count = self.rng.choice([None, torch.zeros(1), torch.zeros(2), self.model.first.weight.detach()])

    def change_table(self) -> None:
        if self.rng.random() < 0.5:
            self.model.table.max_norm = self.rng.choice([None, 1.0])
        else:
            self.model.table = nn.Embedding(5, 4, max_norm=self.rng.choice([None, 1.0]))
            self.change_optimizer()

    def change_parameter(self) -> None:
        self.model.first.weight = nn.Parameter(torch.rand(4, 4), self.rng.random() < 0.5)

    def change_ties(self) -> None:
        self.model.second.weight = self.rng.choice([self.model.first.weight, nn.Parameter(torch.rand(4, 4))])

    def _untie(self) -> None:
        """A container that was put into itself would be refused for ever."""
        try:
            copy.deepcopy(self.state["tree"])
            depth(self.state["tree"])
        except (RecursionError, RuntimeError):
            self.state["tree"] = {"x": self.tensor()}


def shown(value: Any) -> Any:
    """What loading a state is to give: objects as what they tell of themselves, tensors and arrays themselves."""
    if hasattr(type(value), "state_dict"):
        return shown(value.state_dict())
    if type(value) in (list, tuple):
        return type(value)(map(shown, value))
    if type(value) not in (dict, OrderedDict):
        return value
    found = type(value)((key, shown(item)) for key, item in value.items())
    if hasattr(value, "_metadata"):
        found._metadata = shown(value._metadata)
    return found


def has_lazy(state: Any) -> bool:
    """Whether tensors are in it that are stored apart from those whose memory they share, until they are conjugated."""
    return any(isinstance(array, torch.Tensor) and (array.is_conj() or array.is_neg()) for array in arrays_of(state))


def loads_as(state: Any, loaded: Any) -> str:
    """Where what was loaded differs from a state; empty where it does not."""
    wanted = shown(state)
    return values_differ(wanted, loaded) if has_lazy(wanted) else difference(wanted, loaded)


def depth(value: Any) -> int:
    """How deep a tree is; RecursionError where it holds itself."""
    inner = (value.state,) if isinstance(value, Thing) else value
    items = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, (list, tuple)) else ()
    return 1 + max(map(depth, items), default=0)
