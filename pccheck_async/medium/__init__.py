"""The writer: the only owner of file descriptors, and the one seam at which faults are injected."""

from pccheck_async.medium.base import File, FileSystemFacts, Part, Piece, Writer

__all__ = ["File", "FileSystemFacts", "Part", "Piece", "Writer"]
