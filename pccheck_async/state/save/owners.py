"""Which rank saves what several ranks have alike: each box once per storage domain.

No rank asks another one. All that have a box walk over the same tensors in the same order, and it falls to the one of
them that has the fewest bytes to save by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from pccheck_async.state import paths
from pccheck_async.state.stateful import parts


class Owners:
    """Decides for one rank of a group. May be used from several threads.

    Args:
        rank: This one.
        domains: The filesystem of each rank of the group.
        members: The ranks of the group in the world of torch.distributed, in their order.
        replicated: Globs over the paths of plain tensors that all ranks have alike.
    """

    def __init__(self, rank: int, domains: Sequence[int], members: Sequence[int], replicated: Sequence[str]) -> None:
        self.rank = rank
        self._domains = domains
        self._group_rank = {world_rank: number for number, world_rank in enumerate(members)}
        self._matchers = [paths.matcher(glob, unescaped=escaped) for glob in replicated for escaped in (False, True)]
        self._replicas: tuple[list[Any], Callable[[str], bool]] = ([], lambda _: False)

    def begin(self, state: Mapping[str, Any]) -> Tally:
        """Return what decides about the tensors of one state, asked in the order in which it is walked."""
        objects = [(path, part) for path, part in parts(state) if isinstance(part, _REPLICATED)]
        known, is_replica = self._replicas
        if [part for _, part in objects] != known:
            is_replica = _replicas_in(objects)
            self._replicas = [part for _, part in objects], is_replica
        return Tally(self, is_replica)

    def is_replicated(self, path: str) -> bool:
        """Whether the user said so of a plain tensor."""
        return any(matches(path) for matches in self._matchers)

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks of the group, in the world of torch.distributed."""
        return tuple(self._group_rank)

    def beside(self, holders: Sequence[int]) -> tuple[int, ...]:
        """Return which of the holders are in the group and share this rank's filesystem, as ranks of the group."""
        here = (self._group_rank.get(holder) for holder in holders)
        return tuple(rank for rank in here if rank is not None and self._domains[rank] == self._domains[self.rank])


class Tally:
    """The bytes that fall to each rank, while one state is walked."""

    def __init__(self, owners: Owners, is_replica: Callable[[str], bool]) -> None:
        self.everyone = owners.everyone
        self._owners = owners
        self._is_replica = is_replica
        self._nbytes: dict[tuple[int, ...], list[int]] = {}  # by those who have the same boxes
        # By the memory of the box, which is kept, or another one would come to lie there: what is tied goes together.
        self._decided: dict[tuple[int, int], tuple[bool, torch.Tensor]] = {}

    def is_replicated(self, path: str) -> bool:
        """Whether all ranks have a plain tensor alike."""
        return self._is_replica(path) or self._owners.is_replicated(path)

    def owns(self, holders: Sequence[int], local: torch.Tensor) -> bool:
        """Return whether it falls to this rank to save a tensor that ``holders`` have alike."""
        beside = self._owners.beside(holders)
        if len(beside) <= 1:
            return True
        memory = local.data_ptr(), local.nbytes
        if memory in self._decided:
            return self._decided[memory][0]
        nbytes = self._nbytes.setdefault(beside, [0] * len(beside))
        number = nbytes.index(min(nbytes))
        nbytes[number] += local.nbytes
        owns = beside[number] == self._owners.rank
        self._decided[memory] = owns, local
        return owns


_REPLICATED = (torch.nn.parallel.DistributedDataParallel, torch.optim.Optimizer)


def _replicas_in(objects: Sequence[tuple[str, Any]]) -> Callable[[str], bool]:
    """Return what tells whether a path is of a parameter under DistributedDataParallel, or of its optimizer's state.

    Buffers are not: each rank has its own.
    """
    named: set[str] = set()
    replicas: set[int] = set()
    optimizers: list[str] = []
    for path, model in objects:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            parameters = dict(model.named_parameters(remove_duplicate=False))
            named |= {paths.child(path, paths.escape(name)) for name in parameters}
            replicas |= set(map(id, parameters.values()))
    for path, optimizer in objects:
        if isinstance(optimizer, torch.optim.Optimizer) and all(map(replicas.__contains__, _ids(optimizer))):
            optimizers.append(paths.child(path, "state."))
    return lambda path: path in named or any(map(path.startswith, optimizers))


def _ids(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    return map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups))
