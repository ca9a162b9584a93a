from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["on disk", "in memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path, shared_memory: Path) -> Path:
    """Where a shelf may be made: pages of the page cache, and emulated persistent memory."""
    return (tmp_path if request.param == "on disk" else shared_memory) / "shelf"
