# SPDX-License-Identifier: Apache-2.0
"""A checkpoint opened for reading: names, shapes and plain values at once, tensors on demand."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from msgspec import structs

from pccheck_async.engine import Auto, EngineLoop, MemoryTier
from pccheck_async.errors import ClosedError, CorruptStoreError
from pccheck_async.format import CheckpointInfo, Tier, Which, dtypes, explained, which_one
from pccheck_async.format.manifest import Manifest, TensorEntry
from pccheck_async.format.skeleton import ArrayNode, Node, arrays
from pccheck_async.group import Place, check_read_tier, open_tier
from pccheck_async.medium.open_medium import IO
from pccheck_async.state import Allocation, Array, Targets, paths
from pccheck_async.state.ambient import without_modes
from pccheck_async.state.foreign import compose, refuse_pickled, unpickle
from pccheck_async.state.restore.tree import below, check_classes, leaves, opened, rebuild, refuse_boxes
from pccheck_async.store import CheckpointReader, warn_of_others

__all__ = ["OpenCheckpoint", "StoredState", "StoredTensor", "open_checkpoint", "rows"]

T = TypeVar("T")


@explained
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    device: str | torch.device = "cpu",
    allow_pickle: bool = False,
    host_memory: int | Auto = "auto",
    io: IO = "auto",
    tier: Tier | MemoryTier = "disk",
) -> OpenCheckpoint:
    """Open a checkpoint for reading tensor by tensor. A writer may run meanwhile; it keeps this one until the close.

    Blocks while it reads; in a coroutine use :func:`pccheck_async.load`, or ``asyncio.to_thread``.

    Args:
        path: Folder of a store, or of a group: then one rank's part of a complete checkpoint is opened,
            and tensors that lie on several ranks in full.
        step: The step to open; by default the newest checkpoint, or the next older one if its manifest is damaged
            (with a warning). A damaged tensor is found only when it is read.
        name: The name of the checkpoint, as given to ``checkpoint(name=...)``, instead of its step.
        rank: The rank of a group whose part is opened. By default 0; tensors of all ranks are compared then, and a
            warning names those that are not the same on other ranks.
        device: The device for tensors.
        allow_pickle: Unpickle values that were pickled by an engine with ``allow_pickle=True``. That runs code that the
            checkpoint names: give it only if you trust its writer. Without it reading such a value is refused.
        host_memory: Most staging memory in bytes. Up to four chunks, at most half of it, are cached between reads.
        io: As for :class:`pccheck_async.CheckpointEngine`.
        tier: "memory": a checkpoint in the memory of this machine (give the engine's
            :class:`pccheck_async.MemoryTier` if it has a ``path``), for a group the part of ``rank`` that is on this
            machine. Tensors on the host are then not copied, but are views of the memory that training saved into,
            verified by checksums. They keep that memory also after :meth:`OpenCheckpoint.close`; training takes other
            memory meanwhile. Only this process sees writes into them, in every view that it takes from here. Tensors on
            other devices are copies.

    Returns:
        The checkpoint; use it as a context manager, or close it. If you forget, it is closed with a ResourceWarning
        once neither it nor any state or tensor taken from it is referenced.

    Raises:
        NoCheckpointError: there is no checkpoint, or not the requested one, or it has no such ``rank``.
        IncompleteCheckpointError: no checkpoint of the group has the parts of all ranks.
        DamagedError: the checkpoint is damaged, and there is no older one (or ``step`` or ``name`` was given).
        CorruptStoreError: this version, or this torch, cannot read it.
        ReadError: the device failed.
        RuntimeError: torch has no such ``device``.
        StoreError: the folder in memory may be another user's.
        ValueError: ``rank`` for a folder that is no group's; both ``step`` and ``name``.
    """
    read_tier = check_read_tier(tier)
    connection = Connection(path, which_one(step, name), torch.device(device), host_memory, io, rank, read_tier)
    connection.allow_pickle = allow_pickle
    try:
        warn_of_others(connection.differing(is_needed=False), path)
    except BaseException:
        connection.close()
        raise
    return OpenCheckpoint(connection)


class Connection:
    """A checkpoint that is opened and locked against the writer, and the event loop thread that reads it."""

    allow_pickle = False
    _payload: memoryview | None = None  # of a checkpoint in memory

    def __init__(
        self,
        path: str | os.PathLike[str],
        which: Which,
        device: torch.device,
        host_memory: int | Auto,
        io: IO,
        rank: int | None = None,
        tier: Literal["disk"] | MemoryTier = "disk",
    ) -> None:
        torch.empty(0, device=device)  # raises if there is no such device
        self.path = os.fspath(path)
        self.device = device
        self._has_named_rank = rank is not None
        self._pid = os.getpid()
        self._closed = True
        self._loop = EngineLoop("pccheck-open")
        try:
            self._loop.call(self._open(which, rank, host_memory, io, tier))
        except BaseException:
            self.close()  # the caller was interrupted and does not get it
            self._loop.stop()
            raise

    async def _open(
        self, which: Which, rank: int | None, host_memory: int | Auto, io: IO, tier: Literal["disk"] | MemoryTier
    ) -> None:
        place = await open_tier(self.path, tier, io, host_memory, rank=rank)
        try:

            async def use(checkpoint: CheckpointReader) -> CheckpointReader:
                await checkpoint.merge()
                checkpoint.own.keeps = True
                self._payload = None if tier == "disk" else await checkpoint.own.view()
                return checkpoint

            self.checkpoint = await place.read(which, use, host_memory, keep=True)
            self.entry, self.manifest = self.checkpoint.entry, self.checkpoint.manifest
            self.info = replace(self.entry.info, tiers=place.tiers(self.entry.counter))
        except BaseException:
            await place.close()
            raise
        self.place = place
        # A lock that no code can release any more would block the writer for as long as this process lives.
        self._forgotten = weakref.finalize(self, _let_go, self._loop, place, self._pid)
        self._forgotten.atexit = False
        self._closed = False

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the reading event loop, block until it ended, and return its result.

        Raises:
            ClosedError: this connection was closed, maybe by another thread meanwhile.
        """
        try:
            self.check_open()
        except ClosedError:
            work.close()
            raise
        try:
            return self._loop.call(work)
        except (OSError, ClosedError):  # of the operation that close() interrupted
            self.check_open()
            raise

    def differing(self, among: Callable[[str], bool] = lambda _: True, *, is_needed: bool = True) -> list[str]:
        """Return those paths ``among`` all under which other ranks have different tensors; none if a rank was named.

        Raises the errors of :meth:`CheckpointReader.differing`.
        """
        if self._has_named_rank:
            return []
        return self.call(self.checkpoint.differing(among, is_needed=is_needed))

    def check_open(self) -> None:
        """Raise ClosedError if this connection was closed, or belongs to the parent of this process."""
        if self._closed:
            raise ClosedError(f"the checkpoint of {self.path} was closed; open it again")
        if os.getpid() != self._pid:
            raise ClosedError("this checkpoint was opened by the parent process; open it here")

    @property
    def is_view(self) -> bool:
        """Whether arrays on the host are views of the memory that the checkpoint was saved into."""
        return self._payload is not None

    def summary(self) -> str:
        """Return the step, the folder and whether this is closed, in words."""
        state = " of the parent process" if os.getpid() != self._pid else ", closed" if self._closed else ""
        where = "in memory, of" if self.is_view else "in"
        return f"step {self.entry.step} {where} {self.path!r}{state}"

    def close(self) -> None:
        """End reads underway, unlock the checkpoint and stop the thread. Idempotent; does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._forgotten.detach()
        try:
            self._loop.call(self.place.close())  # ends the reads first, and then closes the slots
            self._payload = None if self._payload is None else memoryview(b"")
        finally:
            self._loop.stop()

    def rebuild(self, node: Node) -> Any:
        """Read everything below ``node`` and return its value. Unpickles pickled values if ``allow_pickle``."""
        refuse_boxes(node)
        pickled = partial(unpickle, device=self.device) if self.allow_pickle else refuse_pickled
        with without_modes():
            check_classes(node)
            allocation = self.call(self._allocated(self.manifest, sorted(arrays(node))))
            # On the caller's thread: pickled values run code.
            return rebuild(node, lambda index: allocation.array(index, self.device), pickled=pickled, composed=compose)

    def read(self, entry: TensorEntry) -> Array:
        """Read the array of ``entry`` and block meanwhile; on any thread but the reading loop's."""
        return self.call(self.fetch(entry))

    async def fetch(self, entry: TensorEntry) -> Array:
        """Read the array of ``entry``; on the reading loop."""
        allocation = await self._allocated(structs.replace(self.manifest, tensors=(entry,)), (0,))
        return allocation.array(0, self.device)

    async def _allocated(self, manifest: Manifest, wanted: Sequence[int]) -> Allocation:
        """Return verified memory of the ``wanted`` arrays: new and filled by reads, or the tier's memory itself."""
        if self._payload is None:
            allocation = Allocation(manifest, wanted)
            await self.checkpoint.fill(Targets(allocation.targets()))
            return allocation
        allocation = Allocation.over(manifest, self._payload, wanted)
        ranges = [(target.payload_offset, target.end) for target in allocation.targets()]
        await self.checkpoint.own.verify_there(self._payload, ranges)
        return allocation


