"""Callbacks that run before Python code reaches for the memory of a tensor in a way that torch does not count.

``Tensor._version`` counts the changes of torch's own operations, not what is written through ``param.data``, a NumPy
array of a tensor, DLPack or a storage: that is how weights are swapped for an evaluation, or perturbed around a forward
pass. So while there is a callback, the attributes of torch's classes that lead there call it first. The first callback
replaces them, they are restored after the last one, and not around each capture: CPython stops caching attributes of a
class that changes a thousand times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeAlias

import torch

from pccheck_async.state.boxes import is_sharded, local_tensors

Callback: TypeAlias = Callable[[Any, bool], None]
"""Called with the tensor or storage, and whether the access likely writes; else it may only read."""

untyped_storage: Final = torch.Tensor.untyped_storage
"""Torch's own, for the package itself: a capture does not wait for its own end."""

_METHODS: Final = ("numpy", "untyped_storage", "set_", "resize_", "resize_as_", "__dlpack__")
_PLACES: Final = (
    *((torch.Tensor, name) for name in (*_METHODS, "data", "__cuda_array_interface__")),
    (torch.UntypedStorage, "resize_"),  # its memory is given back, whatever tensors or captures still read it
)
_WRITING: Final = ("data", "set_", "resize_", "resize_as_")

_callbacks: list[Callback] = []
_shadows: list[tuple[type, str, Any, Any]] = []  # class, name, the shadow, what the class itself had before
_lock = threading.RLock()  # a finalizer may close an engine
_thread = threading.local()


def notify(callback: Callback) -> None:
    """Call ``callback`` from now on, on the thread that reaches for memory, before it does. Idempotent."""
    if callback in _callbacks:
        return
    with _lock:
        if not _shadows:
            _replace_all()
        _callbacks.append(callback)


def stop_notifying(callback: Callback) -> None:
    """Do not call ``callback`` any more."""
    with _lock:
        if callback in _callbacks:
            _callbacks.remove(callback)
        if not _callbacks:
            _restore_all()


def exempt_this_thread() -> None:
    """Call nothing on this thread: a thread that captures must not wait for the end of the capture."""
    _thread.exempt = True


def storage_address(owner: Any) -> int:
    """Return where the storage of a tensor, or a storage, begins; 0 where it has no plain memory.

    That of a DTensor is its local tensor's.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():  # classes of users refuse, or do what was not asked for
            storage = owner if isinstance(owner, torch.UntypedStorage) else untyped_storage(owner)
            return 0 if storage.device.type == "meta" else storage.data_ptr()  # torch warns where it is a fake one's
    except (NotImplementedError, RuntimeError):  # sparse, of a class that wraps others, or made up for tracing
        return storage_address(local_tensors([owner])[0]) if is_sharded(owner) else 0


def _call_all(owner: Any, writes: bool) -> None:
    if _callbacks and not getattr(_thread, "exempt", False):
        for callback in [*_callbacks]:
            callback(owner, writes)


def _replace_all() -> None:
    for cls, name in _PLACES:
        original: Any = getattr(cls, name)
        if callable(original):
            shadow: Any = _calling(original, name in _WRITING)
        else:
            get, put = (_calling(each, name in _WRITING) for each in (original.__get__, original.__set__))
            shadow = property(get, put, doc=original.__doc__)
        _shadows.append((cls, name, shadow, cls.__dict__.get(name)))
        setattr(cls, name, shadow)


def _restore_all() -> None:
    while _shadows:
        cls, name, shadow, before = _shadows.pop()
        if cls.__dict__.get(name) is not shadow:
            continue  # somebody else's shadow lies on this one, which does what torch does
        if before is None:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


def _calling(original: Any, writes: bool) -> Any:
    @wraps(original)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        _call_all(self, writes)
        return original(self, *arguments, **keywords)

    return method
