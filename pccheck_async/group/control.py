# SPDX-License-Identifier: Apache-2.0
"""The control plane: two ordered logs on a ``TCPStore`` that rank 0 serves, read and written by threads of their own.

Ranks put messages into an inbox, rank 0 puts decisions into a log, and all ranks read the log in order::

    in                 the number of messages posted (``add``)
    in/<i>             message i; rank 0 deletes it when it has read it
    out/<rank>/<n>     decision n, for this rank, which deletes it; "@" and the number of ranks: it is large
    large/<n>          decision n, for all ranks; the last one that has read it deletes it
    large/<n>/read     the number of ranks that have read it (``add``)

The store is the group's own, never that of the default process group, and no collective is called: a trainer's thread
may be inside one. A client of a ``TCPStore`` does one operation at a time, so each waiting thread has a client of its
own. To end a thread that waits for a key, that key is set: a thread that is still inside the store when the interpreter
exits would abort the process.

A rank that died, or was stopped, is not detected here: waits for it go on until the launcher ends the job. A lost
connection to rank 0 is reported. An inconsistency breaks the group on all ranks: a message that cannot be decoded,
or that the coordinator fails at, a message that is missing in the inbox, a decision that rank 0 did not publish. The
waiting calls fail, and nothing is dropped.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pccheck_async.errors import GroupError, machine_error
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import AnyDecision, AnyMessage, decode_decision, decode_message, encode
from pccheck_async.telemetry import write
from pccheck_async.transfer import abandoned_in_child

__all__ = ["Address", "Client", "Meeting", "Server", "name_slow_ranks", "reach"]

Address: TypeAlias = tuple[tuple[str, ...], int]
"""Names under which the host of rank 0 may be reached, and the port."""

_FOREVER: Final = timedelta(days=1000)
_CONNECT_SECONDS: Final = 20.0
_SMALL_BYTES: Final = 4096
"""A decision up to this size is sent to each rank, a larger one once: the findings at opening grow with the ranks."""
_LOST: Final = (RuntimeError, OSError)  # torch's errors of a store are RuntimeErrors
_STORE_DESCRIPTORS: Final = 32
"""Descriptors that rank 0 needs beside those of the connections: the store's own, the engine's, the first client's."""
_CONNECTIONS: Final = 3
"""Connections of each rank for as long as the engine is open."""
_CLIENT_DESCRIPTORS: Final = 4
"""Descriptors of a client while it connects, with those of the store, which may be in this process."""
_GAP_SECONDS = 60.0
"""Seconds between two looks for a missing message: one that later messages follow, as its rank died before writing it.
A message that is missing at two looks is given up."""


