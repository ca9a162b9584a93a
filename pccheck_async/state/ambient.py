"""What surrounds a call on its own thread: torch's modes and transforms, which change what torch's functions do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Final

import torch

from pccheck_async.errors import UnsupportedStateError

__all__ = ["apart", "no_dispatch", "no_functions", "refuse_tracing"]


def _of_torch(name: str, otherwise: Any = lambda *_: None) -> Any:
    """Return what has a private name in torch; a version without it is not asked: a state is saved all the same."""
    try:
        return attrgetter(name)(torch._C)
    except AttributeError:
        return otherwise


no_functions: Final = _of_torch("DisableTorchFunction", nullcontext)
no_dispatch: Final = _of_torch("_DisableTorchDispatch", nullcontext)
"""These two are what :func:`apart` is made of, for code that a small checkpoint waits for."""
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
def apart() -> Iterator[None]:
    """Let torch do what it does by itself, whatever modes the caller is in: default devices and modes of users' own.

    For the package's own calls only. What users wrote (``state_dict()``, ``load_state_dict()``) runs in their modes.
    """
    with no_functions(), no_dispatch():
        yield


def refuse_tracing(call: str) -> None:
    """Raise UnsupportedStateError where tensors are none: traced, made up, or wrapped by a function transform.

    What ``state_dict()`` returns there is no state, and ``load_state_dict()`` fills nothing.

    Args:
        call: Who was called.
    """
    if inside := _tracer():
        raise UnsupportedStateError(
            f"{call}() was called inside {inside}, where tensors are not what they are outside; call it outside of that"
        )


def _tracer() -> str:
    if _transform() is not None:
        return "a transform of torch.func (vmap, grad, functionalize, ...)"
    if _dispatch_modes():
        for key, what in _DISPATCH_MODES:
            if key is not None and _dispatch_mode(key) is not None:
                return what
    if _traced() is not None:
        return "torch.jit.trace"
    if _compiler():
        return "a function of torch.compile (torch.compiler.disable keeps what calls this out of it)"
    return ""
