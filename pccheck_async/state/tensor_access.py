# SPDX-License-Identifier: Apache-2.0
"""Detection of accesses to a tensor's memory that torch's version counters miss; callbacks can make the code wait.

``Tensor._version`` counts the changes by torch's own operations, not writes through ``param.data``, a NumPy array of a
tensor, DLPack or a storage: that is how weights are swapped for an evaluation, or perturbed around a forward pass. So
while there are watchers, the attributes of torch's classes that give such access are replaced by wrappers (shadows).
The first watcher installs them, and they are removed after the last one, not around each capture: CPython stops caching
attributes of a class that changes a thousand times.

An access costs little while there are no callbacks (300 ns). It sets an attribute on the storage, which all views share
and which lives as long as the memory: the number of the current period.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeAlias

import torch

from pccheck_async.state.boxes import is_sharded, local_tensors

Callback: TypeAlias = Callable[[Any], None]
"""Function that is called with a tensor or storage before its memory is accessed, on the accessing thread."""

untyped_storage: Final = torch.Tensor.untyped_storage
"""Torch's original method, for the package itself, whose own accesses are not watched: a capture would await itself."""

_METHODS: Final = ("numpy", "untyped_storage", "set_", "resize_", "resize_as_", "__dlpack__")
_PLACES: Final = (
    *((torch.Tensor, name) for name in (*_METHODS, "data", "__cuda_array_interface__")),
    (torch.UntypedStorage, "resize_"),  # gives memory back, even if tensors or captures still read it
)
_WRITING: Final = ("data", "set_", "resize_", "resize_as_")
"""Names of the attributes whose access likely writes; the others may only read."""

_READ: Final = "_pccheck_read"
_WRITTEN: Final = "_pccheck_written"
"""``_READ`` and ``_WRITTEN``: attributes of storages with the period of the last access of each kind."""

_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types whose storage is obtained without running code of users or of DTensor."""

_watchers: list[object] = []
_callbacks: tuple[Callback, ...] = ()
_flagged: frozenset[type] = frozenset()
"""Types for which an access only flags the storage; empty while there are callbacks, or no watchers."""
_period = 1
_shadows: list[tuple[type, str, Any, Any]] = []  # class, name, the shadow, the class's own attribute before
_lock = threading.RLock()  # a finalizer may close an engine
_thread = threading.local()


def watch_accesses(watcher: object) -> None:
    """Flag accesses from now on, until :func:`stop_watching_accesses` was called for every watcher. Idempotent."""
    with _lock:
        if not any(each is watcher for each in _watchers):
            _watchers.append(watcher)
        if not _shadows:
            _replace_all()
        _choose_flagged()


def stop_watching_accesses(watcher: object) -> None:
    """Remove a watcher; restore torch's classes after the last one. Idempotent."""
    with _lock:
        _watchers[:] = [each for each in _watchers if each is not watcher]
        _choose_flagged()
        if not _watchers:
            _restore_all()


def call_before_accesses(callback: Callback) -> None:
    """Call ``callback`` before every access from now on, while there are watchers. Idempotent.

    An access then costs some microseconds.
    """
    global _callbacks  # noqa: PLW0603 - the shadows read it, and attributes of an object take longer
    with _lock:
        if callback not in _callbacks:
            _callbacks = (*_callbacks, callback)
        _choose_flagged()


def stop_calling(callback: Callback) -> None:
    """Do not call ``callback`` any more. Idempotent."""
    global _callbacks  # noqa: PLW0603 - the shadows read it, and attributes of an object take longer
    with _lock:
        _callbacks = tuple(each for each in _callbacks if each != callback)
        _choose_flagged()


def begin_period() -> int:
    """Begin a new period of accesses, and return its number for :func:`accessed_since`."""
    global _period  # noqa: PLW0603 - the shadows read it, and attributes of an object take longer
    with _lock:
        _period += 1
        return _period


def last_access(owner: Any) -> int:
    """Return the period of the last watched access to the memory of a tensor or storage; 0 if there was none."""
    storage = _storage_of(owner)
    return max(getattr(storage, _READ, 0), getattr(storage, _WRITTEN, 0))


def accessed_since(owner: Any, period: int, *, writing: bool) -> bool:
    """Return whether memory was accessed since a period began; ``writing``: count only accesses that likely write."""
    return (getattr(_storage_of(owner), _WRITTEN, 0) if writing else last_access(owner)) >= period


def exempt_this_thread() -> None:
    """Call no callbacks on this thread from now on: a thread that captures must not wait for the capture to end."""
    _thread.exempt = True


