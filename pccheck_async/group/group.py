# SPDX-License-Identifier: Apache-2.0
"""The ranks that save together."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from datetime import timedelta
from itertools import count
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from pccheck_async.errors import GroupError
from pccheck_async.group.control import Address

__all__ = ["Group"]

_decoder: msgspec.msgpack.Decoder[Address] = msgspec.msgpack.Decoder(Address)


class Group:
    """Ranks that save together, for programs that do not initialise torch.distributed.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        store: A ``torch.distributed.Store`` that all ranks reach; used at opening only. If earlier runs used the same
            store, give a ``PrefixStore`` with a prefix of this run.
        timeout: Seconds within which all ranks have to open the engine.
        replicated: Globs over the paths of plain tensors that are alike on all ranks of the group, such as
            ``["model.*"]``: saved once on each filesystem, as shards are. Parameters of ``DistributedDataParallel`` and
            the state of their optimizers need no glob. All other plain values are each rank's own.
        trusted_replicas: Globs over the paths of replicated tensors that are not compared. Each save compares a sample
            of the others; if ranks differ, that checkpoint is aborted, and in later ones each rank saves its own.

    Raises:
        ValueError: The rank is not in the world, or ``replicated`` or ``trusted_replicas`` is no list of globs.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        *,
        timeout: float = 300.0,
        replicated: Sequence[str] = (),
        trusted_replicas: Sequence[str] = (),
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.replicated = _globs("replicated", replicated)
        self.trusted_replicas = _globs("trusted_replicas", trusted_replicas)
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._store = store
        self._process_group: dist.ProcessGroup | None = None
        self._openings = count(1)  # one for all copies: each opening has a key of its own in the store

    @classmethod
    def from_env(
        cls, *, timeout: float = 300.0, replicated: Sequence[str] = (), trusted_replicas: Sequence[str] = ()
    ) -> Group:
        """Return the group that torchrun's environment describes: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        return cls(
            rank,
            world_size,
            PrefixStore("pccheck", store),
            timeout=timeout,
            replicated=replicated,
            trusted_replicas=trusted_replicas,
        )

    @classmethod
    def of(cls, group: object, *, replicated: Sequence[str] = (), trusted_replicas: Sequence[str] = ()) -> Group:
        """Return the :class:`Group` of a process group; or ``group`` if it is one, or a copy with the globs added.

        Args:
            group: A ``torch.distributed.ProcessGroup``, such as ``dist.group.WORLD``, or a :class:`Group`.
            replicated: As for :class:`Group`.
            trusted_replicas: As for :class:`Group`.

        Raises:
            TypeError: ``group`` is neither, or it is a :class:`Group` that has such globs already.
            ValueError: This process is not in the group, or an argument is no list of globs.
        """
        if isinstance(group, Group):
            return group._with(replicated=replicated, trusted_replicas=trusted_replicas)
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is a torch.distributed.ProcessGroup, such as dist.group.WORLD after init_process_group(), or a "
                f"pccheck_async.Group, not {group!r}"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group that it was given")
        size = dist.get_world_size(group)
        made = cls(rank, size, None, replicated=replicated, trusted_replicas=trusted_replicas)
        made._process_group = group
        return made

    def _with(self, **globs: Sequence[str]) -> Group:
        given = {name: value for name, each in globs.items() if (value := _globs(name, each))}
        for name in given:
            if getattr(self, name):
                raise TypeError(f"the group has {name}={[*getattr(self, name)]} already")
        if not given:
            return self
        changed = copy(self)
        vars(changed).update(given)
        return changed

    def __repr__(self) -> str:
        return f"<Group rank {self.rank} of {self.world_size}>"

    def world_ranks(self) -> list[int]:
        """Return the numbers of this group's ranks in the world of torch.distributed, in their order."""
        if self._process_group is None:
            return [*range(self.world_size)]
        return dist.get_process_group_ranks(self._process_group)

    def share(self, address: Address | None) -> Address:
        """Send rank 0's ``address`` to all ranks; return it. Blocks the calling thread; all ranks have to call this.

        ``address`` is None on other ranks. Raises GroupError: no address came in time.
        """
        if self._process_group is not None:
            shared: list[Address | None] = [address]
            dist.broadcast_object_list(shared, group=self._process_group, group_src=0)
            found = shared[0]
            assert found is not None
            return found
        assert self._store is not None
        key = f"address/{next(self._openings)}"
        if address is not None:
            self._store.set(key, msgspec.msgpack.encode(address))
        try:
            self._store.wait([key], timedelta(seconds=self.timeout))
            return _decoder.decode(self._store.get(key))
        except RuntimeError as error:
            raise GroupError(f"rank 0 did not open the engine within {self.timeout} s") from error


def _globs(name: str, globs: Sequence[str]) -> tuple[str, ...]:
    if isinstance(globs, str) or not all(isinstance(glob, str) for glob in globs):
        raise ValueError(f"{name} is a list of globs over paths, not {globs!r}")
    return tuple(globs)
