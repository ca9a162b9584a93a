# SPDX-License-Identifier: Apache-2.0
"""Adds the metrics of an evaluation to a checkpoint's metadata, whose size is limited."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import check_metadata
from pccheck_async.store import Keep

__all__ = ["with_metrics"]


def with_metrics(metadata: Mapping[str, Any], metrics: Mapping[str, float], keep: Keep | None) -> dict[str, Any]:
    """Return metadata with the metrics that fit: first the one that ``keep.best`` names, then the others in order."""
    best = None if keep is None or keep.best is None else keep.best[0]
    merged = dict(metadata)
    for name in sorted(metrics, key=lambda name: name != best):
        with suppress(UnsupportedStateError):
            merged = check_metadata({**merged, name: float(metrics[name])})
    return merged
