"""A slow device for the methods that can be given one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pccheck_async.bench.methods.base import Method, UnsupportedError
from pccheck_async.bench.methods.pccheck import PCcheck
from pccheck_async.operations.base import Operations
from pccheck_async.testing import ThrottledWriter
from pccheck_async.writer import Writer
from pccheck_async.writer.posix import PosixWriter

__all__ = ["SlowDevice"]


@dataclass(frozen=True, slots=True)
class SlowDevice:
    """Caps as cloud disks have them.

    Attributes:
        per_stream: Bytes per second of any one file, None for no cap.
        total: Bytes per second of all files, None for no cap.
    """

    per_stream: float | None = None
    total: float | None = None

    def open(self, method: type[Method], folder: Path) -> Method:
        """Open a method on this device.

        Raises:
            UnsupportedError: it writes to the filesystem by itself. The kernel could cap all of a control group's
                writes to a disk (``io.max``), as root; one stream's it cannot, and the rows would not be comparable.
        """
        if not issubclass(method, PCcheck):
            raise UnsupportedError(f"{method.name} writes to the filesystem by itself: no cap per stream for it")
        return method(folder, io=self._throttled)

    def _throttled(self, path: str, operations: Operations) -> Writer:
        return ThrottledWriter(PosixWriter(path, operations), per_stream=self.per_stream, total=self.total)
