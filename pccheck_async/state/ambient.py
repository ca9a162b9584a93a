"""What surrounds a call on its own thread: torch's modes and transforms, which change what torch's functions do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from pccheck_async.errors import UnsupportedStateError

__all__ = ["apart", "refuse_tracing"]

_KEYS: Final = torch._C._TorchDispatchModeKey
_compiler: Final[Callable[[], object]] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


@contextmanager
def apart() -> Iterator[None]:
    """Let torch do what it does by itself, whatever modes the caller is in: default devices and modes of users' own.

    For the package's own calls only. What users wrote (``state_dict()``, ``load_state_dict()``) runs in their modes.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
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
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, functionalize, ...)"
    if torch._C._len_torch_dispatch_stack():
        if torch._C._get_dispatch_mode(_KEYS.FAKE) is not None:
            return "FakeTensorMode"
        if torch._C._get_dispatch_mode(_KEYS.PROXY) is not None:
            return "make_fx"
        if torch._C._get_dispatch_mode(_KEYS.FUNCTIONAL) is not None:
            return "FunctionalTensorMode"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if _compiler():
        return "a function of torch.compile (torch.compiler.disable keeps what calls this out of it)"
    return ""
