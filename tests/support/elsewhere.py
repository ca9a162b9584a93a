"""What other machines and builds have, where the package asks for it: the one place that knows how it asks."""

from __future__ import annotations

import pytest

from pccheck_async.state.cache import layout_cache
from pccheck_async.state.save import split
from pccheck_async.transfer.operations import NativeOperations

__all__ = ["capture_at_once", "without_extension"]


def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the C extension be one that was not built."""
    monkeypatch.setattr(NativeOperations, "available", lambda: False)
    monkeypatch.setattr(layout_cache, "look", None)


def capture_at_once(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let tensors of at most so many bytes be copied before an overlapped checkpoint's call returns."""
    monkeypatch.setattr(split, "LARGEST_COPY", nbytes)
