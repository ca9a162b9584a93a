"""The backend, the medium and the threads for reading one store without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pccheck_async.engine import EngineConfig, decide
from pccheck_async.format.manifest import MIN_BLOCK
from pccheck_async.medium.open_medium import IO, Session, open_session
from pccheck_async.transfer import available_cores, available_memory

__all__ = ["with_session"]

T = TypeVar("T")


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
