"""Copy backends: how bytes get from the live state into staging buffers, and back."""

from pccheck_async.copying.base import CopyBackend, PackedPiece
from pccheck_async.copying.host import HostCopy

__all__ = ["CopyBackend", "HostCopy", "PackedPiece"]
