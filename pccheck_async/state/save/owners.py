# SPDX-License-Identifier: Apache-2.0
"""The choice of the rank that saves a box of which several ranks have equal copies: once per filesystem.

Ranks exchange no messages for the choice. All ranks that have a box walk over the same tensors in the same order, and
the rank with the fewest bytes to save so far saves the box. A check before the commit shows whether they agreed: each
rank adds up numbers, and the sum over all ranks is 0 if every box has one owner and no rank lacks a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.skeleton import ArrayNode
from pccheck_async.state import paths
from pccheck_async.state.boxes import Holders, alike, hash_of, holders_in
from pccheck_async.state.cache.memo import Memo
from pccheck_async.state.cache.patterns import same_objects
from pccheck_async.state.restore.tree import leaves
from pccheck_async.state.save.replicas import Replica
from pccheck_async.state.stateful import containers_and_objects

_MODULUS: Final = 1 << 64


class Named(NamedTuple):
    """Path, dtype and whole shape of a tensor: its identity, equal on all ranks."""

    path: str
    dtype: str
    shape: tuple[int, ...]


class Owners:
    """Decides for one rank of a group which tensors it saves. May be used from several threads.

    Args:
        rank: Number of this rank in the group.
        domains: Number of the filesystem of each rank of the group.
        members: Global ranks of the group's members, in the group's order.
        replicated: Globs over the paths of plain tensors that are equal on all ranks.
        trusted: Globs over the paths of such tensors of which no samples are compared.
        differing: Returns hashes of sets of ranks whose replicas were found to differ: each of them saves its own.
    """

    def __init__(
        self,
        rank: int,
        domains: Sequence[int],
        members: Sequence[int],
        replicated: Sequence[str],
        trusted: Sequence[str] = (),
        differing: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.rank = rank
        self._domains = domains
        self._group_rank = {world_rank: number for number, world_rank in enumerate(members)}
        self.everyone = alike(members)
        self.places = lru_cache(1 << 10)(self._places)
        self._named, self._trusted = ([paths.matcher(glob) for glob in globs] for globs in (replicated, trusted))
        self._differing = differing

    def begin(self, state: Mapping[str, Any], memo: Memo | None = None) -> Tally:
        """Return a new tally for a walk over ``state``: call its methods in the order of the walk.

        ``memo``: the memo of the state, in which the replicas found in it are kept for the next save.
        """
        objects = [(path, part) for path, part in containers_and_objects(state) if isinstance(part, _REPLICATED)]
        key = [(path, _ids(part)) for path, part in objects]
        references = [weakref.ref(part) for _, part in objects]  # which ``==`` would compare by code of theirs
        found = None if memo is None else memo.replicas
        if found is None or found[0] != key or not same_objects(found[1], references):
            found = key, references, *_replicas_in(objects)
            if memo is not None:
                memo.replicas = found
        _, _, replicas, trained = found
        return Tally(self, replicas, trained, self._differing())

    def saved_apart(self, state: Mapping[str, Any], manifest: Manifest) -> dict[str, int]:
        """Return the paths of replicas that this part stores as plain arrays, each with the hash of its ranks."""
        tally, found = self.begin(state), dict[str, int]()
        for path, node in leaves(manifest.skeleton):
            holders = tally.holders_of_replica(path) if isinstance(node, ArrayNode) else None
            if holders is not None and len(holders.alike) > 1 and not self.trusts(path):
                found[path] = hash_of(holders.alike)
        return found

    def named(self, path: str) -> Holders | None:
        """Return ``everyone`` for a plain tensor that the user declared to be equal on all ranks; else None."""
        return self.everyone if any(matches(path) for matches in self._named) else None

    def trusts(self, path: str) -> bool:
        """Return whether the user excluded a replica from the comparison of samples."""
        return any(matches(path) for matches in self._trusted)

    def _places(self, holders: Holders) -> Places:
        """Return the places of a tensor. Raises ValueError if a part of it lies on no rank of the group."""
        in_group = [[*self._in_group(alike)] for alike in holders.by_boxes]
        if not all(in_group):
            raise ValueError("parts of this tensor lie on ranks that are not in the engine's group")
        domain = self._domains[self.rank]
        return Places(
            tuple(rank for rank in self._in_group(holders.alike) if self._domains[rank] == domain),
            sum(map(len, in_group)),
            self.rank == min(chain.from_iterable(in_group)),
            domain,
        )

    def _in_group(self, ranks: Sequence[int]) -> Iterator[int]:
        return (self._group_rank[rank] for rank in ranks if rank in self._group_rank)


class Places(NamedTuple):
    """The ranks of the group that hold a tensor."""

    beside: tuple[int, ...]
    """Ranks that have the same boxes as this rank, and the same filesystem; this rank included."""
    holders: int
    """Number of ranks that have any box of the tensor."""
    is_first: bool
    """Whether this rank is the first of the ranks that have any box of the tensor."""
    domain: int
    """Number of this rank's filesystem."""


