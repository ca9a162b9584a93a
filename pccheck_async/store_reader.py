"""A store opened for reading, also beside a running writer of another process. Nothing here writes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from pccheck_async.config import EngineConfig, decide
from pccheck_async.errors import CorruptStoreError, NoCheckpointError, ReadError
from pccheck_async.layout import COMMIT_NAME, IDENTITY_NAME, Entry, Identity, Record, slot_name, slot_number
from pccheck_async.loop import EngineLoop
from pccheck_async.machine import available_cores, available_memory
from pccheck_async.manifest import MIN_BLOCK, Manifest
from pccheck_async.reading import choose, warn_damaged
from pccheck_async.records import read_identity, read_record
from pccheck_async.restore import read_manifest
from pccheck_async.session import IO, Session, open_session
from pccheck_async.writer import File
from pccheck_async.writer.posix import PosixWriter

__all__ = ["OneLoop", "StoreReader", "no_store", "why_no_store", "with_session"]

T = TypeVar("T")
_POLL_SECONDS = 0.001
_LOCK_SECONDS = 30.0


def no_store(session: Session, path: str | os.PathLike[str], what: str = "no store") -> NoCheckpointError:
    """Return what to raise where there is no store."""
    if isinstance(session.writer, PosixWriter):  # of other writers' folders only they know what and where they are
        return NoCheckpointError(why_no_store(path, what))
    return NoCheckpointError(f"{os.fspath(path)} holds {what}")


def why_no_store(path: str | os.PathLike[str], what: str = "no store") -> str:
    """Say why there is no store: whether the path is wrong, nothing was saved there, or it lost its identity."""
    text = f"{os.fspath(path)} holds {what}"
    if not os.path.lexists(path):
        return f"{os.fspath(path)} does not exist, so it holds {what}; check the path"
    if not os.path.isdir(path):
        return f"{os.fspath(path)} is no folder, so it holds {what}; give the folder that the engine saved into"
    parts, stores = _inside(path)
    if parts:
        return (
            f"{text}, but parts of one without {IDENTITY_NAME}: `pccheck recover {os.fspath(path)}` says what is left"
        )
    return f"{text}; there are stores in it: {', '.join(stores)}" if stores else text


def _inside(path: str | os.PathLike[str]) -> tuple[bool, list[str]]:
    """Whether there are files of a store in a folder, and the names of a few folders in it that are stores."""
    try:
        with os.scandir(path) as entries:
            found = list(islice(entries, 1000))
    except OSError:
        return False, []
    stores = [each.name for each in found if os.path.exists(os.path.join(each.path, IDENTITY_NAME))]
    parts = any(each.name == COMMIT_NAME or slot_number(each.name) is not None for each in found)
    return parts, [*sorted(stores)[:5], *(["..."] if len(stores) > 5 else [])]


class OneLoop:
    """A loop for the length of one call, blocking or awaited."""

    def __init__(self, name: str = "pccheck-read") -> None:
        self._name = name

    def __enter__(self) -> EngineLoop:
        self._loop = EngineLoop(self._name)
        return self._loop

    def __exit__(self, *_: object) -> None:
        self._loop.stop()

    async def __aenter__(self) -> EngineLoop:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self._loop.stopped()


@dataclass(slots=True)
class StoreReader:
    """An open store, read-only.

    Attributes:
        session: Moves the bytes.
        identity: What ``store.json`` says.
        commit: The file of the records.
    """

    session: Session
    identity: Identity
    commit: File

    @classmethod
    async def open(cls, session: Session) -> StoreReader | None:
        """Open the store of ``session``; None where there is no (complete) one. Raises CorruptStoreError."""
        identity = await read_identity(session.writer)
        if identity is None:
            return None
        await session.writer.prepare(create=False)
        try:
            commit = await session.writer.open(COMMIT_NAME, writable=False)
        except FileNotFoundError:
            text = f"the store has no {COMMIT_NAME!r} file: see what is left with `pccheck recover`"
            raise CorruptStoreError(text) from None
        return cls(session, identity, commit)

    async def record(self) -> Record:
        """Return the newest record as it is now. Raises CorruptStoreError where there is none."""
        return await read_record(self.session.writer, self.commit, self.identity)

    async def lock(self, pick: Callable[[Record], Entry | None]) -> tuple[Entry, File | None] | None:
        """Lock the picked checkpoint's slot against reuse; no file where there is none, None where nothing is picked.

        A slot that is locked shared, and that a record read *after* locking still names, keeps its bytes: writers take
        only free slots, and pass over locked ones. Otherwise the record has moved on: start over.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + _LOCK_SECONDS
        writer = self.session.writer
        while True:
            entry = pick(await self.record())
            if entry is None:
                return None
            try:
                file = await writer.open(slot_name(entry.slot), writable=False)
            except (FileNotFoundError, CorruptStoreError):  # something else of that name is none of its files
                if _names(await self.record(), entry):
                    return entry, None
            else:
                if await writer.try_lock(file, shared=True) and _names(await self.record(), entry):
                    return entry, file
                await writer.close_file(file)
            if clock() > deadline:
                raise ReadError(f"the checkpoints change faster than they can be locked ({_LOCK_SECONDS} s)")
            await asyncio.sleep(_POLL_SECONDS)

    async def read(
        self,
        path: str | os.PathLike[str],
        step: int | None,
        use: Callable[[Entry, File, Manifest], Awaitable[T]],
        *,
        keep: bool = False,
    ) -> T:
        """Lock the newest checkpoint (or that of ``step``) and use it; the next older one where it is damaged.

        Args:
            path: Folder of the store, for messages.
            step: The user's step; then damage raises.
            use: What to do with its entry, its slot and its manifest.
            keep: Leave the slot open and locked where ``use`` returned.

        Raises:
            NoCheckpointError: there is none, or none of ``step``.
            CorruptStoreError: damaged, and nothing older to fall back to.
            ReadError: the device failed, and nothing older to fall back to.
        """
        unreadable: set[int] = set()
        while True:
            locked = await self.lock(lambda record: choose(record.entries, step, unreadable))
            if locked is None:
                raise NoCheckpointError(
                    f"{os.fspath(path)} holds no checkpoint" + ("" if step is None else f" of step {step}")
                )
            entry, file = locked
            used = False
            try:
                if file is None:
                    raise CorruptStoreError(
                        f"{slot_name(entry.slot)}, which the newest record names, is missing, or no file"
                    )
                manifest = await read_manifest(self.session.writer, file, entry, self.identity.block_bytes)
                result = await use(entry, file, manifest)
                used = True
                return result
            except (CorruptStoreError, ReadError) as error:
                unreadable.add(entry.counter)
                older = choose((await self.record()).entries, step, unreadable)
                if step is not None or older is None:
                    raise
                warn_damaged(entry, older, error)
            finally:
                if file is not None and not (used and keep):
                    await self.session.writer.close_file(file)


async def with_session(
    path: str | os.PathLike[str], io: IO, work: Callable[[Session], Coroutine[Any, Any, T]], config: EngineConfig
) -> T:
    """Call ``work`` with what moves bytes of one folder; its files are closed when it ended."""
    decided = decide(config, block_bytes=MIN_BLOCK, cores=available_cores(), memory=available_memory())
    session = await open_session(path, io, writers=decided.writers, copiers=decided.copiers)
    try:
        return await work(session)
    finally:
        await session.close()


def _names(record: Record, entry: Entry) -> bool:
    """Whether a record still names this checkpoint; its metadata may hold NaN, which equals nothing."""
    return any((found.counter, found.slot) == (entry.counter, entry.slot) for found in record.entries)
