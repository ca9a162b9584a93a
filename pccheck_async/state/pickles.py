"""Values that only pickle can hold, if the user allows it: stored by ``torch.save``, read by ``torch.load``.

Unpickling runs any code that the bytes name. Nothing here unpickles but :func:`unpickle`, and only ``load``, open
checkpoints and ``restore`` call that, with ``allow_pickle=True``.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.skeleton import PickledNode

__all__ = ["pickle", "refuse_pickled", "unpickle"]


def pickle(value: Any, kind: str, path: str) -> PickledNode:
    """Return the node of a value. Raises UnsupportedStateError if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # of the user's own code, which may raise anything
        raise UnsupportedStateError(f"{path}: a {kind} cannot be pickled either: {error}") from error
    return PickledNode(kind, buffer.getvalue())


def refuse_pickled(node: PickledNode, path: str = "") -> Any:
    """Raise UnsupportedStateError: unpickling was not allowed."""
    raise UnsupportedStateError(
        f"{path or 'the checkpoint'}: a pickled {node.kind[:200]}, which is unpickled only with allow_pickle=True; "
        "that runs code that the checkpoint names, so give it only where you trust whoever wrote the checkpoint"
    )


def unpickle(node: PickledNode, path: str = "", device: Any = None) -> Any:
    """Return the value, its tensors on ``device``, by default on their saved devices. Raises UnsupportedStateError."""
    try:
        return torch.load(io.BytesIO(node.data), map_location=device, weights_only=False)
    except Exception as error:  # of the user's own code, which may raise anything
        what = f"{path or 'the checkpoint'}: a pickled {node.kind[:200]}"
        raise UnsupportedStateError(f"{what} cannot be unpickled here: {error!r}") from error