class Tally:
    """Counts the bytes assigned to each rank during one walk over a state.

    Attributes:
        everyone: All ranks of the group.
        sums: A number modulo 2**64 for each outermost name in the state. Its sum over all ranks is 0, unless a tensor
            has no owner or several, or a rank that should hold a tensor lacks it.
        replicas: Plain tensors assumed to be equal on other ranks, recorded for the comparison of samples.
        differing: Hashes of sets of ranks whose plain tensors are not assumed to be equal.
    """

    def __init__(self, owners: Owners, replicas: _Replicas, trained: frozenset[str], differing: frozenset[int]) -> None:
        self.everyone = owners.everyone
        self.sums: dict[str, int] = {}
        self.replicas: list[Replica] = []
        self.differing = differing
        self._owners = owners
        self._holders_of = replicas
        self._trained = trained
        self._nbytes: dict[tuple[int, ...], list[int]] = {}  # by the ranks that have the same boxes
        # By the memory of the box, which is kept alive, or another one could get its address: tied boxes go together.
        # Only among ranks that have the same boxes: others cannot follow the earlier decisions.
        self._decided: dict[tuple[tuple[int, ...], int, int], tuple[bool, torch.Tensor]] = {}

    def holders_of_replica(self, path: str) -> Holders | None:
        """Return the ranks that have equal copies of a plain tensor; None if each rank saves its own."""
        holders = self._holders_of(path) or self._owners.named(path)
        if self.differing and holders is not None and hash_of(holders.alike) in self.differing:
            return holders if self._owners.trusts(path) else None
        return holders

    def note_replica(self, path: str, tensor: torch.Tensor, holders: Holders) -> None:
        """Record a plain tensor assumed to be equal on other ranks, for the comparison of samples, unless trusted."""
        if len(holders.alike) > 1 and not self._owners.trusts(path):
            self.replicas.append(Replica(path, tensor, holders, path in self._trained))

    def owns(self, tensor: Named, holders: Holders, local: torch.Tensor) -> bool:
        """Decide whether this rank saves its boxes of a tensor, all in ``local``; count their bytes, add to ``sums``.

        Raises UnsupportedStateError if a part of the tensor lies on no rank of the group.
        """
        places = self._places(tensor, holders)
        # n times the one that is meant, less one of each: 0 if all n are there. Each box of each domain by itself.
        self._add(tensor, holders.mesh, places.holders * places.is_first - 1)
        if len(places.beside) <= 1:
            return True
        owns = self._falls_to_this_rank(places.beside, local)
        self._add(tensor, (holders.mesh, places.domain, places.beside), len(places.beside) * owns - 1)
        return owns

    def note_range(self, tensor: Named, holders: Holders, start: int, count: int) -> None:
        """Add this rank's range of a flattened tensor to ``sums``, which check that all ranges cover the tensor once.

        Raises UnsupportedStateError if a rank that should hold a part is not in the group.
        """
        end = prod(tensor.shape)
        is_first = count > 0 and start == 0
        if end:
            self._add(tensor, holders.mesh, self._places(tensor, holders).holders * is_first - 1)
        for at, times in ((start, -1), (start + count, 1), (0, is_first), (end, -is_first)):
            self._add(tensor, (holders.mesh, "element", at), times)

    def _places(self, tensor: Named, holders: Holders) -> Places:
        try:
            return self._owners.places(holders)
        except ValueError as error:
            raise UnsupportedStateError(f"{tensor.path}: {error}") from None

    def _add(self, tensor: Named, what: object, times: int) -> None:
        name = paths.first(tensor.path)
        self.sums[name] = (self.sums.get(name, 0) + _number(tensor, what) * times) % _MODULUS

    def _falls_to_this_rank(self, beside: tuple[int, ...], local: torch.Tensor) -> bool:
        memory = beside, local.data_ptr(), local.nbytes
        if memory in self._decided:
            return self._decided[memory][0]
        nbytes = self._nbytes.setdefault(beside, [0] * len(beside))
        number = nbytes.index(min(nbytes))
        nbytes[number] += local.nbytes
        owns = beside[number] == self._owners.rank
        self._decided[memory] = owns, local  # those without bytes all have the address 0, on every rank
        return owns


