# SPDX-License-Identifier: Apache-2.0
"""Torch's modes and transforms that are active on the calling thread: they change the effect of torch's functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Final

import torch

from pccheck_async.errors import UnsupportedStateError


def _of_torch(name: str, otherwise: Any = lambda *_: None) -> Any:
    """Return the object with a private name in ``torch._C``, or ``otherwise`` if this version of torch lacks it."""
    try:
        return attrgetter(name)(torch._C)
    except AttributeError:
        return otherwise


no_functions: Final = _of_torch("DisableTorchFunction", nullcontext)
no_dispatch: Final = _of_torch("_DisableTorchDispatch", nullcontext)
"""The two context managers of :func:`without_modes`; used directly where its overhead would delay small checkpoints."""
_transform: Final = _of_torch("_functorch.peek_interpreter_stack")
_dispatch_modes: Final = _of_torch("_len_torch_dispatch_stack")
_dispatch_mode: Final = _of_torch("_get_dispatch_mode")
_traced: Final = _of_torch("_get_tracing_state")
_compiler: Final = _of_torch("_dynamo.eval_frame.get_eval_frame_callback")
_DISPATCH_MODES: Final = tuple(
    (_of_torch(f"_TorchDispatchModeKey.{name}", None), what)
    for name, what in (("FAKE", "FakeTensorMode"), ("PROXY", "make_fx"), ("FUNCTIONAL", "FunctionalTensorMode"))
)


@contextmanager
def without_modes() -> Iterator[None]:
    """Switch off the caller's modes (default devices, users' own modes) inside the block, so that torch works as usual.

    Only the package's own calls run inside: users' ``state_dict()`` and ``load_state_dict()`` run in the users' modes.
    """
    with no_functions(), no_dispatch():
        yield


def refuse_tracing(call: str) -> None:
    """Raise UnsupportedStateError if tensors are traced, fake, or wrapped by a function transform at the moment.

    A ``state_dict()`` called then returns no state that could be saved. ``call``: name of the user's call, for the
    message.
    """
    inside = ""
    if _transform() is not None:
        inside = "a transform of torch.func (vmap, grad, functionalize, ...)"
    elif _traced() is not None:
        inside = "torch.jit.trace"
    elif _compiler():
        inside = "a function of torch.compile (torch.compiler.disable keeps what calls this out of it)"
    if _dispatch_modes():
        modes = (what for key, what in _DISPATCH_MODES if key is not None and _dispatch_mode(key) is not None)
        inside = inside or next(modes, "")
    if inside:
        raise UnsupportedStateError(
            f"{call}() was called inside {inside}, where tensors are not what they are outside; call it outside of that"
        )
