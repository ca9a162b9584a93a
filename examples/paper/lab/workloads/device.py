"""A slow device for the methods that can be given one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from examples.paper.lab.methods.base import Method, UnsupportedError
from examples.paper.lab.methods.pccheck import PCcheck
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import ThrottledWriter
from pccheck_async.transfer.operations import Operations

__all__ = ["SlowDevice"]


@dataclass(frozen=True, slots=True)
class SlowDevice:
    """Caps as cloud disks have them.

    Attributes:
        per_stream: Bytes per second of any one file, None for no cap.
        total: Bytes per second of all files, None for no cap.
        per_request: Bytes per second of any one request, None for no cap: what a device at the other end of a network
            reaches with one at a time. An engine has as many at a time as it has writers.
    """

    per_stream: float | None = None
    total: float | None = None
    per_request: float | None = None

    def open(self, method: type[Method], folder: Path, **options: Any) -> Method:
        """Open a method on this device.

        Args:
            method: Which.
            folder: Its folder.
            options: What else it takes; a cap per request needs ``writers``.

        Raises:
            UnsupportedError: it writes to the filesystem by itself. The kernel could cap all of a control group's
                writes to a disk (``io.max``), as root; one stream's it cannot, and the rows would not be comparable.
        """
        if not issubclass(method, PCcheck):
            raise UnsupportedError(f"{method.name} writes to the filesystem by itself: no cap per stream for it")
        if self.per_request is not None and not isinstance(options.get("writers"), int):
            raise ValueError("a cap per request needs the number of writers: writers=...")
        return method(folder, io=partial(self._throttled, options.get("writers")), **options)

    def _throttled(self, writers: int | None, path: str, operations: Operations) -> Medium:
        return ThrottledWriter(
            Files(path, operations),
            per_stream=self.per_stream,
            total=self.total,
            per_request=self.per_request,
            requests=writers if self.per_request is not None and writers else 1,
        )