def _let_go(loop: EngineLoop, place: Place, pid: int) -> None:
    """Close a forgotten connection without waiting, and warn; runs on any thread (the garbage collector's)."""
    if os.getpid() != pid:
        return  # there the descriptors are closed, and nothing runs
    with suppress(ClosedError):
        loop.submit(place.close())[0].add_done_callback(lambda _: loop.post(loop.loop.stop))
    warnings.warn(f"the checkpoint of {place.path} was not closed", ResourceWarning, stacklevel=2)


class StoredTensor:
    """A tensor or array in a checkpoint that was not read yet.

    ``stored[3]`` and ``stored[10:20]`` read only the chunks that hold these items of the first dimension (only the
    MiBs, if the checkpoint has tensors that lie on several ranks). ``stored[10:20, :5]`` reads these items, too, and
    then applies the other indices. :meth:`read` reads the whole tensor. Each read returns a new tensor, never shared
    with other leaves (:meth:`StoredState.load` keeps tied tensors tied).

    Attributes:
        path: Name of the leaf in the state it was taken from.
        shape: Items per dimension.
        dtype: The dtype of torch; that of numpy for an array.
        stride: Items from one to the next along each dimension, as stored.
        nbytes: Bytes of all items.
        requires_grad: Whether the tensor that is read requires gradients.
        kind: "tensor", "parameter" or "ndarray".
    """

    def __init__(self, connection: Connection, entry: TensorEntry, path: str) -> None:
        self._connection = connection
        self.entry = entry
        self.path = path
        self.shape = torch.Size(entry.shape)
        self.dtype: torch.dtype | np.dtype[Any] = (
            dtypes.numpy_dtype(entry.dtype) if entry.kind == "ndarray" else dtypes.torch_dtype(entry.dtype)
        )
        self.stride = entry.stride
        self.nbytes = entry.nbytes
        self.requires_grad = entry.requires_grad
        self.kind = entry.kind

    def read(self) -> Any:
        """Read all items; return a tensor, a Parameter or an array.

        Raises:
            ClosedError: the checkpoint was closed.
            CorruptStoreError: a checksum does not hold.
            ReadError: the device failed.
        """
        return self._connection.read(self.entry)

    def __getitem__(self, index: Any) -> Any:
        """Read some items. Raises IndexError, TypeError, and the errors of :meth:`read`."""
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if not isinstance(first, (slice, int, np.integer)) or isinstance(first, bool):
            raise TypeError(f"a stored tensor takes a number or a slice first, not {first!r}; use read()[...] instead")
        if not self.shape:
            raise IndexError(f"{self.path} has no dimensions; use read()")
        size = self.shape[0]
        if isinstance(first, slice):
            start, stop, step = first.indices(size)
            if step < 1:
                raise TypeError("a stored tensor takes no slice that goes backwards; use read()[...] instead")
            part = self._part(start, len(range(start, stop, step)), step)
            return part[(slice(None), *rest)] if rest else part
        number = int(first)
        if not -size <= number < size:
            raise IndexError(f"index {number} is out of range: {self.path} has {size} items in the first dimension")
        return self._part(number % size, 1, 1)[(0, *rest)]

    def _part(self, start: int, count: int, step: int) -> Any:
        array = self._connection.read(rows(self.entry, start, count, step))
        if self._connection.is_view:
            return array
        if isinstance(array, np.ndarray):
            return array.copy()
        # Bytes between the items were read with them, and would stay in memory.
        bits = array.view(dtypes.carrier(array.dtype))  # torch cannot copy every dtype
        return array if array.untyped_storage().nbytes() < 2 * array.nbytes else bits.clone().view(array.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.path} has no dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        what = f"{self.path!r} {self.entry.dtype} {tuple(self.shape)}, {self.nbytes} bytes"
        return f"<StoredTensor {what}, of {self._connection.summary()}>"