class Meeting:
    """A ``TCPStore`` that this process serves.

    Args:
        world: Ranks that will connect.

    Raises:
        ReadError: This process has too few descriptors left.
        GroupError: The store cannot be served.
    """

    def __init__(self, world: int = 1) -> None:
        _check_descriptors(_STORE_DESCRIPTORS + _CONNECTIONS * world)
        try:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=_FOREVER)
        except _LOST as error:
            raise GroupError(f"the control plane cannot be served here ({str(error).splitlines()[0]})") from error
        abandoned_in_child.add(self)

    def abandon(self) -> None:
        """In a forked child: make sure that the TCPStore is never destroyed.

        Its destructor joins the server's thread, which does not exist there: joining it, or a thread of the child's own
        that has got its id, aborts the child or never ends.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    @property
    def address(self) -> Address:
        """The host names and the port for the other ranks."""
        names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname(), "localhost"]
        return tuple(dict.fromkeys(filter(None, names))), self._store.port


class Server(Meeting):
    """Rank 0's side: serves the store, and publishes the coordinator's decisions.

    Args:
        coordinator: Rank 0's coordinator; called by one thread at a time.
        world: Number of ranks in the group.
        seconds: Time in which all of them have to say hello.

    Raises:
        ReadError: This process has too few descriptors or threads left.
        GroupError: The store cannot be served.
    """

    def __init__(self, coordinator: Coordinator, world: int, seconds: float) -> None:
        super().__init__(world)
        self._inbox = self._connect()
        self._log = self._connect()
        self._coordinator = coordinator
        self._world = world
        self._lock = threading.Lock()
        self._received = 0
        self._published = 0
        self._closing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pccheck-group-inbox", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="pccheck-group-gaps", daemon=True)
        self._timer = threading.Timer(seconds, self._refuse_late, (seconds,))
        self._timer.daemon = True

        def stop() -> None:
            self._timer.cancel()
            self._closed.set()

        _start((self._timer, self._watcher, self._thread), stop)  # the inbox last: the other two end at once

    def _refuse_late(self, seconds: float) -> None:
        """Refuse the opening if ranks are missing; a rank that never comes must not hang the others."""
        with self._lock, suppress(*_LOST):
            self._publish(self._coordinator.refuse_late(seconds))

    def _connect(self) -> TCPStore:
        return reach((("localhost",), self._store.port))

    @property
    def step(self) -> int:
        """The step that rank 0's trainer is in."""
        return self._coordinator.schedule.step

    @step.setter
    def step(self, step: int) -> None:
        self._coordinator.schedule.step = step

    def decide(self, ask: Callable[[Coordinator], Sequence[AnyDecision]]) -> None:
        """Publish the decisions that ``ask`` returns for the coordinator. May be called from any thread of rank 0."""
        with self._lock:
            self._publish(ask(self._coordinator))

    def awaited(self) -> dict[str, list[int]]:
        """Return the ranks that each open checkpoint or restore waits for."""
        with self._lock:
            return self._coordinator.awaited()

    def close(self, seconds: float) -> list[int]:
        """Wait at most so many seconds until every rank has left, then stop serving; return the ranks that have not."""
        self._timer.cancel()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._closing = True
            self._log.set(f"in/{self._received + 1}", b"")  # type: ignore[arg-type]
            self._thread.join()
        self._closed.set()
        self._watcher.join()
        return self._coordinator.remaining

    def _serve(self) -> None:
        with suppress(*_LOST):
            while self._coordinator.remaining and not self._closing:
                key = f"in/{self._received + 1}"
                data = self._inbox.get(key)
                self._inbox.delete_key(key)
                with self._lock:
                    try:
                        if self._closing:
                            return
                        if not data:
                            raise GroupError(f"message {self._received + 1} is missing, and later ones are there")
                        decisions = self._coordinator.receive(decode_message(data))
                    except Exception as error:  # noqa: BLE001 - rank 0 goes on reading: ranks have to say goodbye
                        why = f"rank 0 cannot take a message in ({type(error).__name__}: {error})"
                        decisions = self._coordinator.give_up(why)
                    self._publish(decisions)
                self._received += 1

    def _watch(self) -> None:
        """Put an empty message in place of a missing one if later ones are there: rank 0 would wait for it for ever.

        A timeout of the waiting would do, too, but torch writes lines to stderr for each one.
        """
        missing = -1
        while not self._closed.wait(_GAP_SECONDS):
            with self._lock, suppress(*_LOST):
                number = self._received + 1
                if self._log.add("in", 0) > number and not self._log.check([f"in/{number}"]):
                    if missing == number:
                        self._log.set(f"in/{number}", b"")  # type: ignore[arg-type]
                    missing = number

    def _publish(self, decisions: Sequence[AnyDecision]) -> None:
        for decision in decisions:
            data, number = encode(decision), self._published
            if len(data) > _SMALL_BYTES:
                self._log.set(f"large/{number}", data)  # type: ignore[arg-type]
                data = b"@%d" % self._world
            keys = [f"out/{rank}/{number}" for rank in range(self._world)]
            self._log.multi_set(keys, [data] * self._world)  # type: ignore[attr-defined]
            self._published += 1


async def name_slow_ranks(
    awaited: Callable[[], Mapping[str, Sequence[int]]], folder: Path, seconds: float = 60.0
) -> None:
    """Log, once for each, the operations that wait for ranks longer than ``seconds``; runs until cancelled.

    A rank that is slow, or hangs, aborts no checkpoint: the others wait for it.

    Args:
        awaited: Returns the ranks that each open checkpoint or restore waits for.
        folder: The group's folder.
        seconds: Time between two calls of ``awaited``.
    """
    seen, named = set[str](), set[str]()
    while True:
        await asyncio.sleep(seconds)
        now = awaited()
        for what in now.keys() & seen - named:
            ranks = ", ".join(map(str, now[what]))
            text = "%s has waited for ranks %s longer than %g s"
            write("slow_ranks", text, what, ranks, seconds, store=os.fspath(folder))
        named = now.keys() & seen
        seen = set(now)