@lru_cache(1 << 16)
def _number(tensor: Named, what: object) -> int:
    """Return a hash of a tensor and a subject that is the same in every process."""
    return int.from_bytes(blake2b(repr((*tensor, what)).encode(errors="surrogatepass"), digest_size=8).digest())


_Replicas: TypeAlias = Callable[[str], Holders | None]
"""Function that returns the ranks with equal copies of the plain tensor at a path, or None."""

_REPLICATED = (torch.nn.parallel.DistributedDataParallel, torch.optim.Optimizer)


def _replicas_in(objects: Sequence[tuple[str, Any]]) -> tuple[_Replicas, frozenset[str]]:
    """Return a function from paths to holders, for parameters in DistributedDataParallel and their optimizers' states.

    Also returns the paths of the parameters that require gradients. Buffers are not replicas: each rank saves its own.
    """
    trained: set[str] = set()
    named: dict[str, Holders] = {}
    replicas: dict[int, tuple[str, Holders]] = {}
    optimizers: list[tuple[str, Holders]] = []
    for path, model in objects:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            own = {f"module.{name}" for name in model.parameters_to_ignore}
            holders = holders_in(model.process_group)
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if name not in own:
                    at = paths.child(path, paths.escape(name))
                    named[at] = holders
                    replicas[id(parameter)] = at, holders
                    if parameter.requires_grad:
                        trained.add(at)
    for path, optimizer in objects:
        if isinstance(optimizer, torch.optim.Optimizer):
            found = [replicas.get(number, ("", None)) for number in _ids(optimizer)]
            of_all = {alike for _, alike in found}
            if len(of_all) == 1 and (of_each := of_all.pop()) is not None:
                # Its state has numbers for names: those of other parameters are no replicas of these.
                mesh = _number(Named(path, "", ()), (of_each.mesh, tuple(name for name, _ in found))) >> 8
                optimizers.append((paths.child(path, "state."), of_each._replace(mesh=mesh)))

    def replicas_of(path: str) -> Holders | None:
        return named.get(path) or next((holders for start, holders in optimizers if path.startswith(start)), None)

    return replicas_of, frozenset(trained)


def broadcast_buffers(state: Mapping[str, Any]) -> set[str]:
    """Return the paths of buffers that DistributedDataParallel broadcasts from its first rank before each forward."""
    return {
        paths.child(path, paths.escape(f"module.{name}"))
        for path, model in containers_and_objects(state)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) and model.broadcast_buffers
        for name, _ in model.module.named_buffers(remove_duplicate=False)
        if name not in model.parameters_to_ignore
    }


def _ids(part: Any) -> list[int]:
    """Return the ``id()`` of each parameter of an optimizer, to which some may be added; empty for a module."""
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else ()
    return [*map(id, chain.from_iterable(group["params"] for group in groups))]
