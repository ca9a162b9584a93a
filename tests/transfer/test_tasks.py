"""Tasks that end together: which error is raised."""

from __future__ import annotations

import asyncio

import pytest

from pccheck_async.errors import ReadError
from pccheck_async.transfer import Tasks


async def fail(error: Exception) -> None:
    raise error


def test_the_first_failure_is_raised_out_of_all_groups() -> None:
    """A medium may have groups of its own: what reads through it looks for ReadError."""

    async def read() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(ReadError(5, "sector")))
            group.create_task(fail(ValueError("too")))

    async def main() -> None:
        async with Tasks() as group:
            group.create_task(read())

    with pytest.raises(ReadError, match="sector") as raised:
        asyncio.run(main())
    assert raised.value.__notes__ == ["also failed at the same time: ValueError: too"]