class Client:
    """One rank's side of the control plane: posts messages in order, and hands over decisions in order.

    Args:
        address: Address of the server.
        rank: This rank.
        learn: Called with every decision, on a thread of its own.
        lost: Called once, with the reason, if the connection is lost, or a decision cannot be read.

    Raises:
        GroupError: Nothing is reached there.
        ReadError: This process has too few descriptors or threads left.
    """

    def __init__(
        self, address: Address, rank: int, learn: Callable[[AnyDecision], object], lost: Callable[[str], object]
    ) -> None:
        self._rank = rank
        self._learn = learn
        self._lost = lost
        self._learned = 0
        self._outgoing: queue.SimpleQueue[AnyMessage | None] = queue.SimpleQueue()
        self._address = address
        self._inbox = reach(address)
        self._log = self.another()
        self._waker = self.another()
        self._closing = False
        self._once = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"pccheck-group-{name}", daemon=True)
            for name, loop in (("post", self._post_all), ("log", self._read_all))
        ]
        _start(self._threads, lambda: self._outgoing.put(None))

    @property
    def host(self) -> str:
        """The name under which rank 0's host was reached."""
        return str(self._inbox.host)

    def another(self) -> TCPStore:
        """Return a new client of the ``TCPStore``, for another waiting thread."""
        return reach(self._address, only=self._inbox.host)

    def set(self, key: str, data: bytes) -> None:
        """Set a key of the store, over a connection that no thread waits in, and which is open already.

        Raises no error if the connection is lost: :meth:`another` and ``lost`` report that.
        """
        with suppress(*_LOST):
            self._waker.set(key, data)  # type: ignore[arg-type]

    def post(self, message: AnyMessage) -> None:
        """Put a message into the inbox, after those posted before. Returns at once; a thread sends it."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Post the queued messages, and end both threads."""
        self._outgoing.put(None)
        self._threads[0].join()
        self._closing = True  # first: a thread that passes the number that is read next sees it
        self.set(self._key(self._learned), b"")
        self._threads[1].join()

    def _key(self, number: int) -> str:
        return f"out/{self._rank}/{number}"

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except msgspec.DecodeError as error:
            self._end(f"a decision cannot be read ({error})")
        except _LOST as error:
            self._end(f"the connection to rank 0 is lost ({str(error).splitlines()[0]})")

    def _end(self, why: str) -> None:
        if self._once.acquire(blocking=False) and not self._closing:
            self._lost(why)

    def _post_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            number = self._inbox.add("in", 1)
            self._inbox.set(f"in/{number}", encode(message))  # type: ignore[arg-type]

    def _read_all(self) -> None:
        while not self._closing:
            data = self._log.get(self._key(self._learned))
            if self._closing:
                return
            self._log.delete_key(self._key(self._learned))
            if data.startswith(b"@"):
                data = self._read_large(f"large/{self._learned}", data[1:])
            self._learned += 1
            self._learn(decode_decision(data))

    def _read_large(self, key: str, readers: bytes) -> bytes:
        """Read a large decision; the last of its ``readers`` deletes it."""
        if not self._log.check([key]):  # rank 0 puts it there first
            raise msgspec.DecodeError(f"{key} is not there")
        data: bytes = self._log.get(key)
        if b"%d" % self._log.add(f"{key}/read", 1) == readers:
            self._log.delete_key(key)
            self._log.delete_key(f"{key}/read")
        return data


def _start(threads: Sequence[threading.Thread], stop: Callable[[], object]) -> None:
    """Start all threads. Where one cannot be started, ``stop`` ends those before it, and ReadError is raised."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            stop()
            for started in threads[:number]:
                started.join()
            raise machine_error(error, "a thread of the group's control plane") from error


def _check_descriptors(count: int) -> None:
    """Raise ReadError if this process cannot open so many more files.

    A store of torch that lacks a descriptor may abort the process, or leave its clients waiting.
    """
    with ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise machine_error(error, f"the group's control plane, which needs {count} descriptors here,") from error


def reach(address: Address, only: str | None = None) -> TCPStore:
    """Return a client of the ``TCPStore`` at an address; ``only``: the only one of its host names to be tried.

    Raises:
        GroupError: Nothing is reached there.
        ReadError: This process has too few descriptors left.
    """
    _check_descriptors(_CLIENT_DESCRIPTORS)
    names, port = address
    errors = []
    for name in names if only is None else (only,):
        # torch retries for as long as its timeout: not if the name leads nowhere, or to another machine.
        with suppress(OSError), socket.create_connection((name, port), timeout=_CONNECT_SECONDS):
            try:
                store = TCPStore(
                    name, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
                )
            except _LOST as error:
                errors.append(str(error).splitlines()[0])
            else:
                store.set_timeout(_FOREVER)
                return store
    raise GroupError(f"rank 0's control plane is not reached at {', '.join(names)}, port {port}; {'; '.join(errors)}")
