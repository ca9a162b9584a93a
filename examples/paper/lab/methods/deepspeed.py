"""DeepSpeed's ``FastFileWriter``: torch.save into two buffers in turn, written by libaio past the page cache."""

from __future__ import annotations

import contextlib
import functools
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from examples.paper.lab.methods.base import Done, Handle, Method, State
from examples.paper.lab.methods.files import newest, remove_older, target
from examples.paper.lab.methods.torch_save import load_file

__all__ = ["DeepSpeedFast"]

_BUFFER_BYTES = 64 << 20
_BLOCK_BYTES, _DEPTH, _PARALLEL = 1 << 20, 8, 1
"""What DeepSpeed's configuration has where a user says nothing."""
_BUILD = 'python -c "from examples.paper.lab.methods.deepspeed import build; build()"'


class DeepSpeedFast(Method):
    """The writer of DeepSpeed's fast checkpoint engine by itself, with its defaults; training waits.

    It does not truncate, so each checkpoint is a new file, and a kill leaves a torn one as the newest. It flushes the
    file when it is closed. Its operators have to be compiled once, which takes minutes: see :func:`build`.
    """

    name = "DeepSpeed FastFileWriter"
    durable = resumable = True
    atomic = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        build()
        from deepspeed.ops.op_builder import AsyncIOBuilder

        operator = AsyncIOBuilder().load(verbose=False)
        self._handle: Any = operator.aio_handle(_BLOCK_BYTES, _DEPTH, False, True, _PARALLEL)
        self._buffer = self._handle.new_cpu_locked_tensor(_BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))

    @classmethod
    def why_not(cls) -> str | None:
        """Return what is missing: the package, libaio's headers, the compiled operators."""
        return _why_not()

    def save(self, state: State, step: int) -> Handle:
        """Write a new file."""
        from deepspeed.io import FastFileWriter, FastFileWriterConfig

        config = FastFileWriterConfig(dnvme_handle=self._handle, pinned_tensor=self._buffer)
        file = FastFileWriter(str(target(self.folder, step)), config)
        torch.save({"step": step, "state": state}, file)
        file.close()
        return Done()

    def load(self, into: State) -> int:
        """Read the newest file."""
        return load_file(newest(self.folder)[1], into)

    def tidy(self) -> None:
        """Delete older checkpoints."""
        remove_older(self.folder)

    def close(self) -> None:
        """Let the buffers go."""
        self._handle.free_cpu_locked_tensor(self._buffer)
        del self._buffer, self._handle


def build() -> None:
    """Compile DeepSpeed's operators where they are not yet, and load them."""
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed.io.fast_file_writer as module
        from deepspeed.ops.op_builder import AsyncIOBuilder
        from deepspeed.ops.op_builder.utils import UtilsBuilder

        # The writer loads this operator when it is made. It needs no GPU, but of what DeepSpeed offers without one it
        # is missing (version 0.19.8).
        module.UtilsBuilder = UtilsBuilder
        UtilsBuilder().load(verbose=False)
        AsyncIOBuilder().load(verbose=False)


@functools.cache
def _why_not() -> str | None:
    if find_spec("deepspeed") is None:
        return "deepspeed: not installed (pip install deepspeed, and libaio's headers)"
    built = [_library(name) for name in ("utils", "async_io", "pin_memory")]
    for path in built:
        if (lock := path.with_name("lock")).exists():  # and torch would wait for it, for ever
            return f"deepspeed: its operators are being compiled, or that was interrupted: delete {lock} then"
    if all(path.exists() for path in built):
        return None
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        return "deepspeed: its operator needs libaio's headers (Debian: libaio-dev) and a compiler"
    return f"deepspeed: its operators are not compiled yet, which takes minutes ({_BUILD})"


def _library(name: str) -> Path:
    """Where torch puts an operator that is compiled when it is first loaded."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"
