"""Reading what ``torch.save`` wrote, a file or one value in memory, without running code.

torch's restricted unpickler knows no numpy. Its arrays, scalars and dtypes are made here, by what this package knows of
their formats: numpy's own functions would trust what the pickle says.
"""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, Final

import numpy as np
import torch

from pccheck_async.errors import CheckpointError, CorruptStoreError, UnsupportedStateError
from pccheck_async.format import dtypes

__all__ = ["NotReadableError", "Section", "read_file", "read_value"]

_PIECE_BYTES: Final = 1 << 20
_WITH_NAMES: Final = (2, 6)
"""torch's version from which the unpickler can be told what stands for a name."""


class NotReadableError(Exception):
    """A pickle that cannot be read without running code; says of what."""


class Section(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readinto(self, buffer: Any) -> int:
        """Read what comes next."""
        view = memoryview(buffer)[: max(0, self._nbytes - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go elsewhere."""
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def tell(self) -> int:
        """Bytes before what comes next."""
        return self._at

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True


def read_value(data: Section, unchecked: set[str]) -> Any:
    """Return what was saved; why there were no checksums to compare it with is added to ``unchecked``.

    Raises NotReadableError; CorruptStoreError where the bytes are no whole file, or not what was written.
    """
    if data.read(2) != b"PK":  # older formats: up to torch 2.5 they let a tar archive run code (CVE-2025-32434)
        raise CorruptStoreError("it does not begin as torch.save begins")
    data.seek(0)
    with _damage_named(""):
        _check_archive(data, unchecked)
        data.seek(0)
        return _load(data, mapped=False)


def read_file(file: Path, unchecked: set[str]) -> Any:
    """Return what a file holds; its tensors are mapped, not read, unless they are compressed.

    All bytes are compared with their checksums first; why there were none to compare them with is added to
    ``unchecked``.

    Raises:
        UnsupportedStateError: some of it cannot be read without running code; names all of that.
        CorruptStoreError: it is no whole file of ``torch.save``, or not what was written.
    """
    try:
        with _damage_named(f"{file} is no whole file of torch.save: "):
            mapped = zipfile.is_zipfile(file)  # files from before torch 1.6 are not, and cannot be mapped
            if not mapped and _begins_as_zip(file):
                raise CorruptStoreError(f"{file} is no whole file of torch.save: its end is missing")
            if not mapped and tarfile.is_tarfile(file):
                raise UnsupportedStateError(  # up to torch 2.5 weights_only lets such a file run code (CVE-2025-32434)
                    f"{file} is a tar archive, as very old versions of torch saved; reading one may run code in it"
                )
            if mapped:
                mapped = not _check_archive(file, unchecked)
            else:
                unchecked.add("a file from before torch 1.6 has none")
            return _load(file, mapped=mapped)
    except NotReadableError as error:
        what = ", ".join(_unknown_names(file)) or error
        raise UnsupportedStateError(f"{file} cannot be read without running code in it: {what}") from error


def _check_archive(source: Any, unchecked: set[str]) -> bool:
    """Compare all bytes of a zip archive with its checksums, which torch does not; return whether any are compressed.

    torch maps what is compressed as if it were not.

    Raises zipfile.BadZipFile: something is not what was written.
    """
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        if any(member.header_offset < 0 for member in members):
            raise zipfile.BadZipFile("a member begins before the file")
        if any(member.CRC for member in members):
            for member in members:
                with archive.open(member) as opened:  # raises at the end
                    while opened.read(_PIECE_BYTES):
                        pass
        else:
            unchecked.add("torch.serialization.set_crc32_options(False) was in force when it was saved")
        return any(member.compress_type != zipfile.ZIP_STORED for member in members)


def _begins_as_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


@contextmanager
def _damage_named(where: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, NotReadableError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged pickles lead to anything
        raise CorruptStoreError(f"{where}{type(error).__name__}: {error}") from error


def _load(source: Any, *, mapped: bool) -> Any:
    try:
        with _numpy_known():
            return _plain(torch.load(source, map_location="cpu", weights_only=True, mmap=mapped))
    except UnpicklingError as error:
        reason = str(error.__context__ or error)  # torch puts advice around it
        unknown = re.search(r"GLOBAL (\S+)", reason)
        raise NotReadableError(unknown[1] if unknown else reason[:200]) from error


def _unknown_names(file: Path) -> list[str]:
    """Return all the classes and functions in the way, where this torch can list them."""
    with suppress(Exception), _numpy_known():
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return []


def _numpy_known() -> Any:
    if tuple(map(int, torch.__version__.split(".")[:2])) < _WITH_NAMES:
        return nullcontext()
    return torch.serialization.safe_globals(_STAND_INS)


class _Dtype:
    """A dtype of numpy: at first without its byte order, and a time without its unit."""

    def __init__(self, name: Any, *_: Any) -> None:
        self._name = name

    def __setstate__(self, state: Any) -> None:
        order, fields = state[1], state[2:5]
        if type(self._name) is not str or fields != (None, None, None):
            raise UnpicklingError(f"a dtype of numpy that is {str(self._name)[:50]}, with fields")
        unit = ""
        if len(state) > 8:
            letters, count, _, _ = state[8][1]
            unit = f"[{'' if count == 1 else int(count)}{letters.decode()}]"
        self._name = f"{order}{self._name}{unit}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Raises UnpicklingError where this package knows no such dtype."""
        try:
            return dtypes.numpy_dtype(str(self._name))
        except CorruptStoreError as error:
            raise UnpicklingError(str(error)) from None


class _Array:
    """An array of numpy."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype):
            raise UnpicklingError("an array of numpy of no dtype")
        order: Any = "F" if fortran is True else "C"
        self.array = np.ndarray(shape, dtype.dtype, memoryview(data), order=order).copy(order="K")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.ndarray((), dtype.dtype, memoryview(data))[()]


def _no_bytes() -> bytes:
    return b""


_MULTIARRAY: Final = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and from numpy 2
_STAND_INS: Final[list[Any]] = [
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    *((_reconstruct, f"{module}._reconstruct") for module in _MULTIARRAY),
    *((_scalar, f"{module}.scalar") for module in _MULTIARRAY),
    (_no_bytes, "builtins.bytes"),  # without arguments
    (frozenset, "builtins.frozenset"),
]


def _plain(value: Any) -> Any:
    """Return the value with numpy's objects in place of what stands for them."""
    match value:
        case _Array():
            return value.array
        case _Dtype():
            return value.dtype
        case OrderedDict():
            for key, item in value.items():
                value[key] = _plain(item)
            return value
        case dict() if type(value) in (dict, Counter):
            return type(value)({_plain(key): _plain(item) for key, item in value.items()})
        case list() | tuple() | set() | frozenset() if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(_plain, value))
        case _:
            return value
