"""The control plane: two ordered logs on a ``TCPStore`` that rank 0 serves, read and written by threads of their own.

Ranks put messages into an inbox, rank 0 puts decisions into a log, and everyone reads that in order::

    in          how many messages were posted (``add``)
    in/<i>      message i, deleted by rank 0 when it has read it
    out/<n>     decision n; empty: the end. Deleted once every rank has said that it learnt it

A message begins with its sender and the number of decisions that it learnt. The store is the group's own, never that of
the default process group, and no collective is called: a trainer's thread may be inside one. A client of a ``TCPStore``
does one operation at a time, so those who wait have one each.

A rank that died, or was stopped, is not found out here: whoever waits for it waits, until the launcher ends the job. A
lost connection to rank 0 is told.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeAlias

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pccheck_async.errors import GroupError
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import AnyDecision, AnyMessage, Refused, decode_decision, decode_message, encode

__all__ = ["Address", "Client", "Server"]

Address: TypeAlias = tuple[tuple[str, ...], int]
"""Names under which the host of rank 0 may be reached, and the port."""

_FOREVER: Final = timedelta(days=1000)
_CONNECT_SECONDS: Final = 20.0
_FRAME: Final = struct.Struct("<IQ")
"""Rank, and decisions learnt."""
_LOST: Final = (RuntimeError, OSError)  # torch's errors of a store are RuntimeErrors


class Server:
    """Rank 0's side: serves the store, and publishes what the coordinator decides.

    Args:
        coordinator: Called by one thread at a time.
        world: Ranks in the group.
        seconds: Within which all of them have to say hello.
    """

    def __init__(self, coordinator: Coordinator, world: int, seconds: float) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=_FOREVER)
        self._inbox = self._connect()
        self._log = self._connect()
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._published = 0
        self._deleted = 0
        self._learned = [0] * world
        self._ended = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="pccheck-group-inbox", daemon=True)
        self._thread.start()
        self._timer = threading.Timer(seconds, self._refuse_late, (seconds,))
        self._timer.daemon = True
        self._timer.start()

    def _refuse_late(self, seconds: float) -> None:
        """Refuse the opening where ranks are missing; a rank that never comes must not hang the others."""
        with self._lock, suppress(*_LOST):
            if missing := self._coordinator.missing:
                ranks = ", ".join(map(str, missing))
                self._publish([Refused(f"ranks {ranks} did not open this group within {seconds} s")])

    def _connect(self) -> TCPStore:
        return TCPStore("localhost", self._store.port, is_master=False, wait_for_workers=False, timeout=_FOREVER)

    @property
    def step(self) -> int:
        """The step that rank 0's trainer is in."""
        return self._coordinator.schedule.step

    @step.setter
    def step(self, step: int) -> None:
        self._coordinator.schedule.step = step

    @property
    def address(self) -> Address:
        """Where the others find it."""
        names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname(), "localhost"]
        return tuple(dict.fromkeys(filter(None, names))), self._store.port

    def decide(self, ask: Callable[[Coordinator], Sequence[AnyDecision]]) -> None:
        """Publish what the coordinator answers to a question of rank 0 itself. May be called from any thread."""
        with self._lock:
            self._publish(ask(self._coordinator))

    def wait_until_all_left(self, seconds: float | None) -> bool:
        """Wait until every rank said goodbye and the log has its end; return whether it has."""
        return self._ended.wait(seconds)

    def _serve(self) -> None:
        number = 0
        try:
            while not self._coordinator.everyone_left:
                number += 1
                data = self._inbox.get(f"in/{number}")
                self._inbox.delete_key(f"in/{number}")
                rank, learned = _FRAME.unpack_from(data)
                message = decode_message(data[_FRAME.size :])
                with self._lock:
                    self._learned[rank] = max(self._learned[rank], learned)
                    self._publish(self._coordinator.receive(message))
            with self._lock:
                self._log.set(f"out/{self._published}", b"")  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - the clients are told by a store that is gone
            self.failure = error
        finally:
            self._timer.cancel()
            self._ended.set()

    def _publish(self, decisions: Sequence[AnyDecision]) -> None:
        for decision in decisions:
            self._log.set(f"out/{self._published}", encode(decision))  # type: ignore[arg-type]
            self._published += 1
        while self._deleted < min(self._learned):
            self._log.delete_key(f"out/{self._deleted}")
            self._deleted += 1


class Client:
    """One rank's side: posts messages in order, and hands decisions over in order.

    Args:
        address: Of the server.
        rank: This one.
        learn: Called with every decision, on a thread of its own.
        lost: Called once where the store is gone, with what happened; no decision comes after that.

    Raises:
        GroupError: Nothing is reached there.
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
        self._inbox = _reach(address)
        self._log = self.another()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"pccheck-group-{name}", daemon=True)
            for name, loop in (("post", self._post_all), ("log", self._read_all))
        ]
        self._once = threading.Lock()
        for thread in self._threads:
            thread.start()

    def another(self) -> TCPStore:
        """Return one more client of the store, for whoever waits for something else."""
        return _reach(self._address, only=self._inbox.host)

    def post(self, message: AnyMessage) -> None:
        """Put a message into the inbox, after those before it. Returns at once."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Post what was to be posted, and stop posting. The log is read until its end, which is rank 0's."""
        self._outgoing.put(None)
        self._threads[0].join()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except (*_LOST, msgspec.DecodeError) as error:
            if self._once.acquire(blocking=False):
                self._lost(f"the connection to rank 0 is lost ({str(error).splitlines()[0]})")

    def _post_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            number = self._inbox.add("in", 1)
            self._inbox.set(f"in/{number}", _FRAME.pack(self._rank, self._learned) + encode(message))  # type: ignore[arg-type]

    def _read_all(self) -> None:
        while data := self._log.get(f"out/{self._learned}"):
            self._learned += 1
            self._learn(decode_decision(data))


def _reach(address: Address, only: str | None = None) -> TCPStore:
    names, port = address
    errors = []
    for name in names if only is None else (only,):
        # torch retries for as long as its timeout: not where the name leads nowhere, or to another machine.
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
