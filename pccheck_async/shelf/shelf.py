# SPDX-License-Identifier: Apache-2.0
"""Named variables in a mapped file, used in place (PyMM's programming model, HPEC'22).

The way in which a transaction protects a variable that is changed in place was chosen by measurements of two prototypes
(medians of a whole transaction that increments all float64s of a variable, begin and commit included; an EPYC with 2
cores under KVM):

=======================  ==================  ==================  ==================  ==================
way                      tmpfs, 64 KiB       tmpfs, 24 MiB       ext4, 64 KiB        ext4, 24 MiB
=======================  ==================  ==================  ==================  ==================
undo log                 131 us              12.2 ms             9.1 ms              184 ms
shadow copy              102 us              7.0 ms              5.1 ms              134 ms
=======================  ==================  ==================  ==================  ==================

An *undo log* has to be durable before the first store (two flushes), then the new contents and the end of the log (two
more); its bytes are written in addition to those of the variable. A *shadow copy* need not be durable before the
commit, since nothing refers to it: two flushes, the bytes once, an abort copies nothing, and recovery only reads the
root. Its drawback would be that arrays change their addresses; here the variable's window shows the copy at the old
address (:mod:`pccheck_async.medium.windows`), which takes 20 us. So shadow copies are used. Both ways need free space
for one copy of each variable that is changed in place.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch

from pccheck_async.errors import (
    ClosedError,
    CorruptStoreError,
    StoreError,
    StoreFailedError,
    StoreFullError,
    UnsupportedStateError,
    in_shell,
)
from pccheck_async.format import crc32
from pccheck_async.format.record import GROUP_NAME, IDENTITY_NAME
from pccheck_async.medium.windows import Window, WindowedFile
from pccheck_async.shelf import format as layout
from pccheck_async.shelf import values
from pccheck_async.shelf.file import ShelfFile
from pccheck_async.shelf.format import Extent, Header, Root, StoredVariable, Variable
from pccheck_async.shelf.interrupts import HoldsBack
from pccheck_async.shelf.space import Space
from pccheck_async.state import Array
from pccheck_async.transfer import PAGE_BYTES

__all__ = ["Shelf", "empty_shelf", "read_shelf"]

DEFAULT_BYTES: Final = 64 << 20
_LEAST_PAGES: Final = 8
_PIECE: Final = 1 << 20
_ARRAYS: Final = (torch.Tensor, np.ndarray)

Changes: TypeAlias = dict[str, Variable | None]
"""Changed variables by name; None for a deleted one."""


@dataclass(slots=True)
class _Live:
    """A variable in use: the value that users hold, its arrays, the window in which they lie, the entry."""

    value: Any
    arrays: list[Array]
    window: Window | None
    variable: Variable


@dataclass(slots=True)
class Layer:
    """The changes of one ``with shelf.transaction()``, or of an assignment, deletion or growth outside of one."""

    changes: Changes = field(default_factory=dict)


class Shelf:
    """Named variables in one file: NumPy arrays and tensors in place, and plain values.

    ::

        with Shelf("kmeans.shelf", nbytes=64 << 20) as shelf:
            if "centres" not in shelf:
                shelf["centres"] = first_centres  # durable when this returns
            centres = shelf.centres  # the array in the file: not a copy
            with shelf.transaction("centres"):
                centres += steps  # all of it, durably, or nothing

    **Values.** Arrays and tensors of all dtypes that can be saved (a device's tensor is stored as one in host memory),
    strings, numbers, None, bytes, and nested dicts, lists, tuples and sets of all these. A container is an ordinary
    Python object; arrays in it are in place.

    **Durability.** An assignment or a deletion is a transaction of its own: atomic, and durable when it returns.
    Changes in place are protected inside ``with shelf.transaction("name", ...)`` only. After a crash, an array that was
    changed outside of one may be half changed, and a list or dict unchanged; :meth:`verify` names such variables. On
    a filesystem in memory everything survives the death of the process, but not a reboot (see ``kind``).

    **Size.** The file has ``nbytes``, reserved when it is made. It grows only by :meth:`grow` or when it is opened with
    a larger ``nbytes``, and never shrinks. A variable takes whole pages. Until it ends, a transaction needs space for
    one more copy of each variable that it names or assigns.

    **Sharing.** One process writes, or several read. In a forked child the parent's arrays keep the contents that they
    had, stores to them stay in the child, and the shelf itself is closed. A transaction waits until those of other
    threads have ended. Other threads must not store into a variable while a transaction on it begins or ends. Memory
    that is pinned or registered with a device by its address does not follow a variable to its copy.

    **Interrupts.** A KeyboardInterrupt is raised before or after a change, never in the middle. Inside the block of a
    transaction it is raised at once, and undoes the transaction. Meanwhile the shelf's handler is installed for SIGINT,
    and calls the previous one. After a commit that any other error ended, the shelf takes no more changes; reopen it.

    **Arrays that are still referenced.** When a variable is assigned anew or deleted, or the shelf is closed, its
    arrays become private copies: they keep their contents, and changes to them no longer reach the file.

    In the state of an engine a shelf is an object like a module: its variables are saved, and restored in one
    transaction. Arrays of equal dtype and shape are filled in place before the transaction begins, unprotected: after a
    crash meanwhile, restore again.

    Args:
        path: The file, which is made if it does not exist, unless ``readonly``.
        nbytes: Bytes of the file, 64 MiB by default; a smaller existing file grows to that size.
        readonly: Whether to open the file for reading only, concurrently with other readers. Arrays can be changed, but
            only in this process's memory.

    Raises:
        StoreLockedError: The file is open elsewhere, for more than the second that a killed process may take to release
            it, and one of both writes.
        StoreFullError: There is no space for ``nbytes``.
        CorruptStoreError: The file is no shelf, or damaged, or was truncated.
        FileNotFoundError: There is no such folder; with ``readonly``, no such file.
    """

    def __init__(self, path: str | os.PathLike[str], nbytes: int | None = None, *, readonly: bool = False) -> None:
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int)):
            raise TypeError(f"nbytes is a number of bytes, not {nbytes!r}")
        if nbytes is not None and not 0 < nbytes < 1 << 62:
            raise ValueError(f"nbytes={nbytes}: a shelf has at least one byte, and less than 4 EiB")
        if nbytes is not None and readonly:
            raise ValueError("a shelf that is only read cannot be given a size")
        where = Path(path).absolute()
        if any((where / name).is_file() for name in (IDENTITY_NAME, GROUP_NAME)):
            raise CorruptStoreError(
                f"{where} is a store of checkpoints, and no shelf: {in_shell('ls', where)} lists them"
            )
        with HoldsBack():
            if not readonly and not where.exists():
                with suppress(FileExistsError):  # another process was faster
                    WindowedFile.create(where, *empty_shelf(nbytes or DEFAULT_BYTES))
            self._start(WindowedFile(where, writable=not readonly), nbytes or 0)

    @classmethod
    def on(cls, file: ShelfFile) -> Shelf:
        """Return a shelf on a file that is open already, such as a test double that fails or crashes."""
        shelf = cls.__new__(cls)
        shelf._start(file, 0)
        return shelf

    _file: ShelfFile

    def _start(self, file: ShelfFile, nbytes: int) -> None:
        self._lock = threading.RLock()
        self._layers: list[Layer] = []
        self._owner: object = None
        self._live: dict[str, _Live] = {}
        self._failure: OSError | None = None
        self._encoder = layout.DirectoryEncoder()
        self._file = file
        try:
            self._header, self._root, self._committed = read_shelf(file)
            if file.writable:
                file.map(self._root.nbytes)
            root, header = self._root, self._header
            taken = [self._extent(each) for each in self._committed.values()]
            taken.append(Extent(root.directory.offset, header.pages(root.directory.nbytes)))
            self._space = Space(layout.FIRST_PAGE * header.page_bytes, root.nbytes, taken)
            if nbytes > root.nbytes:
                self.grow(nbytes)
        except BaseException:
            file.close()
            raise

    # -- properties

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._file.path

    @property
    def kind(self) -> str:
        """Kind of the file's memory: "persistent", "emulated" (a filesystem in memory), "cached" (the kernel flushes).

        "cached" also if the shelf is open for reading only.
        """
        return str(getattr(self._file, "kind", ""))

    @property
    def sequence(self) -> int:
        """Sequence number of the last transaction; a new shelf has 1, and growth counts as a transaction."""
        return self._root.sequence

    @property
    def nbytes(self) -> int:
        """Bytes of the file that the shelf uses, free space included."""
        return self._root.nbytes

    @property
    def free_bytes(self) -> int:
        """Free bytes of the file; they may not be in one piece."""
        return self._space.free_bytes

    @property
    def closed(self) -> bool:
        """Whether the shelf is closed, or belongs to the process from which this one was forked."""
        return self._file.closed

    def __repr__(self) -> str:
        parts = vars(self)  # some are not there yet, in the traceback of a file that is no shelf; and without the lock
        if (file := parts.get("_file")) is None or "_root" not in parts:
            return "<Shelf not open>"
        variables = parts.get("_committed", {})
        state = "closed" if file.closed else f"open, {len(variables)} variables, transaction {self._root.sequence}"
        return f"<Shelf {os.fspath(file.path)!r} {state}>"

    # -- variables

    def __getitem__(self, name: str) -> Any:
        """Return the value of a variable; the same object until the variable is assigned anew."""
        with self._entered():
            self._check_open()
            if (live := self._live.get(name)) is not None:
                return live.value
        with HoldsBack(), self._entered():
            self._check_open()
            live = self._live.get(name)
            return live.value if live is not None else self._open(name, self._variable(name)).value

    def __setitem__(self, name: str, value: Any) -> None:
        """Assign a variable: atomically and durably, or as part of the open transaction.

        The value is copied: later changes to the original do not reach the shelf. Do not change it during the call: the
        stored copy would be a mixture, and :meth:`verify` may report it as damage.

        Raises:
            UnsupportedStateError: The value cannot be stored; names the path in it.
            StoreFullError: There is no space. The old value stays.
        """
        _check_name(name)
        with HoldsBack(), self._changing() as layer:
            self._assign(layer, name, value)

    def __delitem__(self, name: str) -> None:
        with HoldsBack(), self._changing() as layer:
            self._variable(name)
            self._keep_outer(layer, name)
            self._change(layer, name, None)
            self._retire(name)

    def __contains__(self, name: object) -> bool:
        with self._entered():
            self._check_open()
            return isinstance(name, str) and self._current(name) is not None

    def __iter__(self) -> Iterator[str]:
        with self._entered():
            self._check_open()
            names = dict.fromkeys(self._committed)
            for layer in self._layers:
                names |= dict.fromkeys(layer.changes)
            return iter([name for name in names if self._current(name) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keys(self) -> list[str]:
        """Return the names of all variables, for ``dict(shelf)``."""
        return list(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif hasattr(type(self), name):
            raise AttributeError(f"{name!r} is part of Shelf itself; a variable of that name is shelf[{name!r}]")
        else:
            self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in self if name.isidentifier())})

    # -- transactions

    def transaction(self, *names: str) -> AbstractContextManager[None]:
        """Return a context whose changes are atomic: at its end all are durable, or an exception undoes all of them.

        Args:
            names: Variables that are changed in place inside the block. Assignments and deletions in the block belong
                to the transaction under any name.

        A nested transaction becomes part of the outer one; an exception that leaves the inner block undoes the inner
        one only. Do not ``await`` inside: changes by other tasks would become part of it, and so raise RuntimeError.

        Raises:
            KeyError: There is no such variable.
            StoreFullError: There is no space for copies. Nothing has changed.
            StoreFailedError: A flush failed: it is unknown whether the transaction is durable. Reopen the shelf to see.

        A KeyboardInterrupt in the block undoes all. While the transaction begins or ends, it is deferred to the end of
        that.
        """
        return _Transaction(self._transaction(names))

    @contextmanager
    def _transaction(self, names: Sequence[str]) -> Iterator[None]:
        with self._changing(nested=True) as layer:
            for name in names:
                self._keep_outer(layer, name)
                self._protect(layer, name)
            yield

    def _entered(self) -> AbstractContextManager[object]:
        """Return the lock, or raise ClosedError; the caller has to call :meth:`_check_open` again inside the lock."""
        self._check_open()  # without the lock: in a forked child a thread may hold it that does not exist there
        return self._lock

    def _check_open(self) -> None:
        if self._file.closed:
            raise ClosedError(f"the shelf {self.path} is closed, or belongs to the process that this was forked from")

    @contextmanager
    def _changing(self, *, nested: bool = False) -> Iterator[Layer]:
        """Yield the layer for changes, holding the lock: the open one, or if there is none or ``nested``, a new one.

        A new layer is committed at the end (a nested one joins the outer one), or aborted by an exception.
        """
        with self._entered():
            self._check_open()
            if not self._file.writable:
                raise StoreError(f"{self.path} was opened to be read")
            if self._failure is not None:
                raise _failed(self._failure, self.path)
            task = _current_task()
            if self._layers and self._owner is not task:
                raise RuntimeError("another task is inside a transaction of this shelf: do not await there")
            if self._layers and not nested:
                yield self._layers[-1]
                return
            self._file.check_size()
            layer, self._owner = Layer(), task
            self._layers.append(layer)
            try:
                yield layer
                self._check_order(layer)
                if len(self._layers) > 1:
                    self._join()
                else:
                    self._commit(layer)
            except BaseException:
                if layer in self._layers:
                    self._abort(layer)
                raise

    def _check_order(self, layer: Layer) -> None:
        if self._layers[-1] is not layer:
            raise RuntimeError("transactions of a shelf end in the opposite order in which they began")
        if self._file.closed:
            raise ClosedError("a transaction ends in the process in which it began")

    def _current(self, name: str) -> Variable | None:
        for layer in reversed(self._layers):
            if name in layer.changes:
                return layer.changes[name]
        return self._committed.get(name)

    def _variable(self, name: str) -> Variable:
        if not isinstance(name, str):
            raise TypeError(f"names of variables are strings, not {name!r}")
        variable = self._current(name)
        if variable is None:
            raise KeyError(f"there is no {name!r} on the shelf; there are: {', '.join(list(self)[:20]) or 'none'}")
        return variable

    def _extent(self, variable: Variable) -> Extent:
        return Extent(variable.offset, self._header.pages(variable.nbytes))

    def _take(self, nbytes: int, what: str) -> Extent:
        extent = self._space.take(self._header.pages(nbytes))
        if extent is None:
            raise StoreFullError(
                f"the shelf {self.path} is full: {what} needs {self._header.pages(nbytes)} bytes in one piece, and "
                f"{self._space.largest} of {self.nbytes} are free; delete something, or grow() it"
            )
        return extent

    def _change(self, layer: Layer, name: str, variable: Variable | None) -> None:
        """Record a change in a layer, and free the extent of the layer's earlier change to the same variable."""
        replaced = layer.changes.get(name)
        layer.changes[name] = variable
        if replaced is not None:
            self._space.give(self._extent(replaced))

    def _protect(self, layer: Layer, name: str) -> None:
        """Prepare a variable for changes in place: copy its contents, and let its window show the copy."""
        variable = self._variable(name)
        if layer.changes.get(name) is variable:
            return
        extent = self._take(variable.nbytes, f"a copy of {name!r}")
        try:
            if extent.nbytes:
                self._file.put(extent.offset, self._file.view(variable.offset, variable.nbytes))
            live = self._live.get(name)
            if live is not None and live.window is not None:
                live.window.move(extent.offset)
        except BaseException:
            self._space.give(extent)
            raise
        self._change(layer, name, Variable(extent.offset, variable.manifest))

    def _assign(self, layer: Layer, name: str, value: Any) -> None:
        parts = values.take_apart(name, value)
        self._keep_outer(layer, name)
        live = self._live.get(name)
        if live is not None and parts.same_as(live.variable.manifest.skeleton, live.arrays):
            self._protect(layer, name)  # ``shelf["x"] += 1``, or filled by a restore: already there
        else:
            self._stage(layer, name, parts)

    def _stage(self, layer: Layer, name: str, parts: values.ValueParts) -> None:
        """Store a new value in free space, and its checksum: the commit only reads it if it was opened meanwhile."""
        manifest = values.described(parts)
        extent = self._take(manifest.payload_nbytes, f"the new {name!r}")
        checksum = 0

        def store(offset: int, data: memoryview) -> None:
            nonlocal checksum
            checksum = crc32(data, checksum)
            # Crash: the root names contents that were in caches only.
            self._file.store(extent.offset + offset, data)

        try:
            values.fill(parts, manifest, store)
        except BaseException:
            self._space.give(extent)
            raise
        self._retire(name)
        self._change(layer, name, StoredVariable(extent.offset, manifest).with_checksum(checksum))

    def _keep_outer(self, layer: Layer, name: str) -> None:
        """Stage a container's changes in the outer layer, if ``layer`` is nested: an abort of ``layer`` keeps them."""
        if name not in layer.changes:
            outer = next((each for each in reversed(self._layers) if name in each.changes), None)
            if outer is not None:
                self._restage(outer, name)

    def _restage(self, layer: Layer, name: str) -> None:
        """Stage a list or dict if the user changed its keys, items or plain values; the object stays the same."""
        live, variable = self._live.get(name), layer.changes.get(name)
        if live is None or variable is None or isinstance(live.value, _ARRAYS):
            return
        parts = values.take_apart(name, live.value)
        if parts.same_as(live.variable.manifest.skeleton, live.arrays):
            return
        if parts.has_arrays(live.arrays):  # where they are, and maybe changed there
            manifest = msgspec.structs.replace(variable.manifest, skeleton=parts.skeleton)
            layer.changes[name] = live.variable = Variable(variable.offset, manifest)
            return
        value = live.value
        del live
        self._stage(layer, name, parts)
        new = self._open(name, self._variable(name))
        new.value = values.with_arrays(value, dict(zip(map(id, parts.arrays), new.arrays, strict=True)))

    def _open(self, name: str, variable: Variable) -> _Live:
        variable = self._used(name, variable)
        window = self._file.window(*self._extent(variable)) if variable.nbytes else None
        payload = memoryview(b"") if window is None else window.memory()
        value, arrays = values.made(variable.manifest, payload)
        live = self._live[name] = _Live(value, arrays, window, variable)
        return live

    def _used(self, name: str, variable: Variable) -> Variable:
        """Return a variable for handing out its arrays: they may change until the commit, so drop a stored checksum."""
        if isinstance(variable, StoredVariable):
            layer = next(each for each in reversed(self._layers) if name in each.changes)
            variable = layer.changes[name] = Variable(variable.offset, variable.manifest)
        return variable

    def _retire(self, name: str) -> None:
        """Detach a variable's arrays from the file: they become private copies."""
        live = self._live.pop(name, None)
        if live is not None and (window := live.window) is not None:
            del live
            window.detach()

    def _join(self) -> None:
        """Merge the innermost layer into the one around it."""
        layer = self._layers.pop()
        for name, variable in layer.changes.items():
            self._change(self._layers[-1], name, variable)

    def _abort(self, layer: Layer) -> None:
        """Undo the changes of a layer and of the layers inside it, and free their extents."""
        while True:
            last = self._layers.pop()
            for name, variable in last.changes.items():
                self._return(name, self._current(name))
                if variable is not None:
                    self._space.give(self._extent(variable))
            if last is layer:
                return

    def _return(self, name: str, before: Variable | None) -> None:
        """Restore the live value of a variable to its state ``before`` an aborted layer."""
        live = self._live.get(name)
        if live is None:
            return
        # The very same table of arrays: they are still those of the same window.
        if before is None or live.variable.manifest.tensors is not before.manifest.tensors or self._file.closed:
            self._retire(name)
            return
        if live.window is not None:
            live.window.move(before.offset)
        live.variable = self._used(name, before)
        if not isinstance(live.value, _ARRAYS):
            live.value = values.refilled(live.value, values.remade(before.manifest, live.arrays))

    def _commit(self, layer: Layer) -> None:
        """Make the outermost layer durable.

        Durability: first the new contents and the new directory, then the root that refers to them. Space that only
        the old root refers to is freed afterwards: until then a crash may put the old root back in force.
        """
        file, sequence = self._file, self._root.sequence + 1
        for name in [name for name, variable in layer.changes.items() if variable is not None]:
            self._restage(layer, name)
        if not layer.changes:
            self._layers.pop()
            return
        new, now = dict(self._committed), time.time()
        for name, variable in layer.changes.items():
            if variable is None:
                new.pop(name, None)
            else:
                new[name] = self._finished(variable, sequence, now)
        data = self._encoder.encode(sequence, new)
        place = self._take(len(data), "the directory")
        try:
            for name in layer.changes:
                if name in new and new[name].nbytes and not isinstance(layer.changes[name], StoredVariable):
                    # Crash: the root names contents that were in caches only.
                    file.persist(new[name].offset, new[name].nbytes)
            # Without this: after a crash the root may name a directory that was in caches only.
            file.store(place.offset, memoryview(data))
            # Crash (where the kernel flushes): the root reaches the disk before the data that it names.
            file.flush()
        except OSError as error:
            self._space.give(place)
            self._failure = error
            raise _failed(error, self.path) from error
        # If this ends before memory agrees with the file, nothing more may be changed.
        self._failure = _interrupted()
        self._publish(Root(sequence, self._root.nbytes, Extent(place.offset, len(data)), crc32(data)))
        self._layers.pop()
        old, self._committed = self._committed, new
        for name in layer.changes:
            if name in old:
                self._space.give(self._extent(old[name]))
            if name in self._live:
                self._live[name].variable = new[name]
        self._failure = None

    def _finished(self, variable: Variable, sequence: int, now: float) -> Variable:
        manifest = msgspec.structs.replace(variable.manifest, counter=sequence, time=now)
        finished = Variable(variable.offset, manifest)
        if isinstance(variable, StoredVariable):
            return finished
        return finished.with_checksum(crc32(self._file.view(variable.offset, variable.nbytes)))

    def _publish(self, root: Root) -> None:
        """Store a root over the older one, which is the commit; then free the directory of the root before it."""
        before, header = self._root, self._header
        try:
            self._file.store(header.place(root.sequence), memoryview(root.encode(header)))
            # Crash: a transaction is acknowledged and gone; or the next one stores over data that the older root names.
            self._file.flush()
        except OSError as error:
            self._failure = error
            raise _failed(error, self.path) from error
        self._root = root
        self._space.give(Extent(before.directory.offset, header.pages(before.directory.nbytes)))

    # -- the file

    def grow(self, nbytes: int) -> None:
        """Grow the file to at least ``nbytes``, durably; an abort does not undo that. Arrays keep their addresses.

        Raises:
            StoreFullError: There is not enough space; nothing has changed.
        """
        with HoldsBack(), self._changing():
            end = self._root.nbytes
            if nbytes <= end:
                return
            data = self._encoder.encode(self._root.sequence + 1, self._committed)
            used = self._header.pages(len(data))
            size = max(self._header.pages(nbytes), end + used)
            self._file.grow(size)
            self._failure = _interrupted()  # until memory agrees with the file
            self._space.give(Extent(end, size - end))
            # At the end of the new space, if need be: free space before and behind the old end stays one piece.
            place = self._space.take_last(used)
            try:
                self._file.store(place.offset, memoryview(data))
                self._file.flush()  # without this: a crash may leave a root whose directory was in caches only
            except OSError as error:
                self._failure = error
                raise _failed(error, self.path) from error
            self._publish(Root(self._root.sequence + 1, size, Extent(place.offset, len(data)), crc32(data)))
            self._failure = None

    def verify(self) -> tuple[str, ...]:
        """Return the names of the variables that differ from the state of their last transaction.

        Such variables were changed outside a transaction, or are damaged.
        """
        with self._entered():
            self._check_open()
            return tuple(name for name, variable in self._committed.items() if not self._is_whole(name, variable))

    def _is_whole(self, name: str, variable: Variable) -> bool:
        live = self._live.get(name)
        if live is not None and not self._layers and not isinstance(live.value, _ARRAYS):
            try:
                if not values.take_apart(name, live.value).same_as(variable.manifest.skeleton, live.arrays):
                    return False
            except UnsupportedStateError:
                return False
        checksum = 0
        for low in range(0, variable.nbytes, _PIECE):
            checksum = crc32(self._file.read(variable.offset + low, min(_PIECE, variable.nbytes - low)), checksum)
        return checksum == variable.checksum

    def variables(self) -> Mapping[str, Variable]:
        """Return the entries of the committed variables by name: offsets, manifests, checksums."""
        with self._entered():
            self._check_open()
            return dict(self._committed)

    def close(self) -> None:
        """Close the file. Arrays that are still referenced become private copies. Idempotent.

        Raises:
            RuntimeError: A transaction is open.
        """
        if self._file.closed:
            return
        with HoldsBack(), self._lock:
            if self._layers:
                raise RuntimeError("a shelf is not closed inside a transaction")
            self._live.clear()
            self._file.close()

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the state of an engine

    def state_dict(self) -> dict[str, Any]:
        """Return the values of all variables; their arrays are those in the file."""
        return {name: self[name] for name in self}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all variables by the entries of ``state``, in one transaction."""
        with self.transaction():
            for name in [name for name in self if name not in state]:
                del self[name]
            for name, value in state.items():
                self[name] = value


class _Transaction(AbstractContextManager[None]):
    """A transaction whose beginning and end cannot be interrupted by a KeyboardInterrupt; its block can."""

    def __init__(self, transaction: AbstractContextManager[None]) -> None:
        self._transaction = transaction
        self._held_back = HoldsBack()

    def __enter__(self) -> None:
        self._held_back.__enter__()
        try:
            self._transaction.__enter__()
        except BaseException:
            self._held_back.__exit__()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._transaction.__exit__(kind, error, traceback)
        finally:
            self._held_back.__exit__()


def read_shelf(file: ShelfFile) -> tuple[Header, Root, dict[str, Variable]]:
    """Return the header, the root in force and its variables, checked. Raises CorruptStoreError, naming the file."""
    try:
        header = layout.decode_header(file.read(0, layout.HEADER.size))
        if header.page_bytes % PAGE_BYTES:
            raise CorruptStoreError(
                f"the shelf was made on a machine with pages of {header.page_bytes} bytes; those here have {PAGE_BYTES}"
            )
        root = layout.newest_root(header, file.read(0, layout.FIRST_PAGE * header.page_bytes), file.size)
        return header, root, layout.decode_directory(header, root, file.read(*root.directory))
    except CorruptStoreError as error:
        raise type(error)(f"{file.path}: {error}") from error


def empty_shelf(nbytes: int) -> tuple[int, bytes]:
    """Return the size and the first bytes of a new file: header, root 1 and its empty directory."""
    header = Header(PAGE_BYTES, secrets.token_bytes(16))
    size = max(header.pages(nbytes), _LEAST_PAGES * PAGE_BYTES)
    data = layout.DirectoryEncoder().encode(1, {})
    root = Root(1, size, Extent(layout.FIRST_PAGE * PAGE_BYTES, len(data)), crc32(data))
    head = bytearray(layout.FIRST_PAGE * PAGE_BYTES) + data
    head[: layout.HEADER.size] = header.encode()
    head[header.place(1) : header.place(1) + layout.ROOT.size] = root.encode(header)
    return size, bytes(head)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"names of variables are strings, not {name!r}")
    if not name:
        raise ValueError("the name of a variable is empty")


def _failed(error: OSError, path: Path) -> StoreFailedError:
    text = f"a flush of the shelf failed ({error.strerror or error}); reopen it to see what is durable"
    return StoreFailedError(error.errno, text, os.fspath(path))


def _interrupted() -> OSError:
    """Return the error that refuses changes after a commit that did not end; set while a commit is in progress."""
    return OSError(errno.EINTR, "a commit was interrupted")


def _current_task() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs on this thread
        return None
