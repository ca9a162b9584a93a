# SPDX-License-Identifier: Apache-2.0
"""The ranks that save together."""

from __future__ import annotations

from datetime import timedelta
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
        rank: This one.
        world_size: How many there are.
        store: A ``torch.distributed.Store`` that all of them reach; used at opening only. Of a store that earlier runs
            used, give a ``PrefixStore`` with a prefix of this run.
        timeout: Seconds within which all ranks have to open the engine.

    Raises:
        ValueError: The rank is none of the world's.
    """

    def __init__(self, rank: int, world_size: int, store: Any, *, timeout: float = 300.0) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._store = store
        self._process_group: dist.ProcessGroup | None = None
        self._opened = 0

    @classmethod
    def from_env(cls, *, timeout: float = 300.0) -> Group:
        """Return the group of the environment that torchrun makes: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        return cls(rank, world_size, PrefixStore("pccheck", store), timeout=timeout)

    @classmethod
    def of(cls, group: object) -> Group:
        """Return the group of a user's argument: itself, or that of a process group.

        Raises TypeError, ValueError: this process is not in it.
        """
        if isinstance(group, Group):
            return group
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is a torch.distributed.ProcessGroup, such as dist.group.WORLD after init_process_group(), or a "
                f"pccheck_async.Group, not {group!r}"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group that it was given")
        made = cls(rank, dist.get_world_size(group), None)
        made._process_group = group
        return made

    def world_ranks(self) -> list[int]:
        """Return the numbers of this group's ranks in the world of torch.distributed, in their order."""
        if self._process_group is None:
            return [*range(self.world_size)]
        return dist.get_process_group_ranks(self._process_group)

    def share(self, address: Address | None) -> Address:
        """Return the address that rank 0 gives. Blocks the calling thread; all ranks call this alike.

        Raises GroupError: no address came in time.
        """
        self._opened += 1
        if self._process_group is not None:
            shared: list[Address | None] = [address]
            dist.broadcast_object_list(shared, group=self._process_group, group_src=0)
            found = shared[0]
            assert found is not None
            return found
        assert self._store is not None
        key = f"address/{self._opened}"
        if address is not None:
            self._store.set(key, msgspec.msgpack.encode(address))
        try:
            self._store.wait([key], timedelta(seconds=self.timeout))
            return _decoder.decode(self._store.get(key))
        except RuntimeError as error:
            raise GroupError(f"rank 0 did not open the engine within {self.timeout} s") from error
