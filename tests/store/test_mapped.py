"""Files that are mapped: persistent memory, emulated on tmpfs, and pages of the page cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from pccheck_async.medium import Medium
from pccheck_async.medium.mapped import MappedFiles
from pccheck_async.testing import MEDIUM_CHECKS
from pccheck_async.transfer.operations import Operations
from tests.conftest import BACKENDS


@pytest.mark.parametrize("check", MEDIUM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("where", ["on disk", "in memory"])
def test_mapped_files_keep_what_a_medium_promises(
    check: Callable[..., Coroutine[None, None, None]], where: str, tmp_path: Path, shared_memory: Path, io: str
) -> None:
    folder = tmp_path if where == "on disk" else shared_memory

    async def main() -> None:
        made: list[Operations] = []

        async def make() -> Medium:
            made.append(BACKENDS[io](io_threads=1, copy_threads=1))
            return MappedFiles(folder / "store", made[-1])

        try:
            await check(make)
        finally:
            for operations in made:
                await operations.close()

    asyncio.run(main())
