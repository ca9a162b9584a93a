# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a call on its thread: torch's modes and transforms, which change the effect of its functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Final

import torch

from pccheck_async.errors import UnsupportedStateError


def _of_torch(name: str, otherwise: Any = lambda *_: None) -> Any:
    """Return the object with a private name in ``torch._C``, or ``otherwise``: versions without it can save, too."""
    try:
        return attrgetter(name)(torch._C)
    except AttributeError:
        return otherwise


no_functions: Final = _of_torch("DisableTorchFunction", nullcontext)
no_dispatch: Final = _of_torch("_DisableTorchDispatch", nullcontext)
"""The two parts of :func:`apart`, for code that a small checkpoint waits for."""
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
    """Switch off the modes that the caller is in (default devices, modes of users' own), so that torch works as usual.

    For the package's own calls only: users' ``state_dict()`` and ``load_state_dict()`` run in their modes.
    """
    with no_functions(), no_dispatch():
        yield


def refuse_tracing(call: str) -> None:
    """Raise UnsupportedStateError if tensors are traced, fake, or wrapped by a function transform.

    There ``state_dict()`` returns no state that could be saved. ``call`` is the name of the method that was called.
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