def rows(entry: TensorEntry, start: int, count: int, step: int = 1) -> TensorEntry:
    """Return the entry of ``count`` items of the first dimension, every ``step``-th, that requires no gradients."""
    part = structs.replace(
        entry,
        shape=(count, *entry.shape[1:]),
        stride=(entry.stride[0] * step, *entry.stride[1:]),
        requires_grad=False,
        kind="ndarray" if entry.kind == "ndarray" else "tensor",
    )
    if entry.storage is None or not count:
        return structs.replace(part, storage=None, offset=0)
    return structs.replace(part, offset=entry.offset + start * entry.stride[0] * entry.itemsize)


class StoredState(Mapping[str, Any]):
    r"""A state in a checkpoint, or a part of one: a read-only mapping from the paths of its leaves to the leaves.

    Iterating gives the paths in the order of the state, as PyTorch names parameters (``model.layers.0.weight``), and
    reads nothing; ``state[path]`` reads a tensor and returns a plain value at once. The path of a container or an
    object (``state["model"]``) gives that part of the state as a mapping of its own, and reads nothing either. If two
    leaves would have one name, as in ``{"a": {"b": 1}, "a.b": 2}``, dots inside their keys are escaped (``a\.b``), here
    and in a look-up; looking up an ambiguous name raises KeyError (:mod:`pccheck_async.state.paths`).
    """

    def __init__(self, connection: Connection, node: Node, path: str = "") -> None:
        self._connection = connection
        self._node = node
        self._path = path

    @cached_property
    def _leaves(self) -> dict[str, Node]:
        return dict(leaves(self._node)) if below(self._node) else {}

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        """All nodes below this one, containers too, by path."""
        found: dict[str, Node] = {}
        waiting = [("", self._node)]
        while waiting:
            path, node = waiting.pop()
            inside = [(paths.child(path, name), child) for name, child in below(node)]
            found.update(inside)
            waiting += inside
        return found

    @cached_property
    def _unescaped(self) -> dict[str, str | None]:
        """Paths by their names without escapes; None for a name that several paths have."""
        found: dict[str, str | None] = {}
        for path in self._nodes:
            name = paths.plain(path)
            found[name] = None if name in found else path
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names by path, without escapes where that is unambiguous."""
        return dict(zip(self._nodes, paths.readable(self._nodes), strict=True))

    @cached_property
    def _leaf_names(self) -> dict[str, Node]:
        return {self._names.get(path, path): node for path, node in self._leaves.items()}

    def node(self, path: str) -> Node:
        """Return the manifest's node of a leaf, container or object. Raises KeyError."""
        return self._nodes[self._exact(path)]

    def _exact(self, path: str) -> str:
        exact = path if path in self._nodes else self._unescaped.get(path)
        if exact is None:
            raise KeyError(self._unknown(path))
        return exact

    def _unknown(self, path: object) -> str:
        if path in self._unescaped:
            return (
                f"{path!r} is ambiguous, the name of several leaves; write it with its escapes, as iterating gives it"
            )
        near = (
            get_close_matches(str(path), list(self._names.values())[:10_000], 3)
            or [self._names[name] for name, _ in below(self._node)][:20]
        )
        there = f"there are: {', '.join(near)}" if near else "it is empty"
        where = f"{paths.plain(self._path)} of " if self._path else ""
        return f"{path!r} is not in {where}the checkpoint of step {self._connection.entry.step}; {there}"

    def __getitem__(self, path: str) -> Any:
        """Read a leaf, or return a part unread. Raises KeyError, ClosedError, CorruptStoreError, ReadError."""
        self._connection.check_open()
        node = self.node(path)
        if isinstance(opened(node), ArrayNode):
            return self.tensor(path).read()
        if below(node):
            return StoredState(self._connection, node, paths.child(self._path, self._exact(path)))
        return self._connection.rebuild(node)

    def tensor(self, path: str) -> StoredTensor:
        """Return a tensor that is not read yet.

        Raises:
            KeyError: there is no such path.
            TypeError: there is no tensor or array at the path.
            ClosedError: the checkpoint was closed.
        """
        self._connection.check_open()
        node = opened(self.node(path))
        if not isinstance(node, ArrayNode):
            raise TypeError(f"{path!r} is no tensor")
        return StoredTensor(
            self._connection, self._connection.manifest.tensors[node.index], self._names[self._exact(path)]
        )

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors and arrays by their paths, none of them read. Raises ClosedError."""
        return {name: self.tensor(name) for name, node in self._leaf_names.items() if isinstance(node, ArrayNode)}

    def load(self) -> Any:
        """Read this whole state or part and return it, like :func:`pccheck_async.load`: tied tensors stay tied.

        Raises:
            ClosedError: the checkpoint was closed.
            CorruptStoreError: a checksum does not hold.
            ReadError: the device failed.
        """
        return self._connection.rebuild(self._node)

    def __contains__(self, path: object) -> bool:
        return path in self._nodes or self._unescaped.get(path) is not None  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[str]:
        self._connection.check_open()
        return iter(self._leaf_names)

    def __len__(self) -> int:
        return len(self._leaves)

    # Two states are not compared: that would read both.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        part = f"{paths.plain(self._path)!r} of " if self._path else ""
        text = f"<{type(self).__name__} {part}{self._connection.summary()}"
        with suppress(CorruptStoreError):  # it describes no state
            tensors = sum(isinstance(node, ArrayNode) for node in self._leaves.values())
            text += f": {len(self)} leaves, {tensors} of them tensors"
        return f"{text}>"


class OpenCheckpoint(StoredState):
    """The result of :func:`open_checkpoint`: a whole state, and the lock on its slot. May be used by several threads.

    Attributes:
        info: Step, name and the like of the checkpoint.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, connection.manifest.skeleton)
        self.info: CheckpointInfo = connection.info

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage so far, of all ranks' parts, including manifests."""
        return self._connection.place.opened.medium.statistics().read.nbytes

    def close(self) -> None:
        """Unlock the checkpoint's slot, so that the writer may reuse it; nothing can be read any more. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        self._connection.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
