# SPDX-License-Identifier: Apache-2.0
"""Values that only their own class or pickle can restore: tensors composed of other tensors, and pickled values.

Composed tensors are wrapper subclasses, such as the moments of low-bit optimizers. Their class names the attributes
that hold the inner tensors by ``__tensor_flatten__``, and makes a tensor of them by ``__tensor_unflatten__``. A
checkpoint names the class. It is looked up among the modules that the process has imported, and nothing is imported for
it: a name in a checkpoint runs no code that the process has not chosen.

Values that only pickle can hold, if the user allows it, are stored by ``torch.save`` and read by ``torch.load``.
Unpickling runs any code that the bytes name. Only :func:`unpickle` unpickles, and only ``load``, open checkpoints and
``restore`` call it, with ``allow_pickle=True``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.skeleton import ComposedNode, PickledNode


def is_composed(value: object) -> bool:
    """Return whether a value is a composed tensor; tensors of torch's own classes (DTensor, nested) are not."""
    return isinstance(value, torch.Tensor) and _composes(type(value))


def find_class(module: str, name: str) -> type | None:
    """Return the class of composed tensors called ``name`` in ``module``; None if no such class is imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr() of a module may import
    return found if isinstance(found, type) and issubclass(found, torch.Tensor) and _composes(found) else None


def class_of(node: ComposedNode, path: str = "") -> Any:
    """Return the class of a stored composed tensor. Raises UnsupportedStateError if no such class is imported."""
    found = find_class(node.module, node.name)
    if found is None:
        module, name = node.module[:200], node.name[:200]
        raise UnsupportedStateError(
            f"{path or 'the checkpoint'}: a tensor of the class {name}, which is composed of others; no module "
            f"{module} with such a class is imported: import it before, or take those others as a dict, with "
            f"load(path, keys=[{f'{path}.*'!r}])"
        )
    return found


def compose(node: ComposedNode, parts: Mapping[str, Any], context: Any) -> torch.Tensor:
    """Return the tensor composed of ``parts``. Raises UnsupportedStateError if its class is missing or fails."""
    kind = class_of(node)
    try:
        made: torch.Tensor = kind.__tensor_unflatten__(dict(parts), context, torch.Size(node.shape), node.stride)
        trouble = "" if type(made) is kind and tuple(made.shape) == node.shape else "it makes another tensor"
    except Exception as error:  # of the user's own code, which may raise anything
        raise _not_made(node, repr(error)) from error
    if trouble:
        raise _not_made(node, trouble)
    return made


def _not_made(node: ComposedNode, trouble: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{node.module[:200]}.{node.name[:200]} does not make a tensor of its stored parts ({trouble}); it may be "
        "of another version than the class that was saved"
    )


def _composes(kind: type) -> bool:
    own = kind.__module__.partition(".")[0] == "torch"
    return not own and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


# -- pickled values


def pickle(value: Any, kind: str, path: str) -> PickledNode:
    """Pickle a value; return its node. Raises UnsupportedStateError if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # of the user's own code, which may raise anything
        raise UnsupportedStateError(f"{path}: a {kind} cannot be pickled either: {error}") from error
    return PickledNode(kind, buffer.getvalue())


def refuse_pickled(node: PickledNode, path: str = "") -> Any:
    """Raise UnsupportedStateError, in place of :func:`unpickle` where unpickling is not allowed."""
    raise UnsupportedStateError(
        f"{path or 'the checkpoint'}: a pickled {node.kind[:200]}, which is unpickled only with allow_pickle=True; "
        "that runs code that the checkpoint names, so give it only where you trust whoever wrote the checkpoint"
    )


def unpickle(node: PickledNode, path: str = "", device: Any = None) -> Any:
    """Return the pickled value, tensors on ``device``, by default their saved one. Raises UnsupportedStateError."""
    try:
        return torch.load(io.BytesIO(node.data), map_location=device, weights_only=False)
    except Exception as error:  # of the user's own code, which may raise anything
        what = f"{path or 'the checkpoint'}: a pickled {node.kind[:200]}"
        raise UnsupportedStateError(f"{what} cannot be unpickled here: {error!r}") from error