def storage_address(owner: Any) -> int:
    """Return the address of a storage, or of a tensor's storage; 0 if it has no plain memory.

    For a DTensor, the address of its local tensor's storage.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():  # classes of users may refuse, or do something else
            storage = owner if isinstance(owner, torch.UntypedStorage) else untyped_storage(owner)
            return 0 if storage.device.type == "meta" else storage.data_ptr()  # torch warns for a fake one's
    except (NotImplementedError, RuntimeError):  # sparse, of a class that wraps others, or made up for tracing
        return storage_address(local_tensors([owner])[0]) if is_sharded(owner) else 0


def _storage_of(owner: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor (of a DTensor: its local tensor's), or a storage itself; None if there is none."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(owner, torch.UntypedStorage):
                return owner
            return untyped_storage(local_tensors([owner])[0] if is_sharded(owner) else owner)
    except (NotImplementedError, RuntimeError):
        return None


def _choose_flagged() -> None:
    global _flagged  # noqa: PLW0603 - the shadows read it, and attributes of an object take longer
    _flagged = _PLAIN if _watchers and not _callbacks else frozenset()


def _note(owner: Any, writes: bool) -> None:
    """Flag an access, and call the callbacks, where the short path in the shadows does not suffice."""
    if not _watchers:
        return  # another library wrapped this shadow, and put it back later
    if (storage := _storage_of(owner)) is not None:
        setattr(storage, _WRITTEN if writes else _READ, _period)
    if _callbacks and not getattr(_thread, "exempt", False):
        for callback in _callbacks:
            callback(owner)


def _flag_written(owner: Any) -> None:
    """Flag a tensor's memory as written, after an access that may have given it other memory than before."""
    if (storage := _storage_of(owner)) is not None:
        storage._pccheck_written = _period  # type: ignore[attr-defined]


def _replace_all() -> None:
    for cls, name in _PLACES:
        original: Any = getattr(cls, name)
        method = _writing if name in _WRITING else _reading
        if name == "numpy":
            shadow: Any = _numpy(original)
        elif name == "untyped_storage":
            shadow = _alone(original, _READ)
        elif cls is torch.UntypedStorage:
            shadow = _resizing(original)
        elif callable(original):
            shadow = method(original)
        else:
            get = _alone(original.__get__, _WRITTEN if name in _WRITING else _READ)
            shadow = property(get, _writing_value(original.__set__), doc=original.__doc__)
        _shadows.append((cls, name, shadow, cls.__dict__.get(name)))
        setattr(cls, name, shadow)


def _restore_all() -> None:
    while _shadows:
        cls, name, shadow, before = _shadows.pop()
        if cls.__dict__.get(name) is not shadow:
            continue  # another library wrapped this shadow, which now only calls torch
        if before is None:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


# The shadows are written out: a common one, or one that calls another function, takes too long. Keywords take long.


def _alone(original: Any, flag: str) -> Any:
    @wraps(original)
    def access(self: Any) -> Any:
        if type(self) in _flagged:
            try:
                setattr(untyped_storage(self), flag, _period)
            except RuntimeError:  # sparse, or inside a transform of torch.func
                _note(self, flag == _WRITTEN)
        else:
            _note(self, flag == _WRITTEN)
        return original(self)

    return access


def _numpy(original: Any) -> Any:
    @wraps(original)
    def access(self: Any, *, force: bool = False) -> Any:
        if type(self) in _flagged:
            try:
                untyped_storage(self)._pccheck_read = _period  # type: ignore[attr-defined]
            except RuntimeError:
                _note(self, False)
        else:
            _note(self, False)
        return original(self, force=force) if force else original(self)

    return access


def _reading(original: Any) -> Any:
    @wraps(original)
    def access(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if type(self) in _flagged:
            try:
                untyped_storage(self)._pccheck_read = _period  # type: ignore[attr-defined]
            except RuntimeError:
                _note(self, False)
        else:
            _note(self, False)
        return original(self, *arguments, **keywords) if arguments or keywords else original(self)

    return access


# Of an access that may give a tensor other memory, the memory afterwards is flagged: that before stays as it is.


def _writing_value(put: Any) -> Any:
    def access(self: Any, value: Any) -> None:
        if type(self) not in _flagged:
            _note(self, True)
        put(self, value)
        if type(self) in _flagged:
            try:
                untyped_storage(self)._pccheck_written = _period  # type: ignore[attr-defined]
            except RuntimeError:
                _flag_written(self)
        else:
            _flag_written(self)

    return access


def _writing(original: Any) -> Any:
    @wraps(original)
    def access(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if type(self) not in _flagged:
            _note(self, True)
        result = original(self, *arguments, **keywords) if keywords else original(self, *arguments)
        if type(self) in _flagged:
            try:
                untyped_storage(self)._pccheck_written = _period  # type: ignore[attr-defined]
            except RuntimeError:
                _flag_written(self)
        else:
            _flag_written(self)
        return result

    return access


def _resizing(original: Any) -> Any:
    """Return the shadow of a storage's method, which flags the storage itself."""

    @wraps(original)
    def access(self: Any, *arguments: Any) -> Any:
        if _callbacks:
            _note(self, True)
        result = original(self, *arguments)
        self._pccheck_written = _period
        return result

    return access
